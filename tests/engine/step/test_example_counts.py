"""Shapes that make pairs of examples are named before anything is learned from them, and nothing else is refused."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Mean, Trainer, mean
from crankshaft.engine.metrics.means import root_mean_square


class Line(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean((outputs - batch[1]) ** 2)


class InMetrics(Line):
    def loss(self, outputs, batch):
        return mean((outputs[:, 0] - batch[1]) ** 2)

    def metrics(self, outputs, batch):
        return {"rmse": root_mean_square(outputs - batch[1])}


class Weighted(Line):
    def loss(self, outputs, batch):
        return mean((outputs - batch[1]) ** 2, tf.abs(batch[1]))


class Tokens(Trainer):
    """A loss of each token, those of the padding without weight."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(5)])

    def loss(self, outputs, batch):
        return mean((outputs - batch[1]) ** 2, batch[1] > 0.2)


class Flat(Tokens):
    def loss(self, outputs, batch):
        return mean(tf.reshape((outputs - batch[1]) ** 2, [-1]))


class Pairs(Line):
    """Each pair of examples, and that is meant."""

    def loss(self, outputs, batch):
        values = (outputs - batch[1][None, :]) ** 2
        return Mean(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))


class OfOneSize(Tokens):
    def loss(self, outputs, batch):
        return mean(tf.reshape(outputs, [2, 25]))


def data(*label_shape, kind=np.asarray):
    rng = np.random.default_rng(0)
    features, labels = rng.random((25, 3), np.float32), rng.random((25, *label_shape), np.float32)
    if kind is np.asarray:
        return features, labels
    return tf.data.Dataset.from_tensor_slices((features, labels))


@pytest.mark.parametrize("kind", [np.asarray, tf.data.Dataset], ids=["arrays", "dataset"])
@pytest.mark.parametrize(
    ("trainer", "replicas", "options"),
    [
        (Line, 1, {}),
        (Line, 2, {}),
        (Line, 1, {"accumulate_steps": 3}),
        (Line, 1, {"batch_parts": 2}),
        (InMetrics, 1, {}),
        (Weighted, 1, {}),
    ],
)
def test_pairs_of_examples_are_named_with_both_shapes(bench, kind, trainer, replicas, options):
    made = bench(trainer(), data(kind=kind), 10, replicas, **options)
    where = f"{trainer.__name__}.{'metrics' if trainer is InMetrics else 'loss'}"
    with pytest.raises(ValueError, match=rf"{where}: values \[n, 1\] and \[n\] .* broadcast to \[n, n\]") as error:
        made.train(1)
    assert "(outputs are [n, 1], labels [n]); make the shapes alike" in str(error.value)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("trainer", "label_shape"), [(Line, (1,)), (Weighted, (1,)), (Tokens, (5,)), (Flat, (5,)), (Pairs, ())]
)
def test_several_values_an_example_are_taken(bench, trainer, label_shape, replicas):
    made = bench(trainer(), data(*label_shape), 10, replicas)
    assert np.isfinite(made.train(4)["loss"]).all()


def test_a_loss_that_is_written_for_batches_of_one_size_is_taken(bench):
    made = bench(OfOneSize(), data(5), 10)
    assert np.isfinite(made.train(2)["loss"]).all()


def test_an_evaluation_alone_is_checked_too(bench):
    made = bench(Line(), data(1), 10, eval_source=data())
    with pytest.raises(ValueError, match=r"Line\.loss: values \[n, 1\] and \[n\] .* broadcast to \[n, n\]"):
        made.strategy.evaluate()
