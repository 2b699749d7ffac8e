"""The outer loop, on the host: run steps until something is due, then do what is due. Knows no model, no device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.metrics import LoopSums

if TYPE_CHECKING:
    from engine.hooks import Hook
    from engine.state import TrainState


@dataclasses.dataclass
class Moment:
    """Where a run is: one small record, handed to every hook after each call of the inner loop.

    Attributes:
      step: global steps (updates) done.
      until_step: where the run ends.
      steps: steps done by this call.
      examples: in the batches of this call; an epoch's last batch may be a smaller one.
      steps_per_epoch: of the training data.
      sums: this call's metrics, unread: reading waits for the device.
      seconds, input_seconds: wall time of this call, and its part spent waiting for input.
      state: the `TrainState`.
      strategy: the strategy, for hooks that evaluate.
      evaluation: the metrics of an evaluation at this step, once a hook has made one.
      stop: a hook that wants the run to end here says why.
    """

    step: int
    until_step: int
    steps: int
    examples: int
    steps_per_epoch: int
    sums: LoopSums | None
    seconds: float
    input_seconds: float
    state: TrainState
    strategy: Any
    evaluation: dict[str, float] | None = None
    stop: str | None = None

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.step // self.steps_per_epoch

    @property
    def last(self) -> bool:
        return self.step >= self.until_step


def train(strategy, state: TrainState, hooks: Sequence[Hook], until_step: int, clock=time.perf_counter) -> Moment:
    """Trains up to `until_step`, calling each hook, in order, after each call of the inner loop.

    Returns:
      The last moment; its `stop` says why a run ended early.
    """
    feed_order = strategy.train_order
    moment = Moment(state.step, until_step, 0, 0, feed_order.steps_per_epoch, None, 0.0, 0.0, state, strategy)
    for hook in hooks:
        hook.begin(moment)
    before = clock()
    while state.step < until_step and not moment.stop:
        due = min([until_step, *(d for hook in hooks if (d := hook.next_due(state.step, moment)) is not None)])
        first = state.step
        result = strategy.run_train_steps(due - first)
        after = clock()
        moment = dataclasses.replace(
            moment,
            step=state.step,
            steps=result.steps,
            examples=feed_order.examples_before(first + result.steps) - feed_order.examples_before(first),
            sums=result.sums,
            seconds=after - before,
            input_seconds=result.input_seconds,
            evaluation=None,
        )
        for hook in hooks:
            hook(moment)
        before = clock()  # what hooks take is theirs, not the steps'
    for hook in hooks:
        hook.end(moment)
    return moment
