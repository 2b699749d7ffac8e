"""XLA or not: measured where either may be faster, and not tried where it is known to be slow."""

import numpy as np
import pytest

from crankshaft.engine.strategies import jit_choice
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp


def images(examples=64, size=12):
    rng = np.random.default_rng(0)
    return rng.normal(size=(examples, size, size, 1)).astype(np.float32), rng.integers(0, 4, examples).astype(np.int32)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_convolutions_on_cpus_are_not_tried_with_xla(bench, accumulate_steps):
    """Also where they stand in a loop of the step's own."""
    made = bench(Cnn(), images(), 16, num_classes=4, accumulate_steps=accumulate_steps)
    before = made.arrays()
    measured, why_not = jit_choice.measure(made.strategy, made.state)
    assert list(measured) == [False]
    assert not jit_choice.choose(measured)
    assert why_not == "not tried with it, since its convolutions are slow on CPUs"
    for then, now in zip(before, made.arrays(), strict=True):
        np.testing.assert_array_equal(then, now)


def test_dense_layers_are_measured_both_ways(bench):
    made = bench(Mlp((8,)), images(), 16, num_classes=4)
    before = made.arrays()
    measured, why_not = jit_choice.measure(made.strategy, made.state)
    assert list(measured) == [False, True]
    assert not why_not
    for then, now in zip(before, made.arrays(), strict=True):
        np.testing.assert_array_equal(then, now)
