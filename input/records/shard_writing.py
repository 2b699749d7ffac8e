"""Writes examples into shards: their features, records of them, and files whole or not at all.

Host code, NumPy only, and the library `array_record` where such shards are asked for.
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
from ..data import InputError
from . import checksums, example_wire, record_index, shards
from .features import Feature, Features, names_in

FORMATS = {"tfrecord": ".tfrecord", "array_record": ".array_record"}  # and the ends of their names
_PARTS = ("features", "label", "weight")
_GROUP_BYTES = 1 << 16  # of an ArrayRecord, which are compressed and read together


@dataclasses.dataclass(frozen=True)
class ShardRequest:
    """What is to be written, and where.

    Attributes:
      input: a name or a path.
      arguments: of its `load`.
      data_dir: likewise.
      seed: likewise.
      output_dir: the folder for the shards.
      shards: of the training data.
      format: one of `FORMATS`.
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


def described(element_spec: Any, about: dict[str, Any]) -> Features:
    """Returns the features by which examples are written.

    float32 is stored as floats; other numbers as their bytes; text as it is.

    Args:
      element_spec: nest of tuples and dicts of `Spec`, in a form of `engine.data.form`.
      about: what else features.json shall say.

    Raises:
      InputError: an array is of a type that is not written.
    """
    by_name: dict[str, Feature] = {}

    def named(spec: Any, path: tuple[str, ...]) -> Any:
        if isinstance(spec, dict):
            return {key: named(spec[key], (*path, str(key))) for key in spec}
        if isinstance(spec, (tuple, list)):
            return tuple(named(each, (*path, str(number))) for number, each in enumerate(spec))
        short = "/".join(path[1:] if path[0] == _PARTS[0] and len(path) > 1 else path)
        name = "/".join(path) if short in by_name or (short in _PARTS[1:] and path[0] == _PARTS[0]) else short
        by_name[name] = _feature(name, spec)
        return name

    if isinstance(element_spec, tuple):
        example: Any = tuple(named(spec, (part,)) for part, spec in zip(_PARTS, element_spec, strict=False))
    else:
        example = named(element_spec, _PARTS[:1])
    return Features(by_name, example, about)


def _feature(name: str, spec: Spec) -> Feature:
    if spec.dtype.kind in "OSU":
        return Feature(name, "bytes", Spec(spec.shape, object))
    if spec.dtype.kind not in "biuf":
        raise InputError(f"{name} is of type {spec.dtype}, which is not written to shards; make it float32")
    return Feature(name, "float" if spec.dtype == np.float32 else "bytes", spec)


class Encoder:
    """Makes records of examples.

    Args:
      features: what each record holds, see `described`.
    """

    def __init__(self, features: Features):
        self._features = [*features.by_name.values()]
        self._names = names_in(features.example)

    def records(self, arrays: list[np.ndarray]) -> list[bytes]:
        """Returns records of examples.

        Args:
          arrays: [n, ...] each, in the order of the names in the features' example.
        """
        by_name = dict(zip(self._names, arrays, strict=True))
        first = example_wire.write(self._stored(by_name, 0))
        if any(feature.is_text or not feature.size for feature in self._features):
            return [first, *(example_wire.write(self._stored(by_name, row)) for row in range(1, len(arrays[0])))]
        block = np.tile(np.frombuffer(first, np.uint8), (len(arrays[0]), 1))
        places = example_wire.features_of(first)  # in each record
        for feature in self._features:
            ((start, size),) = places[feature.name].ranges
            array = np.ascontiguousarray(by_name[feature.name], _little(feature.spec.dtype))
            block[:, start : start + size] = array.reshape(len(array), -1).view(np.uint8)
        return [row.tobytes() for row in block]

    def _stored(self, by_name: dict[str, np.ndarray], row: int) -> dict[str, tuple[str, bytes | list[bytes]]]:
        stored: dict[str, tuple[str, bytes | list[bytes]]] = {}
        for feature in self._features:
            values = np.asarray(by_name[feature.name][row])
            if feature.is_text:
                stored[feature.name] = ("bytes", [_as_bytes(value) for value in values.ravel().tolist()])
            else:
                stored[feature.name] = (feature.stored, values.astype(_little(feature.spec.dtype)).tobytes())
        return stored


def _little(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("<")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def write(path: str, records: Iterator[list[bytes]], kind: str) -> dict[str, int]:
    """Writes a shard, whole or not at all, and its index where it has one beside it. Raises OSError.

    Args:
      path: of the shard.
      records: some at a time.
      kind: one of `FORMATS`.

    Returns:
      What there is to know of it: examples, bytes, crc32c of the file.
    """
    with files.replacing(path, files.make_file) as temporary:
        lengths = (_write_tfrecord if kind == "tfrecord" else _write_array_record)(temporary, records)
        files.sync(temporary)
        with open(temporary, "rb") as file:
            figures = {"examples": len(lengths), **checked(temporary)}
            ends = record_index.checksum_of_ends(_reader(file), figures["bytes"])
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + record_index.SUFFIX)  # of what was there
    if kind == "tfrecord":
        record_index.write(path, figures["bytes"], ends, lengths)
    return figures


def checked(path: str) -> dict[str, int]:
    """Returns a file's bytes and crc32c. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "crc32c": checksums.whole_file(_reader(file), size)}


def _reader(file):
    return lambda offset, length: os.pread(file.fileno(), length, offset)


def _write_tfrecord(path: str, records: Iterator[list[bytes]]) -> np.ndarray:
    pieces = [np.zeros(0, np.int64)]
    with open(path, "wb") as file:
        for some in records:
            lengths = np.array([*map(len, some)], np.int64)
            pieces.append(lengths)
            heads = zip(lengths.tolist(), checksums.of_lengths(lengths).tolist(), strict=True)
            feet = checksums.of_records(some).tolist()
            parts = (
                (struct.pack("<QI", *head), record, struct.pack("<I", foot))
                for head, record, foot in zip(heads, some, feet, strict=True)
            )
            file.write(b"".join(part for record in parts for part in record))
    return np.concatenate(pieces)


def _write_array_record(path: str, records: Iterator[list[bytes]]) -> np.ndarray:
    pieces, writer = [np.zeros(0, np.int64)], None
    try:
        for some in records:
            pieces.append(np.array([*map(len, some)], np.int64))
            if writer is None:
                group = min(1024, max(1, _GROUP_BYTES // max(1, len(some[0]))))
                writer = shards.library().ArrayRecordWriter(path, f"group_size:{group}")
            for record in some:
                writer.write(record)
    except RuntimeError as error:
        raise OSError(str(error)) from None
    finally:
        if writer is not None:
            writer.close()
    return np.concatenate(pieces)
