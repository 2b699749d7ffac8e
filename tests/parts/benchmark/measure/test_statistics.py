"""Benchmark mode's figures, by hand on known series."""

import math
from typing import NamedTuple

import pytest

from crankshaft.parts.benchmark.measure.statistics import Call, summarize


class Figures(NamedTuple):
    wall_seconds: float
    examples_per_sec: float
    p50: float
    p90: float
    p99: float
    mean: float
    stderr: float
    jitter: float


def calls(*series):
    """Calls of (steps, seconds), with 8 examples a step."""
    return [Call(steps, 8 * steps, seconds, 0.0) for steps, seconds in series]


SERIES = {
    # 20 steps in 0.5 s: 25 ms a step, 320 examples/s.
    "constant": ([(20, 0.5)] * 10, Figures(5.0, 320.0, 25.0, 25.0, 25.0, 320.0, 0.0, 0.0)),
    # 10 steps a call, step times 10, 20, 25, 40 and 50 ms: rates 800, 400, 320, 200 and 160 examples/s. Of 50 steps the
    # 25th takes 25 ms, the 45th 50: 40 take up to 40. Deviations 424, 24, -56, -176, -216 from the mean: their squares
    # add up to 261,120; / 4 = 65,280, / 5, root. From the median 320: 480, 80, 0, 120, 160.
    "drifting": (
        [(10, 0.10), (10, 0.20), (10, 0.25), (10, 0.40), (10, 0.50)],
        Figures(1.45, 400 / 1.45, 25.0, 50.0, 50.0, 1880 / 5, math.sqrt(13_056), 1.4826 * 120),
    ),
    # Seven calls at 5 ms a step (1600 examples/s) and three at 20 ms (400 examples/s), 10 steps each: mean 0.7 * 1600 +
    # 0.3 * 400; squared deviations 7 * 360^2 + 3 * 840^2 = 3,024,000; / 9 = 336,000; / 10.
    "bimodal": (
        [*[(10, 0.05)] * 7, *[(10, 0.20)] * 3],
        Figures(0.95, 800 / 0.95, 5.0, 20.0, 20.0, 1240.0, math.sqrt(33_600), 0.0),
    ),
    # By steps: 90 at 1 ms (8000 examples/s) and 10 at 3 ms (8000 / 3), so 0.9 of all steps are within 1 ms. The mean is
    # 22,400 / 3, the variance 0.09 * (16,000 / 3)^2, the calls count as 100^2 / (90^2 + 10^2).
    "weighed": (
        [(90, 0.090), (10, 0.030)],
        Figures(0.12, 800 / 0.12, 1.0, 1.0, 3.0, 22_400 / 3, 1600 / math.sqrt(100**2 / (90**2 + 10**2) - 1), 0.0),
    ),
}


@pytest.mark.parametrize(("series", "expected"), SERIES.values(), ids=SERIES)
def test_figures_by_hand(series, expected):
    found = summarize(calls(*series))
    names = {name: found[name] for name in Figures._fields if name in found}
    assert Figures(**found["step_ms"], **names) == pytest.approx(expected)


def test_one_call_has_no_standard_error_and_input_wait_is_a_share_of_all_time():
    assert summarize(calls((5, 1.0)))["stderr"] is None
    series = [Call(1, 8, 1.0, 0.25), Call(1, 8, 3.0, 0.75), Call(1, 8, 1.0, 0.0)]
    assert summarize(series)["input_wait_fraction"] == pytest.approx(0.2)
