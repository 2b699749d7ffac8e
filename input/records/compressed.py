"""Compressed shards of TFRecords: streamed, since finding a record requires unpacking all before it.

TensorFlow is imported where such shards are opened.
"""

from __future__ import annotations

import gzip
import itertools

import numpy as np

from ...engine.data.run_data import Data
from ..checks import InputError
from ..files import listing, storage
from . import checksums
from . import features as described
from .examples import SAMPLES, in_graph
from .record_index import FOOTER_BYTES, HEADER_BYTES
from .shard_files import check_same_features, data_from_splits

_SAMPLED_FILES = 8
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 1 << 31  # of an Example, as of any message of protobuf's


def are_gzip(paths: list[str]) -> bool:
    """Returns whether shards are gzip, by their first bytes. Raises `InputError` if only some are."""
    files = storage.Files(paths)  # refuses anything but regular files: a FIFO would block
    packed = list(itertools.compress(paths, storage.at_once(files.is_gzip, range(len(paths)))))
    if packed and len(packed) < len(paths):
        plain = next(path for path in paths if path not in packed)
        raise InputError(f"{packed[0]} is gzip, and {plain} is not; pack all shards or none")
    return bool(packed)


def open_splits(
    train: list[str], evaluation: list[str] | None, names: tuple[tuple, str, str], num_classes: int
) -> Data:
    """Opens gzip shards of both splits as streams.

    Args:
      names: names of the features, the label and the weight, see `tfrecord.load`.
    """
    from ...engine.data import streamed

    train, evaluation = _with_records(train), evaluation and _with_records(evaluation)
    selected, label, weight = names

    def samples() -> list[bytes]:
        """The first records of several files: the first, the last, and evenly spaced ones between."""
        numbers = sorted({*np.linspace(0, len(train) - 1, _SAMPLED_FILES).astype(int).tolist()})
        records = (_first_records(train[number], -(-SAMPLES // len(numbers))) for number in numbers)
        return [*itertools.chain(*records)]

    parsed = described.find(train, tuple(map(str, selected)), label, weight, samples)
    parse = in_graph(parsed)
    check_same_features(train, evaluation or [])
    streams = [
        paths and streamed.records(paths, parse, compression="GZIP", contents=f" {storage.Files(paths).sample}")
        for paths in (train, evaluation)
    ]
    return data_from_splits(streams, parsed, num_classes)


def _with_records(paths: list[str]) -> list[str]:
    """Returns the paths of the shards that have records; logs the others."""
    files, empty = storage.Files(paths), []
    for number, path in enumerate(paths):
        with files.stream(number) as stream, storage.unpacked(stream, path) as file:
            empty.append(not file.read(1))
    return [paths[number] for number in listing.not_empty(paths, empty, "it has no record; give shards that have some")]


def _first_records(path: str, count: int) -> list[bytes]:
    """Reads without TensorFlow, which must not start while data is loaded: devices and workers are not set up yet."""
    records: list[bytes] = []
    with storage.Files([path]).stream(0) as stream, storage.unpacked(stream, path) as file:
        while len(records) < count and (head := file.read(HEADER_BYTES)):
            records.append(_record(file, head))
    return records


def _record(file: gzip.GzipFile, head: bytes) -> bytes:
    """Returns the record after its header. Raises EOFError, BadGzipFile."""
    length = np.frombuffer(head[:8].ljust(8, b"\0"), "<u8")
    if len(head) == HEADER_BYTES and checksums.length_checksums(length) != np.frombuffer(head[8:], "<u4"):
        raise gzip.BadGzipFile("the checksum of a record's length differs")
    if length[0] >= _MOST_BYTES:
        raise gzip.BadGzipFile(f"a record says that it has {length[0]:,} bytes, and none has that many")
    pieces, left = list[bytes](), int(length[0])
    while left and (piece := file.read(min(left, _PIECE_BYTES))):  # no memory for what is not there
        pieces.append(piece)
        left -= len(piece)
    record, foot = b"".join(pieces), file.read(FOOTER_BYTES)
    if len(head) + len(record) + len(foot) < HEADER_BYTES + int(length[0]) + FOOTER_BYTES:
        raise EOFError("it ends within a record")
    if checksums.record_checksums([record]) != np.frombuffer(foot, "<u4"):
        raise gzip.BadGzipFile("the checksum of a record's data differs")
    return record
