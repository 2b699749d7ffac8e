"""What is found in Keras's layers."""

import tensorflow as tf

from crankshaft.engine.internals import keras


class Counted(tf.keras.layers.Layer):
    """Has a weight, a mean and a count, of which the forward pass changes the last two."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=shape[1:])
        self.mean = self.add_weight(name="mean", shape=(), trainable=False)
        self.count = self.add_weight(name="count", shape=(), dtype="int32", trainable=False)


def test_statistics_move_also_of_frozen_layers_but_for_those_whose_statistics_are_then_constant():
    found = {}
    for layer in (
        Counted(),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.Normalization(mean=1.0, variance=2.0),
    ):
        layer.build((None, 3))
        for layer.trainable in (True, False):
            both = keras.moved_variables([layer]), keras.moving_statistics([layer])
            found[type(layer).__name__, layer.trainable] = [*map(len, both)]
    assert found == {
        ("Counted", True): [2, 1],
        ("Counted", False): [2, 1],
        ("BatchNormalization", True): [2, 2],
        ("BatchNormalization", False): [0, 0],
        ("Normalization", True): [0, 0],
        ("Normalization", False): [0, 0],
    }
