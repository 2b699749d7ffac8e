"""The order of examples as arithmetic: an example is a function of (seed, epoch, order index).

An *order index* counts the examples of an epoch in the order in which they are trained on. Any step's batch can be
computed alone, so a resumed run needs no position but its step, and any number of replicas or hosts has this order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ..errors import UsageError
from ..randomness import epoch_seed
from .source import Source

# Epochs in a block. A shuffle's cipher has 16 bits or more, and is repeated until its output is an example's index:
# with 64 examples, about a thousand times per example.
_MOST_EPOCHS = 8
_ROUNDS = 8  # rounds of the cipher
_CHUNK_EXAMPLES = 1024  # of sources that read single examples well, if a window is requested
_WINDOW_CHUNKS = 64  # by default: batches' classes then vary little more than in a full shuffle (docs/data.md)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The start of a run's present batch size: step 0, or the first step of an epoch that changed it.

    The learning-rate schedule continues by examples, in steps of the run's first batch size.

    Attributes:
      step: the first step of this size.
      rate_step: the schedule's position there.
      rate_steps, rate_examples: numbers of its steps and their examples; 0 if it counts the run's steps.
    """

    step: int = 0
    epoch: int = 0
    rate_step: int = 0
    rate_steps: int = 0
    rate_examples: int = 0


@dataclasses.dataclass(frozen=True)
class Order:
    """Epochs of `num_examples` examples in global batches of `batch_size`; an epoch's last may be smaller.

    An epoch is a sequence of blocks: blocks of `block_steps` whole batches, the last of them padded, then, if the
    examples do not divide, a block of one smaller batch. Several short epochs without a smaller batch share one block.

    A run whose batch size changed at an epoch's end continues in the same order: its batches are those of a run that
    always had this size, with other numbers (`shift`).

    Attributes:
      num_examples: examples in an epoch, at least 1.
      block_steps: batches in a block; the most, if it has several epochs.
      seed: seed of each epoch's shuffle; None keeps the examples' own order.
      has_epochs: whether the length of an epoch is known; else it is nominal, and all examples are in epoch 0.
    """

    num_examples: int
    batch_size: int
    block_steps: int
    seed: int | None = None
    drop_remainder: bool = False
    origin: Origin = Origin()
    has_epochs: bool = True

    def __post_init__(self):
        if self.num_examples < 1:
            raise UsageError(f"num_examples={self.num_examples} makes no batch; the data is empty")
        if self.drop_remainder and self.num_examples < self.batch_size:
            raise UsageError(
                f"num_examples={self.num_examples} makes no whole batch of batch_size={self.batch_size}, and this "
                f"strategy takes whole ones only; use a batch of {self.num_examples} at most"
            )

    @property
    def local_batch_size(self) -> int:
        """Examples of a batch that one process reads; fewer once its shard of the data ends."""
        return self.batch_size

    @property
    def whole_steps(self) -> int:
        """Batches of full size in an epoch."""
        return self.num_examples // self.batch_size

    @property
    def remainder(self) -> int:
        """Examples in an epoch's last, smaller batch; 0 if there is none."""
        return 0 if self.drop_remainder else self.num_examples % self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, a smaller last one included."""
        return self.whole_steps + (1 if self.remainder else 0)

    @property
    def shift(self) -> int:
        """The difference between a batch's number in a run that always had this batch size and its step here."""
        origin = self.origin
        return origin.epoch * self.steps_per_epoch - origin.step

    def position(self, step: int) -> tuple[int, int]:
        """Returns the position of a step: (epoch, order index of its first example)."""
        number = step + self.shift
        epoch, in_epoch = divmod(number, self.steps_per_epoch) if self.has_epochs else (0, number)
        return epoch, in_epoch * self.batch_size

    def epoch_from(self, step):
        """Returns the next epoch's first step, or this step if it is one; an int or an int64 tensor."""
        return -(-(step + self.shift) // self.steps_per_epoch) * self.steps_per_epoch - self.shift

    def resumed(self, saved_data: Mapping[str, Any] | None, before: Order | None = None) -> Order:
        """Returns the order for resuming a run.

        Args:
          saved_data: see `Strategy.feed`. With "resumed": the next `step`, `batch_size` and `origin` of the steps
            before it, `num_examples` if there were others, which begins an epoch, and `reordered`, the other settings,
            with the values that they had, whose change makes another order of an epoch.
          before: the order of those steps, but for these; None if it was this one.

        Raises:
          UsageError: the batch size or the order changes within an epoch.
        """
        if not saved_data or "resumed" not in saved_data:
            return self
        resumed = saved_data["resumed"]
        step, has_other_data = resumed["step"], "num_examples" in resumed
        changes = {name: resumed[name] for name in ("batch_size", "origin", "num_examples") if name in resumed}
        before = dataclasses.replace(before or self, **changes)
        is_same_size = before.batch_size == self.batch_size
        epoch, index = before.position(step)
        # Within an epoch another batch size or order would train some of its examples twice and others never.
        if index:
            reordered = {} if is_same_size else {"global_batch_size": before.batch_size}
            before._check_same_order(epoch, step, reordered | resumed.get("reordered", {}))
        if step == 0 or (is_same_size and before.steps_per_epoch == self.steps_per_epoch and not has_other_data):
            return dataclasses.replace(self, origin=before.origin)
        # Other data make another epoch: the rest of the old one is left out.
        if has_other_data and index:
            epoch += 1
        # From here on the learning-rate schedule counts examples, so many of them as this number of its steps:
        if before.origin.rate_steps:
            unit = before.origin.rate_steps, before.origin.rate_examples
        elif is_same_size and has_other_data:
            unit = 0, 0  # it counts the run's steps
        else:
            unit = before.steps_per_epoch, before.epoch_examples
        return dataclasses.replace(self, origin=Origin(step, epoch, before.rate_step(step), *unit))

    def _check_same_order(self, epoch: int, step: int, reordered: Mapping[str, Any]) -> None:
        """Raises UsageError if settings, in `reordered` with their values before a step, are others within an epoch."""
        if reordered:
            began = " and ".join(
                f"without {name}" if value is None else f"with {name}={value}" for name, value in reordered.items()
            )
            fix = f"up to step {self.epoch_from(step)}, where the epoch ends" if self.has_epochs else "again"
            raise UsageError(
                f"epoch {epoch + 1} began {began}, and this run would repeat some examples and skip others; resume "
                f"{began} {fix}"
            )

    def rate_step(self, step):
        """Returns the learning-rate schedule's position at a step; each an int or an int64 tensor."""
        origin, steps, examples = self.origin, self.origin.rate_steps, self.origin.rate_examples
        if not steps:
            return step
        done = self.examples_before(step) - origin.epoch * self.epoch_examples
        # In two parts: the product of examples and steps might not fit an int64 tensor.
        return origin.rate_step + done // examples * steps + done % examples * steps // examples

    @property
    def epoch_examples(self) -> int:
        """Examples that an epoch trains on: without a last batch that is dropped since it would be smaller."""
        return self.whole_steps * self.batch_size + self.remainder

    def replicates_batch(self, step: int, shards: int) -> bool:
        """Returns whether each replica computes all of a step's batch, which has fewer examples than shards."""
        return self.batch_size_at(step) < shards

    def no_exchange_reason(self, shards: int) -> str:
        """Returns why no step may use collectives of its own across `shards` replicas; "" if each may."""
        return ""

    def steps_of_equal_size(self, step: int) -> float:
        """Returns for how many steps, from `step` on, no worker's number of examples changes; inf if it never does."""
        fewer = [later for later in self._steps_with_fewer if 0 < later < self.steps_per_epoch]
        if not fewer:
            return math.inf
        in_epoch = (step + self.shift) % self.steps_per_epoch
        return min(later for later in (*fewer, self.steps_per_epoch) if later > in_epoch) - in_epoch

    @property
    def _steps_with_fewer(self) -> set[int]:
        """The steps of an epoch at which a worker has fewer examples than before."""
        return {self.whole_steps}

    def batch_size_at(self, step: int) -> int:
        """Returns the number of examples in the global batch of a step."""
        return self.examples_before(step + 1) - self.examples_before(step)

    def examples_before(self, step):
        """Returns the number of examples in the first `step` steps: an int, or for an int64 tensor int64."""
        number = step + self.shift
        return self._examples_at(number // self.steps_per_epoch, number % self.steps_per_epoch * self.batch_size)

    def _examples_at(self, epoch, index):
        """The number of examples before an order index of an epoch."""
        return epoch * self.epoch_examples + index

    @property
    def _whole_blocks(self) -> int:
        return math.ceil(self.whole_steps / self.block_steps)

    @property
    def blocks_per_epoch(self) -> int:
        """Blocks per epoch, if no block has several epochs."""
        return self._whole_blocks + (1 if self.remainder else 0)

    @property
    def _epochs_per_block(self) -> int:
        """Whole epochs in a block; 0 if a block is a part of an epoch."""
        return 0 if self.remainder else min(self.block_steps // self.whole_steps, _MOST_EPOCHS)

    def block_at(self, step: int) -> tuple[int, int, int]:
        """Returns a step's (block, offset in the block, number of steps in the block)."""
        number = step + self.shift
        if self._epochs_per_block:
            steps = self._epochs_per_block * self.whole_steps
            return *divmod(number, steps), steps
        epoch, in_epoch = divmod(number, self.steps_per_epoch)
        first = epoch * self.blocks_per_epoch
        if in_epoch >= self.whole_steps:
            return first + self._whole_blocks, 0, 1
        block, offset = divmod(in_epoch, self.block_steps)
        return first + block, offset, min(self.block_steps, self.whole_steps - block * self.block_steps)

    def block_epoch(self, block: int) -> int:
        """Returns the epoch of a block, if no block has several epochs."""
        return block // self.blocks_per_epoch

    def examples(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the examples of a block, by index.

        Args:
          block: scalar int64.

        Returns:
          [steps, batch] int64: [block_steps, batch_size], or fewer steps of whole epochs, or [1, remainder] for an
          epoch's last. Steps past an epoch's whole batches are padding (some valid index), not to be trained on.
        """
        if epochs := self._epochs_per_block:
            indices = tf.range(tf.constant(self.whole_steps * self.batch_size, tf.int64))
            # In a graph a loop, though short: unrolled, it would take longer to build than the rest of a feed.
            numbers = block * epochs + tf.range(tf.constant(epochs, tf.int64))
            if tf.executing_eagerly():
                epoch_examples = tf.stack([self._shuffled(indices, epoch) for epoch in tf.unstack(numbers)])
            else:
                epoch_examples = tf.map_fn(lambda epoch: self._shuffled(indices, epoch), numbers)
            return tf.reshape(epoch_examples, [epochs * self.whole_steps, self.batch_size])
        epoch, in_epoch = block // self.blocks_per_epoch, block % self.blocks_per_epoch
        steps, batch = tf.constant(self.block_steps, tf.int64), tf.constant(self.batch_size, tf.int64)
        start = in_epoch * steps * batch
        if self.remainder:
            last = tf.equal(in_epoch, self._whole_blocks)
            start = tf.where(last, self.whole_steps * batch, start)
            steps = tf.where(last, tf.ones_like(steps), steps)
            batch = tf.where(last, self.remainder * tf.ones_like(batch), batch)
        indices = tf.minimum(start + tf.range(steps * batch), self.num_examples - 1)
        return tf.reshape(self._shuffled(indices, epoch), [steps, batch])

    def examples_between(self, first: tf.Tensor, stop: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples of steps [first, stop), all of one epoch: ([n] by index, their epoch), both int64.

        Steps follow each other; each has `batch_size` examples, except for an epoch's smaller last.
        """
        step = first + self.shift
        epoch, in_epoch = step // self.steps_per_epoch, step % self.steps_per_epoch
        last = tf.minimum((in_epoch + stop - first) * self.batch_size, self.epoch_examples)
        return self._shuffled(tf.range(in_epoch * self.batch_size, last), epoch), epoch

    def epochs(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the epoch of each step of a block, [steps] int64, as in `examples`."""
        if epochs := self._epochs_per_block:
            return tf.repeat(block * epochs + tf.range(epochs, dtype=tf.int64), self.whole_steps)
        steps = tf.constant(self.block_steps, tf.int64)
        if self.remainder:
            last = tf.equal(block % self.blocks_per_epoch, self._whole_blocks)
            steps = tf.where(last, tf.ones_like(steps), steps)
        return tf.repeat(block // self.blocks_per_epoch, steps)

    @property
    def chunks_to_keep(self) -> int:
        """Number of chunks to keep in memory so that each is read once; 0 if examples are read one by one."""
        return 0

    def chunks_ahead(self, block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (epoch, [chunks] int64 of it that are worth reading ahead as a block begins)."""
        return tf.zeros([], tf.int64), tf.zeros([0], tf.int64)

    def _shuffled(self, indices: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the examples at these order indices of an epoch, a scalar."""
        if self.seed is None:
            return indices
        return permuted(indices, epoch_seed(self.seed, epoch, [3]), self.num_examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedOrder(Order):
    """An order that reads each chunk once: permutes chunks, then examples within windows of chunks.

    An epoch is a sequence of windows, each of `window_chunks` chunks from anywhere in the data; all of a window's
    examples come, in random order, before those of the next. The last chunk, which may be smaller, has a random
    position of its own. A process that keeps two windows in memory reads each chunk once.

    Attributes:
      chunk_examples: examples in a chunk, 2 or more.
    """

    chunk_examples: int
    window_chunks: int

    @property
    def chunks_to_keep(self) -> int:  # a window's, the next one's, those across a boundary
        return 2 * self.window_chunks + 2

    @property
    def _window_examples(self) -> int:
        return self.chunk_examples * self.window_chunks

    @property
    def _windows(self) -> int:
        return math.ceil(self.num_examples / self._window_examples)

    def chunks_ahead(self, block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Those of the window after the block's first.
        if epochs := self._epochs_per_block:
            epoch, index = block * epochs, tf.zeros_like(block)
        else:
            epoch, in_epoch = block // self.blocks_per_epoch, block % self.blocks_per_epoch
            index = tf.minimum(in_epoch * self.block_steps, self.whole_steps) * self.batch_size
        window = index // self._window_examples + 1
        epoch, window = tf.where(window < self._windows, epoch, epoch + 1), window % self._windows
        first = window * self._window_examples
        indices = tf.range(first, tf.minimum(first + self._window_examples, self.num_examples), self.chunk_examples)
        last = tf.minimum(first + self._window_examples, self.num_examples) - 1  # if a smaller chunk is among them
        chunks = self._chunked(tf.concat([indices, last[tf.newaxis]], 0), epoch) // self.chunk_examples
        return epoch, tf.unique(chunks).y

    def _shuffled(self, indices: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        if self.seed is None:
            return indices
        windows, first = indices // self._window_examples, indices // self._window_examples * self._window_examples
        keys = tf.gather(self._keys(epoch), windows + 2)
        sizes = tf.minimum(tf.constant(self._window_examples, tf.int64), self.num_examples - first)
        return self._chunked(first + permuted(indices - first, keys, sizes), epoch)

    def _keys(self, epoch: tf.Tensor) -> tf.Tensor:
        """Returns [2 + windows, 3]: the chunks' key, a number for the smaller chunk's position, each window's key."""
        return epoch_seed(self.seed, epoch, [2 + self._windows, 3])

    def _chunked(self, indices: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the examples at these order indices: chunks are permuted, and each keeps its order."""
        if self.seed is None:
            return indices
        size, whole = self.chunk_examples, self.num_examples // self.chunk_examples
        smaller = self.num_examples - whole * size
        keys = self._keys(epoch)
        # The number of whole chunks before the smaller one.
        before = tf.math.floormod(keys[1, 0], whole + 1) * size
        is_smaller = (indices >= before) & (indices < before + smaller)
        indices_among_whole = tf.where(indices < before, indices, tf.maximum(indices - smaller, 0))
        first = tf.reduce_min(indices_among_whole) // size
        stop = tf.reduce_max(indices_among_whole) // size + 1
        # Once per chunk, since permuting few is slow.
        chunks = permuted(tf.minimum(tf.range(first, stop), max(whole - 1, 0)), keys[0], max(whole, 1))
        examples = tf.gather(chunks, indices_among_whole // size - first) * size + indices_among_whole % size
        return tf.where(is_smaller, whole * size + indices - before, examples)


def permuted(indices: tf.Tensor, keys: tf.Tensor, count) -> tf.Tensor:
    """Permutes the numbers below `count`: returns the new value of each of `indices`.

    Args:
      indices: [n] int64.
      keys: [3] int64 for all, or [n, 3].
      count: an int, or [n] int64.
    """
    # TensorFlow's keyed permutation (a cipher restricted to the range) is stateless: index in, example out. For up to
    # 2^16 examples it uses eight bits of each word of its key, so small numbers are bad keys; and after the minimum of
    # four rounds, an epoch's order still resembles that of another key.
    most = tf.convert_to_tensor(count, tf.int64) - 1
    return tf.raw_ops.RandomIndexShuffle(index=indices, seed=keys, max_index=most, rounds=_ROUNDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerWorkerOrder(Order):
    """The order of data that workers divide by files: each reads its part of a batch from its own shard, of any size.

    An epoch lasts as long as the largest shard; workers whose shard has ended contribute nothing.

    Attributes:
      shards: number of examples of each worker.
    """

    shards: tuple[int, ...]

    @property
    def local_batch_size(self) -> int:
        return self.batch_size // len(self.shards)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(max(self.shards) / self.local_batch_size)

    def replicates_batch(self, step: int, shards: int) -> bool:
        return False  # no worker has the others' files

    def no_exchange_reason(self, shards: int) -> str:
        last, here = (self.steps_per_epoch - 1) * self.local_batch_size, shards // len(self.shards)
        if min(self.shards) >= last + here and self.local_batch_size >= here:
            return ""
        return (
            "the step sums or gathers over replicas, and workers read files of their own "
            f"({', '.join(f'{shard:,}' for shard in self.shards)} examples), so that at an epoch's end one has no "
            "examples and would bring made-up ones; use auto_shard_policy=data"
        )

    @property
    def _steps_with_fewer(self) -> set[int]:
        lasting = [shard / self.local_batch_size for shard in self.shards]
        return {*map(math.floor, lasting), *map(math.ceil, lasting)}

    @property
    def epoch_examples(self) -> int:
        return self.num_examples

    def _examples_at(self, epoch, index):
        index_in_shard, least = index // len(self.shards), min if isinstance(index, int) else tf.minimum
        return epoch * self.num_examples + sum(least(shard, index_in_shard) for shard in self.shards)


def plain_order(
    source: Source,
    batch_size: int,
    block_steps: int,
    seed: int | None,
    shuffle_window: int = 0,
    drop_remainder: bool = False,
) -> Order:
    """Returns the order of a source, without buckets: by single examples, or by chunks if these are read better.

    `shuffle_window` is the number of chunks in a window; 0 is the source's own number.
    """
    sizes = (len(source), batch_size, block_steps, seed, drop_remainder)
    if source.chunk_examples == 1 and not shuffle_window:
        return Order(*sizes)
    return ChunkedOrder(
        *sizes,
        chunk_examples=_CHUNK_EXAMPLES if source.chunk_examples == 1 else source.chunk_examples,
        window_chunks=shuffle_window or _WINDOW_CHUNKS,
    )


def replica_range(batch_size: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """Returns [start, stop) of a replica's shard of a batch: contiguous, in order, sizes differ by at most one.

    If a batch has fewer examples than replicas, each has all (`Order.replicates_batch`), so none computes padding.
    """
    start, stop = even_range(batch_size, replica, num_replicas)
    if isinstance(batch_size, int):
        return (0, batch_size) if batch_size < num_replicas else (start, stop)
    is_replicated = batch_size < num_replicas
    return tf.where(is_replicated, tf.zeros_like(start), start), tf.where(is_replicated, batch_size, stop)


def even_range(batch_size, shard, num_shards):
    """Returns [start, stop) of one of `num_shards` shards of a batch; some are empty if it has fewer examples."""
    return batch_size * shard // num_shards, batch_size * (shard + 1) // num_shards
