"""An evaluation by any strategy: each batch once, in calls of a pace, interrupted between two, outputs in order."""

import types

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.metrics.sums import LoopSums, SumSpec
from crankshaft.engine.strategies import program as programs
from crankshaft.engine.strategies.base import Interrupted, Strategy
from crankshaft.engine.strategies.loop_result import LoopResult
from crankshaft.engine.strategies.pace import Pace

BATCHES, BATCH = 10, 4


class Counting(Strategy):
    """Its batch n sums to n, and returns n of each of its four examples, the last first; notes the calls' lengths."""

    name = "counting"
    feed = program = None

    def __init__(self):
        self.calls = []

    def run(self, program, limit):
        steps = range(program.step, program.step + limit)
        program.advance(limit)
        self.calls.append(limit)
        sums = LoopSums([SumSpec("sum", Mean)], np.array([[sum(n % BATCHES for n in steps), limit]], np.float64))
        pieces = [[np.full(BATCH, n), np.full((BATCH, 2), n, np.float32)] for n in reversed(steps)]
        return LoopResult(sums, limit, 0.0, predictions=pieces if program.prediction_specs != () else ())


@pytest.fixture
def strategy():
    return Counting()


@pytest.fixture
def program():
    order = types.SimpleNamespace(steps_per_epoch=BATCHES, batch_size=BATCH)
    made = programs.Program(types.SimpleNamespace(order=order))
    made.evaluation_pace = Pace(4)
    return made


def test_each_batch_counts_once_also_after_one_of_some_batches(strategy, program):
    seen = []

    def between(done, total, sums):
        seen.append((done, total, sums.values().get("sum", Mean(0.0, 0.0)).count))

    assert strategy.evaluate(program, between).values() == {"sum": (45.0, 10.0)}
    assert seen == [(0, 10, 0), (4, 10, 4), (8, 10, 8), (10, 10, 10)]
    assert strategy.evaluate(program, batches=3).values() == {"sum": (3.0, 3.0)}
    assert strategy.evaluate(program, batches=30).values() == {"sum": (45.0, 10.0)}
    assert strategy.calls == [4, 4, 2, 3, 4, 4, 2]
    assert program.step == BATCHES  # from its first batch again, as it was not at the end
    assert strategy.evaluate(program, lambda done, *_: 1 if done else 3).values() == {"sum": (45.0, 10.0)}
    assert strategy.calls[7:] == [3] + [1] * 7
    assert program.step == 2 * BATCHES  # like epochs


def test_it_ends_between_two_calls_and_begins_again(strategy, program):
    reasons = iter([None, None, "SIGTERM"])
    with pytest.raises(Interrupted, match="SIGTERM"):
        strategy.evaluate(program, ends=lambda: next(reasons))
    assert strategy.calls == [4, 4]
    assert strategy.evaluate(program).values() == {"sum": (45.0, 10.0)}


def test_the_chiefs_pace_and_any_process_reason_are_everyones(strategy, program):
    strategy.host_names, others = ("first", "second"), [2 * 3, 2 * 3 + 1]
    strategy.exchange = lambda value: [others.pop(0), value]
    with pytest.raises(Interrupted) as caught:
        strategy.evaluate(program)
    assert (strategy.calls, caught.value.args) == ([3], (None,))


@pytest.mark.parametrize(
    ("spec", "num_bytes", "kept"),
    [
        (tf.TensorSpec([None, 2]), 3 * BATCH * 8, [3, 3, 3, 1]),
        (tf.TensorSpec([None, 2]), 3 * BATCH * 8 - 1, [2] * 5),
        (tf.TensorSpec([None, 2]), 1, [1] * 10),
        (tf.TensorSpec([None, 0]), 1, [10]),
        (tf.TensorSpec([None, 2], tf.string), 5 * BATCH * 2, [5, 5]),
        (tf.TensorSpec([None, None]), 1, [10]),
        (None, 1 << 30, [1] * 10),
    ],
)
def test_outputs_are_kept_in_order_so_many_at_once_as_take_little_memory(
    strategy, program, monkeypatch, spec, num_bytes, kept
):
    monkeypatch.setattr(programs, "_PREDICTIONS_BYTES", num_bytes)
    program.prediction_specs, pieces = spec, []
    strategy.evaluate(program, keep=pieces.append)
    assert [len(piece) // BATCH for piece in pieces] == kept
    np.testing.assert_array_equal(np.concatenate(pieces)[:, 0], np.repeat(np.arange(BATCHES), BATCH))


@pytest.mark.parametrize(("shape", "most"), [([None, 2], np.inf), ([None, None], 1)])
def test_a_call_of_outputs_of_unknown_size_has_one_step(program, shape, most):
    program.prediction_specs = {"a": tf.TensorSpec([None]), "b": tf.TensorSpec(shape)}
    assert program.steps_per_call == most


@pytest.mark.parametrize(("compiles", "steps"), [(False, 8), (True, 1)])
def test_calls_are_paced_by_their_time_but_for_a_compilations(strategy, program, compiles, steps):
    program.evaluation_pace, run = Pace(target_seconds=1e9), strategy.run
    strategy.run = lambda *how: run(*how)._replace(compiles=compiles)
    strategy.evaluate(program, batches=1)
    assert program.evaluation_pace.steps == steps
