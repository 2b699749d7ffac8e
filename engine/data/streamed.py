"""Streams: examples that can only be read in sequence, e.g. a user's `tf.data.Dataset` or files without an index.

This module builds pipelines and divides them among processes; `feeds.streamed_feed.StreamedFeed` shuffles and batches.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from .. import logging
from ..errors import CrankshaftError, SourceError, UnavailableError, UsageError, reason, rounded
from ..internals import pipelines
from ..internals.tensorflow import divide_by_files, unconverted
from ..randomness import epoch_seed
from .order import Order, PerWorkerOrder, permuted
from .source import Spec, Split, is_transient, unknown_dimensions
from .timeouts import StreamTimeout

_PARSED_AT_ONCE = 256  # records: parsing 64 alone costs twenty times as much as among thousands
_COUNTED_AT_ONCE = 1024  # examples
_COUNT_SHOWN_SECONDS = 10
_ENDED = (
    "the dataset has ended, and gives nothing when it is read again, as a generator that can be read only once; give "
    "one that starts again each time, or a smaller train_steps"
)
_OFF = "AutoShardPolicy.OFF in its options or auto_shard_policy=off"
_READING = "IteratorGetNext"  # the operation in an error's text

# (activity, total or None) -> a context that yields a function of the amount done so far.
Watch = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None]]]


class Stream(Split):
    """Examples of an epoch in sequence.

    Attributes:
      length: number of examples in an epoch; `tf.data.UNKNOWN_CARDINALITY` if only reading shows it.
      ends: whether an epoch is known to end.
      dataset: the user's dataset, from which the stream reads.
      divides: whether workers may each read a part.
      by_batch: whether its elements are batches of any sizes, each of them a step's; `length` then counts these.
      is_cut: whether it is the beginning of one that never ends, so that its length says nothing of the data.
    """

    by_index: Literal[False] = False
    length: int
    ends: bool = True
    dataset: tf.data.Dataset | None = None
    divides: bool = True
    by_batch: bool = False
    is_cut: bool = False

    @functools.cached_property
    def files_written(self) -> Sequence[str]:
        """Paths of caches that reading writes. A checkpoint can't contain their positions."""
        return () if self.dataset is None else pipelines.files_written(self.dataset)

    @functools.cached_property
    def shuffles(self) -> Sequence[tf.data.Dataset]:
        """Datasets, within it, of another order at each reading: an iterator's state has that of their seeds."""
        return () if self.dataset is None else pipelines.shuffles(self.dataset)

    @functools.cached_property
    def samplers(self) -> Sequence[tf.data.Dataset]:
        """Datasets, within it, that sample by seeds of their process, which no iterator's state has."""
        return () if self.dataset is None else pipelines.samplers(self.dataset)

    @abc.abstractmethod
    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns an epoch's examples in an order that depends on (seed, epoch); in their own order if seed is None."""

    def shard_files(self, workers: int, worker: int) -> Stream | None:
        """Returns a stream of a worker's files; None, on all workers, if it can't be divided or has too few files."""
        return None

    def fault(self) -> CrankshaftError | None:
        """Searches for the problem of its files, which TensorFlow's error does not name; None if unknown."""
        return None

    @functools.cached_property
    def undivided(self) -> Stream:
        """The same stream, always one object, that workers do not divide by files."""
        return _Undivided(self) if self.divides else self


def map_elements(dataset: tf.data.Dataset, function: Callable[[Any], Any]) -> tf.data.Dataset:
    """Maps a dataset's elements as they are: `Dataset.map` unpacks tuples, also of one component."""
    is_tuple = type(dataset.element_spec) is tuple
    return dataset.map(unconverted(lambda *components: function(components if is_tuple else components[0])))


def examples_as_tensors(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Converts the examples of ragged batches to tensors."""
    if not any(isinstance(x, tf.RaggedTensorSpec) and not x.ragged_rank for x in tf.nest.flatten(dataset.element_spec)):
        return dataset
    return map_elements(dataset, lambda example: example)  # `map` passes tensors


class DatasetStream(Stream):
    """A user's `tf.data.Dataset` of single examples, each epoch in its own order."""

    dataset: tf.data.Dataset

    def __init__(self, dataset: tf.data.Dataset, by_batch: bool = False):
        self.element_spec, self.by_batch, self.divides = specs(dataset, by_batch), by_batch, not by_batch
        self.length = int(dataset.cardinality())
        self.ends = pipelines.ends(dataset)
        self.dataset = dataset

    @unconverted
    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        return self.dataset

    def shard_files(self, workers: int, worker: int) -> Stream | None:
        if not self.divides or pipelines.served(self.dataset):  # TensorFlow logs 70 lines for a service
            return None
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        try:
            part = divide_by_files(self.dataset.with_options(options), workers, worker)
            next(iter(part), None)  # only reading shows whether there are files, and enough
        except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError):
            return None
        stream = DatasetStream(part)
        stream.length = tf.data.UNKNOWN_CARDINALITY  # TensorFlow passes on the whole dataset's
        return stream


class FileStream(Stream):
    """Files that are read completely, several at once, in another order in each epoch.

    The interleaving is deterministic, so an epoch's examples come in the same order each time.

    Args:
      paths: paths of the files, the same on every worker.
      read: path, a scalar string, -> `tf.data.Dataset` of the file's examples.
      length: examples in all files, if known.
      files_at_once: number of files to interleave, an example of each in turn.
      contents: text that identifies the files' contents.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[tf.Tensor], tf.data.Dataset],
        *,
        length: int | None = None,
        files_at_once: int = 8,
        contents: str = "",
    ):
        self.length = tf.data.UNKNOWN_CARDINALITY if length is None else length
        self._paths, self._read = list(paths), read
        self._files_at_once, self._contents = files_at_once, contents

    @functools.cached_property
    def element_spec(self) -> Any:  # type: ignore[override]
        # On first use: building a pipeline starts TensorFlow, before a strategy has divided its devices.
        with tf.init_scope():
            return specs(self.examples(None, tf.constant(0, tf.int64)))

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        paths, last = tf.constant(self._paths), len(self._paths) - 1
        if seed is not None and last > 0:
            numbers = tf.range(last + 1, dtype=tf.int64)
            paths = tf.gather(paths, permuted(numbers, epoch_seed(seed, epoch, [3]), last + 1))
        at_once = min(self._files_at_once, last + 1)
        files = tf.data.Dataset.from_tensor_slices(paths)
        # Deterministic: each worker reads all files and takes its own examples, so all have to get the same order.
        return files.interleave(self._read, cycle_length=at_once, num_parallel_calls=at_once, deterministic=True)

    def identity(self) -> str:
        names = [(os.path.basename(path), tf.io.gfile.stat(path).length) for path in self._paths]
        return json.dumps(names) + self._contents

    def files(self) -> Sequence[str]:
        return self._paths

    def fault(self) -> CrankshaftError | None:
        for path in self._paths:
            read = 0
            try:
                for _ in self._read(tf.constant(path)):
                    read += 1
            except tf.errors.OpError as error:
                why = reason(error).replace(path, "").strip("; ")
                kind = UnavailableError if is_transient(error) else SourceError
                return kind(f"{path}, after {read:,} examples: {why}; restore the file, and resume the run")
        return None

    def shard_files(self, workers: int, worker: int) -> Stream | None:
        if len(self._paths) < workers:
            return None
        # Every n-th file, since neighbours are often of one kind or one size.
        return FileStream(self._paths[worker::workers], self._read, files_at_once=self._files_at_once)


class WrappedStream(Stream):
    """A stream that wraps another and reads from it. Files are not divided, since an example may depend on others."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self.element_spec, self.length, self.ends = stream.element_spec, stream.length, stream.ends
        self.dataset, self.batch_examples, self.buckets = stream.dataset, stream.batch_examples, stream.buckets
        self.divides = self.divides and stream.divides
        self.by_batch, self.is_cut = stream.by_batch, stream.is_cut

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        return self._stream.examples(seed, epoch)

    def identity(self) -> str:
        return self._stream.identity()

    def files(self) -> Sequence[str]:
        return self._stream.files()

    def fault(self) -> CrankshaftError | None:
        return self._stream.fault()


class _Undivided(WrappedStream):
    divides = False


class Endless(WrappedStream):
    """A stream for a run without epochs: it is not counted, and batches continue across passes."""

    def __init__(self, stream: Stream, epoch_examples: int):
        super().__init__(stream)
        self.length, self.ends = tf.data.INFINITE_CARDINALITY, False
        self.epoch_examples = epoch_examples


def specs(dataset: tf.data.Dataset, by_batch: bool = False) -> Any:
    """Returns the nest of `Spec` of a dataset's examples, dense tensors of known shapes; see `Stream.by_batch`."""
    return tf.nest.map_structure(lambda x: Spec(x.shape[by_batch:], x.dtype.as_numpy_dtype), dataset.element_spec)


def records(
    paths: Sequence[str],
    parse: Callable[[tf.Tensor], Any],
    *,
    compression: str = "GZIP",
    length: int | None = None,
    files_at_once: int = 8,
    contents: str = "",
) -> FileStream:
    """Returns a stream of the records of TFRecord files without an index, e.g. compressed ones.

    Each epoch reads the files in another order of (seed, epoch), `files_at_once` side by side; records are parsed in
    batches, and shuffled within the run's shuffle buffer by the feed. TensorFlow checks both checksums of each record.

    Args:
      paths: paths of the files, the same on every worker.
      parse: a batch of serialized records, [n] string, -> nest of tensors [n, ...]: (features, labels).
      compression: compression of all files: "GZIP", "ZLIB" or "" for none.
      length: number of records in all files; None counts them once.
      files_at_once: see `FileStream`.
      contents: see `FileStream`.
    """

    def read(path: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path, compression).batch(_PARSED_AT_ONCE).map(parse).unbatch()

    return FileStream(paths, read, length=length, files_at_once=files_at_once, contents=contents)


def unwatched(title: str, total: int | None) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """Shows nothing: a `Watch` for runs without display."""
    return contextlib.nullcontext(lambda done: None)


@dataclasses.dataclass(frozen=True)
class StreamPart:
    """One process's part of a stream.

    Attributes:
      stream: the process's own files, or all files, of which it takes its examples of each batch.
      counts: examples in each process's stream; a single number if all processes read all files.
      process: this process's index in `counts`.
      is_given: whether each process was given its own data, rather than a part of the same files.
    """

    stream: Stream
    counts: tuple[int, ...]
    process: int = 0
    is_given: bool = False

    @property
    def by_file(self) -> bool:
        """Whether each process reads its own files, or data."""
        return len(self.counts) > 1

    def order(self, batch_size: int, seed: int | None, drop_remainder: bool) -> Order:
        """Returns the order of all processes' examples."""
        has_epochs = not isinstance(self.stream, Endless)
        examples = self.stream.epoch_examples if isinstance(self.stream, Endless) else sum(self.counts)
        if self.stream.by_batch and has_epochs:  # as if all were of one size
            examples *= batch_size
        if self.by_file:
            shards = self.counts if has_epochs else (examples // len(self.counts),) * len(self.counts)
            return PerWorkerOrder(examples, batch_size, 1, seed, has_epochs=has_epochs, shards=shards)
        return Order(examples, batch_size, 1, seed, drop_remainder, has_epochs=has_epochs)

    def describe(self) -> str:
        """Describes how the stream is divided, for people."""
        if self.by_file:
            how = "as it was given to each" if self.is_given else "by files"
            counts = ", ".join(f"{count:,}" for count in self.counts if count >= 0)
            return f"divided {how}, {counts}".rstrip(", ")
        return "divided by examples, each worker reads all and takes its part of a batch"

    def metadata(self) -> dict[str, Any]:
        """Returns its metadata for checkpoints, plain JSON: the argument `saved_counts` of `divide`."""
        return {"by": "file" if self.by_file else "example", "counts": list(self.counts)}


def divide(
    stream: Stream,
    processes,
    policy: str = "AUTO",
    saved_counts: Mapping[str, Any] | None = None,
    watch: Watch = unwatched,
    timeout_seconds: float = 0.0,
) -> StreamPart:
    """Divides a stream among the training processes: by files, or by the examples of each batch.

    By files, each file is read by one process. Otherwise every process reads all files, in the same order, and takes
    its own examples, so batches don't depend on the number of processes.

    Args:
      processes: the training processes, `engine.strategies.base.Processes`.
      policy: AUTO: by files if there are as many as processes, FILE: by files, DATA: by examples, OFF: each process has
        its own part already. OFF in a dataset's options replaces AUTO.
      saved_counts: an earlier process's `StreamPart.metadata`: it is not counted again.
      timeout_seconds: limit on counting, see `StreamTimeout`.

    Raises:
      UsageError: the stream never ends, or there are too few files for FILE.
      StuckStreamError: it hangs.
      SourceError: counting a dataset exceeds the timeout, so it may never end.
    """
    saved_counts, workers = saved_counts or {}, processes.num_hosts
    if workers > 1 and is_part(stream, policy):
        return _given_part(stream, processes, saved_counts, watch)
    if isinstance(stream, Endless):
        return StreamPart(stream, (stream.length,))
    if stream.length == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "the dataset never ends, so it has no epoch; give train_steps and, if there is evaluation data, "
            "eval_every_steps, or end it by dataset.take(n), which counts batches after dataset.batch"
        )
    if workers > 1 and (policy == "FILE" or (policy == "AUTO" and saved_counts.get("by") != "example")):
        part = stream.shard_files(workers, processes.host)
        # All decide alike: a worker that divided by files beside one that divided by examples would repeat examples and
        # leave others out.
        by_files = all(processes.exchange(part is not None))
        if part is not None and by_files:
            if saved_counts.get("by") == "file" and len(saved_counts["counts"]) == workers:
                return StreamPart(part, tuple(saved_counts["counts"]), processes.host)
            return StreamPart(part, tuple(processes.exchange(count(part, watch))), processes.host)
        if policy == "FILE":
            raise UsageError(
                f"auto_shard_policy=file divides files among {workers} workers, and the dataset shows fewer; give more "
                "files, or auto_shard_policy=auto or data"
            )
    if stream.length == tf.data.UNKNOWN_CARDINALITY and saved_counts.get("by") == "example":
        return StreamPart(stream, tuple(saved_counts["counts"]))
    return StreamPart(stream, (count(stream, watch, timeout_seconds),))


def is_part(split: Split, policy: str) -> bool:
    """Returns whether each worker's data is its own part already: by `policy`, see `divide`, or a dataset's options."""
    if not isinstance(split, Stream) or policy == "OFF":
        return isinstance(split, Stream)
    return policy == "AUTO" and is_off(split.dataset)


def is_off(data: Any) -> bool:
    """Returns whether data is a dataset whose options say that each worker's is its own part."""
    off = tf.data.experimental.AutoShardPolicy.OFF
    return isinstance(data, tf.data.Dataset) and data.options().experimental_distribute.auto_shard_policy == off


def _given_part(stream: Stream, processes, saved_counts: Mapping[str, Any], watch: Watch) -> StreamPart:
    if not stream.divides:
        raise UsageError(
            "all workers read the whole of data whose examples differ in length, and of several inputs per step, so a "
            f"part is not enough; give each the whole dataset, without {_OFF}"
        )
    is_endless, counts = isinstance(stream, Endless), saved_counts.get("counts", ())
    if stream.length == tf.data.UNKNOWN_CARDINALITY and stream.dataset is not None and pipelines.served(stream.dataset):
        raise UsageError(
            "workers share a job of TensorFlow's data service (job_name), and what each gets can't be counted, nor "
            "made equal; repeat the data before distribute (`ids.repeat()`), and give train_steps"
        )
    if saved_counts.get("by") != "file" or len(counts) != processes.num_hosts or (min(counts) < 0 and not is_endless):
        counts = processes.exchange(stream.length if is_endless else count(stream, watch))
    return StreamPart(stream, tuple(counts), processes.host, is_given=True)


def count(stream: Stream, watch: Watch = unwatched, timeout_seconds: float = 0.0) -> int:
    """Returns a stream's length; if it is unknown, reads the stream once. Arguments are `divide`'s."""
    if stream.length != tf.data.UNKNOWN_CARDINALITY:
        return stream.length
    # Only how many they are is passed on, so nothing is copied to Python.
    ones = stream.examples(None, tf.constant(0, tf.int64)).map(unconverted(lambda *_: tf.constant(1, tf.int64)))
    batches = iter(untuned(ones.batch(_COUNTED_AT_ONCE).prefetch(2)))
    timeout, counted, began = StreamTimeout(stream.files(), timeout_seconds), 0, time.monotonic()
    shown = began
    with watch("counting examples", None) as done, naming_files(stream):
        while (batch := timeout.call(functools.partial(next, batches, None))) is not None:
            counted += batch.shape[0]
            done(counted)
            if (now := time.monotonic()) - shown > _COUNT_SHOWN_SECONDS:
                shown = now
                logging.warning("counting the dataset's examples: %d so far", counted)
            if 0 < timeout_seconds < (seconds := now - began) and not stream.files():  # files end
                raise SourceError(
                    f"the dataset's examples are being counted for {rounded(seconds)} s, {counted:,} so far, and it "
                    "may never end; give train_steps, and eval_every_steps if there is evaluation data, state their "
                    "number by tf.data.experimental.assert_cardinality, or raise step_timeout_seconds"
                )
    return counted


@contextlib.contextmanager
def naming_files(stream: Stream) -> Iterator[None]:
    """Raises the problem of a stream's files, if TensorFlow's error does not name it."""
    try:
        yield
    except tf.errors.OpError as error:
        if isinstance(error, tf.errors.OutOfRangeError) and isinstance(stream, Endless):
            raise SourceError(_ENDED) from None
        # TensorFlow's error names no file, so all are read again until the one that fails.
        if _READING in str(error) and (fault := stream.fault()):
            raise fault from None
        raise


def batched(stream: Stream, examples: tf.data.Dataset, size: int, drop_remainder: bool = False) -> tf.data.Dataset:
    """Returns batches of a stream's examples, padded to the longest of each if they differ in length."""
    if stream.by_batch:
        return examples
    if unknown_dimensions(stream.element_spec):
        return examples.padded_batch(size, drop_remainder=drop_remainder)
    return examples.batch(size, drop_remainder=drop_remainder)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without the thread that tunes its parallelism, unless its options enable that.

    Freeing an iterator waits for that thread, which sometimes sleeps for up to a minute (TensorFlow 2.21). TensorFlow's
    iterators for the devices of a distributed dataset always have such a thread, so iterators are kept as long as
    possible.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
