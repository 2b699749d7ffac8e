"""The area under the ROC curve by ranks: the scores that replicas keep, and the host's computation."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

BUCKETS = 4096
# Buckets are even in asinh(logit / _EVEN): 0.001 wide at 0, and from about 1 on 0.4 % of the logit, to _LAST.
_EVEN, _LAST = 0.25, 256.0
_KEPT = 1 << 24  # entries of a `Ranking`, 24 bytes each; neighbours are merged if 3/4 of them would stay in use
_JOINED = 1 << 20  # the number of entries after merging


def by_logit(logits: tf.Tensor, values: tf.Tensor) -> tf.IndexedSlices:
    """Returns values [n] as a sparse histogram with a bucket per float32; sums concatenate them."""
    return tf.IndexedSlices(values, tf.cast(tf.bitcast(logits, tf.int32), tf.int64))  # int32 would be on the host


def _logits(slices: tf.IndexedSlices) -> tf.Tensor:
    return tf.bitcast(tf.cast(slices.indices, tf.int32), tf.float32)


def histogram(labels: tf.IndexedSlices, weights: tf.IndexedSlices) -> tf.Tensor:
    """Returns the weights of positives and of all examples per bucket, float32 [BUCKETS + 1, 2].

    The last pair has the sum and the number of labels other than 0 and 1. Non-finite logits don't count.
    """
    middle, last = BUCKETS // 2, math.asinh(_LAST / _EVEN)
    logits = _logits(labels)
    bucket = tf.clip_by_value(tf.asinh(logits / _EVEN) * (middle / last) + middle, 0.0, BUCKETS - 1.0)
    binary = (labels.values == 0.0) | (labels.values == 1.0)
    bucket = tf.where(tf.math.is_finite(logits), tf.where(binary, bucket, BUCKETS), -1.0)  # the kernel skips -1
    every = tf.where(binary, weights.values, tf.sign(weights.values))
    both = tf.stack([tf.math.multiply_no_nan(labels.values, every), every], 1)
    return tf.math.unsorted_segment_sum(both, tf.cast(bucket, tf.int32), BUCKETS + 1)  # the cast rounds down


def entries(number: int, labels: tf.IndexedSlices, weights: tf.IndexedSlices, dtype: tf.DType) -> tf.Tensor:
    """Returns [2 n, 2]: per example the metric's number and the logit, then the label and the weight."""
    columns = (tf.fill(tf.shape(labels.values), float(number)), _logits(labels), labels.values, weights.values)
    return tf.reshape(tf.cast(tf.stack(columns, 1), dtype), [-1, 2])


def area(low: np.ndarray, high: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> tuple[float, float] | None:
    """Returns the area, the fraction of (positive, negative) pairs in the right order, and its error bound.

    As Mann and Whitney's U, with half of the pairs of equal scores. An entry's scores are between `low` and `high`,
    float [n]; if these are equal, the area is exact. None if a class has no weight.
    """
    pairs = positives.sum() * negatives.sum()
    if not pairs > 0:
        return None

    def in_order(ends: np.ndarray, scores: np.ndarray) -> float:
        """Sums, over positives at `scores`, the negatives whose `ends` are below, and half of the equal ones."""
        order = np.argsort(ends)
        ends, below = ends[order], np.concatenate([[0.0], np.cumsum(negatives[order])])
        sides = (below[np.searchsorted(ends, scores, side)] for side in ("left", "right"))
        return float(sum(np.dot(positives, negatives) for negatives in sides) / 2 / pairs)

    least = in_order(high, low)
    most = least if low is high else in_order(low, high)
    return (least + most) / 2, (most - least) / 2


def area_of_histogram(positives: np.ndarray, every: np.ndarray) -> tuple[float, float] | None:
    """Returns the area under the curve of a `histogram`, whose buckets are its thresholds, and its error bound."""
    low = np.arange(len(every) - 1)
    return area(low, low + 0.5, positives[:-1], every[:-1] - positives[:-1])


class Ranking:
    """Weights of positive and negative examples by logit, merged.

    Exact for up to 12 million distinct logits; beyond, neighbours are merged, so the area has an error, with a bound.

    Args:
      scores: [n, 3], per example the logit, the label and the weight. Non-finite logits don't count.

    Attributes:
      wrong: the sum and the number of the labels other than 0 and 1, which don't count otherwise.
    """

    def __init__(self, scores: np.ndarray):
        logits, labels, weights = scores[np.isfinite(scores[:, 0]) & (scores[:, 2] != 0)].T
        binary = (labels == 0) | (labels == 1)
        self.wrong = np.array([labels[~binary].sum(), (~binary).sum()], np.float64)
        positives, weights = (labels * weights)[binary], weights[binary]
        logits = logits[binary].astype(np.float32)
        self._bins: list[tuple] = [(logits, logits, positives, weights - positives)]

    def __add__(self, other: Ranking) -> Ranking:
        both = object.__new__(Ranking)
        both.wrong, both._bins = self.wrong + other.wrong, self._bins + other._bins
        if sum(len(low) for low, *_ in both._bins) > _KEPT:
            both._merge()
        return both

    def area(self) -> tuple[float, float] | None:
        """Returns the area and its error bound; None if a class is missing."""
        return area(*self._merge())

    def to_bytes(self) -> bytes:
        return b"".join([self.wrong.tobytes(), *(np.ascontiguousarray(column).tobytes() for column in self._merge())])

    @classmethod
    def from_bytes(cls, text: bytes) -> Ranking:
        """Restores it from the result of `to_bytes`."""
        ranking, size = object.__new__(cls), (len(text) - 16) // 24
        ranking.wrong = np.frombuffer(text, np.float64, 2)
        low, high = (np.frombuffer(text, np.float32, size, 16 + 4 * size * i) for i in range(2))
        sums = (np.frombuffer(text, np.float64, size, 16 + 8 * size * i) for i in (1, 2))
        ranking._bins = [(low, low if np.array_equal(low, high) else high, *sums)]
        return ranking

    def _merge(self) -> tuple[np.ndarray, ...]:
        """Merges the bins, sorted, with one entry per logit; returns it."""
        exact = all(low is high for low, high, *_ in self._bins)
        low, high, *sums = (np.concatenate(columns) for columns in zip(*self._bins, strict=True))
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
        starts = np.flatnonzero(np.concatenate([[True], (low[1:] != low[:-1]) | (high[1:] != high[:-1])])[: len(low)])
        if len(starts) > 3 * _KEPT // 4:
            exact, starts = False, starts[np.linspace(0, len(starts) - 1, _JOINED, dtype=np.int64)]
        if len(starts):
            ends = high[starts] if exact else np.maximum.reduceat(high, starts)
            low, sums = low[starts], [np.add.reduceat(totals[order], starts) for totals in sums]
            high = low if exact else ends
        else:
            high = low
        self._bins = [(low, high, *sums)]
        return self._bins[0]
