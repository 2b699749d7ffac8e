"""The agents of a job agree on the workers of an attempt: each here in a thread, on ports of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import pytest

from crankshaft.parts.clusters.rendezvous import ClusterError, PreemptedError, Rendezvous
from crankshaft.parts.elastic import members
from crankshaft.parts.elastic.members import Members, is_waiting
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.runner.failures import EXIT_REGROUP, UsageError
from crankshaft.runner.host.locks import LockedRunDir
from crankshaft.runner.host.tasks import Cluster
from tests.waiting import PATIENCE, wait_until

NEVER, SOON = PATIENCE, 0.3


class Job:
    """The agents of some workers, of which attempts begin and end; a batch of 12 divides over 1, 2, 3 or 4 workers."""

    def __init__(self, run_dir, workers: int, secret: bytes = b""):
        names = [(f"worker {n}", f"localhost:{port}") for n, port in enumerate(free_ports(workers))]
        self.clusters = [Cluster(tuple(names), n, secret) for n in range(workers)]
        self.run_dir = str(run_dir)
        self.stopped = threading.Event()
        self.noticed: set[int] = set()  # workers whose hosts have a notice of preemption
        self.agreed: dict = {}  # by worker: its cluster, or an error
        self.agents: dict[int, Members] = {}
        self._threads: list[threading.Thread] = []

    def arrive(self, *workers: int, timeout: float = NEVER, least: int = 1) -> None:
        """These workers come to the rendezvous, each by the agent that it has had, if any.

        The first of them comes last, and decides; `timeout` is its own. So the others are there by then, however busy
        the machine is.
        """

        def agree(worker: int) -> None:
            seconds = timeout if worker == min(workers) else NEVER
            args = self.clusters[worker], self.run_dir, least, seconds, lambda number: 12 % number == 0
            agent = self.agents.setdefault(worker, Members(*args))
            try:
                agreed = agent.agree(lambda: self.stopped.is_set() or worker in self.noticed)
                if worker in self.noticed:
                    agent.leave()
                self.agreed[worker] = agreed
            except Exception as error:
                self.agreed[worker] = error

        for worker in sorted(workers, reverse=True):
            self.agreed.pop(worker, None)
            self._threads.append(threading.Thread(target=agree, args=[worker]))
            self._threads[-1].start()
            if worker not in self.noticed:
                wait_until(lambda: worker in self.agreed or self.is_waiting(worker))  # noqa: B023

    def is_waiting(self, worker: int, members=()) -> bool:
        cluster = self.clusters[worker]
        return is_waiting(cluster.address, cluster.identity, members)

    def wait(self, *workers: int) -> list:
        wait_until(lambda: all(worker in self.agreed for worker in workers), shows=lambda: str(self.agreed))
        return [self.agreed[worker] for worker in workers]

    def attempt(self, *workers: int) -> None:
        """Waits until these are the members of an attempt, and no others."""
        names = [f"worker {worker}" for worker in workers]
        for rank, cluster in enumerate(self.wait(*workers)):
            assert [name for name, _ in cluster.addresses] == names
            assert (cluster.index, cluster.is_chief, cluster.lock is not None) == (rank, rank == 0, rank == 0)
            assert len(cluster.absent) == len(self.clusters) - len(workers)

    def fail(self) -> None:
        """The attempt ends, and its chief's lock is free."""
        for agreed in self.agreed.values():
            if isinstance(agreed, Cluster) and agreed.lock:
                agreed.lock.release()

    def end(self) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join()
        self.fail()


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "_GRACE_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:

        def make(workers: int, secret: bytes = b"") -> Job:
            made = Job(tmp_path, workers, secret)
            stack.callback(made.end)
            return made

        yield make


def test_workers_that_do_not_return_are_left_out_until_they_do_even_the_chief(job):
    three = job(3)
    three.arrive(0, 1, 2)
    three.attempt(0, 1, 2)
    three.fail()  # and the host of worker 0 is lost
    three.agents.clear()
    three.arrive(1, 2, timeout=SOON)
    three.attempt(1, 2)
    three.arrive(0)  # it returns, and waits while the others run
    wait_until(lambda: three.is_waiting(0))
    assert 0 not in three.agreed
    three.fail()
    three.arrive(1)
    wait_until(lambda: three.is_waiting(1))
    assert 1 not in three.agreed  # worker 2 was in the last attempt, so it is awaited
    three.arrive(2)
    three.attempt(0, 1, 2)


@pytest.mark.thorough
def test_who_is_known_to_be_away_is_not_awaited_again(job):
    """Not even by an agent that was away itself, which hears it of the other."""
    three = job(3)
    three.arrive(0, 1, timeout=SOON)
    three.attempt(0, 1)
    three.fail()
    del three.agents[0]
    three.arrive(0, 1, timeout=NEVER)
    three.attempt(0, 1)


@pytest.mark.thorough
@pytest.mark.holds("a peer, in a job with `CRANKSHAFT_JOB_SECRET`")
def test_with_a_secret_a_stranger_at_the_port_of_a_worker_that_is_away_is_not_heard(job):
    """It answers as an agent that waits, and as a task that has found a mistake, without the job's secret."""
    three = job(3, b"a secret of sixteen")
    stranger = dataclasses.replace(three.clusters[2], secret=b"")
    with Rendezvous(stranger):
        three.arrive(0, 1, timeout=SOON)
        three.attempt(0, 1)
    with Rendezvous(stranger) as there:
        there.announce({"absent": [], "misses": [], "refuses": "nothing"})
        assert not three.is_waiting(2)  # so no attempt ends to include it
        three.fail()
        three.arrive(0, 1)
        three.attempt(0, 1)


def test_the_largest_number_that_divides_the_batch_continues(job):
    five = job(6)
    five.arrive(0, 1, 3, 4, 5, timeout=SOON)
    five.attempt(0, 1, 3, 4)
    wait_until(lambda: five.is_waiting(5))  # one too many is not lost


@pytest.mark.thorough
def test_others_wait_for_further_notices_of_preemption_and_no_such_worker(job, monkeypatch):
    monkeypatch.setattr(members, "_NOTICE_SECONDS", NEVER)
    monkeypatch.setattr(members, "_GRACE_SECONDS", NEVER)  # nobody leaves before the others know
    four = job(4)
    four.arrive(0, 1, 2, 3, least=2)
    four.attempt(0, 1, 2, 3)
    four.fail()
    four.noticed = {0}
    four.arrive(0, 1, 2, 3)
    assert four.wait(0) == [None]
    four.noticed = {0, 1}
    assert four.wait(1) == [None]
    assert four.agreed.keys() == {0, 1}
    monkeypatch.setattr(members, "_NOTICE_SECONDS", 0.5)
    four.attempt(2, 3)
    four.fail()
    four.noticed = {2}
    four.arrive(2, 3)
    assert four.wait(2, 3) == [None, None]  # one is too few: it ends, too, and saves what is in memory
    assert (four.agents[2].is_left, four.agents[3].is_left) == (False, True)


def test_workers_leave_at_once_if_all_have_a_notice(job, monkeypatch):
    monkeypatch.setattr(members, "_GRACE_SECONDS", NEVER)
    three = job(3)
    three.arrive(0, 1, 2)
    three.attempt(0, 1, 2)
    three.fail()
    three.noticed = {0, 1, 2}
    three.arrive(0, 1, 2)
    assert three.wait(0, 1, 2) == [None, None, None]


def test_a_task_that_starts_does_not_wait_for_a_worker_that_leaves(job):
    two = job(2)
    with Rendezvous(two.clusters[1]) as leaving, Rendezvous(two.clusters[0]) as task:
        leaving.announce({"leaves": True})
        with pytest.raises(PreemptedError, match=r"worker 1 \(localhost:") as raised:
            task.wait(NEVER)
    assert raised.value.exit_code == EXIT_REGROUP  # the agents agree again; not a failure


def test_two_halves_of_a_network_do_not_both_continue(job):
    """Neither half reaches the other, at whose addresses nobody is; both have run_dir, whose lock is the first's."""
    halves = {(0, 1): job(4), (2, 3): job(4)}
    for workers, half in halves.items():
        half.arrive(*workers, timeout=SOON)
    agreed = {workers: half.wait(workers[0])[0] for workers, half in halves.items()}
    (continues,) = [workers for workers, each in agreed.items() if isinstance(each, Cluster)]
    halves.pop(continues).attempt(*continues)
    ((cut_off, half),) = halves.items()
    assert type(agreed[cut_off]) is ClusterError
    assert cut_off[1] not in half.agreed


def test_workers_that_do_not_reach_each_other_are_not_in_one_attempt(job, tmp_path):
    """The first reaches both others, which do not reach each other; the smaller side waits, and is not called."""
    four = job(4)
    addresses = [cluster.address for cluster in four.clusters]
    agent = Members(four.clusters[0], str(tmp_path), 1, NEVER, lambda number: True)
    for misses, connected in (
        ({1: [], 2: []}, [0, 1, 2]),
        ({1: [2], 2: [1]}, [0, 1]),
        ({1: [2], 2: []}, [0, 1]),  # one way is enough
        ({1: [0], 2: [0], 3: [0]}, [1, 2, 3]),
        ({1: [3], 2: [3]}, [0, 1, 2]),  # the last is away
    ):
        notes = {number: {"misses": [addresses[other] for other in others]} for number, others in misses.items()}
        assert agent.connected(notes) == connected
    with Rendezvous(four.clusters[2]) as waiting:
        waiting.announce({"absent": [], "misses": [addresses[1]]})
        assert [four.is_waiting(2, [("", addresses[other])]) for other in (0, 1)] == [True, False]


def test_a_lock_that_does_not_hold_on_all_hosts_is_refused(job, tmp_path):
    """Each has a folder of its own, as where flock holds on one host alone."""
    two = job(2)
    (tmp_path / "other").mkdir()
    args = two.clusters[1], str(tmp_path / "other"), 1, NEVER, lambda number: True
    two.agents[1] = Members(*args)
    two.arrive(0, 1)
    (error,) = two.wait(1)
    assert isinstance(error, UsageError)
    assert "flock holds on all hosts" in error.message


def test_too_few_end_with_a_line_and_a_lock_that_another_holds_too(job, tmp_path):
    three = job(3)
    three.arrive(1, timeout=SOON, least=2)
    (error,) = three.wait(1)
    assert isinstance(error, ClusterError)
    assert "worker 0 (localhost:" in error.message
    assert "1 of 3 workers are here" in error.message
    held = LockedRunDir(str(tmp_path))
    held.acquire()
    two = job(2)
    two.arrive(0, 1)
    wait_until(lambda: all(map(two.is_waiting, (0, 1))))
    held.release()
    two.attempt(0, 1)


def test_time_counts_only_while_no_attempt_runs(job, tmp_path):
    two, running = job(2), LockedRunDir(str(tmp_path))
    with Rendezvous(two.clusters[0]):  # its task is here, without its agent
        running.acquire()
        two.arrive(1, timeout=SOON)
        wait_until(lambda: two.is_waiting(1))
        time.sleep(6 * SOON)
        assert 1 not in two.agreed
        running.release()
        two.attempt(1)  # another program is at the port, or a task that hangs
