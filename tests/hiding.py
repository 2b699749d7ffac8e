"""A model whose activation makes nan 0, as kernels of ReLU do for some CPUs: the loss does not show it."""

from __future__ import annotations

import tensorflow as tf

from crankshaft.models.mlp import Model


class Hiding(Model):
    """An mlp with one hidden layer."""

    def build_model(self):
        layers = tf.keras.layers
        hidden = layers.Dense(8, lambda x: tf.where(x > 0, x, 0.0))
        return tf.keras.Sequential([layers.Flatten(), hidden, layers.Dense(self.run_context.num_classes)])
