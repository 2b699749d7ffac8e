"""Attention by blocks of queries: the whole one's values and gradients, without a tensor of all pairs of positions."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.parts.sharding import Attention
from crankshaft.parts.sharding.attention import attention, attention_by_blocks

BATCH, KV_HEADS, GROUP, LENGTH, SIZE = 2, 2, 3, 21, 4


def normal(*shape, dtype="float32"):
    random = np.random.default_rng(len(shape))
    return [tf.constant(random.standard_normal(each), dtype) for each in shape]


def with_gradients(attend, jit, *inputs):
    @tf.function(jit_compile=jit)
    def compute(queries, keys, values, upstream):
        sources = [queries, keys, values]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = attend(*sources)
        return [outputs, *tape.gradient(outputs, sources, upstream)]

    return compute(*inputs)


@pytest.mark.parametrize(
    ("block", "dtype", "tolerance", "jit"),
    [
        (8, "float32", 2e-6, False),
        (8, "float32", 2e-6, True),
        (8, "bfloat16", 2e-2, False),
        (1, "float32", 2e-6, False),
        (LENGTH, "float32", 2e-6, False),
    ],
)
def test_blocks_compute_what_the_whole_does(block, dtype, tolerance, jit):
    """Also where the last block is smaller, and where each key-value head has several query heads."""
    queries, pairs = (BATCH, KV_HEADS, GROUP, LENGTH, SIZE), (BATCH, KV_HEADS, LENGTH, SIZE)
    inputs = normal(queries, pairs, pairs, queries)
    narrow = [tf.cast(x, dtype) for x in inputs]
    expected = with_gradients(attention, False, *inputs)
    found = with_gradients(lambda *x: attention_by_blocks(*x, block=block), jit, *narrow)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # A sum is rounded by its terms, which are larger than it may be: CPUs without bfloat16 products do so more.
        most = tolerance * np.abs(other).max()
        np.testing.assert_allclose(tf.cast(one, tf.float32), other, rtol=0, atol=most)


@pytest.mark.parametrize(("length", "dropout", "whole"), [(1024, 0.0, True), (1025, 0.0, False), (1025, 0.1, True)])
def test_long_contexts_have_no_tensor_of_all_pairs_of_positions(length, dropout, whole):
    layer = Attention(2, dropout=dropout)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=True)
        return tape.gradient(outputs, x)

    graph = gradient.get_concrete_function(tf.TensorSpec([1, length, 8])).graph
    sizes = [x.shape.num_elements() or 0 for operation in graph.get_operations() for x in operation.outputs]
    assert (max(sizes) >= length**2) == whole
