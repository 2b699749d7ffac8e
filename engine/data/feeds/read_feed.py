"""The feed of a source that doesn't fit on a device: threads of the host read its blocks ahead, by index."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from ..lengths import Padding
from ..order import Order, replica_range
from ..reader import Reader, raising_source_error
from ..source import Source
from ..streamed import untuned
from .blocks import Blocks, Devices
from .feed import CallInput, Feed, FeedStats


class ReadFeed(Feed):
    """Examples that don't fit on a device: each replica's shard of a block is read ahead on the host.

    Uses `distribute_datasets_from_function`: each input pipeline reads its own replicas' shards. `padding` is that of
    examples of varying length, whose blocks are single batches; None if they have one shape.
    """

    compilable = True

    def __init__(
        self, devices: Devices, source: Source, order: Order, read_timeout_seconds: float, padding: Padding | None
    ):
        self.order, self._source, self._padding = order, source, padding
        self._element_spec: Any = None
        self._strategy, self._mesh = devices.strategy, devices.mesh
        self._read_timeout_seconds = read_timeout_seconds
        self._reader: Reader | None = None
        is_alone = self._strategy.num_replicas_in_sync == 1  # a distributed iterator copies blocks to devices itself
        transfer = devices.copy if devices.on_gpus and is_alone else None
        self._blocks = Blocks(order, self._iterator, transfer, source.varies)
        self._traced: dict[range, tf.types.experimental.ConcreteFunction] = {}  # by replicas
        self._next_step: int | None = None
        self._shards_before = 0  # already read when the iterator was opened
        self._shards_per_block = 1  # of this process

    def stats(self) -> FeedStats:
        if (reader := self._reader) is None:
            return FeedStats(0 if self._source.as_arrays() is None else None)
        if reader.shards_read is None:
            return FeedStats(reader.bytes_read)
        read = (reader.shards_read - self._shards_before) // self._shards_per_block
        return FeedStats(reader.bytes_read, self._blocks.steps_of_next(read - self._blocks.num_read))

    def max_steps_per_call(self, step: int, limit: int) -> int:
        return self._blocks.max_steps_per_call(
            step, limit if self.last_step is None else min(limit, self.last_step - step)
        )

    def call_input(self, step: int, limit: int) -> CallInput:
        if self._reader is None:
            self._reader = Reader(self._source, self.order, self._read_timeout_seconds)
        if self.last_step is not None and step >= self.last_step:  # to look at a batch; those read end before it
            self._blocks.close()
            self.last_step = None
        limit = self.max_steps_per_call(step, limit)
        # TensorFlow reports what a source raises as its own error, without the place in the user's code.
        with raising_source_error(self._reader):
            block, start, stop = self._blocks.call_input(step, limit)
        self._next_step = step + stop - start
        return CallInput((block,), start, stop)

    def traced(self, operands) -> Any:
        return operands if self._padding is None else (self._element_spec,)  # one program for all lengths

    @property
    def form(self) -> Any:
        return (self._source.element_spec, self._unseeded_order) if self._padding is None else None

    def most_steps(self, operands) -> float:
        return tf.nest.flatten(operands)[0].shape[0] if self._padding is None else 1

    def batch(self, block, offset: tf.Tensor):
        if self.order.block_steps == 1:  # the block is the batch, and large: no copy needed
            # A slice copies a batch, a squeeze does not.
            return tf.nest.map_structure(lambda x: tf.squeeze(x, 0), block)
        return tf.nest.map_structure(lambda x: x[offset], block)

    def close(self) -> None:
        self._blocks.close()
        # A PyDataset's own on_epoch_end is for epochs that were read to their end, as in Keras's fit.
        if self._next_step is not None and self.order.position(self._next_step)[1] == 0:
            self._source.end_epoch()
        self._next_step = None

    def _iterator(self, first_block: int):
        if self._source.varies:
            self._source.begin_epoch(self.order.block_epoch(first_block))
        self._shards_before = (self._reader and self._reader.shards_read) or 0
        if self._strategy.num_replicas_in_sync == 1:  # a distributed iterator would cost a copy of each block
            return iter(self._local_blocks(first_block, range(1)))

        def pipeline(context: tf.distribute.InputContext):
            per_pipeline = context.num_replicas_in_sync // context.num_input_pipelines
            first = context.input_pipeline_id * per_pipeline
            self._shards_per_block = per_pipeline
            return self._local_blocks(first_block, range(first, first + per_pipeline))

        blocks = self._strategy.distribute_datasets_from_function(pipeline)
        self._element_spec = blocks.element_spec
        return iter(blocks)

    def _local_blocks(self, first_block: int, replicas: range) -> tf.data.Dataset | list:
        """Yields blocks for some replicas in turn: block 0 of the first, of the second, ..., block 1 of the first."""
        # An end such that the numbers of all blocks for all replicas, below, are still int64.
        order, n, end = self.order, self._strategy.num_replicas_in_sync, tf.int64.max // len(replicas)
        last_block, last_offset = end, 0
        if self.last_step is not None:
            last_block, last_offset, _ = order.block_at(self.last_step - 1)
            end = last_block + 1
        if self._source.varies:  # to the epoch's end
            end = min(end, (order.block_epoch(first_block) + 1) * order.blocks_per_epoch)

        # What is an argument here is not in the graph: one trace serves every epoch and every end.
        def gather(number, last_block, last_offset):
            block, replica = number // len(replicas), replicas.start + number % len(replicas)
            indices = order.examples(block)
            # Of the last block, the steps past the run's end repeat its last one: nothing more is read for them.
            offsets = tf.range(tf.shape(indices, tf.int64)[0])
            indices = tf.gather(indices, tf.where(block == last_block, tf.minimum(offsets, last_offset), offsets))
            shard, num_shards = self._mesh.batch_shard(replica, n)
            start, stop = replica_range(tf.shape(indices, tf.int64)[1], shard, num_shards)
            pad = () if self._padding is None else (functools.partial(self._padding.pad, indices),)
            assert self._reader  # `call_input` has made it
            return self._reader.read(indices[:, start:stop], block, *pad)

        if replicas not in self._traced:  # once, though a source that varies has an iterator in each epoch
            scalar = tf.TensorSpec([], tf.int64)
            self._traced[replicas] = tf.function(gather, autograph=False).get_concrete_function(scalar, scalar, scalar)
        traced, last = self._traced[replicas], (tf.constant(last_block, tf.int64), tf.constant(last_offset, tf.int64))
        self._element_spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, traced.structured_outputs)
        if n == 1 and end == first_block + 1:  # a short epoch's only block: a pipeline would take longer to open
            with tf.device("CPU:0"):
                return [traced(tf.constant(first_block, tf.int64), *last)]
        blocks = tf.data.Dataset.range(first_block * len(replicas), end * len(replicas)).map(
            tf.autograph.experimental.do_not_convert(lambda number: traced(number, *last)),  # as in `Indices`
            # Two at a time: one block is read while the other waits; more would only hold memory.
            num_parallel_calls=2,
            # The distributed iterator hands blocks to replicas in turn.
            deterministic=True,
        )
        # TensorFlow's autotuning would take threads and memory from the steps.
        return untuned(blocks.prefetch(2 * len(replicas)))
