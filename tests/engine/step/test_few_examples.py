"""A batch with fewer examples than replicas: they compute what one device does, whatever a step sums or gathers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean, step_context
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.data.streamed import DatasetStream, StreamPart
from crankshaft.engine.layers.keras_layers import BatchNormalization
from crankshaft.engine.strategies import FeedOptions
from crankshaft.engine.strategies.base import Prediction

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(0)
DATA = RNG.normal(3, 2, (18, 5)).astype(np.float32), RNG.normal(size=(18, 4)).astype(np.float32)
BATCH = 8  # 8, 8 and 2 examples


class Exchanging(Trainer):
    """Sums and gathers over replicas in its layers and in its loss, as Keras, this package and users do."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential(
            [
                layers.Input([5]),
                layers.Dense(4, kernel_initializer=tf.keras.initializers.GlorotUniform(1)),
                layers.BatchNormalization(synchronized=True, momentum=0.5),
                layers.Reshape([1, 1, 4]),
                BatchNormalization(self.reduction.sum_statistics, momentum=0.5),
                layers.Reshape([4]),
            ]
        )

    def loss(self, outputs, batch):
        context = tf.distribute.get_replica_context()
        total, count = context.all_reduce("SUM", [tf.reduce_sum(outputs, 0), tf.cast(tf.shape(outputs)[0], tf.float32)])
        everyones = context.all_gather(outputs, axis=0)
        between = tf.reduce_sum(tf.square(outputs[:, tf.newaxis] - everyones), -1)
        losses = tf.reduce_sum(tf.square(outputs - batch[1] + total / count), -1) + tf.reduce_mean(between, 1)
        return mean(losses)

    def metrics(self, outputs, batch):
        return {"first": mean(batch[1][:, 0])}


def made(bench, replicas, data=DATA, trainer=None, **options):
    options = {"optimizer": "sgd", "learning_rate": 0.02, "shuffle": False, "eval_source": data, **options}
    return bench(trainer or Exchanging(), data, BATCH, replicas, **options)


def compare(found, expected):
    """The metrics of examples: the means, and how many."""
    for name in ("loss", "first"):
        total, count = expected[name]
        np.testing.assert_allclose(found[name][0] / found[name][1], total / count, rtol=2e-5, err_msg=name)
        assert found[name][1] == count


FEEDS = {
    "held": (DATA, {}),
    "read": (DATA, {"feed": FeedOptions(resident_bytes=0)}),
    "stream": (tf.data.Dataset.from_tensor_slices(DATA), {}),
}


@pytest.mark.parametrize(
    ("replicas", "feed", "options"),
    [
        (3, "held", {}),
        pytest.param(4, "read", {}, marks=pytest.mark.slow),
        pytest.param(3, "stream", {}, marks=pytest.mark.slow),
        pytest.param(4, "held", {"shard_optimizer": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replicas_train_and_evaluate_as_one_device(bench, compiled, replicas, feed, options):
    data, how = FEEDS[feed]
    one = compiled(str(options), lambda: made(bench, 1, **options))
    many = made(bench, replicas, data, **how, **options)
    for _ in range(4):  # epochs' ends among others
        compare(many.train(many.state.step + 2), one.train(one.state.step + 2))
    for a, b in zip(one.trainer.model.variables, many.trainer.model.variables, strict=True):
        for copy in many.copies(b):
            np.testing.assert_allclose(copy, a.numpy(), rtol=1e-5, atol=1e-5)
    found, expected = (each.strategy.evaluate().values() for each in (many, one))
    compare(found, expected)
    assert found["loss"][1] == 18


class Queued(Trainer):
    """Keeps the newest outputs of all replicas in a queue, as MoCo does."""

    def build_model(self):
        self.queue = tf.Variable(tf.ones([6, 4]), trainable=False)
        return tf.keras.Sequential([tf.keras.layers.Dense(4, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        apart = outputs[:, tf.newaxis] - self.queue
        return mean(tf.reduce_sum(tf.square(outputs - batch[1]), -1) + tf.reduce_mean(tf.square(apart), [1, 2]))

    def training_loss(self, outputs, batch):
        loss = self.loss(outputs, batch)
        keys = tf.distribute.get_replica_context().all_gather(tf.stop_gradient(outputs), axis=0)
        self.queue.assign(tf.concat([keys, self.queue], 0)[:6])
        return loss


def test_a_queue_of_what_replicas_gather_is_one_device_s_and_is_not_refused(bench):
    one, many = (made(bench, replicas, trainer=Queued()) for replicas in (1, 3))
    for bench_ in (one, many):
        bench_.train(4)  # the third step's batch has two examples
    for copy in many.copies(many.trainer.queue):
        np.testing.assert_allclose(copy, one.trainer.queue.numpy(), rtol=1e-5)


class Drawing(Trainer):
    """Samples by a seed and by dropout, in micro-batches."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dropout(0.5), tf.keras.layers.Dense(4, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        noise = tf.random.stateless_normal(tf.shape(outputs), step_context().seed())
        return mean(tf.reduce_sum(tf.square(outputs - batch[1] + noise), -1))


def test_they_sample_what_one_device_samples(bench):
    few = tuple(array[:3] for array in DATA)
    curves = [made(bench, n, few, Drawing(), accumulate_steps=2).curve(5) for n in (1, 4)]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_predictions_exchange_as_on_one_device(bench):
    def centred(features):
        context = tf.distribute.get_replica_context()
        total, count = context.all_reduce(
            "SUM", [tf.reduce_sum(features, 0), tf.cast(tf.shape(features)[0], tf.float32)]
        )
        return features - total / count + tf.cast(context.replica_id_in_sync_group, tf.float32)

    few, found, strategy = DATA[0][:2], [], made(bench, 4).strategy
    strategy.evaluate(strategy.external(Prediction(centred), ArraySource(few), 2), keep=found.append)
    np.testing.assert_allclose(np.concatenate(found), few - few.sum(0) / 2, rtol=1e-5)


@pytest.mark.parametrize(("counts", "refused"), [((9, 9), False), ((11, 7), True), ((8, 10), True)])
def test_where_a_worker_without_examples_has_no_others_it_may_not_exchange(counts, refused):
    """Of files that workers read for themselves, eight of two replicas a step: 1 example is not enough for two."""
    order = StreamPart(DatasetStream(tf.data.Dataset.from_tensor_slices(DATA)), counts).order(
        BATCH, None, drop_remainder=False
    )
    assert bool(order.no_exchange_reason(shards=2)) == refused
