"""Frozen weights stay as they are to the bit, and go on as those of a new run do, on any strategy of one process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import minimize
from tests.arrays import assert_same
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

X = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
Y = (X @ np.arange(6) > 0).astype(np.float32)
STEPS, FROZEN = 6, 3


class Deep(Squares):
    """Two layers, of which the first ends in batch normalisation."""

    def build_model(self):
        layers = tf.keras.layers
        first = [layers.Dense(5, name="first"), layers.BatchNormalization(name="norm"), layers.ReLU()]
        return tf.keras.Sequential([*first, layers.Dense(1, name="head")])


def values(made, part: str) -> list[np.ndarray]:
    return [v.numpy() for v in made.trainer.model.trainable_variables if part in v.path]


def by_freezing(made) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """The first layer's weights before, at the end of freezing and after; all weights at the end."""
    firsts = []
    for until in (0, FROZEN, STEPS):
        while made.state.step < until:  # as the outer loop cuts its calls
            end = min(until, made.state.freezing.next_change(made.state.step) or until)
            made.run(end - made.state.step)
        firsts.append(values(made, "first"))
    return firsts, np.concatenate([v.ravel() for v in values(made, "")])


CASES = {
    "adam": {},
    "adamw": {"optimizer": "adamw", "clip_norm": 0.1, "ema_decay": 0.9},
    "micro-batches": {"accumulate_steps": 2},
}


@pytest.mark.parametrize(
    "case",
    ["adamw", pytest.param("adam", marks=pytest.mark.slow), pytest.param("micro-batches", marks=pytest.mark.slow)],
)
def test_frozen_weights_stay_to_the_bit_and_then_train(bench, case):
    made = bench(Deep(), (X, Y), 8, freeze=(("first|norm", FROZEN),), learning_rate=0.01, **CASES[case])
    statistics = made.trainer.model.layers[1].moving_mean.numpy()
    (before, held, after), _ = by_freezing(made)
    assert_same(before, held)
    assert np.abs(held[0] - after[0]).max() > 1e-4
    assert not np.array_equal(statistics, made.trainer.model.layers[1].moving_mean.numpy())


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("nadam", marks=pytest.mark.slow)])
def test_the_first_update_after_freezing_is_that_of_a_new_run(bench, optimizer):
    """An Adam that counted all updates would move each weight by three times the rate and more."""
    rate = 0.001
    made = bench(Deep(), (X, Y), 8, freeze=(("first", FROZEN),), learning_rate=rate, optimizer=optimizer)
    made.train(FROZEN)
    before = values(made, "first/kernel")[0]
    made.train(FROZEN + 1)
    moved = np.abs(values(made, "first/kernel")[0] - before)
    assert np.median(moved) == pytest.approx(rate, rel=0.05 if optimizer == "adam" else 0.5)


class WithoutMoving(Deep):
    """Its statistics are each example's: those of a batch differ by replica."""

    def build_model(self):
        layers = tf.keras.layers
        first = [layers.Dense(5, name="first"), layers.LayerNormalization(name="norm"), layers.ReLU()]
        return tf.keras.Sequential([*first, layers.Dense(1, name="head")])


class Minimized(WithoutMoving):
    """The same update by a step of its own."""

    def train_step(self, batch):
        return minimize(self, batch, self.losses, {"loss": self.optimizer})

    def losses(self, batch):
        return {"loss": self.loss(self.model(batch[0], training=True), batch)}


class OwnTape(Minimized):
    """A step that applies gradients itself, and knows of nothing frozen."""

    def train_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.losses(batch)["loss"]
        gradients, count = self.reduction.sum(tape.gradient(loss.total, variables), loss.count)
        self.optimizer.apply(gradients.over(count), variables)
        return {"loss": loss}


ASKED = {"freeze": (("first", FROZEN), ("nor.*beta", None)), "learning_rate": 0.01, "clip_norm": 1.0}


@pytest.fixture(scope="module")
def on_one_device(bench):
    return by_freezing(bench(WithoutMoving(), (X, Y), 8, **ASKED))[1]


@pytest.mark.parametrize(
    "how",
    [
        "two replicas",
        "shard_optimizer",
        "minimize",
        pytest.param("xla", marks=pytest.mark.slow),
    ],
)
def test_the_same_numbers_on_any_strategy(bench, on_one_device, how):
    replicas = 2 if how in ("two replicas", "shard_optimizer") else 1
    more = {"xla": {"jit": True}, "shard_optimizer": {"shard_optimizer": True}}.get(how, {})
    model = Minimized if how == "minimize" else WithoutMoving
    other = by_freezing(bench(model(), (X, Y), 8, replicas, **ASKED, **more))[1]
    np.testing.assert_allclose(other, on_one_device, atol=2e-6)


def test_frozen_weights_stay_where_gradients_are_applied_by_the_step(bench):
    options = {"freeze": (("first", FROZEN),), "learning_rate": 0.01}
    (before, held, after), _ = by_freezing(bench(OwnTape(), (X, Y), 8, 1, **options))
    assert_same(before, held)
    assert np.abs(held[0] - after[0]).max() > 1e-4


def test_what_can_not_be_frozen_is_named(bench):
    with pytest.raises(ValueError, match="freeze=nothing matches the path of none of the 6 weights, such as seq"):
        bench(Deep(), (X, Y), 8, freeze=(("nothing", None),))
    with pytest.raises(ValueError, match=r"freeze=\. and all rules together freeze each of the 6 weights"):
        bench(Deep(), (X, Y), 8, freeze=((".", 2),))
