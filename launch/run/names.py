"""What a model's numbers stand for: the names of its classes, and the text whose ids it takes. Host code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.step import batches
from ...input.data import Data
from ...input.treatments import Treatment
from ..errors import UsageError


class Names:
    """Names classes, and treats raw features as the data to train on was treated.

    Attributes:
      classes: the names of classes in the order of the label numbers; None where they have none.
      words: of each feature that was text what was looked up, bytes; the first has id 1, and what is not among them 0.
      tables: those that a graph looks up in, which what holds the graph has to hold.
    """

    def __init__(self, known: Data):
        self.classes = known.classes
        self.words = known.words or {}
        self.tables: dict[str, tf.lookup.StaticHashTable] = {}
        self._treatments = {name: Treatment("category") for name in self.words} | (known.treatments or {})

    def ids(self, features: Any) -> Any:
        """Returns features as the model takes them: words looked up or hashed, dates as numbers, missing values filled.

        Those that are so already stay as they are. Raw values that are missing are NaN, the least int64, empty text.
        """
        if not isinstance(features, dict):
            array = self._treatments.get("")
            if array is None or np.shape(features)[1:] != (len(array.fill),):
                return features
            return self._treated("", features)[""]
        treated: dict[str, Any] = {}
        for name, values in features.items():
            treated |= self._treated(name, values) if name in self._treatments else {}
        return treated | {name: values for name, values in features.items() if name not in self._treatments}

    def raw(self, specs: Any) -> Any:
        """Returns specs of features as they are in the data: text where it is looked up, hashed or a date."""
        if not isinstance(specs, dict):
            array = self._treatments.get("")
            return (
                tf.TensorSpec([None, len(array.fill)], specs.dtype)
                if array and isinstance(specs, tf.TensorSpec)
                else specs
            )
        used = {name: treatment for name, treatment in self._treatments.items() if name in specs}
        made = {part for name, treatment in used.items() for part in treatment.made_of(name)}
        text = {name: tf.TensorSpec(specs[name].shape, tf.string) for name in used if used[name].is_of_text}
        return {name: text.get(name, spec) for name, spec in specs.items() if name not in made}

    def _treated(self, name: str, values: Any) -> dict[str, Any]:
        treatment = self._treatments[name]
        if not tf.is_tensor(values):
            values = np.asarray(values)
            if values.dtype.kind == "M":
                values = np.where(np.isnat(values), "", np.datetime_as_string(values))
        try:
            made = treatment.apply(name, tf.convert_to_tensor(values), self._table(name))
        except tf.errors.InvalidArgumentError:  # a graph's run raises it as it is
            raise UsageError(
                f"feature {name!r} has text that is not a {treatment.kind}; write 2024-02-29"
                + " or 2024-02-29 12:30:00" * (treatment.kind == "timestamp")
            ) from None
        return {part: x.numpy() for part, x in made.items()} if tf.executing_eagerly() else made

    def _table(self, name: str) -> tf.lookup.StaticHashTable | None:
        if name in self.words and name not in self.tables:
            with tf.init_scope():
                words = tf.constant(self.words[name], tf.string)
                content = tf.lookup.KeyValueTensorInitializer(words, tf.range(1, len(words) + 1, dtype=tf.int64))
                self.tables[name] = tf.lookup.StaticHashTable(content, 0)
        return self.tables.get(name)


def checked(known: Data, example: Any) -> Data:
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
                    f"the data has words of {name!r}, which is not a feature of integers by that name; leave them out"
                )
        words = {name: [tf.compat.as_bytes(word) for word in each] for name, each in words.items()}
    return dataclasses.replace(known, classes=classes, words=words)
