"""Batches made by Python code: a `keras.utils.PyDataset`, read by example index, or a generator, as a stream."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ... import logging
from ...errors import CrankshaftError, SourceError
from ...machine import memory
from .. import form
from ..arrays import RaggedArray, as_dense
from ..frames import as_float32
from ..reader import fits
from ..source import Source, Spec, unknown_dimensions
from ..streamed import Stream, examples_as_tensors
from .array_entry import without_optional

ONE_SIZE = (
    "make all but the last equal, as dataset.unbatch().batch(32) does; accumulate_steps, parameter servers, TPUs and "
    "parts for workers need it"
)
_SILENT_SECONDS = 5.0  # of reading, before a warning
_ARRAY_BYTES = 400  # of an array besides its values, and of its place in a batch


def _without_none(batch: Any) -> Any:
    """Leaves out inputs and last components of a batch that are None; others become ()."""
    batch = tf.keras.tree.lists_to_tuples(batch)
    if not isinstance(batch, tuple):
        return without_optional(batch)
    others = batch[1:]
    while others and others[-1] is None:
        others = others[:-1]
    return without_optional(batch[0]), *(() if component is None else component for component in others)


def _spec(*batches: Any) -> Any:
    """Returns the nest of `Spec` of the examples of batches; dimensions in which these differ are unknown."""

    def spec(*arrays: Any) -> Spec:
        if len(ranks := dict.fromkeys(len(array.shape) for array in arrays)) > 1:
            raise SourceError(f"batches have arrays of {' and '.join(map(str, ranks))} axes; make as many in each")
        sizes = zip(*(array.shape[1:] for array in arrays), strict=True)
        shape = tuple(one if all(other == one for other in others) else None for one, *others in sizes)
        is_ragged = isinstance(arrays[0], RaggedArray)
        has_lengths = is_ragged or len(arrays[0]) == 1 or None not in shape
        return Spec(shape, arrays[0].dtype, is_ragged, has_lengths)

    return tf.nest.map_structure(spec, *batches)


def _other_shape(batch: Any, specs: Any) -> str:
    """Describes how a batch's examples differ from those of the first batches; "" if they fit."""
    for x, spec in zip(tf.nest.flatten(batch), tf.nest.flatten(specs), strict=True):
        if not fits(x.shape[1:], spec):
            return f"examples of shape {[*x.shape[1:]]}, and at first there are {[*spec.shape]}"
    return ""


def _other_sizes(batch: Any) -> str:
    """Describes how arrays of a batch differ in their numbers of examples; "" if they don't."""
    sizes = dict.fromkeys(len(x) for x in tf.nest.flatten(batch))
    if len(sizes) == 1:
        return ""
    shown = ", ".join(map(str, sizes))
    return f"a batch with arrays of {shown} examples; make as many of each, such as one for each graph, by padding"


class BatchSource(Source):
    """The examples of a `PyDataset`, whose batches have one size, except for a smaller last one.

    All batches have the form of the first two and the last, which show whether examples differ in length.

    `__getitem__` may return other values each time, e.g. by random augmentation: it is called again in each epoch, and
    nothing is kept. `on_epoch_begin` and `on_epoch_end`, if any, are called around each epoch; a resumed run first
    calls both for each earlier epoch.

    Args:
      batches: the dataset; with several `workers` it is read by several threads.

    Raises:
      SourceError: it has no batch, or no end, or yields no arrays.
    """

    is_random = varies = True

    def __init__(self, batches: tf.keras.utils.PyDataset):
        self._batches, self._name = batches, type(batches).__name__
        default = tf.keras.utils.PyDataset
        # Only a dataset that overrides one of them can tell when an epoch is read.
        self.by_epoch = any(
            getattr(type(batches), name) is not getattr(default, name) for name in ("on_epoch_begin", "on_epoch_end")
        )
        self.read_threads = max(self.read_threads, batches.workers)
        self._epoch: int | None = None  # the epoch in progress
        self._ended = 0  # epochs
        # With one worker Keras reads it in one thread, and its code may not be made for several.
        self._lock = contextlib.nullcontext() if batches.workers > 1 else threading.Lock()
        number = batches.num_batches
        if not number:
            mistake = "never ends" if number is None else "has no batch"
            raise SourceError(f"{self._name} {mistake}; return from its __len__ how many batches an epoch has")
        self._read_first: dict[int, Any] = {}  # batches read for their form, not to be read again
        numbers = sorted({0, min(1, number - 1), number - 1})
        batches_read = {number: self._batch(number, is_first=not number) for number in numbers}
        first, last = batches_read[0], batches_read[number - 1]
        if not self.by_epoch:
            self._read_first = batches_read
        self.chunk_examples = self.batch_examples = self._size(first)
        self._examples = (number - 1) * self.chunk_examples + min(self._size(last), self.chunk_examples)
        self.element_spec = _spec(*batches_read.values())

    def __len__(self) -> int:
        return self._examples

    def begin_epoch(self, epoch: int) -> None:
        if not self.by_epoch or epoch == self._epoch:
            return
        self.end_epoch()
        if epoch < self._ended:
            logging.warning(
                "%s: epoch %d is read once more; changes that on_epoch_begin and on_epoch_end have made since stay",
                self._name,
                epoch,
            )
        while self._ended < epoch:
            self._batches.on_epoch_begin()
            self._batches.on_epoch_end()
            self._ended += 1
        self._batches.on_epoch_begin()
        self._epoch = epoch

    def end_epoch(self) -> None:
        if self._epoch is not None:
            self._batches.on_epoch_end()
            self._ended, self._epoch = max(self._ended, self._epoch + 1), None

    def for_evaluation(self) -> Source:
        other = copy.copy(self)
        other.by_epoch, other._epoch = False, None  # in training's present state
        return other

    def read(self, indices: np.ndarray) -> Any:
        numbers, offsets = indices // self.chunk_examples, indices % self.chunk_examples
        gathered = None

        def empty(spec: Spec) -> np.ndarray:
            size, shape = len(indices), [x or 0 for x in spec.shape]
            return np.empty(size, object) if spec.unknown else np.empty([size, *shape], spec.dtype)

        for number in np.unique(numbers):
            batch, places = self._batch(int(number)), np.flatnonzero(numbers == number)
            wanted = min(self.chunk_examples, self._examples - int(number) * self.chunk_examples)
            if self._size(batch) != wanted:
                raise SourceError(
                    f"{self._name}[{number}] has {self._size(batch)} examples, and its first batch "
                    f"{self.chunk_examples}; make all but the last of one size"
                )
            if mistake := _other_shape(batch, self.element_spec):
                raise SourceError(
                    f"{self._name}[{number}] has {mistake}; make all of one shape, as by np.pad, or let the first two "
                    "batches differ"
                )
            if gathered is None:
                gathered = tf.nest.map_structure(empty, self.element_spec)
            for to, array in zip(tf.nest.flatten(gathered), tf.nest.flatten(batch), strict=True):
                examples = array[offsets[places]]
                if examples.shape[1:] == to.shape[1:]:
                    to[places] = examples
                else:  # an array of arrays
                    for place, example in zip(places, examples, strict=True):
                        to[place] = example
        return gathered

    def _batch(self, number: int, is_first: bool = False) -> Any:
        if (batch := self._read_first.pop(number, None)) is not None:
            return batch
        with self._lock:
            batch = self._batches[number]
        batch = _without_none(batch)
        arrays = tf.nest.map_structure(as_dense, batch)
        for x, array in zip(tf.nest.flatten(batch), tf.nest.flatten(arrays), strict=True):
            if not array.ndim or array.dtype == object:
                raise SourceError(
                    f"{self._name}[{number}] holds a {type(x).__name__}, and is not a batch of dense arrays; return "
                    "(features, labels), an array each"
                )
        if mistake := _other_sizes(arrays):
            raise SourceError(f"{self._name}[{number}] is {mistake}")
        return tf.nest.map_structure(lambda x: as_float32(x, is_first), arrays)

    def _size(self, batch) -> int:
        return len(tf.nest.flatten(batch)[0])


class GeneratorStream(Stream):
    """The examples of a Python generator, whose batches have one size, except for a smaller last one, or its batches.

    It can be read once: each epoch continues where the previous one stopped. All batches have the form of the first
    two, which tell whether examples differ in length.

    Args:
      batches: yields x, (x, y) or (x, y, weights).
      ends: whether to read the generator to its end, into memory, to know its length; otherwise it counts as endless.
      by_batch: whether its batches are each a step's, if they are, or may be, of other sizes, and of one shape.

    Raises:
      SourceError: it yields nothing, or no batch of arrays.
    """

    batch_examples: int

    def __init__(self, batches: Iterator, ends: bool, by_batch: bool):
        self._name, self._num_read, self._ended_short = type(batches).__name__, 0, False
        self._fault: SourceError | None = None
        arrays = (self._arrays(batch) for batch in batches)
        first = [*itertools.islice(arrays, 2)]
        if not first:
            raise SourceError(f"the {self._name} yields no batch; pass one that has not been read")
        self._batches: Iterator = itertools.chain(first, arrays)
        self.batch_examples = len(tf.nest.flatten(first[0])[0])
        self.element_spec = _spec(*first)
        self.ends, self.length = False, tf.data.INFINITE_CARDINALITY
        may_be_uneven = True
        if ends:
            read = [*self._until_full(self._batches)]
            sizes = [len(tf.nest.flatten(batch)[0]) for batch in read]
            may_be_uneven = len({*sizes[:-1]}) > 1 or sizes[-1] > sizes[0]
            self.ends, self.length, self._batches = True, sum(sizes), iter(read)
        self.by_batch = by_batch and may_be_uneven and not unknown_dimensions(self.element_spec)
        self.divides = not self.by_batch
        if ends and self.by_batch:
            self.length = len(sizes)

    def _until_full(self, batches: Iterator) -> Iterator:
        """Yields batches while they fit into memory; says what goes on, since a generator may never end."""
        left, said_at = memory.available_bytes() / 2, time.monotonic() + _SILENT_SECONDS
        what, fix = f"the {self._name} is read to its end, for the length of an epoch", "give steps_per_epoch"
        for number, batch in enumerate(batches, 1):
            left -= sum(array.nbytes + _ARRAY_BYTES for array in tf.nest.flatten(batch))
            if left < 0:
                raise SourceError(f"{what}, and {number:,} batches fill half of the free memory; {fix}")
            if time.monotonic() > said_at:
                said_at = math.inf
                logging.warning("%s: %s batches so far; if it never ends, %s", what, f"{number:,}", fix)
            yield batch

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        signature = tf.nest.map_structure(form.batch_spec, self.element_spec)
        dataset = tf.data.Dataset.from_generator(self._next, output_signature=signature)
        dataset = dataset if self.by_batch else examples_as_tensors(dataset.unbatch())
        # TensorFlow does not know how many a generator has.
        return dataset.apply(tf.data.experimental.assert_cardinality(self.length))

    def fault(self) -> CrankshaftError | None:
        if self._fault is not None or next(self._batches, None) is not None:
            return self._fault
        return SourceError(
            f"the {self._name} has ended after {self._num_read} batches, and can't be read again; pass a "
            "keras.utils.PyDataset or a tf.data.Dataset, which start again, or fewer epochs or steps_per_epoch"
        )

    def _next(self) -> Iterator:
        for batch in self._batches:
            if mistake := self._mistake(batch):
                self._fault = SourceError(f"the {self._name} yields {mistake}")
                raise self._fault
            size = len(tf.nest.flatten(batch)[0])
            self._num_read, self._ended_short = self._num_read + 1, size < self.batch_examples
            yield tf.nest.map_structure(lambda x: x.as_tensor() if isinstance(x, RaggedArray) else x, batch)

    def _mistake(self, batch: Any) -> str:
        """Describes the problem of a batch, in itself or beside the first; "" if it can be used."""
        if mistake := _other_sizes(batch):
            return mistake
        is_other = self._ended_short or len(tf.nest.flatten(batch)[0]) > self.batch_examples
        if is_other and not self.by_batch:
            return f"batches of {self.batch_examples} examples and, before its end, of another size; {ONE_SIZE}"
        if mistake := _other_shape(batch, self.element_spec):
            return f"{mistake}; make all of one shape, as by np.pad, or let the first two batches differ"
        return ""

    def _arrays(self, batch: Any) -> Any:
        batch = _without_none(batch)
        arrays = tf.nest.map_structure(as_dense, batch)
        if any(not array.ndim or array.dtype == object for array in tf.nest.flatten(arrays)):
            raise SourceError(f"the {self._name} yields no batch of dense arrays; yield (features, labels), arrays")
        return tf.nest.map_structure(as_float32, arrays)
