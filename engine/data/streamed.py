"""Streams: examples that can only be read in sequence, such as a user's `tf.data.Dataset` or files without an index.

Host code that makes pipelines; `engine.data.dataset_feed` shuffles, batches and divides what they give.
"""

from __future__ import annotations

import abc
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..internals.errors import reason
from ..internals.tensorflow import divide_by_files
from ..randomness import epoch_seed
from .source import SourceError

_PARSED_AT_ONCE = 256  # records: of `tf.io.parse_example` 64 alone cost twenty times as much as among thousands
_ROUNDS = 8  # see `engine.data.order`


class Stream(abc.ABC):
    """Examples of an epoch, one after the other.

    Attributes:
      element_spec: nest of `tf.TensorSpec`, of one example.
      length: examples in an epoch; `tf.data.UNKNOWN_CARDINALITY` where only reading tells.
    """

    element_spec: Any
    length: int

    @abc.abstractmethod
    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns the examples of an epoch, a scalar int64, in an order of (seed, epoch); their own if seed is None."""

    @abc.abstractmethod
    def of_files(self, workers: int, worker: int) -> Stream | None:
        """Returns a worker's part, by files; None where there are fewer than workers. All workers are told alike."""

    def identity(self) -> str:
        """Returns text that differs if the data does, found without reading it; "" if there is none."""
        return ""

    def files(self) -> Sequence[str]:
        """Returns the paths of the files that it reads; none where it does not say."""
        return ()

    def fault(self) -> SourceError | None:
        """Looks for what is wrong with its files, which TensorFlow's error does not name; None if it does not know."""
        return None


class OfDataset(Stream):
    """A user's `tf.data.Dataset` of single examples, each epoch in its own order."""

    def __init__(self, dataset: tf.data.Dataset):
        self.element_spec = dataset.element_spec
        self.length = int(dataset.cardinality())
        self._dataset = dataset

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        return self._dataset

    def of_files(self, workers: int, worker: int) -> Stream | None:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        try:
            share = divide_by_files(self._dataset.with_options(options), workers, worker)
            next(iter(share), None)  # only reading tells whether there are files, and enough
        except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError):
            return None
        found = OfDataset(share)
        found.length = tf.data.UNKNOWN_CARDINALITY  # TensorFlow hands the whole one's on
        return found


class OfFiles(Stream):
    """Files that are read from end to end, several at once, in an order of their own in each epoch.

    The interleaving is deterministic, so an epoch's examples come in the same order each time.

    Args:
      paths: of the files; every worker has to give the same.
      read: path, a scalar string, -> `tf.data.Dataset` of the file's examples.
      length: examples in all files, where that is known.
      files_at_once: read side by side, an example of each in turn.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[tf.Tensor], tf.data.Dataset],
        *,
        length: int | None = None,
        files_at_once: int = 8,
    ):
        self.length = tf.data.UNKNOWN_CARDINALITY if length is None else length
        self._paths, self._read = list(paths), read
        self._files_at_once = files_at_once

    @functools.cached_property
    def element_spec(self) -> Any:  # type: ignore[override]
        # When it is first asked for: to make a pipeline starts TensorFlow, before a strategy has divided its devices.
        with tf.init_scope():
            return self.examples(None, tf.constant(0, tf.int64)).element_spec

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        paths, last = tf.constant(self._paths), len(self._paths) - 1
        if seed is not None and last > 0:
            shuffled = tf.raw_ops.RandomIndexShuffle(
                index=tf.range(last + 1, dtype=tf.int64),
                seed=epoch_seed(seed, epoch, [3]),
                max_index=tf.constant(last, tf.int64),
                rounds=_ROUNDS,
            )
            paths = tf.gather(paths, shuffled)
        at_once = min(self._files_at_once, last + 1)
        files = tf.data.Dataset.from_tensor_slices(paths)
        return files.interleave(self._read, cycle_length=at_once, num_parallel_calls=at_once, deterministic=True)

    def identity(self) -> str:
        return json.dumps([(os.path.basename(path), tf.io.gfile.stat(path).length) for path in self._paths])

    def files(self) -> Sequence[str]:
        return self._paths

    def fault(self) -> SourceError | None:
        for path in self._paths:
            read = 0
            try:
                for _ in self._read(tf.constant(path)):
                    read += 1
            except tf.errors.OpError as error:
                why = reason(error).replace(path, "").strip("; ")
                return SourceError(f"{path}, after {read:,} examples: {why}; restore the file, and resume the run")
        return None

    def of_files(self, workers: int, worker: int) -> Stream | None:
        if len(self._paths) < workers:
            return None
        return OfFiles(self._paths[worker::workers], self._read, files_at_once=self._files_at_once)


def is_stream(split: Any) -> bool:
    """Returns whether a split of the data is read from its beginning on: a `Stream`, or a `tf.data.Dataset`."""
    return isinstance(split, (Stream, tf.data.Dataset))


def records(
    paths: Sequence[str],
    parse: Callable[[tf.Tensor], Any],
    *,
    compression: str = "GZIP",
    length: int | None = None,
    files_at_once: int = 8,
) -> OfFiles:
    """Returns a stream of the records of TFRecord files that have no index, as compressed ones.

    Each epoch reads the files in another order of (seed, epoch), `files_at_once` side by side; records are parsed in
    batches, and shuffled within the run's shuffle buffer by the feed. TensorFlow checks both checksums of each record.

    Args:
      paths: of the files; every worker has to give the same.
      parse: a batch of serialized records, [n] string, -> nest of tensors [n, ...]: (features, labels).
      compression: of all files: "GZIP", "ZLIB" or "".
      length: records in all files; None has them counted once.
      files_at_once: see `OfFiles`.
    """

    def read(path: tf.Tensor) -> tf.data.Dataset:
        serialized = tf.data.TFRecordDataset(path, compression_type=compression)
        return serialized.batch(_PARSED_AT_ONCE).map(parse).unbatch()

    return OfFiles(paths, read, length=length, files_at_once=files_at_once)
