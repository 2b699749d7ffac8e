"""Metrics as (total, count) pairs: values that merge, so an average is exact on uneven batches.

Replica code makes pairs; the inner loop adds them up on the device; host code merges the sums and divides once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf


class Mean(NamedTuple):
    """A sum and the number of things summed, both scalar float32 tensors. Its value is total / count."""

    total: tf.Tensor
    count: tf.Tensor


def mean(values, weights=None) -> Mean:
    """The pair for a tensor of per-example values.

    Args:
      values: tensor of any shape and numeric or bool dtype, one entry an example (or a token, a pixel).
      weights: None, or a tensor that broadcasts to `values`; an entry of weight 0 does not count.

    Returns:
      Mean(sum of values, number of values), or the weighted sum and the sum of weights. Both are 0 for an empty
      batch, which therefore weighs nothing.
    """
    values = tf.cast(values, tf.float32)
    if weights is None:
        return Mean(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))
    weights = tf.broadcast_to(tf.cast(weights, tf.float32), tf.shape(values))
    # What has no weight may be anything, NaN too: padding often is.
    return Mean(tf.reduce_sum(tf.math.multiply_no_nan(values, weights)), tf.reduce_sum(weights))


def stack(metrics: dict[str, Mean], dtype: tf.DType) -> tf.Tensor:
    """The pairs as one [number of metrics, 2] tensor, ordered by name.

    The inner loop carries it in float64: a sum of so many float32 values is then exact for all practical lengths, so
    it does not depend on where the loop was cut.
    """
    return tf.stack([tf.cast(tf.stack(metrics[name]), dtype) for name in sorted(metrics)])


class Sums:
    """Host code: the sums of some steps, held as the device returned them until somebody reads them.

    Adding does not wait for a device: it reads none but steps that are long done. Reading waits.
    """

    COLLAPSE_AT = 64  # of so many unread tensors all but the newest are added up: it bounds a long window's memory
    IN_FLIGHT = 2  # tensors that a device may be at work on yet

    def __init__(self, values: dict[str, tuple[float, float]] | None = None):
        self._values = dict(values or {})
        self._unread: list[LoopSums] = []

    def add(self, sums: LoopSums) -> None:
        self._unread.append(sums)
        if len(self._unread) >= self.COLLAPSE_AT:
            self._read_all_but(self.IN_FLIGHT)

    def values(self) -> dict[str, tuple[float, float]]:
        """Name to (total, count), float64. Waits for the steps that were added."""
        self._read_all_but(0)
        return dict(self._values)

    def _read_all_but(self, newest: int) -> None:
        done = len(self._unread) - newest
        for sums in self._unread[:done]:
            for name, (total, count) in sums.read().items():
                old_total, old_count = self._values.get(name, (0.0, 0.0))
                self._values[name] = (old_total + total, old_count + count)
        del self._unread[:done]

    def means(self) -> dict[str, float]:
        """Name to total / count; a metric that nothing was counted for is left out. Waits as `values` does."""
        return {name: total / count for name, (total, count) in self.values().items() if count}


class LoopSums:
    """What one call of the inner loop returned: a [metrics, 2] tensor and the metrics' names. Read at most once."""

    def __init__(self, names: list[str], tensor: tf.Tensor):
        self._names = names
        self._tensor = tensor
        self._read: dict[str, tuple[float, float]] | None = None

    def read(self) -> dict[str, tuple[float, float]]:
        if self._read is None:
            array = np.asarray(self._tensor, np.float64)
            self._read = {name: (float(row[0]), float(row[1])) for name, row in zip(self._names, array, strict=True)}
        return self._read
