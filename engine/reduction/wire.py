"""The wire format of tensors between replicas, or workers and servers: buckets, optionally in 16 bits. Device code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from ..mesh import collectives

BUCKET_BYTES = 1 << 29  # a message may be twice as large, half of the limit of gRPC and protocol buffers


def to_halves(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts a tensor to a vector of uint16: one per value for a 16-bit `dtype`, two for float32."""
    return tf.reshape(tf.bitcast(tf.cast(value, dtype), tf.uint16), [-1])


def from_halves(halves: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts the result of `to_halves`, along the last axis, back to float32 values [..., n]."""
    if dtype == tf.float32:
        return tf.bitcast(tf.reshape(halves, [*halves.shape[:-1], -1, 2]), tf.float32)
    return tf.cast(tf.bitcast(halves, dtype), tf.float32)


def move_as_int32(halves: tf.Tensor, move: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Applies `move` to uint16 [..., n] as int32: collective kernels do not support bfloat16."""
    size = halves.shape[-1]
    filled = tf.pad(halves, [[0, 0]] * (halves.shape.rank - 1) + [[0, size % 2]])
    words = move(tf.bitcast(tf.reshape(filled, [*halves.shape[:-1], -1, 2]), tf.int32))
    return tf.reshape(tf.bitcast(words, tf.uint16), [*words.shape[:-1], 2 * words.shape[-1]])[..., :size]


def send(
    exact: Sequence, rounded: Sequence, shapes: Sequence, server: str, reduce_dtype: tf.DType
) -> tuple[list, list]:
    """Sends float32 tensors to a server, in as few messages as possible.

    Args:
      exact: tensors sent unchanged.
      rounded: tensors sent in `reduce_dtype`.
      shapes: the shapes of `rounded`: each a `tf.TensorShape`, or an int32 vector that the server has.
      reduce_dtype: float32 or one of 16 bits.

    Returns:
      (exact, rounded), float32, on the server.
    """
    layout = WireLayout([tensor.shape for tensor in exact], shapes, reduce_dtype)
    buckets = layout.join(exact, rounded)
    with tf.device(server):
        return layout.split(buckets)


class WireLayout:
    """The layout of float32 tensors in a few buckets, some exact and some in `reduce_dtype`.

    Buckets (`mesh.collectives.buckets`) are of one dtype: float32, or uint16 for 16 bits, of which an exact value takes
    two. None is larger than gRPC's 2 GiB.

    Args:
      exact, rounded: their shapes, as for `send`. One that is known only when a step runs, of the rows that it touches,
        is in the current bucket and counts as nothing.
      reduce_dtype: float32 or one of 16 bits.
      bucket_bytes: a bucket is complete when it has this many, and larger tensors are split.
    """

    def __init__(self, exact: Sequence, rounded: Sequence, reduce_dtype: tf.DType, bucket_bytes: int = BUCKET_BYTES):
        self._reduce_dtype = reduce_dtype
        self._num_exact = len(exact)
        self._shapes = [*exact, *rounded]
        self._kinds = [tf.float32] * len(exact) + [reduce_dtype] * len(rounded)
        # How many of a bucket's values each of a tensor's takes.
        self._lanes = [kind.size // reduce_dtype.size for kind in self._kinds]
        most = max(1, bucket_bytes // reduce_dtype.size)
        spans, lengths = [], []
        for index, (shape, lanes) in enumerate(zip(self._shapes, self._lanes, strict=True)):
            size = lanes * shape.num_elements() if isinstance(shape, tf.TensorShape) else 0
            firsts = range(0, max(1, size), most)
            spans += [_Span(index, i, min(size, i + most) if len(firsts) > 1 else None) for i in firsts]
            lengths += [min(size - i, most) for i in firsts]
        self._buckets = [[spans[position] for position in bucket] for bucket in collectives.buckets(lengths, most)]

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def join(self, exact: Sequence, rounded: Sequence) -> list[tf.Tensor]:
        """Joins the tensors into buckets."""
        tensors = [*exact, *rounded]
        if self._reduce_dtype == tf.float32:
            vectors = [tf.reshape(tensor, [-1]) for tensor in tensors]
        else:
            vectors = [to_halves(*pair) for pair in zip(tensors, self._kinds, strict=True)]
        return [
            tf.concat([vectors[p.tensor] if p.stop is None else vectors[p.tensor][p.first : p.stop] for p in bucket], 0)
            for bucket in self._buckets
        ]

    def split(self, buckets: Sequence[tf.Tensor]) -> tuple[list, list]:
        """Splits buckets into (exact, rounded), float32, on the current device."""
        parts: list[list[tf.Tensor]] = [[] for _ in self._shapes]
        for bucket, spans in zip(buckets, self._buckets, strict=True):
            sizes = []
            for span in spans:
                shape, lanes = self._shapes[span.tensor], self._lanes[span.tensor]
                values = shape.num_elements() if isinstance(shape, tf.TensorShape) else tf.reduce_prod(shape)
                sizes.append(lanes * values if span.stop is None else span.stop - span.first)
            for span, part in zip(spans, tf.split(bucket, sizes, num=len(sizes)), strict=True):
                parts[span.tensor].append(part)
        vectors = [tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0] for pieces in parts]
        if self._reduce_dtype != tf.float32:
            vectors = [from_halves(vector, kind) for vector, kind in zip(vectors, self._kinds, strict=True)]
        tensors = [tf.reshape(vector, shape) for vector, shape in zip(vectors, self._shapes, strict=True)]
        return tensors[: self._num_exact], tensors[self._num_exact :]


class _Span(NamedTuple):
    """A tensor's range in a bucket: all if `stop` is None, else values [first, stop)."""

    tensor: int
    first: int
    stop: int | None


def fetch(rows: tf.Tensor, server: str, reduce_dtype: tf.DType) -> tf.Tensor:
    """Fetches a server's float32 values in `reduce_dtype`; their gradient is not rounded."""
    if reduce_dtype == tf.float32:
        return rows

    def rounded(rows):
        with tf.device(server):
            small = tf.cast(rows, reduce_dtype)
        return tf.cast(small, tf.float32)

    return tf.grad_pass_through(rounded)(rows)
