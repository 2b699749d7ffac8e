"""How many steps a closure takes. Coordinator code."""

from __future__ import annotations

from ..pacing import Pace
from .coordinator import Done

# Of a closure: to start one and to take it back costs about 10 ms, of the one coordinator's time too, so that of many
# workers each is left alone for longer.
_CLOSURE_SECONDS = 0.25
_WORKERS_AT_THAT = 8


class ClosurePace:
    """Fits closures to a length in seconds, which grows with the workers.

    Args:
      workers: how many there are.
      steps_per_loop: a fixed number of steps, or 0 to fit them.
      handed_out: how many closures were before; the first that each worker takes then is compiled, and tells nothing.
    """

    def __init__(self, workers: int, steps_per_loop: int = 0, handed_out: int = 0):
        seconds = _CLOSURE_SECONDS * max(1.0, workers / _WORKERS_AT_THAT)
        self._pace = Pace(steps_per_loop, target_seconds=seconds)
        self._compiled = handed_out + workers  # the number of the last one

    @property
    def steps(self) -> int:
        """How many the next closure is to take, at most."""
        return self._pace.steps

    def fit(self, done: Done) -> None:
        """Fits the next closures by one that has come back, if it is of the newest length."""
        steps = done.lease.stop - done.lease.first
        if steps == self.steps and done.lease.number > self._compiled:
            self._pace.fit(steps, done.returned.seconds)
