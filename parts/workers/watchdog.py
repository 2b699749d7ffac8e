"""Ends a run whose workers would wait for each other for ever, and names the one that they wait for.

The watchdog has its own thread: a collective operation blocks the main thread without running Python.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping

import tensorflow as tf

from ...engine import logging
from ...engine.internals import tensorflow
from ...engine.machine.threads import end_process
from . import hangs
from .peers import Heard, Peers

FIRST_CALL_FACTOR = 5.0  # the first call compiles
_NAME = "watchdog"  # of its thread
_PERIOD_SECONDS = 0.5
_JOIN_SECONDS = 5.0
_UNHEARD_SECONDS = 10.0  # all have connected by TensorFlow as a watch begins
_CLOCK_SECONDS = 1.0  # less is a clock that is adjusted slowly
_SILENT_SECONDS = 5.0  # ten lost datagrams in a row
_LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, tf.errors.CancelledError)


class Watchdog:
    """Ends this process after too long without progress, with a line that names the worker to blame.

    The strategy calls `beat` as it makes progress. All workers make the same calls, so the others wait for the one with
    fewer beats or arrivals. Use it as a context around training, after creating the strategy.

    Args:
      worker: this process's index among the workers.
      addresses: the address of each worker, host:port.
      timeout_seconds: time without progress after which the process ends; 0 never ends it, but notes who is lost.
      secret: the job's, which authenticates the workers' datagrams; empty trusts the network.
      bind: the address of this host for the datagrams' socket; empty: see `Peers`.
      arrived: `arrivals.Arrivals.count`, or another number that grows by the same progress on all workers, or None.
      end: called with the line, in the watchdog's thread; must end the process.
      abort: called with a reason, in the watchdog's thread; must make all waiting collectives fail.

    Attributes:
      lost: the peer whose loss ends this worker; -1 without one.
    """

    def __init__(
        self,
        worker: int,
        names: tuple[str, ...],
        addresses: tuple[str, ...],
        timeout_seconds: float,
        *,
        secret: bytes = b"",
        bind: str = "",
        arrived: Callable[[], int] | None = None,
        end: Callable[[str], None] | None = None,
        abort: Callable[[str], None] | None = None,
    ):
        self._peers = Peers(worker, names, addresses, secret, bind)
        self._timeout = timeout_seconds
        self._arrived_now = arrived
        self._end = end or end_process
        self._abort = abort or abort_collectives
        self._period = min(_PERIOD_SECONDS, timeout_seconds / 8) if timeout_seconds else _PERIOD_SECONDS
        self._mark = (0, 0, FIRST_CALL_FACTOR)  # beats, step, factor: one tuple, read atomically
        self._arrived = -1
        self._progressed_at = 0.0  # time of the last progress, by the monotonic clock
        self._clock_jump = 0.0  # seconds by which the wall clock was last set
        self.lost = -1
        self._end_reason: str | None = None  # this worker's message about its end
        self._has_aborted = False
        self._reporting = threading.RLock()  # held by the thread that reports why this process ends
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int | None, factor: float = 1.0) -> None:
        """Records that the main thread begins, or has ended, a call from `step` on; None: one of an evaluation.

        Almost free.

        The next beat may take `factor` times the timeout: `FIRST_CALL_FACTOR` if something is compiled.
        """
        self._mark = (self._mark[0] + 1, self._mark[1] if step is None else step, factor)

    @property
    def heard(self) -> Mapping[int, Heard]:
        """By worker, the last datagram of each of the others."""
        return self._peers.heard

    def silent(self, seconds: float) -> list[int]:
        """Returns the workers that were silent for so many seconds without having ended."""
        return sorted(self._peers.silent(seconds)) if self._peers.is_open else []

    def __enter__(self) -> Watchdog:
        try:
            self._peers.open()
        except OSError as error:
            outer = any(thread.name == _NAME for thread in threading.enumerate())
            cure = "the run around this one has it" if outer else "free it, or give bind an address of this host"
            logging.warning(
                "the UDP port of %s can't be used (%s): who is stuck or lost is a guess; %s",
                *(self._peers.called(self._peers.worker), error, cure),
            )
            self._peers.close()
        self._progressed_at = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name=_NAME, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, _) -> None:
        self.close("" if error is None else f"{kind.__name__}: {error}")

    def close(self, reason: str = "") -> None:
        """Sends the others this worker's end, with the reason if it is not done; then stops watching."""
        if self._thread is None:
            return
        self._closing.set()
        if self._peers.is_open:
            self._peers.wake()
        self._thread.join(_JOIN_SECONDS)
        self._thread = None
        self._send(self._end_reason or reason, self.lost)
        self._peers.close()

    def _send(self, end_reason: str | None = None, lost: int = -1) -> None:
        if self._peers.is_open:
            beats, step, _ = self._mark
            if end_reason is None:  # an earlier reason holds
                end_reason, lost = self._end_reason, self.lost
            self._peers.send(step, beats, self._arrived, end_reason, lost)

    def _watch(self) -> None:
        try:
            self._keep_watch()
        finally:
            if self._timeout:
                hangs.cancel()

    def _keep_watch(self) -> None:
        seen, began, has_warned = None, time.monotonic(), not self._peers.is_open
        wall = time.time() - began  # what the wall clock is ahead
        while not self._closing.is_set():
            if self._timeout:  # also for library code that never releases Python's lock, which stops this thread
                hangs.put_off(self._timeout * max(1.5, self._mark[2]) + 4 * self._period)
            self._send()
            before = time.monotonic()
            if self._peers.is_open:
                self._peers.listen(self._period)
            else:
                self._closing.wait(self._period)
            now = time.monotonic()
            if now - before > 4 * self._period:  # the whole process was stopped: this time does not count
                self._progressed_at += now - before
            if abs(jump := time.time() - now - wall) > _CLOCK_SECONDS:
                self._clock_jump, wall = jump, wall + jump
            self._abort_for_ended_peer()
            if not has_warned and now - began > _UNHEARD_SECONDS:
                has_warned = True
                self._warn_of_unheard()
            if self._arrived_now is not None:
                with contextlib.suppress(tf.errors.OpError):  # TensorFlow has given up, and so does the main thread
                    self._arrived = self._arrived_now()
            if (now_at := (self._mark, self._arrived)) != seen:
                seen, self._progressed_at = now_at, now
            if self._timeout and not self._closing.is_set():
                idle, limit = now - self._progressed_at, self._timeout * self._mark[2]
                accuser = next((i for i, heard in self._peers.heard.items() if heard.lost == self._peers.worker), None)
                if accuser is not None and idle > limit / 2:
                    line = f"{self._own_stall(idle)}; {self._peers.called(accuser)} noticed it"
                    self._leave(line, self._peers.worker)
                elif idle > limit:
                    self._leave(*self._diagnose(idle))

    def _warn_of_unheard(self) -> None:
        if unheard := self._peers.never_heard():
            logging.warning(
                "no UDP heartbeat of %s has come in %g s: who is stuck or lost is noticed by TensorFlow alone; let UDP "
                "pass at the workers' ports, in both directions, or give bind a host's address that the others reach",
                *(" and ".join(map(self._peers.called, unheard)), _UNHEARD_SECONDS),
            )

    def _abort_for_ended_peer(self) -> None:
        """Makes the main thread's exchange fail if a peer's process has ended.

        TensorFlow does so within 0.1 s if it was receiving at that moment. A later call waits for the server to return,
        until TensorFlow's own heartbeats fail after ten seconds.
        """
        suspects = [worker for worker, heard in self._peers.heard.items() if heard.end_reason]
        suspects += self._peers.silent(3 * _PERIOD_SECONDS)
        if self._has_aborted or not (gone := self._peers.gone(suspects)):
            return
        self._has_aborted = True
        self._abort(f"{self._peers.called(gone[0])} is gone")

    def _leave(self, line: str, lost: int) -> None:
        # The main thread reports already why it ends.
        if not self._reporting.acquire(blocking=False):
            return
        end_reason = "it was stuck; its output has its stacks" if lost == self._peers.worker else line
        for _ in range(3):  # a datagram may be lost
            self._send(end_reason, lost)
        self._closing.set()
        self._end(line)
        self._reporting.release()

    def _diagnose(self, idle: float) -> tuple[str, int]:
        """Finds the worker to blame for so many seconds without progress, or -1, and the line that says why."""
        peers, (beats, step, _) = self._peers, self._mark
        if loss := self._ended_peer() or self._silent_peer():
            return loss
        progress = {worker: (heard.arrived, heard.beats) for worker, heard in peers.heard.items()}
        progress[peers.worker] = (self._arrived, beats)
        # Within one call arrivals show who waits for data; if all have as many, calls show who is behind.
        column = 0 if len({arrived for arrived, _ in progress.values()}) > 1 else 1
        worker = min(progress, key=lambda worker: progress[worker][column])
        if progress[worker][column] < max(reached[column] for reached in progress.values()):
            if worker == peers.worker:
                return self._own_stall(idle), worker
            last = peers.heard[worker].step
            if peers.heard[worker].beats == beats:
                line = (
                    f"{peers.called(worker)} has not arrived where others wait, in the call from step {step} on, for "
                    f"{idle:.0f} s; most likely it waits for its data: look at the stacks that it prints"
                )
            else:
                line = (
                    f"{peers.called(worker)} has not arrived at step {max(step, last)} for {idle:.0f} s "
                    f"(it last began step {last}); look at the stacks that it prints"
                )
            return line, worker
        reason = f"nothing has moved for {idle:.0f} s in the call from step {step} on"
        if silent := peers.never_heard():
            who = " and ".join(map(peers.called, silent))
            reason += f", and nothing was ever heard of {who}; let UDP through at its port to learn who is stuck"
        else:
            reason += ", and no worker is behind the others; raise step_timeout_seconds if steps take so long"
        return reason, -1

    def _own_stall(self, idle: float) -> str:
        name, step = self._peers.called(self._peers.worker), self._mark[1]
        return f"{name}, this process, has not arrived for {idle:.0f} s (it last began step {step}); its stacks follow"

    def _ended_peer(self) -> tuple[str, int] | None:
        """Returns an ended peer's message and the worker to blame, preferring peers that blame another."""
        ended = [(worker, heard) for worker, heard in list(self._peers.heard.items()) if heard.end_reason is not None]
        for worker, heard in sorted(ended, key=lambda ended: ended[1].lost < 0):
            if heard.lost not in (-1, worker, self._peers.worker):
                return heard.end_reason or "", heard.lost
            why = f": {heard.end_reason}" if heard.end_reason else ", its part done, while others continue"
            return f"{self._peers.called(worker)} has ended{why}", worker
        return None

    def _silent_peer(self) -> tuple[str, int] | None:
        limit = min(_SILENT_SECONDS, self._timeout / 2) if self._timeout else _SILENT_SECONDS
        silent = self._peers.silent(max(limit, 3 * _PERIOD_SECONDS))
        if not silent:
            return None
        worker = max(silent, key=silent.__getitem__)
        return (
            f"{self._peers.called(worker)} has not answered for {silent[worker]:.0f} s (it last began step "
            f"{self._peers.heard[worker].step}): it is stopped, or its host cannot be reached"
        ), worker

    def explain_lost_peer(self, error: BaseException) -> str | None:
        """Returns one line that names the lost peer that TensorFlow reports; None for other errors.

        Informs the other workers, so that they don't blame this one, which is about to end. Takes up to two seconds, or
        does not return if the watchdog is already ending the process.
        """
        # Of an argument that is invalid, such as another shape at a peer, nobody is lost.
        may_be_lost = isinstance(error, tf.errors.OpError) and not isinstance(error, tf.errors.InvalidArgumentError)
        reports_exchange = may_be_lost and ("Collective ops is aborted" in str(error) or "RPC" in str(error))
        if not (isinstance(error, _LOST) or reports_exchange):
            return None
        self._reporting.acquire()
        loss = self._set_clock(str(error)) or self._lost_peer(_tasks(str(error)) - {self._peers.worker})
        if loss is None:
            self._reporting.release()
            return None
        # The lock stays taken: the process ends for this reason, and the watchdog must not report another.
        self._end_reason, self.lost = loss
        self._send(self._end_reason, self.lost)
        return self._end_reason

    def _set_clock(self, message: str) -> tuple[str, int] | None:
        """Explains an error of TensorFlow's coordination service, which takes tasks for lost by worker 0's clock."""
        if self._peers.worker or not self._clock_jump or "heartbeat" not in message:
            return None
        way = f"{'back' if self._clock_jump < 0 else 'forward'} by {abs(self._clock_jump):,.0f} s"
        line = f"the clock of {self._peers.called(0)} went {way}, and by it TensorFlow takes workers for lost"
        return f"{line}; all workers have to start again, from the newest snapshot or checkpoint", -1

    def _lost_peer(self, named: set[int]) -> tuple[str, int] | None:
        """Determines the lost peer; `named` are the tasks in TensorFlow's error, maybe only the first to notice."""
        called, end = self._peers.called, time.monotonic() + 4 * self._period
        while True:
            if loss := self._ended_peer() or self._silent_peer():
                return loss
            gone = set(self._peers.gone())
            if len(gone) == 1 or time.monotonic() > end:
                break
            time.sleep(self._period / 4)
        suspects = sorted(gone & named or gone or named)
        if not suspects:
            return None
        who = " and ".join(map(called, suspects))
        state = "is gone: its process has ended" if gone else "is lost, as TensorFlow reports"
        return f"{who} {state}; all workers have to start again, from the newest snapshot or checkpoint", suspects[0]


def _tasks(message: str) -> set[int]:
    """The workers that an error of TensorFlow names."""
    workers = {int(task) for task in re.findall(r"/job:worker/(?:replica:\d+/)?task:(\d+)", message)}
    return workers | {0} if "CoordinationService/Heartbeat" in message else workers  # this service runs in task 0


def abort_collectives(reason: str) -> None:
    """Makes all collectives of this process fail, both waiting and later ones."""
    with contextlib.suppress(tf.errors.OpError):  # they have already failed
        tensorflow.abort_collectives(reason)
