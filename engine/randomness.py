"""Stateless randomness: what a step draws is a function of (seed, step, replica), nothing else.

Keras layers such as Dropout keep a counter of their own, copied to each replica: left alone, replicas would draw the
same masks and a resumed run others. The engine writes those counters at the start of a replica's step.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Keras adds 1 to a generator's second word at each draw and takes it modulo 2^31 - 2. A layer may draw 256 times a
# step before it meets the next step's numbers, and a run may last 8 million steps before the words come round.
_DRAWS_PER_STEP = 256
# Users' salts go down from here; Keras's generators have those above 0.
_FIRST_SALT_OF_TRAINING = -1
_FIRST_SALT_OF_EVALUATION = -(1 << 20)


def step_seed(seed: int, step: tf.Tensor, replica: tf.Tensor, salt: int = 0) -> tf.Tensor:
    """Returns a seed for `tf.random.stateless_*` ops and Keras's generators.

    Args:
      seed: the run's seed, below 2^31: higher bits change nothing.
      step: scalar int64, the global step.
      replica: scalar int32, the replica's id in the whole strategy.
      salt: which use of randomness in the step this is.

    Returns:
      [2] int64: one word for (seed, salt, replica), one for the step.
    """
    # Odd constants (those of SplitMix64, cut to 31 bits) spread small seeds and salts apart.
    word = (seed * 0x1E3779B9 + salt * 0x3F58476D + 1) & 0x7FFFFFFF
    first = tf.bitwise.bitwise_xor(tf.constant(word, tf.int64), tf.cast(replica, tf.int64) * 0x14D049BB)
    return tf.stack([tf.bitwise.bitwise_and(first, 0x7FFFFFFF), tf.cast(step, tf.int64) * _DRAWS_PER_STEP])


def users_seed(
    seed: int, step: tf.Tensor, replica: tf.Tensor, salt: int, batch_number: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns the seed of what a user's step draws, [2] int64; in evaluation, by the batch's number."""
    if batch_number is None:
        return step_seed(seed, step, replica, _FIRST_SALT_OF_TRAINING - salt)
    return step_seed(seed, batch_number, replica, _FIRST_SALT_OF_EVALUATION - salt)


def epoch_seed(seed: int, epoch: tf.Tensor, shape: Sequence[int] = ()) -> tf.Tensor:
    """Returns a seed for an epoch's shuffle, int64 of any shape: neighbouring seeds' epochs have none in common.

    `epoch` is a scalar int64. Each bit hangs on all bits of both (Philox: Salmon et al., Parallel random numbers: as
    easy as 1, 2, 3, SC 2011).
    """
    key = tf.stack([tf.constant(seed, tf.int64), epoch])
    return tf.random.stateless_uniform(shape, key, minval=None, maxval=None, dtype=tf.int64, alg="philox")
