"""A compiled step on a feed, as strategies run it. Used on the host."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ..data.feeds.feed import Feed
from ..metrics.sums import SumSpec
from ..state import TrainState
from .pace import Pace

_PREDICTIONS_BYTES = 64 << 20  # of a program's predictions, across processes, that are collected and exchanged at once
_STEPS_PER_COLLECTION = 16  # whose predictions are collected and exchanged at once, if their sizes are unknown


class Program:
    """A compiled step on a feed: `Strategy.program` makes it, `Strategy.run` executes it.

    Args:
      state: state that steps change, and whose step they advance; None for an evaluation, which counts its own.

    Attributes:
      jit: whether XLA compiles a whole call.
      unrolls: whether several small steps are one iteration, which takes longer to trace.
      returns_own_predictions: whether each process gets what steps return of its own examples only.
      first_batch: the number of an evaluation's first batch, by which its steps sample.
      evaluation_pace: the pace of an evaluation: its steps per call, in each of the processes that compute.
      prediction_specs: nest of specs of what steps return of each example, [examples, ...]; () if they return
        nothing, None if they are not traced.
    """

    jit = unrolls = False
    first_batch = 0
    returns_own_predictions = False
    prediction_specs: Any = ()

    def __init__(self, feed: Feed, state: TrainState | None = None):
        self.feed, self.state = feed, state
        self._done = 0
        self.evaluation_pace = Pace(target_seconds=0.5)

    @property
    def step(self) -> int:
        return self.state.step if self.state else self._done

    def on(self, feed: Feed) -> Program:
        """Returns this program, compiled once, on the feed of one call, beside which others may be made."""
        program = copy.copy(self)
        program.feed, program._done = feed, 0
        return program

    def restart(self) -> None:
        """Restarts an evaluation at its first step."""
        self._done = 0

    def advance(self, steps: int) -> None:
        """Counts steps that no compiled call counts."""
        if self.state:
            self.state.advance(steps)
        self._done += steps

    @contextlib.contextmanager
    def moving_to(self, step: int) -> Iterator[None]:
        """Advances to a step around a compiled call, which counts the state's steps itself."""
        with self.state.moving_to(step) if self.state else contextlib.nullcontext():
            yield
        self._done = step

    @property
    def steps_per_call(self) -> float:
        """The most steps of a call: one if their predictions may differ in size, inf if only the feed limits it."""
        shapes = [spec.shape[1:] for spec in tf.nest.flatten(self.prediction_specs or ())]
        return math.inf if all(shape.is_fully_defined() for shape in shapes) else 1

    @property
    def steps_per_collection(self) -> float:
        """The steps whose predictions are collected at once: all if there are none, one if they are not traced."""
        if self.prediction_specs is None:
            return 1
        if self.steps_per_call == 1:
            return _STEPS_PER_COLLECTION
        specs = tf.nest.flatten(self.prediction_specs)
        example_bytes = sum(x.shape[1:].num_elements() * max(1, x.dtype.size) for x in specs)
        # Predictions of all processes are exchanged at once and held by each until they are in order.
        return max(1, _PREDICTIONS_BYTES // (example_bytes * self.feed.order.batch_size)) if example_bytes else math.inf

    def trace(self) -> Sequence[SumSpec]:
        """Traces its step, if possible before its first call, and describes its sums of metrics."""
        return ()

    def close(self) -> None:
        """Frees the feed's read-ahead; running the program again reopens it."""
        self.feed.close()
