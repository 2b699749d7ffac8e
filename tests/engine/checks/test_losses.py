"""Losses that pair examples by mistake or on purpose, by how their operations come by them."""

from __future__ import annotations

import contextlib
import types

import pytest
import tensorflow as tf

from crankshaft import UsageError
from crankshaft.engine import logging
from crankshaft.engine.checks.losses import check_losses
from crankshaft.engine.step.context import TracedLoss

N = 4


def difference(y, p):
    """Shows nothing of pairs outside of it."""
    return tf.reduce_sum(p - y)


def looped(function, start):
    return tf.while_loop(lambda at, _: at < 3, lambda at, value: (at + 1, function(value)), (0, start))[1]


@tf.custom_gradient
def with_gradient(numbers, _):
    return 2.0 * numbers, lambda gradient: (gradient, None)


of_function = tf.function(difference, autograph=False)
of_functions = tf.function(lambda y, p: of_function(y, p), autograph=False)


# Of labels [n] and outputs [n, 1].
PAIRS = {
    "at once": lambda y, p: p - y,
    "the other way": lambda y, p: tf.maximum(y, p),
    "of others": lambda y, p: tf.exp(p) - tf.cast(tf.cast(y, tf.int32), tf.float32),
    "in a function": of_function,
    "in a function's function": lambda y, p: of_functions(2.0 * y, 1.0 - p),
    "in a branch": lambda y, p: tf.cond(tf.reduce_sum(y) > 0, lambda: difference(y, p), lambda: 0.0),
    "in the other branch": lambda y, p: tf.cond(tf.reduce_sum(y) > 0, lambda: 0.0, lambda: difference(y, p)),
    "in a loop": lambda y, p: looped(lambda _: difference(y, p), 0.0),
    "with a loop's column": lambda y, p: looped(lambda column: column * 2.0, p) - y,
}
NO_PAIRS = {
    "columns": lambda y, p: p - y[:, None],
    "rows": lambda y, p: p[:, 0] - y,
    "on purpose": lambda y, p: p - y[None, :],
    "on purpose, as a column": lambda y, p: y[:, None] - p[:, 0],
    "in another order": lambda y, p: tf.gather(p, tf.argsort(y)),
    "of numbers": lambda y, p: p - tf.range(float(N)),
    "of numbers, beside a gradient": lambda y, p: p - with_gradient(tf.range(float(N)), y),
    "of a mean": lambda y, p: p - tf.reduce_mean(y),
    "of sizes": lambda y, p: p - tf.cast(tf.fill([N], tf.size(y)), tf.float32),
    "in a function": lambda y, p: of_function(y[:, None], p),
    "in a branch": lambda y, p: tf.cond(tf.reduce_sum(y) > 0, lambda: difference(y, p[:, 0]), lambda: 0.0),
    "a product": lambda y, p: tf.matmul(p, y[None]),
    "with weights [1, n]": lambda y, p: tf.matmul(p, tf.ones([1, N])) - y,
}


def check(function, warns=False, size=N, width=1, returns=tf.reduce_sum, outputs=lambda p: p):
    """Checks a loss of labels [n] and outputs [n, width], computed from [n, 3] by what is not checked."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([size, 3]), tf.TensorSpec([size])])
    def step(x, y):
        p = tf.reduce_sum((x[:, :1] - y)[:, :width], 1, keepdims=True) + tf.zeros([width])  # pairs, before the loss
        step.loss = TracedLoss("Own.loss", outputs(p), (x, y), returns(function(y, p)))
        return tf.reduce_sum(p)

    step.get_concrete_function()
    check_losses([types.SimpleNamespace(losses=[step.loss])], "Own", warns)


@pytest.mark.parametrize("kind", PAIRS)
def test_outputs_and_labels_that_broadcast_are_refused(kind):
    with pytest.raises(UsageError, match=r"^Own.loss: values \[n, 1\] and \[n\] .*outputs are \[n, 1\], labels \[n\]"):
        check(PAIRS[kind])


@pytest.mark.parametrize("kind", NO_PAIRS)
def test_what_does_not_broadcast_them_is_not(kind):
    check(NO_PAIRS[kind])


def test_pairs_are_refused_as_they_are_returned_and_named_by_the_outputs():
    with pytest.raises(UsageError, match=r"\(outputs are {a: \[n, 1\], b: \[n, 2\]}, labels \[n\]\)"):
        check(PAIRS["at once"], returns=lambda x: x, outputs=lambda p: {"a": p, "b": tf.concat([p, p], 1)})


def test_one_example_alone_pairs_nothing():
    check(lambda y, p: p - y, size=1)


@pytest.mark.parametrize("returns", [lambda _: 3.0, lambda x: (tf.reduce_sum(x), 3.0)])
def test_numbers_of_python_are_no_pairs(returns):
    check(lambda y, p: p, returns=returns)


@pytest.mark.parametrize(
    ("computed", "is_refused"),
    [(lambda x: tf.cast(x, tf.float32), True), (lambda x: tf.cast(tf.strings.length(x), tf.float32), False)],
)
def test_text_that_is_computed_with_is_refused(computed, is_refused):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([N], tf.string), tf.TensorSpec([N])])
    def step(x, y):
        p = computed(x)
        step.losses = [TracedLoss("Own.loss", p, ({"word": x}, y), loss) for loss in (1.0, tf.reduce_sum(p - y))]
        return p

    step.get_concrete_function()
    line = r"^features\['word'\] holds strings, and Own computes with them as with numbers; look them up"
    with pytest.raises(UsageError, match=line) if is_refused else contextlib.nullcontext():
        check_losses([types.SimpleNamespace(losses=step.losses)], "Own")


# Of labels [n] and outputs [n, 2].
COMPARED = {
    "a product": lambda y, p: tf.matmul(p, p, transpose_b=True),
    "einsum": lambda y, p: tf.einsum("nd,md->nm", p, p),
    "distances": lambda y, p: tf.reduce_sum(tf.square(p[:, None] - p[None]), -1),
    "of labels": lambda y, p: y[:, None] - y[None],
    "in a function": lambda y, p: of_function(y[None], y[:, None]),
    "in a branch": lambda y, p: tf.cond(y[0] > 0, lambda: difference(y[None], y[:, None]), lambda: 0.0),
}
NOT_COMPARED = {
    "of one example": lambda y, p: tf.einsum("nd,nd->n", p, p),
    "of weights": lambda y, p: tf.matmul(p, tf.ones([2, 5])),
    "of one example's own": lambda y, p: tf.einsum("nd,ne->nde", p, p),
    "of any rank": lambda y, p: 2.0 * tf.numpy_function(lambda x: x, [p], tf.float32),
    "of one operand": lambda y, p: tf.einsum("nd->n", p),
    "of weights by einsum": lambda y, p: tf.einsum("nd,dk->nk", p, tf.ones([2, 5])),
    "a column": lambda y, p: p * y[:, None],
    "a row": lambda y, p: y + y[None],
    "in batches": lambda y, p: tf.matmul(p[:, :, None], p[:, None]),
    "in a loop": lambda y, p: tf.map_fn(lambda x: tf.matmul(x[None], x[:, None])[0, 0], p),
}


@pytest.fixture
def warned(caplog, monkeypatch):
    monkeypatch.setattr(logging, "warning_once", logging.warning)  # for each of these tests
    return lambda: [line for line in caplog.messages if line.startswith("Own.loss compares examples with one another")]


@pytest.mark.parametrize("kind", COMPARED)
def test_examples_that_a_part_of_a_batch_compares_are_said(kind, warned):
    check(COMPARED[kind], width=2)
    assert not warned()
    check(COMPARED[kind], width=2, warns=True)
    assert warned()


@pytest.mark.parametrize("kind", NOT_COMPARED)
def test_examples_that_are_not_compared_are_not_said(kind, warned):
    check(NOT_COMPARED[kind], width=2, warns=True)
    assert not warned()


def test_what_a_loss_compares_and_does_not_use_is_not_said(warned):
    def unused(y, p):
        _ = tf.exp(tf.matmul(p, p, transpose_b=True))
        return p

    check(unused, width=2, warns=True)
    assert not warned()
