"""Multinomial logistic regression: one dense layer, for inputs of any shape."""

from __future__ import annotations

import tensorflow as tf

from .classification import Classifier


class Model(Classifier):
    """Flatten, then one dense layer.

    Args:
      class_weight: see `Classifier`.
    """

    def build_model(self) -> tf.keras.Model:
        layers = [tf.keras.layers.Flatten(), tf.keras.layers.Dense(self.run_context.num_classes, name="logits")]
        return tf.keras.Sequential(layers, name="logistic")
