"""Names of a model's numbers: its classes, and the text that its ids stand for. Host code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.data import form
from ...engine.data.data import Data
from ...engine.data.preprocessing import ColumnPreprocessing
from ..command_line.values import short
from ..errors import UsageError


class Preprocessor:
    """Names classes, and preprocesses raw features as the training data was preprocessed.

    Attributes:
      classes: the names of classes in the order of the label numbers; None where they have none.
      words: the words, bytes, of each feature that was text; the first has id 1, and unknown words 0.
      tables: lookup tables of graphs; the owner of a graph has to keep them.
    """

    def __init__(self, known: Data):
        self.classes = known.classes
        self.words = known.words or {}
        self.tables: dict[str, tf.lookup.StaticHashTable] = {}
        self._array_columns = known.array_columns
        self._preprocessing = {name: ColumnPreprocessing("category") for name in self.words} | (
            known.preprocessing or {}
        )

    def ids(self, features: Any) -> Any:
        """Returns features as the model takes them: words looked up or hashed, dates as numbers, missing values filled.

        Features that are preprocessed already stay unchanged. Missing raw values are NaN, the least int64, empty text.
        Columns by name become an array in the order of training, where the model takes one.
        """
        if isinstance(features, dict) and self._array_columns:
            features = self._array(features)
        if not isinstance(features, dict):
            array = self._preprocessing.get("")
            if array is None or np.shape(features)[1:] != (len(array.fill),):
                return features
            return self._treated("", features)[""]
        treated: dict[str, Any] = {}
        for name, values in features.items():
            treated |= self._treated(name, values) if name in self._preprocessing else {}
        return treated | {name: values for name, values in features.items() if name not in self._preprocessing}

    def raw(self, specs: Any) -> Any:
        """Returns specs of raw features: text for those that are looked up, hashed or dates."""
        if not isinstance(specs, dict):
            array = self._preprocessing.get("")
            return (
                tf.TensorSpec([None, len(array.fill)], specs.dtype)
                if array and isinstance(specs, tf.TensorSpec)
                else specs
            )
        used = {name: preprocessing for name, preprocessing in self._preprocessing.items() if name in specs}
        made = {feature for name, preprocessing in used.items() for feature in preprocessing.made_of(name)}
        text = {name: tf.TensorSpec(specs[name].shape, tf.string) for name in used if used[name].is_of_text}
        return {name: text.get(name, spec) for name, spec in specs.items() if name not in made}

    def _array(self, features: dict[str, Any]) -> Any:
        check_names("the data", self._array_columns, features)
        columns = [tf.convert_to_tensor(features[name]) for name in self._array_columns]
        if text := [name for name, x in zip(self._array_columns, columns, strict=True) if x.dtype == tf.string]:
            raise UsageError(f"column {text[0]!r} is not of numbers, which this run's array is of; make numbers of it")
        array = tf.concat(
            [tf.reshape(tf.cast(x, tf.float32), [tf.shape(x)[0], math.prod(x.shape[1:])]) for x in columns], 1
        )
        return array.numpy() if tf.executing_eagerly() else array

    def _treated(self, name: str, values: Any) -> dict[str, Any]:
        preprocessing = self._preprocessing[name]
        if not tf.is_tensor(values):
            values = np.asarray(values)
            if values.dtype.kind == "M":
                values = np.where(np.isnat(values), "", np.datetime_as_string(values))
        try:
            made = preprocessing.apply(name, tf.convert_to_tensor(values), self._table(name))
        except tf.errors.InvalidArgumentError:  # running a graph raises it unchanged
            raise UsageError(
                f"feature {name!r} has text that is not a {preprocessing.kind}; write 2024-02-29"
                + " or 2024-02-29 12:30:00" * (preprocessing.kind == "timestamp")
            ) from None
        return {feature: x.numpy() for feature, x in made.items()} if tf.executing_eagerly() else made

    def _table(self, name: str) -> tf.lookup.StaticHashTable | None:
        if name in self.words and name not in self.tables:
            with tf.init_scope():
                words = tf.constant(self.words[name], tf.string)
                content = tf.lookup.KeyValueTensorInitializer(words, tf.range(1, len(words) + 1, dtype=tf.int64))
                self.tables[name] = tf.lookup.StaticHashTable(content, 0)
        return self.tables.get(name)


def check_names(data_name: str, trained: Collection[str], present: Collection[str]) -> None:
    """Raises `UsageError` unless features, or the columns of an array, have the names of those trained on."""
    missing, unknown = ([name for name in x if name not in y] for x, y in ((trained, present), (present, trained)))
    lines = {"missing": missing, "unknown": unknown}
    if differ := "; ".join(f"{line}: {short(', '.join(names))}" for line, names in lines.items() if names):
        raise UsageError(
            f"{data_name} has other features than this run was trained on ({differ}); name them as they were, "
            f"{short(', '.join(trained))}"
        )


def check_trained(data_name: str, trained: tuple[Data, Any], now: tuple[Data, Any]) -> None:
    """Raises `UsageError` where data can't be read by the names of the features that a run was trained on.

    Args:
      data_name: the data, for messages.
      trained: the description of the run's data, and a nest of its features.
      now: the same of the data.
    """
    before, after = (known.array_columns or (isinstance(x, dict) and tuple(sorted(x))) for known, x in (trained, now))
    if not before or not after or before == after:
        return
    check_names(data_name, before, after)
    raise UsageError(
        f"{data_name} has the columns of its array in another order than this run was trained on, which is "
        f"{short(', '.join(before))}; write them in that order"
    )


def checked(known: Data, example: Any) -> Data:
    """Returns the data's description with names in one form. Raises `UsageError` if it contradicts the data."""
    classes, words = known.classes, known.words
    if classes is not None:
        classes = tuple(map(str, classes))
        if len(classes) != known.num_classes:
            raise UsageError(f"the data names {len(classes)} classes, and num_classes={known.num_classes}; name each")
    if words is not None:
        features = form.features(example)
        for name in words:
            if not isinstance(features, dict) or name not in features or features[name].dtype.kind not in "iu":
                raise UsageError(
                    f"the data has words of {name!r}, which is not a feature of integers by that name; leave them out"
                )
        words = {name: [tf.compat.as_bytes(word) for word in each] for name, each in words.items()}
    return dataclasses.replace(known, classes=classes, words=words)
