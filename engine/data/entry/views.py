"""Views of a source or a stream: some of its examples, or weights for classes, outputs or steps.

A view reads from its original, and copies only the labels and weights of arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import UsageError
from ..arrays import ArraySource
from ..form import WeighedLabels, components, example, fields
from ..source import Source, Spec, WrappedSource
from ..streamed import Stream, WrappedStream, map_elements, specs


def divided(train: Source | Stream, fraction: float) -> tuple[Source, Source]:
    """Splits into (all but the last examples, the last ones), by Keras's rule.

    The last examples in their own order, so it depends neither on the seed nor on the number of workers.

    Raises:
      UsageError: the examples have no fixed order, or one of the two would be empty.
    """
    flag = f"validation_split={fraction}"
    if not train.by_index:
        raise UsageError(
            f"{flag} divides arrays, and the data is a tf.data.Dataset; return (dataset.skip(n), dataset.take(n)) "
            "from the data function"
        )
    if train.by_epoch:
        raise UsageError(
            f"{flag} takes the last examples, and the data has on_epoch_begin or on_epoch_end, which may put others "
            "there; return two datasets, (train, eval), from the data function"
        )
    examples = len(train)
    first = math.floor(examples * (1.0 - fraction))
    if not 0 < first < examples:
        raise UsageError(
            f"{flag} of {examples} examples leaves {first} to train on and {examples - first} to evaluate; use "
            "another share"
        )
    return train.between(0, first), train.for_evaluation().between(first, examples)


def first(split: Source | Stream, examples: int) -> Source | Stream:
    """Returns the first examples of a split."""
    if split.by_index:
        return split.between(0, min(len(split), examples))
    return _PipedStream(split, lambda dataset: dataset.take(examples), is_whole=False)


def features(split: Any, convert: Callable[[Any], Any]) -> Source | Stream:
    """Returns a split of features alone, each converted, such as by looking up text.

    Args:
      split: a `Source` or a `Stream`.
      convert: maps a nest of arrays or tensors [n, ...] to another, also in a graph.
    """
    return _convert(split, convert, lambda features, _: (features,) if isinstance(features, tuple) else features)


def with_features(split: Any, convert: Callable[[Any], Any]) -> Source | Stream:
    """Returns a split with the features converted; see `features`."""

    def join(features: Any, others: Sequence) -> Any:
        return (features, *others) if others or isinstance(features, tuple) else features

    return _convert(split, convert, join)


def _convert(split: Any, convert: Callable[[Any], Any], join: Callable[[Any, Sequence], Any]) -> Source | Stream:
    """Returns a split whose examples are joined of converted features and the other components."""

    def convert_examples(examples):
        features, *others = components(examples)
        return join(convert(features), others)

    if not split.by_index:
        return _mapped(split, convert_examples)
    before = split.element_spec
    converted = tf.nest.map_structure(np.asarray, convert(fields(example(split)).features))
    specs = tf.nest.map_structure(lambda x: Spec(x.shape[1:], x.dtype), converted)

    def with_unknown_dimensions(spec: Spec, before: Spec) -> Spec:
        if len(spec.shape) != len(before.shape):
            return spec
        sizes = zip(spec.shape, before.shape, strict=True)
        return Spec(tuple(None if old is None else new for new, old in sizes), spec.dtype)

    with contextlib.suppress(TypeError, ValueError):  # of another structure
        specs = tf.nest.map_structure(with_unknown_dimensions, specs, fields(before).features)
    return _DecodedSource(split, convert_examples, join(specs, components(before)[1:]))


def with_floats_like(split: Source | Stream, wanted: Any) -> Source | Stream:
    """Returns a split whose floating-point features and labels have the dtypes of those of other examples, by `Spec`.

    Of another structure it is returned unchanged.
    """

    def dtype(spec: Spec, other: Spec) -> tf.DType:
        before, after = tf.as_dtype(spec.dtype), tf.as_dtype(other.dtype)
        return after if before.is_floating and after.is_floating else before

    now, others = fields(split.element_spec), fields(wanted)
    labels = others.labels.labels if isinstance(others.labels, WeighedLabels) else others.labels
    specs = [now.features] if now.labels is None or labels is None else [now.features, now.labels]
    try:
        dtypes = tf.nest.map_structure(dtype, specs, [others.features, labels][: len(specs)])
    except (TypeError, ValueError):
        return split
    converted = tf.nest.map_structure(
        lambda x, dtype: dataclasses.replace(x, dtype=dtype.as_numpy_dtype), specs, dtypes
    )
    if converted == specs:
        return split

    def join(examples: Any, parts: list) -> Any:
        is_whole = components(examples) is examples
        return (*parts, *examples[len(parts) :]) if is_whole else parts[0]

    def convert_examples(examples: Any) -> Any:
        parts = [*fields(examples)[: len(dtypes)]]
        return join(examples, tf.nest.map_structure(lambda x, dtype: tf.cast(x, dtype), parts, dtypes))

    if not split.by_index:
        return _mapped(split, convert_examples)
    if (arrays := split.as_arrays()) is not None:
        parts = [*fields(arrays)[: len(dtypes)]]
        cast = tf.nest.map_structure(lambda x, dtype: x.astype(dtype.as_numpy_dtype), parts, dtypes)
        return ArraySource(join(arrays, cast))
    return _DecodedSource(split, convert_examples, join(split.element_spec, converted))


def with_class_weights(split: Source | Stream, class_weight: Mapping[int, float]) -> Source | Stream:
    """Returns a split with the weights of its examples' classes; 1 for classes without one.

    Args:
      split: split without weights, with labels [n] or [n, 1] of classes, or [n, classes], whose largest counts.

    Raises:
      UsageError: labels are not classes, the split has weights, or a key is not a class.
    """
    named = fields(split.element_spec)
    if named.weights is not None:
        raise UsageError("class_weight and sample weights are both given; multiply them, and leave class_weight out")
    if named.labels is None or isinstance(named.labels, (dict, tuple)):
        raise UsageError("class_weight is for labels that are one array of classes; give sample_weight")
    by_class = _check_class_weight(class_weight)
    return _with_labels(split, lambda y: (y, _weights_by_class(y, by_class)), f"{sorted(by_class.items())} of ")


def unify_weight_structure(splits: list[Source | Stream]) -> list[Source | Stream]:
    """Gives the splits `WeighedLabels` if one of them has weights of outputs or steps."""
    for weights in (fields(split.element_spec).weights for split in splits):
        if weights is None:
            continue
        shapes = tf.nest.map_structure(lambda x: tf.TensorShape(x.shape), weights)
        if shapes != tf.TensorShape([]):  # several: per output, or per step of a sequence
            return [with_output_weights(split, shapes) for split in splits]
    return splits


def with_output_weights(split: Source | Stream, shapes: Any) -> Source | Stream:
    """Returns a split with `WeighedLabels`; missing weights are 1.

    Args:
      split: split in which a single weight of an example applies to all its outputs and steps.
      shapes: nest of the shapes of an example's weights.
    """
    labels = fields(split.element_spec).labels
    if isinstance(labels, WeighedLabels):
        return split
    if labels is None:
        raise UsageError("sample_weight of outputs, or of time steps, weighs what labels are compared with; give y")

    def spread(weights, examples) -> Any:
        def weight(shape: tf.TensorShape) -> tf.Tensor:
            weighed = tf.ones([examples, *shape])
            return weighed if weights is None else weighed * tf.reshape(weights, [examples, *[1] * shape.rank])

        if weights is not None:
            weights = tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), weights)
        is_whole = not isinstance(weights, (dict, tuple)) and (weights is None or weights.shape.rank == 1)
        return tf.nest.map_structure(weight, shapes) if is_whole else weights

    def weighed(y, weights=None) -> tuple:
        examples = tf.shape(tf.nest.flatten(y)[0])[0]
        return (WeighedLabels(y, fill_missing_weights(y, spread(weights, examples), lambda: tf.ones([examples]))),)

    return _with_labels(split, weighed)


def fill_missing_weights(labels: Any, weights: Any, ones: Callable[[], Any]) -> Any:
    """Fills in ones for outputs without weights (None, or not in the dictionary)."""
    if isinstance(weights, dict) and isinstance(labels, dict):
        weights = {**dict.fromkeys(labels), **weights}
    return tf.nest.map_structure(lambda weight: ones() if weight is None else weight, weights)


def _check_class_weight(class_weight: Mapping[int, float]) -> dict[int, float]:
    with contextlib.suppress(ArithmeticError, AttributeError, TypeError, ValueError):
        by_class = {int(number): float(weight) for number, weight in class_weight.items()}
        if by_class.keys() == class_weight.keys():  # not "1", nor 1.5, which no label is
            return by_class
    raise UsageError(
        f"class_weight={class_weight!r:.80} is not a number for each number of a class, and another key would weigh no "
        "example; give a dictionary such as {0: 1.0, 1: 2.5}"
    )


def _weights_by_class(labels: tf.Tensor, class_weight: Mapping[int, float]) -> tf.Tensor:
    """Returns the weight of each label's class, float32 [n]; 1 for a class without one. As in Keras."""
    labels = labels[:, 0] if labels.shape.rank == 2 and labels.shape[1] == 1 else labels
    labels = tf.argmax(labels, axis=-1) if labels.shape.rank == 2 else labels
    if labels.shape.rank != 1:
        raise UsageError(
            f"class_weight: labels are of shape {labels.shape}, so an example has no class; give sample_weight"
        )
    classes = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)
    is_class = classes[:, tf.newaxis] == tf.constant([*class_weight], tf.int64)
    weights = tf.reduce_sum(tf.where(is_class, tf.constant([*class_weight.values()], tf.float32), 0.0), 1)
    return tf.where(tf.reduce_any(is_class, 1), weights, 1.0)


def _with_labels(split: Source | Stream, function: Callable[..., tuple], tag: str = "") -> Source | Stream:
    """Returns a split whose labels and weights are computed from another's.

    Args:
      function: maps labels and weights, if any, nests of tensors [n, ...], to new ones.
      tag: identifies the function, for the identity of a source.
    """

    def convert_examples(examples):
        x, *components = examples
        return x, *function(*tf.nest.map_structure(tf.convert_to_tensor, components))

    if not split.by_index:
        return _mapped(split, convert_examples)
    if (arrays := split.as_arrays()) is not None:
        x, *components = convert_examples(arrays)
        return ArraySource((x, *tf.nest.map_structure(np.asarray, components)))
    others = convert_examples(example(split))[1:]
    specs = tf.nest.map_structure(lambda x: Spec(x.shape[1:], np.asarray(x).dtype), others)
    return _DecodedSource(split, convert_examples, (split.element_spec[0], *specs), tag)  # features of any length


def _mapped(stream: Stream, convert: Callable[[Any], Any]) -> Stream:
    """Returns a stream of converted examples; `convert` maps a nest of tensors [n, ...]."""

    # `convert` takes batches, and a stream has single examples, unless it is by batch: each is a batch of one.
    def converted(element):
        if stream.by_batch:
            return convert(element)
        return tf.nest.map_structure(lambda x: x[0], convert(tf.nest.map_structure(lambda x: x[tf.newaxis], element)))

    return _PipedStream(stream, lambda dataset: map_elements(dataset, converted))


class _DecodedSource(WrappedSource):
    """A source whose examples are computed from another's.

    Args:
      function: maps a nest of tensors [n, ...], n of the other source's examples.
      tag: identifies the function, for the source's identity.
    """

    def __init__(self, source: Source, function: Callable[[Any], Any], element_spec: Any, tag: str = ""):
        super().__init__(source)
        self._function, self._tag = function, tag
        self.element_spec = element_spec

    def decode(self, stored: Any, seeds: Any) -> Any:
        return tf.nest.map_structure(tf.convert_to_tensor, self._function(super().decode(stored, seeds)))

    def identity(self) -> str:
        return f"{self._tag}{super().identity()}"


class _PipedStream(WrappedStream):
    """A stream whose examples a pipeline computes from another's.

    Args:
      pipe: maps a dataset of the other stream's examples.
      is_whole: whether `pipe` maps each example to one, so that files can be divided first.
    """

    def __init__(self, stream: Stream, pipe: Callable[[tf.data.Dataset], tf.data.Dataset], is_whole: bool = True):
        super().__init__(stream)
        self._pipe, self._is_whole = pipe, is_whole
        dataset = self.examples(None, tf.constant(0, tf.int64))
        self.element_spec = specs(dataset, self.by_batch)
        if not is_whole:
            self.is_cut = stream.length == tf.data.INFINITE_CARDINALITY
            self.length, self.ends = int(dataset.cardinality()), True

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        return self._pipe(self._stream.examples(seed, epoch))

    def shard_files(self, workers: int, worker: int) -> Stream | None:
        part = self._stream.shard_files(workers, worker) if self._is_whole else None
        return part and _PipedStream(part, self._pipe)
