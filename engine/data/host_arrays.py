"""Arrays on the host, on their way to replicas: in memory, or in a file that is read piece by piece. Host code.

All that was read of a memory map (`np.memmap`, `np.load` with `mmap_mode`) counts as the process's memory, and a copy
comes on top. Here the pages are released after each piece; the system caches them as long as it has room.
"""

from __future__ import annotations

import mmap

import numpy as np
import tensorflow as tf

from ..internals.tensorflow import weakly

_PIECE_BYTES = 64 << 20
_AROUND_BYTES = 2 << 20  # Linux may map as much around a requested page, where it is cached in one piece


class Mapped:
    """An array [examples, ...] in a file, which `[...]` reads by examples, an int, a slice or indices, as NumPy arrays.

    Args:
      array: a memory map, or a view of one.
      dtype: of the values that are returned.
    """

    def __init__(self, array: np.ndarray, dtype: np.dtype):
        self._array = array
        self.dtype = np.dtype(dtype)
        self.shape, self.ndim = array.shape, array.ndim

    @property
    def nbytes(self) -> int:
        return self._array.size * self.dtype.itemsize

    def astype(self, dtype) -> Mapped:
        return Mapped(self._array, dtype)

    def __len__(self) -> int:
        return len(self._array)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, examples) -> np.ndarray:
        if isinstance(examples, slice):
            first, stop, stride = examples.indices(len(self))
            found = np.empty((len(range(first, stop, stride)), *self.shape[1:]), self.dtype)
            self._read(found, lambda start, end: self._array[first + start * stride : first + end * stride : stride])
            return found
        indices = np.asarray(examples)
        flat = indices.reshape(-1)
        found = np.empty((len(flat), *self.shape[1:]), self.dtype)
        self._read(found, lambda start, end: self._array[flat[start:end]], _AROUND_BYTES)
        return found.reshape((*indices.shape, *self.shape[1:]))

    def copy_to(self, target: np.ndarray) -> None:
        """Fills an array of this one's shape and dtype."""
        self._read(target, lambda start, end: self._array[start:end])

    def view(self, examples: slice) -> Mapped:
        return Mapped(self._array[examples], self.dtype)

    def _read(self, target: np.ndarray, read, around: int = 0) -> None:
        """Fills `target`, whose examples start to end are `read(start, end)`."""
        an_example = max(1, self._array.dtype.itemsize * int(np.prod(self.shape[1:])))
        examples = max(1, _PIECE_BYTES // (an_example + around))
        for start in range(0, len(target), examples):
            end = min(start + examples, len(target))
            target[start:end] = read(start, end)
            _file_of(self._array).madvise(mmap.MADV_DONTNEED)


def of(array):
    """Returns an array as it is to be read: `Mapped`, if it lies in a file; else itself."""
    has_file = isinstance(array, np.ndarray) and array.ndim and array.dtype.kind in "biuf" and _file_of(array)
    return Mapped(array, array.dtype) if has_file else array


def view(array, examples: slice):
    """Returns some examples of an array, without copying them."""
    return array.view(examples) if isinstance(array, Mapped) else array[examples]


def _file_of(array: np.ndarray) -> mmap.mmap | None:
    """Returns the memory map that an array is a view of; None if there is none.

    Also None for a map that keeps changes to itself (mode "c"): releasing its pages would undo them.
    """
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and isinstance(found := getattr(array, "_mmap", None), mmap.mmap):
            can_be_dropped = array.mode in ("r", "r+", "w+") and hasattr(mmap, "MADV_DONTNEED")
            return found if can_be_dropped else None
        array = array.base
    return None


def to_gather_from(array):
    """Returns what `gather` takes."""
    return array if isinstance(array, Mapped) else tf.convert_to_tensor(array)


def gather(array, indices: tf.Tensor) -> tf.Tensor:
    """Gathers examples of an array by their indices, in a graph."""
    with tf.device("CPU:0"):
        if isinstance(array, Mapped):
            nothing = np.zeros((0, *array.shape[1:]), array.dtype)
            get = weakly(array.__getitem__, lambda: nothing)
            found = tf.numpy_function(get, [indices], array.dtype, stateful=False)
            return tf.ensure_shape(found, [*indices.shape, *array.shape[1:]])
        return tf.gather(array, indices)


def as_tensor(array) -> tf.Tensor:
    """Converts the whole array. One in a file is read into memory that the tensor takes over: there is no copy."""
    if not isinstance(array, Mapped):
        return tf.convert_to_tensor(array)
    if array.dtype.kind not in "iuf" or not array.dtype.isnative or not array.nbytes:
        return tf.convert_to_tensor(array[:])
    memory = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)  # begins with a page
    array.copy_to(memory)
    return tf.experimental.dlpack.from_dlpack(memory.__dlpack__())
