"""Feeds of arrays: kept on the device, streamed from the host, or one batch over and over.

They have `random_access`, and an epoch's smaller last batch has a separately compiled program.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import tensorflow as tf

from ..mesh.mesh import Mesh
from .base import Feed, Run
from .order import Order, replica_part
from .reading import ArraysReader, SourceReader, reader_of, unmasked
from .residency import as_kept, is_on_gpus, on_each_device, take
from .source import Source


class ResidentFeed(Feed):
    """Arrays that live on every device; a step's batch is a gather by index, in the compiled loop.

    Only blocks of indices travel, computed ahead by a `tf.data` thread; to GPUs each block once.

    Args:
      strategy: the `tf.distribute.Strategy`.
      arrays: nest (features, labels) of arrays [examples, ...].
      order: which examples make which step.
      mesh: how the strategy's replicas are laid out.
    """

    compilable = True
    random_access = True

    def __init__(self, strategy: tf.distribute.Strategy, arrays, order: Order, mesh: Mesh | None = None):
        self.order = order
        self._strategy = strategy
        self._mesh = mesh or Mesh()
        self._arrays = arrays
        self._resident = None
        self._on_gpus = is_on_gpus(strategy)
        brought = (lambda indices: on_each_device(strategy, indices)) if self._on_gpus else None
        self._blocks = _Blocks(order, lambda first: iter(self._indices(first)), brought)

    def reach(self, step: int, limit: int) -> int:
        return self._blocks.reach(step, limit)

    def take(self, step: int, limit: int) -> Run:
        if self._resident is None:
            kept = tf.nest.map_structure(lambda array: as_kept(array, self._on_gpus), self._arrays)
            self._resident = on_each_device(self._strategy, kept)
        indices, start, stop = self._blocks.take(step, limit)
        return Run((self._resident, indices), start, stop)

    def most_steps(self, operands) -> float:
        return operands[1].shape[0]

    def next_operands(self, operands, offset: tf.Tensor):
        return (*operands, offset)

    def batch(self, arrays, indices: tf.Tensor, offset: tf.Tensor):
        context = tf.distribute.get_replica_context()
        mine = indices[offset]
        if context.num_replicas_in_sync > 1:
            # A block's batches are of one size, known where it is traced, and so is this replica's part.
            replica = tf.get_static_value(context.replica_id_in_sync_group)
            if replica is None:  # one program for all replicas, as on TPUs: their parts are of one size too
                part = mine.shape[0] // context.num_replicas_in_sync
                mine = tf.slice(mine, [context.replica_id_in_sync_group * part], [part])
            else:
                part = self._mesh.part(int(replica), context.num_replicas_in_sync)
                mine = mine[slice(*replica_part(mine.shape[0], *part))]

        return tf.nest.map_structure(lambda kept, array: take(kept, mine, array), arrays, self._arrays)

    def close(self) -> None:
        self._blocks.close()

    def _indices(self, first_block: int) -> tf.data.Dataset:
        return untuned(tf.data.Dataset.counter(first_block).map(self.order.examples).prefetch(2))


class StreamedFeed(Feed):
    """Examples too many to keep on a device: each replica's part of a block is read on the host, ahead.

    Goes through `distribute_datasets_from_function`: each input pipeline computes its own replicas' share.

    Args:
      strategy: the `tf.distribute.Strategy`.
      split: nest of arrays [examples, ...], or a `Source`.
      order: which examples make which step.
      read_timeout_seconds: see `FeedOptions`.
      mesh: how the strategy's replicas are laid out.
    """

    compilable = True
    random_access = True

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        split,
        order: Order,
        read_timeout_seconds: float = 0.0,
        mesh: Mesh | None = None,
    ):
        self.order = order
        self._strategy = strategy
        self._mesh = mesh or Mesh()
        self._split = split
        self._read_timeout_seconds = read_timeout_seconds
        self._reader: ArraysReader | SourceReader | None = None
        self._on_gpus = is_on_gpus(strategy)
        alone = strategy.num_replicas_in_sync == 1  # a distributed iterator brings blocks to the devices by itself
        brought = (lambda block: on_each_device(strategy, block)) if self._on_gpus and alone else None
        self._blocks = _Blocks(order, self._iterator, brought)
        self._shares_before = 0  # read when the iterator was opened
        self._shares_a_block = 1  # of this process

    @property
    def bytes_read(self) -> int | None:
        if self._reader is None:
            return 0 if isinstance(self._split, Source) else None
        return self._reader.bytes_read

    @property
    def steps_ahead(self) -> float | None:
        if self._reader is None or self._reader.shares_read is None:
            return None
        read = (self._reader.shares_read - self._shares_before) // self._shares_a_block
        return self._blocks.steps_of_next(read - self._blocks.taken)

    def reach(self, step: int, limit: int) -> int:
        return self._blocks.reach(step, limit)

    def take(self, step: int, limit: int) -> Run:
        if self._reader is None:
            self._reader = reader_of(self._split, self.order, self._read_timeout_seconds)
        with unmasked(self._reader):
            block, start, stop = self._blocks.take(step, limit)
        return Run((block,), start, stop)

    def most_steps(self, operands) -> float:
        return tf.nest.flatten(operands)[0].shape[0]

    def next_operands(self, operands, offset: tf.Tensor):
        return (*operands, offset)

    def batch(self, block, offset: tf.Tensor):
        if self.order.block_steps == 1:  # the block is the batch, and large: need not be copied
            return tf.nest.map_structure(lambda x: tf.squeeze(x, 0), block)
        return tf.nest.map_structure(lambda x: x[offset], block)

    def close(self) -> None:
        self._blocks.close()

    def _iterator(self, first_block: int):
        self._shares_before = self._reader.shares_read or 0
        if self._strategy.num_replicas_in_sync == 1:  # a distributed iterator would cost a copy of each block
            return iter(self._share(first_block, range(1)))

        def pipeline(context: tf.distribute.InputContext):
            per_pipeline = context.num_replicas_in_sync // context.num_input_pipelines
            first = context.input_pipeline_id * per_pipeline
            self._shares_a_block = per_pipeline
            return self._share(first_block, range(first, first + per_pipeline))

        return iter(self._strategy.distribute_datasets_from_function(pipeline))

    def _share(self, first_block: int, replicas: range) -> tf.data.Dataset:
        """Yields blocks for some replicas in turn: block 0 of the first, of the second, ..., block 1 of the first."""
        n = self._strategy.num_replicas_in_sync

        def gather(number):
            block = first_block + number // len(replicas)
            replica = replicas.start + number % len(replicas)
            indices = self.order.examples(block)
            part, parts = self._mesh.part(replica, n)
            start, stop = replica_part(tf.shape(indices, tf.int64)[1], part, parts)
            return self._reader.read(indices[:, start:stop], block)

        numbers = tf.data.Dataset.counter()
        return untuned(numbers.map(gather, num_parallel_calls=2, deterministic=True).prefetch(2 * len(replicas)))


class RepeatedFeed(Feed):
    """The same values for every step: no input at all. For measuring how long steps take without input.

    Args:
      values: nest of tensors or per-replica values, of which each replica gets its own.
      batch_size: examples in them, over all replicas.
    """

    compilable = random_access = True

    def __init__(self, values, batch_size: int):
        self.order = Order(batch_size, batch_size, block_steps=1)
        self._values = values

    def reach(self, step: int, limit: int) -> int:
        return limit

    def take(self, step: int, limit: int) -> Run:
        return Run((self._values,), 0, limit)

    def most_steps(self, operands) -> float:
        return math.inf

    def next_operands(self, operands, offset: tf.Tensor):
        return operands

    def batch(self, values):
        return values


class _Blocks:
    """Keeps the block in use, so that a block whose use is interrupted is continued, not read again.

    Args:
      order: which examples make which step.
      open_at: returns an iterator over blocks from a number on.
      brought: moves a block to where replicas read it, once for all calls that do; None leaves it as it is.
    """

    def __init__(self, order: Order, open_at: Callable, brought: Callable | None = None):
        self._order = order
        self._open_at = open_at
        self._brought = brought or (lambda block: block)
        self._iterator = None
        self._number: int | None = None
        self._block = None
        self._end = 0  # the step after it
        self.taken = 0  # since the iterator was opened

    def reach(self, step: int, limit: int) -> int:
        _, offset, length = self._order.block_of(step)
        return min(limit, length - offset)

    def steps_of_next(self, blocks: int) -> int:
        """Returns the steps of so many blocks after the one in use."""
        step = self._end
        for _ in range(blocks):
            step += self._order.block_of(step)[2]
        return step - self._end

    def take(self, step: int, limit: int):
        number, offset, length = self._order.block_of(step)
        if number != self._number:
            if self._iterator is None or number != self._number + 1:
                self._iterator, self.taken = self._open_at(number), 0
            self._block = self._brought(next(self._iterator))
            self._number = number
            self.taken += 1
            self._end = step - offset + length
        return self._block, offset, offset + self.reach(step, limit)

    def close(self) -> None:
        held = [self._iterator]
        self._iterator = self._number = self._block = None
        # Freeing a distributed dataset's iterator waits for its thread (see `untuned`). Training, or the result, must
        # not wait for that; the process ends after it.
        threading.Thread(target=held.clear, name="frees an iterator").start()


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without the thread that tunes its parallelism, unless its options ask for that.

    An iterator that is freed waits for that thread, which now and then sleeps for seconds, up to a minute (TensorFlow
    2.21). The iterators that TensorFlow makes for the devices of a distributed dataset have such a thread nevertheless,
    so iterators are kept as long as possible.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
