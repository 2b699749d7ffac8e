"""Shards of TFRecords that hold tf.train.Examples: a folder, a glob or comma-separated files.

Features come from a features.json beside the shards (`input/records/features.py`), from arguments, or are inferred from
records. The files' format: TensorFlow's `core/lib/io/record_writer.h`; both checksums of each record are checked. Gzip
files are streamed (`input/records/compressed.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import numpy as np

from ..engine import logging
from ..engine.data.run_data import Data
from ..engine.errors import BadRecordError, SourceError
from .checks import check_at_least
from .data_json import as_bytes
from .files import listing
from .files.storage import READS_AT_ONCE, at_once
from .records import checksums, compressed, record_index
from .records.examples import ExampleSource
from .records.features import Features
from .records.record_index import FOOTER_BYTES, HEADER_BYTES, Index
from .records.shard_files import BESIDE, find_splits, open_splits

_KIND = listing.FileKind(
    "shards of TFRecords (*.tfrecord, *.tfrecord-00000-of-00016)",
    (r".*\.tfrec.*", r".*-[0-9]{5}-of-[0-9]+"),
    "expected records, found none; leave it out, or write it again",
    beside=BESIDE,
)
_SLOW_BLOCKS = 3  # of a slow disk until a warning: a single read may be slow anywhere
_PIECE = 512  # records read before they are checked: they stay in the processor's cache


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
    """Opens shards that `crankshaft prepare`, TensorFlow or others have written.

    Args:
      data_dir: training shards: a folder, a glob or comma-separated files; or a folder with subfolders train and eval.
      seed: not used.
      eval_data_dir: evaluation shards.
      label: the labels' feature; "" is features.json's, else "label" if present.
      weight: feature of the examples' weights, if any.
      features: those to read, each NAME:DTYPE:SHAPE, e.g. image:uint8:28x28x1; () is as features.json says, or all.
      num_classes: 0 is features.json's.

    Raises:
      InputError: files are missing or of another format.
    """
    del seed
    check_at_least("num_classes", num_classes, 0)
    train, evaluation = find_splits(data_dir, eval_data_dir, _KIND)
    if compressed.are_gzip([*train, *(evaluation or [])]):
        return compressed.open_splits(train, evaluation, (features, label, weight), num_classes)
    return open_splits(train, evaluation, TFRecords, (features, label, weight), num_classes)


class TFRecords(ExampleSource):
    """Examples of TFRecord shards, in the order of the shards and of the records in each.

    Args:
      features_by: returns the records' features, from a function that returns sample records.
    """

    def __init__(self, paths: list[str], features_by: Callable[[Callable[[], list[bytes]]], Features]):
        self._index: Index = record_index.open_index(paths)
        self._slow_blocks = 0  # that were read apart, from a slow disk
        super().__init__(features_by(self.samples))

    def __len__(self) -> int:
        return len(self._index)

    def records(self, indices: np.ndarray) -> list[bytes]:
        shards, numbers = self._index.locate(indices)
        order = np.argsort(shards, kind="stable")
        in_order = [b""] * len(indices)
        # Of consecutive records, as of a chunk, each shard's are one read.
        are_apart = self._index.files.are_slow and bool((np.diff(indices) != 1).any())
        self._slow_blocks += are_apart
        if self._slow_blocks == _SLOW_BLOCKS:
            logging.warning_once(
                "%s: a read takes more than a millisecond, as on a network's disk, and by default each example is one; "
                "shuffle_window=N, a number of chunks, reads many examples at once",
                os.path.dirname(self._index.files.paths[0]),
            )
        size = -(-len(order) // READS_AT_ONCE) if are_apart else _PIECE
        pieces = [order[start : start + size] for start in range(0, len(order), size)]
        read = at_once if are_apart else map
        for rows, records in zip(
            pieces, read(lambda rows: self._piece(shards[rows], numbers[rows], indices[rows]), pieces), strict=True
        ):
            for row, record in zip(rows.tolist(), records, strict=True):
                in_order[row] = record
        return in_order

    def locate(self, index: int) -> str:
        shards, numbers = self._index.locate(np.array([index]))
        start = self._index.find(int(shards[0]), numbers)[0]
        return f"{self._index.files.paths[int(shards[0])]}: record {int(numbers[0])} (byte {int(start[0]):,})"

    def files(self) -> list[str]:
        return self._index.files.paths

    def identity(self) -> str:
        digest = hashlib.sha256()
        files = self._index.files
        for path, size, shard in zip(files.paths, files.sizes, self._index.shards, strict=True):
            digest.update(as_bytes(f"{os.path.basename(path)} {size} {shard.records} {shard.ends}\n"))
        return f"{len(files.paths)} shards {digest.hexdigest()} {files.sample}"

    def _piece(self, shards: np.ndarray, numbers: np.ndarray, indices: np.ndarray) -> list[bytes]:
        """Returns the data of records, grouped by shard."""
        pieces: list[bytes] = []
        lengths = []
        for rows in np.split(np.arange(len(shards)), np.flatnonzero(np.diff(shards)) + 1):
            shard, its_numbers = int(shards[rows[0]]), numbers[rows]
            starts, shard_lengths = self._index.find(shard, its_numbers)
            sizes = shard_lengths + (HEADER_BYTES + FOOTER_BYTES)
            lengths.append(shard_lengths)
            if len(rows) > 1 and (np.diff(its_numbers) == 1).all():
                first = int(starts[0])
                block = self._index.files.pread(shard, first, int(starts[-1] + sizes[-1]) - first)
                first_bytes = (starts - first).tolist()
                pieces += [block[at : at + size] for at, size in zip(first_bytes, sizes.tolist(), strict=True)]
            else:
                pieces += self._index.files.pread_each(shard, starts.tolist(), sizes.tolist())
        return self._verify(pieces, np.concatenate(lengths), indices)

    def _verify(self, pieces: list[bytes], lengths: np.ndarray, indices: np.ndarray) -> list[bytes]:
        """Returns the data of records that were read whole, after checking their checksums."""
        heads = np.frombuffer(b"".join([piece[:HEADER_BYTES] for piece in pieces]), _HEAD)
        feet = np.frombuffer(b"".join([piece[-FOOTER_BYTES:] for piece in pieces]), "<u4")
        records = [piece[HEADER_BYTES:-FOOTER_BYTES] for piece in pieces]
        expected = checksums.length_checksums(lengths)
        if not ((heads["length"] == lengths) & (heads["check"] == expected)).all():
            self._explain_head(heads, lengths, indices)
        wrong = np.flatnonzero(checksums.record_checksums(records) != feet)
        if len(wrong):
            self._index.files.check(int(self._index.locate(indices[wrong[:1]])[0][0]))
            raise self._bad(int(indices[wrong[0]]), "the checksum of its data differs, so some bit of it is flipped")
        return records

    def _explain_head(self, heads: np.ndarray, lengths: np.ndarray, indices: np.ndarray) -> None:
        bad = int(
            np.flatnonzero((heads["length"] != lengths) | (heads["check"] != checksums.length_checksums(lengths)))[0]
        )
        name = self.locate(int(indices[bad]))
        if checksums.length_checksums(heads["length"][bad : bad + 1])[0] == heads["check"][bad]:
            path = name.partition(": record")[0]
            raise SourceError(
                f"{name} has {int(heads['length'][bad]):,} bytes, and its index says {int(lengths[bad]):,}: it is the "
                f"index of another file; delete {path}{record_index.SUFFIX}: it is rebuilt"
            )
        raise self._bad(int(indices[bad]), "the checksum of its length differs, so some bit of it is flipped")

    def _bad(self, index: int, flaw: str) -> BadRecordError:
        return BadRecordError(
            index,
            f"{self.locate(index)}: {flaw}; restore the file, or skip such records by max_bad_records",
        )


_HEAD = np.dtype([("length", "<u8"), ("check", "<u4")])
