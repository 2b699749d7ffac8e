"""A script whose examples differ in length: `--read=source` by their indices, `--read=dataset` as a stream.

The loss depends on padding, so replicas and workers must pad alike."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl import flags

from crankshaft import Source, Spec, Trainer, main, mean

LENGTHS = np.random.default_rng(5).integers(1, 13, 45)


class Walks(Source):
    """Arrays [length, 2] of an example's number, and its length."""

    element_spec = (Spec((None, 2), "float32"), Spec((), "int32"))

    def __len__(self):
        return len(LENGTHS)

    def read(self, indices):
        return [np.full([LENGTHS[i], 2], i, np.float32) for i in indices], LENGTHS[indices].astype("int32")


def dataset() -> tf.data.Dataset:
    lengths = tf.constant(LENGTHS, tf.int32)
    numbers = tf.data.Dataset.range(len(LENGTHS))
    return numbers.map(lambda i: (tf.fill([lengths[i], 2], tf.cast(i, tf.float32)), lengths[i]))


class Mean(Trainer):
    """Predicts a length from the mean over all positions, padding too."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1, "tanh"), tf.keras.layers.Dense(1)])

    def forward(self, features, training):
        return self.model(tf.reduce_mean(features.values, 1) / 20.0, training=training)

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - tf.cast(batch[0].lengths, tf.float32) / 10.0))


if __name__ == "__main__":  # as tests import this file, whose process has other scripts' flags
    HOW = flags.DEFINE_enum("read", "source", ["source", "dataset"], "How examples are read.")
    main(Mean, data=lambda: (Walks(), Walks()) if HOW.value == "source" else (dataset(), dataset()))
