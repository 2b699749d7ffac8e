"""Batch normalisation on replicas: statistics equal everywhere, and what no layer moves stays as it is."""

import itertools
import re
import types

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.errors import UsageError
from crankshaft.engine.inventory import Inventory
from tests.arrays import assert_same

pytestmark = pytest.mark.thorough


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


class Keeping(Trainer):
    """Keeps what its loss has seen in attributes, lists, modules and layers, and shows it after the replicas' sum."""

    def build_model(self):
        self.module, self.listed, self.left, self.by_name = tf.Module(), [], [], {}
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        seen = batch[0][:, 0]
        self.seen, self.module.pair, self.model.layers[0].seen = seen, (seen, 2 * seen), 3 * seen
        self.listed.append(4 * seen)
        self.left.append(6 * seen)
        self.by_name["seen"] = 5 * seen
        return mean(tf.square(outputs[:, 0]))

    def train_step(self, batch):
        metrics, layer = super().train_step(batch), self.model.layers[0]
        kept = [self.seen, self.module.pair[1], layer.seen, self.listed.pop(), self.by_name["seen"], self.left[-1]]
        return {**metrics, **{str(number): mean(value) for number, value in enumerate(kept)}}


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_step_keeps_in_attributes_is_its_own_replicas_after_a_sum(bench, replicas):
    features = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    made = bench(Keeping(), (features, np.zeros(7, np.int32)), 7, replicas)
    metrics = made.train(1)
    for number in range(6):
        total, count = metrics[str(number)]
        np.testing.assert_allclose(total / count, (number + 1) * features[:, 0].mean(), rtol=1e-5)  # float32
    assert not made.trainer.listed


KEPT = [None]


class Shared(Keeping):
    """Keeps what its loss has seen where all replicas find the last one's, or in a branch that it has left."""

    def __init__(self, place):
        super().__init__()
        self.place, self.box = place, types.SimpleNamespace()

    def loss(self, outputs, batch):
        seen = batch[0][:, 0]
        if self.place == "branch":
            tf.cond(seen[0] > 0, lambda: self.keep(seen + 1), lambda: self.keep(seen))
        elif self.place == "box":
            self.box.seen = seen
        else:
            self.keep(seen)
        return mean(tf.square(outputs[:, 0]))

    def keep(self, value):
        KEPT[0] = 2 * value
        return value

    def train_step(self, batch):
        metrics = super(Keeping, self).train_step(batch)
        return {**metrics, "seen": mean(1 + (self.box.seen if self.place == "box" else KEPT[0]))}


@pytest.mark.parametrize(
    ("place", "replicas", "other"), [("box", 2, "replica"), ("module", 2, "replica"), ("branch", 1, "trace, branch")]
)
def test_a_tensor_that_a_step_finds_out_of_its_replica_or_branch_is_refused_with_both_lines(
    bench, place, replicas, other
):
    made = bench(Shared(place), (np.ones((8, 4), np.float32), np.zeros(8, np.int32)), 8, replicas)
    with pytest.raises(UsageError) as error:
        made.run(1)
    assert re.search(
        rf"^Shared: .*replicas.py:\d+ in train_step, .* another {other}.*replicas.py:\d+ in", str(error.value)
    )


class Merging(Keeping):
    """Adds values of replicas in a function of its own, which they wait for."""

    def train_step(self, batch):
        def total(strategy, values):
            return tf.add_n(strategy.experimental_local_results(values))

        both = tf.distribute.get_replica_context().merge_call(total, args=(tf.reduce_sum(batch[0]),))
        return {**super(Keeping, self).train_step(batch), "both": mean(tf.fill([tf.shape(batch[0])[0]], both))}


def test_a_step_may_compute_with_other_replicas_values_in_a_merge_call(bench):
    features = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    total, count = bench(Merging(), (features, np.zeros(8, np.int32)), 8, 2).train(1)["both"]
    np.testing.assert_allclose(total / count, features.sum(), rtol=1e-5)  # float32


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
