"""A `keras.utils.PyDataset` as a source: batches that Python code makes, read by the numbers of their examples."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from .frames import as_float32
from .source import Source, SourceError, Spec


class OfBatches(Source):
    """The examples of a `PyDataset`, whose batches are of one size, but for a smaller last one.

    Args:
      batches: the dataset; one of several `workers` is read by several threads at once.

    Raises:
      SourceError: it has no batch, or no end, or gives no batch of arrays.
    """

    def __init__(self, batches: tf.keras.utils.PyDataset):
        self._batches, self._name = batches, type(batches).__name__
        self._lock = contextlib.nullcontext() if batches.workers > 1 else threading.Lock()
        number = batches.num_batches
        if not number:
            mistake = "never ends" if number is None else "has no batch"
            raise SourceError(f"{self._name} {mistake}; return from its __len__ how many batches an epoch has")
        self._read_first: dict[int, Any] = {}  # so that a batch that was read for its form is not read again
        first, last = self._batch(0, is_first=True), self._batch(number - 1)
        self._read_first = {0: first, number - 1: last}
        self.chunk_examples = self._size(first)
        self._examples = (number - 1) * self.chunk_examples + self._size(last)
        self.element_spec = tf.nest.map_structure(lambda x: Spec(x.shape[1:], x.dtype), first)
        if type(batches).on_epoch_end is not tf.keras.utils.PyDataset.on_epoch_end:
            logging.warning("%s.on_epoch_end is not called: the run has an order of its own in each epoch", self._name)

    def __len__(self) -> int:
        return self._examples

    def read(self, indices: np.ndarray) -> Any:
        numbers, places = indices // self.chunk_examples, indices % self.chunk_examples
        gathered = None
        for number in np.unique(numbers):
            batch, rows = self._batch(int(number)), np.flatnonzero(numbers == number)
            wanted = min(self.chunk_examples, self._examples - int(number) * self.chunk_examples)
            if self._size(batch) != wanted:
                raise SourceError(
                    f"{self._name}[{number}] has {self._size(batch)} examples, and its first batch "
                    f"{self.chunk_examples}; make all but the last of one size"
                )
            if gathered is None:
                gathered = tf.nest.map_structure(lambda x: np.empty([len(indices), *x.shape[1:]], x.dtype), batch)
            for to, array in zip(tf.nest.flatten(gathered), tf.nest.flatten(batch), strict=True):
                to[rows] = array[places[rows]]
        return gathered

    def _batch(self, number: int, is_first: bool = False) -> Any:
        if (known := self._read_first.pop(number, None)) is not None:
            return known
        with self._lock:
            batch = self._batches[number]
        batch = tuple(batch) if isinstance(batch, list) else batch
        batch = tf.keras.tree.lists_to_tuples(batch)
        arrays = tf.nest.map_structure(np.asarray, batch)
        for part, array in zip(tf.nest.flatten(batch), tf.nest.flatten(arrays), strict=True):
            if not array.ndim or array.dtype == object:
                raise SourceError(
                    f"{self._name}[{number}] holds a {type(part).__name__}, and is not a batch of dense arrays; return "
                    "(features, labels), an array each"
                )
        return tf.nest.map_structure(lambda x: as_float32(x, is_first), arrays)

    def _size(self, batch) -> int:
        return len(tf.nest.flatten(batch)[0])
