"""What a batch is, and a split of the data, which has the same form: features, labels and weights of examples.

One of three forms: `(features, labels)`, `(features, labels, weights)`, or features alone. Features and labels are
each an array, or dictionaries and tuples of arrays (lists are taken as tuples, as Keras takes them); weights are one
number an example. Features alone are `(features,)` if they are a tuple, and else as they are. With weights and without
labels, labels are `()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class Fields(NamedTuple):
    """A batch's or a split's fields; None for one that it lacks."""

    features: Any
    labels: Any = None
    weights: Any = None

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields each array with its name for messages: `features['city']`, `labels`, `weights`."""
        for name, part in self._asdict().items():
            if part is not None:
                yield from _named(name, part)


def fields(batch) -> Fields:
    """Returns the fields of a batch, of a split or of what has their structure."""
    if not isinstance(batch, tuple):
        return Fields(batch)
    features, labels, weights = (*batch, None, None)[:3]
    return Fields(features, None if isinstance(labels, tuple) and not labels else labels, weights)


def features(batch):
    """Returns the features of a batch, of a split or of what has their structure."""
    return fields(batch).features


def without_weights(batch):
    """Returns a batch as losses and metrics see it: (features, labels), or the features alone."""
    parts = fields(batch)
    if parts.labels is None:
        return parts.features
    return batch if parts.weights is None else (parts.features, parts.labels)


def text_fields(batch) -> list[str]:
    """Returns the names of the features and labels that are strings, which XLA does not take."""
    return [name for name, array in fields(batch).named() if tf.as_dtype(array.dtype) == tf.string]


def _named(name: str, part) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        for key, each in part.items():
            yield from _named(f"{name}[{key!r}]", each)
    elif isinstance(part, tuple):
        for index, each in enumerate(part):
            yield from _named(f"{name}[{index}]", each)
    else:
        yield name, part
