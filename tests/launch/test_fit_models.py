"""`crankshaft.fit` of models that differ from what their configuration says, or make layers late."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from tests.launch.test_fit import assert_close
from tests.logical_cpus import make_four

keras = tf.keras
layers = keras.layers

make_four()  # before anything touches the devices
RANDOM = np.random.default_rng(5)
X, Y = RANDOM.normal(size=(48, 3)).astype("float32") + 3, RANDOM.normal(size=(48, 1)).astype("float32")
COPIES = {"strategy": "mirrored", "num_virtual_devices": 1}  # makes its variables itself
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


@pytest.mark.parametrize("where", [{}, COPIES], ids=["itself", "copy"])
@pytest.mark.parametrize("change", [changed, lambda block: setattr(block.second.kernel, "trainable", False)])
def test_what_a_configuration_leaves_out_is_trained_in_the_model_itself_and_in_a_copy(change, where):
    theirs, ours = model(change), model(change)
    expected = theirs.fit(X, Y, **HOW).history["loss"]
    run = crankshaft.fit(ours, X, Y, **HOW, **where, jit="off")
    np.testing.assert_allclose(run.history.history["loss"], expected, rtol=1e-6)
    assert (run.models["model"] is ours) == (not where)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert_close(ours, theirs, 1e-5, 1e-6)
