"""A strategy that starts its steps one by one, from its contract: python step_by_step.py --strategy=step_by_step

It compiles a single step of training or of evaluation, and not the loop around it. Runs on the host.
"""

import numpy as np
import tensorflow as tf

from crankshaft import Trainer, main, mean
from crankshaft.engine.data.feeds.blocks import Devices
from crankshaft.engine.data.feeds.resident_feed import ResidentFeed
from crankshaft.engine.data.order import Order
from crankshaft.engine.metrics.sums import LoopSums, stack, sum_specs
from crankshaft.engine.step.runner import StepRunner
from crankshaft.engine.strategies import register
from crankshaft.engine.strategies.base import Strategy
from crankshaft.engine.strategies.loop_result import LoopResult
from crankshaft.engine.strategies.program import Program


class Steps(Program):
    """A step of training or of evaluation, compiled, and not the loop around it."""

    def __init__(self, distribution, step, feed, state=None):
        super().__init__(feed, state)
        self.specs = []

        def on_replica(number, *operands):
            metrics = step(feed.batch(*operands), number)
            self.specs[:] = sum_specs(metrics)
            return stack(metrics, tf.float64)

        @tf.function(autograph=False)
        def run(operands, offset, number):
            return distribution.run(on_replica, args=(number, *feed.next_operands(operands, offset)))

        self.compiled = run

    def __call__(self):
        operands, offset, _ = self.feed.call_input(self.step, 1)
        return self.compiled(operands, tf.constant(offset, tf.int64), tf.constant(self.step, tf.int64))


class StepByStep(Strategy):
    name = "step_by_step"

    def __init__(self, options):
        self.distribution = tf.distribute.OneDeviceStrategy("CPU:0")

    def feed(self, split, global_batch_size, seed):
        return ResidentFeed(Devices(self.distribution), split, Order(len(split), global_batch_size, 1, seed))

    def program(self, step, feed, jit=False):
        runner, state, now = StepRunner(self.state.trainer), self.state, tf.constant(True)
        if step == "train":
            return Steps(self.distribution, lambda batch, number: runner.train_batch(batch, number, now), feed, state)

        def evaluate(batch, number):
            return runner.evaluate_batch(batch, feed.batch_number(number), state, compute=None, predicts=False)

        return Steps(self.distribution, evaluate, feed)

    def run(self, program, limit):
        sums = program()
        program.advance(1)
        return LoopResult(LoopSums(program.specs, sums), 1, 0.0)


class Plane(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1]))


def data():
    points = np.random.default_rng(0).normal(size=(1000, 3)).astype("float32")
    heights = points @ np.array([[1.0], [-2.0], [0.5]], "float32") + 3.0
    return (points[:800], heights[:800]), (points[800:], heights[800:])


register("step_by_step", StepByStep)
if __name__ == "__main__":
    main(Plane, data=data)
