"""Blocks of steps: the present one is stored between calls; and the blocks of example indices."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ...internals.tensorflow import runtime
from ...mesh.layout import Mesh
from ..arrays import for_device, is_on_gpus, on_each_device
from ..order import Order, replica_range
from ..streamed import untuned

_AT_ONCE = 8  # blocks of indices


class Blocks:
    """Stores the current block, so that an interrupted block is continued, not read again.

    Args:
      open_at: returns an iterator over blocks, starting at a number.
      transfer: copies a block to where replicas read it, once for all calls; None leaves it.
      by_epoch: whether each epoch has its own iterator, opened after the steps of the one before.
    """

    def __init__(self, order: Order, open_at: Callable, transfer: Callable | None = None, by_epoch: bool = False):
        self._order, self._by_epoch = order, by_epoch
        self._open_at = open_at
        self._transfer = transfer or (lambda block: block)
        self._iterator: Any = None
        self._number: int | None = None
        self._block = None
        self._end = 0  # the step after it
        self.num_read = 0  # since the iterator was opened

    def max_steps_per_call(self, step: int, limit: int) -> int:
        _, offset, length = self._order.block_at(step)
        return min(limit, length - offset)

    def steps_of_next(self, blocks: int) -> int:
        """Returns the number of steps in the given number of blocks after the current one."""
        step = self._end
        for _ in range(blocks):
            step += self._order.block_at(step)[2]
        return step - self._end

    def call_input(self, step: int, limit: int):
        number, offset, length = self._order.block_at(step)
        if number != (before := self._number):
            goes_on = before is not None and number == before + 1
            # The iterator of an epoch ends with it: the next one is opened after hooks have seen the epoch's end.
            if before is not None and goes_on and self._by_epoch:
                goes_on = self._order.block_epoch(number) == self._order.block_epoch(before)
            if not goes_on:
                self.close()
                self._iterator, self.num_read = self._open_at(number), 0
            try:
                self._block = self._transfer(next(self._iterator))
            except BaseException:
                self.close()  # it would continue after the failed block
                raise
            self._number = number
            self.num_read += 1
            self._end = step - offset + length
        return self._block, offset, offset + self.max_steps_per_call(step, limit)

    def close(self) -> None:
        if self._iterator is None:
            return
        iterators = [self._iterator]
        self._iterator = self._number = self._block = None
        # Freeing a distributed dataset's iterator waits for its thread (see `untuned`); training and results must not.
        threading.Thread(target=iterators.clear, name="frees an iterator").start()


class Devices:
    """The devices of a strategy; each process feeds its own."""

    def __init__(self, strategy: tf.distribute.Strategy, mesh: Mesh | None = None):
        self.strategy, self.mesh = strategy, mesh or Mesh()

    @property
    def on_gpus(self) -> bool:
        """Whether replicas compute on GPUs."""
        return is_on_gpus(self.strategy)

    def copy(self, values):
        """Copies values to each device."""
        return on_each_device(self.strategy, values)

    def put_arrays(self, arrays):
        """Copies arrays to each device, for `ArraySource.gather_from`."""
        return self.copy(tf.nest.map_structure(lambda array: for_device(array, self.on_gpus), arrays))

    def indices(self, order: Order) -> Indices:
        """Returns the feed of the indices by which steps gather the stored examples."""
        return Indices(self, order)


@functools.lru_cache(maxsize=64)  # calls of `fit` on the same data, and models of a search, trace it once
def _trace_examples(order: Order, runtime: object) -> tf.types.experimental.ConcreteFunction:
    """Returns `order.examples` as a function of a block and a seed, traced in this runtime, which tests may replace."""

    def examples(block, seed):
        return (order if order.seed is None else dataclasses.replace(order, seed=seed)).examples(block)

    # The arithmetic needs no AutoGraph, which would take longer than all else of a short run.
    return tf.function(examples, autograph=False).get_concrete_function(*[tf.TensorSpec([], tf.int64)] * 2)


class Indices(Blocks):
    """Blocks of example indices, computed ahead by a `tf.data` thread; each is copied to GPUs once.

    The first eight are computed at once: many runs need no other, and no thread and no trace of the order, which takes
    as long as some twenty blocks of a small epoch.
    """

    def __init__(self, devices: Devices, order: Order):
        self._mesh = devices.mesh

        def examples_at_once(block: int) -> tf.Tensor:
            with tf.device("CPU:0"):
                return order.examples(tf.constant(block, tf.int64))

        def open_at(block: int):
            yield from map(examples_at_once, range(block, block + _AT_ONCE))
            unseeded_order = dataclasses.replace(order, seed=None if order.seed is None else 0)
            examples = _trace_examples(unseeded_order, runtime())
            with tf.device("CPU:0"):
                seed = tf.constant(order.seed or 0, tf.int64)
            following = tf.data.Dataset.range(block + _AT_ONCE, tf.int64.max)
            # AutoGraph would write a file, which a kill leaves in TMPDIR.
            indices = tf.autograph.experimental.do_not_convert(lambda number: examples(number, seed))
            yield from untuned(following.map(indices).prefetch(2))

        super().__init__(order, open_at, devices.copy if devices.on_gpus else None)

    def most_steps(self, indices) -> float:
        return indices.shape[0] or self._order.block_steps

    def replica_indices(self, indices: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        """Returns the indices of this replica's examples of a step, [n] int64. Replica code."""
        context = tf.distribute.get_replica_context()
        mine = indices[offset]
        if context.num_replicas_in_sync == 1:
            return mine
        # A block's batches are of one size, known where it is traced, and so is this replica's shard.
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        if replica is None:  # one program for all replicas, as on TPUs: their shards are of one size too
            size = mine.shape[0] // context.num_replicas_in_sync
            return tf.slice(mine, [context.replica_id_in_sync_group * size], [size])
        shard = self._mesh.batch_shard(int(replica), context.num_replicas_in_sync)
        return mine[slice(*replica_range(mine.shape[0], *shard))]
