"""Arrays: a source of examples in memory or in a file, and their tensors on devices.

Pages of a memory map (`np.memmap`, `np.load` with `mmap_mode`) that were read count as the process's memory, in
addition to copies. So they are released after each piece; the system caches them while it has room. Sparse arrays stay
sparse, and are read as dense examples. Arrays on a device are gathered there.
"""

from __future__ import annotations

import copy
import functools
import mmap
from typing import Any

import numpy as np
import tensorflow as tf

from ..internals.tensorflow import weak_method
from .frames import to_array
from .source import Source, Spec

_LARGE_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20
_AROUND_BYTES = 2 << 20  # Linux may map this much around a requested page


class Mapped:
    """An array [examples, ...] in a file; `[...]` reads examples by an int, a slice or indices, as NumPy arrays.

    Args:
      array: a memory map, or anything that has `shape` and `dtype` and reads slices, as HDF5's and Zarr's do.
    """

    _first = 0  # example of the array

    def __init__(self, array: Any):
        self._array = array
        # TensorFlow has no other byte order than the machine's; files may have.
        self.dtype = array.dtype.newbyteorder("=")
        self.shape, self.ndim = tuple(array.shape), len(array.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def astype(self, dtype) -> Mapped:
        return self._with(dtype=np.dtype(dtype))

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, examples) -> np.ndarray:
        if isinstance(examples, slice):
            first, stop, stride = examples.indices(len(self))
            values = np.empty((len(range(first, stop, stride)), *self.shape[1:]), self.dtype)
            first += self._first
            self._read(values, lambda start, end: self._array[first + start * stride : first + end * stride : stride])
            return values
        indices = np.asarray(examples)
        flat = indices.reshape(-1) + self._first
        values = np.empty((len(flat), *self.shape[1:]), self.dtype)
        self._read(values, lambda start, end: self._examples_at(flat[start:end]), _AROUND_BYTES)
        return values.reshape((*indices.shape, *self.shape[1:]))

    def copy_to(self, target: np.ndarray) -> None:
        """Fills an array of this one's shape and dtype."""
        self._read(target, lambda start, end: self._array[self._first + start : self._first + end])

    def view(self, examples: slice) -> Mapped:
        first, stop, stride = examples.indices(len(self))
        if stride != 1:
            raise ValueError("a view of examples is of examples that follow each other")
        return self._with(shape=(stop - first, *self.shape[1:]), _first=self._first + first)

    def _with(self, **attributes: Any) -> Mapped:
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def _examples_at(self, numbers: np.ndarray) -> np.ndarray:
        if isinstance(self._array, np.ndarray):
            return self._array[numbers]
        # Few libraries take numbers in any order, all take slices: each example is read once, neighbours together.
        ascending, places = np.unique(numbers, return_inverse=True)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) > 1) + 1)
        return np.concatenate([to_array(self._array[int(run[0]) : int(run[-1]) + 1]) for run in runs])[places]

    def _read(self, target: np.ndarray, read, around: int = 0) -> None:
        """Fills `target`, whose examples start to end are `read(start, end)`."""
        an_example = max(1, self._array.dtype.itemsize * int(np.prod(self.shape[1:])))
        examples = max(1, _PIECE_BYTES // (an_example + around))
        for start in range(0, len(target), examples):
            end = min(start + examples, len(target))
            target[start:end] = to_array(read(start, end))
            if (file := _mapped_file(self._array)) is not None:
                file.madvise(mmap.MADV_DONTNEED)


class _InMemory(Mapped):
    """An array in memory; an example has the entries from its own `_starts` up to the next example's."""

    _starts: np.ndarray

    def view(self, examples: slice) -> Mapped:
        first, stop, _ = examples.indices(len(self))
        return super().view(examples)._with(_first=0, _starts=self._starts[first : stop + 1])

    def copy_to(self, target: np.ndarray) -> None:
        target[:] = self[:]


class RaggedArray(_InMemory):
    """A ragged array [examples, length, ...] in memory; `[...]` reads an array of the examples' arrays.

    Args:
      ragged: a `tf.RaggedTensor` of ragged rank 1.
    """

    def __init__(self, ragged: tf.RaggedTensor):
        self.values, self._starts = ragged.values.numpy(), ragged.row_splits.numpy()
        self.shape, self.dtype = (len(self._starts) - 1, None, *self.values.shape[1:]), self.values.dtype
        self.ndim = len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(self._starts[-1] - self._starts[0]) * int(np.prod(self.shape[2:])) * self.dtype.itemsize

    def as_tensor(self) -> tf.RaggedTensor:
        first, last = self._starts[[0, -1]]
        return tf.RaggedTensor.from_row_splits(self.values[first:last].astype(self.dtype), self._starts - first)

    def __getitem__(self, examples) -> np.ndarray:
        indices = np.arange(len(self))[examples]
        values = np.empty(indices.size, object)
        for number, at in enumerate(indices.reshape(-1)):
            values[number] = self.values[self._starts[at] : self._starts[at + 1]].astype(self.dtype, copy=False)
        # Of a single example, an array without axes, () takes the example itself.
        return values.reshape(indices.shape)[()]


class Sparse(_InMemory):
    """A sparse array, SciPy's or a `tf.SparseTensor`, [examples, ...] in memory; `[...]` reads dense examples."""

    def __init__(self, matrix: Any):
        if isinstance(matrix, tf.SparseTensor):
            matrix = tf.sparse.reorder(matrix)  # an example's entries have to follow each other
            indices, self._values = matrix.indices.numpy(), matrix.values.numpy()
            self.shape = tuple(matrix.shape.as_list())
            self._starts = np.searchsorted(indices[:, 0], np.arange(self.shape[0] + 1))
            self._columns = np.ravel_multi_index(tuple(indices.T), self.shape) % max(1, int(np.prod(self.shape[1:])))
        else:
            csr = matrix.tocsr()
            csr.sum_duplicates()  # SciPy adds up entries of one place; `__getitem__` would keep the last
            self.shape, self._starts, self._columns, self._values = csr.shape, csr.indptr, csr.indices, csr.data
        self.dtype, self.ndim = self._values.dtype, len(self.shape)

    def __getitem__(self, examples) -> np.ndarray:
        indices = np.arange(len(self))[examples]
        flat = indices.reshape(-1)
        counts = self._starts[flat + 1] - self._starts[flat]
        entries = np.arange(counts.sum()) + np.repeat(self._starts[flat] - (np.cumsum(counts) - counts), counts)
        values = np.zeros((len(flat), int(np.prod(self.shape[1:]))), self.dtype)
        values[np.repeat(np.arange(len(flat)), counts), self._columns[entries]] = self._values[entries]
        return values.reshape((*indices.shape, *self.shape[1:]))


class ArraySource(Source):
    """Examples in arrays, gathered where they are: on a device, on the host, in a mapped file.

    Args:
      arrays: nest of arrays [examples, ...], those in files `Mapped`.
    """

    def __init__(self, arrays: Any):
        self._arrays = arrays
        self.element_spec = tf.nest.map_structure(
            lambda array: Spec(array.shape[1:], array.dtype, isinstance(array, RaggedArray)), arrays
        )

    def __len__(self) -> int:
        return len(tf.nest.flatten(self._arrays)[0])

    def as_arrays(self) -> Any:
        return self._arrays

    def read(self, indices: np.ndarray) -> Any:
        return tf.nest.map_structure(lambda array: np.asarray(array[indices]), self._arrays)

    def between(self, first: int, stop: int) -> Source:
        def between(array):
            return array.view(slice(first, stop)) if isinstance(array, Mapped) else array[first:stop]

        return ArraySource(tf.nest.map_structure(between, self._arrays))

    def gather(self, indices: tf.Tensor, seeds: Any, stored: Any) -> Any:
        with tf.device("CPU:0"):
            return self.gather_from(self._on_host, indices)

    def gather_from(self, stored: Any, indices: tf.Tensor) -> Any:
        """Gathers examples from the arrays as stored on a device (`for_device`) or on the host. In a graph."""
        return tf.nest.map_structure(lambda x, array: gather_examples(x, indices, array), stored, self._arrays)

    @functools.cached_property
    def _on_host(self) -> Any:
        # Once, and eagerly: a graph refers to tensors, but copies arrays, at most 2 GiB.
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.nest.map_structure(
                lambda array: array if isinstance(array, Mapped) else tf.convert_to_tensor(array), self._arrays
            )


def is_sparse(array) -> bool:
    """Returns whether an array is SciPy's sparse matrix or a `tf.SparseTensor`."""
    return isinstance(array, tf.SparseTensor) or (hasattr(array, "tocsr") and hasattr(array, "toarray"))


def as_dense(array) -> Any:
    """Converts anything like an array, to a NumPy array, a ragged one to a `RaggedArray`."""
    return Sparse(array)[:] if is_sparse(array) else RaggedArray(array) if is_ragged(array) else to_array(array)


def is_ragged(array) -> bool:
    """Returns whether an array is a `tf.RaggedTensor` that a `RaggedArray` can hold."""
    return isinstance(array, tf.RaggedTensor) and array.ragged_rank == 1


def wrap(array):
    """Wraps an array in a file, a sparse or a ragged one, as a `Mapped`; converts others, see `to_array`."""
    if is_ragged(array):
        return RaggedArray(array)
    if is_sparse(array):
        return Sparse(array)
    if isinstance(array, np.ndarray):
        has_file = _mapped_file(array) is not None
    else:
        has_file = all(hasattr(array, name) for name in ("shape", "__getitem__")) and not hasattr(array, "__dlpack__")
    has_numbers = isinstance(dtype := getattr(array, "dtype", None), np.dtype) and dtype.kind in "biuf"
    if has_file and has_numbers and len(array.shape):
        return Mapped(array)
    return to_array(array) if hasattr(array, "__array__") else array


def _mapped_file(array: np.ndarray | None) -> mmap.mmap | None:
    """Returns the memory map that an array is a view of, or None.

    Also None for a copy-on-write map (mode "c"), whose changes releasing pages would undo.
    """
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and isinstance(file := getattr(array, "_mmap", None), mmap.mmap):
            return file if array.mode in ("r", "r+", "w+") else None
        array = array.base
    return None


def as_tensor(array) -> tf.Tensor:
    """Converts the whole array. A large one is copied once, one in a file read into the tensor's own memory."""
    in_file = isinstance(array, Mapped)
    is_large = isinstance(array, np.ndarray) and array.nbytes >= _LARGE_BYTES  # TensorFlow would copy it twice
    if not (in_file or is_large) or array.dtype.kind not in "iuf" or not array.nbytes:
        return tf.convert_to_tensor(array)
    memory = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)  # aligned to a page
    if in_file:
        array.copy_to(memory)
    else:
        memory[...] = array
    return tf.experimental.dlpack.from_dlpack(memory.__dlpack__())


def is_on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether replicas compute on GPUs, to which the host's data is copied."""
    return tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).device_type == "GPU"


def on_each_device(strategy: tf.distribute.Strategy, arrays):
    """Copies the nest's arrays once to each device, as per-replica values. A process's CPU devices share one copy."""
    with tf.device("CPU:0"):
        on_host = tf.nest.map_structure(as_tensor, arrays)
    copies = []
    for device in strategy.extended.worker_devices:
        with tf.device(device):
            copies.append(tf.nest.map_structure(tf.identity, on_host))
    if len(copies) == 1:
        return copies[0]

    def per_replica(*copies):
        in_order = iter(copies)  # this host's replicas come in the order of its devices
        return strategy.experimental_distribute_values_from_function(lambda _: next(in_order))

    return tf.nest.map_structure(per_replica, *copies)


def for_device(array, on_gpus: bool):
    """Converts an array to what devices store, for `gather_examples`.

    On GPUs int32 becomes float32 with the same bits, since TensorFlow keeps int32 in host memory there.
    """
    is_int32 = isinstance(array, np.ndarray) and array.dtype == np.int32
    return np.ascontiguousarray(array).view(np.float32) if on_gpus and is_int32 else array


def gather_examples(stored: Any, indices: tf.Tensor, array: Any) -> tf.Tensor:
    """Gathers examples of `array` from what is stored of it, a tensor or itself, by index. In a graph."""
    if isinstance(stored, Mapped):
        # TensorFlow keeps functions called in a graph until the process ends, and with this one an open file.
        nothing = np.zeros((0, *stored.shape[1:]), stored.dtype)
        get = weak_method(stored.__getitem__, lambda: nothing)
        return tf.numpy_function(get, [indices], stored.dtype, stateful=False)
    gathered = tf.gather(stored, indices)
    # Last, since TensorFlow's GPU kernels have int32 on the host only.
    is_int32 = stored.dtype == tf.float32 and getattr(array, "dtype", None) == np.int32
    return tf.bitcast(gathered, tf.int32) if is_int32 else gathered
