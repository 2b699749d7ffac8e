"""Evaluation during a run, with the weights' moving average, if any."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import logging
from ..internals.variables import own_copy, tf_variable
from ..metrics.computed import Computed, compute
from ..metrics.means import is_loss
from ..metrics.pairs import Confusion
from ..metrics.predictions import Collector, Predictions
from ..metrics.sums import Sums, nan_if_missing, values_by_name
from ..state import TrainState
from ..strategies.base import Interrupted
from ..trainer import computes_metrics
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

    Call it outside replicas: an assignment reaches the copies on all of them. Does nothing without `ema_decay`.

    Args:
      final: whether to use the averages of Keras's `use_ema`, too, which evaluations use only after training.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in trainer.inventory.optimizers.values():
            average = optimizer.weight_average or (optimizer.final_average() if final else None)
            if average is not None:
                stack.enter_context(average.averages_in_place())
        yield


def hand_over_final_averages(trainer) -> None:
    """Replaces weights by the averages of Keras's `use_ema`, if any."""
    for average in _final_averages(trainer):
        average.hand_over()


def _final_averages(trainer) -> list[Any]:
    averages = [optimizer.final_average() for optimizer in trainer.inventory.optimizers.values()]
    return [average for average in averages if average is not None]


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
        inventory = status.state.trainer.inventory
        if self._may_change or _final_averages(status.state.trainer):
            weights = [
                own_copy(tf_variable(weight)) for weight in (*inventory.all_weights, *inventory.moving_statistics)
            ]
            self._hashes = lambda: hashes(weights).numpy()
            self._before = self._hashes()
        hand_over_final_averages(status.state.trainer)
        self._averaged = self._hashes() if self._hashes else None

    @property
    def changed(self) -> bool:
        """Whether the weights differ from those after the last step."""
        return self._hashes is not None and bool((self._hashes() != self._before).any())

    @property
    def set_by_callbacks(self) -> bool:
        """Whether callbacks have set other weights, which no checkpoint has."""
        return self._hashes is not None and bool((self._hashes() != self._averaged).any())


class Evaluated(dict[str, float]):
    """The metrics of an evaluation by name, and its other results.

    Args:
      confusion: the confusion matrices by the metric's name, integers [classes, classes], labels by predictions.
      partial: (the number of batches evaluated, the number of all) if only the first were; else None.
      shown: what `Trainer.compute_metrics` has returned for TensorBoard; not in checkpoints.

    Attributes:
      confusion: the argument's matrices, as int64 arrays.
    """

    def __init__(
        self,
        metrics: Mapping[str, float],
        confusion: Mapping[str, Any] | None = None,
        partial: Sequence[int] | None = None,
        shown: Computed | None = None,
    ):
        super().__init__(metrics)
        self.confusion = {name: np.asarray(counts, np.int64) for name, counts in (confusion or {}).items()}
        self.partial = tuple(partial) if partial else None
        self.shown = shown or Computed()

    @classmethod
    def joined(cls, sets: Mapping[str, Evaluated]) -> Evaluated:
        """Joins the evaluations of several sets as NAME/METRIC; partial as the longest of them is."""

        def named(values: Callable[[Evaluated], Mapping[str, Any]]) -> dict[str, Any]:
            return {f"{name}/{key}": value for name, one in sets.items() for key, value in values(one).items()}

        shown = Computed(
            named(lambda one: one.shown.metrics),
            named(lambda one: one.shown.texts),
            named(lambda one: one.shown.images),
        )
        partial = max((one.partial for one in sets.values() if one.partial), key=lambda x: x[1], default=None)
        return cls(named(lambda one: one), named(lambda one: one.confusion), partial, shown)

    @property
    def title(self) -> str:
        """Title of printed lines: on all batches, or on the first of them."""
        return "evaluation of the first {:,} of {:,} batches".format(*self.partial) if self.partial else "evaluation"

    @property
    def batches(self) -> dict[str, int]:
        """Its entry in results and records: the number of batches of a partial evaluation."""
        return {"eval_batches": self.partial[0]} if self.partial else {}

    def host_state(self) -> dict[str, Any]:
        """Returns its state for checkpoints, plain JSON."""
        confusion = {name: counts.tolist() for name, counts in self.confusion.items()}
        return {"result": dict(self), "confusion": confusion, "partial": self.partial}

    @classmethod
    def from_host_state(cls, values: Mapping[str, Any]) -> Evaluated | None:
        """Restores it from the result of `host_state`; None for a checkpoint without it."""
        result = values.get("result")
        return None if result is None else cls(result, values.get("confusion"), values.get("partial"))


def evaluate(
    strategy,
    state: TrainState,
    program=None,
    is_strict: bool = True,
    batches: int | None = None,
    directory: str | None = None,
    **between: Any,
) -> Evaluated:
    """Computes the metrics over an evaluation set, and waits for them; over several as NAME/METRIC.

    Means of nothing, e.g. an accuracy of 0 examples or the AUC of one class, are NaN. Warns of other non-finite values,
    except losses.

    Args:
      program: the program of the evaluation; None is the run's own, of all sets.
      is_strict: whether weights and losses must be finite.
      batches: how many of the first batches to evaluate; None or 0 is all.
      directory: folder for temporary files of predictions over `Trainer.predictions_memory_mb`; None is the system's.

    Raises:
      LabelError: a metric does not accept the labels.
      NonfiniteError: a loss or weights are not finite; metrics may hide the latter.
      UsageError: `Trainer.compute_metrics` has returned something else than described there.
    """
    title, sets = f"evaluation at step {state.step}", dict[str, Evaluated]()
    if is_strict:
        numerics.check_weights(state.trainer, title, strategy)
    for name, one in ({"": program} if program else strategy.evaluations).items():
        of_set = f"{title}, {name}" if name else title
        sets[name] = _evaluate_set(strategy, state, one, of_set, is_strict, batches, directory, **between)
    return sets[""] if "" in sets else Evaluated.joined(sets)


def _evaluate_set(
    strategy,
    state: TrainState,
    program: Any,
    title: str,
    is_strict: bool,
    batches: int | None,
    directory: str | None,
    **between: Any,
) -> Evaluated:
    trainer, epoch = state.trainer, program.feed.order.steps_per_epoch
    partial = (batches, epoch) if batches and batches < epoch else None
    collector = Collector(trainer.predictions_memory_mb * (1 << 20), directory, title)
    keeps = computes_metrics(trainer) and strategy.is_chief
    with averaged_weights(trainer):
        keep = {"keep": collector.add} if keeps else {}
        pairs = strategy.evaluate(program, batches=batches or None, **keep, **between).values()
        numerics.check_labels(pairs, title)
        values = values_by_name(pairs)
        computed = Computed()
        if computes_metrics(trainer):
            computed = compute(trainer, strategy, lambda: Predictions(collector.all(), bool(partial)), values)
    values |= computed.metrics
    wrong = {name: value for name, value in sorted(values.items()) if value is not None and not math.isfinite(value)}
    line = f"{title}: {', '.join(f'{name} is {value}' for name, value in wrong.items())}; {_CURE}"
    if is_strict and any(map(is_loss, wrong)):
        raise numerics.NonfiniteError(line)
    if wrong and strategy.is_chief:
        logging.warning("%s", line)
    confusion = {name: pair.matrix() for name, pair in pairs.items() if isinstance(pair, Confusion)}
    return Evaluated(nan_if_missing(values), confusion, partial, computed)


class Evaluation(Periodic):
    """Evaluates periodically and at the last step, and sets `status.evaluation`, {metric: mean}.

    Args:
      around: return contexts, each entered around an evaluation.
      between: see `Strategy.evaluate`, of such an evaluation; None is not called.
      is_wanted: returns whether to evaluate at the end of a period.
      is_strict, batches, directory: see `evaluate`.
      ends: see `Strategy.evaluate`. What it interrupts is done again before the next step, also of a resumed run.

    Attributes:
      step: the step of the newest evaluation, also a resumed run's; None before the first on this data.
      result: the result of the newest evaluation, also a resumed run's; None before the first on this data.
    """

    name = "evaluation"
    spent_on = "evaluation"

    def __init__(
        self,
        every_steps: int | Period,
        around: Sequence[Callable[[Status], contextlib.AbstractContextManager]] = (),
        is_wanted: Callable[[Status], bool] = lambda status: True,
        is_strict: bool = True,
        between: Callable[[int, int, Sums], int | None] | None = None,
        batches: int | None = None,
        directory: str | None = None,
        ends: Callable[[], str | None] = lambda: None,
    ):
        super().__init__(every_steps, at_end=True)
        self._around, self._is_wanted, self._between = around, is_wanted, between
        self._options: dict[str, Any] = {"is_strict": is_strict, "batches": batches, "directory": directory}
        self._options["ends"] = ends
        self.step: int | None = None
        self.result: Evaluated | None = None

    def __call__(self, status: Status) -> None:
        self.is_pending = False
        super().__call__(status)

    def ends_period(self, status: Status) -> bool:
        return super().ends_period(status) and self._is_wanted(status)

    def act(self, status: Status) -> None:
        status.off_schedule = not self.ends_period(status)
        # A run that is resumed from this step may have its evaluation already.
        if status.step != self.step:
            between: dict[str, Any] = {} if status.off_schedule or self._between is None else {"between": self._between}
            try:
                with contextlib.ExitStack() as stack:
                    for context in self._around:
                        stack.enter_context(context(status))
                    self.result = evaluate(status.strategy, status.state, **self._options, **between)
            except Interrupted:
                self.is_pending = True
                raise
            self.step = status.step
        status.evaluation = copy.copy(self.result)

    def host_state(self) -> dict:
        pending = {"is_pending": True} if self.is_pending else {}
        return {"step": self.step, **pending, **(self.result.host_state() if self.result else {})}

    def restore_host_state(self, values: dict) -> None:
        self.is_pending = values.get("is_pending", False)
        self.step, self.result = values.get("step"), Evaluated.from_host_state(values)

    def data_changed(self, splits: set[str]) -> None:
        if "eval" in splits:
            self.step = self.result = None
