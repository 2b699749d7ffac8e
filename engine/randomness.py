"""Stateless randomness: what a step samples is a function of (seed, step, replica, share of the batch, use) alone.

Keras layers such as Dropout keep a counter of their own, copied to each replica: left alone, replicas would sample the
same masks and a resumed run others. The engine writes those counters at the start of each share of a replica's step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Replicas have the bits from here up of what tells them and their shares apart, shares those below.
_REPLICA_BITS = 20


def step_seed(seed: int, step: tf.Tensor, replica: tf.Tensor, share: int | tf.Tensor, use: tuple) -> tf.Tensor:
    """Returns a seed for `tf.random.stateless_*` ops.

    Args:
      seed: the run's seed.
      step: scalar int64, the global step.
      replica: scalar int32, the replica's id in the whole strategy.
      share: which of the replica's micro-batches, an int or scalar int32.
      use: what it is for, of texts and numbers: two uses have no seed in common.

    Returns:
      [2] int64. XLA takes the lower 32 bits of each word, in which steps, replicas and shares differ.
    """
    words = np.frombuffer(hashlib.blake2b(repr((seed, *use)).encode(), digest_size=16).digest(), np.int64)
    which = tf.cast(replica, tf.int64) * (1 << _REPLICA_BITS) + tf.cast(share, tf.int64)
    return tf.stack([which, tf.cast(step, tf.int64)]) + tf.constant(words)


def states(seed: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the states of Keras's seed generators, [count, 2] int64, all bits of which depend on all of a seed's.

    Keras adds 1 to a state's second word at each sample, and takes both modulo 2^31 - 2.
    """
    return tf.random.stateless_uniform([count, 2], seed, minval=0, maxval=1 << 31, dtype=tf.int64, alg="philox")


def epoch_seed(seed: int, epoch: tf.Tensor, shape: Sequence[int] = ()) -> tf.Tensor:
    """Returns a seed for an epoch's shuffle, int64 of any shape: neighbouring seeds' epochs have none in common.

    `epoch` is a scalar int64. Each bit hangs on all bits of both (Philox: Salmon et al., Parallel random numbers: as
    easy as 1, 2, 3, SC 2011).
    """
    key = tf.stack([tf.constant(seed, tf.int64), epoch])
    return tf.random.stateless_uniform(shape, key, minval=None, maxval=None, dtype=tf.int64, alg="philox")
