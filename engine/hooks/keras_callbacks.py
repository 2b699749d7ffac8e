"""Keras callbacks that only observe, as one hook: a run's epochs and figures, reported as `fit` does. Host code."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ..holdings import Holdings
from ..mesh.cuts import cut_of
from ..metrics.means import Sums
from .base import Status, Window, Windowed

_OF_WHOLE_WEIGHTS = ("save", "save_weights", "export", "get_weights", "set_weights", "load_weights")


class KerasCallbacks(Windowed):
    """Calls Keras callbacks where `fit` would; of several workers, on the chief.

    `on_epoch_begin` and `on_epoch_end` are called at each epoch, with its means as logs, and those of an evaluation
    that was made at its end as `val_NAME`; `on_test_begin` and `on_test_end` at each evaluation; `on_train_batch_end`
    once in `every_steps` steps, with the means since the last time, as single batches are not seen.
    `on_train_batch_begin` is not called. A callback that sets `self.model.stop_training` ends the run.

    Args:
      callbacks: `tf.keras.callbacks.Callback`s.
      every_steps: of `on_train_batch_end`; 0 is never.
    """

    name = "keras_callbacks"

    def __init__(self, callbacks: Sequence[tf.keras.callbacks.Callback], every_steps: int = 0):
        super().__init__(every_steps if any(map(_looks_at_batches, callbacks)) else 0)
        self._callbacks = list(callbacks)
        self._batches = Sums()
        self._logs: dict[str, float] = {}
        self._model: _Model | None = None  # of the chief

    def begin(self, status: Status) -> None:
        if not status.strategy.is_chief:
            return
        self._model = _Model(status.state.trainer)
        epochs = None if status.until_step is None else -(-status.until_step // status.steps_per_epoch)
        for callback in self._callbacks:
            callback.set_params({"epochs": epochs, "steps": status.steps_per_epoch, "verbose": 0})
            callback.set_model(self._model)
        self._tell("on_train_begin", {})
        if not status.last:
            self._tell("on_epoch_begin", status.epoch, {})

    def rewind(self, status: Status) -> None:
        """Tells callbacks nothing: Keras's loop never goes back."""

    def next_due(self, step: int, status: Status) -> int | None:
        ends = (step // status.steps_per_epoch + 1) * status.steps_per_epoch
        return min(ends, super().next_due(step, status) or ends)

    def __call__(self, status: Status) -> None:
        if self._model is None:
            return
        self._look(status)
        if self._model.stop_training:
            status.stop = status.stop or "stop_training of a Keras callback"

    def _look(self, status: Status) -> None:
        self.window.add(status)
        if status.sums is not None and self.every_steps:
            self._batches.add(status.sums)
        if self.is_due(status):
            self._tell("on_train_batch_end", (status.step - 1) % status.steps_per_epoch, self._batches.means())
            self._batches = Sums()
        if status.evaluation is not None:
            self._tell("on_test_begin", {})
            self._tell("on_test_end", dict(status.evaluation))
        if status.step % status.steps_per_epoch == 0:
            evaluation = {f"val_{name}": value for name, value in (status.evaluation or {}).items()}
            self._logs, self.window = {**self.window.means(), **evaluation}, Window()
            self._tell("on_epoch_end", status.epoch - 1, self._logs)
            if not (status.last or status.stop or self._model.stop_training):
                self._tell("on_epoch_begin", status.epoch, {})

    def end(self, status: Status) -> None:
        if self._model is not None:
            self._tell("on_train_end", self._logs)

    def host_state(self) -> dict:
        return {**super().host_state(), "batches": self._batches.host_state()}

    def restore_host_state(self, values: dict) -> None:
        super().restore_host_state(values)
        self._batches = Sums(values.get("batches"))

    def _tell(self, what: str, *arguments) -> None:
        for callback in self._callbacks:
            *numbers, logs = arguments
            getattr(callback, what)(*numbers, dict(logs))  # which one may write to


def _looks_at_batches(callback: tf.keras.callbacks.Callback) -> bool:
    base = tf.keras.callbacks.Callback
    methods = ((name, getattr(callback, name)) for name in ("on_train_batch_end", "on_batch_end"))
    return any(getattr(method, "__func__", method) is not getattr(base, name) for name, method in methods)


class _Model:
    """A trainer's model as callbacks see it: Keras's, with the run's optimizer to look at.

    Attributes:
      stop_training: set by a callback that wants the run to end.
    """

    def __init__(self, trainer):
        self.stop_training = False
        self.optimizer = _Optimizer(next(iter(Holdings(trainer).optimizers.values()), None))
        self._model = getattr(trainer, "model", None) or Holdings(trainer).models[0]

    def __getattr__(self, name: str):
        if name in _OF_WHOLE_WEIGHTS and any(map(cut_of, self._model.variables)):
            raise ValueError(
                f"a Keras callback asks for the model's {name}, and each replica has a part of the model; let the run "
                "save checkpoints, and export one of them"
            )
        return getattr(self._model, name)


class _Optimizer:
    """The run's optimizer, to look at."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def name(self) -> str:
        return self._optimizer.name

    @property
    def iterations(self):
        return self._optimizer.iterations

    @property
    def learning_rate(self) -> tf.Tensor:
        return self._optimizer.current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, value) -> None:
        raise ValueError("a Keras callback sets the learning rate, which the run does; use `learning_rate_schedule`")

    def get_config(self) -> dict:
        return {"name": self.name, "learning_rate": float(self.learning_rate)}
