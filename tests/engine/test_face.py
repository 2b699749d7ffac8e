"""What `Trainer` shows to people who subclass it: few names, and what a step may ask for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, make_optimizer, mean, step_context
from crankshaft.engine.inventory import Inventory


def test_a_trainer_has_at_most_15_public_members():
    """Methods, properties and attributes of the class; `tf.Module`'s own are not its face."""
    members = sorted(name for name in vars(Trainer) if not name.startswith("_"))
    assert len(members) <= 15, members
    assert set(Trainer.__annotations__) <= set(members)


def test_a_property_that_lacks_an_attribute_names_that_attribute():
    class Mine(Trainer):
        @property
        def trainable_variables(self):
            return self.modell.trainable_variables

    mine = Mine()
    with pytest.raises(AttributeError, match="'Mine' object has no attribute 'modell'"):
        mine.trainable_variables  # noqa: B018 - it raises


def test_a_seed_outside_of_a_step_is_refused():
    with pytest.raises(ValueError, match="outside of a step"):
        step_context().seed()


class Moving(Trainer):
    """A step of its own, whose batch normalisation sees other examples on each replica."""

    def build(self):
        self.model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.BatchNormalization(momentum=0.5)])
        self.optimizer = make_optimizer(self, self.model.trainable_variables)

    def train_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mean(tf.square(self.model(batch[0], training=True) - 1)[:, 0])
        gradients, count = self.reduction.sum(tape.gradient(loss.total, variables), loss.count)
        self.optimizer.apply(gradients.over(count), variables)
        return {"loss": loss}


def test_moving_statistics_are_averaged_in_a_step_of_ones_own_too(bench):
    features = np.arange(16, dtype=np.float32).reshape(8, 2)
    made = bench(Moving(), (features, np.zeros(8, np.int32)), 8, 2, shuffle=False, learning_rate=0.1)
    made.train(1)
    moving = Inventory(made.trainer).moving_statistics
    for variable in moving:
        one, other = made.copies(variable)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(made.copies(moving[0])[0], 0.5 * features.mean(0), rtol=1e-6)
