"""TF_CONFIG's mistakes, each one line; ports really taken; workers as processes that come, come late, or do not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading

import pytest

from crankshaft.parts.clusters import discovery, rendezvous, tf_config
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host.tasks import Cluster, split
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWO = ["a:1", "b:2"]
ME = {"type": "worker", "index": 0}


def config(jobs, task=ME) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}


MISTAKES = {
    "not JSON": ({"TF_CONFIG": "{'cluster': 1}"}, ["TF_CONFIG=\"{'cluster': 1}\" is not JSON", "it looks like {"]),
    "nested too deep": ({"TF_CONFIG": "[" * 99999}, ["is not JSON (maximum recursion depth exceeded"]),
    "not an object": ({"TF_CONFIG": "[1]"}, ["'[1]' is not an object"]),
    "no cluster": ({"TF_CONFIG": '{"task": {}}'}, ["has no cluster, only task"]),
    "nothing": ({"TF_CONFIG": "{}"}, ["has no cluster, only nothing"]),
    "a cluster that is a list": (config(TWO), ["cluster=", "not an object of task types"]),
    "an empty cluster": (config({}), ["cluster is empty"]),
    "a job without tasks": (config({"worker": []}), ["cluster is empty"]),
    "a job that is not a list": (config({"worker": "a:1"}), ["worker='a:1'", "not a list"]),
    "parameter servers": (config({"worker": TWO, "ps": ["c:3"]}), ["'ps'", "use that, or leave ps out"]),
    "an evaluator": (config({"worker": TWO, "evaluator": ["c:3"]}), ["'evaluator'", "mode=eval"]),
    "a cluster that lacks tasks": (
        {"TF_CONFIG": json.dumps({"sparseCluster": {"worker": {"0": "a:1"}}, "task": {"type": "worker", "index": 0}})},
        ["sparseCluster", "enableDynamicWorker: false"],
    ),
    "an unknown job": (config({"wroker": TWO}), ["'wroker'", "use chief, worker"]),
    "two chiefs": (config({"chief": TWO}, {"type": "chief", "index": 0}), ["2 chiefs", "list one"]),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": {"worker": TWO}})}, ["has no task", "which of"]),
    "a task that is not an object": (config({"worker": TWO}, 1), ["task='1'", "not an object"]),
    "an unknown task type": (config({"worker": TWO}, {"type": "x", "index": 0}), ["type='x'", "chief or worker"]),
    "no task type": (config({"worker": TWO}, {"index": 0}), ["type='null'", "chief or worker"]),
    "a task of a list": (config({"worker": TWO}, {"type": ["worker"], "index": 0}), ["type=", "chief or worker"]),
    "a ps task": (config({"worker": TWO}, {"type": "ps", "index": 0}), ["type='ps'", "parameter_server"]),
    "an evaluator task": (config({"worker": TWO}, {"type": "evaluator", "index": 0}), ["type='evaluator'", "leave it"]),
    "a task of no job": (config({"worker": TWO}, {"type": "chief", "index": 0}), ["is a chief", "only worker", "add"]),
    "no index": (config({"worker": TWO}, {"type": "worker"}), ["has no index", "use 0 to 1"]),
    "an index in quotes": (config({"worker": TWO}, {"type": "worker", "index": "1"}), ["index='1'", "not an integer"]),
    "an index that is true": (config({"worker": TWO}, {"type": "worker", "index": True}), ["index='true'"]),
    "an index too large": (
        config({"worker": TWO}, {"type": "worker", "index": 2}),
        ["index=2", "2 of worker", "0 to 1"],
    ),
    "a negative index": (config({"worker": TWO}, {"type": "worker", "index": -1}), ["index=-1", "0 to 1"]),
    "an address that is a number": (config({"worker": [7]}), ["worker 0 is '7'", "'host:port'"]),
    "no port": (config({"worker": ["a:1", "b"]}), ["worker 1 is 'b'", "'host:port'"]),
    "a scheme": (config({"worker": ["grpc://a:1"]}), ["'grpc://a:1'", "without a scheme"]),
    "IPv6 without brackets": (config({"worker": ["fd00::1:2222"]}), ["'fd00::1:2222'", "'[IPv6]:port', with the br"]),
    "a port that is a word": (config({"worker": ["a:http"]}), ["'a:http'", "'host:port'"]),
    "port 0": (config({"worker": ["a:0"]}), ["'a:0'", "1 to 65535"]),
    "a port too large": (config({"worker": ["a:65536"]}), ["'a:65536'", "1 to 65535"]),
    "one address twice": (
        config({"worker": ["a:1", "b:2", "a:1"]}),
        ["worker 0 and worker 2 are both a:1", "own port"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_with_its_cure(mistake):
    environment, said = MISTAKES[mistake]
    with pytest.raises(UsageError) as error:
        tf_config.from_environment(environment)
    line = str(error.value)
    assert "\n" not in line
    assert "TF_CONFIG" in line
    assert [part for part in said if part not in line] == [], line


def test_chief_comes_first_whatever_the_order_in_the_object():
    found = tf_config.from_environment(config({"worker": TWO, "chief": ["c:3"]}, {"type": "worker", "index": 1}))
    assert found.addresses == (("chief", "c:3"), ("worker 0", "a:1"), ("worker 1", "b:2"))
    assert (found.index, found.task, found.address, found.is_chief, found.num_workers) == (
        2,
        "worker 1",
        "b:2",
        False,
        3,
    )
    assert found.peers == (("chief", "c:3"), ("worker 0", "a:1"))


@pytest.mark.parametrize("kind", ["chief", "master"])
def test_a_chief_is_called_master_by_some_services(kind):
    found = tf_config.from_environment(config({"worker": ["a:1"], "master": ["c:3"]}, {"type": kind, "index": 0}))
    assert (found.task, found.addresses) == ("chief", (("chief", "c:3"), ("worker 0", "a:1")))


def test_an_evaluator_outside_of_the_cluster_is_one_where_all_tasks_are_told_so():
    jobs = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["c:2"]}
    values = {"strategy": "auto", "num_ps": 0, "cluster_hosts": None, "task_index": None, "bind": None}

    def found(task: str, evaluator: bool):
        variables = config(jobs, {"type": task, "index": 0})
        return discovery.cluster_from_flags({}, {**values, "evaluator": evaluator}, variables)[1]

    evaluator, chief = found("evaluator", True), found("chief", True)
    assert (evaluator.task, evaluator.addresses) == ("evaluator", chief.addresses)
    assert [name for name, _ in chief.addresses] == ["chief", "worker 0", "ps 0", "evaluator"]
    assert [name for name, _ in found("chief", False).addresses] == ["chief", "worker 0", "ps 0"]
    with pytest.raises(UsageError, match="which its cluster lacks; give evaluator=true to all tasks"):
        found("evaluator", False)
    variables = config({"worker": ["a:1"]}, {"type": "evaluator", "index": 0})
    with pytest.raises(UsageError, match="leave it out, or give it --mode=eval --eval_checkpoint=all --follow"):
        discovery.cluster_from_flags({}, {**values, "evaluator": False}, variables)
    unset = discovery.cluster_from_flags({}, {**values, "evaluator": False}, {"TF_CONFIG": " { }"})
    assert unset == ("auto", None)


def test_worker_0_is_the_chief_where_none_is_named():
    for index in (0, 1):
        found = tf_config.from_environment(config({"worker": TWO}, {"type": "worker", "index": index}))
        assert found.index == index
        assert found.is_chief == (index == 0)


def test_host_may_be_an_ipv6_number():
    assert split("[::1]:22") == ("::1", 22)
    assert split("::1:22") == ("", 0)


def on_this_host(ports: list[int], index: int = 0) -> Cluster:
    return Cluster(tuple((f"worker {i}", f"localhost:{port}") for i, port in enumerate(ports)), index)


@pytest.mark.parametrize("where", ["", "127.0.0.1"])
def test_own_port_in_use_is_named(where):
    with socket.create_server((where, 0)) as taken:
        mine = on_this_host([taken.getsockname()[1]])
        with pytest.raises(UsageError, match=f"worker 0, this process, is at {mine.address}.*is in use"):
            rendezvous.check_bindable(mine)
    rendezvous.check_bindable(mine)


@pytest.mark.holds("`--bind=ADDRESS` is where")
def test_bind_is_the_one_address_at_which_a_task_waits_for_its_peers():
    (port,) = free_ports(1)
    mine = dataclasses.replace(on_this_host([port]), bind="127.0.0.2")
    with rendezvous.Rendezvous(mine):
        assert [rendezvous.answers(f"127.0.0.{end}:{port}") for end in (1, 2)] == ["", "starting"]
    with pytest.raises(UsageError, match=r"^bind=192.0.2.1 is not an address of this host"):
        rendezvous.check_bindable(dataclasses.replace(mine, bind="192.0.2.1"))


def test_port_that_lingers_is_free():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("localhost", port))
        server.accept()[0].close()  # whoever closes first holds the port in TIME_WAIT
        client.close()
    with socket.socket() as naive, pytest.raises(OSError, match="in use"):
        naive.bind(("", port))
    rendezvous.check_bindable(on_this_host([port]))


@pytest.mark.parametrize(("host", "said"), [("192.0.2.1", "not this host"), ("nowhere.invalid", "not known")])
def test_own_address_elsewhere_is_warned_of(host, said, caplog):
    """A container's mapped port or a cluster's name may be no address of the host, and right all the same."""
    # 192.0.2.0/24 and .invalid are kept for documents (RFC 5737, RFC 2606): no host has them.
    (port,) = free_ports(1)
    with caplog.at_level("WARNING", logger="crankshaft"):
        rendezvous.check_bindable(Cluster((("worker 0", f"{host}:{port}"),), 0))
    (record,) = caplog.records
    assert re.match(
        rf"TF_CONFIG's worker 0, this process, is at {host}:{port}, .*{said}.*correct the task's index",
        record.getMessage(),
    )


def test_workers_meet_at_addresses_that_are_mapped_to_them():
    """Each knows itself by a name that only the others can follow; its port is what it listens at."""
    ports = free_ports(2)
    tasks = tuple((f"worker {i}", f"localhost:{port}") for i, port in enumerate(ports))
    mapped = (("worker 0", f"worker-0.nowhere.invalid:{ports[0]}"), tasks[1])
    rendezvous.check_bindable(mine := Cluster(mapped, 0))
    with rendezvous.Rendezvous(Cluster(mapped, 1)), rendezvous.Rendezvous(mine) as peers:
        peers.wait(PATIENCE)


WAIT = """
import sys, time
from crankshaft.parts.clusters import rendezvous
from crankshaft.runner.host.tasks import Cluster
ports, index, delay, timeout = eval(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
time.sleep(delay)
tasks = tuple((f"worker {i}", f"localhost:{port}") for i, port in enumerate(ports))
try:
    with rendezvous.Rendezvous(Cluster(tasks, index)) as peers:
        peers.wait(timeout)
        time.sleep(0.3 * index)  # TensorFlow is imported
        peers.wait(timeout, ready=True)
        time.sleep(1.0)  # TensorFlow's server from here on
except rendezvous.ClusterError as error:
    sys.exit(str(error))
"""


def come(ports, delays, timeout) -> list[tuple[int, str]]:
    """(exit code, what it said) of workers that come after so many seconds, counted from when all are ready; those that
    never do have None."""
    here = {
        index: subprocess.Popen(
            [sys.executable, "-c", WAIT, repr((ports, index, delay, timeout))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, delay in enumerate(delays)
        if delay is not None
    }
    try:
        assert [process.stdout.readline() for process in here.values()] == ["ready\n"] * len(here)
        for process in here.values():
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate(timeout=PATIENCE)[1].strip() for process in here.values()]
    finally:
        for process in here.values():
            process.kill()
            process.wait()
    return [(process.returncode, line) for process, line in zip(here.values(), said, strict=True)]


def test_workers_that_come_late_are_awaited():
    assert come(free_ports(3), [0.0, 1.0, 0.5], PATIENCE) == [(0, "")] * 3


def test_workers_that_do_not_come_are_named_by_all_who_did():
    # The first gives up before the second does: it did come, so the second must not name it.
    ports = free_ports(3)
    line = f"worker 2 (localhost:{ports[2]}) did not come within cluster_timeout_seconds=2; start it, or look at"
    for code, said in come(ports, [0.0, 0.3, None], 2.0):
        assert code == 1
        assert said.startswith(line)


def test_a_task_that_waits_says_once_for_whom(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_LOG_AFTER_SECONDS", 1.0)  # the later, the longer it waits for an answer
    ports = free_ports(3)
    third = f"worker 2 (localhost:{ports[2]}) to come, up to cluster_timeout_seconds=1.5"
    with (
        caplog.at_level("WARNING", logger="crankshaft"),
        rendezvous.Rendezvous(on_this_host(ports, 1)),
        rendezvous.Rendezvous(on_this_host(ports)) as first,
        pytest.raises(rendezvous.ClusterError),
    ):
        first.wait(1.5)
    assert [record.getMessage() for record in caplog.records] == [f"worker 0 waits for {third}"]


@pytest.fixture
def patient(monkeypatch):
    """A peer's first answer may take its time: the machine may be busy."""
    monkeypatch.setattr(rendezvous, "_FIRST_CONNECT_SECONDS", PATIENCE)
    monkeypatch.setattr(rendezvous, "_LEFT_SECONDS", PATIENCE)


def test_worker_that_left_before_the_last_came_is_named(patient):
    ports = free_ports(3)
    with rendezvous.Rendezvous(on_this_host(ports)) as peers:
        for comes, line in (
            (1, r"^worker 2 \(.*\) did not come"),
            (2, r"^worker 1 \(.*\) came, left, and did not come"),
        ):
            with (
                rendezvous.Rendezvous(on_this_host(ports, comes)),
                pytest.raises(rendezvous.ClusterError, match=line),
            ):
                peers.wait(0.0)  # calls each once


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"], ids=["nothing", "something else"])
def test_what_listens_at_a_peers_port_and_is_no_task_is_named_in_time(says):
    own, other = free_ports(2)
    with socket.create_server(("", other)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].send(says), daemon=True).start()
        line = r"^worker 1 \(.*\) did not come within cluster_timeout_seconds=0.5; it is stopped, or another program"
        with (
            rendezvous.Rendezvous(on_this_host([own, other])) as peers,
            pytest.raises(rendezvous.ClusterError, match=line),
        ):
            peers.wait(0.5)


def test_a_task_that_says_nothing_is_gone_after_a_while_and_one_that_speaks_is_not():
    """A stopped one: its kernel goes on to take callers."""
    silent, here = free_ports(2)
    with socket.create_server(("", silent)), rendezvous.Rendezvous(on_this_host([here])):
        presences = rendezvous.Presence(f"localhost:{silent}", 0.5), rendezvous.Presence(f"localhost:{here}", PATIENCE)
        assert [(presence.is_gone(), presence.came) for presence in presences] == [(True, False), (False, True)]


def test_a_worker_that_ends_while_it_starts_is_named_before_the_time_is_up(patient, monkeypatch):
    ports = free_ports(3)
    with rendezvous.Rendezvous(on_this_host(ports)) as peers:
        with (
            rendezvous.Rendezvous(on_this_host(ports, 1)),
            pytest.raises(rendezvous.ClusterError, match=r"^worker 2 \("),
        ):
            peers.wait(0.0)  # calls each once
        monkeypatch.setattr(rendezvous, "_LEFT_SECONDS", 0.3)
        with pytest.raises(
            rendezvous.ClusterError, match=rf"^worker 1 \(localhost:{ports[1]}\) came, and has not answered"
        ):
            peers.wait(PATIENCE)


def test_who_is_ready_waits_for_a_peer_that_is_not_and_for_the_chiefs_server():
    ports = free_ports(2)
    with rendezvous.Rendezvous(on_this_host(ports, 1)) as second:
        with rendezvous.Rendezvous(on_this_host(ports)) as first:
            first.wait(PATIENCE)
            with pytest.raises(rendezvous.ClusterError, match=r"^worker 1 \("):
                first.wait(0.3, ready=True)
            waiting = threading.Thread(target=second.wait, args=[PATIENCE], kwargs={"ready": True})
            waiting.start()
            first.wait(PATIENCE, ready=True)
        with socket.create_server(("", ports[0])) as server:
            server.settimeout(0.1)
            while waiting.is_alive():  # it may have waited for long enough, after the last "ready", by itself
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].sendall(bytes([0, 0, 12, 4, 0, 0, 0, 0, 0]))  # SETTINGS, by which gRPC begins


STRATEGY = """
import os, sys
from crankshaft.parts.clusters import discovery, rendezvous, tf_config
from crankshaft.runner.host.startup import quiet_startup
found = tf_config.from_environment(os.environ)
with rendezvous.Rendezvous(found) as peers:
    peers.wait(600)
with quiet_startup(quiet=True):
    import tensorflow as tf
with rendezvous.limited(2.0), quiet_startup():
    tf.distribute.MultiWorkerMirroredStrategy()
"""


def test_peer_that_dies_before_tensorflow_meets_it_ends_the_process():
    ports = free_ports(2)
    jobs = {"worker": [f"localhost:{port}" for port in ports]}
    with rendezvous.Rendezvous(on_this_host(ports, 1)):  # comes, and is not TensorFlow
        done = subprocess.run(
            [sys.executable, "-c", STRATEGY],
            cwd=ROOT,
            env={**os.environ, **config(jobs)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
