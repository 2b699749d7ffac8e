"""How many steps a call takes: fitted to a length in time, fixed when asked, and never far ahead of the device."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.internals.tensorflow import timestamp
from crankshaft.engine.strategies.arrivals import Arrivals
from crankshaft.engine.strategies.loop_result import LoopResult, WorkerFigures
from crankshaft.engine.strategies.pace import Pace


class Device:
    """A loop of known cost on a clock of its own; notes how often each call's sums were read."""

    def __init__(self, seconds_a_call, seconds_a_step, block_steps=10**6):
        self.now = 0.0
        self.calls = []
        self.read = []
        self._costs = seconds_a_call, seconds_a_step
        self._block_steps = block_steps

    def clock(self):
        return self.now

    def slow_down(self, seconds_a_step):
        self._costs = self._costs[0], seconds_a_step

    def max_steps_per_call(self, step, limit):
        return min(limit, self._block_steps - step % self._block_steps)

    def __call__(self, step, limit):
        per_call, per_step = self._costs
        self.now += per_call + limit * per_step
        self.calls.append(limit)
        return LoopResult(_Sums(self, len(self.calls) - 1), limit, 0.0)


class _Sums:
    def __init__(self, device, number):
        self._device, self._number = device, number

    def read(self):
        self._device.read.append(self._number)


def call(pace, device, step, limit):
    began = pace.clock()
    result = device(step, pace.next_steps(step, device.max_steps_per_call(step, limit), limit))
    pace.add_call(result, began)
    return result.steps


def run(pace, device, calls, limit=10**6):
    for _ in range(calls):
        call(pace, device, 0, limit)


def run_on(pace, device, step, until):
    while step < until:
        step += call(pace, device, step, until - step)


# By what a call and a step cost, in seconds, the steps of a block, and the arguments of the pace: the runs, each of
# (calls, steps that are left) or (first step, last step), and the lengths of the last calls.
CASES = {
    # The first compiles; then at most 8 times as many.
    "calls grow to the target and stay there": (0.001, None, {}, [(8, None)], [1, 1, 8, 64, 100, 100, 100, 100]),
    "a slow step is one call": (3.0, None, {}, [(4, None)], [1, 1, 1, 1]),
    "a call that is cut short by something due changes nothing": (
        *(0.001, None, {}),
        *([(5, None), (1, 3), (1, None)], [100, 3, 100]),
    ),
    # Not 100, 100, 40, ...: each call costs, however short.
    "calls up to where one has to end are even": (
        *(0.001, 240, {}),
        *([(5, None), range(590)], [120, 120, 120, 120, 110]),
    ),
    # Periods end at 832, 960, 1088, 1200; not at 1240.
    "a call ends with the round whose end it comes near": (
        *(0.001, 240, {"sync_period_steps": 16}),
        *([range(1240)], [112, 128, 128, 112, 40]),
    ),
    "a round of a call and a half is one call": (0.01, None, {"sync_period_steps": 16}, [range(100)], [16, 16, 16, 4]),
    "a call up to what is due is not cut at a round before it": (
        *(0.001, None, {"steps": 100, "sync_period_steps": 16}),
        *([range(50), range(50, 100), range(100, 150)], [50, 50, 50]),
    ),
    "a fixed number is cut by the end of a round": (
        *(0.001, None, {"steps": 5, "sync_period_steps": 16}),
        *([range(32)], [5, 5, 5, 1, 5, 5, 5, 1]),
    ),
    "a fixed number is kept": (0.001, None, {"steps": 7}, [(3, None)], [7, 7, 7]),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_have_as_many_steps_as(case):
    seconds_a_step, block_steps, arguments, runs, expected = CASES[case]
    device = Device(0.0, seconds_a_step, block_steps or 10**6)
    arguments = {"steps": 0, "target_seconds": 0.1, **arguments}
    pace = Pace(arguments.pop("steps"), clock=device.clock, **arguments)
    for each in runs:
        if isinstance(each, range):
            run_on(pace, device, each.start, each.stop)
        else:
            run(pace, device, each[0], each[1] or 10**6)
    assert device.calls[-len(expected) :] == expected
    assert len(device.calls) == len(expected) or len(runs) > 1 or isinstance(runs[0], range)


@pytest.mark.parametrize(
    ("seconds_a_step", "block_steps", "period", "ends", "most"),
    [(0.01, 10**6, 100, {100, 200, 300}, 20), (0.001, 3, 8, {8, 16, 24}, 3)],
    ids=["a long round", "blocks that end within rounds"],
)
def test_each_round_ends_a_call_and_no_call_is_the_longer_for_it(seconds_a_step, block_steps, period, ends, most):
    device = Device(0.0, seconds_a_step, block_steps)
    run_on(Pace(0, sync_period_steps=period, target_seconds=0.1, clock=device.clock), device, 0, max(ends) + 1)
    assert max(device.calls) <= most
    assert ends <= {sum(device.calls[:n]) for n in range(len(device.calls) + 1)}


def test_steps_that_become_slow_are_paced_anew_though_calls_were_cut_before():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.0001, block_steps=100)
    pace = Pace(0, target_seconds=0.1, clock=device.clock)
    run_on(pace, device, 0, 1000)
    assert pace.steps > 200  # no call comes near it
    device.slow_down(seconds_a_step=0.01)
    run_on(pace, device, 1000, 1200)
    assert device.calls[-3:] == [10, 10, 10]


def test_the_host_is_one_call_ahead_of_the_device_and_no_more():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    run(Pace(5, clock=device.clock), device, 4)
    assert device.read == [0, 1, 2]  # each is awaited once the next is queued


def test_what_was_timed_elsewhere_is_fitted_by_the_same_rule():
    pace, fixed = Pace(target_seconds=1.0), Pace(5, target_seconds=1.0)
    found = []
    for steps, seconds in [(1, 0.001), (8, 0.8), (10, 100.0)]:
        pace.fit(steps, seconds)
        fixed.fit(steps, seconds)
        found.append(pace.steps)
    assert found == [8, 10, 1]  # at most 8 times as many, then as many as take the target
    assert fixed.steps == 5


@pytest.mark.parametrize(
    ("steps", "seconds", "expected"),
    [(8, 0.05, 16), (4, 0.02, 20), (3, 0.01, 8), (3, 0.1, 8), (3, 0.3, 1), (2, 0.11, 2), (1, 5.0, 8)],
)
def test_a_call_of_less_than_half_the_steps_counts_if_several_took_too_long(steps, seconds, expected):
    """A call of the eight steps that are wanted, or of those up to what is due, is to take 0.1 s."""
    device = Device(0.0, 0.1 / 8)
    pace = Pace(0, target_seconds=0.1, clock=device.clock)
    run(pace, device, 2)
    assert pace.steps == 8
    device.slow_down(seconds / steps)
    pace.add_call(device(0, steps), device.now - seconds)
    assert pace.steps == expected


@pytest.mark.parametrize(
    ("names", "values", "expected"),
    [(["seconds", "steps"], [3.0, 2.0], 1.5), (["seconds", "steps"], [3.0, 0.0], None), (["steps"], [2.0], None)],
)
def test_a_steps_seconds_are_the_first_workers_if_it_timed_any(names, values, expected):
    figures = WorkerFigures(names, np.array([values, [9.0] * len(names)]))
    assert not figures.is_read
    assert LoopResult(None, 2, 0.0, figures).step_seconds == expected
    assert figures.is_read
    assert figures.read() == [dict(zip(names, values, strict=True)), dict.fromkeys(names, 9.0)]
    assert LoopResult(None, 2, 0.0).step_seconds is None


def test_calls_lengthen_until_what_is_beside_their_steps_is_a_tenth_of_these():
    pace, found = Pace(0, target_seconds=0.25), []
    for _ in range(4):
        pace.fit(pace.steps, 0.08 * pace.steps, overhead_seconds=0.4)
        found.append(pace.steps)
    assert found == [8, 50, 50, 50]  # of 0.08 s, beside 0.4
    assert pace.step_seconds == pytest.approx(0.08)
    pace.fit(50, 4.0, overhead_seconds=100.0)
    assert pace.steps == 50  # no longer than 4 s


def timed_by_workers(device, input_seconds_a_step=0.0):
    """Returns a loop of steps of 0.01 s, by workers' clocks, before which data is awaited."""

    def loop(step, limit):
        rows = WorkerFigures(["seconds", "steps"], np.array([[0.01 * limit, limit]]))
        device.now += limit * input_seconds_a_step
        return device(step, limit)._replace(workers=rows, input_seconds=limit * input_seconds_a_step)

    loop.max_steps_per_call = device.max_steps_per_call
    return loop


@pytest.mark.parametrize(("seconds_a_call", "expected"), [(0.0, 25), (0.01, 24), (0.1, 100), (1.0, 400)])
def test_what_a_call_takes_beside_its_steps_is_known_by_workers_clocks(seconds_a_call, expected):
    device = Device(seconds_a_call, seconds_a_step=0.01)
    run(Pace(0, target_seconds=0.25, clock=device.clock), timed_by_workers(device), 6)
    assert device.calls[-2:] == [expected, expected]


def test_calls_that_wait_for_data_become_no_longer_for_it():
    device = Device(0.0, seconds_a_step=0.01)
    run(Pace(0, target_seconds=0.25, clock=device.clock), timed_by_workers(device, input_seconds_a_step=0.04), 6)
    assert device.calls[-2:] == [5, 5]


def test_the_wait_for_data_is_counted_by_the_step_and_taken_once():
    arrivals = Arrivals()

    @tf.function(autograph=False)
    def step():
        arrivals.mark({"x": tf.zeros([2])}, timestamp() - 100.0)

    for _ in range(2):
        step()
    assert arrivals.count() == 2
    assert 200.0 <= arrivals.seconds() < 250.0
    arrivals.add(50.0)
    take_seconds = tf.function(arrivals.take_seconds, autograph=False)
    assert 250.0 <= take_seconds() == arrivals.seconds()
    assert take_seconds() == 0.0
    arrivals.add(0.5)
    assert float(take_seconds()) == pytest.approx(0.5)
    assert arrivals.count() == 2
