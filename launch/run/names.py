"""What a model's numbers stand for: the names of its classes, and the text whose ids it takes. Host code."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...engine.step import batches
from ...input.splits import Splits
from ..errors import UsageError


class Names:
    """Names classes, and looks up text as it was looked up for training.

    Attributes:
      classes: the names of classes in the order of the label numbers; None where they have none.
      words: of each feature that was text what was looked up, bytes; the first has id 1, and what is not among them 0.
      tables: those that a graph looks up in, which what holds the graph has to hold.
    """

    def __init__(self, known: Splits):
        self.classes = known.classes
        self.words = known.words or {}
        self.tables: dict[str, tf.lookup.StaticHashTable] = {}

    def ids(self, features: Any) -> Any:
        """Returns features, with ids in place of text that was looked up for training; others stay as they are."""
        if not isinstance(features, dict):
            return features
        return {name: self._ids(name, array) if name in self.words else array for name, array in features.items()}

    def raw(self, specs: Any) -> Any:
        """Returns specs of features as they were before text was looked up."""
        if not isinstance(specs, dict):
            return specs
        return {
            name: tf.TensorSpec(spec.shape, tf.string) if name in self.words else spec for name, spec in specs.items()
        }

    def _ids(self, name: str, array: Any) -> Any:
        text = tf.convert_to_tensor(array)
        if text.dtype != tf.string:
            return array
        found = self._table(name).lookup(text)
        return found.numpy() if tf.executing_eagerly() else found

    def _table(self, name: str) -> tf.lookup.StaticHashTable:
        if name not in self.tables:
            with tf.init_scope():
                words = tf.constant(self.words[name], tf.string)
                content = tf.lookup.KeyValueTensorInitializer(words, tf.range(1, len(words) + 1, dtype=tf.int64))
                self.tables[name] = tf.lookup.StaticHashTable(content, 0)
        return self.tables[name]


def checked(known: Splits, example: Any) -> Splits:
    """Returns what the data says of itself, with names in one form. Raises `UsageError` where it is not of the data."""
    classes, words = known.classes, known.words
    if classes is not None:
        classes = tuple(map(str, classes))
        if len(classes) != known.num_classes:
            raise UsageError(f"the data names {len(classes)} classes, and num_classes={known.num_classes}; name each")
    if words is not None:
        features = batches.features(example)
        for name in words:
            if not isinstance(features, dict) or name not in features or features[name].dtype.kind not in "iu":
                raise UsageError(
                    f"the data has words of {name!r}, which is no feature of integers by that name; leave them out"
                )
        words = {name: [tf.compat.as_bytes(word) for word in each] for name, each in words.items()}
    return known._replace(classes=classes, words=words)
