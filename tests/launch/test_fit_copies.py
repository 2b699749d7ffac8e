"""`crankshaft.fit` of a model whose configuration does not say all that was set on it: its copy has that too."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from tests.logical_cpus import make_four

keras = tf.keras
layers = keras.layers

make_four()  # before anything touches the devices
RANDOM = np.random.default_rng(5)
X, Y = RANDOM.normal(size=(48, 3)).astype("float32") + 3, RANDOM.normal(size=(48, 1)).astype("float32")
HOW = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}


class Block(layers.Layer):
    """Has layers, a constant and a function of its own, which `get_config` does not return."""

    def __init__(self, units, **more):
        super().__init__(**more)
        self.units, self.scale, self.shifts, self.function = units, 1.0, np.zeros(units, "float32"), tf.identity
        self.first, self.second = layers.Dense(units), layers.Dense(units, use_bias=False)
        self.norm = layers.BatchNormalization(momentum=0.5)

    def build(self, shape):
        for layer in (self.first, self.norm, self.second):
            layer.build(shape)
            shape = (None, self.units)

    def call(self, inputs, training=None):
        hidden = self.norm(self.first(inputs), training=training) * self.scale + self.shifts
        return tf.cast(self.function(self.second(hidden)), tf.float32)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def model(change=lambda block: None):
    keras.utils.set_random_seed(1)
    block = Block(4)
    made = keras.Sequential([keras.Input([3]), block, layers.Dense(1)])
    change(block)
    made.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    return made


def changed(block):
    block.first.trainable = block.norm.trainable = False
    block.second.dtype_policy = "mixed_bfloat16"
    block.second.kernel.regularizer = keras.regularizers.L2(0.3)
    block.scale, block.shifts, block.function = 0.5, np.arange(4, dtype="float32"), tf.nn.relu


@pytest.mark.parametrize("change", [changed, lambda block: setattr(block.second.kernel, "trainable", False)])
def test_what_a_configuration_leaves_out_is_in_the_copy(change):
    theirs, ours = model(change), model(change)
    expected = theirs.fit(X, Y, **HOW).history["loss"]
    run = crankshaft.fit(ours, X, Y, **HOW, jit="off")
    np.testing.assert_allclose(run.history.history["loss"], expected, rtol=1e-6)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert [each.path for each in run.model.weights] == [each.path for each in ours.weights]  # for --freeze


def test_what_cannot_be_copied_is_one_line():
    factor = 3.0
    bound = model(lambda block: setattr(block, "function", lambda x: factor * x))  # its factor may be a weight
    with pytest.raises(crankshaft.UsageError, match=r"Block sequential.*/block.* has another function"):
        crankshaft.fit(bound, X, Y, **HOW, jit="off")


def test_an_optimizer_goes_on_where_layers_were_frozen_since():
    """Freed again, they need optimizer state that it never had."""
    ours = model()
    crankshaft.fit(ours, X, Y, **HOW, jit="off")
    ours.layers[0].trainable = False
    before, moved = [np.array(layer.weights[0]) for layer in (ours.layers[0].first, ours.layers[1])], []
    crankshaft.fit(ours, X, Y, **HOW, jit="off")
    assert int(ours.optimizer.iterations) == 24
    after = [np.array(layer.weights[0]) for layer in (ours.layers[0].first, ours.layers[1])]
    moved = [float(np.abs(one - other).max()) for one, other in zip(before, after, strict=True)]
    assert moved[0] == 0.0 < moved[1]

    frozen = model(lambda block: setattr(block, "trainable", False))
    frozen.optimizer.build(frozen.trainable_variables)
    frozen.layers[0].trainable = True
    with pytest.raises(crankshaft.UsageError, match=r"without .*, which is trainable by now; call compile"):
        crankshaft.fit(frozen, X, Y, **HOW, jit="off")
