"""XLA or not: measured where either may be faster, and not tried where it is known to be slow."""

import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import mean, run
from crankshaft.engine.state import host_device
from crankshaft.engine.strategies import jit_choice
from crankshaft.engine.strategies.base import Interrupted
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from tests.arrays import assert_same
from tests.engine.trainers import Squares, pictures

pytestmark = pytest.mark.thorough


class OutOfMemory(Mlp):
    """Has no room for the step as one XLA program."""

    def train_step(self, batch):
        metrics = super().train_step(batch)
        if self.jit:
            raise tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying to allocate")
        return metrics


SLOW_ON_CPUS = "not tried with it, since its convolutions are slow on CPUs"


@pytest.mark.parametrize(
    ("trainer", "options", "most_operations", "tried", "why"),
    [
        (Cnn, {}, None, [False], SLOW_ON_CPUS),
        (Cnn, {"accumulate_steps": 2}, None, [False], SLOW_ON_CPUS),  # in a loop of the step's own
        (lambda: Mlp((8,)), {}, None, [False, True], ""),
        # A compilation can't be interrupted, so what would take long is not begun.
        (
            *(lambda: Mlp((8,)), {}, 10, [False]),
            r"not tried with it, since \d{2,3} operations take it long to compile; jit=on does",
        ),
        (lambda: OutOfMemory((8,)), {}, None, [False], "it has not enough memory for this step"),
    ],
)
def test_both_are_measured_unless_one_is_known_not_to_do(
    bench, monkeypatch, trainer, options, most_operations, tried, why
):
    made = bench(trainer(), pictures(64), 16, num_classes=4, **options)
    if most_operations:
        monkeypatch.setattr(jit_choice, "_MOST_OPERATIONS", most_operations)
    program = made.strategy.program

    def noting(step, feed, jit):
        made.trainer.jit = jit
        return program(step, feed, jit)

    monkeypatch.setattr(made.strategy, "program", noting)
    before = made.arrays()
    measured, why_not = jit_choice.measure(made.strategy, made.state)
    assert list(measured) == tried
    assert re.fullmatch(why, why_not or "")
    if tried == [False]:
        assert not jit_choice.choose(measured)
    assert_same(made.arrays(), before)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("rates", "chosen"), [([100, 99], False), ([100, 104], False), ([100, 106], True), ([100], False)]
)
def test_xla_is_used_where_it_is_clearly_faster(rates, chosen):
    measured = {jit: (rate, None) for jit, rate in zip((False, True), rates, strict=False)}
    assert jit_choice.choose(measured) is chosen


@pytest.mark.fast
@pytest.mark.parametrize(
    ("steps", "short"),
    [
        ((50,), True),
        ((51,), False),
        ((51, 10.0), False),
        ((51, 10.4), True),
        ((1000, 200.0), False),
        ((None, 1.0), False),
    ],
)
def test_xla_is_measured_where_steps_take_longer_than_that(steps, short):
    assert jit_choice.is_short(*steps) is short


def test_a_loop_that_is_no_xla_program_says_why(bench):
    def why(source, replicas=1, micro_batches=1):
        strategy = bench(Mlp((8,)), source, 16, replicas, num_classes=4).strategy
        strategy.parallel_micro_batches = micro_batches
        return strategy.no_jit_reason

    source = pictures(64)
    assert why(source) is None
    assert why(source, replicas=2) == "one XLA program is for one replica, and there are 2"
    assert why(source, micro_batches=2).startswith("each batch is computed in 2 micro-batches in parallel, a thread")
    stream = tf.data.Dataset.from_tensor_slices(source)
    assert why(stream) == "a tf.data.Dataset cannot be read within an XLA program"


def test_a_request_to_end_the_run_ends_the_measurement_and_restores_the_state(bench):
    made = bench(Mlp((8,)), pictures(64), 16, num_classes=4)
    before, asked = made.arrays(), iter([None, "SIGINT"])
    with pytest.raises(Interrupted, match="SIGINT"):
        jit_choice.measure(made.strategy, made.state, ends=lambda: next(asked))
    assert_same(made.arrays(), before)


def by_numpy(x):
    return tf.numpy_function(lambda x: x, [x], tf.float32)


def by_loop(x):
    """A loop whose turns depend on the data: its gradient keeps a list of any length."""
    return tf.while_loop(lambda i, _: i < tf.cast(x[0, 0], tf.int32), lambda i, y: (i + 1, tf.tanh(y)), (0, x))[1]


@pytest.mark.parametrize(("value", "op"), [(by_numpy, "PyFunc"), (by_loop, "EmptyTensorList")])
def test_an_op_that_xla_lacks_is_named_with_the_setting_that_does_without(bench, value, op, capfd):
    class Lacking(Squares):
        def loss(self, outputs, batch):
            return mean(tf.square(value(outputs)[:, 0]) + 0.0 * outputs[:, 0])

    made = bench(Lacking(), (np.ones([8, 3], np.float32), np.ones(8, np.float32)), 4, jit=True)
    with pytest.raises(ValueError, match=rf"^XLA can't compile {op}(, at .*|); .*use jit=auto or off$"):
        made.run(1)
    assert jit_choice.measure(made.strategy, made.state) == ({}, f"it has no kernel for {op}")
    assert "OP_REQUIRES" not in capfd.readouterr().err


@pytest.mark.thorough
def test_a_step_that_calls_python_is_called_once_for_each_step_and_a_resumed_run_names_what_it_lacks(tmp_path, caplog):
    played = []

    class Environment(Squares):
        def loss(self, outputs, batch):
            reward = tf.numpy_function(lambda x: played.append(1) or x, [outputs], tf.float32)
            return mean(tf.square(outputs[:, 0]) + 0.0 * reward[:, 0])

    data = (np.ones([8, 3], np.float32), np.ones(8, np.float32))
    asked = {"data": (data,), "mode": "train", "global_batch_size": 8, "progress": "off", "run_dir": tmp_path}
    run(Environment, **asked, train_steps=60)  # enough for a measurement
    assert len(played) == 60
    assert "in no checkpoint" not in caplog.text
    run(Environment, **asked, train_steps=120)
    assert len(played) == 120
    line = r"the step calls Python \(.*test_jit_choice.py:\d+ in loss\), and what its functions keep"
    assert re.search(line, caplog.text)


def by_size(x):
    """A length that is known only as the step runs."""
    return tf.range(tf.cast(x[0, 0], tf.float32))[:, None] + x


def by_unused(x):
    """What no result needs is no obstacle."""
    tf.strings.as_string(x)
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, x), maximum_iterations=3)[1]


def test_what_xla_only_finds_as_it_compiles_is_named_too(bench):
    class Sized(Squares):
        def loss(self, outputs, batch):
            return mean(tf.reduce_sum(by_size(outputs)) + 0.0 * outputs[:, 0])

    made = bench(Sized(), (np.ones([8, 3], np.float32), np.ones(8, np.float32)), 4, jit=True)
    with pytest.raises(ValueError, match=r"^XLA can't compile \w+; use jit=auto or off \("):
        made.run(1)


def test_an_op_that_xla_lacks_and_no_result_needs_is_no_obstacle(bench):
    class Unused(Squares):
        def loss(self, outputs, batch):
            return mean(tf.square(by_unused(outputs)[:, 0]))

    bench(Unused(), (np.ones([8, 3], np.float32), np.ones(8, np.float32)), 4, jit=True).run(1)


def test_larger_steps_are_tried_on_gpus(bench, monkeypatch):
    made = bench(Mlp((8,)), pictures(64), 16, num_classes=4)
    monkeypatch.setattr(jit_choice, "_MOST_OPERATIONS", 10)
    devices = ["/job:localhost/replica:0/task:0/device:GPU:0"]
    monkeypatch.setattr(made.strategy, "describe", lambda: {"devices": devices})
    measured, _ = jit_choice.measure(made.strategy, made.state)
    assert list(measured) == [False, True]


def test_the_better_of_two_counts_and_what_is_clearly_faster_is_not_timed_again(bench):
    made = bench(Mlp((8,)), pictures(64), 16, num_classes=4)
    for pieces, rates in (
        ([1.0, 4.0], [1.0, 0.25]),
        ([1.0, 1.5, 0.5, 3.0], [2.0, 1 / 1.5]),
        ([0.01, 0.5, 4.0], [50.0, 0.25]),  # a step is too short to tell: 25 take a quarter of a second at its rate
        ([0.125, 0.25, 4.0], [8.0, 0.25]),
    ):
        jumps, now = iter(pieces), [0.0, 0]

        def clock(jumps=jumps, now=now):
            """The clock is read before and after a piece: each piece takes the next of `pieces`."""
            now[1] += 1
            now[0] += next(jumps) if now[1] % 2 == 0 else 0.0
            return now[0]

        measured, _ = jit_choice.measure(made.strategy, made.state, clock)
        assert [measured[jit][0] for jit in (False, True)] == pytest.approx(rates)
        assert next(jumps, None) is None


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
    assert host_device(device) == host
