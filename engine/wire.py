"""Tensors as they travel, between replicas or between workers and parameter servers: many as one, in 16 bits if asked.
Device code.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def to_halves(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A tensor's values in `dtype`, float32 or one of 16 bits, as a vector of uint16: one each, or two."""
    return tf.reshape(tf.bitcast(tf.cast(value, dtype), tf.uint16), [-1])


def from_halves(halves: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """float32 values [..., n] of what `to_halves` made of them, along the last axis."""
    if dtype == tf.float32:
        return tf.bitcast(tf.reshape(halves, [*halves.shape[:-1], -1, 2]), tf.float32)
    return tf.cast(tf.bitcast(halves, dtype), tf.float32)


def send(exact: Sequence, rounded: Sequence, shapes: Sequence, server: str, dtype: tf.DType):
    """Takes float32 tensors to a server, which they reach as one: each by itself costs a message.

    Args:
      exact: scalars that travel as they are.
      rounded: tensors that travel in `dtype`.
      shapes: of those: each a `tf.TensorShape`, or an int32 vector that the server has.
      server: a device.
      dtype: float32 or one of 16 bits.

    Returns:
      (exact, rounded), float32, on the server.
    """
    flat = pack(exact, rounded, dtype)
    with tf.device(server):
        return unpack(flat, [tf.TensorShape([])] * len(exact), shapes, dtype)


def pack(exact: Sequence, rounded: Sequence, dtype: tf.DType) -> tf.Tensor:
    """float32 tensors as one vector, some as they are and some in `dtype`: of float32, or where that has 16 bits of
    uint16."""
    if dtype == tf.float32:
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in (*exact, *rounded)], 0)
    halves = [to_halves(tensor, tf.float32) for tensor in exact]
    return tf.concat(halves + [to_halves(tensor, dtype) for tensor in rounded], 0)


def unpack(flat: tf.Tensor, exact: Sequence, rounded: Sequence, dtype: tf.DType) -> tuple[list, list]:
    """What `pack` was given, float32, where this is called; `exact` and `rounded` are the shapes."""
    kinds, shapes = [tf.float32] * len(exact) + [dtype] * len(rounded), [*exact, *rounded]
    lanes = [1 if dtype == tf.float32 else kind.size // 2 for kind in kinds]
    sizes = [n * _num_elements(shape) for n, shape in zip(lanes, shapes, strict=True)]
    parts = tf.split(flat, sizes, num=len(sizes))
    if dtype != tf.float32:
        parts = [from_halves(part, kind) for part, kind in zip(parts, kinds, strict=True)]
    found = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
    return found[: len(exact)], found[len(exact) :]


def _num_elements(shape):
    return shape.num_elements() if isinstance(shape, tf.TensorShape) else tf.reduce_prod(shape)


def fetch(rows: tf.Tensor, server: str, dtype: tf.DType) -> tf.Tensor:
    """float32 values that a server has computed, brought here in `dtype`; their gradient is not rounded by it."""
    if dtype == tf.float32:
        return rows

    def travel(rows):
        with tf.device(server):
            small = tf.cast(rows, dtype)
        return tf.cast(small, tf.float32)

    return tf.grad_pass_through(travel)(rows)
