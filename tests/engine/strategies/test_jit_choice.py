"""XLA or not: measured where either may be faster, and not tried where it is known to be slow."""

import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.state import host_of
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


def test_a_step_of_many_operations_is_not_tried_with_xla(bench, monkeypatch):
    """A compilation can't be interrupted, so what would take long is not begun."""
    made = bench(Mlp((8,)), images(), 16, num_classes=4)
    monkeypatch.setattr(jit_choice, "_MOST_OPERATIONS", 10)
    measured, why_not = jit_choice.measure(made.strategy, made.state)
    assert list(measured) == [False]
    assert re.fullmatch(r"not tried with it, since \d{2,3} operations take it long to compile; jit=on does", why_not)


def test_what_is_clearly_faster_is_not_timed_again(bench):
    made = bench(Mlp((8,)), images(), 16, num_classes=4)
    for seconds, timed in (([1.0, 4.0], 4), ([1.0, 1.5], 8)):
        jumps, now = iter([*seconds, *seconds]), [0.0, 0]

        def clock(jumps=jumps, now=now):
            """The clock is read before and after a piece: each piece takes the next of `seconds`."""
            now[1] += 1
            now[0] += next(jumps) if now[1] % 2 == 0 else 0.0
            return now[0]

        jit_choice.measure(made.strategy, made.state, clock)
        assert now[1] == timed


class OutOfMemory(Mlp):
    """Has no room for the step as one XLA program."""

    def train_step(self, batch):
        metrics = super().train_step(batch)
        if self.jit:
            raise tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying to allocate")
        return metrics


def test_memory_that_is_not_enough_for_xla_is_a_no(bench, monkeypatch):
    made = bench(OutOfMemory((8,)), images(), 16, num_classes=4)
    program = made.strategy.program

    def noting(step, feed, jit):
        made.trainer.jit = jit
        return program(step, feed, jit)

    monkeypatch.setattr(made.strategy, "program", noting)
    before = made.arrays()
    measured, why_not = jit_choice.measure(made.strategy, made.state)
    assert list(measured) == [False]
    assert why_not == "it has not enough memory for this step"
    for then, now in zip(before, made.arrays(), strict=True):
        np.testing.assert_array_equal(then, now)


@pytest.mark.parametrize(
    ("device", "host"),
    [
        ("/job:localhost/replica:0/task:0/device:GPU:1", "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("/job:worker/replica:0/task:3/device:TPU:7", "/job:worker/replica:0/task:3/device:CPU:0"),
        ("/job:localhost/replica:0/task:0/device:CPU:2", "/job:localhost/replica:0/task:0/device:CPU:2"),
    ],
)
def test_values_are_kept_by_the_host_of_the_device_that_has_them(device, host):
    """Not on the device: it may have no room for a second copy of the variables."""
    assert host_of(device) == host
