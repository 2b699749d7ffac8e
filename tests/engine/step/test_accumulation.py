"""Micro-batches: N of them make the update that one big batch makes, whatever the sizes."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, build_embeddings, make_optimizer, mean
from crankshaft.engine.step.batches import accumulate
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts.tables import Embedding
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

# A sum over micro-batches is a sum in another order: some ulps (6e-8) of the largest partial sum.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Gradients:
    """A linear model's sums over a batch, dense, sparse and absent gradients; notes the sizes of the micro-batches."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.weights = tf.Variable(rng.normal(size=(3, 2)).astype(np.float32))
        self.table = tf.Variable(rng.normal(size=(9, 3)).astype(np.float32))
        self.unused = tf.Variable(0.0)

    def __call__(self, batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            rows = tf.gather(self.table, features["id"])
            losses = tf.reduce_sum((rows * features["x"]) @ self.weights, 1) * labels
            total = tf.reduce_sum(losses)
        gradients = tape.gradient(total, [self.weights, self.table, self.unused])
        return gradients, {
            "loss": mean(losses),
            "size": mean([tf.cast(tf.size(labels), tf.float32)]),
        }


def batch(examples):
    rng = np.random.default_rng(examples)
    features = {"id": rng.integers(0, 9, examples), "x": rng.normal(size=(examples, 3)).astype(np.float32)}
    return tf.nest.map_structure(tf.constant, (features, rng.normal(size=examples).astype(np.float32)))


def dense(gradients):
    return [None if g is None else tf.convert_to_tensor(g).numpy() for g in gradients]


SIZES = [(12, 4, 1), (13, 4, 1), (3, 5, 1), (1, 2, 1), (8, 1, 1), (8, 1, 2), (7, 1, 3), (2, 1, 4), (9, 2, 2), (8, 2, 4)]


@pytest.mark.parametrize(
    ("examples", "steps", "parallel", "mode"),
    # XLA compiles what is traced for a known size.
    [(*sizes, mode) for mode in ("static", "dynamic") for sizes in SIZES] + [(13, 4, 1, "jit"), (9, 2, 2, "jit")],
)
def test_micro_batches_add_up_to_the_whole(examples, steps, parallel, mode):
    """Micro-batches in turn, each of so many in parallel."""
    compute = Gradients()
    data = batch(examples)
    length = None if mode == "dynamic" else examples
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec([length, *x.shape[1:]], x.dtype), data)

    def run(data):
        gradients, metrics = accumulate(compute, data, steps, parallel)
        return [g if g is None else tf.convert_to_tensor(g) for g in gradients], metrics

    run = tf.function(run, input_signature=[spec], jit_compile=mode == "jit" or None, autograph=False)
    found, metrics = run(data)
    kinds = {op.type for op in run.get_concrete_function().graph.get_operations()}
    is_uneven = mode != "dynamic" and examples % min(steps, examples)
    assert bool(kinds & {"While", "StatelessWhile"}) == (steps > 1 and not is_uneven)
    wanted, whole = compute(data)
    for a, b in zip(dense(found), dense(wanted), strict=True):
        if b is None:
            assert a is None
        else:
            np.testing.assert_allclose(a, b, **CLOSE)
    np.testing.assert_allclose(metrics["loss"].total, whole["loss"].total, **CLOSE)
    assert metrics["loss"].count == examples
    micro_batches = min(steps, examples)
    if mode == "dynamic":  # whole, where there are fewer examples than micro-batches
        assert metrics["size"].count == micro_batches * (parallel if examples // micro_batches >= parallel else 1)
    else:
        assert metrics["size"].count == min(steps * parallel, examples)
    assert metrics["size"].total == examples


def test_an_empty_batch_is_one_empty_part():
    compute = Gradients()
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), batch(1))
    run = tf.function(lambda data: accumulate(compute, data, 3)[1]["loss"], input_signature=[spec], autograph=False)
    loss = run(batch(0))
    assert [x.numpy() for x in loss] == [0.0, 0.0]


def data(examples=44):
    rng = np.random.default_rng(0)
    return rng.normal(size=(examples, 6)).astype(np.float32), rng.integers(0, 3, examples).astype(np.int32)


class Bag(Squares):
    """Rows of a table, averaged: gradients of the table are sparse."""

    def build_model(self):
        return tf.keras.Sequential(
            [tf.keras.layers.Embedding(20, 4), tf.keras.layers.GlobalAveragePooling1D(), tf.keras.layers.Dense(1)]
        )


def bags():
    rng = np.random.default_rng(0)
    return rng.integers(0, 20, (44, 3)), rng.normal(size=44).astype(np.float32)


@pytest.mark.parametrize(
    ("trainer", "source", "steps", "replicas", "jit"),
    [
        pytest.param(lambda: Mlp((8,)), data, 3, 1, False, marks=pytest.mark.slow),
        pytest.param(lambda: Mlp((8,)), data, 3, 1, True, marks=pytest.mark.slow),
        (lambda: Mlp((8,)), data, 50, 2, False),
        # Whose batches' size is not known when the step of three replicas is traced.
        (lambda: Mlp((8,)), lambda: tf.data.Dataset.from_tensor_slices(data()), 2, 3, False),
        (Bag, bags, 3, 2, False),
    ],
    ids=["", "xla", "50", "dataset", "table"],
)
def test_a_trainer_learns_the_same_from_micro_batches(bench, trainer, source, steps, replicas, jit):
    """44 examples by 16: a batch of 12 at the end of each epoch. SGD, so that differences are not blown up."""
    options = {"num_classes": 3, "optimizer": "sgd", "learning_rate": 0.1, "shuffle": False, "jit": jit}
    whole = bench(trainer(), source(), 16, **options)
    accumulated = bench(trainer(), source(), 16, replicas, accumulate_steps=steps, **options)
    np.testing.assert_allclose(accumulated.curve(9), whole.curve(9), rtol=1e-5)
    for mine, theirs in zip(whole.trainer.model.weights, accumulated.trainer.model.weights, strict=True):
        np.testing.assert_allclose(accumulated.held(theirs), mine, **CLOSE)


class Table(Trainer):
    """The sum of a row of an engine's own table."""

    def __init__(self):
        super().__init__()
        self.table = Embedding("table", 20, 4, combiner="sum")

    def build(self):
        build_embeddings(self)
        self.optimizer = make_optimizer(self, self.trainable_variables)

    def forward(self, features, training):
        return tf.reduce_sum(self.table(features), -1)

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1]))


@pytest.mark.parametrize(("steps", "replicas"), [pytest.param(3, 2, marks=pytest.mark.slow), (4, 1)])
def test_rows_that_no_part_touches_stay_where_they_are(bench, replicas, steps):
    """Adam, whose dense update would move rows by their momentum. Batches of 8 and 6 in even micro-batches, or not."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 12, (22, 3)), rng.normal(size=22).astype(np.float32)
    adam = {"optimizer": "adam", "learning_rate": 0.1}
    whole, accumulated = [bench(Table(), source, 8, replicas, accumulate_steps=steps, **adam) for steps in (1, steps)]
    first = accumulated.trainer.table.shards[0].numpy()
    for each in (whole, accumulated):
        each.train(9)
    table = accumulated.trainer.table.shards[0].numpy()
    np.testing.assert_allclose(table, whole.trainer.table.shards[0].numpy(), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(table[12:], first[12:])
    assert (table[:12] != first[:12]).all()
