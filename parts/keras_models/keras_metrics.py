"""Keras's metrics as sums that merge: replica code adds a batch to a metric's state, the host computes its value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.errors import UsageError, reason
from ...engine.internals import keras
from ...engine.metrics.means import combined, weighed_by
from ...engine.metrics.pairs import KerasSums, Mean
from . import keras_compile, trials

_LENGTHS = (3, 2)  # in a trial's batches, along axes that are padded
_HINGES = (tf.keras.metrics.Hinge, tf.keras.metrics.SquaredHinge)
_WITH_COLUMNS = "give it [batch, 1] rather than [batch], as most expect, by labels[:, None] and predictions[:, None]"


class KerasMetric:
    """A `tf.keras.metrics.Metric`, unchanged, for `Trainer.metrics`.

    Its value is Keras's over all examples, however they were divided into batches and among replicas. This requires a
    state of sums, as of F1Score, AUC, Precision, Recall, MeanIoU and all averages over examples; other metrics are
    refused at their first batch. A trial decides: two small random batches must add to a state of zeros, and to each
    other's, what they add together, also if labels or weights are missing or the batches are padded to other lengths.
    The metric's own variables are not used.

    A value that is a vector (`F1Score(average=None)`) is shown as NAME_0, NAME_1, ...; a dictionary's as NAME_KEY.

    Args:
      metric: called in `Trainer.metrics` as by Keras: (labels, predictions[, weights]), or (values) for a mean.
      has_one_length: whether the batches of a step are padded alike, and it is Keras's value of these that is wanted.

    Raises:
      UsageError: the argument is not a Keras metric.
      UsageError: it is created within a step.

    Example:
      >>> def __init__(self):  # of a Trainer
      ...     super().__init__()
      ...     self.f1 = KerasMetric(tf.keras.metrics.F1Score(average="macro"))
      >>> def metrics(self, outputs, batch):
      ...     return {"f1": self.f1(batch[1], tf.nn.softmax(outputs))}
    """

    def __init__(self, metric: tf.keras.metrics.Metric, has_one_length: bool = False):
        if not isinstance(metric, tf.keras.metrics.Metric):
            raise UsageError(f"{metric!r} is not a tf.keras.metrics.Metric; give one, e.g. tf.keras.metrics.AUC()")
        if tf.inside_function():
            raise UsageError(f"KerasMetric of {metric.name} is made within a step; make it once, in __init__ or build")
        self._metric, self._has_one_length = metric, has_one_length
        self._tried: set[tuple] = set()  # shapes and types
        self._kind = self.kind(lambda value: value)

    def kind(self, part: Callable[[Any], Any]) -> type[KerasSums]:
        """Makes a kind of pairs of the metric's states, whose value is a part of the metric's."""
        # TensorFlow unpacks named tuples and recreates them from their class, which must know the metric.
        direction = keras_compile.metric_direction(self._metric)
        return type("KerasSums", (KerasSums,), {"value": lambda sums: part(self._value(sums)), "direction": direction})

    def __call__(self, y_true, y_pred=None, sample_weight=None) -> Mean:
        """Computes this batch's contribution to the metric's state. Replica code; arguments as Keras's `update_state`.

        Raises: ValueError for a metric whose state is not sums.
        """
        arguments = [tf.convert_to_tensor(x) for x in (y_true, y_pred, sample_weight) if x is not None]
        if not all(x.shape.rank for x in arguments):
            raise UsageError(f"KerasMetric of {self._metric.name} got a single number; pass one entry per example")
        if len(arguments) == 3:
            arguments[0] = keras.without_missing(arguments[0], arguments[2])

        def weigh(examples):
            if sample_weight is None:  # one number per example, which Keras's metrics accept for any shape of y_true
                return self(y_true, y_pred, examples)
            return self(y_true, y_pred, combined(sample_weight, examples, tf.convert_to_tensor(sample_weight)))

        return weighed_by(self.update(*arguments), weigh, sample_weight is not None)

    def update(self, *arguments: tf.Tensor) -> KerasSums:
        """Computes the contribution of an update with these arguments; they may be single numbers. Replica code."""
        specs = tuple((x.dtype, tuple(x.shape[1:]) if x.shape.rank else None) for x in arguments)
        if specs not in self._tried:
            trials.in_a_thread(lambda: self._try(specs))
            self._tried.add(specs)
        state = tf.concat([tf.reshape(tf.cast(x, tf.float32), [-1]) for x in self._added(*arguments)], 0)
        return self._kind(state, tf.ones_like(state))

    def nothing(self) -> KerasSums:
        """Returns the state of a metric that was not updated."""
        state = tf.zeros([sum(int(np.prod(variable.shape)) for variable in self._metric.variables)])
        return self._kind(state, tf.ones_like(state))

    def _added(self, *arguments) -> list[tf.Tensor]:
        """Returns a state of zeros after a batch."""
        return self._updated([tf.zeros(v.shape, v.dtype) for v in self._metric.variables], *arguments)

    def _updated(self, state: list, *arguments) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(x) for x in self._metric.stateless_update_state(state, *arguments)]

    def _value(self, sums: KerasSums):
        """Returns the value of a state: a number or a dictionary of numbers, each None without a batch."""
        with tf.device("CPU:0"):
            state = _state(self._metric.variables, sums.total)
            result = self._metric.stateless_result(state)
        # A result may be one of the metric's variables, which is unused.
        held = {id(variable): value for variable, value in zip(self._metric.variables, state, strict=True)}
        result = tf.nest.map_structure(lambda x: held.get(id(x), x), result)
        number = float if np.any(sums.count) else lambda _: None
        if isinstance(result, dict):
            return {key: number(value) for key, value in result.items()}
        result = np.asarray(result)
        return {str(i): number(x) for i, x in enumerate(result.ravel())} if result.ndim else number(result)

    def _try(self, specs) -> None:
        """Raises UsageError unless the metric's state is sums. Creates its variables, if needed."""
        random, name = np.random.default_rng(0), self._metric.name
        try:
            if not self._metric.variables:  # some of Keras's are created by the first batch
                self._metric.update_state(*_sample_batch(specs, 1, random))
            has_state = bool(self._metric.variables)
            sums = has_state and all(self._is_additive(specs, random) for _ in range(trials.TRIALS))
            # Keras's hinges have no missing labels: they look whether all labels of a batch are 0 or 1, so that one
            # that is not would change what the others mean.
            labels = () if isinstance(self._metric, _HINGES) else trials.MISSING
            for missing in [*((0, value) for value in labels), (len(specs) - 1, 0.0)]:
                with contextlib.suppress(Exception):  # of any class: a metric need not take them
                    sums = sums and self._is_additive(specs, random, missing)
        except Exception as error:  # the metric's own code may raise anything
            fix = "give it labels and predictions as its update_state takes them"
            if any(shape == () for _, shape in specs):
                fix = _WITH_COLUMNS
            raise UsageError(
                f"Keras metric {name} can't be tried on batches of {_describe(specs)}: {reason(error)}; {fix}"
            ) from error
        if not has_state:
            raise UsageError(
                f"Keras metric {name} ({type(self._metric).__name__}) has no variable, so a compiled step can't add to "
                "its state; replace a Python list by variables from add_weight"
            )
        has_columns = all(shape != () for _, shape in specs)  # without, Keras's own functions return one number too
        if not sums and has_columns and isinstance(self._metric, tf.keras.metrics.MeanMetricWrapper):
            examples = max(trials.EXAMPLES)
            if self._added(*_sample_batch(specs, examples, random))[1] == 1:  # its count
                raise UsageError(
                    f"Keras metric {name}: the function returns one number for a batch of {examples}; return one for "
                    "each example, as by keras.ops.mean(values, axis=-1)"
                )
        if not sums:
            fix = (
                "return pairs of crankshaft.mean, or compute it in a hook; for fit, give a function that returns one "
                "value per example"
            )
            if not has_columns:
                fix = f"{_WITH_COLUMNS}, or {fix}"
            if self._masked_axes(specs):
                fix = f"give it one example per entry, by tf.reshape(labels, [-1]) and such, or {fix}"
            raise UsageError(
                f"Keras metric {name} ({type(self._metric).__name__}) has a state that is not made of sums over "
                f"examples of {_describe(specs)}, so it can't be merged over batches and replicas; {fix}"
            )

    def _is_additive(self, specs, random, missing: tuple[int, float] | None = None) -> bool:
        """Tries two batches.

        Args:
          missing: the number of an argument, and the value by which some of its values are replaced.
        """
        masked, batches = self._masked_axes(specs), []
        for examples, length in zip(trials.EXAMPLES, _LENGTHS, strict=True):
            batch = _sample_batch([(dtype, _sized(shape, masked, length)) for dtype, shape in specs], examples, random)
            if missing:
                batch[missing[0]] = trials.with_missing(batch[missing[0]], missing[1], random)
            batches.append(batch)
        first, second = batches
        one, other = self._added(*first), self._added(*second)
        wholes = [self._updated(one, *second)]
        if all(shape is not None for _, shape in specs):  # batches of single numbers can't be joined
            wholes.append(self._added(*_joined(first, second, masked)))
        return all(trials.is_close(a, b + c) for whole in wholes for a, b, c in zip(whole, one, other, strict=True))

    def _masked_axes(self, specs) -> set[int]:
        """Returns the axes of unknown size for which there are weights, after that of examples."""
        if self._has_one_length or len(specs) < 3 or specs[2][1] is None:
            return set()
        return {axis for axis, size in enumerate(specs[2][1] or ()) if size is None}


def joined_kind(metrics: Sequence[tf.keras.metrics.Metric], compute: Callable[..., tf.Tensor]) -> type[KerasSums]:
    """Makes a kind of pairs of several metrics' joined states, whose value is computed from all of their variables."""
    variables = [variable for metric in metrics for variable in metric.variables]

    def value(sums: KerasSums) -> float | None:
        with tf.device("CPU:0"):
            return float(compute(*_state(variables, sums.total))) if np.any(sums.count) else None

    return type("KerasSums", (KerasSums,), {"value": value})


def _state(variables: Sequence, total) -> list[tf.Tensor]:
    """Splits a metric's state into the values of its variables."""
    state, start = [], 0
    for variable in variables:
        dtype, size = tf.as_dtype(variable.dtype), int(np.prod(variable.shape))
        values = np.asarray(total[start : start + size], np.float64).reshape(variable.shape)
        state.append(tf.constant(np.rint(values) if dtype.is_integer else values, dtype))
        start += size
    return state


def _sized(shape: tuple | None, masked: set[int], length: int) -> Sequence | None:
    """Returns the shape of an example in which masked axes have a length."""
    return None if shape is None else [length if axis in masked else size for axis, size in enumerate(shape)]


def _joined(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor], masked: set[int]) -> list[tf.Tensor]:
    """Joins two batches, of which the second is padded along the masked axes, with a weight of 0."""
    by, both = _LENGTHS[0] - _LENGTHS[1], []
    for one, other, mode in zip(first, second, ("SYMMETRIC", "SYMMETRIC", "CONSTANT"), strict=False):
        pads = [[0, by if axis in masked else 0] for axis in range(other.shape.rank - 1)]
        both.append(tf.concat([one, tf.pad(other, [[0, 0], *pads], mode)], 0))
    return both


def _sample_batch(specs, examples: int, random: np.random.Generator) -> list[tf.Tensor]:
    samples = [trials.sample(dtype, shape or (), examples, random, not i) for i, (dtype, shape) in enumerate(specs)]
    return [x if shape is not None else x[0] for x, (_, shape) in zip(samples, specs, strict=True)]


def _describe(specs) -> str:
    shapes = [(dtype, "" if shape is None else f" {[None, *shape]}") for dtype, shape in specs]
    return " and ".join(f"{dtype.name}{shape}" for dtype, shape in shapes)
