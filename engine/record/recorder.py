"""Records a run as it goes, in `events.jsonl`: its rates and metrics, evaluations, checkpoints, warnings.

docs/events.md describes the events. A thread formats and writes lines; training only keeps calls' results, unread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from logging import WARNING, LogRecord
from typing import Any

from .. import logging
from ..hooks.background import BackgroundThread
from ..hooks.base import Hook, Status
from ..hooks.figures import read as read_figures
from ..inventory import Inventory
from ..machine import environment
from ..machine.pauses import Pauses
from ..machine.threads import pid_space
from ..meter import Meter, Totals
from ..state import TrainState
from .events import VERSION, EventLog
from .goodput import Goodput, Past

_WINDOW_SECONDS = 1.0
_WINDOWS = 1000  # about so many while a run's age grows e-fold: about 7,000 in a week
_WARN_SECONDS = 8.0  # until people are told of a silent task
_SILENT_SECONDS = 1.5  # three heartbeats of a worker
_LONGEST_TEXT = 2000


class Recorder(Hook):
    """Writes the events of a run, and sums up how its time is spent.

    A window ends with the first call after a second or a thousandth of the run's age; at each checkpoint, so that a
    resumed run has no gap; and at the run's end.

    Args:
      writer: the thread, which waits for calls' results.
      poller: a thread that never waits for them, for `Strategy.silent`.
      around: values of the events `start`, `config` and `cluster`, by event.
      began: when this process began to work on the run, by `time.monotonic`.
      pauses: the process's pauses, recorded by the second thread; such time is `down`.

    Attributes:
      latest: the newest window's values, and `until_step`; {} before the first.
      saved: the path of the newest checkpoint written by this process, and `saved_at`, its time in Unix seconds.
    """

    name = "record"

    def __init__(
        self,
        log: EventLog,
        writer: BackgroundThread,
        poller: BackgroundThread,
        around: Mapping[str, Mapping[str, Any]],
        began: float,
        pauses: Pauses,
    ):
        self._pauses, self._paused_before = pauses, 0.0
        self._log, self._writer, self._poller, self._around, self._began = log, writer, poller, around, began
        self._goodput = Goodput()
        self._kept: dict[str, float] | None = None
        self._is_open = False
        self._status: Status | None = None
        self._inventory: Inventory
        self._window_began = self._loop_began = began
        self._between_calls: dict[str, float] = {}
        self._silent: dict[str, float] = {}  # when each task was found silent
        self._warned: set[str] = set()
        self._early: list[dict[str, Any]] = []  # warnings before the first event
        self._evaluated_seconds = 0.0
        self.past = Past()
        self.latest: dict[str, Any] = {}
        self.saved, self.saved_at = "", 0.0

    def attach(self, state: TrainState, meter: Meter) -> None:
        self._window = meter.window()
        logging.logger.addFilter(self._record_warning)

    def begin(self, status: Status) -> None:
        # First: by the record it learns of earlier attempts, on which all figures below build.
        self._log.cut(status.step, self.past.replay)
        now = time.monotonic()
        age = now - self._began
        self._goodput.resume(self.past, self._kept, status.step, time.time() - age)
        self._goodput.seconds["start"] += age
        self._begin_window(status, now)
        self._loop_began = now
        self._inventory = status.state.trainer.inventory
        attempt = self.past.attempts
        lost = "it ended without a message: it was killed, or its host was lost"
        start: dict[str, Any] = {"version": VERSION, "attempt": attempt, "pid": os.getpid()}
        start |= {"host": socket.gethostname(), "pid_space": pid_space()}
        start |= {"cause": (self.past.cause or lost) if attempt else None}
        start |= self._around.get("start", {})
        start |= {"until_step": status.until_step, "steps_per_epoch": status.steps_per_epoch}
        self._log.write("start", status.step, **start, seconds={"start": age}, spent=self._goodput.spent)
        for event in ("config", "cluster"):
            self._log.write(event, status.step, **self._around.get(event, {}))
        for warning in self._early:  # of the restored checkpoint and the data
            self._log.write("warning", status.step, **warning)
        self._writer.open()
        self._poller.open(self._record_silence)
        self._is_open = True

    def rewind(self, status: Status) -> None:
        assert self._status  # `begin` has set it
        self._end_window(self._status)
        # First all that is queued, or the thread would write steps after they are cut.
        self._writer.flush()
        self._log.cut(status.step, lambda line: None)
        self._begin_window(status, time.monotonic())

    def __call__(self, status: Status) -> None:
        self._status = status
        if status.evaluation is not None:
            spent = status.hook_seconds.get("evaluation", 0.0)
            seconds, self._evaluated_seconds = spent - self._evaluated_seconds, spent
            partial = getattr(status.evaluation, "batches", {})
            self.write("evaluation", metrics=dict(status.evaluation), seconds=seconds, **partial)
        window_seconds = max(_WINDOW_SECONDS, sum(self._goodput.seconds.values()) / _WINDOWS)
        if time.monotonic() - self._window_began >= window_seconds:
            self._end_window(status)

    def before_save(self, status: Status) -> None:
        if self._window.calls and not status.in_memory:  # a long record would have a window for each snapshot
            self._end_window(status)
        self._writer.flush(0.0 if status.in_memory else None)  # at once, but a snapshot does not wait for the disk

    def end(self, status: Status) -> None:
        if self._window.calls:
            self._end_window(status)

    def close(self) -> None:
        logging.logger.removeFilter(self._record_warning)
        if self._is_open:
            self._is_open = False
            self._poller.close(self._record_silence)
            self._writer.close()
            self._pauses.close()

    def host_state(self) -> dict:
        return {"spent": dict(self._goodput.seconds)}

    def restore_host_state(self, values: dict) -> None:
        self._kept = {kind: float(seconds) for kind, seconds in values.get("spent", {}).items()}

    def past_rows(self, step: int) -> list[dict[str, Any]]:
        """Reads the events `row` of earlier attempts, up to a step: their numbers, in order."""
        rows = []
        for line in self._log.read():
            if line.kind == "start" and line.event.get("attempt") == self.past.attempts:  # this process's
                break
            if line.kind == "row" and line.step <= step and (event := line.event):
                rows.append({name: value for name, value in event.items() if name not in ("event", "time")})
        return rows

    def write(self, event: str, **values: Any) -> None:
        """Queues an event of the present step."""
        step = self._status.step if self._status else 0
        self._writer.submit(functools.partial(self._log.write, event, step, time=time.time(), **values))

    def checkpoint(self, best: bool, path: str, step: int, seconds: float, size: int) -> None:
        """Records a checkpoint that has been written; in any thread."""
        if not best:
            self.saved, self.saved_at = path, time.time()
        self._log.write("checkpoint", step, path=path, seconds=seconds, bytes=size, best=best)

    @contextlib.contextmanager
    def timed_as(self, kind: str) -> Iterator[None]:
        """Counts the time within, outside hooks, as of a kind."""
        began = self._pauses.clock()
        try:
            yield
        finally:
            self._between_calls[kind] = self._between_calls.get(kind, 0.0) + self._pauses.clock() - began

    def goodput(self) -> dict[str, Any]:
        """Returns how the run's time was spent so far; see `Goodput.report`."""
        if self._is_open and self._status:
            self._end_window(self._status)
            self._writer.flush()
        return self._goodput.report()

    @property
    def spent(self) -> dict[str, float]:
        """How the time was spent up to the end of the last window; see `Goodput.spent`."""
        return self._goodput.spent

    @property
    def age(self) -> float:
        """Seconds since the newest window, or since the beginning."""
        return time.monotonic() - self._loop_began - self.latest.get("seconds", 0.0)

    def finish(self, reason: str, exit_code: int, is_fault: bool) -> None:
        """Records the end of a started run, when it is closed."""
        if self._status is None:
            return
        self._goodput.seconds["lost" if is_fault else "other"] += time.monotonic() - self._window_began
        step, text = self._status.step, reason[:_LONGEST_TEXT]
        if is_fault:
            cluster = self._around.get("cluster", {})
            tasks = [task["name"] for kind in ("workers", "servers") for task in cluster.get(kind, ())]
            blamed = next((task for task in tasks if text.startswith(f"{task} (")), None)  # with its address
            self._log.write("fault", step, text=text, task=blamed)
        self._log.write("end", step, reason=text, exit_code=exit_code, goodput=self._goodput.report())

    def _begin_window(self, status: Status, now: float) -> None:
        self._status, self._window_began = status, now
        self._hooks_before = dict(status.hook_seconds)
        self._paused_before = self._pauses.seconds

    def _end_window(self, status: Status) -> None:
        """Passes the window to the thread, and starts another."""
        now, before = time.monotonic(), self._hooks_before
        aside = {kind: seconds - before.get(kind, 0.0) for kind, seconds in status.hook_seconds.items()}
        for kind, seconds in self._between_calls.items():
            aside[kind] = aside.get(kind, 0.0) + seconds
        self._pauses.check()
        aside["down"] = self._pauses.seconds - self._paused_before
        self._between_calls = {}
        totals = self._window.take()
        figures = {**read_figures(self._inventory), **status.strategy.activity()} if totals.calls else {}
        elapsed, seconds = now - self._window_began, now - self._loop_began
        write = functools.partial(self._write_window, status, totals, elapsed, aside, figures, seconds, time.time())
        self._writer.submit(write)
        self._begin_window(status, now)

    def _write_window(
        self, status: Status, window: Totals, elapsed: float, aside, figures, seconds: float, at: float
    ) -> None:
        """Writes a window; reads calls' results, and so waits for the device. In the thread."""
        calls, compiling = (window.seconds, window.steps), window.compiling
        names = status.strategy.worker_names
        pairs = zip(names, window.workers(), strict=False)
        workers: list[dict[str, Any]] = [{"name": name, **worker} for name, worker in pairs]
        waited, waiting = _waits(workers, window) if workers else (window.input.get("input_wait_fraction", 0.0), 0.0)
        self._goodput.add(elapsed, calls, compiling, waited * window.seconds, waiting * window.seconds, aside)
        if not window.calls:
            return
        step_ms = 1e3 * window.seconds / max(1, window.steps)
        input_ms = step_ms * window.input.get("input_wait_fraction", 0.0)
        waits = [(worker["reduce_wait_ms"], worker["step_ms"]) for worker in workers if "reduce_wait_ms" in worker]
        alone = {"name": names[0], "step_ms": step_ms, "input_wait_ms": input_ms}
        values = dict(
            epoch=status.epochs,
            seconds=seconds,
            seconds_left=status.seconds_left,
            metrics=window.means(),
            **{name: float(value) for name, value in figures.items() if not isinstance(value, (list, dict))},
            **{name: value for name, value in figures.items() if isinstance(value, (list, dict))},
            **window.speeds,
            **window.input,
            reduce_fraction=sum(wait for wait, _ in waits) / max(1e-9, sum(ms for _, ms in waits)) if waits else None,
            workers=workers or [alone],
            spent=self._goodput.spent,
            memory_mb=environment.rss_mb(),
        )
        self._log.write("window", status.step, time=at, **values)
        self.latest = {"step": status.step, "until_step": status.until_step, **values}

    def _record_silence(self) -> None:
        """Records which tasks have become silent, and which answer again. Once per turn of the checking thread."""
        self._pauses.check()
        assert self._status  # `begin` has set it
        silent, step, now = self._status.strategy.silent(_SILENT_SECONDS), self._status.step, time.monotonic()
        for task in sorted({*silent} - {*self._silent}):
            self._log.write("fault", step, text=f"{task} does not answer", task=task, state="silent")
        for task in sorted({*self._silent} - {*silent}):
            self._log.write("warning", step, text=f"{task} answers", task=task, state="answers")
        self._silent = {task: self._silent.get(task, now) for task in silent}
        late = {task for task, since in self._silent.items() if now - since > _WARN_SECONDS}
        if new := sorted(late - self._warned):
            names, have = " and ".join(new), "has" if len(new) == 1 else "have"
            logging.warning("%s %s not answered for %g s: stopped, or out of reach", names, have, _WARN_SECONDS)
        self._warned = late

    def _record_warning(self, record: LogRecord) -> bool:
        """Records a logged warning or error. A filter: beside a handler, Python would not show them by default."""
        if record.levelno >= WARNING:
            values = {"text": record.getMessage()[:_LONGEST_TEXT], "task": getattr(record, "task", None)}
            if self._is_open:
                self.write("warning", **values)
            elif self._status is None:
                self._early.append({**values, "time": record.created})
        return True


def _waits(workers: list[dict[str, Any]], window: Totals) -> tuple[float, float]:
    """Returns the fractions of the time that workers, on average, waited for input and for each other.

    Synchronous workers wait for the slowest; around parameter servers, for those whose updates must come first.
    """

    def fractions(name: str) -> list[float]:
        return [1e-3 * worker.get(name, 0.0) * worker.get("steps", window.steps) / window.seconds for worker in workers]

    waited, reduce = sum(fractions("input_wait_ms")) / len(workers), fractions("reduce_wait_ms")
    if "lag" in workers[0]:
        return waited, max(0.0, 1.0 - sum(fractions("step_ms")) / len(workers))
    # The slowest one's wait is the exchange itself.
    return waited, sum(reduce) / len(workers) - min(reduce)
