"""Shards of ArrayRecords (PyPI array_record) that hold tf.train.Examples, read by chunks.

A single record costs ten times as much as one of a range, so chunks of about 1 MiB are read, and shuffled as
`--shuffle_window` says. Records are described as for `tfrecord`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable

import numpy as np

from ..engine.data.run_data import Data
from ..engine.errors import BadRecordError, UnavailableError, reason
from .checks import InputError, check_at_least
from .data_json import as_bytes
from .files import listing
from .files.storage import Files, is_remote, open_files, retried
from .records import shard_files
from .records.examples import ExampleSource
from .records.features import Features
from .records.shard_files import BESIDE, find_splits, open_splits

_KIND = listing.FileKind(
    "shards of ArrayRecords (*.array_record, *.array_record-00000-of-00016)",
    (r".*\.array_?record.*|.*\.ar",),
    "expected records, found none; leave it out, or write it again",
    beside=BESIDE,
)
_CHUNK_BYTES = 1 << 20
_OPEN_SHARDS = 128  # at once
_RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"  # as its documentation advises


def load(
    data_dir: str | None,
    seed: int,
    *,
    eval_data_dir: str = "",
    label: str = "",
    weight: str = "",
    features: tuple = (),
    num_classes: int = 0,
) -> Data:
    """Opens shards that `crankshaft prepare --format=array_record` or others have written.

    Args:
      data_dir: training shards: a folder, a glob or comma-separated files; or a folder with subfolders train and eval.
      seed: not used.
      eval_data_dir: evaluation shards, as `data_dir`.
      label: the labels' feature, see `tfrecord.load`.
      weight: the feature of the examples' weights, see `tfrecord.load`.
      features: the features to read, see `tfrecord.load`.
      num_classes: number of classes, see `tfrecord.load`.

    Raises:
      InputError: files are missing or of another format, or array_record is not installed.
    """
    del seed
    check_at_least("num_classes", num_classes, 0)
    shard_files.library()
    train, evaluation = find_splits(data_dir, eval_data_dir, _KIND)
    return open_splits(train, evaluation, ArrayRecords, (features, label, weight), num_classes)


class ArrayRecords(ExampleSource):
    """Examples of ArrayRecord shards, in the order of the shards and of the records in each.

    Args:
      features_by: returns the records' features, from a function that returns sample records.
    """

    def __init__(self, paths: list[str], features_by: Callable[[Callable[[], list[bytes]]], Features]):
        if remote := next(filter(is_remote, paths), None):
            raise InputError(f"{remote} is not on a mounted file system, and array_record reads no other; copy it")
        files = Files(paths)
        counts = [_Shard(path).records for path in paths]  # each is closed before the next one is opened
        full = listing.not_empty(paths, [not count for count in counts], _KIND.empty)
        self._files = files.only(full)
        self._records = np.array([counts[number] for number in full])
        self._ends = np.cumsum(self._records)
        self._starts = self._ends - self._records
        paths = self._files.paths  # not self, which the cache would keep, so that its files stayed open
        self._shard = functools.lru_cache(open_files(_OPEN_SHARDS))(lambda number: _Shard(paths[number]))
        samples = self.samples()
        super().__init__(features_by(lambda: samples))
        group = self._shard(0).group
        groups = _CHUNK_BYTES * len(samples) / (group * max(1, sum(map(len, samples))))
        self.chunk_examples = max(2, group * max(1, round(groups)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def records(self, indices: np.ndarray) -> list[bytes]:
        records: list[bytes] = [b""] * len(indices)
        shards = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(shards, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
            shard = int(shards[rows[0]])
            numbers = indices[rows] - self._starts[shard]
            self._files.check(shard)
            for row, record in zip(rows.tolist(), self._read_shard(shard, numbers), strict=True):
                records[row] = record
        return records

    def locate(self, index: int) -> str:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return f"{self._files.paths[shard]}: record {index - int(self._starts[shard])}"

    def files(self) -> list[str]:
        return self._files.paths

    def identity(self) -> str:
        digest = hashlib.sha256()
        for path, size, records in zip(self._files.paths, self._files.sizes, self._records.tolist(), strict=True):
            digest.update(as_bytes(f"{os.path.basename(path)} {size} {records}\n"))
        return f"{len(self._records)} shards {digest.hexdigest()} {self._files.sample}"

    def _read_shard(self, shard: int, numbers: np.ndarray) -> list[bytes]:
        try:
            path = self._files.paths[shard]
            return retried(path, lambda: self._shard(shard).read(numbers), self._shard.cache_clear)
        except UnavailableError:
            raise
        except RuntimeError as error:  # raised for any problem
            # The library's error names no record: read one by one, each shows whether it is the damaged one.
            for number in numbers:
                try:
                    self._shard(shard).read(number[np.newaxis])
                except RuntimeError as problem:
                    self._files.check(shard)
                    index = int(self._starts[shard] + number)
                    raise BadRecordError(
                        index,
                        f"{self.locate(index)} can't be read ({reason(problem)}); restore the file, or leave such "
                        "records out by max_bad_records",
                    ) from None
            raise error


class _Shard:
    def __init__(self, path: str):
        try:
            self._reader = retried(path, lambda: shard_files.library().ArrayRecordReader(path, _RANDOM_ACCESS))
            is_whole, self.records = self._reader.ok(), self._reader.num_records()
            options = self._reader.writer_options_string() or ""
        except UnavailableError:
            raise
        except RuntimeError as error:
            raise InputError(f"{path} can't be read ({reason(error)}); restore the file") from None
        if not is_whole:
            try:  # the library confuses a file that can't be opened with a damaged one
                open(path, "rb").close()
            except OSError as error:
                raise InputError(f"{path} can't be read ({error.strerror})") from None
            raise InputError(f"{path} is not a whole ArrayRecord file; restore it, or write it again")
        match = re.search(r"group_size:(\d+)", options)
        self.group = int(match[1]) if match else 1
        self._lock = threading.Lock()  # a reader has one position

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns records by their numbers in the shard. Raises RuntimeError."""
        with self._lock:
            if len(numbers) > 1 and (np.diff(numbers) == 1).all():
                records = self._reader.read(int(numbers[0]), int(numbers[-1]) + 1)
            else:
                records = self._reader.read(numbers.tolist())
        if len(records) != len(numbers):
            raise RuntimeError(f"{len(records)} of {len(numbers)} records were found")
        return records
