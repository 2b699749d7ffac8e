"""Reads a source's examples in a graph: calls its `read` in threads, checks, counts and caches the results."""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import SourceError, StuckReadError, rounded
from ..internals.tensorflow import weak_method
from ..own_code import users_line
from . import form
from .arrays import ArraySource
from .frames import to_array
from .order import Order
from .source import Source, Spec, WrappedSource
from .timeouts import quote_files, wait_for_result

_WHOLE_BYTES = 64 << 20  # read at once as a split is read into memory
_HAS_FAILED = "a source could not be read; the run ends with the reason"
_LAST_READ_SECONDS = 1.0  # that the process's end waits for a read in progress
_RECENT_READS = 64  # kept in case one fails to decode; more than are in progress
_ARRAY = "one array"


def example_bytes(source: Source) -> int:
    """Returns the bytes of one example in memory."""
    return sum(spec.nbytes for spec in tf.nest.flatten(source.element_spec))


class Reader:
    """Reads a source's examples: from arrays in memory, or by `Source.read`.

    Args:
      order: order of the source's examples; determines the chunks to read ahead and the seeds of `decode`.
      timeout_seconds: time without a completed read until it fails; 0 waits for ever.

    Attributes:
      failure: the source's exception, if any; TensorFlow passes on only its text.
      shards_read: number of shards of blocks that were read so far; None for arrays.
    """

    def __init__(self, source: Source, order: Order, timeout_seconds: float = 0.0):
        self.source, self._order = source, order
        self._reads = Reads(source, timeout_seconds) if source.as_arrays() is None else None
        self._chunks = Chunks(self._reads, order) if self._reads and order.chunks_to_keep else None
        self.failure: Exception | None = None
        self._recent: deque[np.ndarray] = deque(maxlen=_RECENT_READS)
        self.shards_read = 0 if self._reads else None
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int | None:
        """Bytes that the source's `read` has returned so far; None for arrays."""
        return self._reads.bytes if self._reads else None

    def read(self, indices: tf.Tensor, block: tf.Tensor, pad: Callable[[Any], Any] = lambda examples: examples):
        """Returns the examples at [steps, n] indices of a block: nest of tensors [steps, n, ...]. In a graph.

        Args:
          indices: indices of the examples in the source, int64 [steps, n].
          block: scalar int64.
          pad: pads examples [steps * n, ...] of varying length.
        """
        flat = tf.reshape(indices, [-1])
        epochs = tf.repeat(self._order.epochs(block), tf.shape(indices)[1])
        examples = gather(self.source, self._order, flat, epochs, lambda flat: self._stored(flat, block))
        examples = pad(examples)

        def as_steps(x, spec: Spec):
            x = tf.reshape(x, tf.concat([tf.shape(indices), tf.shape(x)[1:]], 0))
            return tf.ensure_shape(x, [*indices.shape, *spec.shape])

        return tf.nest.map_structure(as_steps, examples, self.source.element_spec)

    def _stored(self, indices: tf.Tensor, block: tf.Tensor):
        """Returns a block's examples as stored by the source, by [n] int64 indices. In a graph."""
        spec = self.source.stored_spec
        wanted = (indices, self._order.epochs(block)[0], *self._order.chunks_ahead(block))
        # TensorFlow keeps functions called in a graph, and this object has threads and open files.
        read = weak_method(self._read, lambda: _no_examples(spec))
        with tf.device("CPU:0"):
            tensors = tf.numpy_function(
                lambda *arrays: as_stored(read(*arrays), spec), wanted, stored_dtypes(spec), stateful=False
            )
        stored = packed(tensors, spec)
        sizes = [tf.shape(x)[0] for x in tf.nest.flatten(stored)]
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(sizes == tf.size(indices)), [_HAS_FAILED])]):
            return tf.nest.map_structure(tf.identity, stored)

    def find_undecodable(self) -> Exception | None:
        """Searches the examples read last for the one that can't be decoded; returns None if all can."""
        if self.source.stored_spec == self.source.element_spec:
            return None  # nothing is decoded
        try:
            for indices in [*self._recent]:
                self.source.verify(indices, self.source.read(indices))
        except Exception as error:
            return error
        return None

    def fetch(self, indices: np.ndarray, epoch: int, epoch_ahead: int, ahead: np.ndarray) -> Any:
        """Reads examples of an epoch as stored by the source.

        Args:
          indices: [n] int64.
          epoch: epoch of the first example; of all examples, if the source `varies`.
          epoch_ahead: epoch of the chunks ahead.
          ahead: chunks to start reading, [chunks] int64.
        """
        self._recent.append(indices)
        if self._chunks is None:
            assert self._reads  # arrays in memory are not fetched
            return self._reads.read(indices)
        if self.source.varies and epoch_ahead != epoch:
            ahead = ahead[:0]
        return self._chunks.read(indices, int(epoch), int(epoch_ahead), ahead)

    def _read(self, *wanted: Any):
        try:
            stored = self.fetch(*wanted)
        except Exception as error:
            # TensorFlow would print the traceback of an exception. The graph notices that there are no examples.
            self.failure = self.failure or error
            return _no_examples(self.source.stored_spec)
        with self._lock:
            self.shards_read = (self.shards_read or 0) + 1
        return stored


class Chunks:
    """Caches the last chunks that were read, of a source that `varies` for one epoch, and reads the next ones ahead."""

    def __init__(self, reads: Reads, order: Any):
        self._reads, self._size = reads, order.chunk_examples

        @functools.lru_cache(order.chunks_to_keep)
        def begin(epoch: int, number: int, size: int = self._size) -> Future:  # without a reference to this object
            first = number * size
            return reads.begin(np.arange(first, min(first + size, len(reads.source)), dtype=np.int64))

        self._chunk, self._epoch = begin, 0
        self._lock = threading.Lock()  # each chunk is started once

    def read(self, indices: np.ndarray, epoch: int, epoch_ahead: int, ahead: np.ndarray):
        """Returns the examples at `indices`, [n] int64, and starts to read the chunks `ahead`, without waiting."""
        if not self._reads.source.varies:
            epoch = epoch_ahead = 0
        numbers, which = np.unique(indices // self._size, return_inverse=True)
        with self._lock:
            if epoch > self._epoch:
                self._chunk.cache_clear()  # nothing reads an earlier epoch's
                self._epoch = epoch
            wanted = [self._chunk(epoch, int(number)) for number in numbers]
            for number in ahead:
                self._chunk(epoch_ahead, int(number))
        try:
            chunks = [self._reads.result(future) for future in wanted]
        except BaseException:
            self._chunk.cache_clear()  # so that a caller can retry failed reads
            raise
        by_chunk = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(numbers)))
        positions = [by_chunk[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        offsets = [indices[chunk_positions] % self._size for chunk_positions in positions]

        def gathered(*components: np.ndarray) -> np.ndarray:
            shapes = [component.shape[1:] for component in components]  # chunks of varying examples differ
            shape, dtype = tuple(map(max, zip(*shapes, strict=True))), components[0].dtype
            examples = blank(len(indices), shape, dtype)
            for chunk_positions, chunk_offsets, component in zip(positions, offsets, components, strict=True):
                at: Any = (chunk_positions, *map(slice, component.shape[1:]))
                examples[at] = component[chunk_offsets]
            return examples

        return tf.nest.map_structure(gathered, *chunks)


def _no_examples(stored_spec: Any) -> Any:
    return tf.nest.map_structure(lambda spec: form.zeros(spec)[:0], stored_spec)


def as_stored(stored: Any, stored_spec: Any) -> list[np.ndarray]:
    """Converts the examples that a source has read to a list of arrays for TensorFlow, see `stored_spec`."""
    return [
        np.asarray(x, spec.dtype) for x, spec in zip(tf.nest.flatten(stored), tf.nest.flatten(stored_spec), strict=True)
    ]


def stored_dtypes(stored_spec: Any) -> list[tf.DType]:
    """Returns the dtypes of the results of `as_stored`."""
    return [tf.string if spec.dtype == object else tf.as_dtype(spec.dtype) for spec in tf.nest.flatten(stored_spec)]


def packed(tensors: Sequence[tf.Tensor], stored_spec: Any):
    """Converts the result of `as_stored` to a nest of tensors [n, ...], see `stored_spec`."""
    specs = tf.nest.flatten(stored_spec)
    shaped = [tf.ensure_shape(x, [None, *spec.shape]) for x, spec in zip(tensors, specs, strict=True)]
    return tf.nest.pack_sequence_as(stored_spec, shaped)


def gather(source: Source, order: Order, indices: tf.Tensor, epochs: tf.Tensor, stored: Callable):
    """Returns a source's examples: nest of tensors [n, ...], of its declared shapes. In a graph.

    `indices` and their `epochs` are [n] int64; `stored` is `Source.gather`'s.
    """
    seeds = tf.stack([((order.seed or 0) << 32) + epochs, indices], 1)  # one for each (seed, epoch, example)
    examples = source.gather(indices, seeds, stored)
    return tf.nest.map_structure(lambda x, spec: tf.ensure_shape(x, [None, *spec.shape]), examples, source.element_spec)


@contextlib.contextmanager
def raising_source_error(reader: Reader) -> Iterator[None]:
    """Raises the source's exception instead of TensorFlow's, which has its text."""
    try:
        yield
    except tf.errors.OpError:
        failure, reader.failure = reader.failure or reader.find_undecodable(), None
        if failure is None:
            raise
        raise failure from None


def in_memory(source: Source, timeout_seconds: float = 0.0) -> ArraySource:
    """Returns all examples in arrays: the source's own, or read into memory."""
    if (arrays := source.as_arrays()) is not None:
        return ArraySource(arrays)
    arrays = tf.nest.map_structure(lambda spec: np.empty((len(source), *spec.shape), spec.dtype), source.element_spec)
    first = 0
    for piece in in_pieces(source, 0, len(source), timeout_seconds):
        components = tf.nest.flatten(piece)
        for target, component in zip(tf.nest.flatten(arrays), components, strict=True):
            target[first : first + len(component)] = component
        first += len(components[0])
    return ArraySource(arrays)


def in_pieces(source: Source, first: int, stop: int, timeout_seconds: float = 0.0) -> Iterator[Any]:
    """Yields the examples [first, stop) in order, some thousands at a time: nests of arrays [n, ...]."""
    at_once = max(1, min(len(source), _WHOLE_BYTES // max(1, example_bytes(source))))
    if (arrays := source.as_arrays()) is not None:
        for start in range(first, stop, at_once):
            examples = slice(start, min(start + at_once, stop))
            yield tf.nest.map_structure(lambda array, examples=examples: np.asarray(array[examples]), arrays)
        return
    reader = Reader(source, Order(len(source), at_once, 1), timeout_seconds)

    @tf.function(autograph=False)
    def piece(indices):
        return reader.read(indices[tf.newaxis], tf.zeros([], tf.int64))

    traced = piece.get_concrete_function(tf.TensorSpec([None], tf.int64))  # once, whatever a piece's size
    for start in range(first, stop, at_once):
        with raising_source_error(reader):
            examples = traced(tf.range(start, min(start + at_once, stop), dtype=tf.int64))
        yield tf.nest.map_structure(lambda x: x.numpy()[0], examples)


class Reads:
    """Reads of one source. A read that hangs can't be interrupted: its thread is abandoned, and the run ends.

    Args:
      timeout_seconds: time without a completed read until `result` raises; 0 waits for ever.
    """

    def __init__(self, source: Source, timeout_seconds: float = 0.0):
        self.source = source
        self._timeout = timeout_seconds
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._progress = _Progress()
        # Not an executor's threads, for which the process's end would wait.
        threads = [
            threading.Thread(target=_serve, args=(self._calls, self._progress), name="crankshaft-read", daemon=True)
            for _ in range(source.read_threads)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, self._calls, threads)

    @property
    def bytes(self) -> int:
        """Bytes of what was read so far."""
        return sum(self._progress.bytes.values())

    def begin(self, indices: np.ndarray) -> Future:
        """Starts reading examples, [n] int64, without waiting."""
        future: Future = Future()
        self._calls.put((future, self.source, indices))
        return future

    def result(self, future: Future) -> Any:
        """Waits for a read and returns its nest of arrays.

        Raises:
          StuckReadError: nothing was read for too long.
          Exception: the source's.
        """
        return wait_for_result(future, self._timeout, lambda: self._progress.last, self._stuck)

    def read(self, indices: np.ndarray) -> Any:
        """Reads examples, as `begin` and `result` do."""
        return self.result(self.begin(indices))

    def _stuck(self, idle: float) -> StuckReadError:
        thread, first = next(iter(self._progress.at.items()), (0, 0))
        frame = sys._current_frames().get(thread)
        at = (users_line(traceback.extract_stack(frame)) if frame else None) or "an unknown line"
        return StuckReadError(
            f"{_name(self.source)}.read has not returned for {rounded(idle)} s, at {at}, from example "
            f"{first} on{quote_files(self.source.files())}; see whether its files' disk or host answers, or raise "
            "step_timeout_seconds"
        )


class _Progress:
    """The threads' reads in progress.

    Attributes:
      last: time of the last completed read, by the monotonic clock.
      at: for each thread that reads at present, the first example of its read.
      bytes: for each thread, the bytes that it has read so far.
    """

    def __init__(self):
        self.last = 0.0
        self.bytes: dict[int, int] = {}
        self.at: dict[int, int] = {}


def _serve(calls: queue.SimpleQueue, progress: _Progress) -> None:
    """Serves reads in a thread. Must not refer to its `Reads`, whose deletion ends the thread."""
    thread = threading.get_ident()
    while call := calls.get():
        future, source, indices = call
        progress.at[thread] = int(indices[0]) if len(indices) else 0
        try:
            stored = checked(source, source.read(indices), len(indices))
            progress.bytes[thread] = progress.bytes.get(thread, 0) + sum(map(_size, tf.nest.flatten(stored)))
            future.set_result(stored)
            del stored
        except BaseException as error:  # raised where the result is used
            future.set_exception(error)
        progress.last = time.monotonic()
        # While the thread waits for its next read, it must keep neither the source nor what it has read.
        del progress.at[thread], call, future, source, indices


def _end(calls: queue.SimpleQueue, threads: Sequence[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            calls.get_nowait()[0].cancel()  # no longer needed
    for _ in threads:
        calls.put(None)
    if not threading.main_thread().is_alive():  # the interpreter is ending, and would abort a library's threads
        for thread in threads:
            thread.join(_LAST_READ_SECONDS)


def blank(examples: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array of zeros or empty strings."""
    return np.full((examples, *shape), b"" if dtype.kind == "O" else 0, dtype)


def checked(source: Source, returned: Any, examples: int) -> Any:
    """Checks what a source has read, and converts it to arrays of its `stored_spec`.

    Raises:
      SourceError: its form differs; names the component.
    """
    name = f"{_name(source)}.read"
    try:
        tf.nest.assert_same_structure(source.stored_spec, returned, check_types=False)
    except (TypeError, ValueError):
        raise SourceError(
            f"{name} returned {_describe(returned)}, and the source's spec has {_describe(source.stored_spec)}; "
            "return an array [n, ...] for each Spec, in the same tuples and dicts"
        ) from None

    def as_array(spec: Spec, value) -> np.ndarray:
        array = to_array(value)
        if array.ndim == 0 or len(array) != examples:
            count = "a single value" if array.ndim == 0 else f"{len(array)} examples"
            raise SourceError(
                f"{name} was called for {examples} examples and returned {count}; return one for each index"
            )
        if not fits(array.shape[1:], spec):
            raise SourceError(
                f"{name} returned examples of shape {[*array.shape[1:]]}, and the source's spec has {[*spec.shape]}"
            )
        if spec.dtype.kind == "O":
            can_hold = array.dtype.kind in "OSU"
        else:  # float64, NumPy's default, may be rounded
            can_hold = np.can_cast(array.dtype, spec.dtype, "safe") or (array.dtype.kind == spec.dtype.kind == "f")
        if not can_hold:
            dtype = "strings (object)" if spec.dtype == object else str(spec.dtype)
            raise SourceError(f"{name} returned {array.dtype}, and the source's spec has {dtype}; convert it by astype")
        return array.astype(spec.dtype, copy=False)

    return tf.nest.map_structure(as_array, source.stored_spec, returned)


def fits(shape: Sequence[int], spec: Spec) -> bool:
    """Returns whether an example of this shape is one of a spec."""
    return len(shape) == len(spec.shape) and all(b in (a, None) for a, b in zip(shape, spec.shape, strict=True))


def _describe(nest: Any) -> str:
    """Describes a nest's form in a few words, including what is not an array."""
    if isinstance(nest, dict):
        kinds = {name: _describe(value) for name, value in nest.items()}
        return "a dict of " + ", ".join(f"{k}" if kind == _ARRAY else f"{k} ({kind})" for k, kind in kinds.items())
    if isinstance(nest, (tuple, list)):
        components = [_describe(value) for value in nest] if isinstance(nest, tuple) else []
        within = f" ({', '.join(components)})" if {*components} - {_ARRAY} else ""
        return f"a {type(nest).__name__} of {len(nest)}{within}"
    return _ARRAY if isinstance(nest, (Spec, np.ndarray)) else f"a {type(nest).__name__}"


def _name(source: Source) -> str:
    while isinstance(source, WrappedSource):
        source = source.source
    return type(source).__name__


def _size(array: np.ndarray) -> int:
    """Bytes of an array; of strings their own, where NumPy would count references."""
    return sum(map(len, array.ravel())) if array.dtype == object else array.nbytes
