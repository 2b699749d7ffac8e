"""The reference convolutional network for small images: two convolutions, two dense layers."""

from __future__ import annotations

import tensorflow as tf

from ..engine.layers import BatchNormalization, Conv2DMaxPool
from .classification import Classifier


class Model(Classifier):
    """conv 32 3x3, max-pool 2, conv 64 3x3, max-pool 2, flatten, dense 64, dense classes; ReLU between.

    Args:
      batch_norm: normalise each convolution's outputs over the batch (of one replica), before the ReLU.
      dropout: fraction of the dense layer's outputs that training sets to 0.
      class_weight: see `Classifier`.
    """

    def __init__(self, batch_norm: bool = False, dropout: float = 0.0, **arguments):
        super().__init__(**arguments)
        self.batch_norm = batch_norm
        self.dropout = dropout

    @classmethod
    def splits_batch(cls, batch_norm: bool = False, **arguments) -> bool:
        return not batch_norm

    def build_model(self) -> tf.keras.Model:
        layers = [*self._convolution(32), *self._convolution(64), tf.keras.layers.Flatten("channels_last")]
        layers.append(tf.keras.layers.Dense(64, activation="relu"))
        if self.dropout:
            layers.append(tf.keras.layers.Dropout(self.dropout))
        layers.append(tf.keras.layers.Dense(self.run_context.num_classes, name="logits"))
        return tf.keras.Sequential(layers, name="cnn")

    def _convolution(self, filters: int) -> list:
        if not self.batch_norm:
            return [Conv2DMaxPool(filters, 3, pool_size=2, activation="relu")]
        layers = tf.keras.layers
        form = {"data_format": "channels_last"}  # the form of inputs' images, whatever Keras's setting is
        pool = layers.MaxPooling2D(2, **form)
        return [layers.Conv2D(filters, 3, **form), BatchNormalization(), layers.ReLU(), pool]
