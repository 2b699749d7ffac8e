"""What `Trainer` shows to people who subclass it: few names, and one line for each that is gone."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, make_optimizer, mean, step_context
from crankshaft.engine.holdings import Holdings
from crankshaft.engine.step import removed


def test_a_trainer_has_at_most_15_public_members():
    """Methods, properties and attributes of the class; `tf.Module`'s own are not its face."""
    members = sorted(name for name in vars(Trainer) if not name.startswith("_"))
    assert len(members) <= 15, members
    assert set(Trainer.__annotations__) <= set(members)


def test_what_is_gone_is_not_there_again():
    assert [name for name in (*removed.CALLED, *removed.READ) if name in vars(Trainer)] == []


@pytest.mark.parametrize("name", ["clip", "build_layers", "summed_gradients", "apply_gradients"])
def test_a_class_that_overrides_what_nothing_calls_is_told_so(name):
    with pytest.raises(TypeError, match=rf"^Mine\.{name}: Trainer\.{name} is gone, and would not be called; use "):
        type("Mine", (Trainer,), {name: lambda self, *arguments: None})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("num_classes", "Mine.num_classes is gone; use self.given.num_classes"),
        ("stateless_seed", "Mine.stateless_seed is gone; use crankshaft.step_context().seed()"),
        ("optimizers", "Mine.optimizers is gone; use engine.holdings.Holdings(self).optimizers"),
    ],
)
def test_who_asks_for_what_is_gone_is_told_where_it_is(name, says):
    class Mine(Trainer):
        pass

    with pytest.raises(AttributeError, match=f"^{re.escape(says)}$"):
        getattr(Mine(), name)


def test_names_that_are_gone_are_free_for_attributes_and_others_fail_as_ever():
    class Mine(Trainer):
        step = "my own"

        @property
        def trainable_variables(self):
            return self.modell.trainable_variables

    mine = Mine()
    mine.num_classes = 3
    assert (mine.step, mine.num_classes) == ("my own", 3)
    with pytest.raises(AttributeError, match="'Mine' object has no attribute 'modell'"):
        mine.trainable_variables  # noqa: B018 - it raises


def test_a_seed_outside_of_a_step_is_refused():
    with pytest.raises(ValueError, match="no step is on"):
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
    moving = Holdings(made.trainer).moving_statistics
    for variable in moving:
        one, other = made.copies(variable)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(made.copies(moving[0])[0], 0.5 * features.mean(0), rtol=1e-6)
