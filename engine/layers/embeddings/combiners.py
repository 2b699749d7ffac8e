"""Ids as features give them, alone, several an example or ragged, and how their rows combine. Replica code."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

COMBINERS = (None, "sum", "mean", "sqrtn")


class Leaf(NamedTuple):
    """One feature's ids as they were given, the row of each [n], and their weights [n, 1] or None."""

    ids: Any
    rows: tf.Tensor
    weights: tf.Tensor | None


def pairs(ids, weights) -> list[tuple]:
    """Returns (ids, weights or None) of each feature of a nest, in its order."""
    leaves = [x if _is_ragged(x) else tf.convert_to_tensor(x) for x in tf.nest.flatten(ids)]
    if weights is None:
        return [(leaf, None) for leaf in leaves]
    tf.nest.assert_same_structure(ids, weights)
    return list(zip(leaves, tf.nest.flatten(weights), strict=True))


def combine(found: tf.Tensor, leaf: Leaf, combiner: str | None):
    """Combines rows [n, width], one an id in the order of the ids, into the lookup's result for this feature.

    `combiner` makes one row of an example's: the sum of w_i e_i, or that divided by the sum of w_i ("mean") or by the
    root of the sum of w_i squared ("sqrtn"); zeros for an example without ids. None keeps them apart.
    """
    ids, w = leaf.ids, leaf.weights
    if combiner is None:
        return ids.with_flat_values(found) if _is_ragged(ids) else _shaped(found, ids)
    if w is None and not _is_ragged(ids) and ids.shape.rank == 1:
        return found
    summed = _total(found if w is None else found * w, ids)
    if combiner == "sum":
        return summed
    w = tf.ones_like(found[:, :1]) if w is None else w
    divisor = _total(w, ids) if combiner == "mean" else tf.sqrt(_total(tf.square(w), ids))
    return tf.math.divide_no_nan(summed, divisor)


def flat_values(x) -> tf.Tensor:
    """Returns the ids, or the weights, of all examples in a row."""
    return x.flat_values if _is_ragged(x) else x


def _total(x: tf.Tensor, ids) -> tf.Tensor:
    """Sums x [n, c] over each example's ids, to [batch, c]."""
    if _is_ragged(ids):
        return tf.math.unsorted_segment_sum(x, ids.value_rowids(), ids.nrows())
    k = 1 if ids.shape.rank == 1 else tf.shape(ids)[1]
    return tf.reduce_sum(tf.reshape(x, [tf.shape(ids)[0], k, x.shape[-1]]), 1)


def _is_ragged(x) -> bool:
    return isinstance(x, tf.RaggedTensor)


def _shaped(found: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    shaped = tf.reshape(found, tf.concat([tf.shape(ids), [found.shape[-1]]], 0))
    return tf.ensure_shape(shaped, [*ids.shape, found.shape[-1]])
