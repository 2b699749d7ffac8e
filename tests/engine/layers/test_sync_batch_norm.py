"""Batch normalisation over the global batch: replicas compute what one device does, however the examples fall."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.layers import BatchNormalization
from crankshaft.engine.reduction import Reduction
from crankshaft.models import resnet
from crankshaft.models.classification import Classifier
from crankshaft.models.resnet import Model as ResNet


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


def test_what_layers_add_is_refused_where_replicas_take_turns(bench):
    run(bench, Penalised(), 1, steps=1)
    with pytest.raises(ValueError, match=r"Penalised: its layers add to the loss .* leave one of them out"):
        run(bench, Penalised(), 2, steps=1)


def run(bench, trainer, replicas, steps=12, **options):
    made = bench(trainer, images(), 9, replicas, num_classes=4, optimizer="momentum", learning_rate=0.05, **options)
    return made.curve(steps), made


# 20 examples by 9: batches of 9, 9 and 2, so that with four replicas two have no example in every third step.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_replicas_with_and_without_examples_learn_what_one_device_learns(bench, replicas):
    """Sums in another order: 1e-7 a step in float32, which 12 steps with momentum make some 5e-6."""
    curve, one = run(bench, Normalised(), 1)
    other_curve, many = run(bench, Normalised(), replicas)
    np.testing.assert_allclose(other_curve, curve, rtol=2e-5)
    for variable, other in zip(one.trainer.model.variables, many.trainer.model.variables, strict=True):
        first, *others = many.copies(other)
        np.testing.assert_allclose(first, variable.numpy(), rtol=1e-4, atol=1e-5)
        for copy in others:
            np.testing.assert_array_equal(copy, first)


def test_without_it_each_replica_normalises_its_own(bench, monkeypatch):
    """The same comparison fails where statistics are each replica's own: the test above can tell."""
    curve, _ = run(bench, Normalised(), 1)
    monkeypatch.setattr(Reduction, "sum_statistics", None)
    other_curve, _ = run(bench, Normalised(), 2)
    assert not np.allclose(other_curve, curve, rtol=1e-2)


def in_float64(model, weights, batches):
    """The loss of each step, in float64, by Keras's own normalisation and NumPy's momentum."""
    model.set_weights([weight.astype(np.float64) for weight in weights])
    variables = model.trainable_variables
    slots, losses = [np.zeros(variable.shape) for variable in variables], []

    @tf.function
    def gradients_of(features, labels):
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, variables)

    for features, labels in batches:
        loss, gradients = gradients_of(tf.cast(features, tf.float64), labels)
        losses.append(float(loss))
        for index, gradient in enumerate(gradients):
            slots[index] = 0.9 * slots[index] - 0.05 * gradient.numpy()
            variables[index].assign_add(slots[index])
    return losses


@pytest.mark.slow
def test_a_resnet_is_as_near_to_float64_on_two_replicas_as_on_one(bench, monkeypatch):
    """Rounding alone is between them: 1e-7 at first, 3e-6 in these steps.

    With more steps, or pixels, some ReLU's input comes so near to 0 that rounding says if a gradient passes; then
    one device, two replicas and Keras's own layers in float32 are all as far from float64, and from each other.
    """
    steps, batch_size, curves = 5, 8, []
    x, y = images(steps * batch_size)
    options = {"num_classes": 4, "optimizer": "momentum", "learning_rate": 0.05, "seed": 1, "shuffle": False}
    for replicas in (1, 2):
        made = bench(ResNet(20, sync_batch_norm=True), (x, y), batch_size, replicas, **options)
        weights = [variable.numpy() for variable in made.trainer.model.weights]
        curves.append(made.curve(steps))
        for variable in made.trainer.model.variables:
            assert len({copy.tobytes() for copy in made.copies(variable)}) == 1
    monkeypatch.setattr(resnet, "BatchNormalization", lambda total, **kw: tf.keras.layers.BatchNormalization(**kw))
    tf.keras.config.set_dtype_policy("float64")
    batches = [(x[start : start + batch_size], y[start : start + batch_size]) for start in range(0, len(x), batch_size)]
    exact = in_float64(made.trainer.build_model(), weights, batches)
    for curve in curves:
        np.testing.assert_allclose(curve, exact, rtol=1e-5)
