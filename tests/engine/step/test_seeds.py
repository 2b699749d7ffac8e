"""Random numbers of a step: independent in each call, micro-batch, replica and step, and equal by name."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, make_optimizer, mean, step_context
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.errors import UsageError
from crankshaft.engine.layers import recomputed
from crankshaft.engine.state import RULES
from crankshaft.engine.strategies.base import Prediction

CALLS, NAMED, OTHER, DROPS = [0, 1], [2, 3], [4], [5, 6]  # columns of `sampled`
EXAMPLES = 16
DATA = (np.eye(EXAMPLES, dtype=np.float32),)


class Samples(Trainer):
    """Trains a table of examples whose gradient is what was sampled for each: so the weights are a record of it."""

    def build_model(self):
        dense = tf.keras.layers.Dense(7, use_bias=False, kernel_initializer="zeros")
        self.drop = tf.keras.layers.Dropout(0.5)
        self.drop.build([1, 24])
        return tf.keras.Sequential([tf.keras.layers.Input([EXAMPLES]), dense])

    def samples(self):
        calls = [{}, {}, {"name": "noise"}, {"name": "noise"}, {"name": "0"}]
        by_seed = [tf.random.stateless_uniform([], step_context().seed(**each), alg="philox") for each in calls]
        powers = tf.constant(2.0 ** -np.arange(1, 25), tf.float32)[tf.newaxis]
        masked = [tf.reduce_sum(self.drop(powers, training=True)) / 2 for _ in range(2)]
        return tf.stack([*by_seed, *masked])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(outputs * self.samples(), 1))

    def metrics(self, outputs, batch):
        return {
            f"sample_{i}": mean(tf.repeat(each, tf.shape(batch)[0]))
            for i, each in enumerate(tf.unstack(self.samples()))
        }


def made(bench, replicas=1, trainer=None, **options):
    sgd = {"optimizer": "sgd", "learning_rate": 1.0, "shuffle": False}
    return bench(trainer or Samples(), DATA, EXAMPLES, replicas, **sgd, **options)


def sampled(run):
    """Returns the sum of what was sampled for each example so far, [examples, samples]."""
    return -EXAMPLES * run.trainer.model.layers[0].kernel.numpy()


@pytest.mark.parametrize(
    ("shares", "options"),
    [
        (1, {}),
        pytest.param(8, {"accumulate_steps": 4, "replicas": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"accumulate_steps": 2, "parallel_micro_batches": 2, "replicas": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"accumulate_steps": 2, "parallel_micro_batches": 2}, marks=pytest.mark.thorough),
        (2, {"replicas": 2}),
        pytest.param(5, {"accumulate_steps": 5}, marks=pytest.mark.slow),  # of 3 and 4 examples
        pytest.param(4, {"accumulate_steps": 4, "jit": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_call_and_each_share_of_a_batch_samples_independently(bench, shares, options):
    run = made(bench, **options)
    run.train(1)
    found = sampled(run)
    rows = [row for i, row in enumerate(found) if i == 0 or np.any(row != found[i - 1])]
    assert len(rows) == shares
    np.testing.assert_array_equal(found[:, NAMED[0]], found[:, NAMED[1]])
    independent = np.stack(rows)[:, [*CALLS, NAMED[0], *OTHER, *DROPS]].ravel()
    assert len(set(independent.round(5))) == 6 * shares  # 48 of 100,000 values: two agree in 1 of 90 tables of dice
    assert 0.2 < independent.mean() < 0.8


def test_steps_sample_the_same_in_whatever_program_they_stand(bench):
    """Of calls of one step, and of several, in which steps are unrolled by fours and traced more than once."""
    run, sums = made(bench, unrolls=True), {}
    put_back = run.state.make_restorer()
    for steps, calls_of in ((10, None), (10, 1), (1, 1)):
        put_back()
        run.train(steps, calls_of)
        sums[steps, calls_of] = sampled(run)
    np.testing.assert_array_equal(sums[10, 1], sums[10, None])
    assert np.abs(sums[10, 1] - 10 * sums[1, 1]).min(axis=0).min() > 1e-3


@pytest.mark.thorough
def test_samples_follow_seed_and_step_and_one_replica_is_the_first_of_many(bench):
    one, two, other = (made(bench, replicas, seed=seed) for replicas, seed in ((1, 0), (2, 0), (1, 1)))
    for each in (one, two, other):
        each.train(1)
    np.testing.assert_array_equal(sampled(one)[0], sampled(two)[0])
    assert not np.any(sampled(one)[0] == sampled(other)[0])
    before = sampled(two)
    two.train(4)
    other = made(bench, replicas=2)
    other.jump(1)
    other.train(4)
    np.testing.assert_allclose(sampled(other), sampled(two) - before, atol=1e-5)  # differences of float32


@pytest.mark.thorough
def test_evaluation_and_prediction_sample_in_each_batch_and_call_independently(bench):
    run = made(bench, replicas=2, eval_source=DATA, eval_batch_size=8)
    names = [f"sample_{i}" for i in [*CALLS, *NAMED, *OTHER, *DROPS]]
    first, second = ([run.strategy.evaluate().means()[name] for name in names] for _ in range(2))
    run.train(1)
    assert first == second == [run.strategy.evaluate().means()[name] for name in names]  # whatever training sampled
    assert len(set(first)) == 6

    def compute(features):
        return tf.zeros([tf.shape(features)[0], 1]) + run.trainer.samples()

    program = run.strategy.external(Prediction(compute), ArraySource(np.concatenate([DATA[0]] * 2)), len(DATA[0]))
    found: list = []
    run.strategy.evaluate(program, keep=found.append)
    first, second = np.split(np.concatenate(found), 2)
    values = np.stack([first[0], first[-1], second[0], second[-1]])
    assert all(len(set(column)) == 4 for column in values.T)


def test_a_seed_of_32_bits_is_that_of_64_bits_in_32(bench):
    seeds = {}

    class Seeded(Samples):
        def loss(self, outputs, batch):
            seeds.update({dtype: step_context().seed("noise", dtype=dtype) for dtype in (tf.int32, tf.int64)})
            same = tf.reduce_all(tf.cast(seeds[tf.int64], tf.int32) == seeds[tf.int32])
            return mean(tf.reduce_sum(outputs, 1) + tf.where(same, 1.0, 2.0))

    assert made(bench, trainer=Seeded()).curve(1, "loss") == [1.0]
    assert [seed.dtype for seed in seeds.values()] == [tf.int32, tf.int64]


class OneSeed(Trainer):
    """As `Samples`, of layers of which two have one seed, two others none and one another seed."""

    seeds = 7, 7, 8, None, None

    def build_model(self):
        layers = tf.keras.layers
        self.drops = [layers.Dropout(0.5, seed=seed) for seed in self.seeds]
        for drop in self.drops:
            drop.build([1, 24])
        dense = layers.Dense(len(self.drops), use_bias=False, kernel_initializer="zeros")
        return tf.keras.Sequential([layers.Input([EXAMPLES]), dense])

    def loss(self, outputs, batch):
        powers = tf.constant(2.0 ** -np.arange(1, 25), tf.float32)[tf.newaxis]
        samples = tf.stack([tf.reduce_sum(drop(powers, training=True)) / 2 for drop in self.drops])
        return mean(tf.reduce_sum(outputs * samples, 1))


class DistinctSeeds(OneSeed):
    seeds = 7, 8, None, None


def test_layers_to_which_one_seed_was_given_sample_alike(bench):
    run = made(bench, 2, OneSeed(), accumulate_steps=2)
    for _ in range(2):
        before = sampled(run)
        run.train(run.state.step + 1)
        first, second, *others = (sampled(run) - before).T
        np.testing.assert_array_equal(first, second)
        shares = np.stack([first, *others])[:, :: EXAMPLES // 4]  # two micro-batches of each replica
        assert len(set(shares.ravel().round(5))) == 16


def test_a_run_that_repeats_no_seed_continues_those_of_the_rules_before(bench):
    rules = [made(bench, 1, trainer).state.host_state()["rules"] for trainer in (DistinctSeeds(), OneSeed())]
    first, second, *_ = RULES
    assert rules == [[first], [first, second]]


class Inferring(tf.keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)


class WithoutTraining(OneSeed):
    def build_model(self):
        return Inferring(super().build_model())


def test_a_run_whose_model_takes_no_training_continues_none_of_the_rules_before(bench):
    state = made(bench, 1, WithoutTraining()).state
    assert state.rules == [*RULES][:3]


def test_the_number_of_rules_that_runs_of_0_1_0_have_is_read(bench):
    """9: none of those that were added; 11: all of then."""
    state = made(bench, 1, WithoutTraining()).state
    assert [*state.changed_rules({"rules": 9})] == [*RULES][1:3]
    assert state.changed_rules({"rules": 11}) == {}
    assert [*state.changed_rules({})] == [*RULES][:3]
    assert state.changed_rules({"rules": [*state.rules, "tomorrow's"]}) == {"tomorrow's": "a later version"}


class Noisy(tf.keras.layers.Layer):
    """Multiplies by noise that is sampled by a call of its own and by a name, so that gradients depend on both."""

    def __init__(self):
        super().__init__()
        self.inner = tf.keras.layers.Dense(8, kernel_initializer="ones")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        x = self.inner(x) * tf.random.stateless_uniform([8], step_context().seed())
        return tf.sin(x) * tf.random.stateless_uniform([8], step_context().seed(name="gain"))


class Blocks(Trainer):
    def build(self):
        self.blocks = [Noisy(), Noisy()]
        for block, size in zip(self.blocks, (EXAMPLES, 8), strict=True):
            block.build([None, size])
        self.optimizer = make_optimizer(self, self.trainable_variables)

    @property
    def trainable_variables(self):
        return [variable for block in self.blocks for variable in block.trainable_variables]

    def forward(self, features, training):
        for block in self.blocks:
            features = recomputed(block, features) if self.run_context.options.recompute else block(features)
        return features * tf.random.stateless_uniform([8], step_context().seed())

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(outputs, 1))


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=str)
def test_what_is_computed_again_samples_the_same_again(bench, options):
    found = []
    for recompute in (False, True):
        run = made(bench, trainer=Blocks(), recompute=recompute, **options)
        run.train(3)
        found.append([variable.numpy() for variable in run.trainer.trainable_variables])
    for plain, again in zip(*found, strict=True):
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-6)


class ByKeras(Samples):
    """Samples by `keras.random` without a seed."""

    def samples(self):
        return tf.concat([tf.keras.random.uniform([3]), tf.keras.random.uniform([4])], 0)


@pytest.mark.parametrize(
    ("shares", "options"),
    [(2, {"replicas": 2}), pytest.param(2, {"accumulate_steps": 2}, marks=pytest.mark.thorough)],
    ids=str,
)
def test_keras_samples_without_a_seed_in_each_share_and_step_alike_after_a_resume(bench, shares, options, tmp_path):
    run = made(bench, trainer=ByKeras(), **options)
    run.train(1)
    run.save(tmp_path)
    assert len(set(sampled(run).ravel().round(5))) == 7 * shares
    run.train(3)
    again = made(bench, trainer=ByKeras(), **options).restore(tmp_path)
    again.train(3)
    np.testing.assert_array_equal(sampled(again), sampled(run))


class Common(Samples):
    """Its examples' samples are common to all replicas, two by call and two by name."""

    def samples(self):
        calls = [{}, {}, {"name": "noise"}, {"name": "noise"}]
        common = [tf.random.stateless_uniform([], step_context().seed(common=True, **call)) for call in calls]
        return tf.stack([*common, *tf.unstack(super().samples()[:3])])


@pytest.mark.thorough
def test_common_seeds_are_those_of_all_replicas_and_move_no_other_seed(bench):
    found = []
    for trainer in (Common(), Samples()):
        run = made(bench, trainer=trainer, replicas=2)
        run.train(1)
        found.append(sampled(run)[[0, -1]])  # of both replicas
    (first, second), others = found
    np.testing.assert_array_equal(first[:4], second[:4])
    assert len({*first[:3].round(5), *first[4:].round(5), *second[4:].round(5)}) == 9
    np.testing.assert_array_equal(np.stack([first[4:], second[4:]]), others[:, :3])


@pytest.mark.parametrize("by_keras", [False, True])
def test_a_seed_that_a_tf_function_takes_once_for_all_its_calls_is_refused(bench, by_keras):
    class Decorated(ByKeras if by_keras else Samples):
        @tf.function(autograph=False)
        def samples(self):
            return super().samples()

    cure = r"pass seed=self\.seeds, with" if by_keras else "pass the seed as an argument"
    with pytest.raises(UsageError, match=f"is in a tf.function, which is traced once, .*{cure}"):
        made(bench, trainer=Decorated(), accumulate_steps=2).train(1)


def test_a_name_is_text(bench):
    with step_context().micro_batch_contexts(1)(0), pytest.raises(ValueError, match="outside of a step"):
        step_context().seed()

    class Numbered(Samples):
        def samples(self):
            return tf.cast(step_context().seed(1), tf.float32)

    with pytest.raises(ValueError, match=r"seed\(1\): the name of a seed is a string, such as seed\(name='noise'\)"):
        made(bench, trainer=Numbered()).train(1)
