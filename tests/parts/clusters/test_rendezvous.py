"""Who answers at a peer's address, and what a task says of one that does not: each "host" is an address of loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import socket
import threading

import pytest

from crankshaft.parts.clusters import rendezvous
from crankshaft.parts.clusters.rendezvous import ClusterError, PortTakenError, RefusedError, Rendezvous
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.runner.failures import EXIT_PORT_TAKEN, UsageError
from crankshaft.runner.host import locks
from crankshaft.runner.host.tasks import Cluster, make_cluster
from tests.waiting import PATIENCE

SETTINGS = bytes([0, 0, 12, 4, 0, 0, 0, 0, 0])  # by which TensorFlow's server begins
STARTING = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])  # by which a task does that is not ready


def tasks(port: int, count: int = 2) -> tuple[tuple[str, str], ...]:
    return tuple((f"worker {i}", f"127.0.0.{i + 1}:{port}") for i in range(count))


def on_host(number: int, addresses, index: int, secret: bytes = b"") -> Cluster:
    """The cluster of a task that listens at a host's address, whatever its index says."""
    return Cluster(tuple(addresses), index, secret, bind=f"127.0.0.{number}")


@pytest.fixture
def port():
    return free_ports(1)[0]


def test_two_tasks_of_one_index_each_name_the_other(port):
    right, wrong = on_host(1, tasks(port), 0), on_host(2, tasks(port), 0)
    with Rendezvous(right) as here, Rendezvous(wrong) as there:
        host = socket.gethostname()
        line = (
            rf"^worker 0 \(.*\), this process on {host}, calls worker 1 \(127.0.0.2:{port}\), where worker 0, on {host}"
        )
        with pytest.raises(UsageError, match=line):
            here.wait(PATIENCE)
        with pytest.raises(
            UsageError, match=rf"is worker 0 at 127.0.0.1:{port}, where another task answers, on {host}"
        ):
            there.wait(PATIENCE)


def test_a_task_alone_with_anothers_index_does_not_take_itself_for_its_peer(port):
    with (
        Rendezvous(on_host(2, tasks(port), 0)) as there,
        pytest.raises(UsageError, match="this process itself answers"),
    ):
        there.wait(PATIENCE)


@pytest.mark.parametrize(
    "theirs",
    [
        on_host(2, [("worker 0", "127.0.0.3:9"), ("worker 1", "127.0.0.2:0")], 1),
        on_host(2, [("worker 0", "127.0.0.1:0"), ("worker 1", "127.0.0.2:0")], 1, b"a secret of theirs"),
    ],
    ids=["tasks", "secret"],
)
def test_a_task_of_another_job_at_a_peers_address_is_named(port, theirs):
    addresses = tuple((name, address.replace(":0", f":{port}")) for name, address in theirs.addresses)
    theirs = on_host(2, addresses, 1, theirs.secret)
    line = (
        r"calls worker 1 \(.*\), where worker 1 \(.*\) of another job or another list of tasks answers.*its own ports"
    )
    with Rendezvous(theirs), Rendezvous(on_host(1, tasks(port), 0)) as here, pytest.raises(UsageError, match=line):
        here.wait(PATIENCE)


def test_a_task_of_another_job_at_a_port_that_slurm_gave_is_absent_and_then_ends_the_job(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_LEFT_SECONDS", 0.2)
    ours, theirs = (dataclasses.replace(on_host(n, tasks(port), n - 1), job_id=f"a/{n}.0/") for n in (1, 2))
    with Rendezvous(theirs), Rendezvous(ours) as here:
        assert [reply.answer for reply in here.ask(PATIENCE).values()] == [""]
        line = rf"^worker 1 \(127.0.0.2:{port}\): a task of another job answers there; .* srun --resv-ports$"
        with pytest.raises(PortTakenError, match=line):
            here.wait(PATIENCE)
        presence = rendezvous.Presence(ours.peers[0][1], PATIENCE, ours.identity)
        assert (presence.is_gone(), presence.came) == (False, False)
        ours_there = dataclasses.replace(theirs, job_id=ours.job_id)
    with Rendezvous(ours_there), Rendezvous(ours) as here:
        here.wait(PATIENCE)


def test_a_port_that_slurm_gave_and_another_program_has_ends_the_task_so_that_its_job_is_requeued(port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTakenError, match=r"srun --resv-ports$") as error:
        rendezvous.check_bindable(dataclasses.replace(on_host(1, tasks(port), 0), job_id="a/7.0/"))
    assert error.value.exit_code == EXIT_PORT_TAKEN


def test_a_task_waits_for_its_port_if_another_program_has_taken_it_since_an_earlier_attempt(port):
    first = on_host(1, tasks(port), 0)
    again = dataclasses.replace(first, port_seconds=PATIENCE)
    with socket.create_server(("127.0.0.1", port)) as taken:
        with pytest.raises(UsageError, match="that port is in use"):
            rendezvous.check_bindable(first)
        with pytest.raises(ClusterError, match="another program took it between attempts"):
            rendezvous.check_bindable(dataclasses.replace(first, port_seconds=0.2))
        ends = threading.Timer(0.3, taken.close)
        ends.start()
        rendezvous.check_bindable(again)
        ends.join()


@pytest.mark.parametrize("index", [0, 1], ids=["a peer's index twice", "another job"])
def test_with_a_secret_a_stranger_at_a_peers_address_is_absent_and_named_in_the_end(port, index):
    theirs = on_host(2, tasks(port), index, b"a secret of ours" if index == 0 else b"a secret of theirs")
    ours = on_host(1, tasks(port), 0, b"a secret of ours")
    with Rendezvous(theirs), Rendezvous(ours) as here:
        with pytest.raises(ClusterError, match=r"^worker 1 .* did not come .* of another job or another list of tasks"):
            here.wait(0.5)
        presence = rendezvous.Presence(ours.peers[0][1], PATIENCE, ours.identity)
        assert (presence.is_gone(), presence.came) == (False, False)


def test_callers_that_are_silent_keep_no_other_waiting(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", PATIENCE)
    monkeypatch.setattr(rendezvous, "_MOST_CALLERS", 20)
    cluster = on_host(1, tasks(port), 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(Rendezvous(cluster))
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
        assert rendezvous.call(cluster.address, PATIENCE, cluster.identity).is_peers
        silent[-1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert silent[-1].makefile("rb").read() == STARTING
        assert silent[0].makefile("rb").read() == STARTING  # the oldest make way


def test_a_task_that_waits_for_the_lock_of_another_host_sees_there_who_has_its_index(port, tmp_path):
    with open(tmp_path / locks.NAMES.lock, "w") as held:
        held.write("7 elsewhere 0")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        right, wrong = on_host(1, tasks(port), 0), on_host(2, tasks(port), 0)
        # Nobody is there yet, or again, as after a loss: it waits.
        with (
            pytest.raises(locks.RunError, match="on host elsewhere"),
            locks.lock(str(tmp_path), None, 0.1, before_pause=Rendezvous(wrong).look),
        ):
            raise AssertionError
        line = rf"is worker 0 at 127.0.0.1:{port}, where another task answers"
        with (
            Rendezvous(right),
            pytest.raises(UsageError, match=line),
            locks.lock(str(tmp_path), None, PATIENCE, before_pause=Rendezvous(wrong).look),
        ):
            raise AssertionError


def test_each_beginning_of_an_answer_is_incomplete_and_no_other_byte_in_it_is_an_error(port):
    cluster = on_host(1, tasks(port), 0)
    with Rendezvous(cluster), socket.create_connection(("127.0.0.1", port)) as caller:
        answer = caller.recv(9)  # at once, as other programs that look for a server are answered
        caller.sendall(asked := rendezvous.question(f"127.0.0.1:{port}"))
        answer += caller.makefile("rb").read()
    for length in range(len(answer)):
        assert rendezvous.parse(answer[:length], cluster.identity, asked) is None, length
    reply = rendezvous.parse(answer, cluster.identity, asked)
    assert reply.is_peers
    assert not rendezvous.parse(answer, cluster.identity, rendezvous.question(cluster.address)).is_signed  # a replay
    assert (reply.answer, reply.is_signed, reply.note["task"]) == ("starting", True, "worker 0")
    for place in range(len(answer)):
        for byte in {answer[place] ^ bit for bit in (1, 2, 64, 128, 255)}:
            other = rendezvous.parse(answer[:place] + bytes([byte]) + answer[place + 1 :], cluster.identity, asked)
            # Its frames are not signed: another type of them, or length, may be read as the same note.
            assert other is None or not other.is_signed or place < 18, place
    assert [rendezvous.parse(SETTINGS[:length], b"", b"") for length in range(9)] == [None] * 9
    assert rendezvous.parse(SETTINGS, b"", b"").answer == "serving"


def test_a_server_that_was_there_before_its_task_could_come_is_anothers(port):
    with socket.create_server(("127.0.0.2", port)) as server, Rendezvous(on_host(1, tasks(port), 0)) as here:

        def serve():
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    server.accept()[0].sendall(SETTINGS)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(
            ClusterError, match=r"^worker 1 \(.*\) did not come .*; a task of another job, or of an earl"
        ):
            here.wait(1.0, new_attempt=True)
        server.shutdown(socket.SHUT_RDWR)


def test_spellings_of_one_address_are_one_address():
    names = [("worker 0", "GPU-1.:2222"), ("worker 1", "[FD00::0:1]:2222")]
    assert make_cluster("hosts", names, 0, {}).addresses == (("worker 0", "gpu-1:2222"), ("worker 1", "[fd00::1]:2222"))
    with pytest.raises(UsageError, match="worker 0 and worker 1 are both host1:2222"):
        make_cluster("hosts", [("worker 0", "host1:2222"), ("worker 1", "HOST1:2222")], 0, {})


def test_workers_around_servers_are_of_the_job_at_any_address_and_servers_are_not():
    job = (("chief", "a:1"), ("worker 0", "b:1"), ("ps 0", "c:1"))
    assert Cluster(job, 0).identity == Cluster((*job[::2], ("worker 7", "d:1")), 2).identity
    assert Cluster(job, 0).identity != Cluster((*job[:2], ("ps 0", "d:1")), 0).identity


def test_a_task_that_refuses_to_start_ends_those_that_wait_for_it(port):
    ended = []

    def wait() -> None:
        try:
            with Rendezvous(on_host(1, tasks(port), 0)) as here:
                here.wait(PATIENCE)
                here.wait(PATIENCE, ready=True)
        except UsageError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(UsageError, match=r"^no data here$"), rendezvous.refusing(on_host(2, tasks(port), 1)):
        raise UsageError("no data here")
    waiting.join()
    assert isinstance(ended[0], RefusedError)
    assert str(ended[0]) == f"worker 1 (127.0.0.2:{port}) has not started: no data here"


def test_tasks_are_asked_side_by_side():
    """Each of two answers only once the other is asked too."""
    asked = [threading.Event(), threading.Event()]
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in asked]

        def answer(index: int) -> None:
            with listeners[index].accept()[0] as caller:
                asked[index].set()
                if asked[1 - index].wait(PATIENCE):
                    caller.sendall(SETTINGS)

        for index in (0, 1):
            threading.Thread(target=answer, args=[index], daemon=True).start()
        peers = [("", f"127.0.0.1:{listener.getsockname()[1]}") for listener in listeners]
        assert [reply.answer for reply in rendezvous.call_all(peers, PATIENCE / 4).values()] == ["serving"] * 2


def test_a_host_that_nothing_may_enter_is_told_so_and_which_port_to_open(port):
    """Its peer does not reach it at 127.0.0.1, as it listens at 127.0.0.3 alone; it reaches its peer."""
    with Rendezvous(on_host(3, tasks(port), 0)) as closed, Rendezvous(on_host(2, tasks(port), 1)) as other:
        closed.wait(PATIENCE)
        with pytest.raises(ClusterError, match="did not come"):
            other.wait(0.3)
        line = (
            rf"; what it sends does not reach worker 0 \(127.0.0.1:{port}\), .*let TCP and UDP in here at port {port}"
        )
        with pytest.raises(ClusterError, match=line):
            closed.wait(0.3, ready=True)


def test_an_address_without_any_answer_may_be_behind_a_firewall(port):
    with socket.create_server(("127.0.0.2", port), backlog=0), contextlib.ExitStack() as stack:
        for _ in range(2):  # the queue is full: the kernel drops further calls
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.2", port))
        line = rf"^worker 1 \(.*no host answers there: start it, or let TCP and UDP pass to it at port {port}, and back"
        with Rendezvous(on_host(1, tasks(port), 0)) as here, pytest.raises(ClusterError, match=line):
            here.wait(0.3)
