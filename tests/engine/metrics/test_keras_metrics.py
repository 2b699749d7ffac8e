"""Keras's metrics in a trainer, beside Keras's own over the whole data."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import KerasMetric, Trainer, mean
from crankshaft.engine.errors import UsageError
from crankshaft.engine.metrics.sums import LoopSums, Sums, stack, sum_specs

pytestmark = pytest.mark.thorough

CLASSES = 4


def points(examples=45):
    rng = np.random.default_rng(2)
    features = rng.normal(size=(examples, 3)).astype(np.float32)
    return {"x": features, "weight": rng.uniform(0, 2, examples).astype(np.float32)}, rng.integers(0, CLASSES, examples)


class Custom(tf.keras.metrics.Metric):
    """A user's own: the share of examples of class 0 among the weights, and how many there were."""

    def __init__(self):
        super().__init__(name="custom")
        self.zeros = self.add_variable(shape=(), initializer="zeros", name="zeros")
        self.seen = self.add_variable(shape=(), initializer="zeros", dtype="int32", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.zeros.assign(self.zeros + tf.reduce_sum(tf.cast(tf.equal(y_true, 0), tf.float32)))
        self.seen.assign(self.seen + tf.shape(y_true)[0])

    def result(self):
        return {"share": self.zeros / tf.cast(self.seen, tf.float32), "seen": self.seen}


def metrics_of_keras():
    """{name: (a metric, whether it wants labels as "one_hot", "binary", "column" or "classes", what is predicted)}"""
    keras = tf.keras.metrics
    return {
        "f1_each": (keras.F1Score(average=None), "one_hot", "probabilities"),
        "auc": (keras.AUC(), "binary", "first"),
        "pr": (keras.AUC(curve="PR", multi_label=True), "one_hot", "probabilities"),
        "precision": (keras.Precision(), "binary", "first"),
        "hinge": (keras.Hinge(), "column", "first_column"),
        "recall_at": (keras.RecallAtPrecision(0.3), "binary", "first"),
        "top2": (keras.SparseTopKCategoricalAccuracy(2), "classes", "probabilities"),
        "iou": (keras.MeanIoU(CLASSES), "classes", "class"),
        "rmse": (keras.RootMeanSquaredError(), "binary", "first"),
        "r2": (keras.R2Score(), "one_hot", "probabilities"),
        "own": (Custom(), "classes", "class"),
    }


def arguments(kind, predicted, outputs, labels):
    probabilities = tf.nn.softmax(outputs)
    y_true = {
        "one_hot": tf.one_hot(labels, CLASSES),
        "binary": tf.cast(tf.equal(labels, 1), tf.float32),
        "column": tf.cast(tf.equal(labels, 1), tf.float32)[:, tf.newaxis],
        "classes": labels,
    }[kind]
    y_pred = {
        "probabilities": probabilities,
        "first": probabilities[:, 1],
        "first_column": probabilities[:, 1:2],
        "class": tf.argmax(probabilities, axis=1),
    }[predicted]
    return y_true, y_pred


class Measured(Trainer):
    def __init__(self, weighted=False):
        super().__init__()
        self.weighted = weighted
        self.measures = {name: (KerasMetric(metric), *how) for name, (metric, *how) in metrics_of_keras().items()}

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(CLASSES)])

    def forward(self, features, training):
        return self.model(features["x"])

    def loss(self, outputs, batch):
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))

    def metrics(self, outputs, batch):
        weights = (batch[0]["weight"],) if self.weighted else ()
        return {
            name: metric(*arguments(*how, outputs, batch[1]), *weights)
            for name, (metric, *how) in self.measures.items()
        }


def by_keras(model, weighted):
    """What Keras's metrics say of all examples at once."""
    features, labels = points()
    found = {}
    for name, (metric, *how) in metrics_of_keras().items():
        weights = {"sample_weight": features["weight"]} if weighted else {}
        metric.update_state(*arguments(*how, model(features["x"]), labels), **weights)
        result = metric.result()
        if isinstance(result, dict):
            found |= {f"{name}_{key}": float(value) for key, value in result.items()}
        elif result.shape.rank:
            found |= {f"{name}_{i}": float(value) for i, value in enumerate(result)}
        else:
            found[name] = float(result)
    return found


@pytest.mark.parametrize(
    ("replicas", "weighted", "options"),
    [
        pytest.param(1, False, {"jit": True}, marks=pytest.mark.slow),
        (2, True, {"accumulate_steps": 2}),  # a last batch of 1: one micro-batch
    ],
)
def test_values_are_keras_ones_over_all_examples(bench, replicas, weighted, options):
    """45 examples by 4: uneven micro-batches and batches. Sums of float32 values in another order: 1e-5."""
    made = bench(Measured(weighted), points(), 4, replicas, learning_rate=0.0, eval_source=points(), **options)
    sums = Sums()
    while made.state.step < 12:  # an epoch
        sums.add(made.run(5).sums)
    expected = by_keras(made.trainer.model, weighted)
    assert expected.keys() >= {"f1_each_0", "f1_each_3", "own_share"}
    for found in (sums.means(), made.strategy.evaluate().means()):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


class Largest(tf.keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(tf.maximum(self.most, tf.reduce_max(y_pred)))

    def result(self):
        return self.most


def mean_of_batches(y_true, y_pred):
    return tf.reduce_max(y_pred) - tf.reduce_mean(y_true)


@pytest.mark.parametrize(
    "metric", [Largest, lambda: tf.keras.metrics.MeanMetricWrapper(mean_of_batches, name="batches")]
)
def test_a_state_that_is_no_sum_is_refused(metric):
    metric = KerasMetric(metric())
    with pytest.raises(ValueError, match=r"Keras metric (largest|batches) .* has a state that is not made of sums"):
        tf.function(lambda: metric(tf.ones([4]), tf.ones([4])), autograph=False)()


def share_of_present(y_true, y_pred):
    is_present = tf.cast(y_true != -1, tf.float32)
    return tf.abs(y_pred - y_true) * is_present / tf.reduce_mean(is_present)


def test_a_metric_that_missing_labels_change_is_refused():
    metric = KerasMetric(tf.keras.metrics.MeanMetricWrapper(share_of_present, name="share"))
    with pytest.raises(
        UsageError, match=r"share .* is not made of sums .* for fit, give a function that returns one val"
    ):
        tf.function(lambda: metric(tf.ones([4, 1]), tf.ones([4, 1])), autograph=False)()


@pytest.mark.parametrize(
    ("metric", "is_refused"),
    [(tf.keras.metrics.SparseCategoricalAccuracy, True), (lambda: tf.keras.metrics.MeanIoU(3), False)],
)
def test_a_metric_that_the_length_of_padding_changes_is_refused(metric, is_refused):
    """Keras's averages are first over the axes of an example, and a batch's padding counts in them."""
    labels, weights = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.float32)
    outputs = tf.TensorSpec([None, None, 3] if is_refused else [None, None], tf.float32)
    metric = KerasMetric(metric())
    with (
        pytest.raises(UsageError, match=r"is not made of sums .*; give it one example per entry, by tf.reshape\(labels")
        if is_refused
        else contextlib.nullcontext()
    ):
        tf.function(metric, autograph=False).get_concrete_function(labels, outputs, weights)
    by_entry = [tf.TensorSpec([None, *spec.shape[2:]], spec.dtype) for spec in (labels, outputs, weights)]
    tf.function(metric, autograph=False).get_concrete_function(*by_entry)


def test_a_metric_of_vectors_says_that_batches_of_one_column_work():
    """F1Score takes no rank 1, as Keras says; what the message says instead does work."""
    metric, labels, shares = KerasMetric(tf.keras.metrics.F1Score(threshold=0.5)), tf.ones([4]), tf.ones([4])
    with pytest.raises(ValueError, match=r"\[batch, 1\] rather than \[batch\].* labels\[:, None\]"):
        tf.function(lambda: metric(labels, shares), autograph=False)()
    tf.function(lambda: metric(labels[:, None], shares[:, None]))()


def test_a_metric_that_its_batches_do_not_fit_is_named():
    metric = KerasMetric(tf.keras.metrics.F1Score())
    with pytest.raises(ValueError, match=r"Keras metric f1_score can't be tried on batches of float32 \[None\] and"):
        tf.function(lambda: metric(tf.ones([4]), tf.ones([4])), autograph=False)()


def test_what_is_no_metric_or_made_in_a_step_is_refused():
    with pytest.raises(UsageError, match=r"is not a tf.keras.metrics.Metric"):
        KerasMetric(tf.keras.losses.MeanSquaredError())
    metric = tf.keras.metrics.AUC()
    with pytest.raises(ValueError, match="made within a step"):
        tf.function(lambda: KerasMetric(metric)(tf.ones([4]), tf.ones([4])), autograph=False)()


def test_a_window_goes_on_after_a_restart_and_a_batch_of_nothing_counts_for_nothing():
    keras = tf.keras.metrics.Precision()
    metric = KerasMetric(keras)
    batches = [([1.0, 0.0, 1.0], [0.9, 0.8, 0.1]), ([1.0], [0.7])]

    def sums(y_true, y_pred):
        pairs = {"precision": metric(tf.constant(y_true), tf.constant(y_pred))}
        return LoopSums(sum_specs(pairs), stack(pairs, tf.float64))

    window = Sums()
    window.add(sums(*batches[0]))
    again = Sums(window.host_state())
    assert again.means() == {"precision": 0.5}  # the saved value, until a step names the metric
    again.add(sums(*batches[1]))
    for batch in batches:
        keras.update_state(*batch)
    assert again.means() == {"precision": pytest.approx(float(keras.result()))}
    pairs = {"precision": tf.nest.map_structure(tf.zeros_like, metric(tf.ones([1]), tf.ones([1])))}
    empty = Sums()
    empty.add(LoopSums(sum_specs(pairs), stack(pairs, tf.float64)))
    np.testing.assert_equal(empty.means(), {"precision": np.nan})
