"""Weights kept on a grid by stochastic rounding: a rule that samples by the count of its updates."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.optimizers import FusedOptimizer

pytestmark = pytest.mark.thorough

GRID, RATE, STEPS = 2.0**-8, 0.1, 6
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def noise(step: int) -> np.ndarray:
    return tf.random.stateless_uniform([3, 1], [0, step]).numpy()


class Rounded(FusedOptimizer):
    def initial_slots(self):
        return {"steps": 0.0}

    def dense(self, var, steps, lr, grad, use_locking):
        count = tf.raw_ops.ReadVariableOp(resource=steps, dtype=tf.float32)
        seed = tf.stack([0, tf.cast(tf.reshape(count, [-1])[0], tf.int32)])
        value = tf.raw_ops.ReadVariableOp(resource=var, dtype=tf.float32) - lr * grad
        value = tf.floor(value / GRID + tf.random.stateless_uniform(value.shape, seed)) * GRID
        tf.raw_ops.AssignVariableOp(resource=var, value=value)
        tf.raw_ops.AssignVariableOp(resource=steps, value=count + 1)


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def build_optimizer(self):
        return Rounded(RATE)

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


def test_rounded_weights_are_numpys(trained):
    weights, _ = trained(Line, (X, Y), steps=STEPS, learning_rate=0.001, optimizer="adam")
    expected = np.zeros([3, 1])
    for step in range(STEPS):
        expected -= RATE * 2 * X.T @ (X @ expected - Y) / 8
        expected = np.floor(expected / GRID + noise(step)) * GRID
    np.testing.assert_array_equal(weights[0], expected)
