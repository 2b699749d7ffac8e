"""A Keras optimizer beside the engine's own, applied as it is: resumed as all else is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, UsageError, make_optimizer, mean, run
from tests.logical_cpus import make_four, use_new_collective_keys

POINTS = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
MIRRORED = {"strategy": "mirrored", "num_virtual_devices": 2}


class Tempered(Trainer):
    """A line, and a temperature by an optimizer of Keras's."""

    def build(self):
        self.model = tf.keras.Sequential([tf.keras.layers.Input([3]), tf.keras.layers.Dense(1)])
        self.temperature = tf.Variable(0.5)
        self.optimizer = make_optimizer(self, self.model.trainable_variables)
        self.other = tf.keras.optimizers.Adam(0.1)

    def train_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = mean(tf.square(self.model(batch[0])[:, 0] - batch[1]) + tf.square(self.temperature - 2.0))
        gradients, count = self.reduction.sum(tape.gradient(loss.total, variables), loss.count)
        self.optimizer.apply(gradients.over(count), variables)
        self.apply_other(tape.gradient(loss.total, self.temperature) / loss.count)
        return {"loss": loss}

    def apply_other(self, gradient):
        self.other.apply_gradients([(gradient, self.temperature)])


class Sometimes(Tempered):
    def apply_other(self, gradient):
        tf.cond(gradient < 1e9, lambda: [super(Sometimes, self).apply_other(gradient), True][1], lambda: True)


class SometimesOurs(Tempered):
    def build(self):
        super().build()
        self.other = make_optimizer(self, [self.temperature], self.other)

    def apply_other(self, gradient):
        tf.cond(gradient < 1e9, lambda: [self.other.apply([gradient], [self.temperature]), True][1], lambda: True)


def trained(trainer, steps, run_dir=None, **where):
    make_four()
    use_new_collective_keys()
    how = {"global_batch_size": 16, "jit": "off", "progress": "off", "run_dir": run_dir, **where}
    return run(trainer, data=((POINTS, POINTS[:, 0]),), train_steps=steps, **how)


def variables(trainer) -> list:
    return [each.numpy() for each in (*trainer.model.weights, *trainer.other.variables, trainer.temperature)]


@pytest.mark.thorough
def test_it_is_resumed_to_the_bit(tmp_path):
    trained(Tempered, 3, tmp_path, **MIRRORED)
    resumed, at_once = trained(Tempered, 6, tmp_path, **MIRRORED), trained(Tempered, 6, **MIRRORED)
    assert resumed.result["train"] == at_once.result["train"]
    for ends in zip(*(variables(each.trainer) for each in (resumed, at_once)), strict=True):
        np.testing.assert_array_equal(*ends)
    assert resumed.result["resumed_from"] == 3


def test_within_a_condition_on_replicas_it_is_one_line_with_the_cure():
    with pytest.raises(UsageError, match=r"where they can't meet.*crankshaft\.make_optimizer\(self, variables, opt"):
        trained(Sometimes, 2, **MIRRORED)
    assert trained(SometimesOurs, 2, **MIRRORED).result["step"] == 2
