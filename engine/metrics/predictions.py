"""Per-example values of an evaluation: in memory up to a bound, beyond it in a temporary file."""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from .. import logging
from ..machine import files

_END = b"."  # end of a text in files


class Predictions(dict[str, Any]):
    """The values that `Trainer.predictions` has returned of each example of an evaluation, by name.

    Values are nests of NumPy arrays [examples, ...], entry i that of example i, in the data's own order, or in that of
    batches, if they are made by length (`bucket_by`) or of workers' own files (`auto_shard_policy`); of a partial
    evaluation, the first examples. Text is in arrays of `bytes` objects, bfloat16 is converted to float32. Values whose
    lengths differ among batches are padded with zeros, or b"", to the longest. Large ones, but for text, are read-only
    and in a file (`numpy.memmap`): compute with a slice of them at a time.

    Attributes:
      is_partial: whether the evaluation was of the first batches alone.
    """

    def __init__(self, values: dict[str, Any], is_partial: bool = False):
        super().__init__(values)
        self.num_examples = len(tf.nest.flatten(values)[0])
        self.is_partial = is_partial

    def groups(self, name: str) -> list[np.ndarray]:
        """Returns the indices of each group of examples that have the same value, such as a user's, in their order.

        Args:
          name: the name of an array [examples].
        """
        _, group = np.unique(self[name], return_inverse=True)
        indices = np.argsort(group, kind="stable")
        return np.split(indices, np.cumsum(np.bincount(group))[:-1])


class Collector:
    """Collects arrays [n, ...] of consecutive examples, in memory up to a bound, beyond it in temporary files.

    The files have no names, so they are removed even if the process is killed.

    Args:
      most_bytes: the largest number of bytes to hold in memory.
      directory: the directory of the files; made if missing. None is the system's.
      title: the evaluation's title, for the line that is logged when the files are written.
    """

    def __init__(self, most_bytes: float = math.inf, directory: str | None = None, title: str = ""):
        self._most_bytes, self._directory, self._title = most_bytes, directory, title
        self._columns: list[_Column] = []
        self._structure: Any = None

    def add(self, examples: Any) -> None:
        """Adds a nest of arrays [n, ...], the next examples."""
        arrays = tf.nest.flatten(examples)
        if not self._columns:
            self._structure, self._columns = examples, [_Column() for _ in arrays]
        for column, array in zip(self._columns, arrays, strict=True):
            column.add(array)
        if sum(column.bytes_in_memory for column in self._columns) <= self._most_bytes:
            return
        folder = self._directory or files.temporary_folder()
        if not any(column.file for column in self._columns):
            logging.info(
                "%s: its predictions take more than %.3g MiB, so they are in temporary files in %s",
                self._title,
                self._most_bytes / (1 << 20),
                folder,
            )
        with files.naming(folder):
            for column in self._columns:
                column.write(self._opened)

    def all(self) -> Any:
        """Returns the nest of arrays of all examples."""
        return tf.nest.pack_sequence_as(self._structure, [column.all(self._opened) for column in self._columns])

    def _opened(self) -> IO[bytes]:
        if self._directory:
            os.makedirs(self._directory, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._directory)


class _Column:
    """The chunks of one array: the oldest in a file, if any, the newest in memory."""

    def __init__(self):
        self.file: IO[bytes] | None = None
        self.bytes_in_memory = 0
        self._written: list[np.ndarray] = []  # of no memory, with the chunks' shapes and dtypes
        self._chunks: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> None:
        self._chunks.append(array)
        self.bytes_in_memory += array.nbytes + (sum(map(len, array.flat)) if array.dtype == object else 0)

    def write(self, opened: Callable[[], IO[bytes]]) -> None:
        """Writes the chunks in memory to the file."""
        self.file = self.file or opened()
        for chunk in map(_fixed_width, self._chunks):
            self.file.write(np.ascontiguousarray(chunk).data)
            self._written.append(np.broadcast_to(np.zeros([], chunk.dtype), chunk.shape))
        self._chunks, self.bytes_in_memory = [], 0

    def all(self, opened: Callable[[], IO[bytes]]) -> np.ndarray:
        """Returns all chunks in one array."""
        if self.file is None:
            return joined(self._chunks)
        self.write(opened)
        if len({(chunk.shape[1:], chunk.dtype) for chunk in self._written}) > 1:
            self.file = self._widened(self.file, opened())
        self.file.flush()
        shape, dtype = _common(self._written)
        array = np.memmap(self.file, dtype, "r", shape=shape) if math.prod(shape) else np.zeros(shape, dtype)
        return _objects(array)

    def _widened(self, file: IO[bytes], wider: IO[bytes]) -> IO[bytes]:
        """Copies the file's chunks to another file, padded to the largest; returns that."""
        shape, dtype = _common(self._written)
        file.seek(0)
        for chunk in self._written:
            array = np.frombuffer(file.read(chunk.nbytes), chunk.dtype).reshape(chunk.shape)
            wider.write(_widened(array, shape[1:], dtype).data)
        self._written = [np.broadcast_to(np.zeros([], dtype), shape)]
        return wider


def in_order(pieces: Sequence[Sequence[Any]], exchange: Callable[[bytes], list[bytes]] | None = None) -> list:
    """Joins the predictions that replicas have computed in some steps, in the order of their examples.

    Args:
      pieces: each a list of tensors [n, ...] of the same examples, which are sorted, stably, by the first, int64 [n].
      exchange: `Processes.exchange_bytes`; None if this process has all of them.

    Returns:
      The arrays after the first, of all processes' examples.
    """
    columns = [joined([_array(x) for x in chunks]) for chunks in zip(*pieces, strict=True)]
    if exchange is not None:
        file = io.BytesIO()
        np.savez(file, *map(_fixed_width, columns))
        by_process = [np.load(io.BytesIO(content)) for content in exchange(file.getvalue())]
        columns = [joined([_objects(arrays[name]) for arrays in by_process]) for name in by_process[0].files]
    keys, *columns = columns
    if (np.diff(keys) >= 0).all():
        return columns
    order = np.argsort(keys, kind="stable")
    return [column[order] for column in columns]


def joined(chunks: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays [n, ...], padded with zeros where their other axes differ."""
    if len(chunks) == 1:
        return chunks[0]
    shape, dtype = _common(chunks)
    return np.concatenate([_widened(chunk, shape[1:], dtype) for chunk in chunks])


def _array(tensor: Any) -> np.ndarray:
    array = np.asarray(tensor)
    if array.dtype == tf.bfloat16.as_numpy_dtype:  # NumPy's files lose this type
        return array.astype(np.float32)
    return array


def _fixed_width(array: np.ndarray) -> np.ndarray:
    """Returns text in NumPy's fixed-width type, for files, with an end: NumPy removes zero bytes from values' ends."""
    return np.frompyfunc(lambda text: text + _END, 1, 1)(array).astype("S") if array.dtype == object else array


def _objects(array: np.ndarray) -> np.ndarray:
    """Returns the text that `_fixed_width` was called with; its padding is b""."""
    return np.frompyfunc(lambda text: text[:-1], 1, 1)(array) if array.dtype.kind == "S" else array


def _common(chunks: Sequence[np.ndarray]) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype of arrays [n, ...] in one."""
    sizes = [max(axis) for axis in zip(*(chunk.shape[1:] for chunk in chunks), strict=True)]
    return (sum(map(len, chunks)), *sizes), np.result_type(*(chunk.dtype for chunk in chunks))


def _widened(chunk: np.ndarray, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    if chunk.shape[1:] == tuple(shape) and chunk.dtype == dtype:
        return np.ascontiguousarray(chunk)
    wide = np.full((len(chunk), *shape), b"" if dtype.kind == "O" else np.zeros([], dtype), dtype)
    wide[tuple(map(slice, chunk.shape))] = chunk
    return wide
