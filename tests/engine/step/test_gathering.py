"""A loss that compares each example with all of the global batch, on one replica and on two."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, gather, mean
from tests.arrays import assert_close

pytestmark = pytest.mark.thorough

SPREAD = np.random.default_rng(0).normal(size=(17, 4)).astype(np.float32)
VIEWS = SPREAD[:, :3] + 0.1


class Contrastive(Trainer):
    """Outputs beside the labels of the same example, among those of all: both ways."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(6, activation="tanh"), tf.keras.layers.Dense(3)])

    def loss(self, outputs, batch):
        losses = 0.0
        for mine, others in ((outputs, batch[1]), (batch[1], outputs)):
            others, first = gather(self, others)
            own = first + tf.range(tf.shape(mine)[0])
            losses += tf.nn.sparse_softmax_cross_entropy_with_logits(own, tf.matmul(mine, others, transpose_b=True))
        return mean(losses)


@pytest.mark.parametrize("batch_size", [pytest.param(6, marks=pytest.mark.slow), 8])
def test_two_replicas_have_the_gradient_and_the_loss_of_one(bench, batch_size):
    """Two epochs of 17 examples, evaluated in 8, 8 and 1: then a replica has none, as in training by 8."""
    options = {"eval_source": (SPREAD, VIEWS), "eval_batch_size": 8, "learning_rate": 0.1}
    one, two = (bench(Contrastive(), (SPREAD, VIEWS), batch_size, n, **options) for n in (1, 2))
    curve = one.curve(6)
    assert curve[-1] < curve[0]
    np.testing.assert_allclose(two.curve(6), curve, rtol=1e-5, atol=1e-6)
    evaluated = [each.strategy.evaluate().values()["loss"] for each in (one, two)]
    np.testing.assert_allclose(evaluated[1], evaluated[0], rtol=1e-5)
    assert_close(two.trainer.model.variables, one.trainer.model.variables, atol=2e-5)


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
    """17 examples by 8: one replica has the last."""
    one, two = (bench(Alike(), (SPREAD, KINDS[kind]), 8, n, learning_rate=0.1).curve(3) for n in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_micro_batches_are_refused(bench):
    with pytest.raises(ValueError, match="accumulate_steps: gather needs a batch as a whole; use 1"):
        bench(Contrastive(), (SPREAD, VIEWS), 6, accumulate_steps=2).train(1)
