"""Checks, as a step is traced, that `mean` gets values of examples and not of pairs of them. Replica code.

Labels [n] and outputs [n, 1] broadcast to [n, n], a mistake that trains something else without any error.
"""

from __future__ import annotations

import tensorflow as tf

from . import batches


def check(pair, where: str, outputs, batch) -> None:
    """Checks the shape of what a pair of `mean` has summed, by shapes alone.

    A second axis as long as the batch is the examples' own, such as tokens, where labels or outputs have it too.

    Args:
      pair: what `where`, a loss or a metric, returned.
      where: for the message.
      outputs: what it was given.
      batch: likewise.

    Raises:
      ValueError: the values are of pairs of examples; says the shapes.
    """
    shape, size = getattr(pair, "shape", None), tf.nest.flatten(batch)[0].shape[0]
    if shape is None or (shape.rank or 0) < 2 or not shape[0] == shape[1] == size:
        return
    labels = batches.fields(batch).labels
    at_hand = [getattr(x, "shape", None) for x in tf.nest.flatten((outputs, () if labels is None else labels))]
    if any(each is None or each.rank is None or (each.rank > 1 and each[1] == size) for each in at_hand):
        return
    raise ValueError(
        f"{where}: crankshaft.mean was given {_named(shape, size)} values for n examples, one for each pair of them "
        f"(outputs are {_shape(outputs, size)}, labels {_shape(() if labels is None else labels, size)}); make the "
        "shapes alike, by outputs[:, 0] or labels[:, None], or say crankshaft.Mean(total, count) if pairs are meant"
    )


def _shape(nest, size: int | None):
    """Returns the shape of each tensor of a nest, with n for the examples."""
    shapes = tf.nest.map_structure(lambda x: _named(x.shape, size), nest)
    return shapes if isinstance(shapes, str) else str(shapes).replace("'", "")


def _named(shape: tf.TensorShape, size: int | None) -> str:
    return f"[{', '.join('n' if axis == size else str(axis) for axis in shape)}]"
