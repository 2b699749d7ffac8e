"""How sure a benchmark's rate is: intervals of known series, and how often they hold the truth."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from crankshaft.engine.machine import cpus
from crankshaft.parts.benchmark.measure import intervals, noise
from crankshaft.parts.benchmark.measure.noise import LoadCounters, Noise
from tests.waiting import wait_until

pytestmark = pytest.mark.thorough

QUIET = Noise(2, 0.0, 0.0, 0.0, 0.0)


def calls(seconds, rounds=None, examples=64):
    """Calls of so many seconds, and 64 examples each."""
    return {"examples": [examples] * len(seconds), "seconds": list(seconds), "round": rounds or [0] * len(seconds)}


def result(seconds, rounds=None, lost_share=0.0):
    return {"calls": calls(seconds, rounds), "noise": {"lost_share": lost_share}}


def noisy(seed, count, correlation=0.0, spread=0.1):
    """Seconds around 1, lognormal, each like the one before by `correlation`."""
    found = np.random.default_rng(seed).normal(size=count + 100)
    for place in range(1, len(found)):
        found[place] = correlation * found[place - 1] + math.sqrt(1 - correlation**2) * found[place]
    return np.exp(spread * found[100:] - spread**2 / 2).tolist()


# -- the rate ---------------------------------------------------------------------------------------------------------


def test_constant_calls_leave_no_doubt_and_one_has_no_interval():
    assert intervals.interval(calls([0.5] * 30)) == pytest.approx([128.0, 128.0])
    assert intervals.interval(calls([0.5])) is None
    assert intervals.interval(calls(noisy(0, 40))) == intervals.interval(calls(noisy(0, 40)))


@pytest.mark.parametrize(("count", "correlation", "least"), [(10, 0.0, 0.92), (90, 0.0, 0.92), (300, 0.6, 0.92)])
def test_nineteen_of_twenty_intervals_hold_the_true_rate(count, correlation, least):
    # Of 200 fair ones of 95 %, 184 to 196 hold it (two standard deviations).
    found = [intervals.interval(calls(noisy(seed, count, correlation))) for seed in range(200)]
    held = sum(low <= 64 <= high for low, high in found) / 200
    assert held >= least
    # And they are no wider than the textbook's needs: the mean's deviation is spread * sqrt((1+c)/(1-c) / count).
    width = np.mean([high - low for low, high in found]) / 64
    expected = (
        2 * intervals.student_t(max(1, count // 2)) * 0.1 * math.sqrt((1 + correlation) / (1 - correlation) / count)
    )
    assert width < 1.5 * expected


def test_what_others_took_lifts_the_upper_end_alone():
    low, high = intervals.interval(calls(noisy(0, 40)))
    assert intervals.interval(calls(noisy(0, 40)), lost_share=0.2) == pytest.approx([low, high / 0.8])


def test_rounds_that_have_drifted_are_all_within():
    # 64, 64 and 128 examples/s; without the rule, ten groups of which five are slow would come to neither end.
    seconds, rounds = [1.0] * 40 + [0.5] * 40, [0] * 20 + [1] * 20 + [2] * 40
    assert intervals.round_rates(calls(seconds, rounds)) == [64.0, 64.0, 128.0]
    low, high = intervals.interval(calls(seconds, rounds))
    assert low <= 64.0 + 1e-6
    assert high >= 128.0 - 1e-6
    # Halves of a single round tell of drift, too.
    assert intervals.round_rates(calls([1.0, 1.0, 0.5, 0.5])) == [64.0, 128.0]


def test_student_is_that_of_the_tables():
    for freedom, quantile in ((1, 12.706), (4, 2.776), (6, 2.447), (10, 2.228), (19, 2.093), (100, 1.984)):
        assert intervals.student_t(freedom) == pytest.approx(quantile, abs=2e-3)


# -- the ratio --------------------------------------------------------------------------------------------------------


def test_equal_runs_show_no_difference():
    ratio, (low, high) = intervals.ratio_interval([(result(noisy(0, 90)), result(noisy(1, 90)))])
    assert low < 1 < high
    assert ratio == pytest.approx(1.0, abs=0.05)  # two means of 90, each 1 % off


def test_a_ratio_has_the_doubt_of_both_runs():
    ratio, (low, high) = intervals.ratio_interval([(result([0.5] * 30), result([1.0] * 30))])
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))
    _, ends = intervals.ratio_interval([(result([0.5] * 30), result(noisy(0, 30)))])
    assert ends[1] - ends[0] > 0.05
    # Ours may have lost a tenth, theirs a fifth: 2 * 0.8 to 2 / 0.9.
    _, ends = intervals.ratio_interval([(result([0.5] * 30, lost_share=0.1), result([1.0] * 30, lost_share=0.2))])
    assert ends == pytest.approx([1.6, 2 / 0.9])


def test_turns_doubt_by_what_differs_between_them():
    # Ratios 1.1 and 1.21: the mean of their logarithms is 1.5 log 1.1, Student's t of one degree 12.706 times the error
    # log 1.1 / 2.
    pairs = [(result([1 / 1.1] * 30), result([1.0] * 30)), (result([1 / 1.21] * 30), result([1.0] * 30))]
    ratio, (low, high) = intervals.ratio_interval(pairs)
    assert ratio == pytest.approx(1.1**1.5)
    assert low == pytest.approx(ratio / 1.1 ** (12.706 / 2))
    assert high == pytest.approx(ratio * 1.1 ** (12.706 / 2))


def test_load_that_both_turns_have_decides_nothing_and_a_single_call_has_no_interval():
    pair = (result([0.5] * 30, lost_share=0.3), result([1.0] * 30, lost_share=0.3))
    assert intervals.ratio_interval([pair, pair])[1] == pytest.approx([2.0, 2.0])
    assert intervals.ratio_interval([(result([1.0]), result([2.0] * 9))]) == (pytest.approx(2.0), None)  # of one call


# -- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        # Ten seconds of two CPUs: 16 s busy, 12 of them ours: 0.4 cores were others'.
        ((5, 1, 1, 0), (15, 17, 13, 0), Noise(2, 0.0, 0.4, 0.0, 0.2)),
        # Load before the rounds counts as well.
        ((5, 10, 5, 0), (15, 20, 15, 0), Noise(2, 1.0, 0.0, 0.0, 0.5)),
        # A quota takes of the time that threads would have run.
        ((5, 0, 0, 0), (15, 9, 9, 1), Noise(2, 0.0, 0.0, 0.1, 0.1)),
        # A quiet machine's housekeeping is no load.
        ((5, 5, 5, 0), (15, 15.3, 15, 0), Noise(2, 0.0, 0.03, 0.0, 0.0)),
    ],
    ids=["others", "before", "quota", "housekeeping"],
)
def test_what_others_used_is_a_share_of_the_machine(first, end, expected):
    found = noise.measure(LoadCounters(2, 0, 0, 0, 0), LoadCounters(2, *first), LoadCounters(2, *end))
    assert found == pytest.approx(expected)
    assert (noise.warnings(found, calls([1.0] * 30)) == []) == (found.lost_share == 0.0)


def test_others_may_have_what_a_quota_leaves_idle():
    start, first, end = (LoadCounters(2, 0, 0, 0, 0), LoadCounters(2, 5, 0, 0, 0), LoadCounters(2, 15, 14, 10, 0))
    assert noise.measure(start, first, end, 1.0).lost_share == 0.0
    assert noise.measure(start, first, end).lost_share == pytest.approx(0.2)


def test_busy_time_is_of_the_cpus_that_this_process_may_use(tmp_path, monkeypatch):
    # user nice system idle iowait irq softirq steal guest guest_nice: guest is in user already.
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {pid})
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9", "cpu0 100 20 30 999 999 4 5 6 50 0", "cpu1 35 0 0 999 999 0 0 0 0 0"]
    (tmp_path / "stat").write_text("\n".join([*lines, "cpu2 70 7 7 7 7 7 7 7 7 7", ""]))
    ticks = noise.read([0, 1], tmp_path).busy * 100
    assert ticks == pytest.approx(200)
    (tmp_path / "stat").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
    assert noise.read([0, 1], tmp_path).busy is None


def test_another_process_is_seen_and_one_of_the_job_is_not():
    # The kernel counts in ticks of 10 ms, a reading of each process and CPU may be one off, and others may run besides.
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        jobs = ([os.getpid()], [os.getpid(), other.pid])
        starts, before = [noise.read(pids) for pids in jobs], cpus.cpu_seconds([other.pid])
        wait_until(lambda: cpus.cpu_seconds([other.pid]) > before + 0.5, other)
        used, ends = cpus.cpu_seconds([other.pid]) - before, [noise.read(pids) for pids in jobs]
    finally:
        other.kill()
        other.wait()
    alone, together = zip(starts, ends, strict=True)
    assert noise.measure(alone[0], *alone).other_cores >= (used - 0.05) / (alone[1].clock - alone[0].clock)
    assert together[1].benchmark - together[0].benchmark >= used - 0.005  # a difference of floats, in ticks of 0.01


def test_each_disturbance_is_one_line():
    found = noise.warnings(QUIET._replace(other_cores=0.5, throttled_share=0.25), calls([1.0] * 5 + [0.5] * 4))
    assert found == [
        "few calls: 9 were timed, under 20; the interval is widened by Student's t; time for longer",
        "drift: halves ran at 64 to 128 examples/s; the interval holds them all",
        "other load: 0.00 of 2 cores during the warm-up, 0.50 during the rounds; the interval's upper end allows for "
        "it",
        "throttled: a CPU quota stopped threads for 25% of the time that they would have run; the interval's upper end "
        "allows for it",
    ]
    unknown = QUIET._replace(other_cores_before=None)
    assert noise.warnings(unknown, calls([1.0] * 30)) == noise.warnings(
        unknown._replace(other_cores=None), calls([1.0] * 30)
    )
    assert noise.warnings(unknown, calls([1.0] * 30)) == [
        "other load is not known: the system does not count CPU time; the interval leaves it out"
    ]
