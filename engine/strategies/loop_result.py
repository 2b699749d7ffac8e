"""The result of a call of the inner loop, which the device may still be computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..metrics.sums import LoopSums


class WorkerFigures:
    """Each worker's figures of one call, unread. Reading waits for the devices."""

    def __init__(self, names: list[str], tensor: tf.Tensor | np.ndarray):
        self._names = names
        self._tensor = tensor
        self._read: list[dict[str, float]] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host has the figures, and need not wait for them."""
        return self._read is not None

    def read(self) -> list[dict[str, float]]:
        """Returns a dictionary per worker, in order.

        It has what the host reports (requests, the next number of steps); `seconds` (except on GPUs, which work
        asynchronously) and `steps` of the call; `input_seconds`, spent waiting for data before and in it; and, in
        training, the figures of `engine.reduction.Reduction.pop_figures` over its steps.
        """
        if self._read is None:
            array = np.asarray(self._tensor, np.float64)
            self._read = [dict(zip(self._names, map(float, values), strict=True)) for values in array]
        return self._read


class LoopResult(NamedTuple):
    """The result of one call: its metrics (unread), its steps, their seconds of input wait.

    Also, with several workers, their figures, whether a program was compiled for it, and of a program with
    `prediction_specs`, what `metrics.predictions.in_order` takes.
    """

    sums: LoopSums
    steps: int
    input_seconds: float
    workers: WorkerFigures | None = None
    compiles: bool = False
    predictions: Sequence[Sequence[Any]] = ()

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, by the first worker's clock in the call. Waits for the call; None if it timed no step."""
        first = self.workers.read()[0] if self.workers else {}
        return first["seconds"] / first["steps"] if "seconds" in first and first["steps"] else None
