"""`tf.train.Example` in bytes: what is where in a record, and writing.

The format is that of protocol buffers (protobuf.dev/programming-guides/encoding) and TensorFlow's
`core/example/feature.proto`. Host code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

KINDS = {1: "bytes", 2: "float", 3: "int64"}  # by the number of the field in `Feature`
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_LENGTH_DELIMITED = 2


class StoredFeature(NamedTuple):
    """A feature in a record.

    Attributes:
      kind: one of `KINDS`.
      ranges: (first byte, bytes) of each value, or of all packed numbers together.
      number: of values.
    """

    kind: str
    ranges: tuple[tuple[int, int], ...]
    number: int


class NotAnExampleError(ValueError):
    """Bytes are not a serialized tf.train.Example."""


def features_of(record: bytes) -> dict[str, StoredFeature]:
    """Returns the features of a record, and where their values are. Raises `NotAnExampleError`."""
    features = {}
    try:
        for _, start, stop in _fields(record, 0, len(record), (1,)):
            for _, entry, entry_stop in _fields(record, start, stop, (1,)):
                name, feature = b"", None
                for number, first, last in _fields(record, entry, entry_stop, (1, 2)):
                    if number == 1:
                        name = record[first:last]
                    else:
                        feature = _feature(record, first, last)
                if feature is not None:
                    features[name.decode()] = feature
    except (IndexError, UnicodeDecodeError):
        raise NotAnExampleError("it is not a serialized tf.train.Example") from None
    return features


def _feature(record: bytes, start: int, stop: int) -> StoredFeature | None:
    for number, first, last in _fields(record, start, stop, (1, 2, 3)):
        kind = KINDS[number]
        parts = tuple((begin, end - begin) for _, begin, end in _fields(record, first, last, (1,), packed=kind))
        if kind == "bytes":
            return StoredFeature(kind, parts, len(parts))
        size = sum(length for _, length in parts)
        if kind == "float":
            return StoredFeature(kind, parts, size // 4)
        ends = sum(1 for begin, length in parts for byte in record[begin : begin + length] if byte < 0x80)
        return StoredFeature(kind, parts, ends)
    return None


def int64s(record: bytes, feature: StoredFeature) -> Iterator[int]:
    """Yields a feature's int64s."""
    for start, size in feature.ranges:
        offset = start
        while offset < start + size:
            value, offset = _varint(record, offset)
            yield value - (1 << 64) if value >> 63 else value


def _fields(
    record: bytes, start: int, stop: int, known: tuple[int, ...], packed: str = ""
) -> Iterator[tuple[int, int, int]]:
    """Yields (field's number, first byte, byte after the last) of a message's fields."""
    while start < stop:
        tag, start = _varint(record, start)
        number, wire = tag >> 3, tag & 7
        if number not in known:
            raise NotAnExampleError(f"it is not a serialized tf.train.Example (field {number})")
        if wire == _LENGTH_DELIMITED:
            length, start = _varint(record, start)
            end = start + length
        elif packed == "float" and wire == 5:  # numbers one by one, as old writers have them
            end = start + 4
        elif packed == "int64" and wire == 0:
            _, end = _varint(record, start)
        else:
            raise NotAnExampleError(f"it is not a serialized tf.train.Example (wire type {wire})")
        if end > stop:
            raise NotAnExampleError("it is not a serialized tf.train.Example (a length goes beyond it)")
        yield number, start, end
        start = end


def _varint(record: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = record[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7


def write(features: Mapping[str, tuple[str, bytes | list[bytes]]]) -> bytes:
    """Serializes an Example, its features in the order given.

    Args:
      features: name -> (kind, what is stored): of bytes one value or a list of them, of floats their bytes,
        little-endian.
    """
    entries = []
    for name, (kind, stored) in features.items():
        values = stored if isinstance(stored, list) else [stored]
        content = b"".join(_delimited(1, value) for value in values)
        feature = _delimited(_NUMBERS[kind], content)
        entries.append(_delimited(1, _delimited(1, name.encode()) + _delimited(2, feature)))
    return _delimited(1, b"".join(entries))


def _delimited(number: int, content: bytes) -> bytes:
    return b"%c%s%s" % (number << 3 | _LENGTH_DELIMITED, _as_varint(len(content)), content)


def _as_varint(value: int) -> bytes:
    """Returns an integer of 0 or more as a varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
