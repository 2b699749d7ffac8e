"""Writes examples into shards: features, records, and files, each written completely or not at all.

NumPy only, and the library `array_record` for such shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...engine.data.source import Spec
from ...engine.machine import files
from ..checks import InputError
from . import checksums, record_index, shard_files
from .features import Features, RecordFeature, names_in

FORMATS = {"tfrecord": ".tfrecord", "array_record": ".array_record"}  # and their suffixes
_COMPONENTS = ("features", "label", "weight")
_OTHER = b"\1\1\1\x3f\1\1\1\x3f"  # no byte of it occurs in a zero of any type
_PIECE_BYTES = 1 << 20
_GROUP_BYTES = 1 << 16  # records of an ArrayRecord that are compressed and read together


@dataclasses.dataclass(frozen=True)
class ShardRequest:
    """The data to write, and where.

    Attributes:
      input: name of an input, or path of a user's file.
      arguments: keyword arguments of the input's `load`.
      shards: number of training shards.
      format: format of the shards, one of `FORMATS`.
    """

    input: str
    arguments: Mapping[str, Any]
    data_dir: str | None
    seed: int
    output_dir: str
    shards: int
    format: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard: examples [first, stop) of a split. `file` is its path in the folder."""

    split: str
    file: str
    first: int
    stop: int


def described(element_spec: Any, extra: dict[str, Any]) -> Features:
    """Returns the features of written examples.

    float32 is stored as floats; other numbers as their bytes; text as it is.

    Args:
      element_spec: nest of tuples and dicts of `Spec`, in a form of `engine.data.form`.
      extra: further contents of features.json.

    Raises:
      InputError: an array's type can't be written.
    """
    by_name: dict[str, RecordFeature] = {}

    def named(spec: Any, path: tuple[str, ...]) -> Any:
        if isinstance(spec, dict):
            return {key: named(spec[key], (*path, str(key))) for key in spec}
        if isinstance(spec, (tuple, list)):
            return tuple(named(component, (*path, str(number))) for number, component in enumerate(spec))
        short = "/".join(path[1:] if path[0] == _COMPONENTS[0] and len(path) > 1 else path)
        name = "/".join(path) if short in by_name or (short in _COMPONENTS[1:] and path[0] == _COMPONENTS[0]) else short
        by_name[name] = _feature(name, spec)
        return name

    if isinstance(element_spec, tuple):
        example: Any = tuple(
            named(spec, (component,)) for component, spec in zip(_COMPONENTS, element_spec, strict=False)
        )
    else:
        example = named(element_spec, _COMPONENTS[:1])
    return Features(by_name, example, extra)


def _feature(name: str, spec: Spec) -> RecordFeature:
    if spec.dtype.kind in "OSU":
        return RecordFeature(name, "bytes", Spec(spec.shape, object))
    if spec.dtype.kind not in "biuf":
        raise InputError(f"{name} is of type {spec.dtype}, which is not written to shards; make it float32")
    return RecordFeature(name, "float" if spec.dtype == np.float32 else "bytes", spec)


class Encoder:
    """Makes records of examples."""

    def __init__(self, features: Features):
        self._features = [*features.by_name.values()]
        self._names = names_in(features.example)

    def records(self, arrays: list[np.ndarray]) -> list[bytes]:
        """Returns records of examples, arrays [n, ...] in the order of the names in the features' example."""
        columns = dict(zip(self._names, arrays, strict=True))
        stored = {feature.name: _as_stored(feature, columns[feature.name]) for feature in self._features}
        count = len(arrays[0])
        if any(feature.is_text or not feature.size for feature in self._features):
            return [self._record({name: values[row] for name, values in stored.items()}) for row in range(count)]
        first = {name: np.zeros_like(values[0]) for name, values in stored.items()}
        zeros = np.frombuffer(self._record(first), np.uint8)
        block = np.tile(zeros, (count, 1))
        for name, values in stored.items():  # finds the bytes of the value by changing it
            other = np.frombuffer(_OTHER * values.shape[1], values.dtype, values.shape[1])
            positions = np.flatnonzero(np.frombuffer(self._record({**first, name: other}), np.uint8) != zeros)
            block[:, positions[0] : positions[-1] + 1] = values.view(np.uint8)
        return [row.tobytes() for row in block]

    def _record(self, stored: Mapping[str, np.ndarray]) -> bytes:
        """Returns the record of one example's values, [values] each, as `_as_stored` returns them."""
        import tensorflow as tf

        example = tf.train.Example()
        for feature in self._features:
            target, values = example.features.feature[feature.name], stored[feature.name]
            if feature.is_text:
                texts = [value.encode() if isinstance(value, str) else value for value in values.tolist()]
                target.bytes_list.value.extend(texts)
            elif feature.stored == "bytes":
                target.bytes_list.value.append(values.tobytes())
            else:
                target.float_list.value.extend(values.tolist())
        return example.SerializeToString(deterministic=True)


def _as_stored(feature: RecordFeature, array: np.ndarray) -> np.ndarray:
    """Returns a feature of examples, [n, values], numbers little-endian."""
    array = np.asarray(array) if feature.is_text else np.asarray(array, feature.spec.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(len(array), feature.values)


def write(path: str, records: Iterator[list[bytes]], kind: str) -> dict[str, int]:
    """Writes a shard, completely or not at all, and its index, if the format has one. Raises OSError.

    Returns:
      The number of examples, the file's bytes and its crc32c.
    """
    with files.replacing(path, files.make_file) as temporary:
        lengths = (_write_tfrecord if kind == "tfrecord" else _write_array_record)(temporary, records)
        files.sync(temporary)
        with open(temporary, "rb") as file:
            figures = {"examples": len(lengths), **checked(temporary)}
            ends = record_index.checksum_of_ends(
                lambda offset, length: os.pread(file.fileno(), length, offset), figures["bytes"]
            )
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + record_index.SUFFIX)  # of an older shard
    if kind == "tfrecord":
        record_index.write(path, figures["bytes"], ends, lengths)
    return figures


def checked(path: str) -> dict[str, int]:
    """Returns a file's bytes and crc32c. Raises OSError."""
    size = checksum = 0
    with open(files.open_regular(path), "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size, checksum = size + len(piece), checksums.crc32c(piece, checksum)
    return {"bytes": size, "crc32c": checksum}


def _write_tfrecord(path: str, records: Iterator[list[bytes]]) -> np.ndarray:
    pieces = [np.zeros(0, np.int64)]
    with open(path, "wb") as file:
        for some in records:
            lengths = np.array([*map(len, some)], np.int64)
            pieces.append(lengths)
            heads = zip(lengths.tolist(), checksums.length_checksums(lengths).tolist(), strict=True)
            feet = checksums.record_checksums(some).tolist()
            parts = (
                (struct.pack("<QI", *head), record, struct.pack("<I", foot))
                for head, record, foot in zip(heads, some, feet, strict=True)
            )
            file.write(b"".join(part for record in parts for part in record))
    return np.concatenate(pieces)


def _write_array_record(path: str, records: Iterator[list[bytes]]) -> np.ndarray:
    pieces, writer = [np.zeros(0, np.int64)], None
    try:
        with contextlib.ExitStack() as stack:
            for some in records:
                pieces.append(np.array([*map(len, some)], np.int64))
                if writer is None:
                    group = min(1024, max(1, _GROUP_BYTES // max(1, len(some[0]))))
                    writer = shard_files.library().ArrayRecordWriter(path, f"group_size:{group}")
                    stack.callback(writer.close)  # which writes, too
                for record in some:
                    writer.write(record)
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return np.concatenate(pieces)
