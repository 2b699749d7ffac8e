"""How many steps a call takes: fitted to a length in time, fixed when asked, and never far ahead of the device."""

from crankshaft.engine.strategies.inner_loop import LoopResult
from crankshaft.engine.strategies.pacing import Pace


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

    def reach(self, step, limit):
        return min(limit, self._block_steps - step % self._block_steps)

    def __call__(self, step, limit, due):
        per_call, per_step = self._costs
        self.now += per_call + limit * per_step
        self.calls.append(limit)
        return LoopResult(_Sums(self, len(self.calls) - 1), limit, 0.0)


class _Sums:
    def __init__(self, device, number):
        self._device, self._number = device, number

    def read(self):
        self._device.read.append(self._number)


def run(pace, device, calls, limit=10**6):
    for _ in range(calls):
        pace.run(device, 0, limit)


def run_on(pace, device, step, until):
    while step < until:
        step += pace.run(device, step, until - step).steps


def test_calls_grow_to_the_target_and_stay_there():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    run(Pace(0, target_seconds=0.1, clock=device.clock), device, 8)
    assert device.calls == [1, 1, 8, 64, 100, 100, 100, 100]  # the first compiles; then at most 8 times as many


def test_a_slow_step_is_one_call():
    device = Device(seconds_a_call=0.0, seconds_a_step=3.0)
    run(Pace(0, target_seconds=0.1, clock=device.clock), device, 4)
    assert device.calls == [1, 1, 1, 1]


def test_a_call_cut_short_by_something_due_does_not_change_the_pace():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    pace = Pace(0, target_seconds=0.1, clock=device.clock)
    run(pace, device, 5)
    run(pace, device, 1, limit=3)
    run(pace, device, 1)
    assert device.calls[-3:] == [100, 3, 100]


def test_calls_up_to_where_one_has_to_end_share_the_steps_evenly():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001, block_steps=240)
    pace = Pace(0, target_seconds=0.1, clock=device.clock)
    run(pace, device, 5)
    del device.calls[:]
    run_on(pace, device, 0, 590)
    assert device.calls == [120, 120, 120, 120, 110]  # not 100, 100, 40, ...: each call costs, however short


def test_a_call_ends_with_the_round_whose_end_it_comes_near():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001, block_steps=240)
    pace = Pace(0, sync_period_steps=16, target_seconds=0.1, clock=device.clock)
    run_on(pace, device, 0, 1240)
    assert device.calls[-5:] == [112, 128, 128, 112, 40]  # periods end at 832, 960, 1088, 1200; not at 1240


def test_a_round_of_a_call_and_a_half_is_one_call():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.01)
    run_on(Pace(0, sync_period_steps=16, target_seconds=0.1, clock=device.clock), device, 0, 100)
    assert device.calls[-4:] == [16, 16, 16, 4]


def test_a_long_round_is_not_ended_by_a_long_call():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.01)
    run_on(Pace(0, sync_period_steps=100, target_seconds=0.1, clock=device.clock), device, 0, 300)
    assert max(device.calls) <= 20
    assert {100, 200, 300} <= {sum(device.calls[:n]) for n in range(len(device.calls) + 1)}


def test_a_call_up_to_what_is_due_is_not_cut_at_a_round_before_it():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    pace = Pace(100, sync_period_steps=16, clock=device.clock)
    for due in (50, 100, 150):
        run_on(pace, device, due - 50, due)
    assert device.calls == [50, 50, 50]


def test_where_blocks_end_within_sync_periods_each_period_ends_a_call():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001, block_steps=3)
    run_on(Pace(0, sync_period_steps=8, clock=device.clock), device, 0, 25)
    assert {8, 16, 24} <= {sum(device.calls[:n]) for n in range(len(device.calls) + 1)}


def test_steps_that_become_slow_are_paced_anew_though_calls_were_cut_before():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.0001, block_steps=100)
    pace = Pace(0, target_seconds=0.1, clock=device.clock)
    run_on(pace, device, 0, 1000)
    assert pace.steps > 200  # no call comes near it
    device.slow_down(seconds_a_step=0.01)
    run_on(pace, device, 1000, 1200)
    assert device.calls[-3:] == [10, 10, 10]


def test_a_fixed_number_is_cut_by_the_end_of_a_round_and_never_exceeded():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    run_on(Pace(5, sync_period_steps=16, clock=device.clock), device, 0, 32)
    assert device.calls == [5, 5, 5, 1, 5, 5, 5, 1]


def test_a_fixed_number_of_steps_is_kept():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    run(Pace(7, clock=device.clock), device, 3)
    assert device.calls == [7, 7, 7]


def test_the_host_is_one_call_ahead_of_the_device_and_no_more():
    device = Device(seconds_a_call=0.0, seconds_a_step=0.001)
    run(Pace(5, clock=device.clock), device, 4)
    assert device.read == [0, 1, 2]  # each is awaited once the next is queued


def test_what_was_timed_elsewhere_is_fitted_by_the_same_rule():
    pace, fixed = Pace(0, target_seconds=1.0), Pace(5, target_seconds=1.0)
    found = []
    for steps, seconds in [(1, 0.001), (8, 0.8), (10, 100.0)]:
        pace.fit(steps, seconds)
        fixed.fit(steps, seconds)
        found.append(pace.steps)
    assert found == [8, 10, 1]  # at most 8 times as many, then as many as take the target
    assert fixed.steps == 5
