"""The result of a call of the inner loop, which the device may still be computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..metrics.sums import LoopSums


class LoopResult(NamedTuple):
    """The result of one call: its metrics (unread), its steps, their seconds of input wait.

    Also, with several workers, their reports (`engine.strategies.workers.WorkerRows`), whether a program was compiled
    for it, and of a program with `prediction_specs`, what `metrics.predictions.in_order` takes.
    """

    sums: LoopSums
    steps: int
    input_seconds: float
    workers: Any = None
    compiles: bool = False
    rows: Sequence[Sequence[Any]] = ()

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, by the first worker's clock in the call. Waits for the call; None if it timed no step."""
        first = self.workers.read()[0] if self.workers else {}
        return first["seconds"] / first["steps"] if "seconds" in first and first["steps"] else None
