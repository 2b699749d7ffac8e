"""Models whose memory `plan_validation` compares, a file for --model: activations that loops and attention keep."""

from __future__ import annotations

import tensorflow as tf

from crankshaft.models.classification import Classifier

layers = tf.keras.layers


class Model(Classifier):
    """Two recurrent layers of 128 units, or four blocks of attention with 8 heads.

    Args:
      kind: gru, lstm or attention.
    """

    def __init__(self, kind: str = "gru"):
        super().__init__()
        self.kind = kind

    def build_model(self):
        inputs = x = tf.keras.Input(self.run_context.example[0].shape[1:])
        if self.kind == "attention":
            for _ in range(4):
                x = layers.LayerNormalization()(x + layers.MultiHeadAttention(8, 16)(x, x))
                x = layers.LayerNormalization()(x + layers.Dense(x.shape[-1])(layers.Dense(512, "relu")(x)))
            x = layers.Flatten()(x)
        else:
            layer = {"gru": layers.GRU, "lstm": layers.LSTM}[self.kind]
            x = layer(128)(layer(128, return_sequences=True)(x))
        return tf.keras.Model(inputs, layers.Dense(self.run_context.num_classes)(x))
