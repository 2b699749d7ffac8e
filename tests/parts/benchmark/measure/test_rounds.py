"""What a benchmark times: just the steps asked for, on fakes by hand, and on steps of a known length."""

import json
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.build import prepare
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.state import TrainState
from crankshaft.engine.step.options import RunContext
from crankshaft.engine.strategies.replicated import Replicated
from crankshaft.parts.benchmark.measure import rounds
from crankshaft.parts.benchmark.measure.rounds import Length, warm_up
from tests.launch.line import Line
from tests.parts.benchmark.measure.fakes import Clock, FakeProgram, FakeStrategy

pytestmark = pytest.mark.thorough


def test_warm_up_is_timed_apart():
    clock, program = Clock(), FakeProgram()
    compiling = [20.0]
    strategy = FakeStrategy(program, [1, 8, 16], lambda steps: clock.advance(compiling.pop() if compiling else steps))
    found = rounds.run(strategy, program, Length(32), {}, clock)
    assert found["wall_seconds"] == 32.0
    assert found["step_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert found["compile_seconds"] == 20.0 + 8 + 3 * 16  # until two calls in a row grow no more
    assert program.step == 1 + 8 + 3 * 16 + 32


def test_devices_are_awaited_at_both_ends_and_never_inside():
    clock, program = Clock(), FakeProgram()
    strategy = FakeStrategy(program, [4], lambda steps: clock.advance(1.0), wait=lambda: clock.advance(10.0))
    found = rounds.run(strategy, program, Length(12), {}, clock)
    assert [sums.reads for sums in strategy.sums] == [1, 0, 1, 0, 0, 1]  # the first step is awaited too
    assert found["first_step_seconds"] == 11.0
    assert found["compile_seconds"] == 23.0
    assert found["wall_seconds"] == 13.0


def test_uneven_last_batch_counts_by_its_examples():
    # 20 examples in batches of 8: epochs of 8, 8 and 4.
    clock, program = Clock(), FakeProgram()
    strategy = FakeStrategy(program, [1], clock.advance, examples=20)
    timed, _ = rounds.timed_round(strategy, program, 7, clock)
    assert [call.examples for call in timed] == [8, 8, 4, 8, 8, 4, 8]


def test_rounds_of_seconds_take_as_many_steps_as_fill_them_at_the_rate_so_far():
    # A step takes 0.5 s in the warm-up and in the first round (of 8 s: 16 steps), 0.25 s after: the second round is
    # still of 16 steps, the third of 32.
    clock, program = Clock(), FakeProgram()
    told = []

    def work(steps):
        clock.advance(steps * (0.5 if len(told) < 1 else 0.25))

    strategy = FakeStrategy(program, [4], work)
    length = Length(seconds=8.0, rounds=3)
    found = rounds.run(
        strategy, program, length, {}, clock, lambda number, totals: told.append((number, totals["steps"]))
    )
    assert told == [(1, 16), (2, 16), (3, 32)]
    assert [each["steps"] for each in found["rounds"]] == [16, 16, 32]
    assert [each["wall_seconds"] for each in found["rounds"]] == [8.0, 4.0, 8.0]
    assert [each["steps_per_sec"] for each in found["rounds"]] == [2.0, 4.0, 4.0]
    assert found["steps_per_sec"] == 64 / 20.0  # over all rounds
    assert found["calls"]["round"] == [0] * 4 + [1] * 4 + [2] * 8
    assert found["calls"]["seconds"] == [2.0] * 4 + [1.0] * 12
    assert found["calls"]["reduce_seconds"] is None


def test_exactly_the_steps_asked_for_are_timed_and_the_report_has_the_promised_keys():
    program = FakeProgram()
    strategy = FakeStrategy(program, [7], lambda steps: time.sleep(1e-4))
    found = rounds.run(strategy, program, Length(30), {"HOME": "x"})
    assert found["steps"] == 30
    assert strategy.lengths[-5:] == [7, 7, 7, 7, 2]
    promised = "examples_per_sec steps_per_sec wall_seconds step_ms mean stderr jitter input_wait_fraction"
    promised = {*promised.split(), "steps", "train", "compile_seconds", "peak_rss_mb", "environment", "rounds", "calls"}
    promised |= {"first_step_seconds", "device_peak_mb", "reduce_fraction", "interval", "warnings", "noise"}
    assert set(json.loads(json.dumps(found, allow_nan=False))) == promised
    assert found["train"] == {"loss": 0.5, "unseen": None}


def ready(trainer):
    """A strategy of one device that is about to train on 20 points in batches of 8, and its state."""
    strategy = Replicated("one_device", tf.distribute.OneDeviceStrategy("CPU:0"))
    x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    with strategy.scope():
        state = TrainState(prepare(trainer, RunContext(example=(x[:1], x[:1, 0]))))
        state.build()
    state.jit = False
    strategy.bind(state, strategy.feed(ArraySource((x, 2 * x[:, 0])), 8, seed=0))
    return strategy, state


def test_real_strategy_goes_on_from_its_step_and_counts_every_example():
    strategy, state = ready(Line())
    found = rounds.run(strategy, strategy.training, Length(30), {})
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
    strategy, _ = ready(Asleep())
    found = rounds.run(strategy, strategy.training, Length(3, rounds=2), {})
    ended = time.perf_counter()
    (_, warm), *slept = strategy.state.trainer.slept[-7:]
    asleep = sum(end - start for start, end in slept)
    assert asleep <= found["wall_seconds"] <= ended - warm
    assert found["steps_per_sec"] == pytest.approx(6 / found["wall_seconds"])
    assert found["examples_per_sec"] == pytest.approx(40 / found["wall_seconds"])
    assert 20 <= found["step_ms"]["p50"] <= 1e3 * found["wall_seconds"]
    assert len(found["rounds"]) == 2


# -- the warm-up -------------------------------------------------------------------------------------------------------


def test_warm_up_ends_for_calls_that_never_settle():
    program = FakeProgram()
    strategy = FakeStrategy(program, [2**n for n in range(60)], lambda steps: None)
    warm_up(strategy, program, Length(1 << 62))
    assert len(strategy.lengths) < 60


def test_steps_still_under_way_after_the_warm_up_are_ended_before_the_first_round():
    program, clock = FakeProgram(), Clock()

    class Ahead(FakeStrategy):
        """Has steps open until it is asked for the last one alone, as parameter servers have."""

        in_step = False

        def run(self, program, limit):
            self.in_step = limit == 1
            return super().run(program, limit)

    strategy = Ahead(program, [4], clock.advance)
    rounds.run(strategy, program, Length(8), {}, clock)
    assert strategy.lengths == [4, 4, 4, 1, 4, 4]


def test_replicas_that_sync_now_and_then_are_timed_in_whole_sync_periods():
    clock, program = Clock(), FakeProgram()
    began = []

    class Syncing(FakeStrategy):
        """Replicas meet at each fourth step, and where a call was asked to end."""

        sync_period_steps = 4
        in_step = False

        def run(self, program, limit):
            began.append((program.step, limit))
            result = super().run(program, limit)
            self.in_step = result.steps == limit or program.step % 4 == 0
            return result

    # Three calls of five steps warm up, and one of one step, a tenth of a round, finds the same rate; two of one step
    # end within a sync period; two more end it. A round of 10 s is of 10 steps, so of 8 or 12.
    strategy = Syncing(program, [5], clock.advance)
    found = rounds.run(strategy, program, Length(seconds=10.0), {}, clock)
    assert [step for step, _ in began[:7]] == [0, 5, 10, 15, 16, 17, 18]
    assert [limit for _, limit in began[3:7]] == [1, 1, 1, 2]
    assert [each["steps"] for each in found["rounds"]] == [8]
    assert began[7:] == [(20, 8), (25, 3)]
    assert not any(line.startswith("short rounds") for line in found["warnings"])


def test_rounds_shorter_than_until_replicas_meet_are_timed_and_said_to_be():
    clock, program = Clock(), FakeProgram()
    strategy = FakeStrategy(program, [4], clock.advance)
    strategy.sync_period_steps = 100
    found = rounds.run(strategy, program, Length(seconds=10.0, rounds=2), {}, clock)
    assert [each["steps"] for each in found["rounds"]] == [10, 10]
    assert program.step < 100  # nothing waits for replicas to meet
    assert found["warnings"][0].startswith("short rounds: 10 steps, where replicas meet each 100")


def test_rate_is_that_of_a_trial_where_calls_of_the_warm_up_compile():
    # The first call takes 20 s a step, and so does the second: rates of 0.05 a second, where others are of 1.
    clock, program = Clock(), FakeProgram()
    compiling = [20.0, 20.0, 20.0]
    strategy = FakeStrategy(program, [1], lambda steps: clock.advance(compiling.pop() if compiling else steps))
    found = rounds.run(strategy, program, Length(seconds=30.0), {}, clock)
    assert found["steps"] == 30
    assert found["wall_seconds"] == 30.0


@pytest.mark.parametrize("compilable", [True, False])
def test_smaller_last_batch_is_compiled_before_the_first_round(compilable):
    # 76 examples in batches of 8: an epoch's tenth batch has 4. The three calls of the warm-up leave it ahead.
    program = FakeProgram()
    began = []

    class Recording(FakeStrategy):
        def run(self, program, limit):
            began.append(program.step)
            return super().run(program, limit)

    strategy = Recording(program, [1], lambda steps: time.sleep(1e-5), examples=76)
    program.feed = program.feed._replace(compilable=compilable)
    rounds.run(strategy, program, Length(6), {})
    assert began == [0, 1, 2, *([9] if compilable else []), *range(program.step - 6, program.step)]
    assert program.step == (16 if compilable else 9)
