"""Batch normalisation over the global batch: replicas compute what one device does, however the examples fall."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.layers import BatchNormalization
from crankshaft.models.classification import Classifier
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough


def images(examples=20, size=6):
    """Each class brighter than the one before: a replica's mean tells of its labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, examples).astype(np.int32)
    pictures = 1.0 * labels[:, None, None, None] + rng.normal(size=(examples, size, size, 3))
    return pictures.astype(np.float32), labels


class Normalised(Classifier):
    """Two convolutions, each normalised over all replicas, and a shortcut, so that two gradients meet."""

    def build_model(self):
        layers, total = tf.keras.layers, self.reduction.sum_statistics
        inputs = tf.keras.Input([6, 6, 3])
        x = BatchNormalization(total)(inputs)
        y = BatchNormalization(total)(layers.Conv2D(3, 3, padding="same")(x))
        x = layers.Flatten()(layers.ReLU()(x + y))
        return tf.keras.Model(inputs, layers.Dense(self.run_context.num_classes)(x))


class Penalised(Normalised):
    """And a layer before that adds to the loss."""

    def build_model(self):
        inputs = tf.keras.Input([6, 6, 3])
        start = tf.keras.layers.ActivityRegularization(l2=0.1)
        return tf.keras.Model(inputs, super().build_model()(start(inputs)))


def test_what_layers_add_is_each_replicas_own_where_replicas_take_turns(bench):
    curve, _ = run(bench, Penalised(), 1, steps=4)
    other_curve, _ = run(bench, Penalised(), 2, steps=4)
    np.testing.assert_allclose(other_curve, curve, rtol=2e-5)


def run(bench, trainer, replicas, steps=12, data=None, batch_size=9, **options):
    options |= {"num_classes": 4, "optimizer": "momentum", "learning_rate": 0.05}
    made = bench(trainer, data or images(), batch_size, replicas, **options)
    return made.curve(steps), made


# 20 examples by 9: batches of 9, 9 and 2, which four replicas each compute, in every third step.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_replicas_learn_what_one_device_learns_however_few_examples_there_are(bench, replicas):
    """Sums in another order: 1e-7 a step in float32, which 12 steps with momentum make some 5e-6."""
    curve, one = run(bench, Normalised(), 1)
    other_curve, many = run(bench, Normalised(), replicas)
    assert_alike(many, other_curve, one, curve)


def test_replicas_without_examples_add_nothing_to_moments(bench):
    """Two of four, those of a worker without examples of its own; and one of the others at each epoch's end."""
    examples = tuple(array[:19] for array in images())
    curve, one = run(bench, Normalised(), 1, 6, examples, shuffle=False)
    stream = tf.data.Dataset.from_tensor_slices(examples)
    other_curve, many = run(bench, Normalised(), 4, 6, stream, 18, workers=2, shuffle=False)
    assert_alike(many, other_curve, one, curve)


def assert_alike(many, other_curve, one, curve):
    np.testing.assert_allclose(other_curve, curve, rtol=2e-5)
    for variable, other in zip(one.trainer.model.variables, many.trainer.model.variables, strict=True):
        np.testing.assert_allclose(many.held(other), variable.numpy(), rtol=1e-4, atol=1e-5)


class Words(Squares):
    """Sentences padded with zeros, normalized by Keras's layer over their words."""

    def build_model(self):
        layers = tf.keras.layers
        normalized, pooled = layers.BatchNormalization(synchronized=True, momentum=0.0), layers.GlobalAveragePooling1D()
        return tf.keras.Sequential([tf.keras.Input([6, 3]), layers.Masking(), normalized, pooled, layers.Dense(1)])


def test_masked_positions_count_on_no_replica(bench):
    rng = np.random.default_rng(0)
    lengths = np.array([6, 1, 1, 1, 5, 1, 1, 2, 1, 6, 1, 1, 1, 1, 1, 6, 4, 1, 1, 2])
    is_word = np.arange(6) < lengths[:, None]
    words = rng.normal(size=(20, 6, 3)) * lengths[:, None, None] + 5 * np.sqrt(lengths)[:, None, None]
    words = (words * is_word[..., None]).astype(np.float32)
    options = {"optimizer": "sgd", "learning_rate": 0.02, "shuffle": False}
    labels = rng.normal(size=20).astype(np.float32)
    one, many = (bench(Words(), (words, labels), 9, replicas, **options) for replicas in (1, 3))
    for first in (0, 9, 18):  # the last batch has fewer examples than replicas
        for each in (one, many):
            each.train(each.state.step + 1)
        expected, found = ([each.held(v) for v in each.trainer.model.variables] for each in (one, many))
        seen = words[first : first + 9][is_word[first : first + 9]].astype(np.float64)
        np.testing.assert_allclose(found[2], seen.mean(0), rtol=1e-5)
        np.testing.assert_allclose(found[3], seen.var(0), rtol=1e-5)
        for variable, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(variable, value, rtol=1e-5, atol=1e-6)
