"""Hashes of ids, the same on every machine and device, for ever. Replica code."""

from __future__ import annotations

import tensorflow as tf


def bucket(ids: tf.Tensor, buckets: int) -> tf.Tensor:
    """Hashes ids [n] to int64 [n] in 0..buckets-1: integers by `mixed`, strings by FarmHash."""
    if ids.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(ids, buckets)
    return tf.bitcast(tf.math.floormod(mixed(ids), tf.constant(buckets, tf.uint64)), tf.int64)


def mixed(ids: tf.Tensor) -> tf.Tensor:
    """Hashes integers to uint64 by SplitMix64 (Steele, Lea, Flood 2014), one to one."""
    x = tf.bitcast(tf.cast(ids, tf.int64), tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64)))
        x *= tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(31, tf.uint64)))


def by_column(ids: tf.Tensor) -> tf.Tensor:
    """Hashes integers [n, columns] to int64 of that shape: one to one in a column; columns collide only by chance."""
    return tf.bitcast(mixed(ids), tf.int64) + tf.range(ids.shape[1], dtype=tf.int64)


def hash_columns(ids: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    """Hashes integers [n] to int64 [n, len(sizes)], the i-th below sizes[i], nearly independent of each other.

    Each is a sum of two halves of one hash (Kirsch, Mitzenmacher 2006).
    """
    x = mixed(ids)
    low = tf.bitcast(tf.bitwise.bitwise_and(x, tf.constant(0xFFFFFFFF, tf.uint64)), tf.int64)
    high = tf.bitcast(tf.bitwise.right_shift(x, tf.constant(32, tf.uint64)), tf.int64)
    sums = low[:, None] + high[:, None] * tf.range(len(sizes), dtype=tf.int64)
    return tf.math.floormod(sums, tf.constant(sizes, tf.int64))


def uniform(rows: tf.Tensor, width: int, *key: int | tf.Tensor, first: int = 0) -> tf.Tensor:
    """Samples float32 [n, width] for rows [n], columns from `first` on, uniform in (0, 1): the middles of 2^23 parts.

    Each depends only on its row, its column and the key (integers, or int64 [n]): a hash of a counter
    (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3), here SplitMix64's.
    """
    start = tf.zeros([], tf.uint64)
    for part in (*(tf.convert_to_tensor(part, tf.int64) for part in key), tf.cast(rows, tf.int64)):
        start = mixed(tf.bitcast(tf.bitwise.bitwise_xor(start, tf.bitcast(part, tf.uint64)), tf.int64))
    counters = tf.bitcast(start, tf.int64)[:, None] + tf.range(first, first + width, dtype=tf.int64)
    parts = tf.bitwise.right_shift(mixed(counters), tf.constant(64 - 23, tf.uint64))
    return (2.0 * tf.cast(tf.bitcast(parts, tf.int64), tf.float32) + 1.0) * 2.0**-24
