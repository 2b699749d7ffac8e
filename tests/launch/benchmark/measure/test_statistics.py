"""Benchmark mode's figures, by hand on known series."""

import math
from typing import NamedTuple

import pytest

from crankshaft.launch.benchmark.measure.statistics import Call, summarize


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
