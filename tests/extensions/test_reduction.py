"""Gradients compressed to their largest values, with feedback of the error (https://arxiv.org/abs/1809.07599)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.reduction import Reduction
from crankshaft.parts.sharding import Dense
from tests import runs

K, RATE = 2, 0.1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 5)).astype(np.float32)
Y = X @ np.float32([[1], [-2], [3], [-4], [5]])


class TopK(Reduction):
    """Sends the k values of each gradient that are largest, and adds what is left to the next step's gradient."""

    def __init__(self, reduction: Reduction, k: int):
        super().__init__(reduction.reduce_dtype, reduction.bucket_bytes)
        self.k = k

    def build(self, variables, state=()):
        super().build(variables, state)
        by_replica = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.MEAN,
        }
        self.errors = [tf.Variable(tf.zeros(variable.shape), **by_replica) for variable in variables]

    def sum(self, gradients, count, averages=None, variables=()):
        sent = []
        for gradient, error in zip(gradients, self.errors, strict=True):
            whole = tf.reshape(gradient + error, [-1])
            _, largest = tf.math.top_k(tf.abs(whole), min(self.k, whole.shape[0]))
            kept = tf.scatter_nd(largest[:, tf.newaxis], tf.gather(whole, largest), whole.shape)
            error.assign(tf.reshape(whole - kept, error.shape))
            sent.append(tf.reshape(kept, error.shape))
        return super().sum(sent, count, averages, variables)


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


class Compressed(Line):
    def build_reduction(self, reduction):
        return TopK(reduction, K)


def _expected(replicas: int, steps: int) -> np.ndarray:
    weights, errors = np.zeros([5, 1]), [np.zeros([5, 1]) for _ in range(replicas)]
    for _ in range(steps):
        total = 0.0
        for x, y, error in zip(np.split(X, replicas), np.split(Y, replicas), errors, strict=True):
            whole = error + 2 * x.T @ (x @ weights - y)
            kept = np.where(abs(whole) >= np.sort(abs(whole), axis=0)[-K], whole, 0)
            error[:] = whole - kept
            total += kept
        weights -= RATE * total / len(X)
    return weights


def test_compressed_gradients_train_what_numpy_computes(trained, replicas):
    weights, _ = trained(Compressed, (X, Y), steps=6)
    np.testing.assert_allclose(weights[0], _expected(replicas, 6), rtol=2e-5)


class Wide(Line):
    def build_model(self):
        return tf.keras.Sequential([Dense(4, "columns", "tanh"), Dense(1, "rows")])


class Same(Wide):
    """Whose reduction is a subclass of the run's that changes nothing."""

    def build_reduction(self, reduction):
        if reduction.sync_every_steps:
            arguments = reduction.sync_every_steps, reduction.outer, reduction.reduce_dtype
        else:
            arguments = reduction.reduce_dtype, reduction.bucket_bytes
        return type("Same", (type(reduction),), {})(*arguments)


TWO = {"strategy": "mirrored", "num_virtual_devices": 2, "train_steps": 4, "jit": "off"}
SETTINGS = {
    "plain": {},
    "16 bits": {"reduce_dtype": "bfloat16"},
    "sync_every_steps": {"sync_every_steps": 2},
    "mesh": {"mesh": "model:2"},
    "shard_optimizer": {"shard_optimizer": True, "optimizer": "adam"},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_subclass_that_changes_nothing_has_the_runs_bits(setting):
    flags = {"global_batch_size": 8, "learning_rate": RATE, **TWO, **setting}
    weights = [crankshaft.run(trainer, data=((X, Y), None), **flags).model.get_weights()[0] for trainer in (Same, Wide)]
    np.testing.assert_array_equal(*weights)


def test_two_workers_compress_as_two_replicas_and_resume(crank, tmp_path):
    run_dir = f"--run_dir={tmp_path}/run"
    for steps in (3, 6):
        script = (__file__, "--global_batch_size=8", "--shuffle_buffer=0", f"--learning_rate={RATE}", "--optimizer=sgd")
        crank("--workers=2", "--", *script, run_dir, f"--train_steps={steps}", command="local").ok()
    found = runs.tensors(tmp_path / "run")
    (kernel,) = [value for name, value in found.items() if "kernel" in name or "trainable_variables/0" in name]
    np.testing.assert_allclose(kernel, _expected(2, 6), rtol=2e-5)


@pytest.mark.parametrize("setting", ["sync_every_steps", "shard_optimizer"])
def test_one_that_would_lose_what_the_runs_own_does_is_refused(setting):
    with pytest.raises(crankshaft.UsageError, match=r"build_reduction returns a TopK, and this run sums by .*subclass"):
        crankshaft.run(Compressed, data=((X, Y), None), global_batch_size=8, **TWO, **SETTINGS[setting])


def test_a_reduction_set_in_build_is_refused():
    class Replaced(Line):
        def build(self):
            super().build()
            self.reduction = TopK(self.reduction, K)

    with pytest.raises(
        crankshaft.UsageError, match=r"Replaced.build sets self.reduction; return yours from build_redu"
    ):
        crankshaft.run(Replaced, data=((X, Y), None), global_batch_size=8, train_steps=1)


if __name__ == "__main__":  # as one of the workers
    crankshaft.main(Compressed, data=lambda: ((X, Y), None))
