"""Lion (https://arxiv.org/abs/2302.06675), a rule for each value: its slot, its update, its shards and its settings."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.optimizers import SGD, FusedOptimizer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 1024)).astype(np.float32)
Y = X @ RNG.normal(size=(1024, 1)).astype(np.float32)
RATE, BETA_1, BETA_2 = 0.01, 0.9, 0.99


class Lion(FusedOptimizer):
    is_elementwise = True

    def __init__(self, learning_rate=1e-4, beta_1=BETA_1, beta_2=BETA_2, **arguments):
        super().__init__(learning_rate, **arguments)
        self.beta_1, self.beta_2 = beta_1, beta_2

    def initial_slots(self):
        return {"m": 0.0}

    def dense(self, var, m, lr, grad, use_locking):
        mean = tf.raw_ops.ReadVariableOp(resource=m, dtype=tf.float32)
        change = lr * tf.sign(mean + (1 - self.beta_1) * (grad - mean))
        tf.raw_ops.AssignSubVariableOp(resource=var, value=change)
        tf.raw_ops.AssignVariableOp(resource=m, value=mean + (1 - self.beta_2) * (grad - mean))


class Line(crankshaft.Trainer):
    beta_1 = BETA_1

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def build_optimizer(self):
        return Lion(RATE, beta_1=self.beta_1)

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    weights, mean = np.zeros([1024, 1]), np.zeros([1024, 1])
    for _ in range(6):
        gradient = 2 * X.T @ (X @ weights - Y) / len(X)
        weights -= RATE * np.sign(BETA_1 * mean + (1 - BETA_1) * gradient)
        mean = BETA_2 * mean + (1 - BETA_2) * gradient
    return weights


FLAGS = {"global_batch_size": 16, "optimizer": "adam", "learning_rate": 0.001}  # the defaults: the trainer has its own


def test_a_rule_trains_what_numpy_computes(trained, expected):
    weights, _ = trained(Line, (X, Y), **FLAGS)
    np.testing.assert_allclose(weights[0], expected, atol=1e-6)


def test_a_rule_for_each_value_updates_shards(trained, replicas, expected):
    if replicas > 1:
        weights, _ = trained(Line, (X, Y), shard_optimizer=True, **FLAGS)
        np.testing.assert_allclose(weights[0], expected, atol=1e-6)


def test_another_beta_does_not_resume_silently(tmp_path, monkeypatch):
    flags = {"data": ((X, Y), None), "run_dir": tmp_path / "run", "jit": "off", **FLAGS}
    crankshaft.run(Line, train_steps=1, **flags)
    monkeypatch.setattr(Line, "beta_1", 0.8)
    with pytest.raises(crankshaft.UsageError, match=r"another optimizer \(optimizer beta_1: 0.9 -> 0.8\)"):
        crankshaft.run(Line, train_steps=2, **flags)
    assert crankshaft.run(Line, train_steps=2, allow_changed_config=True, **flags).result["step"] == 2


def test_a_table_needs_an_update_of_rows():
    class Table(Line):
        def build_model(self):
            self.table = crankshaft.Embedding("ids", 8, 4)
            return tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            return self.model(self.table(features))

    with pytest.raises(crankshaft.UsageError, match=r"lion has no sparse, by which rows of table .* are updated"):
        crankshaft.run(Table, data=((np.arange(8), Y[:8]), None), global_batch_size=8, train_steps=1)


def test_a_class_with_its_own_update_inherits_no_claim():
    class Signed(SGD):
        def dense(self, var, lr, grad, use_locking):
            super().dense(var=var, lr=lr, grad=tf.sign(grad), use_locking=use_locking)

    assert (Signed.is_elementwise, Signed.takes_factors_as_rate, Signed.moves_all_rows) == (False, False, True)
    assert (SGD.is_elementwise, SGD.takes_factors_as_rate, SGD.moves_all_rows) == (True, True, False)
