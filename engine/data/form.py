"""The form of batches and splits: features, labels and weights of examples.

One of three forms: `(features, labels)`, `(features, labels, weights)`, or features alone. Features and labels are each
an array, or dictionaries and tuples of arrays (lists count as tuples, as in Keras); weights are one number per example.
Features alone are `(features,)` if they are a tuple. With weights but without labels, labels are `()`. An array whose
examples differ in length is `Padded`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from .arrays import Mapped
from .source import Source, Spec, Split
from .streamed import Stream

_LABELS_CHECKED = 1 << 17
_OTHER_LENGTHS = (
    "an example is not of the length that was read for it: the data has changed (remove .crankshaft/*.lengths beside "
    "it), or lengths(indices) of the source are not those of its arrays"
)


class Fields(NamedTuple):
    """A batch's or split's fields; None for missing ones."""

    features: Any
    labels: Any = None
    weights: Any = None

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields each array with its name for messages: `features['city']`, `labels`, `weights`."""
        for name, component in self._asdict().items():
            if component is not None:
                yield from named_arrays(name, component)


def field_names(example) -> set[str]:
    """Returns the names of an example's or a batch's features and labels; weights may be in any."""
    return {name for name, _ in fields(example)._replace(weights=None).named()}


def check_same_fields(train, evaluation) -> None:
    """Raises `UsageError` unless two examples, or batches, have fields of equal names."""
    trained, evaluated = map(field_names, (train, evaluation))
    for one, name, other, other_name in ((trained, "train", evaluated, "eval"), (evaluated, "eval", trained, "train")):
        if only := sorted(one - other):
            raise UsageError(
                f"the {name} data has {only[0]}, and the {other_name} data has {', '.join(sorted(other))}; give both "
                "in one form"
            )


class Padded(NamedTuple):
    """An array whose examples differ in length, padded with zeros (or empty strings) to one length per batch.

    The specs of datasets and sources have None for such dimensions, the first ones of an example; each batch then has a
    `Padded` for that array.

    Attributes:
      values: [batch, longest, ...]; with two unknown dimensions [batch, longest, longest, ...].
      lengths: [batch] int32, the examples' own lengths; with two unknown dimensions [batch, 2].

    Example:
      >>> import tensorflow as tf
      >>> words = Padded(tf.constant([[3, 5], [7, 0]]), tf.constant([2, 1]))
      >>> words.mask.numpy().tolist()
      [[True, True], [True, False]]
    """

    values: Any
    lengths: Any

    @property
    def unknown(self) -> int:
        """The number of unknown dimensions."""
        return self.lengths.shape[1] if len(self.lengths.shape) > 1 else 1

    @property
    def mask(self) -> tf.Tensor:
        """Whether an entry is an example's own, bool [batch, longest], or [batch, longest, longest]."""
        lengths = tf.reshape(self.lengths, [-1, self.unknown])
        sizes = tf.shape(self.values)[1:]
        mask = tf.sequence_mask(lengths[:, 0], sizes[0])
        for axis in range(1, self.unknown):
            along = tf.sequence_mask(lengths[:, axis], sizes[axis])
            mask = mask[..., tf.newaxis] & tf.reshape(along, [-1, *[1] * axis, sizes[axis]])
        return mask


class Ragged(Padded):
    """A `Padded` that came as a `tf.RaggedTensor`, which a Keras model gets, as from Keras's `fit`."""

    __slots__ = ()

    @property
    def tensor(self) -> tf.RaggedTensor:
        """Ragged, [batch, length, ...]."""
        return tf.RaggedTensor.from_tensor(self.values, tf.cast(self.lengths, tf.int64))


class Unmeasured(Padded):
    """A `Padded` of examples that came padded, so that their lengths count padding; trainers get its values alone."""

    __slots__ = ()


def padded_by(spec: Spec) -> type[Padded]:
    """The class of batches of a `Spec` with unknown dimensions."""
    return Ragged if spec.is_ragged else Padded if spec.has_lengths else Unmeasured


def measured(nest):
    """Returns a batch, or its specs, as trainers get it: without lengths that count padding."""
    if isinstance(nest, Batches):
        return Batches({name: measured(batch) for name, batch in nest.items()})
    return map_padded(lambda padded: padded.values if isinstance(padded, Unmeasured) else padded, nest)


def values(nest):
    """Returns a nest with the values in place of each `Padded`: without lengths, as a compiled Keras model gets it."""
    return map_padded(lambda padded: padded.values, nest)


def map_padded(function: Callable[[Padded], Any], nest):
    """Returns a nest with a function's results in place of each `Padded`."""
    if isinstance(nest, Padded):
        return function(nest)
    if isinstance(nest, dict):
        by_name = {name: map_padded(function, nest[name]) for name in sorted(nest)}  # the order of `tf.nest`
        return {name: by_name[name] for name in nest}
    if isinstance(nest, tuple):
        values = [map_padded(function, value) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)
    return nest


def lengths(examples) -> tf.Tensor:
    """Returns the sizes of examples' unknown dimensions, int64 [n, dimensions]: those of each `Padded` in turn."""
    found: list[tf.Tensor] = []
    map_padded(lambda padded: found.append(tf.reshape(padded.lengths, [-1, padded.unknown])), examples)
    return tf.cast(tf.concat(found, 1), tf.int64)


def longest(examples) -> tf.Tensor:
    """Returns the sizes of the longest of some examples, at least 1, int64 [dimensions]."""
    return tf.maximum(tf.reduce_max(lengths(examples), 0), 1)


def padded_to(sizes: tf.Tensor, examples):
    """Pads the values of each `Padded` of a nest, or slices padding off. An error if an example would be cut.

    Args:
      sizes: sizes of all unknown dimensions in turn, int64 [dimensions].
      examples: nest of tensors [n, ...].
    """
    left = iter(tf.unstack(sizes))

    def fit(padded: Padded) -> Padded:
        values, rest = padded.values, padded.values.shape.rank - 1 - padded.unknown
        wanted = [next(left) for _ in range(padded.unknown)]
        least = tf.minimum(tf.shape(values, tf.int64)[1 : 1 + padded.unknown], wanted)
        fits = tf.reduce_all(lengths((padded,)) <= least)
        with tf.control_dependencies([tf.debugging.Assert(fits, [_OTHER_LENGTHS])]):
            least = tf.identity(least)
        values = tf.slice(values, tf.zeros([values.shape.rank], tf.int64), [-1, *tf.unstack(least), *[-1] * rest])
        missing = tf.pad(tf.stack(wanted) - least, [[1, rest]])
        fitted = tf.pad(values, tf.stack([tf.zeros_like(missing), missing], 1))
        fitted.set_shape([None, *[None] * padded.unknown, *padded.values.shape[1 + padded.unknown :]])
        return padded._replace(values=fitted)

    return map_padded(fit, examples)


def element_spec(batch) -> Any:
    """Returns the nest of `Spec` of a batch's examples."""
    specs = tf.nest.map_structure(lambda x: Spec(x.shape[1:], tf.as_dtype(x.dtype).as_numpy_dtype), batch)

    def with_unknown_dimensions(padded: Padded) -> Padded:
        unknown = sum(padded.lengths.shape) or 1  # of one, lengths are scalars
        shape = (*[None] * unknown, *padded.values.shape[unknown:])
        is_ragged, has_lengths = isinstance(padded, Ragged), not isinstance(padded, Unmeasured)
        return padded._replace(values=Spec(shape, padded.values.dtype, is_ragged, has_lengths))

    return map_padded(with_unknown_dimensions, specs)


def batch_spec(spec: Spec, size: int | None = None) -> tf.TypeSpec:
    """The specification of a batch's tensor: a ragged one, or with unknown dimensions."""
    kind = functools.partial(tf.RaggedTensorSpec, ragged_rank=1) if spec.is_ragged else tf.TensorSpec
    return kind([size, *spec.shape], tf.as_dtype(spec.dtype))


class Batches(dict):
    """The batch of a step that has several inputs: a batch of each, by name, with its own number of examples."""


def with_none(labels):
    """Returns labels, or their specs, with None for `()`: outputs without labels, which only Keras models may have."""
    if isinstance(labels, dict):
        return {name: with_none(label) for name, label in labels.items()}
    if isinstance(labels, tuple) and not isinstance(labels, Padded):
        return tuple(map(with_none, labels)) or None
    return labels


class WeighedLabels(NamedTuple):
    """Labels with weights of outputs or of a sequence's steps, which only trainers of Keras models accept."""

    labels: Any
    weights: Any


def components(batch) -> tuple:
    """Returns the parts of a batch, a split, or a nest of their structure: features first, as far as there are."""
    return batch if isinstance(batch, tuple) and not isinstance(batch, Padded) else (batch,)


def fields(batch) -> Fields:
    """Returns the fields of a batch, a split, or a nest of their structure."""
    features, labels, weights = (*components(batch), None, None)[:3]
    return Fields(features, None if isinstance(labels, tuple) and not labels else labels, weights)


def features(batch):
    """Returns the features of a batch, a split, or a nest of their structure."""
    return fields(batch).features


def text_fields(batch) -> list[str]:
    """Returns the names of the features and labels that are strings, which XLA does not support."""
    return [name for name, array in fields(batch).named() if tf.as_dtype(array.dtype) == tf.string]


def example(split: Split):
    """Returns one example of zeros, or of empty strings, with a batch axis of 1."""
    return tf.nest.map_structure(zeros, split.element_spec)


def zeros(spec: Spec) -> np.ndarray:
    """Returns a batch of one example, of zeros or empty strings; unknown dimensions are 1."""
    shape = [1, *(1 if size is None else size for size in spec.shape)]
    is_text = tf.as_dtype(spec.dtype) == tf.string
    return np.full(shape, b"", object) if is_text else np.zeros(shape, spec.dtype)


def labels_shown(split: Source | Stream) -> str:
    """Describes a split's labels; quotes the first that is not a whole number from 0 to below 2^31, if any."""
    spec = fields(split.element_spec).labels
    kind = f"its labels are {tf.as_dtype(spec.dtype).name}{list(spec.shape) or ''}" if isinstance(spec, Spec) else ""
    if not kind or not split.by_index or tf.as_dtype(spec.dtype) == tf.string:
        return kind or "its labels are several"
    most = min(len(split), _LABELS_CHECKED)
    for indices in np.array_split(np.arange(most), -(-most // 1024)):
        values = np.asarray(fields(split.read(indices)).labels).reshape(-1)
        odd = values[~((values >= 0) & (values < 1 << 31) & (np.floor(values) == values))]
        if len(odd):
            return f"{kind}, {odd[0]} among them"
    return kind


def classes(split: Split) -> set[int] | None:
    """Returns the classes among labels, one per example or one-hot; None if they are not, or take reading examples."""
    arrays = split.as_arrays()
    labels = split.read_labels() if arrays is None else fields(arrays).labels
    labels = labels.labels if isinstance(labels, WeighedLabels) else labels
    found: set[int] = set()
    if not isinstance(labels, (np.ndarray, Mapped)) or labels.ndim > 2:
        return None
    for first in range(0, len(labels), _LABELS_CHECKED):
        values = np.asarray(labels[first : first + _LABELS_CHECKED])
        if values.ndim == 2 and values.shape[1] > 1:
            if ((values != 0) & (values != 1)).any() or (values.sum(1) != 1).any():
                return None
            values = values.argmax(1)
        found.update(np.unique(values[values >= 0]).astype(np.int64).tolist())
    return found


def num_classes(split: Split) -> int | None:
    """Infers the number of classes from labels in arrays: integers from 0 on, or floats 0 and 1."""
    arrays = split.as_arrays()
    labels = None if arrays is None else fields(arrays).labels
    if not isinstance(labels, (np.ndarray, Mapped)) or labels.ndim != 1 or not len(labels):
        return None
    values = np.asarray(labels)
    if values.dtype.kind == "f":
        return 2 if ((values == 0) | (values == 1)).all() else None
    return int(values.max()) + 1 if values.dtype.kind in "iu" and values.min() >= 0 else None


def named_arrays(name: str, component) -> Iterator[tuple[str, Any]]:
    """Yields each array of a field, or a part of it, with its name for messages, see `Fields.named`."""
    if isinstance(component, dict):
        for key, value in component.items():
            yield from named_arrays(f"{name}[{key!r}]", value)
    elif isinstance(component, Padded):
        yield name, component.values
        if not isinstance(component, Unmeasured):
            yield f"{name}.lengths", component.lengths
    elif isinstance(component, tuple):
        for index, value in enumerate(component):
            yield from named_arrays(f"{name}[{index}]", value)
    else:
        yield name, component
