"""Multi-layer perceptron: dense layers with ReLU, for inputs of any shape."""

from __future__ import annotations

import tensorflow as tf

from ..engine.layers import Dense
from .classification import Classifier


class Model(Classifier):
    """Flatten, then dense layers.

    Args:
      hidden_units: width of each hidden layer.
      dropout: fraction of each hidden layer's outputs that training sets to 0.
      class_weight: see `Classifier`.
    """

    def __init__(self, hidden_units: tuple[int, ...] = (128,), dropout: float = 0.0, **arguments):
        super().__init__(**arguments)
        self.hidden_units = hidden_units
        self.dropout = dropout

    def build_model(self) -> tf.keras.Model:
        layers = [tf.keras.layers.Flatten()]
        for units in self.hidden_units:
            layers.append(Dense(units, activation="relu"))
            if self.dropout:
                layers.append(tf.keras.layers.Dropout(self.dropout))
        layers.append(Dense(self.run_context.num_classes, name="logits"))
        return tf.keras.Sequential(layers, name="mlp")
