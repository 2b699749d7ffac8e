"""Data as Keras's `fit` takes it, brought into the form of a split (`engine.data.form`). Host code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.data import frames
from ...engine.data.arrays import ArraySource
from ...engine.data.form import fields
from ...engine.data.py_dataset import OfBatches
from ...engine.data.source import Source, Spec, WrappedSource
from ..errors import UsageError
from . import splits

_BATCH_SIZE = 32  # Keras's


def given(x: Any) -> Any:
    """Returns what is trained on, with a source in the place of a `PyDataset`, a dataset in that of a `DataLoader`.

    What holds arrays becomes a nest of them. A dataset that has None for some of its weights has ones there.
    """
    if frames.is_loader(x):
        return frames.of_loader(x)
    if isinstance(x, Iterator):
        raise UsageError(
            f"a {type(x).__name__} can be read once only, and not from where a run resumes; give a "
            "keras.utils.PyDataset, or tf.data.Dataset.from_generator(function, output_signature=...).batch(...)"
        )
    if isinstance(x, tf.data.Dataset) and tf.type_spec_from_value(None) in tf.nest.flatten(x.element_spec):
        return x.map(_without_none)
    if isinstance(x, tf.keras.utils.PyDataset):
        return OfBatches(x)
    is_nest = x is not None and not isinstance(x, (str, tf.data.Dataset, Source)) and not callable(x)
    return splits.as_arrays(_arrays(x)) if is_nest else x


def _without_none(x, y=None, weights=None) -> tuple:
    if weights is None:
        return (x,) if y is None else (x, y)
    return x, () if y is None else y, _of_all(y, weights, tf.shape(tf.nest.flatten(x)[0])[:1])


def _of_all(labels: Any, weights: Any, shape: Any) -> Any:
    """Returns weights with ones for outputs that have none: None, or not in a dictionary as labels are one."""
    if isinstance(weights, dict) and isinstance(labels, dict):
        weights = {**dict.fromkeys(labels), **weights}
    return tf.nest.map_structure(lambda each: tf.ones(shape) if each is None else each, weights)


def never_ends(x: Any) -> bool:
    """Returns whether x is a dataset without an end."""
    return isinstance(x, tf.data.Dataset) and bool(x.cardinality() == tf.data.INFINITE_CARDINALITY)


def batch_size_of(x: Any) -> int:
    """Returns the size of the batches that x comes in; Keras's default where it does not."""
    if isinstance(x, OfBatches):
        return x.chunk_examples
    if not isinstance(x, tf.data.Dataset):
        return _BATCH_SIZE
    sizes = {part.shape[0] if part.shape.rank else 0 for part in tf.nest.flatten(x.element_spec)}
    if sizes == {None}:  # of .batch(), which may end in a smaller one
        sizes = {int(tf.shape(part)[0]) for batch in x.take(1) for part in tf.nest.flatten(batch)}
    size = sizes.pop() if len(sizes) == 1 else 0
    if not size:
        raise UsageError("the dataset is empty, or its elements are not batches; call dataset.batch(32)")
    return size


def split_of(
    name: str,
    x: Any,
    y: Any = None,
    weights: Any = None,
    *,
    is_trained_on: bool = False,
    batch_size: int = _BATCH_SIZE,
    most_batches: int | None = None,
) -> Any:
    """Returns a split of the run's data.

    Args:
      name: of x, for messages.
      x: see `crankshaft.fit`.
      y: labels, where x has none.
      weights: of the examples, where x has none.
      is_trained_on: whether batches have to be of one size, as those of the run are.
      batch_size: of the batches that `most_batches` counts, where x does not come in batches.
      most_batches: how many batches are taken; None is all.

    Raises:
      UsageError: it can't be trained on.
    """
    if callable(x) and not isinstance(x, tf.keras.utils.PyDataset):
        x = x()
        x, y, weights = (*x, None, None)[:3] if isinstance(x, tuple) and y is None else (x, y, weights)
    x = given(x)
    comes_whole = isinstance(x, (tf.data.Dataset, Source))
    for what, value in (("y", y), ("sample_weight", weights)):
        if comes_whole and value is not None:
            raise UsageError(f"{name} is a {type(x).__name__}, which comes with all of an example; leave {what} out")
    if y is not None and any(each is None for each in tf.keras.tree.flatten(y)):
        raise UsageError(
            "y has None in the place of an output's labels; give the labels of the others by the names of their "
            "outputs, y={'name': labels}"
        )
    size = x.chunk_examples if isinstance(x, OfBatches) else batch_size
    split = x if comes_whole else _of_arrays(name, x, y, weights)
    if isinstance(split, tf.data.Dataset):
        split = split if most_batches is None else split.take(most_batches)
        return _of_known_shape(_of_one_size(split) if is_trained_on else split)
    return split if most_batches is None else split.between(0, min(len(split), most_batches * size))


def form_of_weights(split: Source | tf.data.Dataset) -> Any:
    """Returns the shapes of an example's weights where they are several: of outputs, or of steps of a sequence."""
    if (weights := fields(split.element_spec).weights) is None:
        return None
    form = tf.nest.map_structure(lambda x: tf.TensorShape(x.shape), weights)
    return None if form == tf.TensorShape([]) else form


def with_weighed_labels(split: Source | tf.data.Dataset, form: Any) -> Source | tf.data.Dataset:
    """Returns a split with (labels, weights) for labels. What it has no weights of weighs 1.

    Args:
      split: as `split_of` returns it.
      form: of an example's weights, see `form_of_weights`; one number an example counts for all of them.
    """
    if fields(split.element_spec).labels is None:
        raise UsageError("sample_weight of outputs, or of time steps, weighs what labels are compared with; give y")

    def spread(weights, examples) -> Any:
        def weight(shape: tf.TensorShape) -> tf.Tensor:
            weighed = tf.ones([examples, *shape])
            return weighed if weights is None else weighed * tf.reshape(weights, [examples, *[1] * shape.rank])

        if weights is not None:
            weights = tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), weights)
        is_whole = not isinstance(weights, (dict, tuple)) and (weights is None or weights.shape.rank == 1)
        return tf.nest.map_structure(weight, form) if is_whole else weights

    def weighed(y, weights=None) -> tuple:
        examples = tf.shape(tf.nest.flatten(y)[0])[0]
        return ((y, _of_all(y, spread(weights, examples), [examples])),)

    return _mapped(split, weighed)


def _of_one_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of batches that fails where they are not of one size, but for a smaller last one."""
    size = batch_size_of(dataset)

    def checked(is_last: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        examples = tf.shape(tf.nest.flatten(batch)[0])[0]
        line = f"x has batches of {size} examples and, before its end, of others; call repeat() and such before batch()"
        with tf.control_dependencies([tf.debugging.Assert(~is_last & (examples <= size), [line])]):
            return examples < size, tf.nest.map_structure(tf.identity, batch)

    return dataset.scan(tf.constant(False), checked)


def _of_known_shape(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of batches as one of examples, all of the shape of the first where theirs is not known."""
    split = dataset.unbatch()
    if all(part.shape.is_fully_defined() for part in tf.nest.flatten(split.element_spec)):
        return split
    (shapes,) = [tf.nest.map_structure(lambda x: x.shape[1:], batch) for batch in dataset.take(1)]
    if not isinstance(shapes, tuple):
        return split.map(lambda x: tf.nest.map_structure(tf.ensure_shape, x, shapes))
    return split.map(lambda *parts: tf.nest.map_structure(tf.ensure_shape, parts, shapes))


def _of_arrays(name: str, x: Any, y: Any, weights: Any) -> ArraySource:
    if x is None:
        raise UsageError(f"{name} is not given; give an array, or a dictionary or list of arrays")
    y = _arrays(y)
    if isinstance(weights, (dict, list, tuple)):
        weights = _of_all(y, weights, np.shape(tf.nest.flatten((x, 0))[0])[:1])
    weights = None if weights is None else _arrays(weights)
    if not isinstance(weights, (dict, tuple)) and np.ndim(weights) == 2 and np.shape(weights)[1] == 1:
        weights = weights[:, 0]
    x = x[0] if isinstance(x, tuple) and len(x) == 1 else x
    split = (x,) if y is None and weights is None else (x, () if y is None else y, weights)
    split = splits.as_arrays(split if weights is not None else split[:2])
    splits.check_arrays(name, split)
    return ArraySource(split)


def _arrays(part: Any) -> Any:
    """Returns a nest of arrays, with those of data frames and tuples for lists; a list of numbers is one array."""
    if isinstance(part, dict):
        return {name: _arrays(each) for name, each in part.items()}
    if isinstance(part, (list, tuple)):
        return tuple(map(_arrays, part)) if part and np.ndim(part[0]) else np.asarray(part)
    return part.to_numpy() if hasattr(part, "to_numpy") else part


def weighed(split: Source | tf.data.Dataset, class_weight: Mapping[int, float]) -> Source | tf.data.Dataset:
    """Returns a split, see `split_of`, with the weights of its examples' classes, see `crankshaft.fit`."""
    _check_labels(split.element_spec)
    by_class = _by_class(class_weight)
    about = f"{sorted(by_class.items())} of "
    return _mapped(split, lambda y: (y, _weights(y, by_class)), about)


def _by_class(class_weight: Mapping[int, float]) -> dict[int, float]:
    with contextlib.suppress(ArithmeticError, AttributeError, TypeError, ValueError):
        by_class = {int(each): float(weight) for each, weight in class_weight.items()}
        if by_class.keys() == class_weight.keys():  # not of "1", nor of 1.5, which no label is
            return by_class
    raise UsageError(
        f"class_weight={class_weight!r:.80} is not a number for each number of a class, and another key would weigh no "
        "example; give a dictionary such as {0: 1.0, 1: 2.5}"
    )


def _check_labels(element_spec: Any) -> None:
    parts = fields(element_spec)
    if parts.weights is not None:
        raise UsageError("class_weight and sample weights are both given; multiply them, and leave class_weight out")
    if parts.labels is None or isinstance(parts.labels, (dict, tuple)):
        raise UsageError("class_weight is for labels that are one array of classes; give sample_weight")


def _weights(labels: tf.Tensor, class_weight: Mapping[int, float]) -> tf.Tensor:
    """Returns the weight of each label's class, float32 [n]; 1 of a class that has none. As Keras has it.

    Args:
      labels: [n] or [n, 1], or [n, classes], of which the largest counts.
      class_weight: by class.
    """
    labels = labels[:, 0] if labels.shape.rank == 2 and labels.shape[1] == 1 else labels
    labels = tf.argmax(labels, axis=-1) if labels.shape.rank == 2 else labels
    if labels.shape.rank != 1:
        raise UsageError(
            f"class_weight: labels are of shape {labels.shape}, so an example has no class; give sample_weight"
        )
    classes = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int64)
    is_its = tf.cast(classes[:, tf.newaxis] == tf.constant([*class_weight], tf.int64), tf.float32)
    return tf.reduce_sum(is_its * [*class_weight.values()], 1) + 1.0 - tf.reduce_sum(is_its, 1)


def _mapped(split: Source | tf.data.Dataset, function: Callable[..., tuple], about: str = "") -> Any:
    """Returns a split whose labels and weights are made of another's.

    Args:
      split: as `split_of` returns it.
      function: of labels and, where there are any, weights, nests of tensors [n, ...]; returns what is in their places.
      about: what tells it from other functions, for the identity of a source that is read.
    """

    def made(x, *parts):
        return x, *function(*tf.nest.map_structure(tf.convert_to_tensor, parts))

    if isinstance(split, tf.data.Dataset):
        rows = functools.partial(tf.nest.map_structure, lambda part: tf.convert_to_tensor(part)[tf.newaxis])
        return split.map(lambda *parts: tf.nest.map_structure(lambda part: part[0], made(*rows(parts))))
    if (arrays := split.as_arrays()) is not None:
        return ArraySource(splits.as_arrays(made(*arrays)))
    return _Mapped(split, made, about)


class _Mapped(WrappedSource):
    """A source whose examples are made of another's; see `_mapped`."""

    def __init__(self, source: Source, function: Callable[..., tuple], about: str):
        super().__init__(source)
        self._function, self._about = function, about
        made = tf.nest.map_structure(np.asarray, function(*splits.example(source)))
        self.element_spec = tf.nest.map_structure(lambda x: Spec(x.shape[1:], x.dtype), made)

    def decode(self, stored: Any, seeds: Any) -> Any:
        return self._function(*super().decode(stored, seeds))

    def identity(self) -> str:
        return f"{self._about}{super().identity()}"
