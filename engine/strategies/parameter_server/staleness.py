"""Staleness of updates: how many other updates came between the pull and the push of each, counted in buckets."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

_EXACT = 64  # staleness up to here has a bucket for each value; above, one for each power of two
_BUCKETS = _EXACT + 32
ROWS = _BUCKETS + 1  # the buckets, and the sum


def bucketed(staleness: tf.Tensor) -> tf.Tensor:
    """Returns [ROWS] int64: a one in the value's bucket, and the value itself last."""
    power = tf.cast(tf.math.log(tf.maximum(tf.cast(staleness, tf.float64), 1.0)) / np.log(2.0), tf.int64)
    bucket = tf.where(staleness < _EXACT, staleness, tf.minimum(_EXACT + power - 6, _BUCKETS - 1))
    return tf.concat([tf.one_hot(bucket, _BUCKETS, dtype=tf.int64), staleness[tf.newaxis]], 0)


class Staleness:
    """The staleness of all updates so far. Host code.

    Kept as the number of updates in each bucket, and last the sum.
    """

    def __init__(self):
        self._counts = np.zeros(ROWS, np.int64)

    def add(self, counted: np.ndarray) -> None:
        self._counts += counted

    def describe(self) -> dict[str, float]:
        """Returns mean and p99; above 63 the latter is the lower end of a power of two. {} before any update."""
        buckets, total = self._counts[:-1], self._counts[-1]
        if not buckets.sum():
            return {}
        bucket = int(np.searchsorted(np.cumsum(buckets), 0.99 * buckets.sum()))
        return {
            "mean": float(total / buckets.sum()),
            "p99": float(bucket if bucket < _EXACT else 2.0 ** (bucket - _EXACT + 6)),
        }
