"""Kinds of metrics of one's own: their value is computed from sums over replicas, calls and attempts, not averaged."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.metrics.pairs import Pair

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = np.sign(X @ np.float32([[1], [2], [-1]]) + RNG.normal(size=(12, 1))).astype(np.float32)


class Percent(Pair):
    direction = "max"

    def value(self):
        return 100 * self.total / self.count if self.count else None


class Scores(Pair):
    """Of true positives, predicted ones and labeled ones."""

    is_vector = is_several = True

    def value(self):
        right, predicted, positive = self.total
        return {"f1": 2 * right / (predicted + positive), "recall": right / positive, "examples": self.count[0]}


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])

    def metrics(self, outputs, batch):
        predicted, positive = outputs > 0, batch[1] > 0
        counts = [tf.math.count_nonzero(x) for x in (predicted & positive, predicted, positive)]
        size = tf.shape(outputs)[0]
        return {
            "right": Percent(tf.math.count_nonzero(predicted == positive), size),
            "of": Scores(tf.stack(counts), size),
        }


def _expected(logits) -> dict[str, float]:
    predicted, positive = logits > 0, Y > 0
    right = np.sum(predicted & positive)
    f1, recall = 2 * right / (predicted.sum() + positive.sum()), right / positive.sum()
    return {"right": 100 * np.mean(predicted == positive), "of_f1": f1, "of_recall": recall, "of_examples": 12.0}


FLAGS = {
    "global_batch_size": 4,
    "shuffle_buffer": 0,
    "learning_rate": 1e-9,
    "jit": "off",
    "eval_batch_size": 8,
}


def test_values_are_of_sums_also_after_a_resume(tmp_path, replicas):
    on = {"strategy": "mirrored", "num_virtual_devices": 2} if replicas > 1 else {}
    flags = {
        "data": ((X, Y), (X, Y)),
        "train_epochs": 1,
        "summary_every_steps": 3,
        "monitor": "max:eval_of_f1",
        **FLAGS,
        **on,
    }
    with crankshaft.open_run(Line, run_dir=tmp_path / "1", **flags) as run:
        run.train(steps=2)
        run.save()
        shutil.copytree(tmp_path / "1", tmp_path / "2")
    resumed = crankshaft.run(Line, run_dir=tmp_path / "2", **flags)
    for split in ("train", "eval"):  # the weights hardly change
        found = {name: resumed.result[split][name] for name in _expected(X.sum(1, keepdims=True))}
        assert found == pytest.approx(_expected(X.sum(1, keepdims=True)), abs=1e-6), split


MISTAKES = {
    "no value": (type("Bare", (Pair,), {}), [1.0, 2.0], "Bare defines no value"),
    "lengths": (Scores, [[1.0, 2.0], [1.0]], r"of shape \(2,\) and \(1,\), not vectors of one fixed length"),
    "a scalar": (Scores, [1.0, 1.0], r"of shape \(\) and \(\), not vectors"),
}


@pytest.mark.parametrize(("kind", "sums", "message"), MISTAKES.values(), ids=MISTAKES)
def test_sums_that_have_no_value_are_refused(kind, sums, message):
    trainer = type("Wrong", (Line,), {"metrics": lambda self, outputs, batch: {"a": kind(*map(tf.constant, sums))}})
    with pytest.raises(crankshaft.UsageError, match=message):
        crankshaft.run(trainer, data=((X, Y), None), train_steps=1, **FLAGS)


def test_a_loss_is_a_mean():
    trainer = type("Wrong", (Line,), {"loss": lambda self, outputs, batch: Percent(tf.reduce_sum(outputs), 4.0)})
    with pytest.raises(crankshaft.UsageError, match=r"loss is a Percent; return a crankshaft.mean\(losses\)"):
        crankshaft.run(trainer, data=((X, Y), None), train_steps=1, **FLAGS)
