"""Calls are merged once, and each window of the meter has those since it was last taken."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from crankshaft.engine.meter import Meter, Segment
from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.metrics.sums import LoopSums, SumSpec


def call(number: int, seconds: float = 1.0, **more) -> Segment:
    """A call of two steps, whose loss is its number."""
    sums = LoopSums([SumSpec("loss", Mean)], np.array([[2.0 * number, 2.0]]))
    return Segment(2 * number, 2, 8, sums, seconds, **more)


def test_windows_that_are_taken_at_any_steps_have_each_the_calls_since():
    """Ten of them, with periods of 1 to 10 calls and at random besides, beside sums that are kept for each alone."""
    meter, rng = Meter(), random.Random(0)
    windows, alone = [meter.window() for _ in range(10)], [[] for _ in range(10)]
    for number in range(300):
        meter.add(call(number))
        for period, (window, numbers) in enumerate(zip(windows, alone, strict=True), 1):
            numbers.append(number)
            assert (window.calls, window.seconds) == (len(numbers), len(numbers))
            if number % period == 0 or rng.random() < 0.1:
                totals = window.take()
                assert (totals.calls, totals.steps, totals.seconds) == (len(numbers), 2 * len(numbers), len(numbers))
                assert totals.means() == {"loss": np.mean(numbers)}
                numbers.clear()
    assert len(meter.since(0)) <= len(windows)


def test_totals_that_were_taken_stay_and_those_that_were_looked_at_go_on():
    meter = Meter()
    window = meter.window()
    meter.add(call(1))
    seen, taken = window.totals, window.take()
    meter.add(call(5))
    assert seen.means() == taken.means() == {"loss": 1.0}
    assert window.totals.means() == window.take().means() == {"loss": 5.0}
    assert window.take().means() == {}


def test_the_first_call_is_left_out_once_there_is_another():
    meter = Meter()
    rates, every = meter.window(leaves_out_first=True), meter.window()
    meter.add(call(0, seconds=9.0, compiles=True))
    assert rates.totals.speeds["steps_per_sec"] == pytest.approx(2 / 9)
    meter.add(call(1))
    meter.add(call(2))
    assert rates.totals.speeds == {"steps_per_sec": 2, "examples_per_sec": 8}
    assert every.totals.compiling == (9.0, 2)
    assert every.totals.means() == {"loss": 1.0}


def test_input_is_of_the_calls_that_know_it():
    meter = Meter()
    window = meter.window()
    meter.add(call(0, input_seconds=0.5, input_bytes=100, steps_ahead=3))
    meter.add(call(1))
    assert window.totals.input == {
        "input_wait_fraction": 0.25,
        "input_wait_ms": 125,
        "input_bytes_per_sec": 50,
        "input_steps_ahead": 3,
    }


def test_a_checkpoint_keeps_windows_by_name_and_a_repeated_one_by_its_number():
    meter = Meter()
    first, _, second = meter.window("log"), meter.window(), meter.window("log")
    meter.add(call(1))
    first.take()
    meter.add(call(3))
    kept = json.loads(json.dumps(meter.host_state()))
    assert set(kept) == {"log", "log-2"}

    again = Meter()
    first, other, second, new = again.window("log"), again.window(), again.window("log"), again.window("new")
    again.add(call(9))
    again.restore_host_state(kept)
    again.add(call(5))
    assert (first.totals.means()["loss"], second.take().means()["loss"]) == (4.0, 3.0)
    assert (new.totals.means()["loss"], second.totals.means()) == (5.0, {})
    assert other.totals.means() == {"loss": 7.0}  # of what is not kept, what this process has done
    again.restore_host_state({})
    assert first.totals.means() == {}


def test_calls_are_read_when_they_are_long_done_and_no_newer_one():
    meter, calls = Meter(), [call(number) for number in range(1000)]
    window = meter.window()
    for number, each in enumerate(calls):
        meter.add(each)
        assert not any(other.sums.is_read for other in calls[max(0, number - 1) : number + 1])
    assert sum(not each.sums.is_read for each in calls) < 64
    assert window.totals.means() == {"loss": 499.5}
