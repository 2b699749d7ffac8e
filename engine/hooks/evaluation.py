"""Evaluation during a run, with the weights' moving average where there is one. Host code."""

from __future__ import annotations

import contextlib
import math

from absl import logging

from ..holdings import Holdings
from ..metrics.means import values_by_name
from ..state import TrainState
from . import numerics
from .base import Periodic, Status

_CURE = (
    "look in the evaluation data for inf, nan and numbers far larger than training's, lower the learning rate or set "
    "clip_norm"
)


@contextlib.contextmanager
def averaged_weights(trainer):
    """Puts the moving average into every variable that has one, and restores the variables, to the bit, afterwards.

    Host code, outside of replicas: an assignment reaches the copies on all of them. Without `ema_decay` it does
    nothing.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in Holdings(trainer).optimizers.values():
            if optimizer.weight_average is not None:
                stack.enter_context(optimizer.weight_average.swapped_in())
        yield


def evaluate(strategy, state: TrainState) -> dict[str, float]:
    """Computes the metrics' means over the whole evaluation set that is bound to the strategy, and waits for them.

    Warns of those that are not finite, but for losses.

    Raises:
      LabelError: labels are not what a metric takes.
      NonfiniteError: a loss is not finite, or weights are not, which metrics may hide.
    """
    where = f"evaluation at step {state.step}"
    numerics.check_weights(state.trainer, where)
    with averaged_weights(state.trainer):
        pairs = strategy.evaluate().values()
    numerics.check_labels(pairs, where)
    means = values_by_name(pairs)
    wrong = [f"{name} is {value}" for name, value in sorted(means.items()) if not math.isfinite(value)]
    line = f"{where}: {', '.join(wrong)}; {_CURE}"
    if any(numerics.is_loss(name) and not math.isfinite(value) for name, value in means.items()):
        raise numerics.NonfiniteError(line)
    if wrong and strategy.is_chief:
        logging.warning("%s", line)
    return means


class Evaluation(Periodic):
    """Evaluates every so many steps and at the last one, and sets `status.evaluation`, {metric: mean}.

    Attributes:
      step: of the newest evaluation, a resumed run's too; None before the first on this data.
      result: of the newest evaluation, likewise.
    """

    name = "evaluation"

    def __init__(self, every_steps: int):
        super().__init__(every_steps, at_end=True)
        self.step: int | None = None
        self.result: dict[str, float] | None = None

    def act(self, status: Status) -> None:
        if status.step != self.step:
            self.result = evaluate(status.strategy, status.state)
            self.step = status.step
        status.evaluation = dict(self.result)

    def host_state(self) -> dict:
        return {"step": self.step, "result": self.result}

    def restore_host_state(self, values: dict) -> None:
        self.step, self.result = values.get("step"), values.get("result")

    def data_changed(self, splits: set[str]) -> None:
        if "eval" in splits:
            self.step = self.result = None
