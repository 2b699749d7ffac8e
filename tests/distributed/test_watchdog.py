"""Workers that are killed, stopped or stuck: the others end, and say whom to look at. Processes, sockets, signals."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import signal
import socket
import sys
import threading
import time

import pytest
import tensorflow as tf

from crankshaft.engine.strategies.options import default_timeout_seconds
from crankshaft.parts.launchers.resources import free_ports
from crankshaft.parts.workers import watchdog
from crankshaft.parts.workers.peers import Peers
from crankshaft.parts.workers.watchdog import Watchdog
from tests.waiting import PATIENCE, wait_until

WORKER = pathlib.Path(__file__).with_name("stuck_worker.py")
NEVER = 1000.0
STEP = 7


class Job:
    """Watchdogs of one job, each on its own port. What one says at its end is in `said`, and ends nothing; nor do they
    abort collectives, which would be those of all tests in this process. No timeout ends before `begin`."""

    def __init__(self, timeouts: list[float], arrived=None, missing: int = 0):
        workers = len(timeouts) + missing
        self.addresses = tuple(f"localhost:{port}" for port in free_ports(workers))
        self.said: dict[int, str] = {}
        self.ended = threading.Event()
        names = tuple(f"worker {worker}" for worker in range(workers))
        self.aborted: list[str] = []
        self.watchdogs = [
            Watchdog(
                worker,
                names,
                self.addresses,
                timeout,
                arrived=arrived and arrived[worker],
                end=self.note(worker),
                abort=self.aborted.append,
            )
            for worker, timeout in enumerate(timeouts)
        ]

    def note(self, worker: int):
        def end(line: str) -> None:
            self.said.setdefault(worker, line)
            self.ended.set()

        return end

    def __enter__(self) -> Job:
        self.stack = contextlib.ExitStack()
        for each in self.watchdogs:
            self.stack.enter_context(each)
        for each in self.watchdogs:  # what one sends counts for those who know it
            wait_until(lambda each=each: len(each.heard) == len(self.watchdogs) - 1)
            each.beat(STEP, factor=NEVER)
            each.beat(None, factor=NEVER)  # an evaluation's calls are of no step
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def begin(self, *steps: int | None) -> None:
        """Has each worker begin a step, or stay where it is; then, once worker 0 knows, its timeout counts."""
        beats = {other: 2 + (step is not None) for other, step in enumerate(steps) if other}
        for other in beats:
            if steps[other] is not None:
                self.watchdogs[other].beat(steps[other], factor=NEVER)
        heard = self.watchdogs[0].heard
        wait_until(lambda: all(heard[other].beats == number for other, number in beats.items()))
        self.watchdogs[0].beat(steps[0])

    def first_line(self, worker: int) -> str:
        assert self.ended.wait(PATIENCE)
        return self.said[worker]


class Looks:
    """A worker's arrivals: counts how often its watchdog looks at them, which is eight times within its timeout.

    If it `moves`, there is another arrival each time, however busy the machine is.
    """

    def __init__(self, moves: bool, arrived: int = 0):
        self.count, self._moves, self._arrived = 0, moves, arrived

    def __call__(self) -> int:
        self.count += 1
        return self._arrived + self._moves * self.count


@pytest.mark.parametrize(("timeout", "moves", "factor"), [(0.3, True, 1.0), (0.3, False, NEVER), (0.0, False, 1.0)])
def test_worker_that_moves_or_compiles_or_has_no_timeout_is_left_alone(timeout, moves, factor):
    looks = Looks(moves), Looks(moves)
    with Job([timeout, timeout], looks) as job:
        for watchdog in job.watchdogs:
            watchdog.beat(0, factor)
        most = max(each.count for each in looks) + (20 if timeout else 3)
        wait_until(lambda: job.said or min(each.count for each in looks) > most)
        assert job.said == {}


def test_worker_with_fewer_beats_is_named():
    with Job([0.8, NEVER, NEVER]) as job:
        job.begin(STEP + 50, None, STEP + 50)
        line = job.first_line(0)
    said = (
        rf"worker 1 \({job.addresses[1]}\) has not arrived at step {STEP + 50} for \d+ s \(it last began step {STEP}\)"
    )
    assert re.match(said, line)


def test_worker_without_data_is_named_though_it_has_as_many_beats():
    with Job([0.8, NEVER, NEVER], arrived=[lambda: 5, lambda: 5, lambda: 4]) as job:
        heard = job.watchdogs[0].heard
        wait_until(lambda: (heard[1].arrived, heard[2].arrived) == (5, 4))
        job.begin(STEP, STEP, STEP)
        line = job.first_line(0)
    assert line.startswith(
        f"worker 2 ({job.addresses[2]}) has not arrived where others wait, in the call from step 7 on"
    )


def test_stuck_worker_that_is_named_by_another_ends_too():
    with Job([0.8, 0.8]) as job:
        job.begin(STEP + 50, None)
        assert job.first_line(0).startswith("worker 1 (")
        wait_until(lambda: job.watchdogs[1].heard[0].lost == 1)
        job.watchdogs[1].beat(STEP)  # its own timeout counts from here
        wait_until(lambda: 1 in job.said)
        line = job.said[1]
    assert line.startswith(f"worker 1 ({job.addresses[1]}), this process, has not arrived")
    assert line.endswith(f"worker 0 ({job.addresses[0]}) noticed it")


def test_worker_that_moves_is_not_ended_by_what_another_says():
    looks = Looks(False), Looks(True, arrived=-10_000)  # far behind, and on its way
    with Job([0.4, 0.4], looks) as job:
        job.begin(STEP, None)
        assert job.first_line(0).startswith("worker 1 (")
        wait_until(lambda: job.watchdogs[1].heard[0].lost == 1)
        job.watchdogs[1].beat(STEP)
        most = looks[1].count + 12
        wait_until(lambda: 1 in job.said or looks[1].count > most)
        assert 1 not in job.said


def test_where_none_is_behind_none_is_named():
    with Job([0.5, NEVER]) as job:
        job.begin(STEP, STEP)
        assert "no worker is behind the others" in job.first_line(0)


def test_where_datagrams_do_not_travel_lines_say_so_at_the_start_and_the_end(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "_UNHEARD_SECONDS", 0.2)
    with caplog.at_level("WARNING", logger="crankshaft"), Job([0.5], missing=1) as job:
        wait_until(lambda: caplog.records)
        first = (
            f"no UDP heartbeat of worker 1 ({job.addresses[1]}) has come in 0.2 s: who is stuck or lost is noticed by"
        )
        assert caplog.records[0].getMessage().startswith(first)
        job.begin(STEP)
        line = job.first_line(0)
    assert f"nothing was ever heard of worker 1 ({job.addresses[1]}); let UDP through" in line


def test_worker_that_ended_by_its_own_error_is_named_with_it():
    with Job([0.8, NEVER]) as job:
        job.watchdogs[1].close("no space left on its disk")
        wait_until(lambda: job.watchdogs[0].heard[1].end_reason)
        job.begin(STEP)
        assert job.first_line(0) == f"worker 1 ({job.addresses[1]}) has ended: no space left on its disk"


def test_lost_peer_is_whom_the_first_to_notice_names():
    error = tf.errors.UnavailableError(None, None, "from remote target /job:worker/replica:0/task:2: closed")
    with Job([0.0, 0.0, 0.0]) as job:
        with contextlib.ExitStack() as stack:
            for address in (job.addresses[0], job.addresses[2]):  # TensorFlow's servers; worker 1's is gone
                stack.enter_context(socket.create_server(("", int(address.split(":")[1]))))
            line = job.watchdogs[2].explain_lost_peer(error)
        assert line.startswith(f"worker 1 ({job.addresses[1]}) is gone")
        job.watchdogs[2].close("LostPeerError: by whatever words its exception ended it")
        wait_until(lambda: job.watchdogs[0].heard[2].end_reason)  # it has ended as well, and TensorFlow names it
        assert job.watchdogs[0].explain_lost_peer(error) == line
        mismatch = "Collective ops is aborted by: Shape mismatch; /job:worker/replica:0/task:1"
        assert job.watchdogs[0].explain_lost_peer(tf.errors.InvalidArgumentError(None, None, mismatch)) is None


def test_a_clock_that_is_set_back_is_named_where_tensorflow_takes_workers_for_lost(monkeypatch):
    words = (
        "Collective ops is aborted by: Unexpected heartbeat request from an already-in-error task: /job:worker/task:0"
    )
    error, now = tf.errors.AbortedError(None, None, words), time.time
    with Job([0.0, 0.0]) as job:
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        sent = job.watchdogs[1].heard[0].number
        wait_until(lambda: job.watchdogs[1].heard[0].number > sent + 2)  # by then its thread has looked
        line = job.watchdogs[0].explain_lost_peer(error)
        assert line.startswith(f"the clock of worker 0 ({job.addresses[0]}) went back by 3,600 s")
        wait_until(lambda: job.watchdogs[1].heard[0].end_reason)
        assert job.watchdogs[1].explain_lost_peer(error) == f"worker 0 ({job.addresses[0]}) has ended: {line}"


def test_datagrams_of_others_are_left_aside():
    datagrams = [b"", b"\xff\xfe", b"[]", b"7", b'{"worker": 1}', b'{"job": 1, "worker": 1}', b"x" * 5000]
    addresses = tuple(f"localhost:{port}" for port in free_ports(2))
    peers = Peers(0, ("worker 0", "worker 1"), addresses)
    peers.open()
    with socket.socket(type=socket.SOCK_DGRAM) as stranger:
        for datagram in (*datagrams, b'{"worker": [1]}'):
            stranger.sendto(datagram, ("127.0.0.1", int(addresses[0].split(":")[1])))
    peers.listen(0.1)
    peers.close()
    assert peers.heard == {}


def test_default_is_off_in_a_debugger():
    before = sys.gettrace()
    try:
        sys.settrace(lambda *_: None)
        assert default_timeout_seconds() == 0
        sys.settrace(None)
        assert default_timeout_seconds() >= 300
    finally:
        sys.settrace(before)


def line(workers, worker: int) -> str:
    """The one line with which the worker ended, by itself."""
    code = workers.processes[worker].wait(timeout=PATIENCE)
    lines = [line for line in workers.output(worker).splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (1, 1), workers.output(worker)
    return lines[0].removeprefix("error: ")


def under_way(workers):
    workers.until(lambda: all("under way" in workers.output(worker) for worker in (0, 1)))
    return workers


def test_killed_worker_is_named_and_the_other_ends(start_workers):
    job = under_way(start_workers(2, WORKER, 60))
    job.programs[0].send(signal.SIGKILL)
    assert re.match(r"worker 0 \(localhost:\d+\) is gone: its process has ended", line(job, 1))


@pytest.mark.slow
def test_stopped_worker_is_named_and_the_other_ends(start_workers):
    job = under_way(start_workers(2, WORKER, 3))
    job.programs[1].send(signal.SIGSTOP)
    said = line(job, 0)
    job.end()
    assert re.match(r"worker 1 \(localhost:\d+\) has not answered for \d+ s .*: it is stopped", said)


@pytest.mark.slow
def test_worker_in_an_endless_input_function_is_named_and_shows_where(start_workers):
    job = start_workers(2, WORKER, 2, 1234)
    said = [line(job, worker) for worker in (0, 1)]
    # Whoever sees it first says it first; either way both know who it was.
    assert all(re.match(r"worker 1 \(localhost:\d+\)", each) for each in said), said
    assert "this process, has not arrived" in said[1]
    assert "in read_forever" in job.output(1)


@pytest.mark.parametrize("is_within", [True, False])
def test_who_has_the_port_of_a_watch_is_named_if_it_is_this_process(caplog, is_within):
    (port,) = free_ports(1)
    watch = functools.partial(Watchdog, 0, ("worker 0",), (f"127.0.0.1:{port}",), NEVER)
    with contextlib.ExitStack() as stack:
        if is_within:
            stack.enter_context(watch())
        else:
            other = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            other.bind(("127.0.0.1", port))
        stack.enter_context(watch())
    assert ("is a guess; the run around this one has it" in caplog.text) == is_within
    assert ("is a guess; free it" in caplog.text) != is_within


HOLD = """
import ctypes
from crankshaft.parts.workers.watchdog import Watchdog
def hold_the_lock():
    ctypes.PyDLL(None).sleep(3600)  # calls through PyDLL keep Python's lock
with Watchdog(0, ("worker 0",), ("localhost:0",), 1.0) as watchdog:
    watchdog.beat(0)
    time_for_the_thread_to_see_it = ctypes.CDLL(None).sleep(1)
    hold_the_lock()
"""


@pytest.mark.slow
def test_library_that_never_lets_go_of_the_lock_ends_with_its_stack(start_workers):
    job = start_workers(1, "-c", HOLD)
    assert job.processes[0].wait(timeout=PATIENCE) == 1
    assert "in hold_the_lock" in job.output(0)
