"""Warns of what slows a run: steps that wait for input, and a worker that is slower than the others.

What workers exchange anyway is read for that every few seconds, which waits for the devices to reach the newest of it.
"""

from __future__ import annotations

import statistics
import time

from .. import logging
from ..meter import Meter
from ..state import TrainState
from .base import Hook, Status

_SLOW_RATIO = 1.5  # of the time of a worker's own part of a step to the others' median


class InputBound(Hook):
    """Warns, once per run, if steps wait for input for more than a fraction of a window's time.

    No window includes the first call, which compiles and reads without read-ahead.

    Args:
      fix: what to change, the end of the message.
      fraction: the fraction of the time above which it warns.
      window_seconds: minimum time of a window's steps.
    """

    name = "input_bound"

    def __init__(self, fix: str, fraction: float = 0.1, window_seconds: float = 5.0):
        super().__init__()
        self._fix, self._fraction, self._window_seconds = fix, fraction, window_seconds
        self._began = self._has_warned = False

    def attach(self, state: TrainState, meter: Meter) -> None:
        self._window = meter.window()

    def __call__(self, status: Status) -> None:
        if not self._began:
            self._began = True
            self._window.take()
        if self._has_warned or self._window.seconds < self._window_seconds:
            return
        totals = self._window.take()
        waits = totals.input["input_wait_fraction"]
        if waits > self._fraction:
            self._has_warned = True
            logging.warning(
                "step %d: steps wait for input %.0f%% of the time (%s examples/s); %s",
                status.step,
                100 * waits,
                f"{totals.speeds['examples_per_sec']:,.0f}",
                self._fix,
            )


class Stragglers(Hook):
    """Warns of a worker whose own part of a step takes far longer than the others' median for some time.

    Does not warn if that part is unknown, as on GPUs.

    Args:
      window_seconds: the seconds over which a worker is observed.
      windows: number of successive slow windows before a warning, which is repeated after as many.
    """

    name = "stragglers"

    def __init__(self, names, window_seconds: float = 5.0, windows: int = 3):
        self._names = names
        self._window_seconds = window_seconds
        self._windows = windows
        self._slow = [0] * len(names)  # windows in a row
        self._began = 0.0

    def attach(self, state: TrainState, meter: Meter) -> None:
        self._window = meter.window()

    def begin(self, status: Status) -> None:
        self._began = time.monotonic()

    def __call__(self, status: Status) -> None:
        if time.monotonic() - self._began >= self._window_seconds:
            self._look(status.step)
            self._began = time.monotonic()

    def _look(self, step: int) -> None:
        workers = {worker: its for worker, its in enumerate(self._window.take().workers()) if "own_ms" in its}
        if len(workers) < 2:
            return
        for worker, figures in workers.items():
            others = statistics.median(its["own_ms"] for other, its in workers.items() if other != worker)
            is_slow = figures["own_ms"] > _SLOW_RATIO * others
            self._slow[worker] = self._slow[worker] + 1 if is_slow else 0
            if self._slow[worker] and self._slow[worker] % self._windows == 0:
                logging.warning(
                    "step %d: %s is slow: %.3g ms per step by itself, %.3g of them waiting for data; the median of the "
                    "others is %.3g ms; look at what else its host does",
                    step,
                    self._names[worker],
                    figures["own_ms"],
                    figures["input_wait_ms"],
                    others,
                    extra={"task": self._names[worker]},
                )
