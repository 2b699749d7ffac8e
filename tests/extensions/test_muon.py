"""Muon (https://kellerjordan.github.io/posts/muon), a rule for matrices: it has to see all of one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.optimizers import FusedOptimizer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 256)).astype(np.float32)
Y = X @ RNG.normal(size=(256, 4)).astype(np.float32)
RATE, MOMENTUM, STEPS = 0.02, 0.95, 5


def orthogonal(matrix, transpose):
    """Newton and Schulz's iteration, of TensorFlow's tensors and of NumPy's arrays."""
    for _ in range(STEPS):
        square = matrix @ transpose(matrix)
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return matrix


class Muon(FusedOptimizer):  # which does not say that it is elementwise
    def __init__(self, learning_rate=0.02, momentum=MOMENTUM, **arguments):
        super().__init__(learning_rate, **arguments)
        self.momentum = momentum

    def initial_slots(self):
        return {"m": 0.0}

    def dense(self, var, m, lr, grad, use_locking):
        mean = self.momentum * tf.raw_ops.ReadVariableOp(resource=m, dtype=tf.float32) + grad
        tf.raw_ops.AssignVariableOp(resource=m, value=mean)
        change = orthogonal(mean / (tf.norm(mean) + 1e-7), tf.transpose)
        tf.raw_ops.AssignSubVariableOp(resource=var, value=lr * change)


class Lines(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(4, use_bias=False, kernel_initializer="zeros")])

    def build_optimizer(self):
        return Muon(RATE)

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.reduce_mean(tf.square(outputs - batch[1]), 1))


FLAGS = {"global_batch_size": 16, "optimizer": "adam", "learning_rate": 0.001}  # the defaults: the trainer has its own


def test_a_rule_of_matrices_trains_what_numpy_computes(trained):
    weights, _ = trained(Lines, (X, Y), **FLAGS)
    expected, mean = np.zeros([256, 4]), np.zeros([256, 4])
    for _ in range(6):
        mean = MOMENTUM * mean + 2 * X.T @ (X @ expected - Y) / Y.size
        expected -= RATE * orthogonal(mean / (np.linalg.norm(mean) + 1e-7), np.transpose)
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)


def test_it_updates_no_shards():
    two = {"strategy": "mirrored", "num_virtual_devices": 2, "shard_optimizer": True}
    with pytest.raises(crankshaft.UsageError, match="the rule of muon may need all of it; set is_elementwise = True"):
        crankshaft.run(Lines, data=((X, Y), None), train_steps=1, **two, **FLAGS)
