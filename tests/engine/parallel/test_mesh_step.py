"""Training on a mesh beside one device: a model of a user's own, sharded by hand, with copies around it."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean
from crankshaft.engine.mesh import shards
from crankshaft.engine.mesh.shards import Sharding
from crankshaft.engine.parallel import Attention, current_mesh
from crankshaft.engine.strategies.replicated import FeedOptions

WIDTH, HIDDEN, EXAMPLES = 4, 6, 50


class Block(tf.keras.layers.Layer):
    """A layer whose hidden units are sharded over the mesh: columns of one kernel, rows of the next."""

    def __init__(self):
        super().__init__()
        self.mesh = current_mesh()

    def build(self, shape):
        wholes = {"up": ((WIDTH, HIDDEN), 1), "down": ((HIDDEN, WIDTH), 0)}
        for seed, (name, (whole, axis)) in enumerate(wholes.items()):
            sharding = Sharding.over(self.mesh, whole, {axis: "model"})
            weight = self.add_weight(shape=sharding.local_shape, initializer="zeros", name=name)
            values = np.random.default_rng(seed).normal(size=whole).astype(np.float32)
            shards.mark(weight, sharding)
            shards.fill(weight.value, lambda box, values=values: tf.constant(values[box.slices]))
            setattr(self, name, weight)
        self.bias = self.add_weight(shape=(WIDTH,), initializer="zeros", name="bias")
        self.built = True

    def call(self, x):
        x = self.mesh.enter(x)
        return self.mesh.leave(tf.tanh(x @ self.up) @ self.down) + self.bias


class Sharded(Trainer):
    def build_model(self):
        dense = tf.keras.layers.Dense(WIDTH, kernel_initializer=tf.keras.initializers.GlorotUniform(1))
        return tf.keras.Sequential([dense, tf.keras.layers.Dropout(0.0), Block(), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean((outputs[:, 0] - batch[1]) ** 2)


class OfIds(Sharded):
    """Looks ids up in a table that each replica has a copy of; a step's gradient names few of its rows."""

    def build_model(self):
        rows = tf.keras.layers.Embedding(30, WIDTH, embeddings_initializer=tf.keras.initializers.RandomNormal(seed=2))
        return tf.keras.Sequential([rows, tf.keras.layers.Flatten(), Block(), tf.keras.layers.Dense(1)])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(EXAMPLES, 3)).astype(np.float32), rng.normal(size=EXAMPLES).astype(np.float32)


FORMS = {
    "resident": (lambda arrays: arrays, None),
    "streamed": (lambda arrays: arrays, FeedOptions(resident_bytes=0)),
    "dataset": (tf.data.Dataset.from_tensor_slices, None),
}
OPTIONS = {
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
    "clipped": {"optimizer": "adamw", "learning_rate": 0.01, "clip_norm": 0.3, "ema_decay": 0.9},
    "by variable": {"optimizer": "sgd", "learning_rate": 0.1, "clip_variable_norm": 0.1},
    "bfloat16": {"optimizer": "sgd", "learning_rate": 0.1, "precision": "bfloat16"},
}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        pytest.param("adam", (2, 2), marks=pytest.mark.slow),
        pytest.param("clipped", (2, 2), marks=pytest.mark.slow),
        pytest.param("by variable", (1, 2), marks=pytest.mark.slow),
        ("bfloat16", (1, 2)),
    ],
)
def test_losses_are_those_of_one_device(bench, data, shape, options):
    """Twenty steps with a batch that does not divide an epoch: its last one leaves a replica few examples."""
    shared = {"batch_size": 8, "accumulate_steps": 2 if options == "adam" else 1, **OPTIONS[options]}
    one = bench(Sharded(), data, **shared)
    mesh = bench(Sharded(), data, replicas=shape[0] * shape[1], model=shape[1], **shared)
    expected, found = one.curve(20), mesh.curve(20)
    # Of bfloat16 each replica rounds its own partial products to 2^-8 before they are summed.
    np.testing.assert_allclose(found, expected, rtol=3e-2 if options == "bfloat16" else 1e-6)
    for variable in mesh.trainer.model.trainable_variables:
        held = mesh.copies(variable)
        alike = held if shards.sharding_of(variable) is None else held[:: shape[1]]
        for other in alike[1:]:
            np.testing.assert_array_equal(alike[0], other)


@pytest.mark.parametrize("form", ["resident", "dataset", pytest.param("streamed", marks=pytest.mark.slow)])
def test_each_example_counts_once_whatever_feeds_them(bench, data, form):
    make, feed = FORMS[form]
    source = make(data)
    one = bench(Sharded(), source, batch_size=8, shuffle=False, feed=feed, eval_source=source)
    mesh = bench(Sharded(), source, batch_size=8, shuffle=False, feed=feed, eval_source=source, replicas=4, model=2)
    for each in (one, mesh):
        _, count = each.strategy.evaluate().values()["loss"]
        assert count == EXAMPLES
    np.testing.assert_allclose(mesh.curve(14), one.curve(14), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "rule"), [pytest.param(2, "adam", marks=pytest.mark.slow), (4, "momentum")])
def test_rows_that_nobody_looked_up_stay_as_they_are(bench, replicas, rule):
    """As on one device: a rule with moments would move all rows by a gradient that is made dense."""
    ids = np.random.default_rng(3).integers(0, 30, (EXAMPLES, 1))
    source = ids, np.sin(ids[:, 0]).astype(np.float32)
    options = {"batch_size": 8, "optimizer": rule, "learning_rate": 0.1, "clip_norm": 0.5}
    one, mesh = bench(OfIds(), source, **options), bench(OfIds(), source, replicas=replicas, model=2, **options)
    np.testing.assert_allclose(mesh.curve(20), one.curve(20), rtol=1e-5)  # the rate is large, and so are losses' steps
    (expected,), held = (run.copies(run.trainer.model.layers[0].embeddings) for run in (one, mesh))
    for table in held:
        np.testing.assert_array_equal(table, held[0])
        np.testing.assert_allclose(table, expected, rtol=1e-4, atol=1e-6)


class Opposites(Trainer):
    """Attention by two heads of the same weights that are joined with opposite signs: what comes of it is what dropout
    takes from the one and not from the other."""

    def build_model(self):
        inputs = tf.keras.Input([5, WIDTH])
        return tf.keras.Model(inputs, Attention(2, dropout=0.5)(inputs))

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.abs(outputs), [1, 2]))


def test_heads_on_different_replicas_drop_by_samples_of_their_own(bench):
    rng = np.random.default_rng(0)
    source = rng.normal(size=(8, 5, WIDTH)).astype(np.float32), np.zeros(8, np.float32)
    made = bench(Opposites(), source, 8, replicas=2, model=2, eval_source=source)
    kernel, join = rng.normal(size=(WIDTH, 6)), rng.normal(size=(2, WIDTH))
    wholes = np.concatenate([kernel, kernel], 1), np.concatenate([join, -join], 0)
    for variable, whole in zip(made.trainer.model.trainable_variables, wholes, strict=True):
        shards.fill(variable.value, lambda box, whole=whole: tf.constant(whole[box.slices], tf.float32))
    assert made.strategy.evaluate().values()["loss"][0] < 1e-3  # rounding
    assert made.train(1)["loss"][0] > 10
