"""Says once that a run waits for its input. Host code."""

from __future__ import annotations

from absl import logging

from ..meter import Meter
from ..state import TrainState
from .base import Hook, Status


class InputBound(Hook):
    """Warns, once a run, where steps wait for input for more than a share of a window's time.

    The first call, which compiles and reads what nothing has read ahead, is in no window.

    Args:
      cure: what to change, the end of the message.
      share: of the time, above which it is said.
      window_seconds: least time of the steps that are looked at together.
    """

    name = "input_bound"

    def __init__(self, cure: str, share: float = 0.1, window_seconds: float = 5.0):
        super().__init__()
        self._cure, self._share, self._window_seconds = cure, share, window_seconds
        self._began = self._said = False

    def attach(self, state: TrainState, meter: Meter) -> None:
        self._window = meter.window()

    def __call__(self, status: Status) -> None:
        if not self._began:
            self._began = True
            self._window.take()
        if self._said or self._window.seconds < self._window_seconds:
            return
        totals = self._window.take()
        waits = totals.input["input_wait_fraction"]
        if waits > self._share:
            self._said = True
            logging.warning(
                "step %d: steps wait for input %.0f%% of the time (%s examples/s); %s",
                *(status.step, 100 * waits, f"{totals.speeds['examples_per_sec']:,.0f}", self._cure),
            )
