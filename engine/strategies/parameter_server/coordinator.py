"""The parameter servers' loop: closures handed out to workers in a bounded window, and taken back as they come.

Coordinator code, on TensorFlow's `ClusterCoordinator`, whose own queue would take 262,144 of them and run one that
fails for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ...data.base import Run
from ...data.source import SourceError
from ...health import answers
from ...health.peers import is_gone
from ...health.watchdog import FIRST_CALL_FACTOR, LostPeerError
from ...internals.errors import counted, reason
from ...internals.tensorflow import ends_executor
from .closures import (
    DEAD,
    ClosureLoop,
    Counters,
    Lease,
    Returned,
    UpdateLoop,
)

_PROBE_SECONDS = 0.5
_REPEATED = ("Start cancelling closures", "Remote function on worker", "Cluster update failed")
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InternalError, tf.errors.CancelledError)


class ClosureError(Exception):
    """What a worker ran failed as often as it was tried: where, on which data, with what. One line."""


class Cluster(NamedTuple):
    """Where the tasks are: host:port of the coordinator, of each worker and each parameter server, in their order."""

    coordinator: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]

    def explain_lost_server(self, error: BaseException) -> str | None:
        """Returns one line, if an error says that a parameter server is lost."""
        if not is_server_lost(error):
            return None
        time.sleep(_PROBE_SECONDS)  # its port may be open for a moment yet
        gone = [server for server, address in enumerate(self.servers) if is_gone(address)]
        named = sorted({int(number) for number in re.findall(r"/job:ps/replica:0/task:(\d+)", str(error))})
        return self.explain_lost(gone or named)

    def explain_lost(self, servers: list[int]) -> str:
        """Returns the line that says of some servers that they are lost."""
        names = " and ".join(f"ps {server} ({self.servers[server]})" for server in servers)
        return (
            f"{names or 'a parameter server'} {'are' if len(servers) > 1 else 'is'} lost, with the variables there; "
            "start the job again: it goes on from the last checkpoint"
        )


@dataclasses.dataclass
class Ledger:
    """Counts of what became of closures, over the life of the process.

    Attributes:
      scheduled: leases that were handed out, each once.
      done: leases that came back.
      retried: closures that were run again, by TensorFlow after a worker's death or by us after an error.
      lost: runs of closures that never ended.
      steps_unseen: updates whose metrics were lost with the run that did them.
    """

    scheduled: int = 0
    done: int = 0
    retried: int = 0
    lost: int = 0
    steps_unseen: int = 0


class Done(NamedTuple):
    """A closure that came back: its lease, and what it returned."""

    lease: Lease
    returned: Returned


class Closures:
    """The bounded window of closures that workers are running.

    Args:
      coordinator: TensorFlow's.
      cluster: where its tasks are.
      max_inflight_per_worker: closures that are out at once, times the workers.
      max_retries: of a lease whose closure raises.
      timeout_seconds: without any update, until those that hold it are named; 0 waits for ever. `FIRST_CALL_FACTOR`
        times as long for a loop of which nothing has come back: workers build and optimize its graph.
      describe: a lease and a step of it, for a message.
      fault_of_data: what was wrong with the data, if an error comes of that; such a lease is not tried again.

    Attributes:
      ledger: what became of closures.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        cluster: Cluster,
        *,
        max_inflight_per_worker: int,
        max_retries: int,
        timeout_seconds: float,
        describe: Callable[[Lease, int], str],
        fault_of_data: Callable[[BaseException], SourceError | None],
    ):
        self._coordinator = coordinator
        self._cluster = cluster
        self._max_retries = max_retries
        self._timeout_seconds = timeout_seconds
        self._describe, self._fault_of_data = describe, fault_of_data
        slots = max_inflight_per_worker * len(cluster.workers)
        self.counters = Counters(slots, len(cluster.workers))
        self.ledger = Ledger()
        self._slots = list(range(slots))
        self._steps = [0] * slots  # of each slot, what has been counted when nothing is open in it
        self._starts = [0] * slots
        self._open: dict[int, tuple[ClosureLoop, object, Lease]] = {}
        self._traced: set[ClosureLoop] = set()
        self._built: set[ClosureLoop] = set()  # by a worker, which has run it
        self._failures: dict[int, int] = {}
        self._begun: dict[int, tuple[int, int]] = {}  # steps of a lease, and how often it was begun when they were new
        self._arrived: queue.SimpleQueue = queue.SimpleQueue()
        self._numbers = 0
        self._moved = (0, time.monotonic())  # updates in all, and since when there are so many

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_room(self) -> bool:
        return bool(self._slots)

    def hand_out(self, loop: ClosureLoop, run: Run) -> None:
        """Schedules the steps of a feed's lease. There has to be room."""
        slot = self._slots.pop(0)
        self._numbers += 1
        lease = Lease(self._numbers, slot, self._steps[slot], self._starts[slot], run.start, run.stop)
        self.ledger.scheduled += 1
        self._schedule(loop, run.operands, lease)

    def _schedule(self, loop: ClosureLoop, operands, lease: Lease) -> None:
        self._open[lease.number] = (loop, operands, lease)
        if len(self._open) == 1:
            self._moved = (self._moved[0], time.monotonic())
        with tf.device("CPU:0"):
            # An array would be copied to the worker by Python's conversion, which holds Python's lock: if the worker
            # does not answer, all of this process stands still.
            given = tf.constant(lease, tf.int64)
        try:
            remote = self._coordinator.schedule(loop.function, args=(operands, given))
        except Exception as error:
            if loop not in self._traced:
                raise
            # Not this one's: TensorFlow tells here that another has failed, and has cancelled all.
            self._arrived.put((lease, None, tf.errors.CancelledError(None, None, str(error))))
            return
        self._traced.add(loop)
        # A thread for each: there are few, and only `fetch` tells when one is back. Daemons, since one may never be.
        threading.Thread(target=self._await, args=(lease, remote), name=f"lease-{lease.number}", daemon=True).start()

    def _await(self, lease: Lease, remote) -> None:
        try:
            self._arrived.put((lease, remote.fetch(), None))
        except Exception as error:  # reaches the coordinator's own thread
            self._arrived.put((lease, None, error))

    def collect(self, seconds: float) -> list[Done]:
        """Returns what comes back within so many seconds, as soon as anything has; [] if nothing does.

        Raises:
          ClosureError: a lease has failed too often.
          SourceError: a worker can't read what it is to train on.
          LostPeerError: a parameter server is lost, or nothing moves.
        """
        done: list[Done] = []
        failed: list = []
        end = time.monotonic() + seconds
        while not done and not failed and self._open and (left := end - time.monotonic()) > 0:
            self._take(done, failed, min(left, _PROBE_SECONDS))
            if not done and not failed:
                self._look_after()
        if failed:
            self._recover(done, failed)
        return done

    def _take(self, done: list[Done], failed: list, seconds: float) -> None:
        """Waits for one, and takes what else is there."""
        try:
            lease, result, error = self._arrived.get(timeout=seconds)
            while True:
                if error is None:
                    done.append(self._settle(lease, result))
                else:
                    failed.append((lease, error))
                lease, result, error = self._arrived.get_nowait()
        except queue.Empty:
            return

    def _settle(self, lease: Lease, result: np.ndarray) -> Done:
        loop, _, _ = self._open.pop(lease.number)
        self._built.add(loop)
        self._failures.pop(lease.number, None)
        self._begun.pop(lease.number, None)
        returned = Returned.unpacked(np.asarray(result))
        _, start, starts, steps = returned.row
        self._slots.append(lease.slot)
        self._steps[lease.slot] = lease.steps_before + steps
        self._starts[lease.slot] = lease.starts_before + starts
        again = max(0, starts - 1)
        self._moved = (self._moved[0], time.monotonic())  # what counts no updates moves as well
        self.ledger.done += 1
        self.ledger.retried += again
        self.ledger.lost += again
        self.ledger.steps_unseen += start - lease.first
        return Done(lease, returned)

    def _recover(self, done: list[Done], failed: list) -> None:
        """Recovers from an error: calls back all that is out, and hands out again what is not done."""
        with contextlib.suppress(Exception):  # the one that we have
            self._coordinator.join()  # TensorFlow cancels the others, and forgets the error
        while len(failed) < len(self._open):
            self._take(done, failed, 1.0)
        for _, error in failed:
            if line := self._cluster.explain_lost_server(error):
                raise LostPeerError(line) from error
        for lease, error in failed:
            if isinstance(error, tf.errors.CancelledError):
                continue
            if fault := self._fault_of_data(error):
                raise fault from error
            self._failures[lease.number] = self._failures.get(lease.number, 0) + 1
            if self._failures[lease.number] > self._max_retries:
                raise ClosureError(self._explain_failure(lease, error)) from error
        self.counters.clear_leases()  # whoever failed has not said that it is done, and nobody is to wait for it
        for lease, _ in failed:
            loop, operands, _ = self._open[lease.number]
            self._schedule(loop, operands, lease)

    def _look_after(self) -> None:
        """Frees workers from waiting for a dead one, and gives up in the end, while nothing comes back."""
        gone = [worker for worker, address in enumerate(self._cluster.workers) if is_gone(address)]
        lost = [server for server, address in enumerate(self._cluster.servers) if is_gone(address)]
        if lost:
            raise LostPeerError(self._cluster.explain_lost(lost))
        for worker in gone:
            self.counters.holding.scatter_update(tf.IndexedSlices(tf.constant(DEAD, tf.int64), worker))
        counts = self.counters.counts.numpy()
        self._check_hidden_retries(counts)
        updates = int(counts[0])
        now = time.monotonic()
        if updates != self._moved[0]:
            self._moved = (updates, now)
        elif self._timeout_seconds and now - self._moved[1] > self._timeout_seconds * self._patience:
            raise LostPeerError(self._explain_stuck(gone))

    @property
    def _patience(self) -> float:
        return 1.0 if all(loop in self._built for loop, _, _ in self._open.values()) else FIRST_CALL_FACTOR

    def _check_hidden_retries(self, counts: np.ndarray) -> None:
        """Raises ClosureError where a closure has silently been run again too often.

        TensorFlow does so where it takes an error for the consequence of another.
        """
        for _, _, lease in self._open.values():
            steps, starts = counts[self.counters.steps_at(lease.slot)], counts[self.counters.starts_at(lease.slot)]
            before = self._begun.get(lease.number)
            if before is None or before[0] != steps:
                self._begun[lease.number] = (steps, starts)
            elif starts - before[1] > self._max_retries:
                self._failures[lease.number] = int(starts - before[1])
                raise ClosureError(self._explain_failure(lease, None))

    def _explain_stuck(self, gone: list[int]) -> str:
        if quiet := answers.silent("ps", range(len(self._cluster.servers))):
            return answers.explain(quiet, self._cluster.servers, self._timeout_seconds)
        at = {number: worker for worker, number in enumerate(self.counters.holding.numpy().tolist()) if number > 0}
        parts = [f"{self._named(worker)} is not there" for worker in gone]
        held = {
            at[number]: lease for number, (_, _, lease) in self._open.items() if number in at and at[number] not in gone
        }
        parts += [f"{self._named(worker)} holds {self._describe(lease, -1)}" for worker, lease in held.items()]
        # One that was stopped before it began what it was sent holds nothing yet.
        for worker in answers.silent("worker", set(range(len(self._cluster.workers))) - {*gone, *held}):
            parts.append(f"{self._named(worker)} does not answer")
        times = "" if self._patience == 1.0 else f"{self._patience:g} times "  # while workers build a graph
        return (
            f"no update for {times}`step_timeout_seconds`={self._timeout_seconds:g}: "
            f"{'; '.join(parts) or 'no worker has taken what was handed out'}"
        )

    def _named(self, worker: int) -> str:
        return f"worker {worker} ({self._cluster.workers[worker]})"

    def _explain_failure(self, lease: Lease, error: Exception | None) -> str:
        counters, step, where = self.counters, -1, "a worker"
        if isinstance(self._open[lease.number][0], UpdateLoop):
            step = lease.first + int(counters.counts.numpy()[counters.steps_at(lease.slot)]) - lease.steps_before
            where = f"worker {counters.takers.numpy()[lease.slot]}"
        times = self._failures[lease.number]
        what = f"{type(error).__name__}: {reason(error)}" if error else "the worker's own output may say why"
        return (
            f"{where} failed {counted(times, 'time')} on {self._describe(lease, step)}: "
            f"{what}; correct the model or the data"
        )


def is_server_lost(error: BaseException) -> bool:
    """Returns whether a closure's or an operation's error is a parameter server's death."""
    text = str(error)
    return isinstance(error, _LOST[:2]) and "/job:ps" in text


class _InOneLine(logging.Filter):
    """What TensorFlow's coordinator logs of a failure, as one line; nothing where it raises it as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if message.startswith("Worker %s failed with"):
            task = str(next(iter(record.args))).rpartition(":")[2]
            record.msg, record.args = "worker %s is lost; the others go on, and it joins them when it is back", (task,)
            return True
        # The last: each checkpoint is written by a function of its own, once.
        known = ("encountered the following error", "tf_function_save")
        return not (message.startswith(_REPEATED) or any(text in record.getMessage() for text in known))


def quiet_tensorflow() -> None:
    """Errors that the coordinator's threads log, each with a page of details, become a line or nothing. Once."""
    tf.get_logger().addFilter(_InOneLine())
    report = sys.unraisablehook

    def report_others(raised) -> None:
        # A lost server's, which each thread that waits meets again as it lets go of its executor; the run says it once.
        if not (ends_executor(raised.object) and isinstance(raised.exc_value, tf.errors.OpError)):
            report(raised)

    sys.unraisablehook = report_others
