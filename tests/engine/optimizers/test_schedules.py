"""Schedules: found by name, equal to Keras's, and begun by a warm-up."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import optimizers
from crankshaft.engine.optimizers import schedules
from crankshaft.engine.step.options import RATE_OPTIONS, StepOptions

keras = tf.keras.optimizers.schedules


def rates(schedule, steps):
    return [float(schedule(tf.constant(step, tf.int64)) if callable(schedule) else schedule) for step in steps]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("constant", {}, lambda step: 0.5),
        ("cosine", {}, keras.CosineDecay(0.5, 100)),
        ("cosine", {"alpha": 0.1}, keras.CosineDecay(0.5, 100, alpha=0.1)),
        (
            "cosine_restarts",
            {"first_decay_steps": 10, "m_mul": 0.9},
            keras.CosineDecayRestarts(0.5, 10, m_mul=0.9),
        ),
        ("exponential", {}, keras.ExponentialDecay(0.5, 100, 0.1)),
        (
            "Exponential",
            {"decay_steps": 10, "decay_rate": 0.9, "staircase": True},
            keras.ExponentialDecay(0.5, 10, 0.9, staircase=True),
        ),
        (
            "polynomial",
            {"end_learning_rate": 0.01, "power": 2.0},
            keras.PolynomialDecay(0.5, 100, 0.01, power=2.0),
        ),
        (
            "piecewise",
            {"boundaries": [10, 50], "values": [1.0, 0.1, 0.02]},
            keras.PiecewiseConstantDecay([10, 50], [1.0, 0.1, 0.02]),
        ),
        (
            "piecewise",
            {"boundaries": [10, 50]},
            keras.PiecewiseConstantDecay([10, 50], [0.5, 0.05, 0.005]),
        ),
    ],
)
def test_a_schedule_by_name_equals_the_one_of_keras(name, arguments, expected):
    steps = [0, 1, 10, 11, 50, 99, 100, 150]
    schedule = schedules.build(name, 0.5, 100, **arguments)
    np.testing.assert_allclose(rates(schedule, steps), [float(expected(s)) for s in steps], 1e-6)


@pytest.mark.parametrize("name", ["constant", "cosine", "exponential", "polynomial"])
def test_warm_up_rises_evenly_from_above_zero_and_meets_the_schedule(name):
    schedule = schedules.build(name, 0.5, 100, warmup_steps=9)
    np.testing.assert_allclose(rates(schedule, range(9)), 0.05 * np.arange(1, 10), 1e-6)
    inner = schedules.build(name, 0.5, 91)
    np.testing.assert_allclose(rates(schedule, [9, 10, 50, 100]), rates(inner, [0, 1, 41, 91]), 1e-6)


def test_piecewise_boundaries_count_from_the_end_of_the_warm_up():
    schedule = schedules.build("piecewise", 1.0, 100, warmup_steps=20, boundaries=[10])
    np.testing.assert_allclose(rates(schedule, [30, 31]), [1.0, 0.1], 1e-6)


def test_the_rate_is_right_beyond_what_float32_counts():
    schedule = schedules.WarmUp(keras.PiecewiseConstantDecay([2**25 + 1], [1.0, 2.0]), 3)
    assert rates(schedule, [2**25 + 4, 2**25 + 5]) == [1.0, 2.0]


def test_schedules_compile_under_xla():
    schedule = schedules.build("cosine", 0.5, 100, warmup_steps=10)
    compiled = tf.function(schedule, jit_compile=True)
    np.testing.assert_allclose(rates(compiled, [0, 10, 60]), rates(schedule, [0, 10, 60]), 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cosin"}, "unknown schedule 'cosin'; did you mean cosine"),
        ({"name": "cosine", "alfa": 0.1}, "argument of schedule cosine 'alfa'; did you mean alpha"),
        ({"name": "constant", "alpha": 0.1}, "argument of schedule constant 'alpha'"),
        ({"name": "cosine", "warmup_steps": 100}, "warmup_steps=100 .* use at most 99"),
        ({"name": "cosine", "warmup_steps": -1}, "warmup_steps=-1 is negative"),
        ({"name": "piecewise"}, "needs boundaries"),
        ({"name": "cosine_restarts"}, "needs first_decay_steps; set the steps of its first period"),
        ({"name": "piecewise", "boundaries": [5], "values": [1.0]}, "1 values; use 2 values"),
        ({"name": "piecewise", "boundaries": [10, 5]}, "boundaries 10, 5; use steps each later than the one"),
        ({"name": "piecewise", "boundaries": [5, 5]}, "boundaries 5, 5; use steps each later"),
        (
            {"name": "piecewise", "boundaries": [-5, 5]},
            "piecewise: boundaries=-5,5 is not an integer from 0 to 2147483647",
        ),
        ({"name": "piecewise", "boundaries": [5, float("inf")]}, "piecewise: boundaries=5,inf is not an integer"),
        ({"name": "piecewise", "boundaries": ["half"]}, "piecewise: boundaries=half is not an integer"),
    ],
)
def test_a_mistake_is_answered_with_the_cure(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedules.build(learning_rate=0.5, total_steps=100, **arguments)


def test_a_schedule_that_equals_the_runs_at_each_of_its_steps_applies_its_options():
    options = StepOptions(optimizer="sgd", learning_rate=0.5, learning_rate_schedule="cosine", total_steps=10)
    applied = optimizers.applied_options(optimizers.SGD(keras.CosineDecayRestarts(0.5, 10)), options)  # restarts at 10
    assert applied >= {*RATE_OPTIONS}
    longer = optimizers.applied_options(optimizers.SGD(keras.CosineDecay(0.5, 11)), options)
    assert longer & {*RATE_OPTIONS} == {"learning_rate"}


class Otherwise(keras.LearningRateSchedule):
    """The rate of another schedule, but for one step."""

    def __init__(self, schedule, step, factor):
        self.schedule, self.step, self.factor = schedule, step, factor

    def __call__(self, step):
        return self.schedule(step) * tf.where(step == self.step, self.factor, 1.0)


@pytest.mark.parametrize(
    ("step", "factor", "applied"),
    [
        *((step, 1.001, {"learning_rate"}) for step in (0, 4, 20, 31)),
        (8, 1.00001, set()),  # the rate itself, as the warm-up ends
        (8, 0.99999, set()),
        (8, 1.0000003, {*RATE_OPTIONS}),
        (2, 2.0, {*RATE_OPTIONS}),
    ],
)
def test_schedules_are_compared_where_each_part_of_them_begins_halves_and_ends(step, factor, applied):
    options = StepOptions(learning_rate=0.06, learning_rate_schedule="cosine", warmup_steps=8, total_steps=32)
    schedule = Otherwise(optimizers.schedule_from_options(options), step, factor)
    assert optimizers.applied_options(optimizers.SGD(schedule), options) & {*RATE_OPTIONS} == applied
    assert optimizers.applied_options(optimizers.SGD(lambda step: schedule(step)), options) >= {*RATE_OPTIONS}


RULE, RATES = {"optimizer", "optimizer_arg"}, {*RATE_OPTIONS}
BETA = {"learning_rate": 0.5, "optimizer_arg": {"beta_1": 0.8}}
DECAY = {"weight_decay": 0.1, "weight_decay_exclude": "bias"}


@pytest.mark.parametrize(
    ("make", "options", "applied"),
    [
        (None, {"optimizer": "adam"}, {*RULE, *RATES, "weight_decay"}),
        (None, {"optimizer": "adam", **DECAY}, {*RULE, *RATES, *DECAY}),
        (None, {"optimizer": "AdamW"}, {*RULE, *RATES, *DECAY}),  # a decay by default
        (None, {**BETA, "optimizer": "lion", **DECAY}, {*RULE, *RATES, *DECAY}),
        (lambda: optimizers.Adam(0.5), BETA, {"optimizer", *RATES}),
        (lambda: optimizers.Adam(0.5, beta_1=0.8), BETA, {*RULE, *RATES}),
        (
            lambda: optimizers.AdamW(0.4),
            {**BETA, "optimizer": "AdamW", "optimizer_arg": {}},
            {*RULE, "weight_decay_exclude"},
        ),
        (lambda: optimizers.AdamW(0.5, beta_1=0.8, **DECAY), {**BETA, **DECAY}, {"optimizer_arg", *RATES, *DECAY}),
        (lambda: optimizers.Adam(0.5, weight_decay=0.1), {**BETA, **DECAY}, {"optimizer", *RATES, "weight_decay"}),
        (lambda: optimizers.Adam(0.5, weight_decay_exclude="bias"), {**BETA, **DECAY}, {"optimizer", *RATES}),
        (
            lambda: tf.keras.optimizers.Adam(0.5, 0.8, weight_decay=0.1),
            {**BETA, **DECAY},
            {*RULE, *RATES, "weight_decay"},
        ),
        (
            lambda: tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.Adam(0.5, 0.8)),
            {**BETA, "optimizer": "Adam"},
            {*RULE, *RATES},
        ),
        (lambda: optimizers.KerasOptimizer(tf.keras.optimizers.Adam(0.5, 0.8)), BETA, {*RULE, *RATES}),
        (lambda: optimizers.KerasOptimizer(tf.keras.optimizers.Adam(0.4, 0.8)), BETA, RULE),
        (lambda: optimizers.KerasOptimizer(tf.keras.optimizers.Adam(0.4, 0.8), 0.5), BETA, {*RULE, *RATES}),
        (lambda: optimizers.KerasOptimizer(tf.keras.optimizers.Adam(0.5, 0.8), 0.4), BETA, RULE),
    ],
)
def test_an_optimizer_applies_the_options_whose_values_it_has(make, options, applied):
    """One that was made from the options applies all, but exclusions from a decay that it has not."""
    options = StepOptions(**options)
    optimizer = make() if make else optimizers.make_from_options(options)
    optimizer.build([tf.keras.Variable([1.0], name="kernel")])
    assert optimizers.applied_options(optimizer, options) == applied
    assert make or optimizer.name == options.optimizer.lower()


class Slower:
    """An order of examples in which a step has half as many as in the schedule's."""

    def rate_step(self, step):
        return step // 2


def test_a_schedule_continues_by_examples():
    options = {"learning_rate": 0.5, "total_steps": 10, "rate_by": Slower()}
    schedule = optimizers.schedule_from_options(StepOptions(learning_rate_schedule="polynomial", **options))
    np.testing.assert_allclose(rates(schedule, [0, 1, 2, 9]), [0.5, 0.5, 0.45, 0.3], 1e-6)
    assert optimizers.schedule_from_options(StepOptions(**options)) == 0.5
