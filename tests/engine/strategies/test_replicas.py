"""Batch normalisation and dropout on replicas: statistics equal everywhere, masks different, no example no harm."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Mean, Trainer, mean, step_context
from crankshaft.engine.inventory import Inventory
from crankshaft.models.cnn import Model as Cnn
from tests.arrays import assert_same
from tests.engine.trainers import pictures

pytestmark = pytest.mark.thorough

EACH_ITS_OWN = {
    "trainable": False,
    "synchronization": tf.VariableSynchronization.ON_READ,
    "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
}


class Normalised(Trainer):
    """Batch normalisation and nothing else: what its statistics become can be written down."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.BatchNormalization(momentum=0.5)])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs), 1))


class Beside(Normalised):
    """The same layer, beside the model and not in it."""

    def build_model(self):
        self.norm = tf.keras.layers.BatchNormalization(momentum=0.5)
        self.norm.build((None, 4))
        return tf.keras.Sequential([tf.keras.layers.Identity()])

    def forward(self, features, training):
        return self.model(self.norm(features, training=training), training=training)

    @property
    def trainable_variables(self):
        return self.norm.trainable_variables


class OwnStep(Normalised):
    """The same layer, in a step of its own."""

    def train_step(self, batch):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss(self.model(batch[0], training=True), batch)
        gradients, count = self.reduction.sum(tape.gradient(loss.total, variables), loss.count)
        self.optimizer.apply(gradients.over(count), variables)
        return {"loss": loss}


@pytest.mark.parametrize("trainer", [Normalised, Beside, OwnStep])
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_moving_statistics_are_the_mean_over_replicas_weighted_by_examples(bench, replicas, trainer):
    """7 examples by 5, then 2: uneven shares, fewer than three replicas, each of which then computes all of them."""
    features = np.random.default_rng(0).normal(3, 2, size=(7, 4)).astype(np.float32)
    made = bench(trainer(), (features, np.zeros(7, np.int32)), 5, replicas, shuffle=False, optimizer="sgd")
    moving_mean, moving_variance = np.zeros(4), np.ones(4)
    for step, batch in enumerate((features[:5], features[5:])):
        made.train(step + 1)
        cuts = [len(batch) * r // replicas for r in range(replicas + 1)]
        shares = [batch[a:b] for a, b in itertools.pairwise(cuts)] if len(batch) >= replicas else [batch]
        weigh = [len(share) / len(batch) for share in shares]
        moving_mean = 0.5 * moving_mean + 0.5 * sum(w * p.mean(0) for w, p in zip(weigh, shares, strict=True))
        moving_variance = 0.5 * moving_variance + 0.5 * sum(w * p.var(0) for w, p in zip(weigh, shares, strict=True))
        layer = made.trainer.norm if trainer is Beside else made.trainer.model.layers[0]
        for variable, wanted in ((layer.moving_mean, moving_mean), (layer.moving_variance, moving_variance)):
            np.testing.assert_allclose(made.held(variable), wanted, rtol=1e-5, atol=1e-6)  # of a few float32 values


@pytest.mark.parametrize(
    ("precision", "kind"), [("float32", "resident"), pytest.param("bfloat16", "dataset", marks=pytest.mark.slow)]
)
def test_a_replica_without_examples_does_no_harm(bench, precision, kind):
    """9 examples by 4: the last batch is one example: one of two replicas has none, nor have its layers."""
    source = tf.data.Dataset.from_tensor_slices(pictures(9)) if kind == "dataset" else pictures(9)
    made = bench(
        Cnn(batch_norm=True, dropout=0.5), source, 4, 2, num_classes=4, precision=precision, eval_source=source, seed=2
    )
    values = made.train(6)
    assert values["loss"][1] == 18
    assert np.isfinite(values["loss"][0])
    for variable in made.state.variables():
        copies = made.copies(variable)
        if len(copies) == 1 or variable.dtype == tf.uint32:  # a dataset's position; generators, which differ by replica
            continue
        assert np.all(np.isfinite(copies[0].astype(np.float64)))
        np.testing.assert_array_equal(*copies)
    loss, count = made.strategy.evaluate().values()["loss"]
    assert np.isfinite(loss)
    assert count == 9


class Frozen(Trainer):
    """A frozen layer, a frozen batch normalisation, constants of a normalisation, and one that learns."""

    def build_model(self):
        layers = tf.keras.layers
        self.constants = layers.Normalization()
        self.constants.adapt(np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32))
        self.frozen = layers.Dense(4)
        self.frozen.trainable = False
        start = tf.keras.initializers.RandomNormal(seed=1)
        self.at_rest = layers.BatchNormalization(moving_mean_initializer=start, trainable=False)
        self.moving = layers.BatchNormalization()
        return tf.keras.Sequential([self.constants, self.frozen, self.at_rest, self.moving])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs), 1))


def test_what_no_layer_moves_keeps_its_bits_on_uneven_batches(bench):
    """A mean over replicas of 1, 2 and 2 examples would round it."""
    features = np.random.default_rng(0).normal(3, 2, size=(5, 4)).astype(np.float32)
    made = bench(Frozen(), (features, np.zeros(5, np.int32)), 5, 3)
    trainer = made.trainer
    constant = [*trainer.constants.variables, *trainer.frozen.variables, *trainer.at_rest.variables]
    before = [copy for v in constant for copy in made.copies(v)]
    start = trainer.moving.moving_mean.numpy()
    made.train(7)
    assert_same(before, [copy for v in constant for copy in made.copies(v)])
    assert not np.array_equal(made.held(trainer.moving.moving_mean), start)
    assert len(Inventory(trainer).moving_statistics) == 2


class Seeds(Trainer):
    """Notes a seed that it samples before and after a sum over replicas: [step, before or after, word]."""

    def build(self):
        self.seeds = tf.Variable(tf.zeros([8, 2, 2], tf.int64), **EACH_ITS_OWN)

    def train_step(self, batch):
        before = step_context().seed(name="one")
        _, count = self.reduction.sum([], mean(batch[1]).count)
        seeds = tf.stack([before, step_context().seed(name="one")])
        tf.raw_ops.ResourceScatterUpdate(
            resource=self.seeds.handle, indices=tf.reshape(step_context().step, [1]), updates=seeds[tf.newaxis]
        )
        return {"loss": mean(batch[1]), "count": Mean(count, tf.constant(1.0))}


def test_a_stateless_seed_is_its_replicas_own_after_a_sum_too_and_the_same_after_a_restart(bench):
    def seeds(start):
        made = bench(Seeds(), (np.zeros((8, 1), np.float32), np.zeros(8, np.int32)), 4, 2)
        made.jump(start)
        made.train(8)
        return np.stack(made.copies(made.trainer.seeds))

    sampled = seeds(0)
    np.testing.assert_array_equal(sampled[:, :, 0], sampled[:, :, 1])
    assert len({seed.tobytes() for seed in sampled[:, :, 1].reshape(-1, 2)}) == 2 * 8
    np.testing.assert_array_equal(seeds(3)[:, 3:], sampled[:, 3:])


class Masks(Trainer):
    """Notes dropout's masks of ones: [step, sample, unit] on each replica."""

    UNITS, STEPS = 8, 16

    def build(self):
        self.model = tf.keras.Sequential([tf.keras.layers.Dropout(0.5), tf.keras.layers.Dropout(0.5)])
        self.model.build([None, self.UNITS])
        shape = [self.STEPS, 4, self.UNITS]
        self.masks = tf.Variable(tf.zeros(shape), **EACH_ITS_OWN)

    def train_step(self, batch):
        ones = tf.ones([1, self.UNITS])
        samples = [layer(ones, training=True)[0] for layer in 2 * self.model.layers]
        tf.raw_ops.ResourceScatterUpdate(
            resource=self.masks.handle,
            indices=tf.reshape(step_context().step, [1]),
            updates=tf.stack(samples)[tf.newaxis],
        )
        return {"loss": mean(batch[1])}


@pytest.fixture
def masks(bench, compiled):
    """masks(replicas=1, start=0, ...): [replica, step, sample, unit] of a run from a step on."""

    @functools.cache
    def trained(replicas, options):
        source = np.zeros((8, 1), np.float32), np.zeros(8, np.int32)
        made = compiled((replicas, options), lambda: bench(Masks(), source, 4, replicas, **dict(options)))
        return made, made.state.make_restorer()

    def run(replicas=1, start=0, calls_of=None, **options):
        made, put_back = trained(replicas, tuple(options.items()))
        put_back()
        made.jump(start)
        made.train(Masks.STEPS, calls_of)
        return np.stack(made.copies(made.trainer.masks))

    return run


def test_dropout_differs_by_replica_step_layer_and_sample(masks):
    sampled = masks(replicas=2)
    rows = {row.tobytes() for row in sampled.reshape(-1, Masks.UNITS)}
    # 128 rows of 8 fair coins: of 256 possible rows about 100.7 different ones, 4 standard deviations below: 88.
    assert len(rows) > 88
    assert not np.array_equal(sampled[0], sampled[1])
    assert set(np.unique(sampled)) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("replicas", "jit"), [*(pytest.param(1, jit, marks=pytest.mark.slow) for jit in (False, True)), (2, False)]
)
def test_dropout_is_the_same_after_a_restart_and_wherever_calls_are_cut(masks, replicas, jit):
    sampled = masks(replicas, jit=jit)
    np.testing.assert_array_equal(masks(replicas, calls_of=3, jit=jit), sampled)
    np.testing.assert_array_equal(masks(replicas, start=5, jit=jit)[:, 5:], sampled[:, 5:])


def test_dropout_follows_the_seed_and_one_replica_is_the_first_of_many(masks):
    sampled = masks(replicas=2)
    np.testing.assert_array_equal(masks()[0], sampled[0])
    assert not np.array_equal(masks(seed=1)[0], sampled[0])
