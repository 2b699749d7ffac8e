"""The feed of external data, passed to a call for some steps or an evaluation: any length, the run's form."""

from __future__ import annotations

import array
import copy
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import SourceError, UsageError
from ...mesh.layout import Mesh
from ..form import longest, padded_to
from ..order import Order, replica_range
from ..reader import checked, example_bytes
from ..source import unknown_dimensions
from ..streamed import Stream, batched, count, untuned
from .feed import CallInput, Feed

_BLOCK_BYTES = 8 << 20  # a call's batches, at most


@dataclasses.dataclass(frozen=True)
class ExternalOrder(Order):
    """An order whose first step may differ from 0.

    Attributes:
      read: for a stream, whose passes may have any length: the number of examples before each step so far, and before
        the next one, so that a call's millionth step costs as much as its first; None for a source.
      parts: number of processes whose examples differ; the order is of this one's, and all have as many.
    """

    first_step: int = 0
    read: array.array | None = None
    parts: int = 1

    def examples_before(self, step: int) -> int:
        step -= self.first_step
        return self.parts * (super().examples_before(step) if self.read is None else self.read[step])


class ExternalFeed(Feed):
    """Reads a call's batches on the host. Its programs take any number of examples.

    Each call has a feed of its own, which `reading` makes. Each epoch is shuffled by (seed, first step, epoch), so two
    calls on the same data differ, and a call is repeated exactly after a resume. A stream that is read for some steps
    continues there in later calls, as long as its `Stream` exists; it is not read ahead of these steps.
    """

    order: ExternalOrder
    batch_size = None
    _next_step: int
    _batch_size: int  # of the present call
    _most_steps: int
    _epoch_order: tuple[int, np.ndarray]

    def __init__(self, num_replicas: int, mesh: Mesh):
        self._mesh = mesh
        self._num_replicas = num_replicas
        self._shared = {"any_size": True}  # by the feeds of all calls
        self.split: Any = None
        self._iterator: Iterator | None = None
        self._left: weakref.WeakKeyDictionary[Stream, Iterator] = weakref.WeakKeyDictionary()  # by earlier calls

    def reading(
        self, split, first_step: int, batch_size: int, seed: int | None = None, steps: int | None = None, parts: int = 1
    ) -> ExternalFeed:
        """Returns the feed of one call's data.

        Args:
          split: a `Source`, or a `Stream`, which is read in its own order.
          batch_size: examples per step, fewer at an epoch's end.
          seed: shuffles each epoch; None keeps the examples' own order.
          steps: number of next steps, if known: then a stream's examples are not counted. None for whole epochs, for
            which a stream is read from its beginning.
          parts: number of processes of which each gives examples of its own, its part of each batch; 1 if all give the
            same.
        """
        if batch_size % parts or self._shards % parts:
            raise UsageError(
                f"a batch of {batch_size} examples does not divide among {parts} workers that each give their own "
                "(auto_shard_policy=off); use a multiple, without a mesh that they share"
            )
        batch_size //= parts
        feed, read = copy.copy(self), None if split.by_index else array.array("q", [0])
        if split.by_index:
            examples = len(split)
        elif steps is not None:
            examples = steps * batch_size
        elif split.length == tf.data.INFINITE_CARDINALITY:
            raise UsageError("the dataset never ends, so it has no epoch; give steps, or dataset.take(examples)")
        else:
            examples = count(split) * (batch_size if split.by_batch else 1)
        left = None if split.by_index else self._left.pop(split, None)
        feed._iterator = None if steps is None else left
        feed.order = ExternalOrder(examples, batch_size, 1, seed, first_step=first_step, read=read, parts=parts)
        fewest, replicas = examples % batch_size or batch_size, self._shards // parts
        if parts > 1 and fewest < replicas:
            raise UsageError(
                f"a batch has {fewest} examples of each worker's own, for its {replicas} replicas; give as many or more"
            )
        feed.split, feed._epoch_order, feed._next_step = split, (-1, np.zeros(0, np.int64)), first_step
        varies = unknown_dimensions(split.element_spec) > 0  # each batch is padded to its own longest example
        feed._most_steps = 1 if varies else max(1, _BLOCK_BYTES // max(1, batch_size * example_bytes(split)))
        return feed

    def max_steps_per_call(self, step: int, limit: int) -> int:
        if not self.split.by_index:
            return 1
        in_epoch = (step - self.order.first_step) % self.order.steps_per_epoch
        return max(1, min(limit, self.order.whole_steps - in_epoch, self._most_steps))

    def call_input(self, step: int, limit: int) -> CallInput:
        steps = self.max_steps_per_call(step, limit)
        if not self.split.by_index:
            examples = self._next()
            batch_size = tf.nest.flatten(examples)[0].shape[0]
            assert self.order.read is not None
            self.order.read.append(self.order.read[-1] + batch_size)
        else:
            epoch, in_epoch = divmod(step - self.order.first_step, self.order.steps_per_epoch)
            first = in_epoch * self.order.batch_size
            indices = self._epoch(epoch)[first : first + steps * self.order.batch_size]
            examples, batch_size = self._read(indices, epoch), len(indices) // steps
            self._next_step = step + steps
        self._batch_size = batch_size
        return CallInput((examples, tf.constant(batch_size, tf.int64)), 0, steps)

    @property
    def any_size(self) -> bool:  # type: ignore[override]
        return self._shared["any_size"]

    @any_size.setter
    def any_size(self, value: bool) -> None:
        self._shared["any_size"] = value

    def traced(self, operands) -> Any:
        examples, batch_size = operands

        def batch_spec(x, spec) -> tf.TensorSpec:
            return tf.TensorSpec([None if self.any_size else x.shape[0], *spec.shape], x.dtype)

        return tf.nest.map_structure(batch_spec, examples, self.split.element_spec), batch_size

    def batch_number(self, step: tf.Tensor) -> tf.Tensor:
        return step  # programs take any number of steps, and evaluations begin at 0

    def next_operands(self, operands, offset: tf.Tensor):
        examples, batch_size = operands
        first = tf.cast(offset, tf.int64) * batch_size
        batch = tf.nest.map_structure(lambda x: x[first : first + batch_size], examples)
        if self.any_size:
            return (batch,)
        return (tf.nest.map_structure(lambda x: tf.ensure_shape(x, [self._batch_size, *x.shape[1:]]), batch),)

    def batch(self, batch):
        shards = self._shards // self.order.parts  # of what this process has read
        if shards == 1:
            return batch
        with tf.device("CPU:0"):  # with the batch: a GPU receives only its examples
            first = tf.nest.flatten(batch)[0]
            size = tf.shape(first)[0] if first.shape[0] is None else first.shape[0]
            start, stop = replica_range(size, self._mesh.data.rank % shards, shards)
            return tf.nest.map_structure(lambda x: x[start:stop], batch)

    @property
    def _shards(self) -> int:
        return self._mesh.batch_shard(0, self._num_replicas)[1]

    def close(self) -> None:
        is_source = self.split is not None and self.split.by_index
        if is_source and (self._next_step - self.order.first_step) % self.order.steps_per_epoch == 0:
            self.split.end_epoch()
        if self._iterator is not None:
            self._left[self.split] = self._iterator
        self.split = self._iterator = None

    def _epoch(self, epoch: int) -> np.ndarray:
        """The order of an epoch, by index: kept while the epoch lasts, since a call reads only a part of it."""
        if self._epoch_order[0] != epoch:
            self.split.begin_epoch(epoch)
            examples, seed = self.order.num_examples, self.order.seed
            order = np.arange(examples)
            if seed is not None:
                np.random.default_rng([seed, self.order.first_step, epoch]).shuffle(order)
            self._epoch_order = epoch, order
        return self._epoch_order[1]

    def _read(self, indices: np.ndarray, epoch: int) -> Any:
        """Reads examples: nest of tensors [n, ...]."""
        with tf.device("CPU:0"):
            stored = tf.nest.map_structure(tf.constant, checked(self.split, self.split.read(indices), len(indices)))
            seeds = tf.constant(np.stack([np.full(len(indices), epoch), indices], -1), tf.int64)
            examples = self.split.decode(stored, seeds)
            return padded_to(longest(examples), examples) if unknown_dimensions(self.split.element_spec) else examples

    def _next(self) -> Any:
        """Returns the next batch of a stream, whose epochs follow one another."""
        # At its end the stream is read again, once: one that then gives nothing can't be.
        for _ in range(2):
            if self._iterator is None:
                examples = self.split.examples(None, tf.constant(0, tf.int64))
                self._iterator = iter(untuned(batched(self.split, examples, self.order.batch_size)))
            if (batch := next(self._iterator, None)) is not None:
                return batch
            self._iterator = None
        raise SourceError(
            f"the dataset has ended after {len(self.order.read or ()) - 1} steps of this call, and gives nothing when "
            "it is read again, as a generator that can be read only once; pass fewer steps, or one that starts again"
        )
