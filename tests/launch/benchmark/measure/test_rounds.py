"""What a benchmark times: just the steps asked for, on fakes by hand, and on steps of a known length."""

import json
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import StepOptions, Trainer, mean
from crankshaft.engine.build import prepare
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.state import TrainState
from crankshaft.engine.strategies.replicated import Replicated
from crankshaft.launch.benchmark.measure import rounds
from crankshaft.launch.benchmark.measure.length import Length
from crankshaft.launch.benchmark.measure.rounds import Watcher
from tests.launch.benchmark.measure.fakes import Clock, FakeStrategy, State


def test_warm_up_is_timed_apart():
    clock, state = Clock(), State()
    compiling = [20.0]
    strategy = FakeStrategy(state, [1, 8, 16], lambda steps: clock.advance(compiling.pop() if compiling else steps))
    found = rounds.run(strategy, state, Length(32), {}, clock)
    assert found["wall_seconds"] == 32.0
    assert found["step_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert found["compile_seconds"] == 20.0 + 8 + 3 * 16  # until two calls in a row grow no more
    assert state.step == 1 + 8 + 3 * 16 + 32


def test_devices_are_awaited_at_both_ends_and_never_inside():
    clock, state = Clock(), State()
    strategy = FakeStrategy(state, [4], lambda steps: clock.advance(1.0), wait=lambda: clock.advance(10.0))
    found = rounds.run(strategy, state, Length(12), {}, clock)
    assert [sums.reads for sums in strategy.sums] == [1, 0, 1, 0, 0, 1]  # the first step is awaited too
    assert found["first_step_seconds"] == 11.0
    assert found["compile_seconds"] == 23.0
    assert found["wall_seconds"] == 13.0


def test_exactly_the_steps_asked_for_are_timed():
    state = State()
    strategy = FakeStrategy(state, [7], lambda steps: time.sleep(1e-4))
    found = rounds.run(strategy, state, Length(30), {})
    assert found["steps"] == 30
    assert strategy.lengths[-5:] == [7, 7, 7, 7, 2]


def test_whoever_looks_on_is_told_of_each_call_within_its_round():
    clock, state, told = Clock(), State(), []
    strategy = FakeStrategy(state, [4], clock.advance)
    length = Length(steps=10, rounds=2)
    watcher = Watcher(at_call=lambda steps, seconds: told.append((steps, seconds)))
    rounds.run(strategy, state, length, {}, clock, watcher)
    assert told == [(4, 4.0), (8, 8.0), (10, 10.0)] * 2


def test_uneven_last_batch_counts_by_its_examples():
    # 20 examples in batches of 8: epochs of 8, 8 and 4.
    clock, state = Clock(), State()
    strategy = FakeStrategy(state, [1], clock.advance, examples=20)
    timed, _ = rounds.timed_round(strategy, state, 7, clock)
    assert [call.examples for call in timed] == [8, 8, 4, 8, 8, 4, 8]


@pytest.mark.parametrize(
    ("length", "line"),
    [
        (Length(0), "benchmark_steps=0 leaves nothing to time; use 1 or more"),
        (Length(seconds=0.0), "benchmark_seconds=0.0 leaves nothing to time; use more than 0"),
        (Length(), "benchmark_seconds=None leaves nothing to time; use more than 0"),
        (Length(1, rounds=0), "benchmark_rounds=0 leaves nothing to time; use 1 or more"),
    ],
)
def test_no_steps_are_refused(length, line):
    with pytest.raises(ValueError, match=line):
        rounds.run(None, State(), length, {})


def test_rounds_of_seconds_take_as_many_steps_as_fill_them_at_the_rate_so_far():
    # A step takes 0.5 s in the warm-up and in the first round (of 8 s: 16 steps), 0.25 s after: the second round is
    # still of 16 steps, the third of 32.
    clock, state = Clock(), State()
    told = []

    def work(steps):
        clock.advance(steps * (0.5 if len(told) < 2 else 0.25))

    strategy = FakeStrategy(state, [4], work)
    found = rounds.run(
        strategy,
        state,
        Length(seconds=8.0, rounds=3),
        {},
        clock,
        Watcher(lambda done, next_steps: told.append((len(done), next_steps))),
    )
    assert told == [(0, 16), (1, 16), (2, 32), (3, 32)]
    assert [each["steps"] for each in found["rounds"]] == [16, 16, 32]
    assert [each["wall_seconds"] for each in found["rounds"]] == [8.0, 4.0, 8.0]
    assert [each["steps_per_sec"] for each in found["rounds"]] == [2.0, 4.0, 4.0]
    assert found["steps_per_sec"] == 64 / 20.0  # over all rounds
    assert found["calls"]["round"] == [0] * 4 + [1] * 4 + [2] * 8
    assert found["calls"]["seconds"] == [2.0] * 4 + [1.0] * 12
    assert found["calls"]["reduce_seconds"] is None


def test_report_is_plain_json_with_the_promised_keys():
    state = State()
    found = rounds.run(FakeStrategy(state, [4], lambda steps: time.sleep(1e-4)), state, Length(12), {"HOME": "x"})
    promised = "examples_per_sec steps_per_sec wall_seconds step_ms mean stderr jitter input_wait_fraction"
    promised = {*promised.split(), "steps", "train", "compile_seconds", "peak_rss_mb", "environment", "rounds", "calls"}
    promised |= {"first_step_seconds", "device_peak_mb", "reduce_fraction", "interval", "warnings", "noise"}
    assert set(json.loads(json.dumps(found, allow_nan=False))) == promised
    assert found["train"] == {"loss": 0.5}


class Line(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


def ready(trainer):
    """A strategy of one device that is about to train on 20 points in batches of 8, and its state."""
    strategy = Replicated("one_device", tf.distribute.OneDeviceStrategy("CPU:0"))
    x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    with strategy.scope():
        state = TrainState(trainer)
        prepare(state.trainer, StepOptions(), Reduction(), (x[:1], x[:1, 0]))
        state.build()
    state.jit = False
    strategy.bind(state, strategy.feed((x, 2 * x[:, 0]), 8, seed=0))
    return strategy, state


def test_real_strategy_goes_on_from_its_step_and_counts_every_example():
    strategy, state = ready(Line())
    found = rounds.run(strategy, state, Length(30), {})
    assert found["steps"] == 30
    assert state.step > 30  # the warm-up's steps are trained too
    assert found["examples_per_sec"] * found["wall_seconds"] == pytest.approx(200)  # ten epochs, wherever they began
    assert 0 < found["train"]["loss"] < 10
    assert found["compile_seconds"] > found["first_step_seconds"] > 0


class Asleep(Line):
    """Each step sleeps, and notes from when to when it did: a busy machine wakes it late."""

    def __init__(self):
        super().__init__()
        self.slept = []

    def loss(self, outputs, batch):
        with tf.control_dependencies([tf.py_function(self._sleep, [], [])]):
            return super().loss(tf.identity(outputs), batch)

    def _sleep(self):
        before = time.perf_counter()
        time.sleep(0.02)
        self.slept.append((before, time.perf_counter()))


def test_what_is_timed_holds_each_steps_sleep_and_nothing_before_or_after():
    strategy, state = ready(Asleep())
    found = rounds.run(strategy, state, Length(3, rounds=2), {})
    ended = time.perf_counter()
    (_, warm), *slept = state.trainer.slept[-7:]
    asleep = sum(end - start for start, end in slept)
    assert asleep <= found["wall_seconds"] <= ended - warm
    assert found["steps_per_sec"] == pytest.approx(6 / found["wall_seconds"])
    assert found["examples_per_sec"] == pytest.approx(40 / found["wall_seconds"])
    assert 20 <= found["step_ms"]["p50"] <= 1e3 * found["wall_seconds"]
    assert len(found["rounds"]) == 2
