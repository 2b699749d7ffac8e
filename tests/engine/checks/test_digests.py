"""A step's digest depends on what it computes, not on names or on what differs between processes that train alike."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.checks import digests

SPEC = tf.TensorSpec([None, 3], tf.float32)


def digest_of(function, spec=SPEC):
    return digests.digest(tf.function(function).get_concrete_function(spec).graph)


def squares(x):
    return tf.reduce_sum(tf.square(x))


def loop(factor):
    return lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * factor), (0, x))[1]


def branch(factor):
    return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * factor, lambda: x)


def identity(x):
    return tf.numpy_function(lambda y: y, [x], tf.float32)


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (squares, lambda x: tf.reduce_sum(tf.square(x, name="another"), name="name")),
        (loop(2.0), loop(2.0)),
        (branch(2.0), branch(2.0)),
        (identity, identity),  # each trace has a token of its own
        (lambda x: x[1:3], lambda x: x[2:4]),  # slices of two replicas
        (lambda x: tf.cast(tf.constant(0), tf.float32) * x, lambda x: tf.cast(tf.constant(1), tf.float32) * x),
    ],
    ids=["names", "loop", "branch", "function", "slice", "replica"],
)
def test_what_computes_the_same_has_one_digest(function, other):
    assert digest_of(function, tf.TensorSpec([4, 3])).value == digest_of(other, tf.TensorSpec([4, 3])).value


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (tf.nn.relu, tf.nn.gelu),
        (lambda x: 2.0 * x, lambda x: 3.0 * x),
        (lambda x: x - x[:1], lambda x: x[:1] - x),
        (loop(2.0), loop(3.0)),
        (branch(2.0), branch(3.0)),
        (lambda x: x @ np.ones([3, 4], np.float32), lambda x: x @ np.ones([3, 5], np.float32)),
        (lambda x: (x, tf.constant(1.0)), lambda x: (x, tf.constant(2.0))),
    ],
    ids=["kind", "constant", "inputs", "loop", "branch", "shape", "result"],
)
def test_what_computes_otherwise_has_another(function, other):
    assert digest_of(function).value != digest_of(other).value


def test_the_first_op_that_differs_is_described_with_its_line():
    def scaled(factor):
        return lambda x: tf.reduce_sum(factor * tf.square(x))

    one, other = digest_of(scaled(1.0)), digest_of(scaled(100.0))
    first = next(op for (value, op), (before, _) in zip(other.ops, one.ops, strict=True) if value != before)
    assert digests.describe(first).startswith("Mul of float32 (None, 3) by 100.0")


def test_a_graph_of_many_ops_takes_one_pass():
    def doublings(x):
        for _ in range(2000):  # 2 to the 2000 paths
            x = x + x
        return x

    assert len(digest_of(doublings).ops) > 2000
