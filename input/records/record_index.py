"""Index of a TFRecord shard: the offsets of its records, computed once and kept beside the shard.

A shard's index is SHARD.index: a header that identifies the shard, then the offsets of its records and of the end of
the last, int64 little-endian. If all records have one length, the header says so and offsets are computed; else those
of large shards are read on demand. So 10^8 records need no memory.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import time
from collections.abc import Callable

import numpy as np

from ...engine import logging
from ..checks import InputError
from ..files.listing import exists
from ..files.storage import GZIP_MAGIC, Files, at_once, file_state, new_file
from . import checksums

HEADER_BYTES, FOOTER_BYTES = 12, 4  # of a record, around its data: length and its checksum; the data's checksum
SUFFIX = ".index"
_AROUND = HEADER_BYTES + FOOTER_BYTES
# magic, version, the shard's bytes, the checksum of its ends, records, data bytes of each (-1: they differ), the
# offsets' checksum; then the checksum of all this.
_HEADER = struct.Struct("<8sIqIqqI")
_MAGIC, _VERSION = b"TFRINDEX", 1
_OFFSETS_AT = _HEADER.size + 4
_END_BYTES = 4096  # bytes at each end of a shard, whose checksum identifies it
_SCAN_BYTES = 1 << 20
_IN_MEMORY_BYTES = 32 << 20  # for all shards' offsets
_QUIET_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """The sizes and offsets of one shard's records.

    Attributes:
      length: bytes of each record's data, or -1 if they differ.
      ends: checksum of the shard's ends.
      offsets: [records + 1] int64 if lengths differ and they are in memory; None if read from the index file.
    """

    records: int
    length: int
    ends: int
    offsets: np.ndarray | None = None


class Index:
    """The records of several shards, numbered consecutively. Thread-safe."""

    def __init__(self, files: Files, shards: list[ShardIndex]):
        self.files = files
        self.shards = shards
        records = np.array([shard.records for shard in shards])
        self._ends = np.cumsum(records)
        self._starts = self._ends - records
        on_disk = [number for number, shard in enumerate(shards) if shard.length < 0 and shard.offsets is None]
        self._index_numbers = {number: index for index, number in enumerate(on_disk)}
        self._index_files = Files([files.paths[number] + SUFFIX for number in on_disk])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each example's shard and its index in it, both [n] int64."""
        shards = np.searchsorted(self._ends, indices, side="right")
        return shards, indices - self._starts[shards]

    def find(self, shard: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offsets of a shard's records and the sizes of their data, both [n] int64."""
        index = self.shards[shard]
        if index.length >= 0:
            return numbers * (index.length + _AROUND), np.full(len(numbers), index.length)
        if index.offsets is not None:
            starts = index.offsets[numbers]
            return starts, index.offsets[numbers + 1] - starts - _AROUND
        offsets = (_OFFSETS_AT + 8 * numbers).tolist()
        pairs = self._index_files.pread_each(self._index_numbers[shard], offsets, [16] * len(offsets))
        bounds = np.frombuffer(b"".join(pairs), "<i8").reshape(-1, 2)
        return bounds[:, 0], bounds[:, 1] - bounds[:, 0] - _AROUND


def open_index(paths: list[str]) -> Index:
    """Reads the index of each shard, or makes it if it is missing or another shard's.

    Raises:
      InputError: a shard can't be read, is not a TFRecord file, is truncated or empty.
    """
    files = Files(paths)
    shards, in_memory = [], 0
    for path, (shard, is_kept) in zip(paths, at_once(functools.partial(_open, files), range(len(paths))), strict=True):
        if shard.offsets is not None:
            if is_kept and in_memory + 8 * shard.records > _IN_MEMORY_BYTES:
                shard = dataclasses.replace(shard, offsets=None)
        elif shard.length < 0 and in_memory + 8 * shard.records <= _IN_MEMORY_BYTES:
            stored = Files([path + SUFFIX]).pread(0, 0, _OFFSETS_AT + 8 * (shard.records + 1))
            if checksums.crc32c(stored[_OFFSETS_AT:]) != _HEADER.unpack_from(stored)[-1]:
                raise InputError(f"{path}{SUFFIX} is damaged (its checksum differs); delete it: it is rebuilt")
            offsets = np.frombuffer(stored, "<i8", offset=_OFFSETS_AT).astype(np.int64)
            shard = dataclasses.replace(shard, offsets=offsets)
        if not shard.records:
            raise InputError(f"{path} is empty: expected records, found none; leave it out, or write it again")
        in_memory += 0 if shard.offsets is None else shard.offsets.nbytes
        shards.append(shard)
    return Index(files, shards)


def _open(files: Files, number: int) -> tuple[ShardIndex, bool]:
    """Returns a shard's index, which is made if it is missing, and whether it is on disk now."""
    shard = _read(files, number)
    return _make(files, number) if shard is None else (shard, True)


def write(path: str, size: int, ends: int, lengths: np.ndarray) -> None:
    """Writes a shard's index, whole or not at all. Raises OSError.

    `ends` is `checksum_of_ends`; `lengths`, [records] int64, counts the bytes of each record's data.
    """
    length = _common_length(lengths)
    stored = b"" if length >= 0 else _offsets(lengths).astype("<i8").tobytes()
    header = _HEADER.pack(_MAGIC, _VERSION, size, ends, len(lengths), length, checksums.crc32c(stored))
    with new_file(path + SUFFIX) as file:
        file.write(header + struct.pack("<I", checksums.crc32c(header)) + stored)


def checksum_of_ends(read: Callable[[int, int], bytes], size: int) -> int:
    """Returns a checksum of a file's first and last bytes; `read` takes a number of bytes and an offset."""
    start = checksums.crc32c(read(0, min(size, _END_BYTES)))
    return checksums.crc32c(read(max(0, size - _END_BYTES), min(size, _END_BYTES)), start)


def _read(files: Files, number: int) -> ShardIndex | None:
    """Reads a shard's index; returns None if it is missing, truncated or another file's."""
    path = files.paths[number] + SUFFIX
    try:
        size = file_state(path).nbytes
    except InputError:
        return None
    if size >= _OFFSETS_AT:
        head = Files([path]).pread(0, 0, _OFFSETS_AT)
        magic, version, shard_bytes, ends, records, length, _ = _HEADER.unpack_from(head)
        fits = size == _OFFSETS_AT + (0 if length >= 0 else 8 * (records + 1))
        is_intact = struct.unpack("<I", head[-4:])[0] == checksums.crc32c(head[:-4])
        if magic == _MAGIC and version == _VERSION and fits and is_intact:
            if shard_bytes == files.sizes[number] and ends == _checksum_shard_ends(files, number):
                return ShardIndex(records, length, ends)
            logging.warning("%s is the index of another file than the one beside it; rebuilding it", path)
            return None
    if not _is_foreign(path):
        logging.warning("%s is not a whole index; rebuilding it", path)
    return None


def _checksum_shard_ends(files: Files, number: int) -> int:
    return checksum_of_ends(lambda offset, length: files.pread(number, offset, length), files.sizes[number])


def _make(files: Files, number: int) -> tuple[ShardIndex, bool]:
    """Returns a shard's index and whether it is on disk now."""
    path = files.paths[number]
    lengths, ends = _scan(files, number), _checksum_shard_ends(files, number)
    length = _common_length(lengths)
    index = ShardIndex(len(lengths), length, ends, None if length >= 0 else _offsets(lengths))
    if exists(path + SUFFIX) and _read(files, number):
        return index, True  # another process was faster, and others may be reading its index
    if _is_foreign(path + SUFFIX):
        logging.warning(
            "%s is another tool's: it stays, and the index is kept in memory and rebuilt at each start", path + SUFFIX
        )
        return index, False
    try:
        write(path, files.sizes[number], ends, lengths)
    except OSError as error:
        why = error.strerror or str(error)
        logging.warning(
            "%s can't be written (%s): the index is kept in memory and rebuilt at each start", path + SUFFIX, why
        )
        return index, False
    return index, True


def _is_foreign(path: str) -> bool:
    """Returns whether a file is not an index of this format, which must not be replaced."""
    if not exists(path):
        return False
    try:
        size = file_state(path).nbytes
    except InputError:  # not a regular file
        return False
    return Files([path]).pread(0, 0, min(size, len(_MAGIC))) != _MAGIC


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths + _AROUND)])


def _common_length(lengths: np.ndarray) -> int:
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else -1


def _scan(files: Files, number: int) -> np.ndarray:
    """Reads a shard from header to header; returns the bytes of each record's data, [records] int64."""
    path, size = files.paths[number], files.sizes[number]

    def truncated(record: int, at: int) -> InputError:
        return InputError(
            f"{path} is truncated: record {record} (byte {at:,}) has {size - at:,} bytes left of it at the end of the "
            "file; restore the file"
        )

    pieces = [np.zeros(0, np.int64)]
    records = position = 0
    logged_at = time.monotonic()
    unpack = struct.Struct("<QI").unpack_from
    while position < size:
        block = files.pread(number, position, min(_SCAN_BYTES, size - position))
        if position == 0 and block.startswith(GZIP_MAGIC):
            raise InputError(
                f"{path} is gzip, in which no record can be found without unpacking those before it; unpack it "
                "(gunzip), or write shards that can by crankshaft prepare"
            )
        starts, lengths, checks, offset = [], [], [], 0
        while offset <= len(block) - HEADER_BYTES:
            length, check = unpack(block, offset)
            starts.append(offset)
            lengths.append(length)
            checks.append(check)
            offset += length + _AROUND
        if not starts:
            raise truncated(records, position)
        # All headers of a block at once, before the next block: behind a wrong length nothing is a header.
        sizes = np.array(lengths, np.uint64)
        wrong = np.flatnonzero(checksums.length_checksums(sizes) != np.array(checks, np.uint32))
        if len(wrong):
            first = int(wrong[0])
            if not records + first:
                raise InputError(f"{path} is not a TFRecord file (its first checksum differs); leave it out")
            raise InputError(
                f"{path}: record {records + first} (byte {position + starts[first]:,}): the checksum of its length "
                "differs, so no record after it can be found; restore the file"
            )
        if position + offset > size:
            raise truncated(records + len(starts) - 1, position + starts[-1])
        pieces.append(sizes.astype(np.int64))
        records += len(lengths)
        position += offset
        if time.monotonic() - logged_at > _QUIET_SECONDS:
            logged_at = time.monotonic()
            progress = (path, 100 * position / size, f"{records:,}")
            logging.warning("making the index of %s: %.0f %%, %s records", *progress)
    return np.concatenate(pieces)
