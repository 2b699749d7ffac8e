"""Keras callbacks, as they are, as one hook: called where `fit` would call them, on a model as they know it. Host code.

What they set, the learning rate, weights, `stop_training`, holds on all processes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ..holdings import Holdings
from ..mesh.cuts import cut_of
from ..metrics.means import kinds_of
from ..metrics.monitored import Monitored
from ..state import TrainState
from .base import Status, Window, Windowed

_OF_WHOLE_WEIGHTS = ("save", "save_weights", "export", "get_weights", "set_weights", "load_weights")
_SETS_WEIGHTS = ("set_weights", "load_weights")
_AT_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# Keras's own that have methods for batches and, as they were made, do nothing in them that a run does not do.
_IDLE_AT_BATCHES = {
    "ModelCheckpoint": lambda callback: callback.save_freq == "epoch",
    "TensorBoard": lambda callback: callback.update_freq == "epoch" and not callback.write_steps_per_second,
    "TerminateOnNaN": lambda callback: True,  # the run itself ends there, unless it is to skip such a step
}
# What a checkpoint keeps of Keras's own; of others, what their get_state returns.
_KEPT = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("best",),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
}
_STOP = "stop_training of a Keras callback"
_WITHOUT_STATE = ("CSVLogger", "LambdaCallback", "LearningRateScheduler", "RemoteMonitor", "TensorBoard")
# Those that need Keras's own loop, and what does the same here.
_INSTEAD = {
    "BackupAndRestore": "`run_dir`, from which a run resumes to the same bits,",
    "OrbaxCheckpoint": "`run_dir` with `checkpoint_every_steps`",
    "ProgbarLogger": "`progress`",
    "SwapEMAWeights": "`ema_decay`",
}


class KerasCallbacks(Windowed):
    """Calls Keras callbacks where `fit` would; of several workers, on the chief.

    Logs are Keras's: the epoch's means so far, `val_NAME` of an evaluation at its end, and as `loss` what is minimized,
    with what layers add. Batch methods are called at each batch where a callback overrides them, which makes each step
    a call of its own; `on_test_batch_*` are not called. A callback that sets `self.model.stop_training` ends the run,
    and `self.model.optimizer.learning_rate` may be read and set. Other attributes of `self.model` are the trainer's
    Keras model's.

    Args:
      callbacks: `tf.keras.callbacks.Callback`s.
      epoch_steps: of an epoch as callbacks see it; None is the data's.
      first_epoch: the number of the run's first epoch.
      batch_stride: batches from one call of the batch methods to the next, Keras's `steps_per_execution`.
      verbose: what `self.params` has of it.

    Attributes:
      given: the callbacks.
      history: Keras's `History` of the run, on each process.

    Raises:
      ValueError: a callback needs Keras's own loop; says what to use here.
    """

    name = "keras_callbacks"
    ends_last = True  # so that a run goes on from its last weights, though it ends with the best

    def __init__(
        self,
        callbacks: Sequence[tf.keras.callbacks.Callback],
        *,
        epoch_steps: int | None = None,
        first_epoch: int = 0,
        batch_stride: int = 1,
        verbose: int = 0,
    ):
        super().__init__(0)
        for callback in callbacks:
            if instead := next((cure for name, cure in _INSTEAD.items() if name in _kinds(callback)), None):
                raise ValueError(
                    f"Keras callback {type(callback).__name__} is for Keras's own loop; use {instead} in its place"
                )
        self.history = tf.keras.callbacks.History()
        self.given = list(callbacks)
        self._callbacks = [*callbacks, self.history]
        self._at_batches = [type(each).__name__ for each in callbacks if _acts_at_batches(each)]
        self.epoch_steps, self._first_epoch = epoch_steps, first_epoch
        self._stride, self._verbose = batch_stride, verbose
        self._states: list[dict[str, Any]] | None = None  # of a checkpoint
        self._logs: dict[str, Any] = {}
        self._several: list[str] = []  # metrics that may have several values
        self._best: dict[Any, tf.Variable] = {}  # the weights that a callback is to restore, in bytes

    def attach(self, state: TrainState) -> None:
        holding = [each for each in self._callbacks if "EarlyStopping" in _kinds(each) and each.restore_best_weights]
        self._best = {each: state.of_hooks.variable(f"best_weights_{i}") for i, each in enumerate(holding)}

    def resolve(self, kinds: Mapping[str, type]) -> None:
        """Sets the mode of callbacks that monitor a metric with mode="auto", as far as it is known what is measured.

        Keras itself knows the direction of `loss` and of its own metrics, and raises after an epoch for others.

        Args:
          kinds: of the metrics that are measured, by name.

        Raises:
          ValueError: the direction of one is not known.
        """
        for callback in self._callbacks:
            if getattr(callback, "mode", None) != "auto" or "MonitorCallback" not in _kinds(callback):
                continue
            monitored = Monitored(None, "eval", callback.monitor.removeprefix("val_"))
            if monitored.find(kinds) is None:
                continue
            try:
                callback.mode = monitored.directed(kinds).direction
            except ValueError:
                raise ValueError(
                    f"Keras callback {type(callback).__name__}(monitor={callback.monitor!r}): whether a higher or a "
                    "lower value is better is not known; give it mode='max' or mode='min'"
                ) from None

    def begin(self, status: Status) -> None:
        self._steps = self.epoch_steps or status.steps_per_epoch
        self._model = _Model(status.state.trainer)
        if not status.strategy.is_chief:
            self._callbacks = [self.history]
        endless = status.until_step is None
        epochs = None if endless else self._first_epoch - (-status.until_step // self._steps)
        for callback in self._callbacks:
            callback.set_params({"epochs": epochs, "steps": self._steps, "verbose": self._verbose})
            callback.set_model(self._model)
        if self._at_batches:
            logging.log_first_n(
                logging.WARNING,
                "Keras callback %s has methods for each batch, so each step is a call of its own, which costs up to a "
                "millisecond; on_epoch_end costs nothing",
                *(1, ", ".join(self._at_batches)),
            )
        self._tell("on_train_begin", {})
        if status.step:
            self._take_up()
        if self._model.stop_training:
            status.stop = status.stop or _STOP
        elif not status.last:
            self._begin_epoch(status)
        self._share(status)

    def rewind(self, status: Status) -> None:
        """Tells callbacks nothing: Keras's loop never goes back."""

    def next_due(self, step: int, status: Status) -> int | None:
        ends = (step // self._steps + 1) * self._steps
        return min(ends, step + self._stride - step % self._steps % self._stride) if self._at_batches else ends

    def __call__(self, status: Status) -> None:
        self.window.add(status)
        if not self._several and status.sums is not None:
            self._several = [name for name, kind in kinds_of(status.sums.names).items() if kind.is_several]
        ends = status.step % self._steps == 0
        if self._at_batches and status.steps:
            self._tell("on_train_batch_end", (status.step - 1) % self._steps, self._logs_of(self.window.means()))
        if status.evaluation is not None:
            self._tell("on_test_begin", {})
            self._tell("on_test_end", self._logs_of(status.evaluation))
        if ends:
            evaluation = {f"val_{name}": value for name, value in self._logs_of(status.evaluation or {}).items()}
            self._logs, self.window = {**self._logs_of(self.window.means()), **evaluation}, Window()
            self._tell("on_epoch_end", self._epoch(status) - 1, self._logs)
            for callback in self._callbacks:
                if "MonitorCallback" in _kinds(callback) and callback.best != callback.best:
                    callback.best = None  # Keras takes a first value for the best although it is nan
        if self._model.stop_training:
            status.stop = status.stop or _STOP
        elif not (status.last or status.stop):
            self._begin_epoch(status) if ends else self._begin_batch(status)
        if ends or self._at_batches:
            self._share(status)

    def end(self, status: Status) -> None:
        self._tell("on_train_end", self._logs)
        self._share(status)
        if status.strategy.num_hosts > 1:  # the chief's history has what callbacks add to logs
            chief = json.loads(status.strategy.exchange_text(json.dumps(_state_of(self.history)))[0])
            vars(self.history).update(chief["state"])

    def host_state(self) -> dict:
        for callback, variable in self._best.items():
            variable.assign(_packed(callback.best_weights or ()))
        return {**super().host_state(), "callbacks": [*map(_state_of, self._callbacks)]}

    def restore_host_state(self, values: dict) -> None:
        super().restore_host_state(values)
        self._states = values.get("callbacks")

    def _epoch(self, status: Status) -> int:
        return self._first_epoch + status.step // self._steps

    def _logs_of(self, means: Mapping[str, float]) -> dict[str, Any]:
        """Returns means as Keras's logs have them: of a vector one entry, an array, and no gradients' norm.

        `loss` is with what layers add to it.
        """
        logs: dict[str, Any] = {
            name: value for name, value in means.items() if name not in ("gradient_norm", "loss_with_penalties")
        }
        for name in self._several:
            parts = [*itertools.takewhile(logs.__contains__, (f"{name}_{i}" for i in itertools.count()))]
            logs |= {name: np.array([logs.pop(part) for part in parts])} if parts else {}
        return logs | ({"loss": means["loss_with_penalties"]} if "loss_with_penalties" in means else {})

    def _begin_epoch(self, status: Status) -> None:
        self._tell("on_epoch_begin", self._epoch(status), {})
        self._begin_batch(status)

    def _begin_batch(self, status: Status) -> None:
        if self._at_batches:
            self._tell("on_train_batch_begin", status.step % self._steps, {})

    def _tell(self, what: str, *arguments) -> None:
        """Calls a method of all, which may add to the logs for those after them, as Keras's own do."""
        *numbers, logs = arguments
        logs = dict(logs)
        for callback in self._callbacks:
            getattr(callback, what)(*numbers, logs)

    def _take_up(self) -> None:
        """Gives callbacks the state that a checkpoint has of them, and names those that begin again."""
        again: list[str] = []
        for callback in self._callbacks:
            kind, rest = type(callback).__name__, self._states or []
            saved = next((each for each in rest if each["kind"] == kind), {"state": None})
            self._states = [each for each in rest if each is not saved]
            is_own = hasattr(callback, "set_state")
            weights = self._best[callback].numpy() if callback in self._best else None
            lacks_weights = weights == b"" and not is_own and (saved["state"] or {}).get("best") is not None
            if saved["state"] is None or lacks_weights:
                stays = any(name in _WITHOUT_STATE for name in _kinds(callback)) and getattr(callback, "append", True)
                again += [] if stays or callback is self.history else [kind]
            elif is_own:
                callback.set_state(saved["state"])
            else:
                vars(callback).update(saved["state"])
            if weights:
                callback.best_weights = self._model.unpacked(weights)
            if "EarlyStopping" in _kinds(callback) and callback.stopped_epoch and callback.wait >= callback.patience:
                self._model.stop_training = True  # as it was
        if again:
            logging.warning(
                "Keras callback %s begins again, as no state of it is kept; one of your own is kept by get_state() "
                "and set_state(state), and a CSVLogger goes on by append=True",
                ", ".join(again),
            )

    def _share(self, status: Status) -> None:
        """Gives all processes what the chief's callbacks have set. All call it at the same steps."""
        strategy, model = status.strategy, self._model
        rate, has_weights = model.optimizer.was_set, model.weights_set
        model.optimizer.was_set, model.weights_set = None, False
        if strategy.num_hosts == 1:
            return
        text = json.dumps([rate, has_weights]).ljust(64)  # of one length, which is traced once
        rate, has_weights = json.loads(strategy.exchange_text(text)[0])
        if rate is not None and not strategy.is_chief:
            model.optimizer.learning_rate = rate
            model.optimizer.was_set = None
        if has_weights:
            own = model.get_weights() if strategy.is_chief else []
            theirs = strategy.exchange_bytes(_packed(own))[0]
            if not strategy.is_chief:
                model.take(theirs)


def _packed(weights: Iterable[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(each).tobytes() for each in weights)


def _kinds(callback: tf.keras.callbacks.Callback) -> list[str]:
    """Returns the names of Keras's own classes that a callback is of."""
    return [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("keras.")]


def _acts_at_batches(callback: tf.keras.callbacks.Callback) -> bool:
    idle = next((is_idle for name, is_idle in _IDLE_AT_BATCHES.items() if name in _kinds(callback)), None)
    for name in _AT_BATCHES:
        method = getattr(callback, name)
        function = getattr(method, "__func__", method)
        if function is getattr(tf.keras.callbacks.Callback, name):
            continue
        is_keras = getattr(function, "__module__", "").startswith("keras.")
        if not (is_keras and idle and idle(callback)):
            return True
    return False


def _state_of(callback: tf.keras.callbacks.Callback) -> dict[str, Any]:
    """Returns what a checkpoint keeps of a callback: plain JSON; its state is None where there is none to keep."""
    state, kind = None, type(callback).__name__
    if hasattr(callback, "get_state"):
        state = callback.get_state()
    else:
        kept = next((names for name, names in _KEPT.items() if name in _kinds(callback)), None)
        state = kept and {name: vars(callback)[name] for name in kept if name in vars(callback)}
    return {"kind": kind, "state": json.loads(json.dumps(state, default=lambda x: np.asarray(x).tolist()))}


class _Model:
    """A trainer's model as callbacks see it: Keras's, with the run's optimizer.

    Attributes:
      stop_training: set by a callback that wants the run to end.
      weights_set: whether a callback has set weights since that was last asked.
    """

    def __init__(self, trainer):
        self.stop_training = False
        self.weights_set = False
        self.optimizer = _Optimizer(next(iter(Holdings(trainer).optimizers.values()), None))
        self._model = getattr(trainer, "model", None) or Holdings(trainer).models[0]

    def __getattr__(self, name: str):
        if name in _OF_WHOLE_WEIGHTS and any(map(cut_of, self._model.variables)):
            raise ValueError(
                f"a Keras callback asks for the model's {name}, and each replica has a part of the model; let the run "
                "save checkpoints, and export one of them"
            )
        if name in _SETS_WEIGHTS:
            self.weights_set = True
        return getattr(self._model, name)

    def take(self, values: bytes) -> None:
        """Sets the weights to those of another process, `_packed`."""
        self._model.set_weights(self.unpacked(values))

    def unpacked(self, values: bytes) -> list[np.ndarray]:
        """Returns the weights of which these are the bytes."""
        arrays, start = [], 0
        for weight in self._model.weights:
            array = np.frombuffer(values, np.dtype(weight.dtype), int(np.prod(weight.shape)), start)
            arrays.append(array.reshape(weight.shape))
            start += array.nbytes
        return arrays


class _Optimizer:
    """The run's optimizer as callbacks see it.

    Attributes:
      was_set: the learning rate that a callback has set, since that was last asked.
    """

    def __init__(self, optimizer):
        self.was_set: float | None = None
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
        self.was_set = float(value)
        self._optimizer.set_learning_rate(self.was_set)

    def get_config(self) -> dict:
        return {"name": self.name, "learning_rate": float(self.learning_rate)}
