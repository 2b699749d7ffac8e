"""Feeds of a user's `tf.data.Dataset`: read in order, shuffled within a buffer, divided among workers."""

from __future__ import annotations

import math

import tensorflow as tf

from crankshaft.engine.data.base import Feed, Run
from crankshaft.engine.data.feeds import untuned
from crankshaft.engine.data.order import Order, SharedOrder
from crankshaft.engine.internals.tensorflow import divide_by_files
from crankshaft.engine.step.randomness import epoch_seed


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
        """Returns endless epochs: an iterator for each epoch would be freed at its end (see `untuned`)."""
        batches = self._endless(step)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = self._auto_shard
        batches = untuned(batches.with_options(options))
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
            return untuned(self._endless(step, self._local_replicas))

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


def _no_example(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a batch without any example of this kind."""
    return tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)
