"""Small trainers, for tests of what trains them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from crankshaft import Trainer, build_embeddings, make_optimizer, mean
from crankshaft.parts.tables import Embedding


class Squares(Trainer):
    """Least squares, of one output and one label of each example."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


class Columns(Squares):
    """Least squares, of outputs and labels of one column."""

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1])[:, 0])


class Pull(Trainer):
    """Pulls the sum of each id's row towards its label; the arguments are of its table, of three columns."""

    def __init__(self, rows: int, **arguments):
        super().__init__()
        self.table = Embedding("table", rows, 3, **arguments)

    def build(self):
        build_embeddings(self)
        self.optimizer = make_optimizer(self, self.trainable_variables)

    def forward(self, features, training):
        return tf.reduce_sum(self.table(features, training=training), -1)

    def loss(self, outputs, batch):
        return mean(0.5 * tf.square(outputs - batch[1]))


def pictures(examples: int, size: int = 12, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(images float32 [examples, size, size, 1], labels int32), of noise alone."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(examples, size, size, 1)).astype(np.float32)
    return images, rng.integers(0, classes, examples).astype(np.int32)


def stripes(examples: int, size: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """As `pictures`, of four classes of noisy stripes: learned in some tens of steps, not in one."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, examples).astype(np.int32)
    rows = np.sin(np.arange(size) * (1 + labels[:, None]) / 2).astype(np.float32)
    return rows[:, :, None, None] + rng.normal(0, 1, (examples, size, size, 1)).astype(np.float32), labels
