"""How the workers of a run fare, each by itself: figures for TensorBoard, and a warning that names a slow one. Host
code; reads what the workers have told each other anyway, so it waits for nothing."""

from __future__ import annotations

import statistics
import time

from absl import logging

from engine.hooks import Hook, Moment
from engine.strategies.workers import WorkerRows


class WorkerWindow:
    """The rows of some calls of the inner loop, added up by worker."""

    IN_FLIGHT = 2  # calls that a device may be at work on yet: their rows are left unread

    def __init__(self):
        self._unread: list[WorkerRows] = []
        self._sums: list[dict[str, float]] = []
        self._norms: list[float] = []

    def add(self, rows: WorkerRows) -> None:
        self._unread.append(rows)
        self._read_all_but(self.IN_FLIGHT)

    def _read_all_but(self, newest: int) -> None:
        done = len(self._unread) - newest
        for rows in self._unread[: max(0, done)]:
            found = rows.read()
            self._sums = self._sums or [dict.fromkeys(row, 0.0) for row in found]
            self._sums = [
                {name: before[name] + row[name] for name in row} for before, row in zip(self._sums, found, strict=True)
            ]
            self._norms = [row["gradient_norm"] for row in found]
        del self._unread[: max(0, done)]

    def take(self) -> list[dict[str, float]]:
        """What the window holds; it is empty afterwards. Waits for the calls that were added.

        Returns:
          A dictionary for each worker, none if no call was added: milliseconds a step `step_ms` (all of it), `own_ms`
          (without waiting for other workers), `input_wait_ms`, `reduce_wait_ms`, and `gradient_norm`, of the newest
          call's last step.
        """
        self._read_all_but(0)
        sums, self._sums = self._sums, []
        return [_figures(row, norm) for row, norm in zip(sums, self._norms, strict=bool(sums))]


def _figures(sums: dict[str, float], norm: float) -> dict[str, float]:
    a_step = 1e3 / max(1.0, sums["steps"])
    return {
        "step_ms": a_step * sums["seconds"],
        "own_ms": a_step * (sums["seconds"] - sums["reduce_seconds"]),
        "input_wait_ms": a_step * sums["input_seconds"],
        "reduce_wait_ms": a_step * sums["reduce_seconds"],
        "gradient_norm": norm,
    }


class Stragglers(Hook):
    """Warns of a worker whose own part of a step takes far longer than the others' median, for a while.

    Args:
      names: what messages call the workers.
      ratio: how many times the median of the other workers.
      window_seconds: over which a worker is looked at.
      windows: how many in a row it has to be slow; it is named again after each as many.
      clock: seconds, for tests.
    """

    name = "stragglers"

    def __init__(self, names, ratio: float = 1.5, window_seconds: float = 5.0, windows: int = 3, clock=time.monotonic):
        self._names = names
        self._ratio = ratio
        self._window_seconds = window_seconds
        self._windows = windows
        self._clock = clock
        self._window = WorkerWindow()
        self._slow = [0] * len(names)  # windows in a row
        self._began = 0.0

    def begin(self, moment: Moment) -> None:
        self._began = self._clock()

    def __call__(self, moment: Moment) -> None:
        if moment.workers is None:
            return
        self._window.add(moment.workers)
        if self._clock() - self._began >= self._window_seconds:
            self._look(moment.step)
            self._began = self._clock()

    def _look(self, step: int) -> None:
        found = self._window.take()
        for worker, figures in enumerate(found):
            others = statistics.median(each["own_ms"] for i, each in enumerate(found) if i != worker)
            is_slow = figures["own_ms"] > self._ratio * others
            self._slow[worker] = self._slow[worker] + 1 if is_slow else 0
            if self._slow[worker] and self._slow[worker] % self._windows == 0:
                logging.warning(
                    "step %d: %s is slow: %.3g ms a step by itself, %.3g of them waiting for data; the median of the "
                    "others is %.3g ms; look at what else its host does",
                    step,
                    self._names[worker],
                    figures["own_ms"],
                    figures["input_wait_ms"],
                    others,
                )
