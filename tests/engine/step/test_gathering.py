"""A loss that compares each example with all of the global batch, on one replica and on two."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, gather, mean

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


def trained(bench, replicas: int):
    """Two epochs of 17 examples in batches of 6, the last of 5, evaluated in 8, 8 and 1: then a replica has none."""
    made = bench(
        Contrastive(), (SPREAD, VIEWS), 6, replicas, eval_source=(SPREAD, VIEWS), eval_batch_size=8, learning_rate=0.1
    )
    return made, made.curve(6), made.strategy.evaluate().values()["loss"]


def test_two_replicas_have_the_gradient_and_the_loss_of_one(bench):
    (one, curve, evaluated), (two, other_curve, other_evaluated) = (trained(bench, n) for n in (1, 2))
    assert curve[-1] < curve[0]
    np.testing.assert_allclose(other_curve, curve, rtol=1e-5)
    np.testing.assert_allclose(other_evaluated, evaluated, rtol=1e-5)
    for a, b in zip(one.trainer.model.variables, two.trainer.model.variables, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=2e-5)


def test_a_replica_without_examples_in_training_changes_nothing(bench):
    """Batches of 8, 8 and 1."""
    made = [bench(Contrastive(), (SPREAD, VIEWS), 8, replicas, learning_rate=0.1) for replicas in (1, 2)]
    curves = [each.curve(6) for each in made]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5, atol=1e-6)


def test_micro_batches_are_refused(bench):
    with pytest.raises(ValueError, match="accumulate_steps: gather needs a batch as a whole; use 1"):
        bench(Contrastive(), (SPREAD, VIEWS), 6, accumulate_steps=2).train(1)
