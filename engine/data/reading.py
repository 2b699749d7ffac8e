"""Reads a split's examples for a block of steps, in the graph of a host's pipeline: from memory, or from a source."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from ..internals.tensorflow import weakly
from . import host_arrays
from .order import ChunkedOrder, Order
from .reads import Reads
from .source import Source, Spec

_WHOLE_BYTES = 64 << 20  # at once, where a split is read into memory
_HAS_FAILED = "a source could not be read; the run ends with the reason"
_RECENT_READS = 64  # of which one may have failed to decode: more than are under way


class ArraysReader:
    """Gathers examples of arrays, in memory or mapped from a file.

    Args:
      arrays: nest of arrays [examples, ...].
    """

    failure: Exception | None = None
    bytes_read = None
    shares_read = None

    def find_undecodable(self) -> None:
        """Arrays are not decoded."""

    def __init__(self, arrays):
        # Once, and eagerly: a graph refers to a tensor, but copies an array, and takes none of 2 GiB.
        with tf.device("CPU:0"):
            self._tensors = tf.nest.map_structure(host_arrays.to_gather_from, arrays)

    def read(self, indices: tf.Tensor, block: tf.Tensor):
        """Returns the examples at [steps, n] indices of a block: nest of tensors [steps, n, ...]. In a graph."""
        return tf.nest.map_structure(lambda array: host_arrays.gather(array, indices), self._tensors)


class SourceReader:
    """Reads a source's examples.

    Args:
      source: what is read.
      order: of its examples, by which chunks are read ahead and `decode` gets its seeds.
      timeout_seconds: without any read that returns, until that is a failure; 0 waits for ever.

    Attributes:
      source: what is read.
      failure: what the source has raised, if it has; TensorFlow hands on no more than its text.
      shares_read: of blocks, so far.
    """

    def __init__(self, source: Source, order: Order, timeout_seconds: float = 0.0):
        self.source, self._order = source, order
        self._reads = Reads(source, timeout_seconds)
        self._chunks = None
        if isinstance(order, ChunkedOrder):
            self._chunks = Chunks(self._reads, order.chunk_examples, order.chunks_to_keep)
        self.failure: Exception | None = None
        self._recent: deque[np.ndarray] = deque(maxlen=_RECENT_READS)
        self.shares_read = 0
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes of what the source's `read` has returned so far."""
        return self._reads.bytes

    def read(self, indices: tf.Tensor, block: tf.Tensor):
        """Returns the examples at [steps, n] indices of a block: nest of tensors [steps, n, ...]. In a graph."""
        order = self._order
        ahead = order.chunks_ahead(block) if isinstance(order, ChunkedOrder) else tf.zeros([0], tf.int64)
        flat = tf.reshape(indices, [-1])
        epochs = tf.repeat(self._order.epochs(block), tf.shape(indices)[1])
        stored = read_in_graph(self._read, self.source.stored_spec, flat, ahead)
        rows = [tf.shape(part)[0] for part in tf.nest.flatten(stored)]
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(rows == tf.size(flat)), [_HAS_FAILED])]):
            stored = tf.nest.map_structure(tf.identity, stored)
        found = self.source.decode(stored, example_seeds(self._order, epochs, flat))

        def as_steps(x, spec: Spec):
            return tf.reshape(x, tf.concat([tf.shape(indices), [*spec.shape]], 0))

        return tf.nest.map_structure(
            lambda x, spec: tf.ensure_shape(as_steps(x, spec), [*indices.shape, *spec.shape]),
            found,
            self.source.element_spec,
        )

    def find_undecodable(self) -> Exception | None:
        """Looks for the example whose decoding has failed, among those that were read last; None if all decode."""
        if self.source.stored_spec == self.source.element_spec:
            return None  # nothing is decoded
        try:
            for indices in [*self._recent]:
                self.source.verify(indices, self.source.read(indices))
        except Exception as error:
            return error
        return None

    def fetch(self, indices: np.ndarray, ahead: np.ndarray) -> Any:
        """Reads examples as the source has them stored, and begins to read the chunks `ahead`. Host code."""
        self._recent.append(indices)
        return self._chunks.read(indices, ahead) if self._chunks else self._reads.read(indices)

    def _read(self, indices: np.ndarray, ahead: np.ndarray):
        try:
            found = self.fetch(indices, ahead)
        except Exception as error:
            # TensorFlow would print the traceback of what is raised here. No rows at all are noticed in the graph.
            self.failure = self.failure or error
            return _no_rows(self.source.stored_spec)
        with self._lock:
            self.shares_read += 1
        return found


class Chunks:
    """Keeps the chunks of a source that were read last, and reads ahead those that will be wanted next.

    Args:
      reads: of the source.
      size: examples in a chunk.
      most: chunks that are kept.
    """

    def __init__(self, reads: Reads, size: int, most: int):
        self._reads, self._size, self._most = reads, size, most
        self._kept: OrderedDict[int, Future] = OrderedDict()  # by number, the one used last at the end
        self._lock = threading.Lock()

    def read(self, indices: np.ndarray, ahead: np.ndarray):
        """Returns the examples at `indices`, [n] int64, and starts to read the chunks `ahead`, without waiting."""
        numbers, which = np.unique(indices // self._size, return_inverse=True)
        with self._lock:
            wanted = [self._chunk(int(number)) for number in numbers]
            for number in ahead:
                self._chunk(int(number))
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        chunks = [self._reads.result(future) for future in wanted]
        by_chunk = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(numbers)))
        rows = [by_chunk[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        offsets = [indices[each] % self._size for each in rows]

        def gathered(*parts: np.ndarray) -> np.ndarray:
            found = np.empty((len(indices), *parts[0].shape[1:]), parts[0].dtype)
            for each, within, part in zip(rows, offsets, parts, strict=True):
                found[each] = part[within]
            return found

        return tf.nest.map_structure(gathered, *chunks)

    def _chunk(self, number: int) -> Future:
        if number not in self._kept:
            first = number * self._size
            stop = min(first + self._size, len(self._reads.source))
            self._kept[number] = self._reads.begin(np.arange(first, stop, dtype=np.int64))
        self._kept.move_to_end(number)
        return self._kept[number]


def reader_of(split, order: Order, timeout_seconds: float = 0.0) -> ArraysReader | SourceReader:
    """Returns what reads a split: a nest of arrays, or a `Source`."""
    return SourceReader(split, order, timeout_seconds) if isinstance(split, Source) else ArraysReader(split)


def read_in_graph(read: Callable, stored_spec: Any, *arguments: tf.Tensor):
    """Calls `read` with arrays, in a graph on the host; returns a nest of tensors [n, ...] as `stored_spec` says.

    `read` is a method, whose object is not kept, with its threads and open files; where it is gone there are no rows.
    """
    read = weakly(read, lambda: _no_rows(stored_spec))

    def flat(*arrays):
        return as_stored(read(*arrays), stored_spec)

    with tf.device("CPU:0"):
        tensors = tf.numpy_function(flat, arguments, stored_dtypes(stored_spec), stateful=False)
    return packed(tensors, stored_spec)


def _no_rows(stored_spec: Any) -> Any:
    return tf.nest.map_structure(lambda spec: np.zeros((0, *spec.shape), spec.dtype), stored_spec)


def as_stored(found: Any, stored_spec: Any) -> list[np.ndarray]:
    """Returns what a source has read as TensorFlow takes it from Python: a list of arrays, as `stored_spec` says."""
    return [
        np.asarray(x, spec.dtype) for x, spec in zip(tf.nest.flatten(found), tf.nest.flatten(stored_spec), strict=True)
    ]


def stored_dtypes(stored_spec: Any) -> list[tf.DType]:
    """Returns the types of what `as_stored` returns."""
    return [tf.string if spec.dtype == object else tf.as_dtype(spec.dtype) for spec in tf.nest.flatten(stored_spec)]


def packed(tensors: Sequence[tf.Tensor], stored_spec: Any):
    """Makes a nest of tensors [n, ...], as `stored_spec` says, of the list that came of `as_stored`."""
    specs = tf.nest.flatten(stored_spec)
    shaped = [tf.ensure_shape(x, [None, *spec.shape]) for x, spec in zip(tensors, specs, strict=True)]
    return tf.nest.pack_sequence_as(stored_spec, shaped)


def example_seeds(order: Order, epochs: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns [n, 2] int64 seeds, one for each (seed, epoch, example).

    Args:
      order: whose seed it is; None counts as 0.
      epochs: [n] int64.
      indices: [n] int64.
    """
    return tf.stack([((order.seed or 0) << 32) + epochs, indices], 1)


@contextlib.contextmanager
def unmasked(reader: ArraysReader | SourceReader) -> Iterator[None]:
    """Raises what the source has raised, where TensorFlow raises an error of its own with that text."""
    try:
        yield
    except tf.errors.OpError:
        failure = reader.failure or reader.find_undecodable()
        if failure is None:
            raise
        raise failure from None


def whole(source: Source, timeout_seconds: float = 0.0) -> Any:
    """Reads all examples into memory: nest of arrays [examples, ...]."""
    arrays = tf.nest.map_structure(lambda spec: np.empty((len(source), *spec.shape), spec.dtype), source.element_spec)
    first = 0
    for piece in in_pieces(source, 0, len(source), timeout_seconds):
        parts = tf.nest.flatten(piece)
        for target, part in zip(tf.nest.flatten(arrays), parts, strict=True):
            target[first : first + len(part)] = part
        first += len(parts[0])
    return arrays


def in_pieces(source: Source, first: int, stop: int, timeout_seconds: float = 0.0) -> Iterator[Any]:
    """Yields the examples from one index to another, in order, some thousands at a time: nests of arrays [n, ...]."""
    an_example = sum(spec.nbytes for spec in tf.nest.flatten(source.element_spec))
    at_once = max(1, min(len(source), _WHOLE_BYTES // max(1, an_example)))
    reader = SourceReader(source, Order(len(source), at_once, 1), timeout_seconds)

    @tf.function(autograph=False)
    def piece(indices):
        return reader.read(indices[tf.newaxis], tf.zeros([], tf.int64))

    traced = piece.get_concrete_function(tf.TensorSpec([None], tf.int64))  # once, whatever a piece's size
    for start in range(first, stop, at_once):
        with unmasked(reader):
            found = traced(tf.range(start, min(start + at_once, stop), dtype=tf.int64))
        yield tf.nest.map_structure(lambda part: part.numpy()[0], found)
