"""A GAN: two models and two optimizers in one step, from the public pieces."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, make_optimizer, mean, minimize, step_context
from crankshaft.engine.errors import UsageError
from crankshaft.engine.optimizers import SGD

pytestmark = pytest.mark.thorough


class Gan(Trainer):
    """A generator and a discriminator of points in the plane, trained together. Noise is part of the batch."""

    def build(self):
        layers = tf.keras.layers
        self.generator = tf.keras.Sequential([layers.Dense(16, "relu"), layers.Dense(2)])
        self.discriminator = tf.keras.Sequential([layers.Dense(16, "relu"), layers.Dense(1)])
        self.generator.build([None, 3])
        self.discriminator.build([None, 2])
        self.generator_optimizer = make_optimizer(self, self.generator.trainable_variables)
        self.discriminator_optimizer = make_optimizer(self, self.discriminator.trainable_variables)

    def losses(self, batch):
        features, _ = batch
        fake = self.discriminator(self.generator(features["noise"]))[:, 0]
        real = self.discriminator(features["real"])[:, 0]
        cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits
        wrong = cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)
        return {"loss": mean(cross_entropy(tf.ones_like(fake), fake)), "discriminator_loss": mean(wrong)}

    def train_step(self, batch):
        by = {"loss": self.generator_optimizer, "discriminator_loss": self.discriminator_optimizer}
        return minimize(self, batch, self.losses, by)

    def eval_step(self, batch):
        return self.losses(batch)


def points(examples=52):
    rng = np.random.default_rng(0)
    real = rng.normal([2, -1], 0.5, size=(examples, 2)).astype(np.float32)
    return {"real": real, "noise": rng.normal(size=(examples, 3)).astype(np.float32)}, np.zeros(examples, np.int32)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"ema_decay": 0.9, "on_nonfinite": "skip", "accumulate_steps": 2}],
    ids=["plain", "average"],
)
def test_a_gan_learns_the_same_on_one_device_and_two_replicas(bench, options):
    """52 points by 16: a last batch of 4. Two models are two times the rounding of one: 1e-4 after 40 Adam steps."""
    one, two = (bench(Gan(), points(), 16, n, learning_rate=0.01, eval_source=points(), **options) for n in (1, 2))
    before = one.strategy.evaluate().means()
    curves = [made.curve(40) for made in (one, two)]
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)
    after = one.strategy.evaluate().means()
    assert after["discriminator_loss"] < before["discriminator_loss"]
    other = two.strategy.evaluate().means()
    assert after == {name: pytest.approx(value, rel=1e-4) for name, value in other.items()}
    for variable in two.state.variables():
        np.testing.assert_array_equal(*two.copies(variable))


class TwoCounts(Trainer):
    """Two numbers, each minimized by its own loss, of all examples and of some."""

    def build(self):
        self.numbers = [tf.Variable([0.0]), tf.Variable([0.0])]
        self.all, self.some = (make_optimizer(self, [number]) for number in self.numbers)

    def train_step(self, batch):
        return minimize(self, batch, self.losses, {"loss": self.all, "some": self.some})

    def losses(self, batch):
        all_, some = (number * batch[0] for number in self.numbers)
        return {"loss": mean(all_), "some": mean(some, weights=batch[1] > 0)}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_loss_is_divided_by_its_own_count_and_clipped_with_the_others(bench, replicas):
    """The gradients are 4 (of 1 to 7) and 6 (of 5, 6 and 7): their norm is that of both."""
    data = np.arange(1, 8, dtype=np.float32), np.int32([0, 0, 0, 0, 1, 1, 1])
    made = bench(TwoCounts(), data, 8, replicas, optimizer="sgd", learning_rate=1.0, clip_norm=1.0)
    norm = made.curve(1, "gradient_norm")
    expected = np.hypot(4, 6)
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    found = [made.copies(number)[-1] for number in made.trainer.numbers]
    np.testing.assert_allclose(found, -np.array([[4], [6]]) / expected, rtol=1e-6)


class Shared(TwoCounts):
    """Both optimizers update the first number too; the second loss is of both numbers."""

    def build(self):
        self.numbers = [tf.Variable([0.0]), tf.Variable([0.0])]
        self.all = make_optimizer(self, self.numbers[:1])
        self.some = make_optimizer(self, self.numbers, SGD(0.25))

    def losses(self, batch):
        first, second = self.numbers
        return {"loss": mean(first * batch[0]), "some": mean(tf.square(first - 1.0) * batch[0] + second * batch[0])}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_optimizers_that_share_a_variable_each_apply_the_gradient_of_their_own_loss(bench, replicas):
    """The mean of 1 to 7 is 4, so are the first gradient and the second's; the shared one of the second loss is -8."""
    data = np.arange(1, 8, dtype=np.float32), np.zeros(7, np.int32)
    how = {"optimizer": "sgd", "learning_rate": 1.0}
    made = bench(Shared(), data, 8, replicas, **how)
    made.curve(1, "loss")
    found = [made.copies(number)[-1][0] for number in made.trainer.numbers]
    np.testing.assert_allclose(found, [-4 + 0.25 * 8, -0.25 * 4], atol=1e-6)


@pytest.mark.parametrize("option", ["clip_norm", "clip_variable_norm", "ema_decay"])
def test_what_counts_a_shared_variable_once_can_not_be_combined_with_two_optimizers(bench, option):
    data = np.arange(1, 8, dtype=np.float32), np.zeros(7, np.int32)
    with pytest.raises(UsageError, match=rf"^{option}: .* by several optimizers|^{option}: several optimizers"):
        bench(Shared(), data, 8, 1, optimizer="sgd", **{option: 0.5}).train(1)


class Compiled(TwoCounts):
    """Its update is a `tf.function`, which is traced once, and the step as often as the loop has it."""

    def build(self):
        super().build()
        self.update = tf.function(super().train_step, autograph=False)

    def train_step(self, batch):
        return self.update(batch)


def test_what_a_function_that_a_step_calls_applies_counts_in_each_trace(bench):
    data = np.arange(1, 17, dtype=np.float32), np.ones(16, np.int32)
    how = {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": 1.0}
    made = bench(Compiled(), data, 2, block_steps=8, unrolls=True, **how)
    made.train(5)
    assert made.state.step == 5


class Conditional(Gan):
    def train_step(self, batch):
        step = super().train_step
        return tf.cond(step_context().step % 2 == 0, lambda: step(batch), lambda: step(batch))


class InFunction(Gan):
    train_step = tf.function(Gan.train_step, autograph=False)


@pytest.mark.parametrize("trainer", [Conditional, InFunction])
def test_a_sum_over_replicas_in_a_branch_or_a_function_names_another_way(bench, trainer):
    bench(trainer(), points(), 8, 1).run(2)
    with pytest.raises(
        ValueError, match=r"gradients over replicas within tf\.cond.*Update\.apply within the condition"
    ):
        bench(trainer(), points(), 8, 2).run(2)
