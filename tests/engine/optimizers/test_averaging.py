"""Moving averages of weights against NumPy, the swap that evaluation needs, and a model that is an average."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Averaged, Trainer, mean
from crankshaft.engine.errors import UsageError
from crankshaft.engine.optimizers import SGD
from crankshaft.engine.optimizers.averaging import WeightAverage
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.models.mlp import Model as Mlp
from tests.arrays import assert_same

pytestmark = pytest.mark.thorough


def data(examples=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(examples, 6)).astype(np.float32), rng.integers(0, 3, examples).astype(np.int32)


@pytest.fixture
def averaged(bench, compiled):
    """averaged(replicas): a run whose weights have an average."""

    def make(replicas):
        options = {"num_classes": 3, "ema_decay": 0.5}
        return compiled(replicas, lambda: bench(Mlp((5,)), data(), 16, replicas, **options))

    return make


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_average_equals_numpys_over_a_run(averaged, replicas):
    made = averaged(replicas)
    variables = made.trainer.model.trainable_variables
    average = made.trainer.optimizer.weight_average
    expected = [v.numpy() for v in variables]
    for t in range(1, 9):
        made.train(t)
        rate = 1 - min(0.5, (1 + t) / (10 + t))
        expected = [e + np.float32(rate) * (v.numpy() - e) for e, v in zip(expected, variables, strict=True)]
    for shadow, wanted in zip(average.shadows, expected, strict=True):
        np.testing.assert_allclose(made.held(shadow), wanted, rtol=1e-6, atol=1e-7)  # a rounding a step, 8 steps


@pytest.mark.parametrize("decay", [0.999, 0.9999, 0.99999])
def test_an_average_follows_at_its_rate(decay):
    """1 - decay as a difference in float32 would be off by 1e-5, 2e-4 and 1e-3 of itself."""
    variable = tf.Variable([0.0])
    average = WeightAverage(decay)
    average.build([variable])
    variable.assign([1.0])
    average.update([variable], tf.constant(10**8, tf.int64))
    np.testing.assert_allclose(average.shadows[0].numpy(), [1 - decay], rtol=1e-6)


def test_any_order_and_part_of_the_variables_find_their_own_averages():
    one, two, three = (tf.Variable([float(i)]) for i in range(3))
    average = WeightAverage(0.0)  # follows at once
    average.build([one, two, three])
    for variable in (one, two, three):
        variable.assign_add([10.0])
    average.update([three, one], tf.constant(1, tf.int64))
    assert [s.numpy()[0] for s in average.shadows] == [10.0, 1.0, 12.0]
    with average.averages_in_place():
        assert (two.numpy()[0], one.numpy()[0]) == (1.0, 10.0)
    average.update([tf.Variable([5.0], name="table")], tf.constant(1, tf.int64))  # of tables there is no average
    assert [s.numpy()[0] for s in average.shadows] == [10.0, 1.0, 12.0]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_reset_starts_the_average_from_the_weights(averaged, replicas):
    made = averaged(replicas)
    average = made.trainer.optimizer.weight_average
    made.train(3)
    average.reset()
    for variable, shadow in zip(made.trainer.model.trainable_variables, average.shadows, strict=True):
        np.testing.assert_array_equal(made.held(shadow), variable.numpy())


def test_a_checkpoint_of_an_average_holds_its_shadows_and_nothing_twice(tmp_path):
    variable = tf.Variable([1.0])
    average = WeightAverage(0.9)
    average.build([variable])
    path = tf.train.Checkpoint(average=average).write(str(tmp_path / "average"))
    names = [name for name, _ in tf.train.list_variables(path) if "OBJECT_GRAPH" not in name]
    assert names == ["average/shadows/0/.ATTRIBUTES/VARIABLE_VALUE"]


def test_weights_come_back_after_an_error():
    variable = tf.Variable([1.0, 2.0])
    average = WeightAverage(0.9)
    average.build([variable])
    variable.assign([3.0, 4.0])

    def fail():
        with average.averages_in_place():
            raise KeyError(variable.numpy().tolist())

    with pytest.raises(KeyError, match=r"1.0, 2.0"):
        fail()
    assert variable.numpy().tolist() == [3.0, 4.0]
    assert average.shadows[0].numpy().tolist() == [1.0, 2.0]


def test_the_warm_up_of_the_decay_may_be_left_out(bench):
    shadows = []
    for warmup in (True, False):
        made = bench(Mlp((5,)), data(), 16, num_classes=3, ema_decay=0.75, ema_warmup=warmup, learning_rate=0.1)
        variable, average = made.trainer.model.weights[0], made.trainer.optimizer.weight_average
        expected = variable.numpy().astype(np.float64)
        for n in range(1, 6):
            made.train(n)
            decay = min(0.75, (1 + n) / (10 + n)) if warmup else 0.75
            expected = decay * expected + (1 - decay) * variable.numpy()
        shadows.append(average.shadows[0].numpy())
        np.testing.assert_allclose(shadows[-1], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(shadows[0] - shadows[1]).max() > 1e-3
    with pytest.raises(ValueError, match="ema_warmup=False needs ema_decay, which is off"):
        bench(Mlp((5,)), data(), 16, num_classes=3, ema_warmup=False)


def test_a_step_adds_to_the_average_that_other_workers_have_moved_meanwhile():
    variable, moved = tf.Variable(1.0), threading.Event()
    average = WeightAverage(0.5, warmup=False)
    average.build([variable])
    (shadow,) = average.shadows

    @tf.function
    def step():
        variable.assign(tf.numpy_function(lambda: (moved.wait(60), np.float32(3.0))[1], [], tf.float32))
        average.update([variable], tf.constant(1, tf.int64))

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.5)  # long enough for a read that waits for nothing
    shadow.assign(5.0)
    moved.set()
    thread.join()
    assert shadow.numpy() == 5.0 + 0.5 * (3.0 - 5.0)


class MeanTeacher(Trainer):
    """A student that also learns from its teacher's outputs; the teacher has batch normalization's statistics too."""

    def __init__(self, decay=0.5):
        super().__init__()
        self.decay = decay

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential(
            [layers.Dense(4), layers.BatchNormalization(momentum=0.5, synchronized=True), layers.Dense(3)]
        )

    def build(self):
        super().build()
        self.teacher = Averaged(self.model, self.decay)

    def loss(self, outputs, batch):
        features, labels = batch
        supervised = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        return mean(supervised + tf.reduce_mean(tf.square(outputs - self.teacher(features, training=True)), -1))


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_teacher_is_the_average_of_the_model_after_each_step_on_all_replicas(bench, replicas):
    made = bench(MeanTeacher(lambda step: 0.5 + 0.1 * tf.cast(step, tf.float32)), data(), 16, replicas)
    pairs = list(zip(made.trainer.model.weights, made.trainer.teacher.model.weights, strict=True))
    assert len(pairs) == 8
    expected = [shadow.numpy() for _, shadow in pairs]
    np.testing.assert_array_equal(expected[0], pairs[0][0].numpy())
    for step in range(4):  # a step of 8 examples among them
        made.train(step + 1)
        rate = np.float32(0.5 - 0.1 * step)
        expected = [e + rate * (v.numpy() - e) for e, (v, _) in zip(expected, pairs, strict=True)]
    for (_, shadow), wanted in zip(pairs, expected, strict=True):
        np.testing.assert_allclose(made.held(shadow), wanted, rtol=1e-6, atol=1e-7)  # a rounding a step
    assert not made.trainer.teacher.trainable_variables
    outputs = made.trainer.teacher(data()[0])  # as a hook, or a program afterwards, calls it
    np.testing.assert_array_equal(outputs, made.trainer.teacher.model(data()[0], training=False))


@pytest.fixture
def taught(bench, compiled):
    def make(replicas=1, precision="float32"):
        return compiled((replicas, precision), lambda: bench(MeanTeacher(), data(), 16, replicas, precision=precision))

    return make


def test_a_step_reads_the_same_teacher_on_any_number_of_replicas(taught):
    curves = [taught(replicas).curve(7) for replicas in (1, 2)]
    np.testing.assert_allclose(*curves, rtol=1e-5)  # sums in another order


def test_a_teacher_s_outputs_are_float32_with_mixed_precision_too(taught):
    curves = [taught(precision=each).curve(3) for each in ("float32", "bfloat16")]
    np.testing.assert_allclose(*curves, rtol=2e-2)  # products of bfloat16


def test_a_skipped_step_leaves_the_teacher_as_it_is(bench):
    features, labels = data(32)
    features[19] = np.nan  # of the second step: the first has moved the model away from its teacher
    made = bench(MeanTeacher(), (features, labels), 16, on_nonfinite="skip", shuffle=False)
    made.train(1)
    before = [weight.numpy() for weight in made.trainer.teacher.weights]
    assert made.train(2)["skipped"] == (1, 1)
    assert_same([weight.numpy() for weight in made.trainer.teacher.weights], before)


@pytest.mark.filterwarnings("error")
def test_a_copy_whose_constructor_builds_it_is_not_built_again():
    class Built(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.build([None, 3])

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 2))

        def call(self, x):
            return x @ self.kernel

        def get_config(self):
            return {}

    model = Built()
    np.testing.assert_array_equal(Averaged(model, 0.5)(tf.eye(3)), model.kernel)


def test_mistakes_with_an_averaged_model_are_a_line(bench):
    with pytest.raises(UsageError, match=r"decay=1\.0 is not a decay"):
        Averaged(tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)]), 1.0)
    half = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1, dtype="bfloat16")])
    with pytest.raises(UsageError, match=r"kernel is bfloat16, in which an average loses small changes"):
        Averaged(half, 0.999)
    other = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    with pytest.raises(UsageError, match="pass a copy="):
        Averaged(tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)]), 0.9, copy=other)
    with pytest.raises(UsageError, match="sync_every_steps"):
        bench(MeanTeacher(), data(), 16, 2, reduction=LocalSgd(2, SGD(1.0)))
