"""State that layers and steps compute from their replica's examples: one device's, each replica's own, or an error."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Update, gather, minimize, step_context
from crankshaft.engine.errors import OutOfSyncError, UsageError
from crankshaft.engine.hooks.sync_check import SyncCheck
from crankshaft.engine.internals import keras_scopes
from crankshaft.engine.layers import keras_layers
from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.parts.parameter_servers.pulled import check_added
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

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


def check(made, epochs=3):
    """Trains on 7 examples by 5: uneven shares, and fewer examples than three replicas, each of which has both."""
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
        (4, {"workers": 2}),  # two of which have no examples
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(4, {"model": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"shard_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(3, {"reduce_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_state_of_layers_is_one_devices_by_its_declared_aggregation(bench, replicas, options):
    if wire := options.pop("reduce_dtype", None):
        options["reduction"] = Reduction(wire)
    of_own = "workers" in options
    data, batch_size = (tf.data.Dataset.from_tensor_slices(DATA), 10) if of_own else (DATA, 5)
    check(bench(Plain(), data, batch_size, replicas, shuffle=False, optimizer="sgd", **options))


class TwoUpdates(Plain):
    """Two updates per step, each with a forward pass."""

    def losses(self, batch):
        return {"loss": self.loss(self.model(batch[0], training=True), batch)}

    def train_step(self, batch):
        minimize(self, batch, self.losses, {"loss": self.optimizer})
        return minimize(self, batch, self.losses, {"loss": self.optimizer})


def test_what_replicas_add_is_counted_once_by_each_of_a_steps_sums(bench):
    made = bench(TwoUpdates(), DATA, 5, 2, shuffle=False, optimizer="sgd")
    made.train(4)
    layer = made.trainer.model.layers[0]
    for variable, value in ((layer.seen, 28), (layer.large, 28 << 27), (layer.positive, 4 * (FEATURES > 0).sum(0))):
        np.testing.assert_array_equal(made.held(variable), value)


class AssignsLast(Squares):
    """Counts and averages examples, and copies an average, after the step's update."""

    def build(self):
        super().build()
        self.seen = tf.Variable(0, trainable=False, aggregation=SUM)
        self.average = tf.Variable(tf.zeros(3), trainable=False, aggregation=MEAN)
        self.newest = tf.Variable(tf.zeros(3), trainable=False, aggregation=FIRST)
        self.weight = tf.Variable(tf.zeros([3, 1]), trainable=False, aggregation=MEAN)

    def train_step(self, batch):
        metrics = super().train_step(batch)
        self.seen.assign_add(tf.shape(batch[0])[0])
        self.average.assign(0.5 * self.average + 0.5 * tf.reduce_mean(batch[0], 0))
        self.newest.assign(batch[0][0])
        return metrics


class Following(AssignsLast):
    """Assigns what is equal on all replicas, which is not summed again."""

    def train_step(self, batch):
        metrics = Squares.train_step(self, batch)
        self.weight.assign(0.5 * self.weight + 0.5 * self.model.layers[0].kernel)
        return metrics


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_a_step_assigns_after_its_last_sum_is_one_devices(bench, replicas):
    made = bench(AssignsLast(), DATA, 5, replicas, shuffle=False, optimizer="sgd")
    made.train(4)
    average = np.zeros(3)
    for batch in (FEATURES[:5], FEATURES[5:]) * 2:
        average = 0.5 * average + 0.5 * batch.mean(0)
    assert made.held(made.trainer.seen) == 14
    np.testing.assert_allclose(made.held(made.trainer.average), average, rtol=1e-6)
    np.testing.assert_array_equal(made.held(made.trainer.newest), FEATURES[5])


def test_a_mean_of_equal_values_costs_no_sum(bench):
    def collectives(trainer) -> int:
        made = bench(trainer, DATA, 5, 2, optimizer="sgd")
        made.run(1)
        return sum(n for kind, n in made.strategy.training.operations.items() if kind.startswith("Collective"))

    assert collectives(Following()) == collectives(Squares()) < collectives(AssignsLast())


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


class Range(tf.keras.layers.Layer):
    """The extremes of values, moving averages over batches, as of quantization-aware training."""

    def build(self, shape):
        self.low, self.high = (self.add_weight(shape=(), trainable=False, name=name) for name in ("low", "high"))

    def call(self, x, training=None):
        if training:
            gather = tf.distribute.get_replica_context().all_gather
            low, high = gather(tf.reduce_min(x)[None], 0), gather(tf.reduce_max(x)[None], 0)
            self.low.assign(0.9 * self.low + 0.1 * tf.reduce_min(low))
            self.high.assign(0.9 * self.high + 0.1 * tf.reduce_max(high))
        return x


@pytest.mark.parametrize("layer", [Codebook, Range])
def test_a_layer_that_combines_its_batch_over_replicas_has_one_devices_state(bench, layer):
    one, two = (bench(of(layer), (FEATURES[:6], DATA[1][:6]), 3, n, shuffle=False) for n in (1, 2))
    one.train(4), two.train(4)
    for mine, theirs in zip(one.trainer.model.layers[0].variables, two.trainer.model.layers[0].variables, strict=True):
        np.testing.assert_allclose(two.held(theirs), mine.numpy(), rtol=1e-6)


def assigning(value, by="none", dtype="float32", trained=False):
    """A layer that assigns value(its variable, the batch)."""

    class Assigning(tf.keras.layers.Layer):
        def build(self, shape):
            self.state = self.add_weight(
                shape=(), initializer="ones", dtype=dtype, trainable=trained, name="state", aggregation=by
            )

        def call(self, x, training=None):
            if training:
                self.state.assign(value(self.state, x))
            return x + self.state if trained else x

    return Assigning


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (OfOwn, ["size [2]", "2 replicas", "aggregation='sum'", "all_reduce", "maximum, of its all_gather"]),
        (assigning(lambda v, x: v + tf.shape(x)[0], dtype="int32"), ["/state []", "aggregation='sum'"]),
        (assigning(lambda v, x: 0.9 * v + tf.reduce_sum(x), "sum"), ["/state []", "assign_add"]),
        (assigning(lambda v, x: tf.reduce_sum(x), "sum"), ["/state []", "assign_add"]),
        (assigning(lambda v, x: tf.maximum(v, tf.reduce_max(x)), "sum"), ["/state []", "assign_add"]),
        (
            assigning(
                lambda v, x: v + tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x)) / 7, "sum"
            ),
            ["/state []", "would be added 2 times", "leave the aggregation out"],
        ),
        (assigning(lambda v, x: tf.shape(x)[0], "mean", "int32"), ["/state", "int32", "'sum'"]),
        (
            assigning(lambda v, x: tf.while_loop(lambda i, _: i < 2, lambda i, w: (i + 1, w + x[0, 0]), (0, 0.0))[1]),
            ["/state []", "'mean'"],
        ),
        (assigning(lambda v, x: -tf.reduce_mean(x), trained=True), ["/state []", "2 replicas", "all_reduce"]),
        (
            assigning(lambda v, x: tf.cond(v > 0, lambda: x[0, 0], lambda: v + 0), trained=True),
            ["/state", "all_reduce"],
        ),
        (assigning(lambda v, x: v + tf.random.stateless_normal([], step_context().seed())), ["/state []", "'mean'"]),
    ],
)
def test_state_of_a_batch_that_has_no_rule_is_an_error_before_the_first_step(bench, layer, words):
    made = bench(of(layer), DATA, 5, 2)
    with pytest.raises(ValueError, match=r"of 2 replicas|aggregation") as raised:
        made.run(1)
    assert "ON_READ" not in str(raised.value)
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


EIGHT = np.resize(FEATURES, [8, 3]), np.zeros(8, np.float32)


class Merging(Squares):
    """Adds the global batch's size to a counter, where replicas are one."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def build(self):
        super().build()
        self.seen = tf.Variable(0.0, trainable=False, aggregation=self.by, name="seen")

    def train_step(self, batch):
        def add(strategy, size):
            total = strategy.reduce("SUM", size, axis=None)
            strategy.extended.update(self.seen, lambda copy, value: copy.assign_add(value), args=(total,))

        size = tf.cast(tf.shape(batch[0])[0], tf.float32)
        tf.distribute.get_replica_context().merge_call(add, args=(size,))
        return super().train_step(batch)


@pytest.mark.parametrize("by", [tf.VariableAggregation.NONE, FIRST, SUM])
def test_what_is_added_to_a_sum_of_replicas_once_for_all_is_refused(bench, by):
    """TensorFlow alone adds 8 per step; summed over replicas, what each has of both would be 16."""
    made = bench(Merging(by), EIGHT, 8, 2, shuffle=False)
    if by != SUM:
        made.train(3)
        assert made.held(made.trainer.seen) == 24
        return
    with pytest.raises(UsageError, match=r"seen \[\]: .*would be added 2 times; leave the aggregation out"):
        made.run(1)


def test_a_constant_that_equals_the_batch_s_size_by_chance_is_no_size(bench):
    """Two replicas of 4 examples each. A sampled number differs by replica only if its seed does."""
    value = lambda v, x: tf.math.floormod(v + 1.0, 4.0) + tf.random.stateless_uniform([4], [4, 3])[0]  # noqa: E731
    states = []
    for replicas in (1, 2):
        made = bench(of(assigning(value)), EIGHT, 8, replicas, shuffle=False)
        made.train(3)
        states.append(made.held(made.trainer.model.layers[0].state))
    assert states[0] == states[1]


def test_the_size_of_a_replica_s_batch_is_refused_if_it_is_known_when_tracing(bench):
    with pytest.raises(ValueError, match=r"/state \[\]: each of 2 replicas assigns it"):
        bench(of(assigning(lambda v, x: v + float(x.shape[0]))), EIGHT, 8, 2).run(1)


class Queue(Plain):
    """Keeps the newest examples of all replicas."""

    def build(self):
        super().build()
        self.queue = tf.Variable(tf.zeros([4, 3]), trainable=False, name="queue")

    def train_step(self, batch):
        rows, _ = gather(self, batch[0])
        self.queue.assign(tf.concat([rows, self.queue], 0)[:4])
        return super().train_step(batch)


@pytest.mark.parametrize("examples", [1, 4])
def test_a_queue_of_gathered_rows_is_the_same_on_all_replicas(bench, examples):
    made = bench(Queue(), EIGHT, 2 * examples, 2, shuffle=False)
    made.train(1)
    np.testing.assert_array_equal(made.held(made.trainer.queue)[: 2 * examples], EIGHT[0][: 2 * examples][:4])


class OwnNoise(Plain):
    """Adds noise of each replica's own to the gradients' sum, which no trace shows."""

    layer = tf.keras.layers.Flatten

    def train_step(self, batch):
        variables = self.trainable_variables
        gradients, metrics = self.compute_gradients(batch)
        gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)
        noise = tf.random.stateless_normal([], step_context().seed())
        update = Update(self, [gradient + noise for gradient in gradients.over(count).unscaled()], variables)
        update.apply(self.optimizer, variables)
        return update.end(metrics)


class Slow(Plain):
    """Keeps each step's weights, which in local SGD are each replica's own."""

    layer = tf.keras.layers.Flatten

    def build(self):
        super().build()
        self.slow = tf.Variable(tf.zeros([3, 1]), trainable=False, name="slow")

    def train_step(self, batch):
        metrics = super().train_step(batch)
        self.slow.assign(self.model.trainable_variables[0])
        return metrics


@pytest.mark.parametrize(("trainer", "reduction", "step"), [(OwnNoise, None, 1), (Slow, LocalSgd, 4)])
def test_replicas_that_differ_are_found_after_the_first_call_in_sync(bench, trainer, reduction, step):
    made = bench(trainer(), EIGHT, 8, 2, block_steps=1, reduction=reduction and reduction(4, outer()))
    with pytest.raises(OutOfSyncError, match=f"step {step}: replica 1 of 2 .*random numbers"):
        made.loop([SyncCheck(0)], 20)


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


def test_a_replica_without_examples_keeps_its_own_state(bench):
    """7 examples by 5: uneven shares of the two replicas that have any."""
    made = bench(Replay(), tf.data.Dataset.from_tensor_slices(DATA), 10, 4, workers=2, shuffle=False)
    made.train(2)
    assert made.copies(made.trainer.at) == [3, 4, 0, 0]
    assert not np.any(made.copies(made.trainer.ring)[2:])


class Scattering(Replay):
    def train_step(self, batch):
        self.ring.scatter_nd_update([[0]], batch[0][:1])
        return super().train_step(batch)


def test_an_update_that_variables_on_replicas_do_not_have_is_named_with_another(bench):
    with pytest.raises(ValueError, match=r"^ring \[4, 3\]: scatter_nd_update .*2 replicas; .*tensor_scatter_nd_update"):
        bench(Scattering(), DATA, 5, 2).run(1)


class Rows(Plain):
    """Keeps a row of each example: its features, by what the error about `scatter_nd_update` says."""

    def build(self):
        super().build()
        self.rows = tf.Variable(tf.zeros([8, 3]), trainable=False, name="rows", aggregation=SUM)

    def train_step(self, batch):
        self.keep(tf.cast(batch[1], tf.int32)[:, None], batch[0])
        return super().train_step(batch)

    def keep(self, indices, updates):
        change = updates - tf.gather_nd(self.rows, indices)
        self.rows.assign_add(tf.scatter_nd(indices, change, self.rows.shape))


class ScatteredRows(Rows):
    def keep(self, indices, updates):
        self.rows.scatter_nd_update(indices, updates)


def test_a_row_of_each_example_is_kept_as_the_error_says(bench):
    data = EIGHT[0], np.arange(8, dtype=np.float32)
    made = bench(Rows(), data, 5, 2, shuffle=False)
    made.train(4)
    np.testing.assert_allclose(made.held(made.trainer.rows), EIGHT[0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"aggregation='sum', and assign_add\(tf\.scatter_nd") as raised:
        bench(ScatteredRows(), data, 5, 2).run(1)
    assert "ON_READ" not in str(raised.value)


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
        with keras_scopes.computing_with([(state, tf.identity(state.value))]):
            made.trainer.model(x, training=True)
            own.assign(3.0)  # by another worker

    graph = step.get_concrete_function(FEATURES).graph
    if is_error:
        with pytest.raises(ValueError, match=r"state.*assign_add"):
            check_added(made.state, graph)
    else:
        check_added(made.state, graph)
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
        with keras_scopes.computing_with([(each, tf.identity(each.value)) for each in moved]):
            layer(x, training=True)
            for own, value in zip(owns, between, strict=True):  # another worker's step, begun at the same values
                own.assign(value)

    step(first)
    np.testing.assert_allclose([each.numpy() for each in moved], 0.5 * between + 0.5 * moments(first), rtol=1e-5)
