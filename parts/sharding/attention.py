"""Causal attention whose heads are sharded over a mesh's axis `model`. Replica code.

Axes: B batch, T positions, K key-value heads of this replica, G query heads per key-value head, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...engine.errors import UsageError
from ...engine.mesh.layout import current_mesh
from ...engine.step.recompute import computed_after
from .layers import Dense, Dropout, shard_size

_BLOCK = 512  # queries whose scores are in memory at a time; up to two blocks are computed at once


class Cache(NamedTuple):
    """Keys and values of the positions so far, [B, K, positions, D] each; the third axis is the cache's capacity."""

    keys: tf.Tensor
    values: tf.Tensor


@tf.keras.utils.register_keras_serializable("crankshaft.parallel")
class Attention(tf.keras.layers.Layer):
    """Computes causal self-attention: x [B, T, width] gives [B, T, width].

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; grouped key-value heads: Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245; rotary positions: Su et al. 2021, https://arxiv.org/abs/2104.09864.

    Each replica has heads / model of the heads: their columns of the projection to queries, keys and values, and their
    rows of the output projection. So the forward pass sums `width` values per token over `model`, after the
    output projection, and the backward pass as many, of x's gradient. Scores and softmax are always float32.

    Without dropout, a context of more than 1,024 positions is computed by blocks of 512 queries, and again in the
    backward pass, so that memory grows with T and not with its square (Rabe & Staats 2021,
    https://arxiv.org/abs/2112.05682). A block leaves out the keys after its end, almost half of all products.

    The first projection's columns are ordered by key-value head: the G query heads, the key, the value of each. So
    equal ranges of columns shard it by heads.

    Args:
      heads: query heads; divides the width unless `head_size` is given.
      kv_heads: heads of keys and values; divides `heads`, and is a multiple of the mesh's `model`. None is `heads`.
      head_size: D; None is width / heads.
      rotary: whether queries and keys are rotated by their positions.
      dropout: rate of dropout of the attention's weights.
      use_bias: whether the two projections have biases.
      stddev: the standard deviation of the weights' normal distribution; None is as in `Dense`.
      output_stddev: the standard deviation for the output projection; None is `stddev`.
      **arguments: as Keras's `Layer`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        rotary: bool = True,
        dropout: float = 0.0,
        use_bias: bool = False,
        stddev: float | None = None,
        output_stddev: float | None = None,
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self.mesh = current_mesh()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads or heads, head_size
        if heads % self.kv_heads:
            raise UsageError(f"kv_heads={self.kv_heads} does not divide heads={heads}; use a divisor")
        self.own_kv_heads = shard_size(self.kv_heads, self.mesh, "kv_heads" if kv_heads else "heads")
        self.rotary, self.dropout, self.use_bias = rotary, dropout, use_bias
        self.stddev, self.output_stddev = stddev, output_stddev
        self._drop = Dropout(dropout, dtype=self.dtype_policy) if dropout else None

    def build(self, input_shape: tuple) -> None:
        width, group = input_shape[-1], self.heads // self.kv_heads
        if not self.head_size and width % self.heads:
            raise UsageError(f"heads={self.heads} does not divide the width, {width}; use a divisor, or set head_size")
        self.own_size = self.head_size or width // self.heads
        if self.rotary and self.own_size % 2:
            raise UsageError(f"rotary positions need an even head size, and {self.own_size} is odd; use an even one")
        options = {"use_bias": self.use_bias, "dtype": self.dtype_policy}
        columns = self.kv_heads * (group + 2) * self.own_size
        with self.mesh.scope():
            self.qkv = Dense(columns, "columns", stddev=self.stddev, name="qkv", **options)
            self.join = Dense(width, "rows", stddev=self.output_stddev or self.stddev, name="join", **options)
        self.qkv.build(input_shape)
        self.join.build((*input_shape[:-1], self.own_kv_heads * group * self.own_size))

    def empty_cache(self, batch: int | tf.Tensor, positions: int) -> Cache:
        """Returns an empty cache with room for `positions`, for `batch` examples."""
        shape = [batch, self.own_kv_heads, positions, self.own_size]
        return Cache(tf.zeros(shape, self.compute_dtype), tf.zeros(shape, self.compute_dtype))

    def call(
        self, x: tf.Tensor, cache: Cache | None = None, position: int | tf.Tensor = 0, training: bool | None = None
    ) -> tf.Tensor | tuple[tf.Tensor, Cache]:
        """Returns the outputs; with a cache, (outputs, the cache with the T new positions).

        Args:
          x: [B, T, width]; T may be unknown when traced.
          cache: keys and values of the positions before x's, to which x attends too; for generation.
          position: scalar int32, the first of x's positions: the number of positions in the cache.
          training: whether dropout is applied.
        """
        group, length = self.heads // self.kv_heads, _size(x, 1)
        qkv = tf.reshape(self.qkv(x), [_size(x, 0), length, self.own_kv_heads, group + 2, self.own_size])
        queries_keys, values = tf.split(tf.transpose(qkv, [0, 2, 3, 1, 4]), [group + 1, 1], 2)  # [B, K, heads, T, D]
        if self.rotary:
            queries_keys = _rotated(queries_keys, position)
        queries, keys = tf.split(queries_keys, [group, 1], 2)
        keys, values = tf.squeeze(keys, 2), tf.squeeze(values, 2)  # [B, K, T, D]
        if cache is not None:
            cache = Cache(*(_written(old, new, position) for old, new in zip(cache, (keys, values), strict=True)))
            keys, values = (cached[:, :, : position + length] for cached in cache)
        drop = self._drop if training else None
        if cache is None and drop is None and isinstance(length, int) and length > 2 * _BLOCK:
            heads = attention_by_blocks(queries, keys, values, _BLOCK)
        else:
            heads = attention(queries, keys, values, position, drop)
        inputs = self.own_kv_heads * group * self.own_size
        outputs = self.join(tf.reshape(tf.transpose(heads, [0, 3, 1, 2, 4]), [_size(x, 0), length, inputs]))
        return outputs if cache is None else (outputs, cache)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        names = "heads", "kv_heads", "head_size", "rotary", "dropout", "use_bias", "stddev", "output_stddev"
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def attention(
    queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, position: int | tf.Tensor = 0, drop: Dropout | None = None
) -> tf.Tensor:
    """Computes causal attention.

    Args:
      queries: [B, K, G, T, D].
      keys: [B, K, S, D].
      values: [B, K, S, D].
      position: the first query's, scalar; keys and values are those of positions from 0 on.
      drop: a layer of dropout for the attention's weights, in training.

    Returns:
      Each head's weighted mean of values, [B, K, G, T, D].
    """
    group, length, size = queries.shape[2], _size(queries, 3), queries.shape[4]
    # A group's queries are rows of one product with their key-value head, so keys need not be repeated.
    rows = tf.reshape(queries, [_size(queries, 0), queries.shape[1], group * length, size])
    scores = tf.cast(tf.matmul(rows * size**-0.5, keys, transpose_b=True), tf.float32)
    # 0 where a query may attend to a key, else -1e9, more than any score.
    may = tf.range(_size(keys, 2)) <= position + tf.range(length)[:, tf.newaxis]
    scores += tf.tile(tf.where(may, 0.0, -1e9), [group, 1])
    weights = tf.cast(tf.nn.softmax(scores), values.dtype)
    if drop:
        weights = drop(weights, training=True)
    return tf.reshape(tf.matmul(weights, values), tf.shape(queries))


def attention_by_blocks(queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, block: int) -> tf.Tensor:
    """Computes `attention` of T queries and as many keys, of one block of queries after the other.

    The backward pass computes each block again, and adds the gradients of keys and values in float32.
    """
    length = queries.shape[3]
    blocks = [(start, min(start + block, length)) for start in range(0, length, block)]

    @tf.custom_gradient
    def compute(queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def inputs(start: int, end: int, before: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Returns a block's queries, and the keys and values that they attend to, once `before` is computed."""
            sources = [queries[:, :, :, start:end], keys[:, :, :end], values[:, :, :end]]
            block_queries, block_keys, block_values = computed_after(sources, before)
            return block_queries, block_keys, block_values

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            sums = [tf.zeros(tf.shape(x), tf.float32) for x in (keys, values)]
            query_gradients: list[tf.Tensor] = []
            for start, end in blocks:
                sources = inputs(start, end, query_gradients[-1:] or [upstream])
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    outputs = attention(*sources, start)
                first, *others = tape.gradient(outputs, sources, upstream[:, :, :, start:end])
                query_gradients.append(first)
                rest = [[0, 0], [0, 0], [0, length - end], [0, 0]]
                sums = [total + tf.pad(tf.cast(x, tf.float32), rest) for total, x in zip(sums, others, strict=True)]
            return tf.concat(query_gradients, 3), *(tf.cast(total, keys.dtype) for total in sums)

        outputs: list[tf.Tensor] = []
        for start, end in blocks:
            outputs.append(attention(*inputs(start, end, outputs[-1:]), start))
        return tf.concat(outputs, 3), gradient

    return compute(queries, keys, values)


def _rotated(x: tf.Tensor, position: int | tf.Tensor) -> tf.Tensor:
    """Rotates pairs (i, i + D/2) of x [..., T, D] by position / 10000^(2i/D)."""
    length, half = _size(x, -2), x.shape[-1] // 2
    rates = np.float32(10000.0 ** (-np.arange(half) / half))
    positions = tf.cast(position + tf.range(length), tf.float32)
    angles = positions[:, tf.newaxis] * rates
    cos, sin = tf.cast(tf.cos(angles), x.dtype), tf.cast(tf.sin(angles), x.dtype)
    first, second = tf.split(x, 2, -1)
    return tf.concat([first * cos - second * sin, second * cos + first * sin], -1)


def _written(old: tf.Tensor, new: tf.Tensor, position: int | tf.Tensor) -> tf.Tensor:
    """Writes keys or values to a cache, from `position` on: a copy, since a graph's tensors don't change."""
    length = _size(new, 2)
    cache = tf.concat([old[:, :, :position], tf.cast(new, old.dtype), old[:, :, position + length :]], 2)
    return tf.ensure_shape(cache, old.shape)


def _size(x: tf.Tensor, axis: int) -> int | tf.Tensor:
    """Returns the size along an axis: an int if it is known when traced, else a scalar int32."""
    return tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
