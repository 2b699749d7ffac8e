"""Says once that a run waits for its input. Host code."""

from __future__ import annotations

from absl import logging

from .base import Hook, Rates, Status


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
        self._rates: Rates | None = None
        self._said = False

    def __call__(self, status: Status) -> None:
        if self._rates is None:
            self._rates = Rates()
            return
        self._rates.add(status)
        if self._said or self._rates.seconds < self._window_seconds:
            return
        rates, self._rates = self._rates, Rates()
        waits = rates.input["input_wait_fraction"]
        if waits > self._share:
            self._said = True
            logging.warning(
                "step %d: steps wait for input %.0f%% of the time (%s examples/s); %s",
                *(status.step, 100 * waits, f"{rates.speeds['examples_per_sec']:,.0f}", self._cure),
            )
