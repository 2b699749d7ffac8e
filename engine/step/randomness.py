"""Stateless randomness: what a step draws is a function of (seed, step, replica), nothing else.

Keras layers such as Dropout keep a counter of their own, copied to each replica: left alone, replicas would draw the
same masks and a resumed run others. The engine writes those counters at the start of a replica's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from crankshaft.engine.internals import keras
from crankshaft.engine.internals.variables import assign_local
from crankshaft.engine.step.context import StepContext

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


def users_seed(seed: int, context: StepContext, salt: int) -> tf.Tensor:
    """Returns the seed of what a user's step or evaluation draws, [2] int64; in evaluation it goes by the batch."""
    if context.batch_number is None:
        return step_seed(seed, context.step, context.replica, _FIRST_SALT_OF_TRAINING - salt)
    return step_seed(seed, context.batch_number, context.replica, _FIRST_SALT_OF_EVALUATION - salt)


def epoch_seed(seed: int, epoch: tf.Tensor, shape: Sequence[int] = ()) -> tf.Tensor:
    """Returns a seed for an epoch's shuffle, int64 of any shape: neighbouring seeds' epochs have none in common.

    `epoch` is a scalar int64. Each bit hangs on all bits of both (Philox: Salmon et al., Parallel random numbers: as
    easy as 1, 2, 3, SC 2011).
    """
    key = tf.stack([tf.constant(seed, tf.int64), epoch])
    return tf.random.stateless_uniform(shape, key, minval=None, maxval=None, dtype=tf.int64, alg="philox")


def seed_generators(layers: Iterable[tf.keras.layers.Layer]) -> list:
    """Returns the Keras `SeedGenerator`s of layers and their parts, in the order of the layers, each once."""
    parts = [part for layer in layers for part in keras.parts(layer)]
    found = {id(each): each for part in parts for each in keras.own_generators(part)}
    return list(found.values())


def reseed(generators: list, seed: int, step: tf.Tensor, replica: tf.Tensor) -> None:
    """Sets each generator for this step. Generators differ by their place in the list. Replica code."""
    for salt, generator in enumerate(generators):
        state = generator.state.value
        assign_local(state, step_seed(seed, step, replica, salt + 1))
