"""A program that only reads a run, also beside its training: it calibrates a classifier by a temperature."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype(np.float32)
Y = (X[:, 0] + RNG.normal(size=64) > 0).astype(np.int64)


class Classes(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(2)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))


def _temperature(logits) -> float:
    """By Newton's method on the loss of logits divided by it (https://arxiv.org/abs/1706.04599)."""
    inverse = 1.0
    for _ in range(20):
        exps = np.exp(inverse * (logits - logits.max(1, keepdims=True)))
        p = exps / exps.sum(1, keepdims=True)
        mean = (p * logits).sum(1)
        slope = np.mean(mean - logits[np.arange(len(Y)), Y])
        inverse -= slope / np.mean((p * logits**2).sum(1) - mean**2)
    return 1 / inverse


def test_a_reader_beside_a_live_run_calibrates_its_checkpoints(tmp_path, replicas):
    on = {"strategy": "mirrored", "num_virtual_devices": 2} if replicas > 1 else {}
    flags = {"data": ((X, Y), (X, Y)), "run_dir": tmp_path / "run", "jit": "off", **on}
    training = {"global_batch_size": 16, "learning_rate": 0.5, "optimizer": "sgd", "keep_checkpoints": 2}
    with crankshaft.open_run(Classes, **flags, **training) as live:
        live.train(steps=8)
        live.save()
        with crankshaft.open_run(Classes, **flags, mode="eval") as reader:
            files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
            for step in (8, 16):
                reader.restore("latest")
                assert reader.step == step
                kernel, bias = live.model.get_weights()
                logits = reader.predict(X)
                np.testing.assert_allclose(logits, X @ kernel + bias, rtol=1e-5, atol=1e-6)
                temperature = _temperature(logits.astype(np.float64))
                losses = [_loss(logits / (temperature * by)) for by in (0.99, 1.0, 1.01)]
                assert min(losses) == losses[1] < reader.evaluate()["loss"]
                assert reader.evaluate()["loss"] == pytest.approx(_loss(logits), rel=1e-5)
                if step == 8:
                    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
                    live.train(steps=8)
                    live.save()
            for call in (reader.train, reader.save, reader.reset_patience):
                with pytest.raises(
                    crankshaft.UsageError, match=r"\(\): mode=eval only reads the run; use open_run wit"
                ):
                    call()
        assert not reader.is_open
        assert live.train(steps=1)["loss"] > 0
    with crankshaft.open_run(Classes, **flags, mode="eval", eval_checkpoint=16) as reader:
        assert reader.step == 16


def _loss(logits) -> float:
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(Y)), Y]))
