"""Samples that depend only on (seed, step, replica, micro-batch, use). Replica code; orders are the host's.

Keras layers such as Dropout keep a counter of their own, copied to each replica: replicas would sample the same masks,
and a resumed run others. So the engine writes those counters at the start of each micro-batch of a replica's step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Replicas are numbered in the bits from here up, their micro-batches in those below.
_REPLICA_BITS = 20


def step_seed(seed: int, step: tf.Tensor, replica: tf.Tensor, micro_batch: int | tf.Tensor, use: tuple) -> tf.Tensor:
    """Returns a seed for `tf.random.stateless_*` ops.

    Args:
      step: scalar int64, the global step.
      replica: scalar int32, the replica's id in the whole strategy.
      micro_batch: which of the replica's micro-batches, an int or scalar int32.
      use: strings and numbers that identify the use: two uses share no seed.

    Returns:
      [2] int64. XLA takes the lower 32 bits of each word, in which steps, replicas and micro-batches differ.
    """
    words = np.frombuffer(hashlib.blake2b(repr((seed, *use)).encode(), digest_size=16).digest(), np.int64)
    which = tf.cast(replica, tf.int64) * (1 << _REPLICA_BITS) + tf.cast(micro_batch, tf.int64)
    return tf.stack([which, tf.cast(step, tf.int64)]) + tf.constant(words)


def derived_seed(seed: int, *use: str | int) -> int:
    """Returns another seed, below 2^31, that depends on a seed and on strings and numbers that identify its use."""
    return int.from_bytes(hashlib.blake2b(repr((seed, *use)).encode(), digest_size=4).digest(), "big") >> 1


def seed_after(seed: int, updates: int) -> int:
    """Returns the seed for the order of examples and the host's samples, for a model that has made a number of updates.

    That is the seed itself for a new model: a later run of the same model samples other numbers than the first.
    """
    return derived_seed(seed, updates) if updates else seed


def states(seed: tf.Tensor, count: int) -> tf.Tensor:
    """Returns states for Keras's seed generators, [count, 2] int64; each bit depends on all bits of the seed.

    Keras adds 1 to a state's second word at each sample, and takes both modulo 2^31 - 2.
    """
    return tf.random.stateless_uniform([count, 2], seed, minval=0, maxval=1 << 31, dtype=tf.int64, alg="philox")


def epoch_seed(seed: int | tf.Tensor, epoch: tf.Tensor, shape: Sequence[int] = ()) -> tf.Tensor:
    """Returns a seed for an epoch's shuffle, int64 of any shape; neighbouring seeds share no epoch.

    `seed` and `epoch` are scalars, int64. Each bit depends on all bits of both (Philox: Salmon et al., Parallel random
    numbers: as easy as 1, 2, 3, SC 2011).
    """
    key = tf.stack([tf.convert_to_tensor(seed, tf.int64), epoch])
    return tf.random.stateless_uniform(shape, key, minval=None, maxval=None, dtype=tf.int64, alg="philox")
