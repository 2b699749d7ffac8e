"""Hooks that monitor one metric over evaluations: early stopping, lower learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .. import logging
from ..errors import UsageError, counted
from ..meter import Meter, Window
from ..metrics.monitored import Monitored
from ..metrics.sums import kinds_by_name
from ..state import TrainState
from ..trainer import computes_metrics
from .base import Hook, Period, Periodic, Status

_ROUNDING = 1e-6  # rounding of the scale, float32


class Monitor(Periodic):
    """Calls `observe` with the value of one metric at each evaluation.

    Its best value and that step (`best`, `best_step`) survive a restart. A metric without a value, e.g. a mean of
    nothing or the AUC of one class, has not improved.

    Args:
      monitor: `eval_NAME`, of the evaluation, or `train_NAME`, the mean over the steps since the last check; with its
        direction `max:eval_NAME` or `min:eval_NAME`, see `Monitored`.
      min_delta: smallest improvement that counts, exclusive.
      every_steps: period of checks for `train_NAME` in a run that does not evaluate.

    Attributes:
      monitored: the metric; its direction is known after `resolve`.
      monitor: its name, `eval_NAME` or `train_NAME`.

    Raises:
      UsageError: another name, or a metric that is not measured, or whose direction is unknown.
    """

    name = "monitor"
    reads_metrics = True

    def __init__(self, monitor: str, min_delta: float = 0.0, every_steps: int | Period = 0):
        super().__init__(every_steps)
        self.monitored = Monitored.parse(monitor)
        if every_steps and self.monitored.source == "eval":
            raise UsageError(
                f"monitor={monitor} needs evaluations, and this run makes none; use train_{self.monitored.metric}"
            )
        self.monitor = self.monitored.name
        self.min_delta = abs(min_delta)
        self.best: float | None = None
        self.best_step: int | None = None
        self._window: Window | None = None
        self._is_resolved = False
        self._best_by: str | None = None  # the direction of a restored best value

    def attach(self, state: TrainState, meter: Meter) -> None:
        if self.monitored.source == "train":
            self._window = meter.window(self.name)

    def resolve(self, kinds: Mapping[str, type], trainer: Any) -> None:
        """Looks up the metric and its direction among the measured ones. Called once before the first check."""
        others = self.monitored.source == "eval" and computes_metrics(trainer)
        self.monitored, self._is_resolved = self.monitored.directed(kinds, others), True
        if self._best_by not in (None, self.monitored.direction):
            self.forget()  # the best in the other direction

    def find_metrics(self, kinds: Mapping[str, type], trainer: Any) -> None:
        if self.monitored.source == "eval" or self.monitored.find(kinds):
            self.resolve(kinds, trainer)

    def is_due(self, status: Status) -> bool:
        return super().is_due(status) if self.every_steps else status.evaluation is not None

    def __call__(self, status: Status) -> None:
        if self._window and not self._is_resolved and (sums := status.segment.sums) is not None:
            self.resolve(kinds_by_name(sums.specs), status.state.trainer)
        super().__call__(status)

    def act(self, status: Status) -> None:
        if not self._is_resolved:
            self.resolve(kinds_by_name(status.strategy.traced_evaluations()), status.state.trainer)
        metrics = self._window.take().means() if self._window else status.evaluation or {}
        if self.monitored.source == "eval" and self.monitored.metric not in metrics:  # e.g. NAME_9 of four values
            raise self.monitored.not_measured(metrics)
        value = metrics.get(self.monitored.metric, math.nan)
        improved = self._is_better(value)
        if improved:
            self.best, self.best_step = value, status.step
        self.observe(status, value, improved)

    def observe(self, status: Status, value: float, improved: bool) -> None:
        """Handles a new value. `improved`: whether it is better than all before; then it is already `best`."""
        raise NotImplementedError

    def recall(self, values: dict) -> None:
        """Restores the best value from the result of `host_state`, unless its direction is another."""
        if not self._is_resolved or values.get("direction") in (None, self.monitored.direction):
            self.best, self.best_step, self._best_by = (values.get(key) for key in ("best", "best_step", "direction"))

    def forget(self) -> None:
        """Discards measurements."""
        self.best = self.best_step = None
        if self._window:
            self._window.take()

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.monitored.direction == "min" else value - self.best
        return gain > self.min_delta

    def host_state(self) -> dict:
        best = {"best": self.best, "best_step": self.best_step, "direction": self.monitored.direction}
        return {"monitor": self.monitor, **best}

    def restore_host_state(self, values: dict) -> None:
        if values.get("monitor") == self.monitor:  # another metric's best is irrelevant
            self.recall(values)

    def data_changed(self, splits: set[str]) -> None:
        if self.monitored.source in splits:
            self.forget()


class Patient(Monitor):
    """A monitor that calls `act_on_plateau` after `patience` successive evaluations without improvement.

    Evaluations off schedule, at a run's end, don't count.
    """

    def __init__(self, monitor: str, patience: int, **arguments):
        super().__init__(monitor, **arguments)
        if patience < 1:
            raise UsageError(f"patience={patience} is not a count of evaluations; use 1 or more")
        self.patience = patience
        self.waited = 0

    def is_due(self, status: Status) -> bool:
        # The evaluation at a run's end is off schedule: an extended run continues as if uninterrupted.
        return super().is_due(status) and (bool(self.every_steps) or not status.off_schedule)

    def observe(self, status: Status, value: float, improved: bool) -> None:
        self.waited = 0 if improved else self.waited + 1
        if self.waited >= self.patience:
            self.act_on_plateau(status)

    def act_on_plateau(self, status: Status) -> None:
        raise NotImplementedError

    def host_state(self) -> dict:
        return {**super().host_state(), "waited": self.waited}

    def restore_host_state(self, values: dict) -> None:
        super().restore_host_state(values)
        if values.get("monitor") == self.monitor:
            self.waited = values["waited"]

    def forget(self) -> None:
        super().forget()
        self.waited = 0


def reset_patience(hooks: Iterable[Hook]) -> bool:
    """Resets hooks that wait for an improvement; returns whether one of them has ended the run."""
    waiting = [hook for hook in hooks if isinstance(hook, Patient)]
    # First, since they forget below for how long they have waited.
    has_ended = any(isinstance(hook, EarlyStopping) and hook.waited >= hook.patience for hook in waiting)
    for hook in waiting:
        hook.forget()
    return has_ended


class EarlyStopping(Patient):
    """Ends the run if the metric has not improved for `patience` evaluations. If resumed then, it ends at once.

    Arguments are `monitor`, `patience`, and `Monitor`'s others by keyword.
    """

    name = "early_stopping"

    def begin(self, status: Status) -> None:
        if self.waited >= self.patience:
            self.act_on_plateau(status)

    def act_on_plateau(self, status: Status) -> None:
        best = "never a number" if self.best is None else f"best {self.best:.6g}"
        status.stop = status.stop or (
            f"{self.monitor} has not improved for {counted(self.waited, 'evaluation')} ({best}); "
            f"continue with a higher early-stopping patience than {self.patience}"
        )


class ReduceLearningRate(Patient):
    """Multiplies the learning rate by `factor` if the metric has not improved for `patience` evaluations.

    It lowers every optimizer's `learning_rate_scale`, a variable of the checkpoint, so schedules continue scaled.

    Args:
      factor: between 0 and 1, exclusive.
      min_scale: lower bound of the scale; reaching it is logged once.
      **arguments: `Monitor`'s others.
    """

    name = "reduce_learning_rate"

    def __init__(self, monitor: str, patience: int, factor: float = 0.5, min_scale: float = 1e-3, **arguments):
        super().__init__(monitor, patience, **arguments)
        if not 0 < factor < 1:
            raise UsageError(f"factor={factor} does not lower a learning rate; use one between 0 and 1, such as 0.5")
        self.factor = factor
        self.min_scale = min_scale
        self._warned = False

    def act_on_plateau(self, status: Status) -> None:
        self.waited = 0
        least = []
        for name, optimizer in status.state.trainer.inventory.optimizers.items():
            scale = float(optimizer.learning_rate_scale.numpy())
            if scale <= self.min_scale * (1 + _ROUNDING):
                least.append(name)
                continue
            lower = max(scale * self.factor, self.min_scale)
            optimizer.scale_learning_rate(lower)
            logging.info(
                "step %d: %s has not improved for %d evaluations: the learning rate of %s is scaled by %.3g now",
                status.step,
                self.monitor,
                self.patience,
                name,
                lower,
            )
        if least and not self._warned and status.strategy.is_chief:
            self._warned = True
            logging.warning(
                "step %d: %s has not improved for %d evaluations, and the learning rate of %s, scaled by %.3g, is not "
                "lowered further",
                status.step,
                self.monitor,
                self.patience,
                ", ".join(least),
                self.min_scale,
            )
