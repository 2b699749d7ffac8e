"""Benchmark mode's figures: by hand on known series, and on steps of a known length."""

import json
import math
import time
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from engine import StepOptions, Trainer, environment, mean
from engine.benchmark import rounds
from engine.benchmark.rounds import Length, Watcher
from engine.benchmark.statistics import Call, summarize
from engine.metrics import Mean
from engine.order import Order
from engine.reduction import Reduction
from engine.state import TrainState
from engine.strategies.inner_loop import LoopResult
from engine.strategies.replicated import Replicated


class Awaited:
    """Stands for the sums of a call that devices are still at work on: reading takes what they still need."""

    def __init__(self, wait=lambda: None, loss=0.5):
        self.reads = 0
        self._wait = wait
        self._loss = loss

    def read(self):
        self.reads += 1
        self._wait()
        return {"loss": Mean(self._loss * 8, 8.0), "unseen": Mean(0.0, 0.0)}


class State:
    step = 0

    def advance(self, steps):
        self.step += steps


class Feed(NamedTuple):
    random_access: bool


class FakeStrategy:
    """Calls of given lengths, in steps, over and over; `work(steps)` is what each one takes."""

    in_step = True
    round_steps = 1

    def __init__(self, state, lengths, work, *, examples=1 << 20, wait=lambda: None, input_seconds=0.0):
        self.train_order = Order(examples, batch_size=8, block_steps=4)
        self.train_feed = Feed(random_access=True)
        self.sums = []
        self.lengths = []
        self._state = state
        self._ahead = list(lengths)
        self._work = work
        self._wait = wait
        self._input_seconds = input_seconds

    def run_train_steps(self, limit):
        steps = min(limit, self._ahead.pop(0) if len(self._ahead) > 1 else self._ahead[0])
        self._work(steps)
        self._state.step += steps
        self.lengths.append(steps)
        self.sums.append(Awaited(self._wait))
        return LoopResult(self.sums[-1], steps, self._input_seconds)

    def exchange(self, value):
        return [value]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class Figures(NamedTuple):
    wall_seconds: float
    examples_per_sec: float
    p50: float
    p90: float
    p99: float
    mean: float
    stderr: float
    jitter: float


def figures(calls):
    found = summarize(calls)
    return Figures(**found["step_ms"], **{name: found[name] for name in Figures._fields if name in found})


def calls(*series):
    """Calls of (steps, seconds), with 8 examples a step."""
    return [Call(steps, 8 * steps, seconds, 0.0) for steps, seconds in series]


# -- known series -----------------------------------------------------------------------------------------------------


def test_constant_series_has_no_spread():
    # 20 steps in 0.5 s: 25 ms a step, 320 examples/s.
    expected = Figures(5.0, 320.0, 25.0, 25.0, 25.0, 320.0, 0.0, 0.0)
    assert figures(calls(*[(20, 0.5)] * 10)) == pytest.approx(expected)


def test_drifting_series_by_hand():
    # 10 steps a call, step times 10, 20, 25, 40 and 50 ms: rates 800, 400, 320, 200 and 160 examples/s.
    found = figures(calls((10, 0.10), (10, 0.20), (10, 0.25), (10, 0.40), (10, 0.50)))
    expected = Figures(
        wall_seconds=1.45,
        examples_per_sec=400 / 1.45,
        p50=25.0,  # of 50 steps, the 25th
        p90=50.0,  # the 45th: 40 steps take up to 40 ms
        p99=50.0,
        mean=376.0,  # 1880 / 5
        # deviations 424, 24, -56, -176, -216; their squares add up to 261,120; / 4 = 65,280, / 5, root
        stderr=math.sqrt(13_056),
        jitter=1.4826 * 120,  # from the median 320: 480, 80, 0, 120, 160
    )
    assert found == pytest.approx(expected)


def test_bimodal_series_by_hand():
    # Seven calls at 5 ms a step (1600 examples/s) and three at 20 ms (400 examples/s), 10 steps each.
    found = figures(calls(*[(10, 0.05)] * 7, *[(10, 0.20)] * 3))
    # mean 0.7 * 1600 + 0.3 * 400; squared deviations 7 * 360^2 + 3 * 840^2 = 3,024,000; / 9 = 336,000; / 10
    expected = Figures(0.95, 800 / 0.95, 5.0, 20.0, 20.0, 1240.0, math.sqrt(33_600), 0.0)
    assert found == pytest.approx(expected)


def test_calls_weigh_by_their_steps():
    # 90 steps at 1 ms (8000 examples/s) and 10 at 3 ms (8000 / 3): a share of 0.9 of all steps is within 1 ms.
    found = figures(calls((90, 0.090), (10, 0.030)))
    mean = 0.9 * 8000 + 0.1 * 8000 / 3
    effective = 100**2 / (90**2 + 10**2)
    variance = 0.9 * (8000 - mean) ** 2 + 0.1 * (8000 / 3 - mean) ** 2
    expected = Figures(0.12, 800 / 0.12, 1.0, 1.0, 3.0, mean, math.sqrt(variance / (effective - 1)), 0.0)
    assert found == pytest.approx(expected)


def test_one_call_has_no_standard_error():
    assert summarize(calls((5, 1.0)))["stderr"] is None


def test_input_wait_is_a_share_of_all_time():
    series = [Call(1, 8, 1.0, 0.25), Call(1, 8, 3.0, 0.75), Call(1, 8, 1.0, 0.0)]
    assert summarize(series)["input_wait_fraction"] == pytest.approx(0.2)


# -- the timed span ---------------------------------------------------------------------------------------------------


def test_warm_up_is_timed_apart():
    clock, state = Clock(), State()
    compiling = [20.0]
    strategy = FakeStrategy(state, [1, 8, 16], lambda steps: clock.advance(compiling.pop() if compiling else steps))
    found = rounds.run(strategy, state, Length(32), {}, clock)
    assert found["wall_seconds"] == 32.0
    assert found["step_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert found["compile_seconds"] == 20.0 + 8 + 3 * 16  # until two calls in a row grow no more
    assert state.step == 1 + 8 + 3 * 16 + 32


def test_warm_up_ends_for_calls_that_never_settle():
    state = State()
    strategy = FakeStrategy(state, [2**n for n in range(60)], lambda steps: None)
    rounds.warm_up(strategy, state, 1 << 62)
    assert len(strategy.lengths) < 60


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


def test_steps_still_under_way_after_the_warm_up_are_ended_before_the_first_round():
    state, clock = State(), Clock()

    class Ahead(FakeStrategy):
        """Has steps open until it is asked for the last one alone, as parameter servers have."""

        in_step = False

        def run_train_steps(self, limit):
            self.in_step = limit == 1
            return super().run_train_steps(limit)

    strategy = Ahead(state, [4], clock.advance)
    rounds.run(strategy, state, Length(8), {}, clock)
    assert strategy.lengths == [4, 4, 4, 1, 4, 4]


def test_replicas_that_meet_now_and_then_are_timed_in_whole_rounds_of_theirs():
    clock, state = Clock(), State()
    began = []

    class Meeting(FakeStrategy):
        """Replicas meet at each fourth step, and where a call was asked to end."""

        round_steps = 4
        in_step = False

        def run_train_steps(self, limit):
            began.append((state.step, limit))
            result = super().run_train_steps(limit)
            self.in_step = result.steps == limit or state.step % 4 == 0
            return result

    # Three calls of five steps warm up; two of one step end within a round; three more end it. A round of 10 s is of 10
    # steps, so of 8 or 12.
    strategy = Meeting(state, [5], clock.advance)
    found = rounds.run(strategy, state, Length(seconds=10.0), {}, clock)
    assert [step for step, _ in began[:6]] == [0, 5, 10, 15, 16, 17]
    assert began[5][1] == 3
    assert [each["steps"] for each in found["rounds"]] == [8]
    assert began[6:] == [(20, 8), (25, 3)]


@pytest.mark.parametrize("random_access", [True, False])
def test_smaller_last_batch_is_compiled_before_the_first_round(random_access):
    # 76 examples in batches of 8: an epoch's tenth batch has 4. The three calls of the warm-up leave it ahead.
    state = State()
    began = []

    class Recording(FakeStrategy):
        def run_train_steps(self, limit):
            began.append(state.step)
            return super().run_train_steps(limit)

    strategy = Recording(state, [1], lambda steps: time.sleep(1e-5), examples=76)
    strategy.train_feed = Feed(random_access)
    rounds.run(strategy, state, Length(6), {})
    assert began == [0, 1, 2, *([9] if random_access else []), *range(state.step - 6, state.step)]
    assert state.step == (16 if random_access else 9)


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
        state.trainer.prepare(StepOptions(), Reduction(), (x[:1], x[:1, 0]))
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
    """Each step sleeps, and notes for how long it did: that a busy machine wakes it late is not the benchmark's error.

    So long that what such a machine adds to a step beside, some milliseconds, is under 5 %.
    """

    seconds = 0.2

    def __init__(self):
        super().__init__()
        self.slept = []

    def loss(self, outputs, batch):
        with tf.control_dependencies([tf.py_function(self._sleep, [], [])]):
            return super().loss(tf.identity(outputs), batch)

    def _sleep(self):
        before = time.perf_counter()
        time.sleep(self.seconds)
        self.slept.append(time.perf_counter() - before)


def test_sleeping_step_is_found_within_five_percent():
    strategy, state = ready(Asleep())
    found = rounds.run(strategy, state, Length(3, rounds=2), {})
    slept = state.trainer.slept[-6:]
    assert min(slept) >= Asleep.seconds
    # Within 5 %; on a machine of which others take a share, as the result itself says, what is no sleep takes longer.
    near = 0.05 / (1 - found["noise"]["lost_share"])
    assert found["wall_seconds"] == pytest.approx(sum(slept), rel=near)
    assert found["steps_per_sec"] == pytest.approx(6 / sum(slept), rel=near)
    assert found["examples_per_sec"] == pytest.approx(40 / sum(slept), rel=near)
    assert found["step_ms"]["p50"] == pytest.approx(1e3 * np.median(slept), rel=near)
    assert len(found["rounds"]) == 2


# -- the machine ------------------------------------------------------------------------------------------------------


def test_environment_names_versions_and_the_flags_that_tune():
    found = environment.describe({"XLA_FLAGS": "--xla_a", "TF_ENABLE_ONEDNN_OPTS": "0", "HOME": "x", "SECRET": "y"})
    assert found["versions"]["tensorflow"] == tf.__version__
    assert found["flags"] == {"TF_ENABLE_ONEDNN_OPTS": "0", "XLA_FLAGS": "--xla_a"}
    assert found["usable_cores"] > 0
    assert found["cpu"]


def test_peak_memory_follows_an_allocation():
    before = environment.peak_rss_mb()
    block = bytearray(b"x") * (int(before + 64) << 20)  # more than the process has held so far
    assert environment.peak_rss_mb() >= len(block) / 2**20 > before


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/../host", {"cpu.max": "25000 100000"}, 0.25),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "200000"}, 0.25),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "200000"}, None),
        ("0::/", {}, None),
    ],
)
def test_cpu_quota_bounds_usable_cores(tmp_path, membership, files, cores):
    proc, cgroups = tmp_path / "proc", tmp_path / "fs"
    for path, text in {"proc/self/cgroup": membership, **{f"fs/{name}": text for name, text in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n", encoding="utf-8")
    affinity = environment.usable_cores(tmp_path / "none", cgroups)
    assert environment.usable_cores(proc, cgroups) == (cores or affinity)
