"""Keras callbacks, unchanged, as one hook: called as by `fit`, on the Keras model that the run trains.

As under `MultiWorkerMirroredStrategy`, each process calls its own with the same logs, except those that write.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import logging
from ...engine.data.feeds.feed import Feed
from ...engine.errors import UsageError
from ...engine.hooks.base import Arrangement, Period, Status, Windowed
from ...engine.hooks.evaluation import averaged_weights
from ...engine.hooks.sync_check import hashes
from ...engine.internals import keras_scopes
from ...engine.internals.variables import own_copy, tf_variable
from ...engine.mesh.sharded import variable_sharding
from ...engine.meter import Meter
from ...engine.metrics.monitored import Monitored
from ...engine.metrics.sums import Sums, kinds_by_name, nan_if_missing, values_by_name
from ...engine.state import TrainState
from ...engine.strategies.base import Interrupted
from . import keras_internals
from .callback_attributes import Attributes, SavedHistory

_WHOLE_WEIGHTS_METHODS = ("save", "save_weights", "export", "get_weights", "set_weights", "load_weights", "call")
_COMPUTES = ("evaluate", "predict", "predict_on_batch", "test_on_batch")
_TRAINS = ("fit", "train_on_batch")
# Callbacks that write or send: called only on the chief.
_ON_CHIEF = ("CSVLogger", "ModelCheckpoint", "RemoteMonitor", "TensorBoard")
_AT_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_AT_TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")
# Keras's callbacks whose batch methods do nothing that a run does not do.
_IDLE_AT_BATCHES = {
    "ModelCheckpoint": lambda callback: callback.save_freq == "epoch",
    "TensorBoard": lambda callback: (
        callback.update_freq == "epoch"
        and not callback.write_steps_per_second
        and not keras_internals.profiles_batches(callback)
    ),
    "TerminateOnNaN": lambda callback: True,  # called at the epoch's end, as weights stay nan until then
}
_SWAPS = "SwapEMAWeights"  # the weights and their averages
# The state of Keras's callbacks in checkpoints; of others, the results of get_state.
_STATE_ATTRIBUTES = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": ("best", "_last_batch_seen", "_batches_seen_since_last_saving"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    _SWAPS: ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
_STOP = "stop_training of a Keras callback"
_WITHOUT_STATE = ("CSVLogger", "LambdaCallback", "LearningRateScheduler", "RemoteMonitor", "TerminateOnNaN")
# Keras's classes of callbacks whose subclasses' attributes are saved, which have no files or connections.
_WITH_ATTRIBUTES = {"Callback", "MonitorCallback", "EarlyStopping", "ReduceLROnPlateau"}
# Callbacks that need Keras's own loop, and their equivalents here.
_INSTEAD = {
    "BackupAndRestore": "run_dir, from which a run resumes to the same bits,",
    "ProgbarLogger": "progress (of fit: verbose)",
}
# Callbacks of a compiled model that one process trains, and their equivalents in other runs.
_INSTEAD_ON_SEVERAL = {
    "OrbaxCheckpoint": "run_dir with checkpoint_every_steps",
    _SWAPS: "ema_decay",
}


class KerasCallbacks(Windowed):
    """Calls Keras callbacks like `fit`.

    Each process calls its own, with the same logs, so that their effects are the same everywhere, and their attributes
    are available afterwards. Keras's that write files or send, and your own with `on_chief_only = True`, are called
    only on the chief; the others copy their state from it at the end.

    A resumed run repeats `on_train_begin`, and `on_epoch_begin` within an epoch, so that callbacks create their
    objects; changes of the run by these calls are reverted, since the checkpoint has them. An evaluation that a request
    to end the run has interrupted begins again, with `on_test_begin`; its epoch ends after it. A run that returns to a
    checkpoint does the same without `on_train_begin`: callbacks have their state of that step, and the lines that a
    CSVLogger has written since are cut.

    Logs are Keras's: the epoch's means so far, `val_NAME` of an evaluation at its end, and as `loss` the minimized
    value, including layers' losses. Batch methods are called for each batch if a callback overrides them, which makes
    each step its own call; this holds for `on_test_batch_*`, too.

    `self.model` is the Keras model that the run trains, so its weights are the run's: nothing is copied, and those that
    a callback sets are trained further. It ends the run by `self.model.stop_training`. `self.model.optimizer` is the
    Keras optimizer, or the engine's, with its settings. Of a model whose variables belong to a strategy, `predict` and
    `evaluate` compute in this process alone, and `fit` is an error.

    Args:
      epoch_steps: steps of an epoch for callbacks, which ends earlier where the data does; None is all of the data.
      epochs: number of the run's epochs, which limits it if `epoch_steps` is set or the number is 0; None is no limit.
      eval_epochs: the epochs, from 1, after which the run evaluates, or the interval between them.
      verbose: verbosity of `fit`, for `self.params`.

    Attributes:
      history: Keras's `History` of the run, on each process.
      has_changed_weights: whether they have, as the evaluation began: it is not interrupted, so that no checkpoint has
        these weights.

    Raises:
      UsageError: a callback needs Keras's own loop; names the equivalent.
    """

    name = "keras_callbacks"
    has_changed_weights = False
    ends_last = True  # so that a run is resumed from its last weights, even if it ends with the best
    reads_metrics = True

    def __init__(
        self,
        callbacks: Sequence[tf.keras.callbacks.Callback],
        *,
        epoch_steps: int | None = None,
        first_epoch: int = 0,
        epochs: int | None = None,
        eval_epochs: Collection[int] | int = 1,
        verbose: int = 0,
    ):
        super().__init__(0)
        _check(callbacks, _INSTEAD)
        self.history = tf.keras.callbacks.History()
        self.callbacks = list(callbacks)
        self.runs_user_code = bool(callbacks)
        self._callbacks = [*callbacks, self.history]
        self._at_batches = [type(callback).__name__ for callback in callbacks if _overrides(callback, _AT_BATCHES)]
        self._at_test_batches = any(_overrides(callback, _AT_TEST_BATCHES) for callback in callbacks)
        self.epoch_steps, self._first_epoch, self._epochs = epoch_steps, first_epoch, epochs
        self.needs_epochs = epoch_steps is None
        self._verbose, self._eval_epochs = verbose, eval_epochs
        self._states: list[dict[str, Any]] = []  # the callbacks' states in a checkpoint
        self._model: Any = None
        self._is_evaluating = False
        self._ended: int | None = None  # the step of the batch that callbacks have ended
        self._logs: dict[str, Any] = {}
        self._unreset: Collection[str] = ()  # names of metrics that epochs do not reset
        self._several: list[str] = []  # metrics that may have several values
        self._best: dict[Any, tf.Variable] = {}  # the weights that a callback will restore, in bytes
        # Callbacks' state as text, with the name by which checkpoints have it.
        self._attributes_of: dict[Any, tuple[Attributes | SavedHistory, str]] = {}
        self._texts: dict[str, tf.Variable] = {}
        self._refused: dict[str, Any] = {}  # the model's methods that callbacks may call only when training ends
        self._begun: list[int | None] = [None, None]  # the epoch and the batch's step that callbacks have begun
        # Each line of a CSVLogger: its step, and where it begins in the file, with the logger's writer by then.
        self._lines: list[tuple[int, tf.keras.callbacks.CSVLogger, int, Any]] = []
        self._named: set[str] = set()  # callbacks that do not return with the run

    def attach(self, state: TrainState, meter: Meter) -> None:
        super().attach(state, meter)
        self._trainer: Any = state.trainer
        self._unreset = getattr(state.trainer, "unreset", ())
        if self._unreset:
            self._run = meter.window(f"{self.name}_run")
        holding = [one for one in self._callbacks if "EarlyStopping" in _kinds(one) and one.restore_best_weights]
        self._best = {callback: state.hook_state.variable(f"best_weights_{i}") for i, callback in enumerate(holding)}
        self._attributes_of = {
            callback: (Attributes(callback, state.variables, names), f"attributes_{i}")
            for i, callback in enumerate(self.callbacks)
            if (names := _saved_apart(callback)) is not None
        }
        self._attributes_of[self.history] = SavedHistory(self.history), "history"
        self._texts = {name: state.hook_state.variable(name) for _, name in self._attributes_of.values()}

    def arranged(self, feed: Feed) -> Arrangement:
        return Arrangement(
            period=self.period(feed) if self.epoch_steps else None,  # may not be the data's
            options={"is_wanted": self._wants_evaluation, "around": [self._evaluating], "between": self._test_batches},
            may_end=lambda: not self.has_changed_weights,
            ends_at_nonfinite=self._ends_at_nonfinite,
        )

    def find_metrics(self, kinds: Mapping[str, type], trainer: Any) -> None:
        """Sets the mode of callbacks that monitor a metric with mode="auto", if the metrics are known.

        Keras knows only the direction of `loss` and of its own metrics, and raises after an epoch for others.

        Raises:
          UsageError: the direction of a metric is unknown.
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
                raise UsageError(
                    f"Keras callback {type(callback).__name__}(monitor={callback.monitor!r}): whether a higher or a "
                    "lower value is better is not known; give it mode='max' or mode='min'"
                ) from None

    def begin(self, status: Status) -> None:
        self._period = self.period(status.strategy.training.feed)
        trainer = status.state.trainer
        models = [trainer.model] if hasattr(trainer, "model") else trainer.inventory.models
        if not models:
            raise UsageError(f"Keras callbacks need a Keras model, and {type(trainer).__name__} has none; write a hook")
        self._model, self._loss_scale = models[0], trainer.inventory.loss_scale
        # Batches from one call of the batch methods to the next. A model that a function makes exists only now.
        self._stride = getattr(self._model, "steps_per_execution", 1)
        if (steps := self.epoch_steps) and steps % self._stride:
            raise UsageError(
                f"steps_per_epoch={steps} is not a whole number of executions of {self._stride} steps "
                f"(steps_per_execution); use {-(-steps // self._stride) * self._stride}, which Keras trains"
            )
        self._model.stop_training, self._model.history = False, self.history
        self._attributes = _attributes_for_callbacks(trainer, self._model)
        strategy, has_own_optimizer = status.strategy, "optimizer" in self._attributes
        if not has_own_optimizer:
            is_copy = getattr(trainer, "is_built", False) and not trainer.run_context.in_place
            when = "after the run" if is_copy else "in on_train_end, or after the run"
            why = f"of the model that the run trains, which would not change the run; compile it {when}"
            (self._attributes if is_copy else self._refused)["compile"] = _refusing("compile", why)
        if has_own_optimizer or strategy.num_hosts > 1 or not strategy.updates_here:
            _check(self.callbacks, _INSTEAD_ON_SEVERAL)
        self._called = [one for one in self._callbacks if strategy.is_chief or not _is_on_chief(one)]
        # All processes stop at the same steps, also for batch methods of a callback that only the chief calls.
        answers = strategy.exchange([self._at_batches, self._at_test_batches])
        at_batches, at_test_batches = zip(*answers, strict=True)
        self._at_batches, self._at_test_batches = [*dict.fromkeys(itertools.chain(*at_batches))], any(at_test_batches)
        epochs, steps = None, self.epoch_steps or self._period.steps
        if (ends := self._period.within or self._period.steps) % steps:
            logging.warning("steps_per_epoch=%d: an epoch ends early where the data does, after %d steps", steps, ends)
        if status.until_step is not None:
            number, begun = self._period.position(status.until_step)
            epochs = self._first_epoch + number + (begun > 0)
        params = {"epochs": epochs, "steps": steps, "verbose": self._verbose}
        with self._calling():
            for callback in self._called:
                # In what it takes for the last epoch it would lose the weights from which a longer run continues.
                callback.set_params({**params, "epochs": math.inf} if _SWAPS in _kinds(callback) else params)
                callback.set_model(self._model)
        if self._at_batches:
            logging.warning_once(
                "Keras callback %s has methods for each batch, so each step is a call of its own, which costs up to a "
                "millisecond; on_epoch_end costs nothing",
                ", ".join(self._at_batches),
            )
        if status.step or self._states:
            again = self._begin_again(status, "on_train_begin")
            again += [
                type(logger).__name__ for logger in self._called if "CSVLogger" in _kinds(logger) and not logger.append
            ]
            if again and status.step:
                logging.warning(
                    "Keras callback %s begins again, as the checkpoint lacks its state; your own callbacks keep theirs "
                    "by get_state() and set_state(state), and a CSVLogger continues with append=True",
                    ", ".join(again),
                )
        else:
            self._call("on_train_begin", {})
        self._continue(status)

    def _continue(self, status: Status) -> None:
        """Begins the epoch and the batch, unless callbacks have begun them or the run ends here."""
        if self._model.stop_training:
            status.stop = status.stop or _STOP
        elif not (status.last or self.is_pending):
            self._begin_epoch(status)

    def _begin_again(self, status: Status, *methods: str) -> list[str]:
        """Calls methods, repeats those that began the epoch and the batch, and restores the callbacks' state.

        What the calls change of the run is reverted. Returns the names of callbacks without a state.
        """
        with status.state.restoring() if self.callbacks else contextlib.nullcontext():
            for method in methods:
                self._call(method, {})
            epoch, batch = self._begun
            if self.is_pending or epoch == self._epoch(status):
                self._call("on_epoch_begin", epoch, {})
            if batch == status.step and self._at_batches:
                self._call("on_train_batch_begin", self._batch(batch), {})
            return self._restore_states()

    def rewind(self, status: Status) -> None:
        self._model.stop_training = False
        self._ended, self._logs = None, {}
        while self._lines and self._lines[-1][0] > status.step:
            _, logger, position, writer = self._lines.pop()
            logger.writer = writer
            logger.csv_file.seek(position)
            logger.csv_file.truncate()
        if behind := [name for name in self._begin_again(status) if name not in self._named]:
            self._named.update(behind)
            logging.warning(
                "Keras callback %s has no state, so it does not return to step %d with the run; your own callbacks do "
                "by get_state() and set_state(state)",
                ", ".join(behind),
                status.step,
            )
        self._continue(status)

    def period(self, feed: Feed) -> Period:
        """Returns the period of the callbacks' epochs on this training data."""
        order, steps = feed.order, self.epoch_steps
        if steps and not order.has_epochs:
            return Period(steps)
        if steps and steps < order.steps_per_epoch:
            return Period(steps, order.shift, within=order.steps_per_epoch)
        return Period(order.steps_per_epoch, order.shift)

    def last_step(self, feed: Feed) -> int | None:
        if self._epochs is None or (self._epochs and not self.epoch_steps):
            return None
        return self.period(feed).period_ends_at(self._epochs)

    def next_due(self, step: int, status: Status) -> int | None:
        ends = self._period.end_after(step)
        return min(ends, step + self._stride - self._batch(step) % self._stride) if self._at_batches else ends

    def __call__(self, status: Status) -> None:
        self.is_pending = False
        ends = self._period.ends_at(status.step)
        self._end_batch(status)
        evaluation = None if status.off_schedule else status.evaluation
        if evaluation is not None:
            if not self._is_evaluating:
                self._call("on_test_begin", {})
            self._call("on_test_end", self._to_logs(evaluation))
            self._is_evaluating = False
        if ends:
            evaluation = {f"val_{name}": value for name, value in self._to_logs(evaluation or {}).items()}
            self._logs = dict(sorted({**self._to_logs(self._means()), **evaluation}.items()))  # as Keras has them
            self.window.take()
            for logger in self._called:
                # A remote file can't be cut.
                if "CSVLogger" in _kinds(logger) and isinstance(logger.csv_file, io.TextIOBase):
                    self._lines.append((status.step, logger, logger.csv_file.tell(), logger.writer))
            self._call("on_epoch_end", self._epoch(status) - 1, self._logs)
            for callback in self._callbacks:
                if "MonitorCallback" in _kinds(callback) and callback.best != callback.best:
                    callback.best = None  # Keras regards a first value as the best even if it is NaN
        if self._model.stop_training:
            status.stop = status.stop or _STOP
        elif not (status.last or status.stop):
            self._begin_epoch(status) if ends else self._begin_batch(status)
        if status.last:  # the checkpoint has the weights that steps have trained; the run ends with their average
            self._call("on_test_end", {}, of=[one for one in self._called if _SWAPS in _kinds(one)])

    @property
    def _ends_at_nonfinite(self) -> bool:
        """Whether a callback ends the run if the loss is not finite, so that such a loss is not an error."""
        return any("TerminateOnNaN" in _kinds(callback) for callback in self.callbacks)

    def _wants_evaluation(self, status: Status) -> bool:
        """Returns whether the run makes an evaluation that is due."""
        epoch, chosen = self._epoch(status), self._eval_epochs
        return epoch % chosen == 0 if isinstance(chosen, int) else epoch in chosen

    @contextlib.contextmanager
    def _evaluating(self, status: Status) -> Iterator[None]:
        """Ends the batch before an evaluation, and begins one that is due by its period."""
        self._end_batch(status)
        self.has_changed_weights = False
        if not status.off_schedule:
            self._is_evaluating = True
            acts = any(_overrides(callback, ["on_test_begin"]) for callback in self.callbacks)
            weights = [own_copy(tf_variable(weight)) for weight in (self._model.weights if acts else ())]
            before = hashes(weights).numpy()
            self._call("on_test_begin", {})
            self.has_changed_weights = bool((hashes(weights).numpy() != before).any())
        try:
            yield
        except Interrupted:
            self.is_pending = True
            raise

    def _test_batches(self, done: int, batches: int, sums: Sums) -> int | None:
        """Calls `on_test_batch_*` between an evaluation's batches; see `Strategy.evaluate`."""
        if not self._at_test_batches:
            return None
        if (begun := done % self._stride) and done < batches:  # a call that ended early
            return self._stride - begun
        number = -(-done // self._stride) * self._stride  # as in Keras also at the end
        if number:
            self._call("on_test_batch_end", number - 1, self._to_logs(nan_if_missing(values_by_name(sums.values()))))
        if done < batches:
            self._call("on_test_batch_begin", number, {})
        return self._stride

    def end(self, status: Status) -> None:
        self._call("on_train_end", self._logs)
        if status.strategy.num_hosts > 1:  # the chief's history includes its callbacks' additions to logs
            states = status.strategy.exchange([*map(_callback_state, self._callbacks)])[0]
            for callback, state in () if status.strategy.is_chief else _matched(self._callbacks, states):
                if state["state"] is not None and (callback is self.history or callback not in self._called):
                    _set_state(callback, state["state"])

    def host_state(self) -> dict:
        for callback, variable in self._best.items():
            weights = callback.best_weights or ()
            variable.assign(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights))
        for attributes, name in self._attributes_of.values():
            self._texts[name].assign(attributes.to_text() or "")
        # Of the best checkpoint, which is saved before callbacks see the evaluation's end, and the epoch's.
        is_evaluating = self._is_evaluating and not self.is_pending
        pending: dict[str, Any] = {"is_evaluating": True} if is_evaluating else {}
        pending |= {"is_pending": True, "several": self._several} if self.is_pending or is_evaluating else {}
        states = [*map(_callback_state, self.callbacks), {"kind": "History", "state": None}]
        for callback, entry in zip(self._callbacks, states, strict=True):
            entry |= {"attributes": self._attributes_of[callback][1]} if callback in self._attributes_of else {}
        names = {"names": names} if (names := getattr(self._trainer, "first_names", None)) else {}
        return {"callbacks": states, "begun": [*self._begun], **names, **pending}

    def restore_host_state(self, values: dict) -> None:
        self._states = values.get("callbacks") or []
        self._begun = [*values.get("begun", (None, None))]
        self.is_pending, self._several = values.get("is_pending", False), values.get("several", self._several)
        self._is_evaluating = values.get("is_evaluating", False)
        if (names := values.get("names")) and not self._unreset:
            vars(self._trainer)["first_names"] = names

    def _epoch(self, status: Status) -> int:
        return self._first_epoch + self._period.position(status.step)[0]

    def _batch(self, step: int) -> int:
        """Returns the number of a step's batch in its epoch."""
        return self._period.position(step)[1]

    def _means(self) -> dict[str, float]:
        """Returns the epoch's means so far; those of the run for metrics that are never reset."""
        means = self.window.totals.means()
        return {**means, **{name: self._run.totals.means()[name] for name in self._unreset if name in means}}

    def _to_logs(self, means: Mapping[str, float]) -> dict[str, Any]:
        """Returns means as Keras's logs: vectors as one array each, `loss` with layers' losses, no gradient norm."""
        logs: dict[str, Any] = {
            name: value for name, value in means.items() if name not in ("gradient_norm", "loss_with_penalties")
        }
        for name in self._several:
            parts = [*itertools.takewhile(logs.__contains__, (f"{name}_{i}" for i in itertools.count()))]
            logs |= {name: np.array([logs.pop(part) for part in parts])} if parts else {}
        logs |= {"loss": means["loss_with_penalties"]} if "loss_with_penalties" in means else {}
        return dict(sorted(logs.items()))  # as Keras has them

    def _begin_epoch(self, status: Status) -> None:
        if self._begun[0] != (epoch := self._epoch(status)):
            self._begun[0] = epoch
            self._call("on_epoch_begin", epoch, {})
        self._begin_batch(status)

    def _begin_batch(self, status: Status) -> None:
        batch = self._batch(status.step)
        if self._at_batches and batch % self._stride == 0 and self._begun[1] != status.step:
            self._begun[1] = status.step
            self._call("on_train_batch_begin", batch, {})

    def _end_batch(self, status: Status) -> None:
        """Calls `on_train_batch_end` once per batch, or once per `steps_per_execution` batches, as in Keras."""
        sums = status.segment.sums
        if not self._several and sums is not None:
            self._several = [name for name, kind in kinds_by_name(sums.specs).items() if kind.is_several]
        if not status.segment.steps or self._ended == status.step:
            return
        last = self._batch(status.step - 1)
        ends = self._period.ends_at(status.step)
        whole = last + self._stride - 1 - last % self._stride  # its number, as in Keras also at an epoch's end
        if self._at_batches and (ends or status.last or whole == last):
            self._ended = status.step
            self._call("on_train_batch_end", whole, self._to_logs(self._means()))
        elif ends and self._ends_at_nonfinite:
            self._ended = status.step
            ending = [callback for callback in self._called if "TerminateOnNaN" in _kinds(callback)]
            self._call("on_train_batch_end", last, self._to_logs(self._means()), of=ending)

    def _call(self, method: str, *arguments, of: Sequence[tf.keras.callbacks.Callback] | None = None) -> None:
        """Calls a method of all callbacks, which may add to the logs for later ones, as Keras's do."""
        *numbers, logs = arguments
        logs = dict(logs)
        with self._calling(ends=method == "on_train_end"):
            for callback in self._called if of is None else of:
                getattr(callback, method)(*numbers, logs)

    @contextlib.contextmanager
    def _calling(self, ends: bool = False) -> Iterator[None]:
        """Calls callbacks in this context: the model is as they know it from `fit`.

        As in Keras, they may compile it when training ends.
        """
        optimizer = getattr(self._model, "optimizer", None)
        loss_scale = self._loss_scale if hasattr(optimizer, "dynamic_scale") else None
        if loss_scale is not None:
            loss_scale.copy_to(optimizer)
        with keras_scopes.with_attributes(
            self._model, self._attributes if ends else {**self._attributes, **self._refused}
        ):
            yield
        if loss_scale is not None:
            loss_scale.copy_from(optimizer)

    def _restore_states(self) -> list[str]:
        """Restores the callbacks' state from a checkpoint. Returns the names of those without any."""
        without: list[str] = []
        states, self._states = self._states, []
        for callback, entry in _matched(self._callbacks, states):
            state, text = entry["state"], self._texts.get(entry.get("attributes", ""))
            if text is not None and callback in self._attributes_of and (changed := text.numpy().decode()):
                self._attributes_of[callback][0].restore(changed)
                state = state or {}
            weights = self._best[callback].numpy() if callback in self._best else None
            has_best = not hasattr(callback, "set_state") and (state or {}).get("best") is not None
            if state is None or (weights == b"" and has_best):
                needs_none = any(name in _WITHOUT_STATE for name in _kinds(callback))
                without += [] if needs_none or callback is self.history else [type(callback).__name__]
            else:
                _set_state(callback, state)
            if weights is not None:
                callback.best_weights = _unpacked(weights, self._model.weights) if weights else None
            if "EarlyStopping" in _kinds(callback) and callback.stopped_epoch and callback.wait >= callback.patience:
                self._model.stop_training = True  # as it was
        return without


def _check(callbacks: Iterable[tf.keras.callbacks.Callback], instead: Mapping[str, str]) -> None:
    """Raises `UsageError` for a callback that can't be called here, with what to use `instead` by its class's name."""
    for callback in callbacks:
        if fix := next((fix for name, fix in instead.items() if name in _kinds(callback)), None):
            raise UsageError(f"Keras callback {type(callback).__name__} is for Keras's own loop; use {fix} instead")


def _unpacked(values: bytes, weights: Iterable[tf.keras.Variable]) -> list[np.ndarray]:
    arrays, start = [], 0
    for weight in weights:
        array = np.frombuffer(values, np.dtype(weight.dtype), int(np.prod(weight.shape)), start)
        arrays.append(array.reshape(weight.shape))
        start += array.nbytes
    return arrays


def _kinds(callback: tf.keras.callbacks.Callback) -> list[str]:
    """Returns the names of Keras's classes of a callback."""
    return [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("keras.")]


def _overrides(callback: tf.keras.callbacks.Callback, names: Sequence[str]) -> bool:
    idle = next((is_idle for name, is_idle in _IDLE_AT_BATCHES.items() if name in _kinds(callback)), None)
    for name in names:
        method = getattr(callback, name)
        function = getattr(method, "__func__", method)
        if function is getattr(tf.keras.callbacks.Callback, name):
            continue
        is_keras = getattr(function, "__module__", "").startswith("keras.")
        if not (is_keras and idle and idle(callback)):
            return True
    return False


def _callback_state(callback: tf.keras.callbacks.Callback) -> dict[str, Any]:
    """Returns a callback's entry in checkpoints, plain JSON; its state is None if there is none."""
    state: Any
    if hasattr(callback, "get_state"):
        state = callback.get_state()
    else:
        attributes = next((names for name, names in _STATE_ATTRIBUTES.items() if name in _kinds(callback)), None)
        state = attributes and {name: vars(callback)[name] for name in attributes if name in vars(callback)}
    plain = json.loads(json.dumps(state, default=lambda x: np.asarray(x).tolist()))
    return {"kind": type(callback).__name__, "state": plain}


def _saved_apart(callback: tf.keras.callbacks.Callback) -> Collection[str] | None:
    """Returns the attributes that are saved apart, of a callback whose others are saved; None for others."""
    kinds = {*_kinds(callback)}
    if hasattr(callback, "get_state") or type(callback).__name__ in kinds or kinds - _WITH_ATTRIBUTES:
        return None
    return ("best_weights", *itertools.chain(*(names for name, names in _STATE_ATTRIBUTES.items() if name in kinds)))


def _set_state(callback: tf.keras.callbacks.Callback, state: dict[str, Any]) -> None:
    """Restores the result of `_callback_state`."""
    callback.set_state(state) if hasattr(callback, "set_state") else vars(callback).update(state)


def _matched(callbacks: Iterable[tf.keras.callbacks.Callback], states: Iterable[dict]) -> Iterator[tuple]:
    """Yields each callback with the next entry of its class, or one without a state."""
    rest = list(states)
    for callback in callbacks:
        saved = next((entry for entry in rest if entry["kind"] == type(callback).__name__), {"state": None})
        rest = [entry for entry in rest if entry is not saved]
        yield callback, saved


def _is_on_chief(callback: tf.keras.callbacks.Callback) -> bool:
    return getattr(callback, "on_chief_only", any(name in _ON_CHIEF for name in _kinds(callback)))


def _attributes_for_callbacks(trainer, model: tf.keras.Model) -> dict[str, Any]:
    """Returns the attributes that a model has only while callbacks are called.

    These are `averaged_weights`, a context in which weights are their moving averages; the optimizer, unless the model
    is compiled with that of the run; and methods in place of those that would compute on all replicas, train the model
    apart from the run, or take a shard for the whole.
    """
    attributes: dict[str, Any] = {"averaged_weights": functools.partial(averaged_weights, trainer, final=True)}
    optimizer = next(iter(trainer.inventory.optimizers.values()), None)
    optimizer = getattr(optimizer, "as_keras", None) or optimizer
    own = getattr(model, "optimizer", None)
    if getattr(own, "inner_optimizer", own) is not optimizer:
        attributes["optimizer"] = optimizer
    if keras_internals.has_strategy(model):
        alone = keras_internals.computing_alone(model)
        attributes |= {name: functools.partial(alone, name) for name in _COMPUTES}
        why = "of the model that the run trains; train a copy of it"
        attributes |= {name: _refusing(name, why) for name in _TRAINS}
    if any(map(variable_sharding, model.variables)):
        why = "of the model, and each replica has a shard of it; let the run save checkpoints, and export one of them"
        attributes |= {name: _refusing(name, why) for name in (*_WHOLE_WEIGHTS_METHODS, *_COMPUTES)}
    return attributes


def _refusing(method: str, why: str) -> Callable[..., Any]:
    def refuse(*_, **__):
        raise UsageError(f"a Keras callback calls {method} {why}")

    return refuse
