"""Whatever a step writes is in the checkpoint, or the step is refused with the line that writes it."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.errors import UsageError
from crankshaft.engine.reduction import per_replica
from crankshaft.engine.strategies.base import Prediction

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32") + 5


class Writes(Trainer):
    """Subtracts what `write(features)` returns from the features."""

    def build_model(self):
        dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return tf.keras.Sequential([tf.keras.layers.Input([3]), dense])

    def forward(self, features, training):
        return self.model(features - self.write(features) if training else features)

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0]))


def made(bench, trainer, replicas=1):
    return bench(trainer, (X,), 8, replicas, optimizer="sgd", learning_rate=0.01, shuffle=False)


class Mean:
    """Variables in a class that is no tf.Module."""

    def __init__(self):
        self.mean = tf.Variable(tf.zeros([3]), trainable=False, name="running", aggregation=tf.VariableAggregation.MEAN)


class InAPlainClass(Writes):
    def build(self):
        super().build()
        self.helper = Mean()

    def write(self, features):
        return self.helper.mean.assign(tf.reduce_mean(features, 0))


class InABranch(InAPlainClass):
    def write(self, features):
        @tf.function
        def count(last):
            return tf.cond(last > 0, lambda: self.helper.mean.assign_add(last), lambda: tf.identity(self.helper.mean))

        return tf.while_loop(lambda i, _: i < 2, lambda i, last: (i + 1, count(features[0])), (0, features[0]))[1]


class HiddenGenerator(Writes):
    def build(self):
        super().build()
        generator = tf.keras.random.SeedGenerator(1)
        self.hidden = lambda: generator

    def write(self, features):
        return tf.keras.random.normal([3], seed=self.hidden())


class HiddenTable(Writes):
    def build(self):
        super().build()
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        self.hidden = lambda: table

    def write(self, features):
        table = self.hidden()
        table.insert([0], features[:1, 0])
        return tf.ensure_shape(table.lookup(tf.zeros([3], tf.int64)), [3])


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (InAPlainClass, r"assigns running \[3\], at .*test_written.py:\d+ in write, that is in none .* be a tf.Module"),
        (InABranch, r"assigns running \[3\], at .*test_written.py:\d+ in "),
        (HiddenGenerator, r"assigns seed_generator.* \[2\], at .*test_written.py:\d+ in write"),
        (
            HiddenTable,
            r"changes a table.* \(LookupTableInsertV2, at .*test_written.py:\d+ in write\).* in a tf.Variable",
        ),
    ],
)
def test_a_write_of_what_no_checkpoint_has_is_refused_with_its_line(bench, trainer, said):
    with pytest.raises(UsageError, match=said):
        made(bench, trainer()).train(1)


class InEvaluation(InAPlainClass):
    """Counts what it evaluates, or predicts, by a variable of a plain class."""

    def forward(self, features, training):
        return self.model(features if training else features - self.write(features))


@pytest.mark.parametrize("predicts", [False, True])
def test_a_write_by_an_evaluation_or_prediction_is_refused_alike(bench, predicts):
    run = bench(InEvaluation(), (X,), 8, optimizer="sgd", eval_source=(X,))
    step = Prediction(lambda features: run.trainer.forward(features, training=False))
    program = run.strategy.external(step, ArraySource(X), 8) if predicts else None
    with pytest.raises(UsageError, match=r"assigns running \[3\], at .*test_written.py:\d+ in write, that is in none"):
        run.strategy.evaluate(program)


class Reads(Writes):
    def build(self):
        super().build()
        keys, values = tf.constant([0, 1], tf.int64), tf.constant([1.0, 2.0])
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0.0)
        weights = tf.Variable([1.0, 2.0, 3.0], trainable=False)
        self.hidden = lambda: (table, weights)

    def write(self, features):
        table, weights = self.hidden()
        return table.lookup(tf.constant([0, 1, 1], tf.int64)) * tf.gather(weights, [0, 1, 2])


def test_what_a_step_only_reads_need_not_be_saved(bench):
    made(bench, Reads()).train(2)


class Counted(tf.keras.layers.Layer):
    """Has a Keras metric, of which a step uses the value."""

    def __init__(self):
        super().__init__()
        self.seen = tf.keras.metrics.Mean()

    def call(self, features):
        self.seen.update_state(features)
        return self.seen.result()


class Metrics(Writes):
    def build(self):
        super().build()
        self.metrics_used = {"inputs": [tf.keras.metrics.Mean()]}
        self.layer = Counted()
        self.layer.build([None, 3])

    def write(self, features):
        (metric,) = self.metrics_used["inputs"]
        metric.update_state(features)
        return metric.result() + self.layer(features)


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_metrics_that_a_step_updates_are_resumed_to_the_bit(bench, replicas, tmp_path):
    run = made(bench, Metrics(), replicas)
    run.train(2)
    run.save(tmp_path)
    run.train(4)
    expected = run.trainer.model.get_weights()[0]
    again = made(bench, Metrics(), replicas).restore(tmp_path)
    again.train(4)
    np.testing.assert_array_equal(again.trainer.model.get_weights()[0], expected)


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_metrics_count_each_example_once_on_replicas(bench, replicas):
    """A last batch of one example is computed by all replicas."""
    run = bench(Metrics(), (X[:9],), 8, replicas, optimizer="sgd")
    run.train(2)
    (metric,) = run.trainer.metrics_used["inputs"]
    for one in (metric, run.trainer.layer.seen):
        assert sum(float(copy) for copy in per_replica.components(one.count.value)) == 9


def test_keras_metrics_are_read_anew_before_layers_compute_with_values_of_servers(bench):
    run = made(bench, Metrics())
    (metric,) = run.trainer.metrics_used["inputs"]
    moved = {id(variable) for variable in run.trainer.inventory.moved_variables}
    assert moved >= {id(variable) for variable in (*metric.variables, *run.trainer.layer.seen.variables)}


class AtFirst(Writes):
    """Makes a variable at its first step, as optimizers of one's own make their slots."""

    def build(self):
        super().build()
        self.slots = []

    def write(self, features):
        if not self.slots:
            self.slots = [tf.Variable(tf.zeros([3]), trainable=False, name="slot")]
        return 0.0 * self.slots[0].assign_add([1.0] * 3)


def test_variables_that_a_step_makes_are_refused_on_replicas_and_where_a_run_is_saved_or_named(bench, caplog):
    line = r"AtFirst: its step makes variables as it is traced \(slot \[3\]\), which {}.*; make them in build"
    alone, saved, replicas = (made(bench, AtFirst(), replicas) for replicas in (1, 1, 2))
    alone.run(1)
    np.testing.assert_array_equal(alone.trainer.slots[0], [1.0] * 3)
    assert [line for line in caplog.messages if "its step makes variables as it is traced (slot [3])" in line]
    saved.state.is_saved = True
    with pytest.raises(UsageError, match=line.format("a resumed run would not have")):
        saved.run(1)
    with pytest.raises(UsageError, match=line.format("replicas can't")):
        replicas.run(1)


class Doubled(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def __call__(self, x):
        return self.factor * x


def test_a_loaded_saved_model_that_no_optimizer_updates_is_no_mistake(bench, caplog, tmp_path):
    class Loaded(Writes):
        def build(self):
            super().build()
            self.doubled = tf.saved_model.load(tmp_path)

        def write(self, features):
            return self.doubled(features)

    tf.saved_model.save(Doubled(), tmp_path)
    made(bench, Loaded()).run(1)
    assert "that no optimizer updates" not in caplog.text
