"""Layers and weights that a Keras layer holds in a list, a dictionary or a tuple are saved as any others are."""

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, load_weights, objects
from crankshaft.engine.errors import UsageError
from crankshaft.engine.internals.variables import tf_variable
from tests.engine.checkpoints.checkpoint_cases import bits, fill, variables_of

layers = tf.keras.layers


class Block(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units)
        self.stages = {"norm": layers.LayerNormalization(), "out": (layers.Dense(units), layers.Dense(units))}

    def build(self, shape):
        self.scales = [self.add_weight(name=f"scale_{n}", shape=(2,)) for n in range(2)]

    def call(self, x):
        for layer in (self.dense, self.stages["norm"], *self.stages["out"]):
            x = layer(x)
        return x * self.scales[0] + self.scales[1]


class Blocks(tf.keras.Model):
    def __init__(self, number):
        super().__init__()
        self.blocks = [Block(2) for _ in range(number)]
        self.head = layers.Dense(1)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stacked():
    cells = layers.RNN([layers.GRUCell(3), layers.GRUCell(2)])
    return tf.keras.Sequential([tf.keras.Input([4, 2]), cells, layers.Dense(1)])


class Masked(tf.keras.constraints.Constraint):
    def __init__(self):
        self.masks = {"kernel": tf.keras.Variable(tf.ones([2, 1]), trainable=False)}

    def __call__(self, weight):
        return weight * self.masks["kernel"]


class Plain(layers.Dense):
    """Has variables that Keras does not list: plain ones, and those of a constraint."""

    def __init__(self):
        super().__init__(1, kernel_constraint=Masked())
        self.scale, self.scales = tf.Variable(1.0), [tf.Variable(1.0), tf.Variable([1.0, 2.0])]


def made(kind):
    model = {"blocks": lambda: Blocks(2), "cells": stacked, "plain": lambda: tf.keras.Sequential([Plain()])}[kind]()
    model(tf.zeros([1, 4, 2] if kind == "cells" else [1, 2]))
    return tf.train.Checkpoint(model=model)


def unlisted(model):
    for layer in model.layers:
        if isinstance(layer, Plain):
            return [layer.scale, *layer.scales, layer.kernel_constraint.masks["kernel"]]
    return []


@pytest.mark.parametrize("kind", ["blocks", "cells", "plain"])
def test_what_a_layer_holds_in_a_list_is_saved_and_restored(tmp_path, kind):
    state = made(kind)
    reached = {id(tf_variable(variable)) for variable in variables_of(state)}
    weights = [*state.model.weights, *unlisted(state.model)]
    assert reached == {id(tf_variable(weight)) for weight in weights}
    fill(state, 1)
    before = [value.numpy().tobytes() for value in weights]
    checkpoints = Checkpoints(tmp_path, state, keep=None, about={})
    checkpoints.save(1, {}, wait=True)
    stored = tf.train.load_checkpoint(checkpoints.latest().prefix).get_variable_to_shape_map()
    assert set(checkpoints.latest().variables) == {key for key in stored if key.startswith("model/")}
    fill(state, 2)
    checkpoints.restore()
    assert [value.numpy().tobytes() for value in weights] == before
    other = made(kind)
    assert len(load_weights(tmp_path, other.model, "model")) == len(weights)
    assert bits(other) == bits(state)


def test_a_dictionary_whose_keys_are_numbers_is_named_by_its_attribute():
    root = tf.Module()
    root.parts = {"heads": [{7: tf.Variable(1.0)}]}
    with pytest.raises(UsageError, match=r"^trainer\.parts\.heads\.0 \(keys 7\): .*; use text"):
        [*objects.walk(tf.train.Checkpoint(trainer=root))]
