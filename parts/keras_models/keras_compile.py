"""The results of a Keras model's `compile`: losses by output, metrics by name. Replica code calls `Losses`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras.src import backend
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

from ...engine.errors import UsageError
from ...engine.internals.keras import expand_to_rank, without_missing
from .keras_internals import TakenOver, optimizers_in

# Convert a loss's labels, [..., classes] or integers, to classes; -1 is no class.
_CLASSES_BY: dict[Callable, Callable] = {
    tf.keras.losses.sparse_categorical_crossentropy: lambda labels, axis: tf.cast(labels, tf.int64),
    tf.keras.losses.categorical_crossentropy: lambda labels, axis: tf.where(
        tf.reduce_any(labels > 0, axis), tf.argmax(labels, axis), -1
    ),
}
_TWO_CLASS_LOSSES = (tf.keras.losses.binary_crossentropy, tf.keras.losses.binary_focal_crossentropy)
get_mask, set_mask = backend.get_keras_mask, backend.set_keras_mask
_DECIDING = ("loss", "loss_weights", "metrics", "weighted_metrics")
_VALUES = "values_by_runs"  # the attribute for them of what `compile` has stored
_NAME = "{}_loss"  # name of an output's loss in logs
# Where updates of a model's metrics are noted instead of made, in this thread.
_notes: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("notes", default=None)
# (a loss of one output before it is divided, as a scalar to minimize; where each is noted by name), of this thread.
_running: contextvars.ContextVar[tuple[Callable, dict]] = contextvars.ContextVar("losses")


def arguments(model: tf.keras.Model) -> dict[str, Any]:
    """Returns the arguments of `compile`."""
    return dict(model._compile_config.config)


def compile_values(model: tf.keras.Model) -> dict[str, Any]:
    """Describes what `compile` has decided of a model's numbers, by value; plain JSON.

    The values are those of the first call after `compile`: callbacks may set another rate since.
    """
    stored = vars(model._compile_config)
    if _VALUES not in stored:
        given = arguments(model)
        stored[_VALUES] = _described({**{name: given.get(name) for name in _DECIDING}, **optimizers_in(model)})
    return stored[_VALUES]


def _described(value: Any) -> Any:
    """Describes a value as plain JSON; functions by their names, objects by class and Keras's configuration."""
    if isinstance(value, dict):
        return {str(key): _described(part) for key, part in value.items() if key != "name"}  # numbered in a process
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.7g}")  # a rate is a variable, float32
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "__name__") or not hasattr(value, "get_config"):
        return getattr(value, "__name__", type(value).__name__)
    config: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # of a class of the user's, whose configuration has no values
        config = value.get_config()
    return {"class": type(value).__name__, **_described(config)}


class CompiledState:
    """A model's state after its last `compile`, and its trainable weights, to compare later."""

    def __init__(self, model: tf.keras.Model):
        self.config, self.optimizer = model._compile_config, model.optimizer
        self.weights = [(id(weight), weight.trainable) for weight in model.weights]

    def __eq__(self, other):
        is_same = self.config is other.config and self.optimizer is other.optimizer
        return is_same and self.weights == other.weights


def set_optimizer(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Sets another optimizer of a compiled model, which checkpoints don't find there a second time."""
    del model.optimizer  # including TensorFlow's tracking
    vars(model)["optimizer"] = optimizer


@contextlib.contextmanager
def untracked_optimizer(model: tf.keras.Model) -> Iterator[None]:
    """Keeps checkpoints that are made in this context from finding a compiled model's optimizer in the model.

    The model may be compiled with another one in the context.
    """
    set_optimizer(model, model.optimizer)
    try:
        yield
    finally:
        model.optimizer = vars(model).pop("optimizer")  # TensorFlow does not track what is there already


def metric_direction(metric: tf.keras.metrics.Metric) -> str | None:
    """Returns "max" or "min", the better direction of a metric; None if Keras does not know it."""
    return {"up": "max", "down": "min"}.get(getattr(metric, "_direction", ""))


def kept_metrics(model: tf.keras.Model) -> dict[str, tf.keras.metrics.Metric]:
    """Returns the metrics that layers, including the model, keep besides those of `compile`, by a path for messages."""
    return {f"{layer.path}.{metric.name}": metric for layer in model._flatten_layers() for metric in layer._metrics}


def all_metrics(model: tf.keras.Model) -> list[tf.keras.metrics.Metric]:
    """Returns the metrics of a compiled model: of its layers, of `compile`, of its `metrics`, and Keras's of losses."""
    compiled, loss = model._compile_metrics, model._compile_loss
    found = [*kept_metrics(model).values(), *model.metrics, model._loss_tracker]
    found += compiled.metrics if compiled is not None and compiled.built else ()
    found += loss.metrics if loss is not None and loss.built else ()
    return [*{id(one): one for one in found if one is not None and not isinstance(one, CompileMetrics)}.values()]


class Notes(NamedTuple):
    """What a step does with metrics.

    Attributes:
      updates: the arguments of each update, by metric.
      results: each tensor that a metric's `result` returned, its metric, and its key if the result is a dictionary.
      graph: the graph of the step itself, not of a branch or loop in it.
    """

    updates: dict[tf.keras.metrics.Metric, list[tuple]]
    results: list[tuple[tf.Tensor, tf.keras.metrics.Metric, str | None]]
    graph: tf.Graph


class NotedMetrics:
    """Metrics of a model, whose updates are noted while a step is traced: each replica would make its own.

    Args:
      metrics: the metrics; None, the one of a single output's loss, is left out.
    """

    def __init__(self, metrics: Iterable[tf.keras.metrics.Metric | None] = ()):
        self._taken = TakenOver({"update_state": _update_state, "result": _result, "reset_state": _reset_state})
        self.note(metrics)

    def note(self, metrics: Iterable[tf.keras.metrics.Metric | None]) -> None:
        """Takes over the updates of some metrics."""
        for metric in (x for x in metrics if x is not None):
            self._taken.add(metric)

    @staticmethod
    @contextlib.contextmanager
    def made() -> Iterator[None]:
        """Makes updates in this context, also within one of `noting`."""
        token = _notes.set(None)
        try:
            yield
        finally:
            _notes.reset(token)

    @contextlib.contextmanager
    def noting(self) -> Iterator[Notes]:
        """Yields the notes of what is done in this context."""
        token = _notes.set(notes := Notes({}, [], tf.compat.v1.get_default_graph()))
        try:
            with self._taken:
                yield notes
        finally:
            _notes.reset(token)


class KeptMetrics(NotedMetrics):
    """The metrics that a model's layers keep, and those that its loss updates.

    Args:
      model: a model that is compiled and built.

    Attributes:
      metrics: those that layers keep, and the means of each output's loss, by name; one called "loss" is left out.
      kept: the names of those that layers keep.
    """

    def __init__(self, model: tf.keras.Model):
        self.metrics: dict[str, tf.keras.metrics.Metric] = {}
        super().__init__(layer_metrics := list(kept_metrics(model).values()))
        self.kept = {metric.name for metric in layer_metrics} - {"loss"}

    def note(self, metrics: Iterable[tf.keras.metrics.Metric | None]) -> None:
        noted = [metric for metric in metrics if metric is not None]
        super().note(noted)
        self.metrics |= {metric.name: metric for metric in noted if metric.name != "loss"}

    @contextlib.contextmanager
    def noted(self) -> Iterator[dict[str, list[tuple]]]:
        """Yields the arguments of each update that is made in this context, by the metric's name, after it."""
        by_name: dict[str, list[tuple]] = {}
        with self.noting() as notes:
            yield by_name
        for metric, updates in notes.updates.items():
            if metric.name in self.metrics:
                by_name.setdefault(metric.name, []).extend(updates)


class OwnLoss:
    """A model's own `compute_loss`, with the metrics that it updates."""

    def __init__(self, model: tf.keras.Model, kept_metrics: KeptMetrics):
        self._model, self._kept = model, kept_metrics
        self._of_outputs = model._compile_loss
        if self._of_outputs is not None and self._of_outputs.built:
            kept_metrics.note(self._of_outputs.metrics)
        elif self._of_outputs is not None:  # `super().compute_loss` builds it, for the outputs that it is called with
            vars(self._of_outputs)["build"] = self._build

    def _build(self, y_true, y_pred) -> None:
        with tf.init_scope():  # Keras makes means of its own
            del vars(self._of_outputs)["build"]
            self._of_outputs.build(y_true, y_pred)
        self._kept.note(self._of_outputs.metrics)

    def __call__(self, x, y, y_pred, weights, is_training: bool) -> tuple[tf.Tensor, dict[str, list[tuple]]]:
        """Returns (the loss of a batch, scalar float32; the arguments with which it updates metrics, by their names).

        Raises:
          UsageError: the loss is not one number.
        """
        with self._kept.noted() as noted:
            loss = tf.convert_to_tensor(self._model._compute_loss(x, y, y_pred, weights, training=is_training))
        if loss.shape.rank != 0:
            raise UsageError(
                f"{type(self._model).__name__}.compute_loss returns a tensor of shape {loss.shape}; return one number, "
                "the mean over the batch's examples"
            )
        return tf.cast(loss, tf.float32), noted


def _update_state(metric: tf.keras.metrics.Metric, *arguments, **keywords):
    """Updates a metric, or notes the arguments."""
    update = type(metric).update_state
    if (notes := _notes.get()) is None:
        return update(metric, *arguments, **keywords)
    if tf.compat.v1.get_default_graph() is not notes.graph:
        raise UsageError(
            f"the step updates the metric {metric.name} within tf.cond, a loop or a tf.function, from where its sums "
            "can't be taken; update it at each step, with a weight of 0 where it does not count"
        )
    # All by position, however the step has passed them.
    given = inspect.signature(update).bind(metric, *arguments, **keywords).args[1:]
    tensors = tuple(tf.convert_to_tensor(tensor) for tensor in given if tensor is not None)
    notes.updates.setdefault(metric, []).append(tensors)
    return None


def _result(metric: tf.keras.metrics.Metric):
    """Computes a metric's result, and notes its tensors, by which to know them again."""
    result = type(metric).result(metric)
    if (notes := _notes.get()) is None:
        return result

    def noted(value, key=None) -> tf.Tensor:
        notes.results.append((tf.identity(value), metric, key))
        return notes.results[-1][0]

    return {key: noted(x, key) for key, x in result.items()} if isinstance(result, dict) else noted(result)


def _reset_state(metric: tf.keras.metrics.Metric) -> None:
    if _notes.get() is not None:
        raise UsageError(
            f"the step resets the metric {metric.name}, whose result is that of an epoch; return a batch's number "
            "itself, and leave metrics to be reset where epochs begin"
        )
    type(metric).reset_state(metric)


def is_mean(metric: tf.keras.metrics.Metric) -> bool:
    """Returns whether a metric is the mean of the values that it is updated with."""
    return getattr(type(metric), "update_state", None) is tf.keras.metrics.Mean.update_state


class OutputLoss(NamedTuple):
    """A loss of one output over a batch, before division.

    Attributes:
      total: a scalar.
      count: its divisor, a scalar float32; None if it stays a sum.
      is_even: whether each example adds equally to `count`, so the number of examples determines it.
    """

    total: tf.Tensor
    count: tf.Tensor | None  # type: ignore[assignment]  # a tuple's method
    is_even: bool = True

    def to_pair(self, examples) -> tuple:
        """Returns (a sum, its count) of so many examples: for a mean over examples, both add up over batches."""
        if self.is_even:
            return self.total * (examples / self.count), examples
        return self.total, 0.0 if self.count is None else self.count


def is_of_keras(loss) -> bool:
    """Returns whether Keras itself has a loss, which leaves labels out by a mask alone."""
    return all(x.__module__.startswith("keras.") for x in (type(loss), getattr(loss, "fn", type(loss))))


class Classified(NamedTuple):
    """A classifier's labels int64 [batch, ...], predictions [batch, ..., classes], and which of them count."""

    labels: tf.Tensor
    predictions: tf.Tensor
    mask: tf.Tensor


class Losses(CompileLoss):
    """The losses of `compile` for each output, divided by the caller of `total`.

    Attributes:
      keras_losses: Keras's objects, in the order of division.
    """

    _flat_losses: list  # after `build`
    keras_losses: Sequence[tf.keras.losses.Loss] = ()

    def build(self, y_true, y_pred):
        with tf.init_scope():  # Keras creates means of its own, which are unused
            super().build(y_true, y_pred)
        self.keras_losses = [loss for _, loss, _, _ in self._flat_losses]
        self._flat_losses = [
            self.Loss(path, functools.partial(_record_loss, _NAME.format(name), loss), weight, name)
            for path, loss, weight, name in self._flat_losses
        ]

    @property
    def metrics(self):
        return [None] * len(self._flat_losses or ())  # Keras's own means of each loss

    def total(self, y_true, y_pred, weights, divide: Callable[[OutputLoss], tf.Tensor]) -> tuple[tf.Tensor, dict]:
        """Returns (the weighted sum of the divided losses; with several, each by name).

        Args:
          y_true: labels, in any structure of Keras's `fit`.
          weights: one number per example, or an array, or one per output as in Keras's `fit`; None is 1.
          divide: reduces a loss to a scalar.
        """
        by_name: dict[str, tf.Tensor] = {}
        weights = self._by_output(weights) if tf.keras.tree.is_nested(weights) else weights
        token = _running.set((divide, by_name))
        try:
            total = self(y_true, y_pred, weights)
        finally:
            _running.reset(token)
        return total, by_name if len(self.keras_losses) > 1 else {}

    def classified(self, y_true, y_pred, weights) -> Classified | None:
        """Returns the labels and predictions of a single cross-entropy over classes, else None. Arguments as `total`'s.

        Labels count if they are classes and count in the loss: not those of `ignore_class`, masked or of weight 0.
        """
        loss = self.keras_losses[0]
        count_classes = _CLASSES_BY.get(getattr(loss, "fn", loss))
        if len(self.keras_losses) > 1 or count_classes is None or not (tf.is_tensor(y_true) and tf.is_tensor(y_pred)):
            return None
        axis = loss._fn_kwargs.get("axis", -1)
        values, mask = _values(loss, y_true, y_pred)
        predictions = tf.keras.ops.moveaxis(y_pred, axis, -1)
        y_true = tf.cast(y_true, tf.int64) if y_true.dtype == tf.bool else y_true  # one-hot, or of two classes
        labels = tf.reshape(count_classes(y_true, axis), tf.shape(values))
        counted = (labels >= 0) & (labels < predictions.shape[-1])
        for factor in (mask, None if weights is None else weights != 0):
            if factor is not None:
                counted &= squeeze_or_expand_to_same_rank(values, expand_to_rank(factor, values.shape.rank))[1]
        return Classified(labels, predictions, counted)

    def _by_output(self, weights) -> Any:
        """Returns the weights of each output, as Keras does. Raises UsageError if some are missing."""
        structure, arrays = self._y_pred_build_structure, [*weights]
        keys = sorted(structure) if isinstance(structure, dict) else [*range(len(structure or ()))]
        names = self.output_names or keys
        if tf.keras.tree.is_nested(structure) and isinstance(weights, dict) and {*arrays} == {*names}:
            return weights if isinstance(structure, dict) else [weights[name] for name in names]
        if tf.keras.tree.is_nested(structure) and not isinstance(weights, dict) and len(arrays) == len(names):
            return dict(zip(names, arrays, strict=True)) if isinstance(structure, dict) else arrays
        passed = ", ".join(map(str, arrays)) if isinstance(weights, dict) else f"{len(arrays)} arrays"
        outputs = ", ".join(map(str, names)) if tf.keras.tree.is_nested(structure) else "one output"
        raise UsageError(
            f"sample_weight has {passed}, and the model has {outputs}; give one array for each output, or None, as a "
            "list or dictionary, or one array for all"
        )


def _record_loss(name: str, loss, y_true, y_pred, weights) -> tf.Tensor:
    divide, by_name = _running.get()
    by_name[name] = value = divide(_output_loss(loss, y_true, y_pred, weights))
    return value


def _output_loss(loss, y_true, y_pred, weights) -> OutputLoss:
    """Computes Keras's `Loss.__call__`, up to the division."""
    if not isinstance(loss, tf.keras.losses.Loss) or type(loss).__call__ is not tf.keras.losses.Loss.__call__:
        return OutputLoss(tf.cast(loss(y_true, y_pred, weights), tf.float32), tf.constant(1.0))
    if weights is not None and tf.is_tensor(y_true):
        y_true = without_missing(y_true, weights)
    values, mask = _values(loss, y_true, y_pred)
    values = tf.cast(values, tf.float32)  # by set_floatx, or a dtype of its own, it may be of 16 bits
    weights = None if weights is None else expand_to_rank(tf.cast(weights, values.dtype), values.shape.rank)
    weights = apply_mask(weights, mask, dtype=values.dtype, reduction="sum")
    if weights is not None:
        values, weights = squeeze_or_expand_to_same_rank(values, weights)
        values *= weights
    if getattr(loss, "fn", None) in _TWO_CLASS_LOSSES:
        labels, _ = squeeze_or_expand_to_same_rank(tf.cast(y_true, values.dtype), y_pred)
        fits = tf.reduce_all((labels >= 0) & (labels <= 1), axis=getattr(loss, "axis", -1))
        values, fits = squeeze_or_expand_to_same_rank(values, fits)
        # For any other label that counts there is no cross-entropy; Keras returns some number, which may be below 0.
        values = tf.where(fits | (values == 0), values, math.nan)
    if values.shape.rank == 0:
        return OutputLoss(values, tf.constant(1.0))
    if loss.reduction == "sum":
        return OutputLoss(tf.reduce_sum(values), None, is_even=False)
    if loss.reduction in (None, "none"):
        raise UsageError(
            f"loss {loss.name} has reduction=None, so there is no one number to minimize; leave the reduction out"
        )
    size = tf.cast(tf.size(values), tf.float32)
    if loss.reduction == "mean_with_sample_weight":
        return OutputLoss(tf.reduce_sum(values), *((size,) if weights is None else (tf.reduce_sum(weights), False)))
    if mask is None:
        return OutputLoss(tf.reduce_sum(values), size)
    fraction = tf.reduce_mean(tf.cast(mask, tf.float32))  # of the entries that count
    return OutputLoss(tf.reduce_sum(values), size * fraction, is_even=False)


def _values(loss, y_true, y_pred) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns (a loss's values before weights, their mask or None), like the beginning of Keras's `Loss.__call__`."""
    masks = [get_mask(y_pred)]
    y_pred, y_true = (
        tf.keras.tree.map_structure(lambda x: backend.convert_to_tensor(x, dtype=loss.dtype), y)
        for y in (y_pred, y_true)
    )
    values = loss.call(y_true, y_pred)
    masks = [mask for mask in (*masks, get_mask(values)) if mask is not None]
    mask = functools.reduce(tf.logical_and, masks) if masks else None
    return backend.convert_to_tensor(values, dtype=loss.dtype), mask


def beside_mask(weights: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns weights [n] or [n, ...] in a shape that Keras's metrics multiply by the mask of these outputs."""
    mask = get_mask(y_pred)
    return weights if mask is None else expand_to_rank(weights, mask.shape.rank)


class Metric(NamedTuple):
    """A metric of `compile`, of one output."""

    metric: tf.keras.metrics.Metric
    output: int
    is_weighted: bool

    @property
    def name(self) -> str:
        return self.metric.name

    def result(self) -> Metric:
        """Returns itself, for Keras, which reads each metric's result by its name in logs."""
        return self


class Metrics:
    """The metrics of `compile`, by the names that Keras's logs have.

    Args:
      y_true, y_pred: specifications of labels and outputs.
    """

    def __init__(self, model: tf.keras.Model, y_true, y_pred):
        given, names = arguments(model), getattr(model, "output_names", None)
        compiled = CompileMetrics(given["metrics"], given["weighted_metrics"], output_names=names)
        for container in (compiled, model._compile_metrics):  # callbacks read the model's own
            if container.built:
                continue
            try:
                container.build(y_true, y_pred)
            except ValueError as error:  # its reason is not in its first line
                raise UsageError(" ".join(str(error).split())) from error
        for is_weighted, by_output in ((False, compiled._flat_metrics), (True, compiled._flat_weighted_metrics)):
            for output, several in enumerate(by_output):
                if several:
                    several.metrics = [Metric(metric, output, is_weighted) for metric in several.metrics]
        self._compile_metrics = compiled
        self.by_name: dict[str, Metric] = compiled.result()

    def flat(self, y) -> Sequence:
        """Returns labels, outputs or their weights as a list by the outputs' numbers."""
        return self._compile_metrics._flatten_y(y)
