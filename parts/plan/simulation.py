"""Simulates a run on many hosts: waiting, checkpoints and failures.

simpy (https://simpy.readthedocs.io) runs the events: failures, stragglers, checkpoints. The rest is computed directly
if the result is the same: a synchronous step ends with its slowest worker, so the mean of a maximum replaces all
workers' steps between two checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...engine.errors import importing
from .estimate import Estimate
from .hardware import Hardware

_HOUR = 3600.0
_DAY = 24 * _HOUR
_QUANTILES = 2048
_SATURATED = 0.5
_NO_EFFECT = 1.01
# By cost: a scenario without it, and what makes it less.
COSTS: dict[str, tuple[dict[str, Any], str]] = {
    "the network": (
        {"network_seconds": 0.0},
        "fewer bytes (reduce_dtype), a larger global_batch_size",
    ),
    "the slowest worker": ({"jitter": 0.0, "stragglers_per_host_hour": 0.0}, "even hosts"),
    "failures": ({"failures_per_host_hour": 0.0}, "spare hosts, snapshot_seconds, more frequent checkpoints"),
    "checkpoints": ({"checkpoint_seconds": 0.0}, "less frequent checkpoints"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run on a number of hosts, and what happens to them. Times are means.

    Attributes:
      examples: examples per step of all workers together.
      compute_seconds: seconds of a worker's step without the network.
      network_seconds: seconds of a step in which nothing but the network works.
      jitter: standard deviation of a worker's `compute_seconds` divided by their mean.
      checkpoint_seconds: seconds for which a checkpoint stops training.
      checkpoint_every_seconds: seconds of training between two checkpoints.
      snapshot_every_seconds: seconds of training between two snapshots in memory; infinite without snapshots.
      snapshots_survive: whether the loss of a host leaves a whole snapshot on others.
      lost_hosts: the fraction of failures in which the host is lost.
      recovery_seconds: seconds from the failure of a process to the next step, on the same hosts.
      lost_host_seconds: seconds from the loss of a host to the next step, with the scheduler's restart.
      stragglers_per_host_hour: how many times per hour each host becomes slow.
      straggler_factor: factor of a step's time on a slow host.
      straggler_seconds: seconds for which a host stays slow.
    """

    hosts: int
    examples: float
    compute_seconds: float
    network_seconds: float = 0.0
    jitter: float = 0.0
    checkpoint_seconds: float = 0.0
    checkpoint_every_seconds: float = 600.0
    snapshot_every_seconds: float = math.inf
    snapshots_survive: bool = True
    failures_per_host_hour: float = 0.0
    lost_hosts: float = 0.5
    recovery_seconds: float = 2.0
    lost_host_seconds: float = 300.0
    stragglers_per_host_hour: float = 0.0
    straggler_factor: float = 1.5
    straggler_seconds: float = 600.0

    @property
    def step_seconds(self) -> float:
        """Of a worker that waits for no other."""
        return self.compute_seconds + self.network_seconds


def scenario(estimate: Estimate, hardware: Hardware) -> Scenario:
    """Converts an estimated run to a scenario on the same hardware, with the best checkpoint interval."""
    work, step, checkpoint = estimate.work, estimate.step, estimate.checkpoint
    network = 0.0 if step.bound == "input" else step.network_seconds
    return Scenario(
        hosts=work.hosts,
        examples=work.examples,
        compute_seconds=step.seconds - network,
        network_seconds=network,
        jitter=hardware.step_jitter,
        checkpoint_seconds=checkpoint.stall_seconds,
        checkpoint_every_seconds=checkpoint.interval_seconds,
        snapshot_every_seconds=estimate.snapshot_interval_seconds,
        snapshots_survive=estimate.snapshots_survive,
        failures_per_host_hour=1 / hardware.hours_between_failures,
        lost_hosts=hardware.lost_host_share,
        recovery_seconds=hardware.recovery_seconds,
        lost_host_seconds=hardware.lost_host_seconds,
        stragglers_per_host_hour=hardware.slow_host_share * _HOUR / Scenario.straggler_seconds,
        straggler_factor=hardware.slow_host_factor,
    )


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run achieved.

    Attributes:
      examples_per_sec: examples per second over the whole time.
      goodput: fraction of the time that went to steps that count, as in a run's record.
      spent: fraction of the time by cause: `steps`, `waiting`, `checkpoints`, `lost`, `down`, as in a run's record.
      failures: number of failures that ended all tasks.
    """

    examples_per_sec: float
    goodput: float
    spent: dict[str, float]
    failures: int


def import_simpy() -> Any:
    """Imports what simulations need. Raises `UsageError` if it is missing."""
    with importing("simpy", "a simulation needs simpy; pip install simpy"):
        import simpy
    return simpy


@functools.lru_cache
def expected_maximum(number: int, jitter: float) -> float:
    """Computes the mean of the longest of a number of log-normal times, of mean 1 and this standard deviation.

    The maximum of n has the distribution F^n, so its quantile u is the quantile u^(1/n) of one.
    """
    if not jitter:
        return 1.0
    sigma = math.sqrt(math.log1p(jitter**2))
    normal = statistics.NormalDist(-(sigma**2) / 2, sigma)
    quantiles = ((np.arange(_QUANTILES) + 0.5) / _QUANTILES) ** (1 / number)
    return float(np.mean(np.exp([normal.inv_cdf(quantile) for quantile in quantiles])))


class _Run:
    """A simulated run: it trains, with a checkpoint after each interval, and is down after a failure."""

    def __init__(self, env: Any, scenario: Scenario, seed: int):
        self.spent = dict.fromkeys(("steps", "waiting", "checkpoints", "lost", "down"), 0.0)
        self.failures = 0
        self._env, self._scenario, self._seed = env, scenario, seed
        self._unsaved = {"steps": 0.0, "waiting": 0.0}
        self._at, self._is_down = 0.0, False
        self._cycle = 0.0  # seconds since a checkpoint was complete
        self._slow = 0  # workers
        self._occur(1, scenario.hosts * scenario.failures_per_host_hour, self._fail)
        self._occur(3, scenario.hosts * scenario.stragglers_per_host_hour, self._straggle)

    def _occur(self, stream: int, per_hour: float, event: Callable[[bool], Iterator]) -> None:
        """Makes an event occur so often per hour, at random times that do not depend on the other events."""
        rng = np.random.default_rng([self._seed, stream])

        def occurring() -> Iterator:
            while True:
                yield self._env.timeout(rng.exponential(_HOUR / per_hour))
                self._env.process(event(bool(rng.random() < self._scenario.lost_hosts)))

        if per_hour:
            self._env.process(occurring())

    def _fail(self, is_lost: bool) -> Iterator:
        s = self._scenario
        self.account()
        self.failures += 1
        failures, unsaved = self.failures, sum(self._unsaved.values())
        # A snapshot has all but what came after it.
        lost = unsaved % s.snapshot_every_seconds if s.snapshots_survive or not is_lost else unsaved
        self._save(lost)
        self._cycle = max(0.0, min(self._cycle, s.checkpoint_every_seconds) - lost)
        self._is_down = True
        yield self._env.timeout(s.lost_host_seconds if is_lost else s.recovery_seconds)
        if self.failures == failures:
            self.account()
            self._is_down = False

    def _straggle(self, _: bool) -> Iterator:
        self.account()
        self._slow += 1
        yield self._env.timeout(self._scenario.straggler_seconds)
        self.account()
        self._slow -= 1

    def _speed(self) -> float:
        """Computes the fraction of the steps' time in which no worker waits for another."""
        s = self._scenario
        slowest = max(expected_maximum(s.hosts, s.jitter), s.straggler_factor if self._slow else 0.0)
        return s.step_seconds / (s.compute_seconds * slowest + s.network_seconds)

    def account(self) -> None:
        """Accounts for the time since the last call, in which nothing but checkpoints has happened."""
        seconds, self._at = self._env.now - self._at, self._env.now
        if self._is_down:
            self.spent["down"] += seconds
            return
        s = self._scenario
        checkpoints, cycle = divmod(self._cycle + seconds, s.checkpoint_every_seconds + s.checkpoint_seconds)
        since_checkpoint = min(cycle, s.checkpoint_every_seconds)
        before = min(self._cycle, s.checkpoint_every_seconds)
        trained = checkpoints * s.checkpoint_every_seconds + since_checkpoint - before
        self.spent["checkpoints"] += seconds - trained
        if checkpoints:
            self._train(trained - since_checkpoint)
            self._save()
            trained = since_checkpoint
        self._train(trained)
        self._cycle = cycle

    def _train(self, seconds: float) -> None:
        self._unsaved["steps"] += seconds * self._speed()
        self._unsaved["waiting"] += seconds * (1 - self._speed())

    def _save(self, lost: float = 0.0) -> None:
        """Counts what was trained since the last call, without the last `lost` seconds."""
        seconds = sum(self._unsaved.values())
        for cause, unsaved in self._unsaved.items():
            self.spent[cause] += unsaved * (1 - lost / seconds if lost else 1)
        self.spent["lost"] += lost
        self._unsaved = dict.fromkeys(self._unsaved, 0.0)

    def end(self) -> None:
        """Accounts for all that has happened, and saves it."""
        self.account()
        self._save()


def simulate(scenario: Scenario, days: float = 30.0, seed: int = 0) -> SimulatedRun:
    """Simulates so many days; the same for the same seed. Raises `UsageError` without simpy."""
    env = import_simpy().Environment()
    run = _Run(env, scenario, seed)
    env.run(until=days * _DAY)
    run.end()
    spent = {cause: seconds / (days * _DAY) for cause, seconds in run.spent.items()}
    rate = spent["steps"] * scenario.examples / scenario.step_seconds
    return SimulatedRun(rate, spent["steps"], spent, run.failures)


def limits(scenario: Scenario) -> dict[str, float]:
    """Computes how many times as fast the run would be without each cost, the largest first, if it is faster at all."""
    rate = simulate(scenario).examples_per_sec
    without = {
        cost: simulate(dataclasses.replace(scenario, **change)).examples_per_sec / rate
        for cost, (change, _) in COSTS.items()
    }
    return {cost: gain for cost, gain in sorted(without.items(), key=lambda item: -item[1]) if gain > _NO_EFFECT}


def saturation(rates: Mapping[int, float]) -> int | None:
    """Finds the number of hosts (keys) after which one more adds less than half of what each of the fewest does."""
    hosts = sorted(rates)
    least = _SATURATED * rates[hosts[0]] / hosts[0]
    pairs = itertools.pairwise(hosts)
    return next((few for few, more in pairs if (rates[more] - rates[few]) / (more - few) < least), None)


def entry(scenario: Scenario) -> dict[str, Any]:
    """Simulates one number of hosts, as plain JSON."""
    return {**dataclasses.asdict(simulate(scenario)), "limits": limits(scenario)}


def lines(entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Describes where simulated runs saturate, and what would make them faster, from `entry`s by number of hosts."""
    hosts = saturation({number: entry["examples_per_sec"] for number, entry in entries.items()})
    at = "nowhere"
    if hosts:
        more = min(number for number in entries if number > hosts)
        at = f"between {hosts:,} and {more:,} hosts, where one more adds less than half of what each of the first adds"
    most = hosts or max(entries)
    gains = entries[most]["limits"].items()
    return [f"Simulated, it saturates {at}."] + [
        f"  {most:,} hosts are {gain:.2f} times as fast without {cost}: {COSTS[cost][1]}" for cost, gain in gains
    ]
