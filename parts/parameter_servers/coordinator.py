"""The parameter servers' loop: schedules leases in a bounded window, and collects their results as they complete.

Coordinator code, on TensorFlow's `ClusterCoordinator`, which calls a lease's run a closure; its own queue would accept
262,144 of them and retry a failing one for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from logging import Filter, LogRecord
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...engine.data.feeds.feed import CallInput
from ...engine.errors import CrankshaftError, LeaseError, LostPeerError, counted, reason
from ...engine.machine.threads import PROCESS
from ...engine.own_code import users_line_in
from ...engine.strategies.options import ClusterAddresses
from ..workers.peers import is_gone
from ..workers.watchdog import FIRST_CALL_FACTOR
from . import server_probe
from .leases import Counters, Lease, LeaseLoop, LeaseResult, UpdateLoop

OPEN_PER_WORKER = 2  # leases that are out at once
_MAX_RETRIES = 3  # repetitions of a lease that raises
_PROBE_SECONDS = 0.5
_ASSIGN_SECONDS = 3e-3  # of the one coordinator, per lease; 2.3 ms with 8 workers, 4.1 with 256: benchmarks.leases
_LEASE_SECONDS = 0.25
_WORKERS_AT_THAT = 8
_REPEATED = ("Start cancelling closures", "Remote function on worker", "Cluster update failed")


def lease_seconds(workers: int) -> float:
    """Returns how long a lease is to last: longer with many workers, as the one coordinator takes all leases back."""
    return _LEASE_SECONDS * max(1.0, workers / _WORKERS_AT_THAT)


def lease_steps(left: int, workers: int, most: int, step_seconds: float) -> int:
    """Returns the number of steps of the next lease, at most `most`, if `left` steps remain until all must be complete.

    The leases become smaller, so that no worker delays the end for long. But if the one coordinator assigns the rest as
    n leases of equal length, they end after about n * _ASSIGN_SECONDS + left / n * step_seconds: smaller ones than
    those for which this is least would end later.

    Args:
      step_seconds: duration of a step on a worker; 0 if unknown.
    """
    quickest = math.sqrt(left * _ASSIGN_SECONDS / step_seconds) if step_seconds else 0.0
    return min(most, left, math.ceil(max(left / workers, quickest)))


def gone_servers(cluster: ClusterAddresses) -> list[int]:
    """Lists the servers whose process has ended."""
    return [server for server, address in enumerate(cluster.servers) if is_gone(address)]


def explain_lost_server(cluster: ClusterAddresses, error: BaseException) -> str | None:
    """Returns one line for an error about a lost parameter server, else None."""
    if not (isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)) and "/job:ps" in str(error)):
        return None
    time.sleep(_PROBE_SECONDS)  # its port may still be open briefly
    named = sorted({int(number) for number in re.findall(r"/job:ps/replica:0/task:(\d+)", str(error))})
    return explain_lost(cluster, gone_servers(cluster) or named)


def explain_lost(cluster: ClusterAddresses, servers: list[int]) -> str:
    """Returns the message about lost servers."""
    names = " and ".join(f"ps {server} ({cluster.servers[server]})" for server in servers)
    return (
        f"{names or 'a parameter server'} {'are' if len(servers) > 1 else 'is'} lost, with the variables there; "
        "start the job again: it continues from the newest snapshot or checkpoint"
    )


@dataclasses.dataclass
class Ledger:
    """Counts of leases over the process's lifetime.

    Attributes:
      scheduled: scheduled leases, each counted once.
      retried: runs of leases that were repeated, by TensorFlow after a worker's death, or by this loop after an error.
      steps_unseen: updates whose metrics were lost with their run.
    """

    scheduled: int = 0
    done: int = 0
    retried: int = 0
    steps_unseen: int = 0


class CompletedLease(NamedTuple):
    """A completed lease, its result, and its predictions, see `LoopResult`."""

    lease: Lease
    result: LeaseResult
    predictions: Sequence[Sequence[np.ndarray]] = ()


@dataclasses.dataclass
class _Open:
    """A lease in progress.

    Attributes:
      failures: number of the lease's errors.
      begun: number of the lease's counted steps, and how often it was begun when this number was new; None before.
    """

    lease: Lease
    loop: LeaseLoop
    operands: Any
    failures: int = 0
    begun: tuple[int, int] | None = None


class Leases:
    """The bounded window of leases in progress on workers.

    Args:
      timeout_seconds: time without any update until the stuck workers are named; 0 waits for ever. `FIRST_CALL_FACTOR`
        times as long for a loop without a completed lease: workers build and optimize its graph.
      describe: describes a lease of a loop and a step of it, for messages.
      fault_of_data: returns the problem in the data that caused an error, if any; such a lease is not retried.

    Attributes:
      built: the loops that a worker has run before, and whose graph it so has built.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        cluster: ClusterAddresses,
        *,
        timeout_seconds: float,
        describe: Callable[[LeaseLoop, Lease, int], str],
        fault_of_data: Callable[[BaseException], CrankshaftError | None],
    ):
        self._coordinator = coordinator
        self._cluster = cluster
        self._timeout_seconds = timeout_seconds
        self._describe, self._fault_of_data = describe, fault_of_data
        slots = OPEN_PER_WORKER * len(cluster.workers)
        self.counters = Counters(slots)
        self.ledger = Ledger()
        self.built: set[LeaseLoop] = set()
        self._free = [(slot, 0, 0) for slot in range(slots)]  # (slot, steps counted there, starts counted there)
        self._open: dict[int, _Open] = {}
        self._traced: set[LeaseLoop] = set()
        self._arrived: queue.SimpleQueue = queue.SimpleQueue()
        self._moved = (0, time.monotonic())  # number of updates, and the time of the last

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def room(self) -> int:
        """How many more leases may be in progress."""
        return len(self._free)

    def schedule(self, loop: LeaseLoop, call_input: CallInput) -> None:
        """Schedules the steps of a feed's lease. Requires room."""
        self.ledger.scheduled += 1
        steps = call_input.start, call_input.stop
        lease = Lease(self.ledger.scheduled, *self._free.pop(0), *steps, loop.first_batch)
        # While nothing was in progress, time has not counted: the caller may have evaluated for an hour.
        if not self._open:
            self._moved = (self._moved[0], time.monotonic())
        self._open[lease.number] = _Open(lease, loop, call_input.operands)
        self._dispatch(self._open[lease.number])

    def _dispatch(self, opened: _Open) -> None:
        lease, loop = opened.lease, opened.loop
        with tf.device("CPU:0"):
            # Python's conversion would copy an array to the worker while holding Python's lock: if the worker does not
            # answer, this whole process hangs.
            numbers = tf.constant(lease, tf.int64)
        try:
            remote = self._coordinator.schedule(loop.function, args=(opened.operands, numbers))
        except Exception as error:
            if loop not in self._traced:
                raise
            # Not this lease's: TensorFlow reports that another has failed, and has cancelled all.
            self._arrived.put((lease, None, tf.errors.CancelledError(None, None, str(error))))
            return
        self._traced.add(loop)
        # A thread per lease: there are few, and only `fetch` shows completion. Daemons, since one may never complete.
        threading.Thread(target=self._await, args=(lease, remote), name=f"lease-{lease.number}", daemon=True).start()

    def _await(self, lease: Lease, remote: Any) -> None:
        try:
            self._arrived.put((lease, remote.fetch(), None))
        except Exception as error:  # passed to the coordinator's own thread
            self._arrived.put((lease, None, error))

    def collect(self, seconds: float) -> list[CompletedLease]:
        """Returns the leases that are completed within so many seconds, as soon as there is one; [] if none is.

        Raises:
          LeaseError: a lease has failed too often.
          CrankshaftError: a worker can't read its data.
          LostPeerError: a parameter server is lost, or there is no progress.
        """
        completed: list[CompletedLease] = []
        failed: list = []
        end = time.monotonic() + seconds
        while not completed and not failed and self._open and (left := end - time.monotonic()) > 0:
            self._receive(completed, failed, min(left, _PROBE_SECONDS))
            if not completed and not failed:
                self._raise_if_lost()
        if failed:
            self._recover(completed, failed)
        return completed

    def _receive(self, completed: list[CompletedLease], failed: list, seconds: float) -> None:
        """Waits for one lease, and receives all others that have ended."""
        try:
            lease, result, error = self._arrived.get(timeout=seconds)
            while True:
                if error is None:
                    completed.append(self._complete(lease, result))
                else:
                    failed.append((lease, error))
                lease, result, error = self._arrived.get_nowait()
        except queue.Empty:
            return

    def _complete(self, lease: Lease, fetched: tuple) -> CompletedLease:
        self.built.add(self._open.pop(lease.number).loop)
        vector, predictions = fetched
        result = LeaseResult.unpacked(np.asarray(vector))
        counted_steps = lease.steps if result.starts else 0
        # Counters only grow, as servers add to them at any time, so a slot's next lease begins where its last one has
        # ended.
        self._free.append((lease.slot, lease.steps_before + counted_steps, lease.starts_before + result.starts))
        self._moved = (self._moved[0], time.monotonic())  # progress without counted updates
        self.ledger.done += 1
        self.ledger.retried += max(0, result.starts - 1)
        self.ledger.steps_unseen += result.first - lease.first
        return CompletedLease(lease, result, predictions)

    def _recover(self, completed: list[CompletedLease], failed: list) -> None:
        """Recovers from an error: cancels all leases in progress, and schedules unfinished ones again."""
        with contextlib.suppress(Exception):  # the same error
            self._coordinator.join()  # TensorFlow cancels the others, and forgets the error
        # Every lease must have ended before any is scheduled again: TensorFlow drops what is queued between an error
        # and the end of its cancellations.
        while len(failed) < len(self._open):
            self._receive(completed, failed, 1.0)
        for _, error in failed:
            if line := explain_lost_server(self._cluster, error):
                raise LostPeerError(line) from error
        for lease, error in failed:
            # Cancelled for another's error: it has not failed itself.
            if isinstance(error, tf.errors.CancelledError):
                continue
            if fault := self._fault_of_data(error):
                raise fault from error
            opened = self._open[lease.number]
            opened.failures += 1
            if opened.failures > _MAX_RETRIES:
                raise LeaseError(self._explain_failure(opened, error)) from error
        for lease, _ in failed:
            self._dispatch(self._open[lease.number])

    def _raise_if_lost(self) -> None:
        """Checks for lost and stuck tasks, and leases restarted too often, while no lease completes."""
        # TensorFlow waits for a server that is gone as for a slow one, so its port is asked.
        if lost := gone_servers(self._cluster):
            raise LostPeerError(explain_lost(self._cluster, lost))
        counts = self.counters.counts.numpy()
        for opened in self._open.values():
            # TensorFlow restarts leases silently for errors that it regards as consequences of others.
            steps, starts = self._progress(opened.lease, counts)
            # Starts count only as long as no step is done: a lease that gets further, however often it moves, is no
            # failure.
            if opened.begun is None or opened.begun[0] != steps:
                opened.begun = (steps, starts)
            elif starts - opened.begun[1] > _MAX_RETRIES:
                opened.failures = starts - opened.begun[1]
                raise LeaseError(self._explain_failure(opened, None))
        updates = int(counts[0])
        now = time.monotonic()
        if updates != self._moved[0]:
            self._moved = (updates, now)
        elif self._timeout_seconds and now - self._moved[1] > self._timeout_seconds * self._timeout_factor:
            raise LostPeerError(self._explain_stuck(counts))

    @property
    def _timeout_factor(self) -> float:
        return 1.0 if all(opened.loop in self.built for opened in self._open.values()) else FIRST_CALL_FACTOR

    def _progress(self, lease: Lease, counts: np.ndarray) -> tuple[int, int]:
        """Returns a lease's number of completed steps and of starts."""
        steps, starts = counts[self.counters.steps_at(lease.slot)], counts[self.counters.starts_at(lease.slot)]
        return int(steps) - lease.steps_before, int(starts) - lease.starts_before

    def _explain_stuck(self, counts: np.ndarray) -> str:
        if quiet := server_probe.silent("ps", range(len(self._cluster.servers))):
            return server_probe.explain(quiet, self._cluster.servers, self._timeout_seconds)
        gone = [worker for worker, address in enumerate(self._cluster.workers) if is_gone(address)]
        parts = [f"{self._worker_name(worker)} is not there" for worker in gone]
        takers = self.counters.takers.numpy()
        begun = [opened for opened in self._open.values() if self._progress(opened.lease, counts)[1]]
        held = {int(takers[opened.lease.slot]): opened for opened in begun if takers[opened.lease.slot] not in gone}
        holds = {worker: self._describe(opened.loop, opened.lease, -1) for worker, opened in held.items()}
        parts += [f"{self._worker_name(worker)} holds {lease}" for worker, lease in holds.items()]
        # A task stopped before it began its lease holds nothing up yet.
        for worker in server_probe.silent("worker", set(range(len(self._cluster.workers))) - {*gone, *held}):
            parts.append(f"{self._worker_name(worker)} does not answer")
        times = "" if self._timeout_factor == 1.0 else f"{self._timeout_factor:g} times "  # while workers build a graph
        return (
            f"no update for {times}step_timeout_seconds={self._timeout_seconds:g}: "
            f"{'; '.join(parts) or 'no worker has started a lease'}"
        )

    def _worker_name(self, worker: int) -> str:
        return f"worker {worker} ({self._cluster.workers[worker]})"

    def _explain_failure(self, opened: _Open, error: Exception | None) -> str:
        lease, step, worker_name = opened.lease, -1, "a worker"
        if isinstance(opened.loop, UpdateLoop):
            step = lease.first + self._progress(lease, self.counters.counts.numpy())[0]
            worker_name = f"worker {self.counters.takers.numpy()[lease.slot]}"
        at = f", at {line}" if (line := users_line_in(str(error))) else ""
        error_text = f"{type(error).__name__}: {reason(error)}{at}" if error else "the worker's own output may say why"
        return (
            f"{worker_name} failed {counted(opened.failures, 'time')} on {self._describe(opened.loop, lease, step)}: "
            f"{error_text}; correct the model or the data"
        )


class _InOneLine(Filter):
    """Shortens the coordinator's log of a failure to one line, or to nothing if TensorFlow also raises it."""

    def filter(self, record: LogRecord) -> bool:
        message = str(record.msg)
        if message.startswith("Worker %s failed with"):
            task = str(next(iter(record.args or [""]))).rpartition(":")[2]
            record.msg, record.args = "worker %s is lost; the others continue, and it rejoins when it is back", (task,)
            return True
        # The last: each checkpoint is written by its own function, once.
        repeated = ("encountered the following error", "tf_function_save")
        return not (message.startswith(_REPEATED) or any(text in record.getMessage() for text in repeated))


def quiet_tensorflow() -> None:
    """Shortens errors logged by the coordinator's threads, each a page of details, to a line or nothing. Once."""
    logger = tf.get_logger()
    with PROCESS:
        if any(isinstance(log_filter, _InOneLine) for log_filter in logger.filters):
            return
        logger.addFilter(_InOneLine())
