"""The contract of a source: examples with random access, in memory or in files. Needs no TensorFlow."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import errno
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from ..errors import BadRecordError


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape and dtype of one array of an example, like `tf.TensorSpec`.

    Attributes:
      shape: shape of one example, without an axis of examples. None for dimensions that differ between examples, the
        first ones.
      dtype: NumPy dtype in the machine's byte order, also if made from a TensorFlow one; `object` is strings.
      is_ragged: whether the examples came as a `tf.RaggedTensor`, which a Keras model then gets.
      has_lengths: whether sizes in unknown dimensions are the examples' own, not those of padding.

    Example:
      >>> Spec([28, 28], "float32").nbytes
      3136
    """

    shape: Sequence[int | None]
    dtype: Any
    is_ragged: bool = dataclasses.field(default=False, repr=False)
    has_lengths: bool = dataclasses.field(default=True, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        dtype = np.dtype(getattr(self.dtype, "as_numpy_dtype", self.dtype))
        object.__setattr__(self, "dtype", dtype.newbyteorder("="))

    @property
    def size(self) -> int:
        """The number of values of one example's array; an unknown dimension counts as 1."""
        return math.prod(1 if x is None else x for x in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one example's array in memory; a string counts as a reference, an unknown dimension as 1."""
        return self.size * self.dtype.itemsize

    @property
    def unknown(self) -> int:
        """The number of unknown dimensions."""
        return self.shape.count(None)


def unknown_dimensions(spec: Any) -> int:
    """Returns the number of unknown dimensions of an example, a nest of `Spec`."""
    if isinstance(spec, Spec):
        return spec.unknown
    return sum(map(unknown_dimensions, spec.values() if isinstance(spec, dict) else spec))


# Errors of disks and networks that may be temporary.
_TRANSIENT = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOLINK, errno.ESHUTDOWN),
}

# Of remote files in TensorFlow: its statuses, and libcurl's text for a name that isn't known yet, a FailedPrecondition.
_TRANSIENT_IN_TENSORFLOW = ("UnavailableError", "DeadlineExceededError", "AbortedError")
_UNRESOLVED = "Could not resolve host"


def is_transient(error: BaseException) -> bool:
    """Returns whether an error of the system, or of a library whose message quotes it, may be temporary."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT
    if type(error).__name__ in _TRANSIENT_IN_TENSORFLOW:
        return True
    return any(text in str(error) for text in (_UNRESOLVED, *map(os.strerror, _TRANSIENT)))


class Split(abc.ABC):
    """Examples for training or evaluation: a `Source`, or a `Stream` (`engine.data.streamed`).

    Attributes:
      element_spec: nest of `Spec`, one example in one of the forms of `engine.data.form`.
      by_index: whether examples can be read by index; otherwise they come in sequence.
      batch_examples: the default batch size of runs on it; None: no default.
      buckets: the lengths by which examples are batched (`engine.data.buckets.LengthBuckets`); None: batches have any.
    """

    element_spec: Any
    by_index: bool
    batch_examples: int | None = None
    buckets: Any = None

    def as_arrays(self) -> Any:
        """Returns all examples as a nest of arrays [examples, ...] if they are in memory; else None."""
        return None

    def read_labels(self) -> np.ndarray | None:
        """Returns the labels of all examples, [examples, ...], if the rest need not be read for them; else None."""
        return None

    def identity(self) -> str:
        """Returns text that identifies the examples without reading them, e.g. files' names and sizes; "" if none."""
        return ""

    def files(self) -> Sequence[str]:
        """Returns the paths of the files that it reads, if known."""
        return ()


class Source(Split):
    """Examples that can be read by index, in any order and repeatedly.

    The engine does the rest: order, epochs, batches, replicas, workers, and resuming. A source knows nothing of these,
    and keeps no position.

    Attributes:
      element_spec: nest of `Spec`, one example in one of the forms of `engine.data.form`.
      chunk_examples: how many consecutive examples to read at once: 1 if single examples are read fast, as from memory
        or a warm disk; more for remote files, or files read in pieces. Such a source is shuffled by chunks
        (`engine.data.order.ChunkedOrder`), all of this size except the last.
      is_random: whether an example differs between epochs, e.g. if `decode` uses its seeds.
      varies: whether `read` itself may return another example for an index in another epoch, which is then read only
        after the steps of the epoch before.
      by_epoch: whether an epoch may be read only between `begin_epoch` and `end_epoch`; the source then `varies`.
      read_threads: number of threads that call `read`.
      preprocessing_digest: identifies what was fitted to data to make examples, such as words and means.

    Example:
      >>> class Squares(Source):
      ...     element_spec = (Spec([1], "float32"), Spec([], "int32"))
      ...     def __len__(self):
      ...         return 1000
      ...     def read(self, indices):
      ...         return indices[:, None].astype("float32") ** 2, (indices % 2).astype("int32")
      >>> Squares().read(np.array([3, 2]))[0].tolist()
      [[9.0], [4.0]]
    """

    by_index: Literal[True] = True
    chunk_examples: int = 1
    is_random: bool = False
    varies: bool = False
    by_epoch: bool = False
    read_threads: int = 2  # one waits for the disk while another parses
    preprocessing_digest: int = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples, without reading them."""

    @abc.abstractmethod
    def read(self, indices: np.ndarray) -> Any:
        """Reads examples. Called by several threads at once, with hundreds of indices or more.

        Args:
          indices: [n] int64, in any order; a whole chunk comes in ascending order.

        Returns:
          Nest of arrays [n, ...], see `stored_spec`. For a `Spec` with unknown dimensions, a list of n arrays.

        Raises:
          BadRecordError: an example can't be read, and others can.
          SourceError: the files can't be read, or have changed.
        """

    @property
    def stored_spec(self) -> Any:
        """Nest of `Spec` of the results of `read`; if it is not `element_spec`, `decode` converts them."""
        return self.element_spec

    def decode(self, stored: Any, seeds: Any) -> Any:
        """Converts what `read` has returned to examples. TensorFlow code, traced once.

        Args:
          stored: nest of tensors [n, ...].
          seeds: [n, 2] int64, different for each (seed, epoch, example), for `tf.random.stateless_*`.

        Returns:
          Nest of tensors [n, ...], see `element_spec`.
        """
        return stored

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Returns the sizes of examples' unknown dimensions, [n, dimensions] int; None if only reading shows them.

        Required if there are any and `decode` makes them.

        Args:
          indices: [n] int64.
        """
        return None

    def gather(self, indices: Any, seeds: Any, stored: Callable[[Any], Any]) -> Any:
        """Returns examples by their indices. TensorFlow code, traced once, on the device that reads.

        Args:
          indices: [n] int64.
          seeds: [n, 2] int64, see `decode`.
          stored: returns for indices what `read` returns, as a nest of tensors [n, ...].

        Returns:
          Nest of tensors [n, ...], see `element_spec`.
        """
        return self.decode(stored(indices), seeds)

    def begin_epoch(self, epoch: int) -> None:
        """Called before an epoch is read, or continued after a resume; ends an unfinished earlier epoch."""

    def end_epoch(self) -> None:
        """Called after an epoch, if no other begins."""

    def verify(self, indices: np.ndarray, stored: Any) -> None:
        """Raises `BadRecordError` for an example that `read` has returned and `decode` can't decode.

        Called if bad examples may be skipped, and after decoding has failed, to find the example.

        Args:
          indices: [n] int64.
          stored: what `read` has returned for them.
        """
        del indices, stored  # by default what `read` returns is valid

    def ids(self, indices: np.ndarray) -> Sequence[str] | None:
        """Returns names for examples, such as their files, for results written about them; None if they have none.

        Args:
          indices: [n] int64.
        """
        return None

    def for_evaluation(self) -> Source:
        """Returns the same examples for evaluation: without randomness."""
        return self

    def between(self, first: int, stop: int) -> Source:
        """Returns the examples [first, stop)."""
        return SourceSlice(self, first, stop)


class WrappedSource(Source):
    """A source that wraps another and reads from it."""

    def __init__(self, source: Source):
        self.source = source
        self.element_spec = source.element_spec
        self._copy_attributes()

    def _copy_attributes(self) -> None:
        source = self.source
        self.chunk_examples, self.read_threads = source.chunk_examples, source.read_threads
        self.is_random, self.varies, self.by_epoch = source.is_random, source.varies, source.by_epoch
        self.buckets, self.batch_examples = source.buckets, source.batch_examples
        self.preprocessing_digest = source.preprocessing_digest

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray) -> Any:
        return self.source.read(indices)

    @property
    def stored_spec(self) -> Any:
        return self.source.stored_spec

    def decode(self, stored: Any, seeds: Any) -> Any:
        return self.source.decode(stored, seeds)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self.source.lengths(indices)

    def read_labels(self) -> np.ndarray | None:
        return self.source.read_labels()

    def begin_epoch(self, epoch: int) -> None:
        self.source.begin_epoch(epoch)

    def end_epoch(self) -> None:
        self.source.end_epoch()

    def verify(self, indices: np.ndarray, stored: Any) -> None:
        self.source.verify(indices, stored)

    def ids(self, indices: np.ndarray) -> Sequence[str] | None:
        return self.source.ids(indices)

    def for_evaluation(self) -> Source:
        wrapped = copy.copy(self)
        wrapped.source = self.source.for_evaluation()
        wrapped._copy_attributes()
        return wrapped

    def identity(self) -> str:
        return self.source.identity()

    def files(self) -> Sequence[str]:
        return self.source.files()


class SourceSlice(WrappedSource):
    """The examples [first, stop) of a source."""

    def __init__(self, source: Source, first: int, stop: int):
        super().__init__(source)
        self._range = range(first, stop)

    def __len__(self) -> int:
        return len(self._range)

    def read(self, indices: np.ndarray) -> Any:
        with self._from_first():
            return self.source.read(indices + self._range.start)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        with self._from_first():
            return self.source.lengths(indices + self._range.start)

    def read_labels(self) -> np.ndarray | None:
        labels = self.source.read_labels()
        return None if labels is None else labels[self._range.start : self._range.stop]

    def verify(self, indices: np.ndarray, stored: Any) -> None:
        with self._from_first():
            self.source.verify(indices + self._range.start, stored)

    def ids(self, indices: np.ndarray) -> Sequence[str] | None:
        return self.source.ids(indices + self._range.start)

    @contextlib.contextmanager
    def _from_first(self) -> Iterator[None]:
        # The source names a bad example by its own count, and readers of the slice count from its first example.
        try:
            yield
        except BadRecordError as error:
            raise BadRecordError(error.example - self._range.start, error.message) from None

    def identity(self) -> str:
        return f"{self._range.start}:{self._range.stop} of {self.source.identity()}"


class WithoutBadRecords(WrappedSource):
    """A source that replaces bad examples, up to a number, each by the next good one.

    The replacement depends only on the examples, so it is the same on all workers and after a resume. One more than
    `limit` is an error; `warn` gets the warning of each skipped example, once.

    Attributes:
      bad: the problems of the examples skipped so far, by index.
    """

    def __init__(self, source: Source, limit: int, warn: Callable[[str], None]):
        super().__init__(source)
        self._limit, self._warn = limit, warn
        self.bad: dict[int, str] = {}

    def read(self, indices: np.ndarray) -> Any:
        while True:
            wanted = np.array(indices)
            for example in [*self.bad]:  # few, usually none
                wanted[wanted == example] = self._next_good(example)
            try:
                stored = self.source.read(wanted)
                self.source.verify(wanted, stored)
                return stored
            except BadRecordError as error:
                self._leave_out(error)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        self.read(indices)  # which finds the bad ones among them
        return self.source.lengths(np.array([self._next_good(example) for example in indices.tolist()], np.int64))

    def ids(self, indices: np.ndarray) -> Sequence[str] | None:
        return self.source.ids(np.array([self._next_good(example) for example in indices.tolist()], np.int64))

    def _leave_out(self, error: BadRecordError) -> None:
        if error.example in self.bad:
            return  # another thread has found it meanwhile
        # One has to be left, to stand for all others.
        if len(self.bad) >= min(self._limit, len(self) - 1):
            raise BadRecordError(
                error.example,
                f"{error.message}; max_bad_records={self._limit} are left out already; allow more",
            )
        self.bad[error.example] = error.message
        self._warn(f"{error.message}; left out, as {len(self.bad)} of the {self._limit} that max_bad_records allows")

    def _next_good(self, example: int) -> int:
        while example in self.bad:
            example = (example + 1) % len(self)
        return example
