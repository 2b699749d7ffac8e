"""A GAN: two models and two optimizers in one step, from the public pieces."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, Update, make_optimizer, mean, step_context


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
        return mean(cross_entropy(tf.ones_like(fake), fake)), mean(wrong)

    def train_step(self, batch):
        ours, theirs = self.generator.trainable_variables, self.discriminator.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            generator, discriminator = self.losses(batch)
            totals = [step_context().scaled(loss.total) for loss in (generator, discriminator)]
        gradients = tape.gradient(totals[0], ours) + tape.gradient(totals[1], theirs)
        gradients, count = self.reduction.sum(gradients, generator.count)
        update = Update(self, gradients.over(count).unscaled(), ours + theirs)
        update.apply(self.generator_optimizer, ours)
        update.apply(self.discriminator_optimizer, theirs)
        return update.end({"loss": generator, "discriminator_loss": discriminator})

    def eval_step(self, batch):
        generator, discriminator = self.losses(batch)
        return {"loss": generator, "discriminator_loss": discriminator}


def points(examples=52):
    rng = np.random.default_rng(0)
    real = rng.normal([2, -1], 0.5, size=(examples, 2)).astype(np.float32)
    return {"real": real, "noise": rng.normal(size=(examples, 3)).astype(np.float32)}, np.zeros(examples, np.int32)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"ema_decay": 0.9, "on_nonfinite": "skip"}],
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


def test_a_checkpoint_holds_both_models_of_a_gan(bench, tmp_path):
    made, other = (bench(Gan(), points(), 16, 2, learning_rate=0.01, ema_decay=0.9) for _ in range(2))
    made.train(5)
    path = made.state.checkpoint.save(str(tmp_path / "gan"))
    other.state.checkpoint.restore(path).assert_consumed()
    other.state.restore_host_state({})
    assert other.state.step == 5
    for each in (made, other):
        each.train(9)
    for a, b in zip(made.arrays(), other.arrays(), strict=True):
        np.testing.assert_array_equal(a, b)
