"""Weights of examples: what NumPy and Keras give, over uneven batches, replicas and micro-batches."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Mean, Trainer, mean
from crankshaft.engine.metrics.means import auc, root_mean_square
from crankshaft.engine.metrics.sums import without_details
from crankshaft.models.classification import Classifier
from crankshaft.parts.keras_models.keras_metrics import KerasMetric

BATCH, RATE = 8, 0.05
rng = np.random.default_rng(5)
FEATURES = rng.normal(size=(25, 3)).astype(np.float32)  # three batches, and one of a single example
LABELS = (FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 0.25 + rng.normal(size=25)).astype(np.float32)
WEIGHTS = rng.uniform(0, 3, 25).astype(np.float32)
WEIGHTS[BATCH : 2 * BATCH] = 0  # a whole batch
WEIGHTS[3:5] = 0
SOURCE = (FEATURES, np.where(WEIGHTS > 0, LABELS, np.float32("nan")), WEIGHTS)  # without weight a label may be missing


class Line(Trainer):
    """Least squares from zero, which knows nothing of weights."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        _, labels = batch
        return mean(tf.square(outputs[:, 0] - labels))

    def metrics(self, outputs, batch):
        error = outputs[:, 0] - batch[1]
        return {"rms": root_mean_square(error), "half": mean(tf.abs(error), error > 0), "batches": Mean(1.0, 1.0)}


def descended(epochs: int):
    """NumPy's gradient descent in float64: (kernel, bias, the losses of all steps, weighted, and their weights)."""
    kernel, bias, total = np.zeros(3), 0.0, 0.0
    for _ in range(epochs):
        for first in range(0, len(FEATURES), BATCH):
            x, y, w = (array[first : first + BATCH].astype(np.float64) for array in (FEATURES, LABELS, WEIGHTS))
            error = x @ kernel + bias - y
            total += np.sum(w * error**2)
            if w.sum():
                kernel = kernel - RATE * 2 * (w * error) @ x / w.sum()
                bias = bias - RATE * 2 * (w * error).sum() / w.sum()
    return kernel, bias, total


def check(bench, epochs: int = 3):
    steps = epochs * -(-len(FEATURES) // BATCH)
    found = bench.train(steps)
    kernel, bias, total = descended(epochs)
    # float32 beside float64: a few roundings a step.
    np.testing.assert_allclose(bench.trainer.model.get_weights()[0][:, 0], kernel, rtol=1e-5)
    np.testing.assert_allclose(bench.trainer.model.get_weights()[1][0], bias, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], (total, epochs * WEIGHTS.sum(dtype=np.float64)), rtol=1e-6)


@pytest.mark.parametrize(("replicas", "options"), [(1, {"parallel_micro_batches": 2}), (2, {})], ids=str)
def test_training_is_numpys(bench, replicas, options):
    check(bench(Line(), SOURCE, BATCH, replicas, shuffle=False, optimizer="sgd", learning_rate=RATE, **options))


def test_training_is_keras(bench):
    made = bench(Line(), SOURCE, BATCH, shuffle=False, optimizer="sgd", learning_rate=RATE)
    made.train(4)
    keras = Line().build_model()
    loss = tf.keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    keras.compile(tf.keras.optimizers.SGD(RATE), loss)
    keras.fit(FEATURES, LABELS, BATCH, 1, sample_weight=WEIGHTS, shuffle=False, verbose=0)
    for ours, theirs in zip(made.trainer.model.get_weights(), keras.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_evaluation_is_numpys(bench, replicas):
    made = bench(Line(), SOURCE, BATCH, replicas, eval_source=SOURCE, eval_batch_size=6, learning_rate=RATE)
    made.train(2)
    kernel, bias = made.trainer.model.get_weights()
    error, weights = (FEATURES @ kernel + bias)[:, 0].astype(np.float64) - LABELS, WEIGHTS.astype(np.float64)
    squares = np.sum(weights * error**2) / weights.sum()
    # With weights of its own, 1 where an error is above 0, the product of both counts.
    half = np.sum(weights * np.maximum(error, 0)) / np.sum(weights * (error > 0))
    found = made.strategy.evaluate().means()
    assert found == pytest.approx({"loss": squares, "rms": np.sqrt(squares), "half": half, "batches": 1.0}, rel=1e-5)


def test_keras_metrics_count_weights_as_keras_does(bench):
    class Measured(Line):
        def __init__(self):
            super().__init__()
            self.error = KerasMetric(tf.keras.metrics.MeanAbsoluteError())
            self.recall = KerasMetric(tf.keras.metrics.Recall())

        def metrics(self, outputs, batch):
            truth, guess = batch[1] > 0, tf.sigmoid(outputs[:, 0])
            mask = tf.cast(batch[1] > -1, tf.float32)
            return {"error": self.error(batch[1][:, None], outputs), "recall": self.recall(truth, guess, mask)}

    made = bench(Measured(), SOURCE, BATCH, 2, eval_source=SOURCE, eval_batch_size=6)
    outputs = made.trainer.model(FEATURES)[:, 0].numpy()
    error, recall = tf.keras.metrics.MeanAbsoluteError(), tf.keras.metrics.Recall()
    error.update_state(LABELS[:, None], outputs[:, None], WEIGHTS)
    recall.update_state(LABELS > 0, tf.sigmoid(outputs), WEIGHTS * (LABELS > -1))
    found = made.strategy.evaluate().means()
    assert found["error"] == pytest.approx(float(error.result()), rel=1e-6)
    assert found["recall"] == pytest.approx(float(recall.result()), rel=1e-6)


def test_weights_of_one_are_no_weights(bench):
    weights = []
    for source in ((FEATURES, LABELS), (FEATURES, LABELS, np.ones(25, np.float32))):
        made = bench(Line(), source, BATCH, 2)
        made.train(9)
        weights.append(np.concatenate([w.ravel() for w in made.trainer.model.get_weights()]))
    np.testing.assert_array_equal(*weights)


def test_a_batch_without_weight_changes_nothing_and_is_not_nan(bench):
    zeros = (FEATURES, LABELS, np.zeros(25, np.float32))
    for replicas in (1, 2):
        made = bench(Line(), zeros, BATCH, replicas, optimizer="sgd")
        before = made.trainer.model.get_weights()
        found = made.train(4)
        assert found["loss"] == (0.0, 0.0)
        for was, now in zip(before, made.trainer.model.get_weights(), strict=True):
            np.testing.assert_array_equal(was, now)


def test_an_entry_without_weight_has_no_gradient_whatever_it_is():
    values, weights = tf.constant([np.nan, 3.0, np.inf]), tf.constant([0.0, 2.0, 0.0])
    with tf.GradientTape() as tape:
        tape.watch([values, weights])
        total = mean(values, weights).total
    of_values, of_weights = tape.gradient(total, [values, weights])
    assert total == 6.0
    assert of_values.numpy().tolist() == [0.0, 2.0, 0.0]
    assert of_weights.numpy().tolist() == [0.0, 3.0, 0.0]


def test_pairs_that_are_weighed_are_those_made_with_weights():
    values, labels = tf.constant([0.5, -1.0, 2.0, 0.1]), tf.constant([1, 0, 1, 0])
    weights, mask = tf.constant([1.0, 0.0, 2.0, 0.5]), tf.constant([1.0, 1.0, 0.0, 1.0])
    for make in (mean, root_mean_square, lambda x, w=None: auc(labels, x, w)):
        for own, both in ((None, weights), (mask, mask * weights)):
            pairs = {"found": make(values, own).weigh(weights), "expected": make(values, both)}
            for found, expected in zip(*without_details(pairs).values(), strict=True):
                np.testing.assert_array_equal(found, expected)
    tokens = mean(tf.ones([4, 3]) * values[:, None]).weigh(weights)
    np.testing.assert_allclose(tokens, (3 * np.sum(values * weights), 3 * 3.5), rtol=1e-6)


class Logits(Classifier):
    """Starts from zero."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(self.run_context.num_classes, kernel_initializer="zeros")])


@pytest.mark.parametrize(("weights", "replicas"), [(None, 1), (WEIGHTS, 2)], ids=["alone", "with_weights"])
def test_class_weights_are_keras(bench, replicas, weights):
    """In training they multiply losses; evaluations, accuracy and divisors are as without them."""
    labels, class_weight = (LABELS > 1).astype(np.int32) + (LABELS > -1), (0.5, 1.0, 4.0)
    source = (FEATURES, labels) if weights is None else (FEATURES, labels, weights)
    options = {"shuffle": False, "optimizer": "sgd", "learning_rate": RATE, "num_classes": 3}
    made = bench(Logits(class_weight), source, BATCH, replicas, eval_source=source, **options)
    found = made.train(4)
    keras = tf.keras.Sequential([tf.keras.layers.Dense(3, kernel_initializer="zeros")])
    # Keras has no class weights beside weights: there the product is what it is given.
    kind = {} if weights is None else {"sample_weight": weights * np.array(class_weight)[labels]}
    kind = kind or {"class_weight": dict(enumerate(class_weight))}
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.compile(tf.keras.optimizers.SGD(RATE), loss)
    for first in range(0, len(FEATURES), BATCH):
        part = slice(first, first + BATCH)
        given = {name: each if isinstance(each, dict) else each[part] for name, each in kind.items()}
        if weights is not None:  # Keras divides by the examples; here they are as many as their weights say
            counted = weights[part].sum()
            scale = len(weights[part]) / counted if counted else 0.0
            given = {"sample_weight": given["sample_weight"] * scale}
        keras.fit(FEATURES[part], labels[part], BATCH, 1, shuffle=False, verbose=0, **given)
    for ours, theirs in zip(made.trainer.model.get_weights(), keras.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)
    each = np.ones(25) if weights is None else weights
    assert found["loss"].count == pytest.approx(each.sum(), rel=1e-6)
    losses = tf.keras.losses.sparse_categorical_crossentropy(labels, keras(FEATURES), from_logits=True).numpy()
    expected = {
        "loss": np.average(losses, weights=each),
        "accuracy": np.average(keras(FEATURES).numpy().argmax(1) == labels, weights=each),
    }
    assert made.strategy.evaluate().means() == pytest.approx(expected, rel=1e-4)


class Summed(Line):
    def loss(self, outputs, batch):
        return Mean(tf.reduce_sum(outputs), tf.constant(8.0))


class OneNumber(Line):
    def loss(self, outputs, batch):
        return mean(tf.reduce_mean(outputs))


class Flat(Line):
    def loss(self, outputs, batch):
        return mean(tf.reshape(tf.tile(outputs, [1, 2]), [-1]))


class Own(Line):
    def train_step(self, batch):
        return {"loss": self.loss(self.model(batch[0]), batch[:2])}


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        (Summed, "Summed.loss: the data has weights, and its pair was not made by crankshaft.mean"),
        (OneNumber, "got values of shape ()"),
        (Flat, "one for each of 8 examples, and crankshaft.mean got values of shape (16,)"),
        (
            Own,
            "Own: the data has weights, which 'loss' of its step ignores; use crankshaft.weighed(self.loss",
        ),
    ],
)
def test_weights_that_cannot_be_applied_are_never_left_out(bench, trainer, says):
    made = bench(trainer(), SOURCE, BATCH, shuffle=False)
    with pytest.raises(ValueError, match=re.escape(says)):
        made.train(1)
