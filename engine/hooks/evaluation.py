"""Evaluation during a run, with the weights' moving average, if any. Host code."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from ..internals.variables import own_copy, tf_variable
from ..inventory import Inventory
from ..metrics.pairs import Confusion
from ..metrics.sums import Sums, nan_if_missing, values_by_name
from ..state import TrainState
from . import numerics
from .base import Hook, Period, Periodic, Status
from .sync_check import hashes

_CURE = (
    "look in the evaluation data for inf, nan and numbers far larger than training's, lower the learning rate or set "
    "clip_norm"
)


@contextlib.contextmanager
def averaged_weights(trainer, final: bool = False):
    """Sets every variable with a moving average to it, and restores the variables afterwards, to the bit.

    Host code, outside replicas: an assignment reaches the copies on all of them. Does nothing without `ema_decay`.

    Args:
      trainer: of the run.
      final: whether to use the averages of a Keras optimizer with `use_ema`, too, which evaluations use only after
        training.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in Inventory(trainer).optimizers.values():
            average = optimizer.weight_average or (optimizer.final_average() if final else None)
            if average is not None:
                stack.enter_context(average.averages_in_place())
        yield


class FinalWeights(Hook):
    """Ends a run with the averages of Keras's `use_ema` in the weights, after its last checkpoint, as `fit` does.

    Callbacks come after it, and may set other weights at their end, which it detects.

    Args:
      may_change: whether callbacks come after it.
    """

    name = "final_weights"
    ends_last = True

    def __init__(self, may_change: bool):
        self._may_change = may_change
        self._hashes: Callable[[], np.ndarray] | None = None

    def end(self, status: Status) -> None:
        inventory = Inventory(status.state.trainer)
        averages = [average for each in inventory.optimizers.values() if (average := each.final_average()) is not None]
        if self._may_change or averages:
            weights = [own_copy(tf_variable(each)) for each in (*inventory.all_weights, *inventory.moving_statistics)]
            self._hashes = lambda: hashes(weights)
            self._before = self._hashes()
        for average in averages:
            average.hand_over()

    @property
    def changed(self) -> bool:
        """Whether the weights differ from those after the last step."""
        return self._hashes is not None and bool((self._hashes() != self._before).any())


class Evaluated(dict[str, float]):
    """The means of an evaluation by name, and its other results.

    Args:
      means: by name; an `Evaluated` is copied.
      confusion: the confusion matrices by the metric's name; None takes those of `means`, if any.

    Attributes:
      confusion: the confusion matrices, int64 [classes, classes], labels by predictions; by the metric's name.
    """

    def __init__(self, means: Mapping[str, float], confusion: Mapping[str, Any] | None = None):
        super().__init__(means)
        matrices = getattr(means, "confusion", {}) if confusion is None else confusion
        self.confusion = {name: np.asarray(each, np.int64) for name, each in matrices.items()}

    def host_state(self) -> dict[str, Any]:
        """Returns its state for checkpoints, plain JSON."""
        confusion = {name: each.tolist() for name, each in self.confusion.items()}
        return {"result": dict(self), **({"confusion": confusion} if confusion else {})}

    @classmethod
    def from_host_state(cls, values: Mapping[str, Any]) -> Evaluated | None:
        """Restores it from the result of `host_state`; None for a checkpoint without it."""
        return None if values.get("result") is None else cls(values["result"], values.get("confusion", {}))


def evaluate(strategy, state: TrainState, program=None, is_strict: bool = True, **between: Any) -> Evaluated:
    """Computes the metrics' means over an evaluation set, and waits for them.

    Means of nothing, e.g. a share of 0 examples or the AUC of one class, are NaN. Warns of other non-finite values,
    except losses.

    Args:
      strategy: of the run.
      state: of the run.
      program: of the evaluation; None is the run's own.
      is_strict: whether weights and losses must be finite.
      **between: see `Strategy.evaluate`.

    Raises:
      LabelError: a metric does not accept the labels.
      NonfiniteError: a loss or weights are not finite; metrics may hide the latter.
    """
    title = f"evaluation at step {state.step}"
    if is_strict:
        numerics.check_weights(state.trainer, title)
    with averaged_weights(state.trainer):
        pairs = strategy.evaluate(program, **between).values()
    numerics.check_labels(pairs, title)
    values = values_by_name(pairs)
    wrong = {name: value for name, value in sorted(values.items()) if value is not None and not math.isfinite(value)}
    line = f"{title}: {', '.join(f'{name} is {value}' for name, value in wrong.items())}; {_CURE}"
    if is_strict and any(map(numerics.is_loss, wrong)):
        raise numerics.NonfiniteError(line)
    if wrong and strategy.is_chief:
        logging.warning("%s", line)
    return Evaluated(
        nan_if_missing(values), {name: pair.matrix() for name, pair in pairs.items() if isinstance(pair, Confusion)}
    )


class Evaluation(Periodic):
    """Evaluates periodically and at the last step, and sets `status.evaluation`, {metric: mean}.

    Args:
      every_steps: the period.
      before: called before each evaluation that is due by it.
      between: see `Strategy.evaluate`, of such an evaluation; None is not called.
      is_wanted: returns whether to evaluate at the end of a period.
      is_strict: see `evaluate`.

    Attributes:
      step: of the newest evaluation, also a resumed run's; None before the first on this data.
      result: of the newest evaluation, likewise.
    """

    name = "evaluation"
    spent_on = "evaluation"

    def __init__(
        self,
        every_steps: int | Period,
        before: Sequence[Callable[[Status], None]] = (),
        is_wanted: Callable[[Status], bool] = lambda status: True,
        is_strict: bool = True,
        between: Callable[[int, int, Sums], int | None] | None = None,
    ):
        super().__init__(every_steps, at_end=True)
        self._before, self._is_wanted, self._is_strict = before, is_wanted, is_strict
        self._between = between
        self.step: int | None = None
        self.result: Evaluated | None = None

    def ends_period(self, status: Status) -> bool:
        return super().ends_period(status) and self._is_wanted(status)

    def act(self, status: Status) -> None:
        status.off_schedule = not self.ends_period(status)
        if status.step != self.step:
            for call in () if status.off_schedule else self._before:
                call(status)
            between = {} if status.off_schedule or self._between is None else {"between": self._between}
            self.result = evaluate(status.strategy, status.state, is_strict=self._is_strict, **between)
            self.step = status.step
        status.evaluation = Evaluated(self.result)

    def host_state(self) -> dict:
        return {"step": self.step, **(self.result.host_state() if self.result else {})}

    def restore_host_state(self, values: dict) -> None:
        self.step, self.result = values.get("step"), Evaluated.from_host_state(values)

    def data_changed(self, splits: set[str]) -> None:
        if "eval" in splits:
            self.step = self.result = None
