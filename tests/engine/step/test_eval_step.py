"""What a step knows of where it is, in evaluation as in training."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Mean, step_context
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

POINTS = np.zeros((20, 3), np.float32), np.zeros(20, np.float32)


class Placed(Squares):
    """Measures where each example is computed: the step, the replica, and a sample."""

    def metrics(self, outputs, batch):
        sample = tf.random.stateless_uniform([], step_context().seed())
        here = {
            "step": step_context().step,
            "replica": step_context().replica,
            "sample": sample,
            "square": tf.square(sample),
        }
        return {name: Mean(tf.cast(value, tf.float32), tf.ones([])) for name, value in here.items()}


@pytest.mark.parametrize(("replicas", "is_dataset"), [(1, False), (2, True)])
def test_step_replica_and_seed_hold_in_evaluation(bench, replicas, is_dataset):
    data = tf.data.Dataset.from_tensor_slices(POINTS) if is_dataset else POINTS
    made = bench(Placed(), POINTS, 8, replicas, eval_source=data)
    made.strategy.evaluation.trace()
    found = [made.strategy.evaluate().means()]
    while made.state.step < 5:
        made.train(made.state.step + 1)
        found.append(made.strategy.evaluate().means())
    assert [each["step"] for each in found] == [0, 1, 2, 3, 4, 5]
    assert {each["replica"] for each in found} == {(replicas - 1) / 2}
    samples = {each["sample"] for each in found}
    assert len(samples) == 1  # each evaluation samples the same
    assert found[0]["square"] - found[0]["sample"] ** 2 > 1e-3  # and each of its batches another


def test_an_evaluation_that_ended_in_the_middle_begins_again(bench):
    made = bench(Placed(), POINTS, 8, eval_source=POINTS)
    program, whole = made.strategy.evaluation, made.strategy.evaluate().values()
    made.strategy.run(program, 1)
    assert made.strategy.evaluate().values() == whole
    assert program.step == program.feed.order.steps_per_epoch


def test_an_evaluation_is_traced_once(bench):
    """Tracing several of its steps, as a long training does, takes longer than it saves."""
    traced = []

    class Traced(Squares):
        def metrics(self, outputs, batch):
            traced.append(outputs)
            return {}

    made = bench(Traced(), POINTS, 2, eval_source=POINTS)
    made.strategy.evaluate()
    assert len(traced) == 1


def test_evaluation_samples_what_training_does_not(bench):
    made = bench(Placed(), POINTS, 20, eval_source=POINTS, shuffle=False)
    trained = {made.train(step + 1)["sample"][0] for step in range(4)}
    assert len(trained) == 4
    assert made.strategy.evaluate().means()["sample"] not in trained
