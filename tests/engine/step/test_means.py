"""A loss that is a sum of means, each over its own count: NumPy's, whatever replica or micro-batch lacks a label."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean, minimize, weighed
from crankshaft.engine import errors
from crankshaft.engine.metrics.means import as_losses, auc, root_mean_square
from crankshaft.engine.metrics.sums import Sums
from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction.local_sgd import LocalSgd

pytestmark = pytest.mark.thorough

BATCH, RATE, EPOCHS, PENALTY = 8, 0.05, 3, 0.01
rng = np.random.default_rng(5)
FEATURES = rng.normal(size=(25, 3)).astype(np.float32)  # three batches, and one of a single example
LABELS = (FEATURES @ rng.normal(size=(3, 2)) + rng.normal(size=(25, 2))).astype(np.float32)
KNOWN = np.ones((25, 2), bool)
KNOWN[rng.random(25) < 0.3, 0] = False
KNOWN[np.arange(25) % BATCH >= 3, 1] = False  # none on the second replica, nor in the last micro-batches
KNOWN[24] = True, False  # none in the last batch
EVEN, WEIGHTS = np.ones(25), rng.uniform(0.5, 2, 25).astype(np.float32)
SOURCE = (FEATURES, np.where(KNOWN, LABELS, np.float32("nan")))


class Tasks(Trainer):
    """Two linear models of some missing labels, the first weighed by its uncertainty."""

    def __init__(self, penalty: float = 0.0):
        super().__init__()
        self.penalty = penalty

    def build_model(self):
        l2 = tf.keras.regularizers.L2(self.penalty) if self.penalty else None
        return tf.keras.Sequential([tf.keras.layers.Dense(2, kernel_initializer="zeros", kernel_regularizer=l2)])

    def build(self):
        self.log_variance = tf.Variable(0.5, name="log_variance")
        super().build()

    @property
    def trainable_variables(self):
        return [*super().trainable_variables, self.log_variance]

    def loss(self, outputs, batch):
        known = tf.math.is_finite(batch[1])
        errors = tf.square(outputs - tf.where(known, batch[1], 0.0))
        first, second = (mean(errors[:, i], weights=known[:, i]) for i in range(2))
        spread = mean(tf.fill(tf.shape(outputs)[:1], self.log_variance))
        return {"first": tf.exp(-self.log_variance) * first, "second": 0.3 * second, "spread": spread}


def descended(weights=EVEN, penalty: float = 0.0, clip: float = np.inf):
    """NumPy's descent in float64: (kernel, bias, log_variance, each mean's (total, count) over all steps)."""
    kernel, bias, log_variance, sums = np.zeros((3, 2)), np.zeros(2), 0.5, np.zeros((3, 2))
    for _ in range(EPOCHS):
        for first in range(0, 25, BATCH):
            rows = slice(first, first + BATCH)
            x, w = FEATURES[rows].astype(np.float64), weights[rows, np.newaxis].astype(np.float64)
            counted = w * KNOWN[rows]
            error, factors = x @ kernel + bias - LABELS[rows], np.array([np.exp(-log_variance), 0.3])
            totals, counts = (counted * error**2).sum(0) * factors, counted.sum(0)
            sums += [*zip(totals, counts, strict=True), (w.sum() * log_variance, w.sum())]
            slopes = 2 * factors * counted * error / np.where(counts, counts, 1)
            gradients = [x.T @ slopes + 2 * penalty * kernel, slopes.sum(0), 1 - totals[0] / counts[0]]
            scale = min(1, clip / np.sqrt(sum(np.sum(each**2) for each in gradients)))
            values = kernel, bias, log_variance
            moved = (value - RATE * scale * each for value, each in zip(values, gradients, strict=True))
            kernel, bias, log_variance = moved
    return kernel, bias, log_variance, sums


def check(bench, tolerance: float = 1e-5, **how):
    """float32 beside float64: a few roundings a step, twelve steps."""
    found = bench.train(EPOCHS * 4)
    *weights, sums = descended(**how)
    trained = [*bench.trainer.model.get_weights(), bench.trainer.log_variance.numpy()]
    for own, expected in zip(trained, weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=tolerance, atol=tolerance)
    for name, expected in zip(("first", "second", "spread"), sums, strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=tolerance)
    np.testing.assert_allclose(found["loss"].value(), (sums[:, 0] / sums[:, 1]).sum(), rtol=tolerance)
    return found


def made(bench, replicas, source=SOURCE, trainer=None, **options):
    options = {"shuffle": False, "optimizer": "sgd", "learning_rate": RATE, **options}
    return bench(trainer or Tasks(), source, BATCH, replicas, **options)


@pytest.mark.parametrize(
    ("replicas", "options"),
    [pytest.param(1, {"accumulate_steps": 3}, marks=pytest.mark.slow), (2, {"parallel_micro_batches": 2})],
)
def test_each_mean_is_over_its_own_count(bench, replicas, options):
    check(made(bench, replicas, **options))


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(1, {"jit": True}), pytest.param(2, {}, marks=pytest.mark.slow), (2, {"accumulate_steps": 3})],
    ids=str,
)
def test_with_weights_of_examples_penalties_and_clipping(bench, replicas, options):
    ready = made(bench, replicas, (*SOURCE, WEIGHTS), Tasks(PENALTY), clip_norm=0.8, **options)
    found = check(ready, weights=WEIGHTS, penalty=PENALTY, clip=0.8)
    assert found["loss_with_penalties"].value() > found["loss"].value()


class Minimizing(Tasks):
    """The same, by a step of its own."""

    def train_step(self, batch):
        return minimize(self, batch, self.losses, {"loss": self.optimizer})

    def losses(self, batch):
        return {"loss": weighed(self.loss, self.model(batch[0], training=True), batch)}


def test_a_loss_that_minimize_gets_may_be_several_means(bench):
    how = {"accumulate_steps": 3, "clip_norm": 0.8}
    check(made(bench, 2, (*SOURCE, WEIGHTS), Minimizing(), **how), weights=WEIGHTS, clip=0.8)
    repeated = Minimizing()
    own = Minimizing.losses
    for losses in (
        lambda batch: {"first": mean(batch[0]), **own(repeated, batch)},
        lambda batch: {"first": own(repeated, batch)["loss"]},
    ):
        repeated.losses = losses
        with pytest.raises(errors.UsageError, match=r"Minimizing\.train_step: two metrics have the name 'first'"):
            made(bench, 1, trainer=repeated).train(1)


def test_with_float16s_loss_scale(bench):
    half = made(bench, 2, accumulate_steps=3, precision="float16")
    half.trainer.loss_scale.value.assign(128.0)  # none overflows, so no step is skipped
    check(half, tolerance=0.01)  # of products rounded to 11 bits


def test_with_local_sgd_each_replica_divides_by_its_own_counts(bench):
    synced = made(bench, 2, reduction=LocalSgd(1, outer(1.0, 0.0)))
    synced.run(1)
    weights, counts = [], []
    for first in (0, 4):
        alone = made(bench, 1, tuple(array[first : first + 4] for array in SOURCE))
        counts.append(alone.run(1).sums.read()["loss"].count.sum())
        weights.append([variable.numpy() for variable in alone.trainer.trainable_variables])
    for variable, *own in zip(synced.trainer.trainable_variables, *weights, strict=True):
        np.testing.assert_allclose(synced.held(variable), np.average(own, 0, counts), rtol=1e-6)  # two float32 sums


class Adding(Tasks):
    """A mean of few examples, of none on the second replica; a layer adds one of all."""

    def build_model(self):
        class Spread(tf.keras.layers.Layer):
            def call(self, x):
                self.add_loss(tf.reduce_mean(tf.square(x - 1)))
                return x

        return tf.keras.Sequential([tf.keras.layers.Dense(2, kernel_initializer="zeros"), Spread()])

    def loss(self, outputs, batch):
        return super().loss(outputs, batch)["second"]


def test_what_a_layer_adds_of_a_batch_counts_by_its_examples_whatever_the_loss_counts(bench):
    how = {"shuffle": False, "optimizer": "sgd", "learning_rate": RATE}
    source = SOURCE[0][:24], SOURCE[1][:24]
    found = [
        (made := bench(Adding(), source, BATCH, replicas, accumulate_steps=steps, **how)).train(4)
        and made.trainer.model.get_weights()
        for replicas, steps in ((1, 1), (2, 1), (1, 4), (2, 4))
    ]
    for others in found[1:]:
        for own, expected in zip(others, found[0], strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "Tasks.loss returned an empty dictionary; return a mean by name"),
        ({"loss": mean([1.0])}, "Tasks.loss: 'loss' can't be the name of a metric"),
        ({"a": tf.constant(1.0)}, "Tasks.loss['a']: a EagerTensor is not a pair"),
        ({"a": auc([0.0, 1.0], [1.0, 2.0])}, "Tasks.loss['a'] is a Auc; return a crankshaft.mean(losses)"),
    ],
    ids=["empty", "name", "no pair", "no mean"],
)
def test_what_is_no_sum_of_means(value, message):
    with pytest.raises(errors.UsageError, match=re.escape(message)):
        as_losses(value, "Tasks.loss")


@pytest.mark.parametrize(
    "factor", [2, 2.0, np.float32(2), tf.constant(2.0), tf.Variable(2.0)], ids=lambda factor: type(factor).__name__
)
def test_multiplying_a_mean_multiplies_its_total(factor):
    pair = mean([1.0, 2.0, 6.0], direction="max")
    for product in (factor * pair, pair * factor):
        assert (float(product.total), float(product.count), product.direction) == (18.0, 3.0, "max")
        weighed = product.weigh(tf.constant([1.0, 0.0, 3.0]))
        assert (float(weighed.total), float(weighed.count)) == (38.0, 4.0)
    with pytest.raises(errors.UsageError, match="only a crankshaft"):
        factor * root_mean_square([1.0])


def test_evaluation_is_the_sum_over_the_whole_split(bench):
    sums = made(bench, 2, eval_source=SOURCE).strategy.evaluate()
    known = np.where(KNOWN, LABELS.astype(np.float64) ** 2, 0).sum(0) / KNOWN.sum(0)  # the model returns zeros
    np.testing.assert_allclose(sums.means()["loss"], known @ [np.exp(-0.5), 0.3] + 0.5, rtol=1e-6)
    assert Sums(json.loads(json.dumps(sums.host_state()))).means() == sums.means()  # as a run that is resumed reads it


class Rows(Tasks):
    """Slices of a table from one mean or two, and a whole gradient of it from another."""

    def forward(self, features, training):
        return tf.gather(self.table, tf.cast(features[:, 0] > 0, tf.int32))

    def build(self):
        self.table = tf.Variable([0.5, 1.0, 2.0], name="table")
        super().build()

    @property
    def trainable_variables(self):
        return [self.table]

    def loss(self, outputs, batch):
        own = {"first": mean(tf.square(outputs)), "second": mean(outputs, weights=batch[0][:, 1] > 0.5)}
        return {**own, "whole": mean(tf.square(self.table))} if len(batch[1].shape) > 1 else own


@pytest.mark.parametrize(
    "labels", [LABELS, pytest.param(LABELS[:, 0], marks=pytest.mark.slow)], ids=["mixed", "slices"]
)
def test_rows_of_a_table(bench, labels):
    whole, parts = (
        made(bench, replicas, (FEATURES, labels), Rows(), accumulate_steps=steps)
        for replicas, steps in ((1, 1), (2, 3))
    )
    expected, found = whole.train(8), parts.train(8)
    np.testing.assert_allclose(parts.held(parts.trainer.table), whole.trainer.table, rtol=1e-5)
    np.testing.assert_allclose(found["second"], expected["second"], rtol=1e-5)
