"""Residual networks: of the published sizes, with shortcuts that change nothing, and they learn."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import StepOptions
from crankshaft.engine.build import prepare
from crankshaft.engine.step.options import RunContext
from crankshaft.models.resnet import Model

pytestmark = pytest.mark.thorough


def built(trainer: Model, shape=(32, 32, 3), classes=10, **options) -> Model:
    example = np.zeros([1, *shape], np.float32), np.zeros([1], np.int32)
    return prepare(trainer, RunContext(StepOptions(**options), classes, example=example))


def layers(trainer: Model, *kinds: type) -> list:
    return [layer for layer in trainer.model.layers if isinstance(layer, kinds)]


# Weights: the paper's table 6 has 0.27 M, 0.85 M and 1.7 M, and these are what others count whose shortcuts are of
# option A too (github.com/akamaster/pytorch_resnet_cifar10); those of the larger ones are torchvision's. Pixels: the
# paper's section 4.2 and table 1.
@pytest.mark.parametrize(
    ("depth", "shape", "classes", "weights", "sides"),
    [
        (20, (32, 32, 3), 10, 269_722, {32, 16, 8}),
        (56, (32, 32, 3), 10, 853_018, {32, 16, 8}),
        pytest.param(110, (32, 32, 3), 10, 1_727_962, {32, 16, 8}, marks=pytest.mark.slow),
        pytest.param(50, (224, 224, 3), 1000, 25_557_032, {112, 56, 28, 14, 7}, marks=pytest.mark.thorough),
        pytest.param(101, (224, 224, 3), 1000, 44_549_160, {112, 56, 28, 14, 7}, marks=pytest.mark.slow),
    ],
)
def test_it_has_the_published_number_of_weights_and_layers(depth, shape, classes, weights, sides):
    trainer = built(Model(depth), shape, classes)
    assert sum(np.prod(v.shape) for v in trainer.trainable_variables) == weights
    weighted = layers(trainer, tf.keras.layers.Conv2D, tf.keras.layers.Dense)
    assert sum(not layer.name.endswith("shortcut") for layer in weighted) == depth
    assert {layer.output.shape[1] for layer in layers(trainer, tf.keras.layers.ReLU)} == sides


def test_a_block_without_weights_hands_on_every_second_pixel_and_zeros():
    """With all but the first convolution at zero, only shortcuts are left: option A."""
    trainer = built(Model(20), (12, 12, 3))
    convolutions, norms = layers(trainer, tf.keras.layers.Conv2D), layers(trainer, tf.keras.layers.BatchNormalization)
    for layer in convolutions[1:]:
        layer.kernel.assign(tf.zeros_like(layer.kernel))
    images = tf.random.stateless_normal([2, 12, 12, 3], seed=[1, 2])
    first = tf.nn.relu(norms[0](convolutions[0](images)))
    last = tf.keras.Model(trainer.model.inputs, layers(trainer, tf.keras.layers.ReLU)[-1].output)(images)
    np.testing.assert_array_equal(last[..., :16], first[:, ::4, ::4])
    np.testing.assert_array_equal(last[..., 16:], tf.zeros([2, 3, 3, 48]))


def test_it_learns_stripes(bench):
    """Four classes of noisy stripes, also by the moving statistics, which evaluation uses."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 512).astype(np.int32)
    stripes = np.sin(np.arange(8) * (1 + labels[:, None]) / 2).astype(np.float32)
    source = stripes[:, :, None, None] + rng.normal(0, 1, (512, 8, 8, 1)).astype(np.float32), labels
    options = {"num_classes": 4, "optimizer": "momentum", "learning_rate": 0.05, "block_steps": 40}
    made = bench(Model(20), source, 32, eval_source=source, eval_batch_size=64, **options)
    made.train(40)
    assert made.strategy.evaluate().means()["accuracy"] > 0.95


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Model(18), "depth=18 is unknown; use one of 20, 32, 44, 56, 110, 50, 101, 152"),
        (lambda: built(Model(), (784,)), "resnet takes images"),
        (lambda: built(Model(sync_batch_norm=True), accumulate_steps=2), "needs whole batches, and accumulate_steps=2"),
    ],
)
def test_what_it_cannot_do_is_said(make, says):
    with pytest.raises(ValueError, match=says):
        make()
