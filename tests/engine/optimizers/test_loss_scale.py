"""Loss scaling by itself and in a trainer: an overflow skips the update and halves the scale, good steps double it."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.optimizers.loss_scale import DynamicLossScale
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.step.context import StartValues, StepContext
from crankshaft.engine.step.gradients import Gradients
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from tests.arrays import assert_same

pytestmark = pytest.mark.thorough


def test_halves_on_overflow_and_doubles_after_good_steps():
    scale = DynamicLossScale(initial=8.0, growth_steps=3)
    scale.build()
    seen = []
    for finite in [True, True, False, True, True, True, True, False, True, True, True]:
        scale.update(tf.constant(finite))
        seen.append(scale.value.numpy())
    assert seen == [8, 8, 4, 4, 4, 8, 8, 4, 4, 4, 8]
    assert scale.good_steps.numpy() == 0


def test_goes_below_1_as_keras_s_never_to_0_and_not_above_2_to_the_24():
    scale = DynamicLossScale(growth_steps=3)
    theirs = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD(), 2.0**15, 3)
    scale.build()
    weight = tf.Variable([1.0])
    theirs.build([weight])
    for number in range(40):
        finite = number > 25 or number % 9 == 8
        scale.update(tf.constant(finite))
        theirs.apply([tf.constant([0.0 if finite else np.inf])], [weight])
        assert scale.value.numpy() == theirs.dynamic_scale.numpy(), number
    assert scale.value.numpy() < 1.0
    for finite, bound in ((False, 2.0**-100), (True, 2.0**24)):
        for _ in range(400):
            scale.update(tf.constant(finite))
        assert scale.value.numpy() == bound


def test_unscaling_gives_back_the_gradients_to_the_bit_and_keeps_overflow():
    scale = DynamicLossScale(initial=1024.0)
    scale.build()
    gradient = tf.constant([1.0 / 3, -7.0])
    slices = tf.IndexedSlices(gradient[:, tf.newaxis], tf.constant([4, 2]), tf.constant([6, 1]))
    with StepContext(start_values=StartValues(scale.read())) as step:
        times = Gradients([slices]).times(tf.constant(1024.0))[0]
        given = [step.scaled(gradient), times, None, tf.constant([np.inf])]
        dense, sparse, absent, infinite = Gradients(given).unscaled()
    np.testing.assert_array_equal(dense, gradient)
    np.testing.assert_array_equal(sparse.values[:, 0], gradient)
    assert absent is None
    assert np.isinf(infinite)


def test_a_step_has_one_scale_whoever_changes_it_meanwhile():
    """Around parameter servers another worker's step may overflow between this one's forward pass and its update."""
    scale = DynamicLossScale(initial=1024.0)
    scale.build()
    with StepContext(start_values=StartValues(scale.read())) as step:
        scaled = step.scaled(tf.constant([3.0]))
        scale.update(tf.constant(False))
        (gradient,) = Gradients([scaled]).unscaled()
    np.testing.assert_array_equal(gradient, [3.0])
    with StepContext(start_values=StartValues(scale.read())) as step:
        np.testing.assert_array_equal(step.scaled(tf.constant(1.0)), 512.0)


def images(examples=64):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, examples).astype(np.int32)
    pictures = rng.normal(size=(examples, 12, 12, 1)).astype(np.float32) + labels[:, None, None, None]
    return pictures, labels


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_overflow_leaves_everything_but_the_scale(bench, replicas):
    made = bench(Mlp((8,)), images(), 16, replicas, num_classes=4, precision="float16")
    made.trainer.loss_scale.value.assign(2.0**24)
    made.trainer.loss_scale.good_steps.assign(5)
    held = made.trainer.model.trainable_variables
    before = [v.numpy() for v in held]
    values = made.train(1)
    assert values["skipped"] == (replicas, replicas)
    assert made.copies(made.trainer.loss_scale.value) == [2.0**23] * replicas
    assert made.copies(made.trainer.loss_scale.good_steps) == [0] * replicas
    assert made.trainer.optimizer.iterations.numpy() == 0
    assert_same(held, before)


@pytest.mark.parametrize(("model", "precision"), [("mlp", "float16"), ("cnn", "bfloat16")])
def test_sixteen_bit_precision_trains(bench, model, precision):
    trainer = Mlp((32,)) if model == "mlp" else Cnn()
    made = bench(trainer, images(), 32, num_classes=4, precision=precision, seed=1)
    losses = made.curve(40)
    assert np.mean(losses[-4:]) < 0.6 * losses[0]
    assert all(v.dtype == "float32" for v in made.trainer.model.trainable_variables)
    if precision == "float16":
        assert made.trainer.optimizer.iterations.numpy() >= 30, "a quarter of the steps overflowed"


LARGE = 40_000  # whose gradients' sum is far beyond float16's 65,504


@pytest.fixture(scope="module")
def large():
    """Pictures whose activations float16 holds, and their labels."""
    pictures, labels = images(LARGE)
    return pictures / 4, labels


@pytest.fixture(scope="module")
def exact(bench, large):
    """The losses of three steps in float32."""
    return bench(Mlp((8,)), large, LARGE, num_classes=4).curve(3)


@pytest.mark.parametrize(
    ("replicas", "reduction", "options"),
    [
        pytest.param(1, Reduction(), {}, marks=pytest.mark.slow),
        (2, Reduction(), {}),
        pytest.param(4, Reduction(), {}, marks=pytest.mark.slow),
        pytest.param(2, Reduction(), {"accumulate_steps": 3}, marks=pytest.mark.slow),
        pytest.param(2, Reduction(), {"shard_optimizer": True}, marks=pytest.mark.slow),
        (2, Reduction("float16"), {}),
    ],
    ids=["1", "2", "4", "micro-batches", "shards of the update", "float16 on the wire"],
)
def test_one_scale_serves_any_number_of_replicas(bench, large, exact, replicas, reduction, options):
    options = {"num_classes": 4, "precision": "float16", "reduction": reduction, **options}
    made = bench(Mlp((8,)), large, LARGE, replicas, **options)
    values = made.train(3)
    assert values["skipped"][0] == 0
    assert values["loss"].value() == pytest.approx(np.mean(exact), rel=2e-3)  # float16 has 11 bits


class Outlines(Trainer):
    """Whose loss counts 64 numbers of each example, or the example."""

    def __init__(self, counts_numbers):
        super().__init__()
        self.counts_numbers = counts_numbers

    def build_model(self):
        how = {"kernel_initializer": tf.keras.initializers.GlorotUniform(0), "use_bias": False}
        return tf.keras.Sequential([tf.keras.layers.Dense(n, **how) for n in (16, 64)])

    def loss(self, outputs, batch):
        errors = tf.square(tf.cast(outputs, tf.float32) - batch[1])
        return mean(1e3 * errors if self.counts_numbers else 20 * tf.reduce_sum(errors, 1))


@pytest.mark.parametrize("counts_numbers", [True, False])
def test_the_same_steps_overflow_on_any_number_of_replicas_and_in_micro_batches(bench, counts_numbers):
    """Of 16 examples: whatever the loss counts, an example's values on the way back are as of the whole batch's mean.

    Small features, so that no sum over examples decides: those of a share are smaller.
    """
    rng = np.random.default_rng(0)
    source = rng.normal(0, 0.01, (64, 8)).astype(np.float32), rng.normal(size=(64, 64)).astype(np.float32)
    found = []
    for replicas, options in ((1, {}), (2, {}), (1, {"accumulate_steps": 4}), (2, {"accumulate_steps": 2})):
        options = {"optimizer": "sgd", "learning_rate": 1e-5, "precision": "float16", **options}
        made = bench(Outlines(counts_numbers), source, 16, replicas, shuffle=False, **options)
        made.train(12)
        values = [made.held(v) for v in (made.trainer.loss_scale.value, made.trainer.optimizer.iterations)]
        found.append((*values, made.held(made.trainer.model.trainable_variables[0])))
    (scale, updates, weights), *others = found
    assert scale < 2.0**15
    assert 0 < updates < 12
    for other_scale, other_updates, other_weights in others:
        assert (other_scale, other_updates) == (scale, updates)
        np.testing.assert_allclose(other_weights, weights, atol=1e-6)  # updates are of float16, 11 bits, and below 1e-3


@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_what_a_step_is_scaled_by_changes_no_gradient(bench, replicas):
    """Of values in float32, multiplied by powers of two alone: the same bits whatever the scale."""
    made = [bench(Mlp((8,)), images(), 22, replicas, num_classes=4, on_nonfinite="skip") for _ in range(2)]
    scale = made[1].trainer.loss_scale = DynamicLossScale()
    with made[1].strategy.scope():
        scale.build()
    made[1].strategy.bind(made[1].state, made[1].strategy.training.feed)  # which finds it
    for each in made:
        each.train(5)
    assert_same(*(each.trainer.trainable_variables for each in made))
