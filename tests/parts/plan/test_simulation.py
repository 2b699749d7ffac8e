"""The simulation of many hosts, beside closed forms."""

import dataclasses
import math
import sys

import pytest

from crankshaft.parts.plan import hardware
from crankshaft.parts.plan.estimate import estimate
from crankshaft.parts.plan.quantities import Message
from crankshaft.parts.plan.simulation import Scenario, expected_maximum, limits, saturation, scenario, simulate
from crankshaft.runner.failures import UsageError
from tests.parts.plan.test_estimate import FIGURES, WORK

pytest.importorskip("simpy")
DAY = 86_400.0
QUIET = Scenario(hosts=1000, examples=64.0, compute_seconds=0.1)


def test_without_failures_and_jitter_every_second_is_of_steps():
    synchronous = simulate(dataclasses.replace(QUIET, network_seconds=0.06))
    assert (synchronous.examples_per_sec, synchronous.goodput) == pytest.approx((64 / 0.16, 1.0))
    assert limits(QUIET) == {}


@pytest.mark.parametrize(
    ("hosts", "deviations"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (10, 1.53875), (1000, 3.24144)]
)
def test_a_synchronous_step_is_as_long_as_the_slowest_workers(hosts, deviations):
    """The expected maximum of normal values, from tables: small log-normal ones are normal, but for jitter squared."""
    assert expected_maximum(hosts, 1e-3) == pytest.approx(1 + 1e-3 * deviations, abs=1e-5)
    outcome = simulate(dataclasses.replace(QUIET, hosts=hosts, jitter=1e-3))
    assert outcome.goodput == pytest.approx(1 / (1 + 1e-3 * deviations), abs=1e-5)


def test_goodput_is_highest_at_youngs_interval_and_is_dalys():
    """Daly 2006, A higher order estimate of the optimum checkpoint interval, equation 13: exponential failures."""
    failing = dataclasses.replace(
        QUIET, hosts=100, failures_per_host_hour=0.01, lost_hosts=0.0, recovery_seconds=60.0, checkpoint_seconds=30.0
    )
    between = DAY / 24  # failures
    best = math.sqrt(2 * 30 * between)
    goodput = {}
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        every = factor * best
        goodput[factor] = simulate(dataclasses.replace(failing, checkpoint_every_seconds=every), days=200.0).goodput
        expected = every / (math.exp(60 / between) * between * (math.exp((every + 30) / between) - 1))
        # 4,800 failures: what they take has a standard deviation of about 1.5 %, and is at most 40 %.
        assert goodput[factor] == pytest.approx(expected, abs=0.02)
    assert max(goodput, key=goodput.get) == 1.0
    kept = simulate(dataclasses.replace(failing, checkpoint_every_seconds=4 * best, snapshot_every_seconds=2.0))
    assert kept.spent["lost"] < 24 * 2 / DAY
    assert sum(kept.spent.values()) == pytest.approx(1.0)


def test_stragglers_hold_up_all_workers():
    slow = dataclasses.replace(
        QUIET, stragglers_per_host_hour=1e-3 / 24, straggler_factor=2.0, straggler_seconds=DAY / 2
    )
    # Half a straggler at a time, so with a probability of 1 - exp(-1/2) there is one: over 500 half days, +-5 %.
    share = 1 - math.exp(-0.5)
    assert simulate(slow, days=250.0).goodput == pytest.approx(1 - share / 2, abs=0.03)


def test_an_estimated_run_is_simulated_with_the_estimates_goodput():
    """Daly's formulas, which the estimate uses, leave out jitter; the simulation leaves out the time of snapshots."""
    machine = hardware.from_figures(FIGURES | {"step_jitter": 0.0}, "mine")
    messages = (Message("all_reduce", 1e8, 64, "hosts"),)
    expected = estimate(dataclasses.replace(WORK, hosts=64, replicas=64, messages=messages), machine)
    outcome = simulate(scenario(expected, machine), days=300.0)
    # 4,600 failures of 64 hosts: what they take, about 15 %, has a standard deviation of 1.5 % of it.
    assert outcome.goodput == pytest.approx(expected.goodput, abs=0.01)
    assert outcome.examples_per_sec == pytest.approx(outcome.goodput * expected.examples_per_sec)


def test_a_simulation_is_repeatable_and_names_what_limits_it():
    busy = dataclasses.replace(
        QUIET, failures_per_host_hour=0.004, jitter=0.1, network_seconds=0.3, checkpoint_seconds=1.0
    )
    assert simulate(busy, seed=3) == simulate(busy, seed=3) != simulate(busy, seed=4)
    gains = limits(busy)
    assert next(iter(gains)) == "the network"
    assert "failures" in gains
    assert saturation({1: 10.0, 2: 19.0, 4: 35.0, 8: 50.0, 16: 60.0}) == 4
    assert saturation({1: 10.0, 1000: 9000.0}) is None


def test_a_missing_simpy_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(UsageError, match=r"pip install simpy"):
        simulate(QUIET)
