"""Weights of layers that are cut over a mesh: how they are made and initialized. Host code."""

from __future__ import annotations

import random

import tensorflow as tf

from ..internals import keras
from ..layers.embeddings import hashing
from ..mesh import cuts
from ..mesh.cuts import Box, Cut
from ..mesh.mesh import MODEL


@tf.keras.utils.register_keras_serializable("crankshaft")
class Normal(tf.keras.initializers.Initializer):
    """Draws each value of a matrix by its position, so that a part drawn by itself equals that part of the whole.

    Args:
      stddev: of the normal distribution, whose mean is 0; no draw lies beyond 5.3 times that.
      seed: None draws one from Python's `random`, which `tf.keras.utils.set_random_seed` seeds.
    """

    def __init__(self, stddev: float, seed: int | None = None):
        self.stddev = stddev
        self.seed = random.randrange(1 << 31) if seed is None else seed

    def __call__(self, shape, dtype=None):
        shape = tuple(shape)
        return tf.cast(self.draw(Box((0,) * len(shape), shape)), dtype or tf.float32)

    def draw(self, box: Box) -> tf.Tensor:
        """Returns the values of a part of the matrix, float32 of `box.size`."""
        (first_row, first_column), (rows, columns) = box
        numbers = tf.range(first_row, first_row + rows, dtype=tf.int64)
        even = hashing.draws(numbers, columns, self.seed, first=first_column)
        # In float64: float32's kernel rounds a value differently depending on where in the array it stands.
        return tf.cast(self.stddev * tf.math.ndtri(tf.cast(even, tf.float64)), tf.float32)

    def get_config(self):
        return {"stddev": self.stddev, "seed": self.seed}


def add(layer: tf.keras.layers.Layer, name: str, shape, initial, cut_axis: int | None = None) -> tf.keras.Variable:
    """Adds a weight to a layer that has a `mesh`; on a mesh of one replica it is an ordinary weight.

    No replica ever holds more of a cut weight than its part: the part is made of zeros and filled piece by piece.

    Args:
      layer: the weight is cut over its attribute `mesh`.
      name: of the weight.
      shape: of the whole weight.
      initial: a `Normal`, or the name of a Keras initializer that fills with one number, "zeros" or "ones".
      cut_axis: the weight's axis that is cut over the mesh's axis `model`; None makes a copy on each replica.
    """
    if cut_axis is None or not layer.mesh.is_cut:
        return layer.add_weight(name=name, shape=shape, initializer=initial)
    cut = Cut.over(layer.mesh, shape, {cut_axis: MODEL})
    drawn = isinstance(initial, Normal)
    with keras.made_at_once():
        weight = layer.add_weight(name=name, shape=cut.local_shape, initializer="zeros" if drawn else initial)
        cuts.mark(weight, cut)
        if drawn:
            cuts.fill(weight, initial.draw)
    return weight


def part_of(count: int, mesh, what: str) -> int:
    """Returns how many of `count` each replica along `model` has; raises ValueError where they don't divide."""
    size = mesh.model.size
    if count % size:
        below, above = count // size * size, -(-count // size) * size
        fits = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"{what}={count} does not divide over the mesh's model:{size}; use {fits}")
    return count // size
