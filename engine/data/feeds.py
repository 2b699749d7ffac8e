"""Feeds that come with the engine: arrays kept on the device, arrays streamed from the host, a `tf.data.Dataset`.

Those of arrays have `random_access`, and an epoch's smaller last batch has a separately compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from crankshaft.engine.data import host_arrays
from crankshaft.engine.data.base import Feed, Run
from crankshaft.engine.data.order import Order, SharedOrder, replica_part
from crankshaft.engine.data.residency import as_kept, is_on_gpus, on_each_device, take
from crankshaft.engine.internals.tensorflow import divide_by_files
from crankshaft.engine.step.randomness import epoch_seed


class ResidentFeed(Feed):
    """Arrays that live on every device; a step's batch is a gather by index, in the compiled loop.

    Only blocks of indices travel, computed ahead by a `tf.data` thread; to GPUs each block once.

    Args:
      strategy: the `tf.distribute.Strategy`.
      arrays: nest (features, labels) of arrays [examples, ...].
      order: which examples make which step.
    """

    compilable = True
    random_access = True

    def __init__(self, strategy: tf.distribute.Strategy, arrays, order: Order):
        self.order = order
        self._strategy = strategy
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

    def next_operands(self, operands, place: tf.Tensor):
        return (*operands, place)

    def batch(self, arrays, indices: tf.Tensor, place: tf.Tensor):
        context = tf.distribute.get_replica_context()
        mine = indices[place]
        if context.num_replicas_in_sync > 1:
            # A block's batches are of one size, known where it is traced, and so is this replica's part.
            replica = tf.get_static_value(context.replica_id_in_sync_group)
            if replica is None:  # one program for all replicas, as on TPUs: their parts are of one size too
                part = mine.shape[0] // context.num_replicas_in_sync
                mine = tf.slice(mine, [context.replica_id_in_sync_group * part], [part])
            else:
                mine = mine[slice(*replica_part(mine.shape[0], int(replica), context.num_replicas_in_sync))]

        return tf.nest.map_structure(lambda kept, array: take(kept, mine, array), arrays, self._arrays)

    def _indices(self, first_block: int) -> tf.data.Dataset:
        return _untuned(tf.data.Dataset.counter(first_block).map(self.order.examples).prefetch(2))


class StreamedFeed(Feed):
    """Arrays too large to keep on a device: each replica's part of a block is gathered on the host, ahead.

    Goes through `distribute_datasets_from_function`: each input pipeline computes its own replicas' share.
    """

    compilable = True
    random_access = True

    def __init__(self, strategy: tf.distribute.Strategy, arrays, order: Order):
        self.order = order
        self._strategy = strategy
        self._arrays = arrays
        self._tensors = None
        self._on_gpus = is_on_gpus(strategy)
        alone = strategy.num_replicas_in_sync == 1  # a distributed iterator brings blocks to the devices by itself
        brought = (lambda block: on_each_device(strategy, block)) if self._on_gpus and alone else None
        self._blocks = _Blocks(order, self._iterator, brought)

    def reach(self, step: int, limit: int) -> int:
        return self._blocks.reach(step, limit)

    def take(self, step: int, limit: int) -> Run:
        if self._tensors is None:
            # Once, and eagerly: a graph refers to a tensor, but copies an array, and takes none of 2 GiB.
            with tf.device("CPU:0"):
                self._tensors = tf.nest.map_structure(host_arrays.to_gather_from, self._arrays)
        block, start, stop = self._blocks.take(step, limit)
        return Run((block,), start, stop)

    def most_steps(self, operands) -> float:
        return tf.nest.flatten(operands)[0].shape[0]

    def next_operands(self, operands, place: tf.Tensor):
        return (*operands, place)

    def batch(self, block, place: tf.Tensor):
        return tf.nest.map_structure(lambda x: x[place], block)

    def _iterator(self, first_block: int):
        if self._strategy.num_replicas_in_sync == 1:  # a distributed iterator would cost a copy of each block
            return iter(self._share(first_block, range(1)))

        def pipeline(context: tf.distribute.InputContext):
            per_pipeline = context.num_replicas_in_sync // context.num_input_pipelines
            first = context.input_pipeline_id * per_pipeline
            return self._share(first_block, range(first, first + per_pipeline))

        return iter(self._strategy.distribute_datasets_from_function(pipeline))

    def _share(self, first_block: int, replicas: range) -> tf.data.Dataset:
        """Yields blocks for some replicas in turn: block 0 of the first, of the second, ..., block 1 of the first."""
        n = self._strategy.num_replicas_in_sync

        def gather(number):
            block = first_block + number // len(replicas)
            replica = replicas.start + number % len(replicas)
            indices = self.order.examples(block)
            start, stop = replica_part(tf.shape(indices, tf.int64)[1], replica, n)
            indices = indices[:, start:stop]
            return tf.nest.map_structure(lambda array: host_arrays.gather(array, indices), self._tensors)

        numbers = tf.data.Dataset.counter()
        return _untuned(numbers.map(gather, num_parallel_calls=2, deterministic=True).prefetch(2 * len(replicas)))


class RepeatedFeed(Feed):
    """The same values, given to every step: no input at all. For measuring what steps take without it.

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

    def next_operands(self, operands, place: tf.Tensor):
        return operands

    def batch(self, values):
        return values


class DatasetFeed(Feed):
    """A user's `tf.data.Dataset` of single examples, by `experimental_distribute_dataset`.

    An epoch is shuffled and batched; the position is the step: a resumed run reads and skips the batches before it.

    Args:
      strategy: the `tf.distribute.Strategy`.
      dataset: examples (features, labels).
      order: sizes and seed; `order.num_examples` is the dataset's length.
      shuffle_buffer: examples in the shuffle's buffer.
      auto_shard: a `tf.data.experimental.AutoShardPolicy`, how hosts divide the data.
    """

    def __init__(self, strategy, dataset, order: Order, *, shuffle_buffer=10_000, auto_shard=None):
        self.order = order
        self._strategy = strategy
        self._dataset = dataset
        self._shuffle_buffer = shuffle_buffer
        self._auto_shard = auto_shard or tf.data.experimental.AutoShardPolicy.AUTO
        self._iterator = None
        self._next_step: int | None = None

    def reach(self, step: int, limit: int) -> int:
        # Replicas gather as many rows at each step of a call, as TensorFlow's collectives require.
        return int(min(limit, self.order.steps_alike(step)))

    def take(self, step: int, limit: int) -> Run:
        if step != self._next_step:
            self._iterator = iter(self._batches_from(step))
        limit = self.reach(step, limit)
        self._next_step = step + limit
        return Run((self._iterator,), 0, limit)

    def most_steps(self, operands) -> float:
        return math.inf

    def next_operands(self, operands, place: tf.Tensor):
        (iterator,) = operands
        return (next(iterator),)

    def batch(self, batch):
        return batch

    def _batches_from(self, step: int):
        """Returns endless epochs: an iterator for each epoch would be freed at its end (see `_untuned`)."""
        batches = self._endless(step)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = self._auto_shard
        batches = _untuned(batches.with_options(options))
        if self._strategy.num_replicas_in_sync == 1:
            return batches
        return self._strategy.experimental_distribute_dataset(batches)

    def _endless(self, step: int, elements_per_step: int = 1) -> tf.data.Dataset:
        first_epoch, in_epoch = divmod(step, self.order.steps_per_epoch)
        epochs = tf.data.Dataset.counter(first_epoch).flat_map(self._epoch)
        batches = epochs.skip(in_epoch * elements_per_step).prefetch(4 * elements_per_step)
        # TensorFlow does not notice it. For a dataset that may end, replicas ask each other at each step whether it
        # has.
        return batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    def _epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        order = self.order
        return self._shuffled(epoch).batch(order.batch_size, drop_remainder=order.drop_remainder)

    def _shuffled(self, epoch: tf.Tensor) -> tf.data.Dataset:
        seed, dataset = self.order.seed, self._dataset
        if seed is not None:
            # Sets the seed of this function's graph alone. TensorFlow mixes it in, and compares it with 0 in a way that
            # fails where the other seed is a tensor.
            tf.compat.v1.set_random_seed(1)
            dataset = dataset.shuffle(self._shuffle_buffer, epoch_seed(seed, epoch), reshuffle_each_iteration=False)
        return dataset


class FilesFeed(DatasetFeed):
    """A user's dataset whose files are divided among the workers, so that each file is read by one worker.

    `experimental_distribute_dataset` does not find the files within endless epochs, and has no common end of an epoch
    of uneven shares. Here each worker's epoch is filled up with empty batches to the length of the longest.

    Args:
      strategy: the `tf.distribute.Strategy`.
      share: this worker's part of the dataset, see `share_of_files`.
      order: whose steps are as many as the largest share needs.
      shuffle_buffer: see `DatasetFeed`.
    """

    def __init__(self, strategy, share: tf.data.Dataset, order: SharedOrder, *, shuffle_buffer=10_000):
        super().__init__(strategy, share, order, shuffle_buffer=shuffle_buffer)
        self._share_size = order.share_size
        self._local_replicas = strategy.num_replicas_in_sync // len(order.shares)

    def _batches_from(self, step: int):
        def pipeline(_: tf.distribute.InputContext) -> tf.data.Dataset:
            return _untuned(self._endless(step, self._local_replicas))

        return self._strategy.distribute_datasets_from_function(pipeline)

    def _epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        elements = self.order.steps_per_epoch * self._local_replicas
        batches = self._shuffled(epoch).batch(self._share_size // self._local_replicas)
        nothing = tf.data.Dataset.range(elements).map(
            lambda _: tf.nest.map_structure(_no_example, self._dataset.element_spec)
        )
        return batches.concatenate(nothing).take(elements)


def share_of_files(dataset: tf.data.Dataset, workers: int, worker: int) -> tf.data.Dataset:
    """Returns a worker's part of a dataset, by files: TensorFlow's `AutoShardPolicy.FILE`.

    Raises:
      tf.errors.OpError: when it is first read, if the dataset reads no files or fewer than there are workers.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return divide_by_files(dataset.with_options(options), workers, worker)


class _Blocks:
    """Keeps the block in use, so that a block whose use is interrupted is continued, not read again.

    Args:
      order: which examples make which step.
      open_at: returns an iterator over blocks from a number on.
      brought: given a block, returns it where replicas read it, once for all calls that do; None leaves it as it is.
    """

    def __init__(self, order: Order, open_at: Callable, brought: Callable | None = None):
        self._order = order
        self._open_at = open_at
        self._brought = brought or (lambda block: block)
        self._iterator = None
        self._number: int | None = None
        self._block = None

    def reach(self, step: int, limit: int) -> int:
        _, place, length = self._order.block_of(step)
        return min(limit, length - place)

    def take(self, step: int, limit: int):
        number, place, _ = self._order.block_of(step)
        if number != self._number:
            if self._iterator is None or number != self._number + 1:
                self._iterator = self._open_at(number)
            self._block = self._brought(next(self._iterator))
            self._number = number
        return self._block, place, place + self.reach(step, limit)


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
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


def _no_example(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a batch without any example of this kind."""
    return tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)
