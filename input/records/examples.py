"""Serialized `tf.train.Example`s as arrays, by `tf.io.parse_example`. Imports TensorFlow to parse."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...engine.data.source import Source
from ...engine.errors import BadRecordError
from .features import Features, NotAnExampleError, RecordFeature, Stored, nested, values_in

SAMPLES = 64  # records from which features are inferred


class ExampleSource(Source):
    """Records of files, each a serialized Example. May be read by several threads at once."""

    def __init__(self, features: Features):
        self.element_spec = features.element_spec
        self._features = features
        self._parse: Callable[[Any], Any] | None = None  # in a graph, once

    @abc.abstractmethod
    def records(self, indices: np.ndarray) -> list[bytes]:
        """Returns records as stored; see `Source.read`."""

    def samples(self) -> list[bytes]:
        """Returns sample records, spread over all files; skips damaged ones, and raises `BadRecordError` if all are."""
        indices = np.unique(np.linspace(0, len(self) - 1, SAMPLES).astype(np.int64))
        try:
            return self.records(indices)
        except BadRecordError as first:
            whole: list[bytes] = []
            for index in indices:
                with contextlib.suppress(BadRecordError):
                    whole += self.records(index[np.newaxis])
            if not whole:
                raise first
            return whole

    @abc.abstractmethod
    def locate(self, index: int) -> str:
        """Returns a record's file and number, for messages."""

    def read(self, indices: np.ndarray) -> Any:
        import tensorflow as tf

        records = self.records(indices)
        try:
            with tf.device("CPU:0"):
                if self._parse is None:
                    signature = [tf.TensorSpec([None], tf.string)]
                    parse = tf.function(in_graph(self._features), signature, autograph=False)
                    self._parse = parse.get_concrete_function()  # whose traces TensorFlow does not count
                return tf.nest.map_structure(lambda x: x.numpy(), self._parse(tf.constant(records, tf.string)))
        except tf.errors.InvalidArgumentError:
            # TensorFlow's error names no record of the batch.
            for index, record in zip(indices.tolist(), records, strict=True):
                if fault := self._fault(record):
                    raise BadRecordError(
                        index,
                        f"{self.locate(index)} {fault}; correct features.json, write the record again, or leave such "
                        "records out by max_bad_records",
                    ) from None
            raise

    def _fault(self, record: bytes) -> str | None:
        """Returns the problem of a record, "has ..., and ...", or None."""
        features = [*self._features.by_name.values()]
        if self._features.raw:
            size = features[0].size
            is_wrong = not features[0].is_text and len(record) != size
            return f"has {len(record)} bytes, and {features[0]} takes {size}" if is_wrong else None
        try:
            stored = values_in(record)
        except NotAnExampleError as error:
            return str(error).removeprefix("it ")
        lines = (_mismatch(feature, stored.get(feature.name), stored) for feature in features)
        return next(filter(None, lines), None)


def in_graph(features: Features) -> Callable[[Any], Any]:
    """Returns a function from serialized records, [n] string, to the nest of their features, in a graph.

    Its ops raise InvalidArgumentError for a record without these features.
    """
    import tensorflow as tf

    def stored(feature: RecordFeature) -> tf.io.FixedLenFeature:
        if feature.stored == "bytes":
            return tf.io.FixedLenFeature([feature.values] if feature.is_text else [], tf.string)
        return tf.io.FixedLenFeature([feature.values], tf.float32 if feature.stored == "float" else tf.int64)

    def from_bytes(feature: RecordFeature, values: tf.Tensor) -> tf.Tensor:
        octets = tf.io.decode_raw(values, tf.uint8)  # raises unless all have one length
        dtype = tf.as_dtype(feature.spec.dtype)
        message = f"a record's {feature.name} has other bytes than {feature} takes"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(octets)[1:], [feature.size], message)]):
            if dtype == tf.bool:
                return tf.cast(octets, dtype)
            size = [dtype.size] if dtype.size > 1 else []
            return tf.bitcast(tf.reshape(octets, [tf.shape(octets)[0], feature.values, *size]), dtype)

    def converted(feature: RecordFeature, values: tf.Tensor) -> tf.Tensor:
        if feature.stored == "bytes" and not feature.is_text:
            values = from_bytes(feature, values)
        elif feature.stored == "int64" and feature.spec.dtype.kind in "iu":
            limits = np.iinfo(feature.spec.dtype)
            fits = tf.reduce_all((values >= limits.min) & (values <= min(limits.max, tf.int64.max)))
            with tf.control_dependencies(
                [tf.debugging.Assert(fits, [f"a record's {feature.name} is not a {feature}"])]
            ):
                values = tf.cast(values, feature.spec.dtype)
        elif not feature.is_text:
            values = tf.cast(values, feature.spec.dtype)
        return tf.reshape(values, [tf.shape(values)[0], *feature.spec.shape])

    def parse(serialized: tf.Tensor) -> Any:
        if features.raw:
            parsed = dict.fromkeys(features.by_name, serialized)
        else:
            wanted = {name: stored(feature) for name, feature in features.by_name.items()}
            parsed = tf.io.parse_example(serialized, wanted)
        arrays = {name: converted(feature, parsed[name]) for name, feature in features.by_name.items()}
        return nested(features.example, arrays.__getitem__)

    return parse


def _mismatch(feature: RecordFeature, stored: Stored | None, others: Mapping[str, Stored]) -> str | None:
    name, wanted = feature.name, f"{feature.as_json()['dtype']} {[*feature.spec.shape]}"
    if stored is None:
        return f"has no feature {name} (it has {', '.join(sorted(others)) or 'none'})"
    if stored.kind != feature.stored:
        return f"has {name} stored as {stored.kind}, and {feature.stored} was expected"
    if feature.stored == "bytes" and not feature.is_text:
        sizes = [*map(len, stored.values)]
        if sizes != [feature.size]:
            return f"has {name} of {', '.join(map(str, sizes)) or 'no'} bytes, and {wanted} takes {feature.size}"
    elif len(stored.values) != feature.values:
        return f"has {len(stored.values)} values of {name}, and {wanted} takes {feature.values}"
    if feature.stored == "int64" and feature.spec.dtype.kind in "iu":
        limits = np.iinfo(feature.spec.dtype)
        for value in stored.values:
            if not limits.min <= value <= limits.max:
                return f"has {name} = {value}, which is not of type {feature.spec.dtype.name}"
    return None
