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
            "piecewise: boundaries=-5 is not an integer from 0 to 2147483647",
        ),
        ({"name": "piecewise", "boundaries": [5, float("inf")]}, "piecewise: boundaries=inf is not an integer"),
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
