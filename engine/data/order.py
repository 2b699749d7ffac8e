"""The order of examples as arithmetic: the example at a place is a function of (seed, epoch, place).

Any step's batch can be computed alone, so a resumed run needs no position but its step, and the order does not depend
on how many replicas or hosts there are.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from crankshaft.engine.step.randomness import epoch_seed

# Epochs in a block. The cipher behind a shuffle has 16 bits or more, and is asked until its answer is an example: for
# 64 examples that takes about a thousand times each.
_MOST_EPOCHS = 8
_ROUNDS = 8  # of the cipher


@dataclasses.dataclass(frozen=True)
class Order:
    """Epochs of `num_examples` examples in global batches of `batch_size`; the last one of an epoch may be smaller.

    An epoch is a row of blocks: blocks of `block_steps` whole batches, the last of them padded, then, if the examples
    do not divide, a block that is one smaller batch. Several short epochs without a smaller batch share one block.

    Attributes:
      num_examples: examples in an epoch, at least 1.
      batch_size: the global batch.
      block_steps: batches in a block; at most, where it holds several epochs.
      seed: shuffles each epoch anew; None keeps the examples' own order.
      drop_remainder: leave out the smaller batch.
    """

    num_examples: int
    batch_size: int
    block_steps: int
    seed: int | None = None
    drop_remainder: bool = False

    def __post_init__(self):
        if self.num_examples < 1:
            raise ValueError(f"num_examples={self.num_examples} makes no batch; the data is empty")
        if self.drop_remainder and self.num_examples < self.batch_size:
            raise ValueError(
                f"num_examples={self.num_examples} makes no whole batch of batch_size={self.batch_size}, and this "
                f"strategy takes whole ones only; use a batch of {self.num_examples} at most"
            )

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

    def steps_alike(self, step: int) -> float:
        """Returns how many steps from `step` on bring each worker as many examples as that one; inf if all do."""
        fewer = [place for place in self._steps_with_fewer if 0 < place < self.steps_per_epoch]
        if not fewer:
            return math.inf
        in_epoch = step % self.steps_per_epoch
        return min(later for later in (*fewer, self.steps_per_epoch) if later > in_epoch) - in_epoch

    @property
    def _steps_with_fewer(self) -> set[int]:
        """The steps of an epoch at which a worker has fewer examples than at the one before."""
        return {self.whole_steps}

    def examples_before(self, step: int) -> int:
        """Returns the number of examples in the first `step` steps."""
        an_epoch = self.whole_steps * self.batch_size + self.remainder
        epochs, in_epoch = divmod(step, self.steps_per_epoch)
        return epochs * an_epoch + min(in_epoch * self.batch_size, an_epoch)

    @property
    def _whole_blocks(self) -> int:
        return math.ceil(self.whole_steps / self.block_steps)

    @property
    def _blocks_per_epoch(self) -> int:
        return self._whole_blocks + (1 if self.remainder else 0)

    @property
    def _epochs_per_block(self) -> int:
        """Whole epochs in a block; 0 where a block is a part of an epoch."""
        return 0 if self.remainder else min(self.block_steps // self.whole_steps, _MOST_EPOCHS)

    def block_of(self, step: int) -> tuple[int, int, int]:
        """Returns a step's place: (block, the step's place in the block, steps in the block)."""
        if self._epochs_per_block:
            steps = self._epochs_per_block * self.whole_steps
            return *divmod(step, steps), steps
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        first = epoch * self._blocks_per_epoch
        if in_epoch >= self.whole_steps:
            return first + self._whole_blocks, 0, 1
        block, place = divmod(in_epoch, self.block_steps)
        return first + block, place, min(self.block_steps, self.whole_steps - block * self.block_steps)

    def examples(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the examples of a block, by index.

        Args:
          block: scalar int64.

        Returns:
          [steps, batch] int64: [block_steps, batch_size], or fewer steps of whole epochs, or [1, remainder] for an
          epoch's last. Rows past an epoch's whole batches are padding (some valid index), not to be trained on.
        """
        if epochs := self._epochs_per_block:
            places = tf.range(tf.constant(self.whole_steps * self.batch_size, tf.int64))
            found = [self._shuffled(places, block * epochs + later) for later in range(epochs)]
            return tf.reshape(tf.concat(found, 0), [epochs * self.whole_steps, self.batch_size])
        epoch, in_epoch = block // self._blocks_per_epoch, block % self._blocks_per_epoch
        steps, batch = tf.constant(self.block_steps, tf.int64), tf.constant(self.batch_size, tf.int64)
        start = in_epoch * steps * batch
        if self.remainder:
            last = tf.equal(in_epoch, self._whole_blocks)
            start = tf.where(last, self.whole_steps * batch, start)
            steps, batch = (
                tf.where(last, tf.ones_like(steps), steps),
                tf.where(last, self.remainder * tf.ones_like(batch), batch),
            )
        places = tf.minimum(start + tf.range(steps * batch), self.num_examples - 1)
        return tf.reshape(self._shuffled(places, epoch), [steps, batch])

    def _shuffled(self, places: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the examples at these places of an epoch, a scalar."""
        if self.seed is None or self.num_examples == 1:
            return places
        # TensorFlow's keyed permutation (a cipher cut to the range) is stateless: place in, example out. For up to 2^16
        # examples it takes eight bits of each word of its key, so small numbers make no key; and after its least number
        # of rounds, four, an epoch's order still resembles that of another key.
        return tf.raw_ops.RandomIndexShuffle(
            index=places,
            seed=epoch_seed(self.seed, epoch, [3]),
            max_index=tf.constant(self.num_examples - 1, tf.int64),
            rounds=_ROUNDS,
        )


@dataclasses.dataclass(frozen=True)
class SharedOrder(Order):
    """The order of data that workers divide by files: shares of any sizes, each read in its worker's part of a batch.

    An epoch lasts as long as the largest share; workers that have come to the end of theirs bring nothing.

    Attributes:
      shares: examples of each worker.
    """

    shares: tuple[int, ...] = ()

    @property
    def share_size(self) -> int:
        """Examples that one worker brings to a step, while it has any."""
        return self.batch_size // len(self.shares)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(max(self.shares) / self.share_size)

    @property
    def _steps_with_fewer(self) -> set[int]:
        lasting = [share / self.share_size for share in self.shares]
        return {*map(math.floor, lasting), *map(math.ceil, lasting)}

    def examples_before(self, step: int) -> int:
        epochs, in_epoch = divmod(step, self.steps_per_epoch)
        return epochs * self.num_examples + sum(min(share, in_epoch * self.share_size) for share in self.shares)


def replica_part(batch_size: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """Returns [start, stop) of a replica's part of a batch: contiguous, in order, sizes differ by at most one."""
    return batch_size * replica // num_replicas, batch_size * (replica + 1) // num_replicas
