"""The form of batches and splits: features, labels and weights of examples.

One of three forms: `(features, labels)`, `(features, labels, weights)`, or features alone. Features and labels are each
an array, or dictionaries and tuples of arrays (lists count as tuples, as in Keras); weights are one number per example.
Features alone are `(features,)` if they are a tuple. With weights but without labels, labels are `()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .arrays import Mapped
from .source import Source, Spec, Split
from .streamed import Stream

_LABELS_LOOKED_AT = 1 << 17


class Fields(NamedTuple):
    """A batch's or split's fields; None for missing ones."""

    features: Any
    labels: Any = None
    weights: Any = None

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields each array with its name for messages: `features['city']`, `labels`, `weights`."""
        for name, component in self._asdict().items():
            if component is not None:
                yield from _named(name, component)


class WeighedLabels(NamedTuple):
    """Labels with weights of outputs or of a sequence's steps, which only trainers of Keras models accept."""

    labels: Any
    weights: Any


def fields(batch) -> Fields:
    """Returns the fields of a batch, a split, or a nest of their structure."""
    if not isinstance(batch, tuple):
        return Fields(batch)
    features, labels, weights = (*batch, None, None)[:3]
    return Fields(features, None if isinstance(labels, tuple) and not labels else labels, weights)


def features(batch):
    """Returns the features of a batch, a split, or a nest of their structure."""
    return fields(batch).features


def without_weights(batch):
    """Returns a batch for losses and metrics: (features, labels), or the features alone."""
    named = fields(batch)
    if named.labels is None:
        return named.features
    return batch if named.weights is None else (named.features, named.labels)


def text_fields(batch) -> list[str]:
    """Returns the names of the features and labels that are strings, which XLA does not support."""
    return [name for name, array in fields(batch).named() if tf.as_dtype(array.dtype) == tf.string]


def example(split: Split):
    """Returns one example of zeros, or of empty strings, with a batch axis of 1."""
    return tf.nest.map_structure(zeros, split.element_spec)


def zeros(spec: Spec) -> np.ndarray:
    """Returns a batch of one example, of zeros or empty strings."""
    shape = [1, *spec.shape]
    is_text = tf.as_dtype(spec.dtype) == tf.string
    return np.full(shape, b"", object) if is_text else np.zeros(shape, spec.dtype)


def labels_shown(split: Source | Stream) -> str:
    """Describes a split's labels; quotes the first that is not a whole number from 0 to below 2^31, if any."""
    spec = fields(split.element_spec).labels
    kind = f"its labels are {tf.as_dtype(spec.dtype).name}{list(spec.shape) or ''}" if isinstance(spec, Spec) else ""
    if not kind or not split.by_index or tf.as_dtype(spec.dtype) == tf.string:
        return kind or "its labels are several"
    most = min(len(split), _LABELS_LOOKED_AT)
    for rows in np.array_split(np.arange(most), -(-most // 1024)):
        values = np.asarray(fields(split.read(rows)).labels).reshape(-1)
        odd = values[~((values >= 0) & (values < 1 << 31) & (np.floor(values) == values))]
        if len(odd):
            return f"{kind}, {odd[0]} among them"
    return kind


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


def _named(name: str, component) -> Iterator[tuple[str, Any]]:
    if isinstance(component, dict):
        for key, each in component.items():
            yield from _named(f"{name}[{key!r}]", each)
    elif isinstance(component, tuple):
        for index, each in enumerate(component):
            yield from _named(f"{name}[{index}]", each)
    else:
        yield name, component
