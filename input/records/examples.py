"""Serialized `tf.train.Example`s as arrays: by slices where they are of one layout, else parsed.

Host code. TensorFlow is imported, for `tf.io.parse_example`, where records are not of one layout.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from ...engine.data.source import BadRecordError, Source
from . import example_wire
from .example_wire import Field, Layout
from .features import Feature, Features, nested

_MOST_LAYOUTS = 4  # each is tried on all records that are not of those before
_MOST_MISSES = 3  # calls in which most records were of no layout, before none is tried any more


class WrongRecordError(ValueError):
    """A record does not hold what it is said to.

    Args:
      index: in the list that was given.
      line: what was found, of the form "has ..., and ...".
    """

    def __init__(self, index: int, line: str):
        super().__init__(line)
        self.index = index


class ExampleSource(Source):
    """Records of files, each a serialized Example.

    Args:
      features: what each record holds.
    """

    def __init__(self, features: Features):
        self.element_spec = features.element_spec
        self._parser = Parser(features)

    @abc.abstractmethod
    def records(self, indices: np.ndarray) -> list[bytes] | np.ndarray:
        """Returns records as they stand in the files, or [n, bytes] uint8 of one length; see `Source.read`."""

    @abc.abstractmethod
    def where(self, index: int) -> str:
        """Returns where a record stands, for messages: file and number."""

    def read(self, indices: np.ndarray) -> Any:
        records = self.records(indices)
        try:
            return self._parser.parse(records)
        except WrongRecordError as error:
            index = int(indices[error.index])
            raise BadRecordError(
                index,
                f"{self.where(index)} {error}; say in features.json what records hold, write the record anew, or leave "
                "such ones out by --max_bad_records",
            ) from None


class Parser:
    """Parses records. May be called by several threads at once.

    Args:
      features: what each record holds.
    """

    def __init__(self, features: Features):
        self._features = [*features.by_name.values()]
        self._example = features.example
        self._raw = features.raw
        self._layouts: list[Layout] = []
        self._misses = 0
        # Strings have no length of their own, and int64s of one byte each are 0 to 127.
        self._can_have_layouts = not any(feature.is_text for feature in self._features)

    def parse(self, records: list[bytes] | np.ndarray) -> Any:
        """Returns records as arrays, a nest [n, ...]. Raises `WrongRecordError`.

        Args:
          records: each as bytes, or [n, bytes] uint8 where all are of one length.
        """
        if self._raw:
            return nested(self._example, {self._features[0].name: self._as_they_are(as_list(records))}.__getitem__)
        arrays = self._by_layouts(records) if self._can_have_layouts and self._misses < _MOST_MISSES else None
        if arrays is None:
            arrays = self._by_tensorflow(as_list(records))
        return nested(self._example, arrays.__getitem__)

    def why_wrong(self, record: bytes) -> str | None:
        """Returns what is wrong with a record: "has ..., and ..."; None if nothing is."""
        try:
            found = example_wire.features_of(record)
        except example_wire.NotAnExampleError:
            return "is no serialized tf.train.Example"
        for feature in self._features:
            if line := _why_wrong(record, feature, found.get(feature.name), found):
                return line
        return None

    def _as_they_are(self, records: list[bytes]) -> np.ndarray:
        feature = self._features[0]
        if feature.is_text:
            return np.array(records, object)
        for index, record in enumerate(records):
            if len(record) != feature.size:
                raise WrongRecordError(index, f"has {len(record)} bytes, and {feature} takes {feature.size}")
        return np.frombuffer(b"".join(records), feature.spec.dtype).reshape(len(records), *feature.spec.shape)

    def _by_layouts(self, records: list[bytes] | np.ndarray) -> dict[str, np.ndarray] | None:
        """Returns features as arrays, by name; None where most records are of other layouts than those that are known.

        Those that are of none are parsed by TensorFlow.
        """
        block = records
        if isinstance(block, list):
            if len({*map(len, block)}) > 1:
                self._misses += 1
                return None
            block = np.frombuffer(b"".join(block), np.uint8).reshape(len(block), len(block[0]))
        rows, left = [], np.ones(len(records), bool)
        for layout in self._known_and_new(block):
            good = layout.matches(block) if left.all() else left & layout.matches(block)
            if good.all():
                return {feature.name: _sliced(block, layout, feature) for feature in self._features}
            if good.any():
                rows.append((layout, np.flatnonzero(good)))
                left &= ~good
        if 2 * left.sum() > len(records):
            self._misses += 1
            return None
        arrays = {f.name: np.empty((len(records), *f.spec.shape), f.spec.dtype) for f in self._features}
        for layout, which in rows:
            for feature in self._features:
                arrays[feature.name][which] = _sliced(block[which], layout, feature)
        if left.any():
            which = np.flatnonzero(left)
            try:
                others = self._by_tensorflow(as_list(block[which]))
            except WrongRecordError as error:
                raise WrongRecordError(int(which[error.index]), str(error)) from None
            for name, found in others.items():
                arrays[name][which] = found
        return arrays

    def _known_and_new(self, block: np.ndarray):
        yield from self._layouts
        fields = [Field(feature.name, feature.stored, feature.size) for feature in self._features]
        while len(self._layouts) < _MOST_LAYOUTS:
            known = np.zeros(len(block), bool)
            for layout in self._layouts:
                known |= layout.matches(block)
            if known.all():
                return
            try:
                layout = Layout(block[np.flatnonzero(~known)[0]].tobytes(), fields)
            except ValueError:
                return
            self._layouts.append(layout)
            yield layout

    def _by_tensorflow(self, records: list[bytes]) -> dict[str, np.ndarray]:
        import tensorflow as tf

        arrays = {}
        try:
            with tf.device("CPU:0"):
                parsed = tf.io.parse_example(np.array(records, object), {f.name: _wanted(f) for f in self._features})
                for feature in self._features:
                    arrays[feature.name] = _converted(feature, parsed[feature.name], len(records))
        except (tf.errors.InvalidArgumentError, _NotAllError):
            for index, record in enumerate(records):
                if line := self.why_wrong(record):
                    raise WrongRecordError(index, line) from None
            raise
        return arrays


def as_list(records: list[bytes] | np.ndarray) -> list[bytes]:
    """Returns records as bytes each."""
    return records if isinstance(records, list) else [row.tobytes() for row in records]


class _NotAllError(ValueError):
    """Some value does not fit."""


def _sliced(block: np.ndarray, layout: Layout, feature: Feature) -> np.ndarray:
    columns = block[:, layout.ranges[feature.name]]
    shape = (len(block), *feature.spec.shape)
    if feature.stored == "int64":
        return columns.astype(feature.spec.dtype).reshape(shape)
    stored = np.dtype("<f4") if feature.stored == "float" else feature.spec.dtype
    return np.ascontiguousarray(columns).view(stored).reshape(shape).astype(feature.spec.dtype, copy=False)


def _wanted(feature: Feature) -> Any:
    import tensorflow as tf

    if feature.stored == "bytes":
        return tf.io.FixedLenFeature([feature.values] if feature.is_text else [], tf.string)
    return tf.io.FixedLenFeature([feature.values], tf.float32 if feature.stored == "float" else tf.int64)


def _converted(feature: Feature, found: Any, count: int) -> np.ndarray:
    import tensorflow as tf

    shape, dtype = (count, *feature.spec.shape), feature.spec.dtype
    if feature.stored == "bytes" and not feature.is_text:
        octets = tf.io.decode_raw(found, tf.uint8).numpy()  # of one length, or it raises
        if octets.shape[1] != feature.size:
            raise _NotAllError
        return octets.view(dtype).reshape(shape)
    values = found.numpy().reshape(shape)
    converted = values.astype(dtype, copy=False)
    if feature.stored == "int64" and dtype.kind in "iu" and not (converted == values).all():
        raise _NotAllError
    return converted


def _why_wrong(record: bytes, feature: Feature, found: example_wire.StoredFeature | None, others: dict) -> str | None:
    name, wanted = feature.name, f"{feature.as_json()['dtype']} {[*feature.spec.shape]}"
    if found is None:
        return f"has no feature {name} (it has {', '.join(sorted(others)) or 'none'})"
    if found.kind != feature.stored:
        return f"has {name} stored as {found.kind}, and {feature.stored} was expected"
    if feature.stored == "bytes" and not feature.is_text:
        sizes = [size for _, size in found.ranges]
        if sizes != [feature.size]:
            return f"has {name} of {', '.join(map(str, sizes)) or 'no'} bytes, and {wanted} takes {feature.size}"
    elif found.number != feature.values:
        return f"has {found.number} values of {name}, and {wanted} takes {feature.values}"
    if feature.stored == "int64" and feature.spec.dtype.kind in "iu":
        limits = np.iinfo(feature.spec.dtype)
        for value in example_wire.int64s(record, found):
            if not limits.min <= value <= limits.max:
                return f"has {name} = {value}, which is no {feature.spec.dtype.name}"
    return None
