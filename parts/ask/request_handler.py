"""Handles requests to a running job: a profile, all stacks, a checkpoint, its status, a stop.

A thread answers what it can immediately, and each call of the inner loop ends with a look, so that a stop takes effect
there. Checkpoints and profiles are made between calls; since several workers must make the same calls, all are notified
by the figures that end a call, and act at one step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import tensorflow as tf

from ...engine.checkpoints import manifest
from ...engine.errors import reason
from ...engine.hooks.background import BackgroundThread
from ...engine.hooks.base import Hook, RequestBit, Status
from .requests import Request, Requests, stacks

PROFILED_STEPS = 10
_LEAST_TRACE_MS = 200  # of another task, so that its beginning and end hardly matter
_LAST_POLL_SECONDS = 5.0  # for requests at the run's end
_REQUEST_BITS = {"checkpoint": RequestBit.CHECKPOINT, "profile": RequestBit.PROFILE}
_STOPPED = "crankshaft ask stop"


class RequestHandler(Hook):
    """Answers requests. It is a run's last hook, so that a checkpoint includes the others' changes at the same step.

    Args:
      requests: the requests to this task; to a coordinator, also for profiles of other tasks.
      poller: the thread that checks for them and answers what it can immediately, even while a call hangs.
      save: starts a checkpoint, unless this step has one; returns its manifest's path.
      stop: requests the run's end, with a reason, also between two calls.
      folder: TensorBoard's folder, for profiles.
      addresses: the addresses of tasks that compute for this process, host:port by name.
    """

    name = "asked"
    spent_on = "checkpoints"

    def __init__(
        self,
        requests: Requests,
        poller: BackgroundThread,
        save: Callable[[Status], str],
        stop: Callable[[str], None],
        describe: Callable[[], str],
        folder: str,
        addresses: dict[str, str],
    ):
        self._requests, self._poller, self._save, self._stop = requests, poller, save, stop
        self._describe, self._folder, self._addresses = describe, folder, addresses
        self._is_open = False
        self._is_polling = threading.Lock()
        self._wanted: list[Request] = []  # not started
        self._stopping: list[Request] = []
        self._saving: list[tuple[Request, str]] = []  # with the future path
        self._profiling: list[Request] = []
        self._due: tuple[int, str] | None = None  # when the agreed actions are due
        self._began_at = 0

    def begin(self, status: Status) -> None:
        if not self._is_open:
            self._is_open = True
            self._poller.open(self._poll)

    def rewind(self, status: Status) -> None:
        self._due = None

    def next_due(self, step: int, status: Status) -> int | None:
        return self._due[0] if self._due and self._due[0] > step else None

    def __call__(self, status: Status) -> None:
        self._poll()
        if self._stopping:
            status.stop = status.stop or _STOPPED
        if self._due and status.step >= self._due[0]:
            (_, kind), self._due = self._due, None
            if kind == "profile":
                self._end_profile(status)
            else:
                path = self._save(status)
                self._saving += [(request, path) for request in self._taken(kind)]
        if self._due is None:
            requested = 0
            for request in self._wanted:
                requested |= _REQUEST_BITS[request.kind]
            agreed = status.strategy.agree_on_requests(requested, sum(_REQUEST_BITS.values()))
            if agreed & _REQUEST_BITS["profile"]:
                self._begin_profile(status)
            elif agreed:
                self._due = status.next_in_step(1), "checkpoint"

    def end(self, status: Status) -> None:
        if self._profiling:
            self._end_profile(status)
        for request in self._stopping:
            self._answer(request, f"the run has ended at step {status.step:,}, and is saved: {status.stop}")
        self._poller.flush(_LAST_POLL_SECONDS)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._poller.close(self._poll)
            for request in [*self._wanted, *self._profiling]:
                self._answer(request, "the run has ended before it came to that")
            for request, path in self._saving:
                self._answer(request, f"{path.removesuffix(manifest.SUFFIX)} could not be written; see the run's log")

    def _poll(self) -> None:
        """Reads new requests, and answers those that it can. In the thread, and after each call."""
        with self._is_polling:
            for request in self._requests.take():
                if request.kind == "stacks":
                    self._answer(request, stacks())
                elif request.kind == "status":
                    self._answer(request, self._describe())
                elif request.kind == "stop":
                    self._stopping.append(request)
                    self._stop(_STOPPED)
                else:
                    self._wanted.append(request)
            for request, path in [pending for pending in self._saving if os.path.exists(pending[1])]:
                self._saving.remove((request, path))
                self._answer(request, f"{path.removesuffix(manifest.SUFFIX)} is written")

    def _taken(self, kind: str) -> list[Request]:
        requests = [request for request in self._wanted if request.kind == kind]
        for request in requests:  # the thread may add more meanwhile
            self._wanted.remove(request)
        return requests

    def _answer(self, request: Request, text: str) -> None:
        with contextlib.suppress(OSError):  # the client reports a missing answer
            self._requests.answer(request, text)

    def _begin_profile(self, status: Status) -> None:
        self._due, self._began_at = (status.next_in_step(PROFILED_STEPS), "profile"), status.step
        call = status.segment
        for request in self._taken("profile"):
            if request.task in self._addresses:
                milliseconds = max(_LEAST_TRACE_MS, round(1e3 * PROFILED_STEPS * call.seconds / max(1, call.steps)))
                # A daemon: the process does not wait for a lost task's trace.
                threading.Thread(target=self._trace, args=(request, milliseconds), daemon=True).start()
            elif not self._profiling:
                try:
                    tf.profiler.experimental.start(self._folder)
                    self._profiling = [request]
                except tf.errors.OpError as error:  # another profile is in progress
                    self._answer(request, f"no profile: {reason(error)}")
            else:
                self._profiling.append(request)

    def _end_profile(self, status: Status) -> None:
        if self._profiling:
            if status.segment.sums is not None:
                status.segment.sums.read()  # waits for the devices
            tf.profiler.experimental.stop()
        profiled, self._profiling = self._profiling, []
        for request in profiled:
            self._answer(request, f"a profile of steps {self._began_at:,} to {status.step:,} is in {self._folder}")

    def _trace(self, request: Request, milliseconds: int) -> None:
        try:
            address = self._addresses[request.task or ""]
            tf.profiler.experimental.client.trace(f"grpc://{address}", self._folder, milliseconds)
            self._answer(request, f"a profile of {milliseconds} ms of {request.task} is in {self._folder}")
        except Exception as error:  # of TensorFlow's, in a thread
            self._answer(request, f"no profile of {request.task}: {reason(error)}")
