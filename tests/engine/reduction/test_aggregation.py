"""State that layers and steps compute from their replica's examples: one device's, each replica's own, or an error."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.internals import keras
from crankshaft.engine.layers import keras_layers
from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.reduction.local_sgd import LocalSgd
from tests.engine.trainers import Squares

SUM, MEAN, FIRST = (getattr(tf.VariableAggregation, name) for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"))
FEATURES = np.random.default_rng(3).normal(size=(7, 3)).astype(np.float32)
DATA = FEATURES, np.zeros(7, np.float32)


class Counting(tf.keras.layers.Layer):
    """Counts examples, a large number for each, positive features, steps; averages; keeps the first example."""

    def build(self, shape):
        def add(name, shape=(), dtype="float32", by="sum"):
            more = {"initializer": "zeros", "trainable": False, "autocast": False, "aggregation": by}
            return self.add_weight(shape=shape, dtype=dtype, name=name, **more)

        self.seen = add("seen", dtype="int32")
        self.large = add("large", dtype="int64")
        self.positive = add("positive", (3,))
        self.steps = add("steps", dtype="int32", by="none")
        self.average = add("average", (3,), by="mean")
        self.newest = add("newest", (3,), by="only_first_replica")

    def call(self, x, training=None):
        if training:
            x = tf.cast(x, tf.float32)
            self.seen.assign_add(tf.shape(x)[0])
            self.large.assign_add((1 << 27) * tf.shape(x, tf.int64)[0])
            self.positive.assign(self.positive + tf.reduce_sum(tf.cast(x > 0, tf.float32), 0))
            self.steps.assign_add(1)
            self.average.assign(0.5 * self.average + 0.5 * tf.reduce_mean(x, 0))
            self.newest.assign(x[0])
        return x


class Plain(Squares):
    layer: type = Counting

    def build_model(self):
        return tf.keras.Sequential([self.layer(), tf.keras.layers.Dense(1)])


def check(made, replicas, epochs=3):
    """Trains on 7 examples by 5, uneven shares and with three replicas one without an example."""
    made.train(2 * epochs)
    layer = made.trainer.model.layers[0]
    average = np.zeros(3)
    for batch in (FEATURES[:5], FEATURES[5:]) * epochs:
        average = 0.5 * average + 0.5 * batch.mean(0)
    wanted = {
        "seen": 7 * epochs,
        "large": (7 << 27) * epochs,
        "positive": epochs * (FEATURES > 0).sum(0),
        "steps": 2 * epochs,
        "average": average,
        "newest": FEATURES[5],
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(made.held(getattr(layer, name)), value, rtol=1e-6 if name == "average" else 0)


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(4, {"model": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"shard_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(3, {"reduce_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_state_of_layers_is_one_devices_by_its_declared_aggregation(bench, replicas, options):
    if wire := options.pop("reduce_dtype", None):
        options["reduction"] = Reduction(wire)
    check(bench(Plain(), DATA, 5, replicas, shuffle=False, optimizer="sgd", **options), replicas)


def test_what_local_sgd_adds_up_in_a_period_is_counted_once(bench):
    made = bench(Plain(), DATA, 5, 2, shuffle=False, optimizer="sgd", reduction=LocalSgd(2, outer()))
    made.train(6)
    layer = made.trainer.model.layers[0]
    for variable, value in ((layer.seen, 21), (layer.large, 21 << 27), (layer.positive, 3 * (FEATURES > 0).sum(0))):
        np.testing.assert_array_equal(made.held(variable), value)


class Codebook(tf.keras.layers.Layer):
    """Decaying sums of a code's examples, as in van den Oord et al. 2017, and the codes made of them."""

    def build(self, shape):
        start = tf.constant([[1.0, 1, 0], [-1, 0, 1]])
        self.size, self.total, self.codes = (
            self.add_weight(shape=s, initializer=lambda *_, v=v, **__: v, trainable=False, name=n)
            for n, s, v in (("size", (2,), tf.ones(2)), ("total", (2, 3), start), ("codes", (2, 3), start))
        )

    def call(self, x, training=None):
        codes = tf.convert_to_tensor(self.codes)
        nearest = tf.argmin(tf.reduce_sum(tf.square(x[:, None] - codes), -1), 1)
        if training:
            one = tf.one_hot(nearest, 2)
            counts, sums = self.of_all(tf.reduce_sum(one, 0)), self.of_all(tf.matmul(one, x, transpose_a=True))
            self.size.assign(0.75 * self.size + 0.25 * counts)
            self.total.assign(0.75 * self.total + 0.25 * sums)
            self.codes.assign(self.total / self.size[:, None])
        return x + tf.stop_gradient(tf.gather(codes, nearest) - x)

    def of_all(self, value):
        return tf.distribute.get_replica_context().all_reduce("sum", value)


class OfOwn(Codebook):
    def of_all(self, value):
        return value


def of(layer):
    return type(layer.__name__, (Plain,), {"layer": layer})()


def test_a_layer_that_sums_its_batch_over_replicas_has_one_devices_state(bench):
    one, two = (bench(of(Codebook), (FEATURES[:6], DATA[1][:6]), 3, n, shuffle=False) for n in (1, 2))
    one.train(4), two.train(4)
    for mine, theirs in zip(one.trainer.model.layers[0].variables, two.trainer.model.layers[0].variables, strict=True):
        np.testing.assert_allclose(two.held(theirs), mine.numpy(), rtol=1e-6)


def assigning(value, by="none", dtype="float32"):
    """A layer that assigns value(its variable, the batch)."""

    class Assigning(tf.keras.layers.Layer):
        def build(self, shape):
            self.state = self.add_weight(
                shape=(), initializer="ones", dtype=dtype, trainable=False, name="state", aggregation=by
            )

        def call(self, x, training=None):
            if training:
                self.state.assign(value(self.state, x))
            return x

    return Assigning


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (OfOwn, ["size [2]", "2 replicas", "aggregation='sum'", "all_reduce"]),
        (assigning(lambda v, x: v + tf.shape(x)[0], dtype="int32"), ["/state []", "aggregation='sum'"]),
        (assigning(lambda v, x: 0.9 * v + tf.reduce_sum(x), "sum"), ["/state []", "assign_add"]),
        (assigning(lambda v, x: tf.reduce_sum(x), "sum"), ["/state []", "assign_add"]),
        (assigning(lambda v, x: tf.maximum(v, tf.reduce_max(x)), "sum"), ["/state []", "assign_add"]),
        (assigning(lambda v, x: tf.shape(x)[0], "mean", "int32"), ["/state", "int32", "'sum'"]),
        (
            assigning(lambda v, x: tf.while_loop(lambda i, _: i < 2, lambda i, w: (i + 1, w + x[0, 0]), (0, 0.0))[1]),
            ["/state []", "'mean'"],
        ),
    ],
)
def test_state_of_a_batch_that_has_no_rule_is_an_error_before_the_first_step(bench, layer, words):
    made = bench(of(layer), DATA, 5, 2)
    with pytest.raises(ValueError, match="aggregation") as raised:
        made.run(1)
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


class Replay(Plain):
    """A ring buffer of its own on each replica, written and sampled in the step."""

    def build(self):
        super().build()
        own = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ, "aggregation": SUM}
        self.ring = tf.Variable(tf.zeros([4, 3]), name="ring", **own)
        self.at = tf.Variable(0, name="at", **own)

    def train_step(self, batch):
        rows = (self.at + tf.range(tf.shape(batch[0])[0])) % 4
        self.ring.assign(tf.tensor_scatter_nd_update(self.ring, rows[:, None], batch[0]))
        self.at.assign_add(tf.shape(batch[0])[0])
        return super().train_step((self.ring + 0.0, tf.zeros(4)))


class Scattering(Replay):
    def train_step(self, batch):
        self.ring.scatter_nd_update([[0]], batch[0][:1])
        return super().train_step(batch)


def test_an_update_that_variables_on_replicas_do_not_have_names_the_variable_and_another(bench):
    with pytest.raises(ValueError, match=r"^ring \[4, 3\]: scatter_nd_update .*2 replicas; .*tensor_scatter_nd_update"):
        bench(Scattering(), DATA, 5, 2).run(1)


class Recurrent(Plain):
    def build_model(self):
        inputs = tf.keras.Input(batch_shape=[2, 3])
        steps = tf.keras.layers.Reshape([3, 1])(inputs)
        self.recurrent = tf.keras.layers.GRU(4, stateful=True)
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(self.recurrent(steps)))


@pytest.mark.parametrize(
    ("value", "by", "is_error"),
    [
        (lambda v, x: 0.5 * v + tf.reduce_sum(x), "none", False),
        (lambda v, x: v - 0.1 * (v - tf.reduce_sum(x)), "none", False),
        (lambda v, x: tf.reduce_sum(x), "none", False),
        (lambda v, x: tf.maximum(v, tf.reduce_max(x)), "only_first_replica", False),
        (lambda v, x: tf.maximum(v, tf.reduce_max(x)), "none", True),
        (lambda v, x: v * v, "sum", True),
        (lambda v, x: 1.0 / v, "none", True),
        (lambda v, x: tf.where(x[0, 0] > 0, v, 0.0), "none", True),
    ],
)
def test_on_servers_a_layers_update_applies_to_the_present_value_or_is_refused(bench, value, by, is_error):
    made = bench(of(assigning(value, by)), DATA, 5, 1)
    (state,) = made.trainer.inventory.moved_variables
    own = state.value

    @tf.function(autograph=False)
    def step(x):
        with keras.computing_with([(state, tf.identity(state.value))]):
            made.trainer.model(x, training=True)
            own.assign(3.0)  # by another worker

    graph = step.get_concrete_function(FEATURES).graph
    if is_error:
        with pytest.raises(ValueError, match=r"state.*assign_add"):
            made.state.check_added(graph)
    else:
        made.state.check_added(graph)
        step(FEATURES)
        before = 3.0 if by == "none" else 1.0
        assert state.numpy() == pytest.approx(value(before, FEATURES).numpy(), rel=1e-6)


@pytest.mark.parametrize("layer", [tf.keras.layers.BatchNormalization, keras_layers.BatchNormalization])
def test_a_moving_variance_on_servers_stays_between_those_of_batches(layer):
    layer = layer(momentum=0.5)
    layer.build([None, 2, 2, 1])
    moved = [layer.moving_mean, layer.moving_variance]
    owns = [each.value for each in moved]
    first, second = (np.random.default_rng(4).normal(size=[2, 8, 2, 2, 1]) * 1e-3).astype(np.float32)

    def moments(x):
        return np.array([[x.mean()], [x.var()]])

    between = 0.5 * np.array([[0.0], [1.0]]) + 0.5 * moments(second)

    @tf.function(autograph=False)
    def step(x):
        with keras.computing_with([(each, tf.identity(each.value)) for each in moved]):
            layer(x, training=True)
            for own, value in zip(owns, between, strict=True):  # another worker's step, begun at the same values
                own.assign(value)

    step(first)
    np.testing.assert_allclose([each.numpy() for each in moved], 0.5 * between + 0.5 * moments(first), rtol=1e-5)
