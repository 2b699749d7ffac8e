"""A loss that compares each example with all of the global batch, on one replica and on two."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, gather, mean
from crankshaft.engine import logging
from tests.arrays import assert_close

pytestmark = pytest.mark.thorough

SPREAD = np.random.default_rng(0).normal(size=(17, 4)).astype(np.float32)
VIEWS = SPREAD[:, :3] + 0.1


class Contrastive(Trainer):
    """Outputs beside the labels of the same example, among those of all: both ways."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(6, activation="tanh"), tf.keras.layers.Dense(3)])

    def loss(self, outputs, batch):
        losses, views = 0.0, batch[1] + 1.0  # an example of zeros has a gradient, too
        for mine, others in ((outputs, views), (views, outputs)):
            others, first = gather(self, others)
            own = first + tf.range(tf.shape(mine)[0])
            losses += tf.nn.sparse_softmax_cross_entropy_with_logits(own, tf.matmul(mine, others, transpose_b=True))
        return mean(losses)


@pytest.mark.parametrize("batch_size", [pytest.param(6, marks=pytest.mark.slow), 8])
def test_two_replicas_have_the_gradient_and_the_loss_of_one(bench, batch_size):
    """Two epochs of 17 examples, evaluated in 8, 8 and 1, which both have then, as in training by 8."""
    options = {"eval_source": (SPREAD, VIEWS), "eval_batch_size": 8, "learning_rate": 0.1}
    one, two = (bench(Contrastive(), (SPREAD, VIEWS), batch_size, n, **options) for n in (1, 2))
    curve = one.curve(6)
    assert curve[-1] < curve[0]
    np.testing.assert_allclose(two.curve(6), curve, rtol=1e-5, atol=1e-6)
    evaluated = [each.strategy.evaluate().values()["loss"] for each in (one, two)]
    np.testing.assert_allclose(evaluated[1], evaluated[0], rtol=1e-5)
    assert_close(two.trainer.model.variables, one.trainer.model.variables, atol=2e-5)


def test_a_replica_without_examples_brings_none_to_compare_with(bench):
    """Two of four, and at an epoch's end a third; of 17 by 8."""
    data, options = (SPREAD, VIEWS), {"learning_rate": 0.1, "shuffle": False}
    one = bench(Contrastive(), data, 8, **options)
    many = bench(Contrastive(), tf.data.Dataset.from_tensor_slices(data), 16, 4, workers=2, **options)
    np.testing.assert_allclose(many.curve(6), one.curve(6), rtol=1e-5, atol=1e-6)
    assert_close(many.trainer.model.variables, one.trainer.model.variables, atol=2e-5)


NAMES = np.array(["", "a", "\0", "b\0", "\xe9" * 9])
KINDS = {
    "text": NAMES[np.arange(34).reshape(17, 2) % 5],
    "bool": np.arange(17) % 2 == 0,
    "uint8": np.arange(17, dtype=np.uint8),
    "bfloat16": tf.cast(VIEWS, tf.bfloat16).numpy(),
}


class Alike(Trainer):
    """Compares each example with all of the batch by a value of any type."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        others, _ = gather(self, batch[1])
        is_alike = tf.cast(batch[1][:, tf.newaxis] == others, tf.float32)
        return mean(outputs[:, 0] * tf.reduce_sum(tf.reshape(is_alike, [tf.shape(outputs)[0], -1]), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_type_are_gathered(bench, kind):
    """17 examples by 8: both replicas have the last."""
    one, two = (bench(Alike(), (SPREAD, KINDS[kind]), 8, n, learning_rate=0.1).curve(3) for n in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-5)


class Few(Alike):
    """Gathers values of some of the examples."""

    def loss(self, outputs, batch):
        self.shape = gather(self, batch[1])[0].shape.as_list()
        few, _ = gather(self, tf.boolean_mask(batch[1], batch[1] % 3 > 0))
        return mean(outputs[:, 0] * tf.reduce_sum(few))


def test_values_of_some_examples_are_gathered(bench):
    """Of batches of 7, which two replicas share as 4 and 3."""
    data = SPREAD[:14], np.arange(14, dtype=np.float32)
    one, two = (bench(Few(), data, 7, n, learning_rate=0.1) for n in (1, 2))
    np.testing.assert_allclose(two.curve(3), one.curve(3), rtol=1e-5)
    assert two.trainer.shape == [7]


def test_micro_batches_are_refused(bench):
    with pytest.raises(ValueError, match="accumulate_steps: gather needs a batch as a whole; use 1"):
        bench(Contrastive(), (SPREAD, VIEWS), 6, accumulate_steps=2).train(1)


COMPARED = {
    "a product": lambda x, y: tf.matmul(x, y, transpose_b=True),
    "einsum": lambda x, y: tf.einsum("nd,md->nm", x, y),
    "distances": lambda x, y: tf.reduce_sum(tf.square(x[:, tf.newaxis] - y[tf.newaxis]), -1),
}


class Apart(Contrastive):
    """Compares examples without gathering them."""

    def __init__(self, compared):
        super().__init__()
        self.compared = compared

    def loss(self, outputs, batch):
        return mean(tf.reduce_mean(tf.exp(-self.compared(outputs, batch[1])), 1))


@pytest.mark.parametrize("kind", COMPARED)
@pytest.mark.parametrize(("replicas", "micro_batches"), [(2, 1), (1, 2), (1, 1)])
def test_one_that_does_not_gather_is_told_that_parts_are_compared(
    bench, caplog, monkeypatch, kind, replicas, micro_batches
):
    monkeypatch.setattr(logging, "warning_once", logging.warning)  # for each of these tests
    bench(Apart(COMPARED[kind]), (SPREAD, VIEWS), 8, replicas, accumulate_steps=micro_batches).train(1)
    said = [line for line in caplog.messages if line.startswith("Apart.loss compares examples with one another")]
    assert bool(said) == (replicas * micro_batches > 1)


class Smooth(Contrastive):
    """Adds the square of the outputs' gradient, whose own gradient has products of examples that nothing uses."""

    def loss(self, outputs, batch):
        with tf.GradientTape() as tape:
            tape.watch(batch[0])
            values = self.model(batch[0])
        slopes = tape.gradient(values, batch[0])
        own = tf.einsum("nd,nd->n", outputs, batch[1])
        own += tf.reduce_sum(outputs[:, tf.newaxis] * batch[1][:, :, tf.newaxis], [1, 2])
        # Of one example at a time.
        products = tf.map_fn(
            lambda x: tf.matmul(x[0][tf.newaxis], x[1][:, tf.newaxis])[0, 0],
            (outputs, batch[1]),
            fn_output_signature=tf.float32,
        )
        return mean(own + products + tf.reduce_sum(tf.square(slopes), 1))


class Exchanged(Contrastive):
    """Has all replicas' examples by a sum of its own, as SimCLR's code does."""

    def loss(self, outputs, batch):
        replica = tf.distribute.get_replica_context()
        shape = [replica.num_replicas_in_sync, *batch[1].shape]
        parts = replica.all_reduce("sum", tf.scatter_nd([[replica.replica_id_in_sync_group]], [batch[1]], shape))
        return mean(tf.reduce_mean(tf.matmul(outputs, tf.reshape(parts, [-1, 3]), transpose_b=True), 1))


def test_one_that_exchanges_examples_itself_is_not(bench, caplog, monkeypatch):
    monkeypatch.setattr(logging, "warning_once", logging.warning)
    bench(Exchanged(), (SPREAD[:16], VIEWS[:16]), 8, 2).train(1)
    assert "compares examples" not in caplog.text


@pytest.mark.parametrize(("replicas", "micro_batches"), [(2, 1), (1, 2)])
def test_one_of_single_examples_is_not(bench, caplog, monkeypatch, replicas, micro_batches):
    monkeypatch.setattr(logging, "warning_once", logging.warning)
    bench(Smooth(), (SPREAD, VIEWS), 8, replicas, accumulate_steps=micro_batches).train(1)
    assert not [line for line in caplog.messages if "compares" in line]
