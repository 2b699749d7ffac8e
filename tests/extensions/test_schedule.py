"""A learning-rate schedule of one's own, whose count of updates a checkpoint has."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft

pytestmark = pytest.mark.thorough

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Halving(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Halves the rate after every second update."""

    def __call__(self, step):
        return 0.1 * 0.5 ** tf.cast(step // 2, tf.float32)


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def build_optimizer(self):
        return tf.keras.optimizers.SGD(Halving())

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


def test_a_schedule_trains_what_numpy_computes(trained):
    weights, _ = trained(Line, (X, Y), steps=6, learning_rate=0.001, optimizer="adam")
    expected = np.zeros([3, 1])
    for step in range(6):
        expected -= 0.1 * 0.5 ** (step // 2) * 2 * X.T @ (X @ expected - Y) / 8
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)
