"""A sixth strategy, written here from its contract alone, registered, and trained with as any other."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.data.feeds import Devices, ResidentFeed
from crankshaft.engine.data.order import Order
from crankshaft.engine.hooks import every_epoch
from crankshaft.engine.internals.errors import UsageError
from crankshaft.engine.metrics.sums import LoopSums, Sums, row_specs, stack
from crankshaft.engine.step.runner import StepRunner
from crankshaft.engine.strategies import devices, register
from crankshaft.engine.strategies.base import Strategy
from crankshaft.engine.strategies.inner_loop import LoopResult

FEATURES = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 3
ASKED = {"global_batch_size": 16, "train_epochs": 4, "learning_rate": 0.1, "jit": "off", "progress": "off"}


class StepByStep(Strategy):
    """One device, to which Python gives each step by itself: no loop is compiled."""

    name = "step_by_step"

    def __init__(self, options):
        self.distribution = tf.distribute.OneDeviceStrategy("CPU:0")

    def feed(self, split, global_batch_size, seed):
        return ResidentFeed(Devices(self.distribution), split, Order(len(split), global_batch_size, 1, seed))

    def bind(self, state, train_feed=None, eval_feed=None):
        runner, now = StepRunner(state.trainer), tf.constant(True)
        self.state, self.train_feed, self.eval_feed = state, train_feed, eval_feed

        def train_step(batch, step):
            return runner.train_step(batch, step, now)

        def eval_step(batch, step):
            return runner.eval_step(batch, step, tf.identity(state.step_variable), now)

        self.train_step = self._compiled(train_feed, train_step)
        self.eval_step = self._compiled(eval_feed, eval_step)

    def _compiled(self, feed, step):
        specs = []

        @tf.function(autograph=False)
        def run(operands, place, number):
            def on_replica(*batch):
                metrics = step(feed.batch(*batch), number)
                specs[:] = row_specs(metrics)
                return stack(metrics, tf.float64)

            return self.distribution.run(on_replica, args=feed.next_operands(operands, place))

        def call(number):
            operands, place, _ = feed.take(number, 1)
            return LoopSums(specs, run(operands, tf.constant(place, tf.int64), tf.constant(number, tf.int64)))

        return call

    def run_train_steps(self, limit):
        sums = self.train_step(self.state.step)
        self.state.advance(1)
        return LoopResult(sums, 1, 0.0)

    def evaluate(self):
        sums = Sums()
        for step in range(self.eval_feed.order.steps_per_epoch):
            sums.add(self.eval_step(step))
        return sums


class Plane(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs[:, 0] - batch[1]))


def data():
    return (FEATURES, LABELS), (FEATURES[:10], LABELS[:10])


@pytest.fixture(autouse=True)
def _registered():
    register("step_by_step", StepByStep)


def test_it_trains_evaluates_and_resumes_as_one_device_does(tmp_path):
    epochs = []
    hook = every_epoch(lambda status, metrics: epochs.append(metrics["loss"]))
    one = crankshaft.run(Plane, data=data, **ASKED)
    first = crankshaft.run(
        Plane, data=data, hooks=[hook], strategy="step_by_step", run_dir=tmp_path, **{**ASKED, "train_epochs": 2}
    )
    assert (first.result["step"], first.result["strategy"]) == (6, "step_by_step")
    assert epochs[1] < 0.8 * epochs[0]
    rest = crankshaft.run(Plane, data=data, strategy="step_by_step", run_dir=tmp_path, **ASKED)
    assert rest.result["step"] == one.result["step"] == 12
    assert rest.result["eval"]["loss"] == pytest.approx(one.result["eval"]["loss"], rel=1e-5)  # float32's rounding
    for mine, theirs in zip(rest.model.get_weights(), one.model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"strategy": "step_by_stop"}, "strategy=step_by_stop is unknown; did you mean step_by_step?"),
        (
            {"strategy": "step_by_step", "mode": "benchmark"},
            "strategy=step_by_step can't be taken apart: StepByStep ",
        ),
        ({"strategy": "step_by_step", "jit": "on"}, "jit=on: strategy=step_by_step does not say how its steps are"),
    ],
)
def test_what_it_does_not_have_is_one_line(asked, says):
    with pytest.raises(crankshaft.UsageError, match=says.replace(".", r"\.")):
        crankshaft.run(Plane, data=data, **{**ASKED, **asked})


def test_a_name_that_is_taken_and_a_maker_of_something_else_are_refused():
    with pytest.raises(ValueError, match="the strategy mirrored comes with Crankshaft; register yours by another name"):
        register("mirrored", StepByStep)
    with pytest.raises(ValueError, match="'two words' is not a name of a strategy"):
        register("two words", StepByStep)
    register("step_by_step", lambda options: "none")
    with pytest.raises(UsageError, match="registered as the strategy step_by_step makes a str; make a Strategy"):
        devices.create("step_by_step")
