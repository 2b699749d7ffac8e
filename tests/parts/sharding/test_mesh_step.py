"""Training on a mesh beside one device: a model of a user's own, sharded by hand, with copies around it."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.mesh import sharded
from crankshaft.engine.mesh.sharded import Sharding
from crankshaft.parts.sharding import Attention, current_mesh
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

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
            sharded.mark(weight, sharding)
            sharded.fill(weight.value, lambda box, values=values: tf.constant(values[box.slices]))
            setattr(self, name, weight)
        self.bias = self.add_weight(shape=(WIDTH,), initializer="zeros", name="bias")
        self.built = True

    def call(self, x):
        x = self.mesh.enter(x)
        return self.mesh.leave(tf.tanh(x @ self.up) @ self.down) + self.bias


class Sharded(Squares):
    def build_model(self):
        dense = tf.keras.layers.Dense(WIDTH, kernel_initializer=tf.keras.initializers.GlorotUniform(1))
        return tf.keras.Sequential([dense, tf.keras.layers.Dropout(0.0), Block(), tf.keras.layers.Dense(1)])


class OfIds(Sharded):
    """Looks ids up in a table that each replica has a copy of; a step's gradient names few of its rows."""

    def build_model(self):
        rows = tf.keras.layers.Embedding(30, WIDTH, embeddings_initializer=tf.keras.initializers.RandomNormal(seed=2))
        return tf.keras.Sequential([rows, tf.keras.layers.Flatten(), Block(), tf.keras.layers.Dense(1)])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(EXAMPLES, 3)).astype(np.float32), rng.normal(size=EXAMPLES).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "rule"), [pytest.param(2, "adam", marks=pytest.mark.slow), (4, "momentum")])
def test_rows_that_nobody_looked_up_stay_as_they_are(bench, replicas, rule):
    """As on one device: a rule with moments would move all rows by a gradient that is made dense."""
    ids = np.random.default_rng(3).integers(0, 30, (EXAMPLES, 1))
    source = ids, np.sin(ids[:, 0]).astype(np.float32)
    options = {"batch_size": 8, "optimizer": rule, "learning_rate": 0.1, "clip_norm": 0.5}
    one, mesh = bench(OfIds(), source, **options), bench(OfIds(), source, replicas=replicas, model=2, **options)
    # The rate is large, and so are losses' steps: from 0.5 to 0.002, with the rounding of the larger ones.
    np.testing.assert_allclose(mesh.curve(20), one.curve(20), rtol=1e-5, atol=1e-7)
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
        sharded.fill(variable.value, lambda box, whole=whole: tf.constant(whole[box.slices], tf.float32))
    assert made.strategy.evaluate().values()["loss"][0] < 1e-3  # rounding
    assert made.train(1)["loss"][0] > 10
