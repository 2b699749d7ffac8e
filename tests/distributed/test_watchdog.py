"""Workers that are killed, stopped or stuck: the others end, and say whom to look at. Processes, sockets, signals."""

from __future__ import annotations

import contextlib
import pathlib
import re
import signal
import socket
import sys
import threading
import time

import pytest
import tensorflow as tf

from crankshaft.engine.health.peers import Peers
from crankshaft.engine.health.watchdog import Watchdog, default_timeout_seconds
from tests.waiting import PATIENCE, wait_until

WORKER = pathlib.Path(__file__).with_name("stuck_worker.py")
NEVER = 1000.0
STEP = 7


def free_addresses(count: int) -> tuple[str, ...]:
    """Addresses whose port is free for TCP and for UDP."""
    with contextlib.ExitStack() as stack:
        found = []
        while len(found) < count:
            server = stack.enter_context(socket.create_server(("", 0)))
            with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as udp:
                udp.bind(("", server.getsockname()[1]))
                found.append(f"localhost:{server.getsockname()[1]}")
        return tuple(found)


class Job:
    """Watchdogs of one job, each on its own port. What one says at its end is in `said`, and ends nothing; nor do they
    abort collectives, which would be those of all tests in this process."""

    def __init__(self, workers: int, timeouts: list[float], arrived=None):
        self.addresses = free_addresses(workers)
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
        for watchdog in self.watchdogs:
            self.stack.enter_context(watchdog)
        for watchdog in self.watchdogs:  # what one sends counts for those who know it
            wait_until(lambda watchdog=watchdog: len(watchdog.silent(-1.0)) == len(self.watchdogs) - 1)
            watchdog.beat(STEP)
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def first_line(self, worker: int) -> str:
        assert self.ended.wait(PATIENCE)
        return self.said[worker]


def keep_beating(watchdogs, until: threading.Event) -> None:
    while not until.wait(0.02):
        for watchdog in watchdogs:
            watchdog.beat(STEP)


def test_worker_that_moves_is_in_its_longer_first_call_or_has_no_timeout_is_left_alone():
    stop = threading.Event()
    with Job(2, [3.0, 3.0]) as moves, Job(2, [0.3, 0.3]) as begins, Job(2, [0.0, 0.0]) as unlimited:
        for watchdog in begins.watchdogs:
            watchdog.beat(0, factor=40.0)
        thread = threading.Thread(target=keep_beating, args=(moves.watchdogs, stop), daemon=True)
        thread.start()
        time.sleep(6.5)
        found = [job.said for job in (moves, begins, unlimited)]
        stop.set()
        thread.join()
    assert found == [{}, {}, {}]


def test_worker_with_fewer_beats_is_named():
    with Job(3, [0.8, NEVER, NEVER]) as job:
        for ahead in (0, 2):
            job.watchdogs[ahead].beat(STEP + 50)
        line = job.first_line(0)
    said = (
        rf"worker 1 \({job.addresses[1]}\) has not arrived at step {STEP + 50} for \d+ s \(it last began step {STEP}\)"
    )
    assert re.match(said, line)


def test_worker_without_data_is_named_though_it_has_as_many_beats():
    with Job(3, [0.8, NEVER, NEVER], arrived=[lambda: 5, lambda: 5, lambda: 4]) as job:
        line = job.first_line(0)
    assert line.startswith(
        f"worker 2 ({job.addresses[2]}) has not arrived where others wait, in the call from step 7 on"
    )


def test_stuck_worker_that_is_named_by_another_ends_too():
    with Job(2, [0.8, 1.5]) as job:
        job.watchdogs[0].beat(STEP + 50)
        assert job.first_line(0).startswith("worker 1 (")
        wait_until(lambda: 1 in job.said)
        line = job.said[1]
    assert line.startswith(f"worker 1 ({job.addresses[1]}), this process, has not arrived")
    assert line.endswith(f"worker 0 ({job.addresses[0]}) noticed it")


def test_worker_that_moves_is_not_ended_by_what_another_says():
    with Job(2, [0.4, 3.0]) as job:
        stop = threading.Event()
        for _ in range(2):
            job.watchdogs[0].beat(STEP + 50)
        thread = threading.Thread(target=keep_beating, args=(job.watchdogs[1:], stop), daemon=True)
        thread.start()
        assert job.first_line(0)
        time.sleep(0.7)
        stop.set()
        thread.join()
    assert 1 not in job.said


def test_where_none_is_behind_none_is_named():
    with Job(2, [0.5, NEVER]) as job:
        assert "no worker is behind the others" in job.first_line(0)


def test_where_datagrams_do_not_travel_the_line_says_so():
    job = Job(2, [0.5, NEVER])
    job.watchdogs.pop()
    with job:
        line = job.first_line(0)
    assert f"nothing was ever heard of worker 1 ({job.addresses[1]}); let UDP through" in line


def test_worker_that_ended_by_its_own_error_is_named_with_it():
    with Job(2, [0.8, NEVER]) as job:
        wait_until(lambda: job.watchdogs[0].silent(0))  # it was heard
        job.watchdogs[1].close("no space left on its disk")
        assert job.first_line(0) == f"worker 1 ({job.addresses[1]}) has ended: no space left on its disk"


def test_lost_peer_is_whom_the_first_to_notice_names():
    error = tf.errors.UnavailableError(None, None, "from remote target /job:worker/replica:0/task:2: closed")
    with Job(3, [0.0, 0.0, 0.0]) as job:
        with contextlib.ExitStack() as stack:
            for address in (job.addresses[0], job.addresses[2]):  # TensorFlow's servers; worker 1's is gone
                stack.enter_context(socket.create_server(("", int(address.split(":")[1]))))
            line = job.watchdogs[2].explain_lost_peer(error)
        assert line.startswith(f"worker 1 ({job.addresses[1]}) is gone")
        job.watchdogs[2].close("LostPeerError: by whatever words its exception ended it")
        # By now worker 2 has ended as well, and TensorFlow names it.
        assert job.watchdogs[0].explain_lost_peer(error) == line
        assert job.watchdogs[0].explain_lost_peer(tf.errors.InvalidArgumentError(None, None, "task:1")) is None


def test_datagrams_of_others_are_left_aside():
    datagrams = [b"", b"\xff\xfe", b"[]", b"7", b'{"worker": 1}', b'{"job": 1, "worker": 1}', b"x" * 5000]
    addresses = free_addresses(2)
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
    job.send(0, signal.SIGKILL)
    assert re.match(r"worker 0 \(localhost:\d+\) is gone: its process has ended", line(job, 1))


@pytest.mark.slow
def test_stopped_worker_is_named_and_the_other_ends(start_workers):
    job = under_way(start_workers(2, WORKER, 3))
    job.send(1, signal.SIGSTOP)
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


HOLD = """
import ctypes
from crankshaft.engine.health.watchdog import Watchdog
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
