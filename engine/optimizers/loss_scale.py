"""Loss scaling for float16 gradients. Replica code; every replica sees the same reduced gradients, so all agree.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; the doubling rule is that of Keras's
`LossScaleOptimizer`.
"""

from __future__ import annotations

import math

import tensorflow as tf

from ..internals.variables import assign_local


class DynamicLossScale(tf.Module):
    """Multiplies the loss before the backward pass; halves on overflow, doubles after `growth_steps` good steps.

    Args:
      initial: the first scale, 2^15 as in Keras.
      growth_steps: consecutive finite steps after which the scale doubles.
    """

    def __init__(self, initial: float = 2.0**15, growth_steps: int = 2000):
        super().__init__(name="loss_scale")
        self.initial = initial
        self._examples = 1.0
        self.growth_steps = growth_steps

    def build(self) -> None:
        """Makes the two variables, which checkpoints keep. Call it on the host, in the strategy's scope."""
        # Each replica assigns its own copy, and all assign the same.
        kind = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
        self.value = tf.Variable(self.initial, dtype=tf.float32, name="loss_scale", **kind)
        self.good_steps = tf.Variable(0, dtype=tf.int64, name="good_steps", **kind)

    def expect_sums(self, examples: float) -> None:
        """Sets the number of examples that losses are sums over on all replicas: a scale for means would be too high.

        They are divided by the nearest power of two, which gives a mean's range and loses no bit. Call it on
        the host before a step is traced, with the same number for all replicas, across which a layer may sum gradients.
        """
        self._examples = 2.0 ** round(math.log2(max(1.0, examples)))

    def copy_to(self, optimizer: tf.keras.optimizers.LossScaleOptimizer) -> None:
        """Copies the scale and its count of steps to Keras's variables of them, on the host."""
        optimizer.dynamic_scale.assign(self.value)
        optimizer.step_counter.assign(tf.cast(self.good_steps, optimizer.step_counter.dtype))

    def copy_from(self, optimizer: tf.keras.optimizers.LossScaleOptimizer) -> None:
        """Copies the scale and its count of steps from Keras's variables of them, on the host."""
        self.value.assign(optimizer.dynamic_scale)
        self.good_steps.assign(tf.cast(optimizer.step_counter, tf.int64))

    def read(self) -> tf.Tensor:
        """Returns the factor of losses, scalar float32.

        Read once per step (`step.context.StartValues`): with parameter servers another worker may change it meanwhile.
        """
        return tf.convert_to_tensor(self.value) / self._examples

    def update(self, finite: tf.Tensor) -> None:
        """Updates the scale after a step; `finite`, a scalar bool, is whether all its gradients were finite."""
        good = tf.where(finite, self.good_steps + 1, 0)
        grow = good >= self.growth_steps
        scale = tf.convert_to_tensor(self.value)
        # Keras's, but for two bounds: above 2^24 a float32 loss of 1 loses its ulp of 2^-24, and once 0 it stays 0.
        grown = tf.where(grow, tf.minimum(scale * 2, 2.0**24), scale)
        scale = tf.where(finite, grown, tf.maximum(scale / 2, 2.0**-100))
        assign_local(self.value, scale)
        assign_local(self.good_steps, tf.where(grow, tf.zeros_like(good), good))
