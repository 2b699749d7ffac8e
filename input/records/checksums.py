"""CRC32C, the checksum of TFRecords, by the library `crc32c`; masked as TensorFlow masks it.

Castagnoli's polynomial (RFC 3720, section 12.1); the mask is that of TensorFlow's `core/lib/hash/crc32c.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from ...engine.errors import importing


def crc32c(data: bytes, start: int = 0) -> int:
    """Returns the checksum of bytes, continuing that of earlier ones. Raises `UsageError` without the library."""
    return _library().crc32c(data, start)


@functools.cache
def _library() -> ModuleType:
    with importing("crc32c", "shards need the library crc32c; pip install crc32c"):
        import crc32c
    return crc32c


def masked(checksums: np.ndarray) -> np.ndarray:
    """Masks checksums, [n] uint32, as TFRecords do, since a checksum over checksums is weak."""
    return ((checksums >> np.uint32(15)) | (checksums << np.uint32(17))) + np.uint32(0xA282EAD8)


def record_checksums(records: Sequence[bytes]) -> np.ndarray:
    """Returns the masked checksums of records, [n] uint32."""
    return masked(np.fromiter(map(crc32c, records), np.uint32, len(records)))


def length_checksums(lengths: np.ndarray) -> np.ndarray:
    """Returns the masked checksums of TFRecords' lengths, [n] uint64: eight bytes each."""
    octets = np.ascontiguousarray(lengths, "<u8").tobytes()
    return record_checksums([octets[start : start + 8] for start in range(0, len(octets), 8)])
