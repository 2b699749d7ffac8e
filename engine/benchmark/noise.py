"""Whether the machine was quiet while something was timed: what other processes and quotas took of it. Host code.

Where the system does not tell, figures are None, and a warning says so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine import environment
from engine.benchmark import intervals

NOTICED = 0.02  # a share of the machine below this is a quiet machine's own housekeeping


class Reading(NamedTuple):
    """Counters at one moment, all in seconds: the clock; CPU time of all processes, on the CPUs that this one may use,
    stolen time included; of this benchmark's own; and for how long its quota kept threads from running."""

    clock: float
    busy: float | None
    own: float
    throttled: float


def read(own_cpu_seconds: Callable[[], float], proc: Path = Path("/proc")) -> Reading:
    """Reads the counters; takes about a millisecond."""
    return Reading(time.monotonic(), _busy_seconds(proc), own_cpu_seconds(), environment.throttled_seconds())


class Noise(NamedTuple):
    """What the machine did beside the benchmark.

    Attributes:
      other_cores_before, other_cores: cores that other processes used, and the host's other guests took, during the
        warm-up and during the rounds; None where it cannot be seen.
      throttled_share: of the time that the benchmark's threads would have run, 0 to 1: when their quota was used up.
      lost_share: of the rate, 0 to 1: at most so much was lost to the above; 0 where it is less than `NOTICED`.
    """

    other_cores_before: float | None
    other_cores: float | None
    throttled_share: float
    lost_share: float


def between(start: Reading, first_round: Reading, end: Reading, usable_cores: float) -> Noise:
    """The noise from three readings: before the warm-up, before the first round, after the last."""
    before, during = _other_cores(start, first_round), _other_cores(first_round, end)
    throttled, own = end.throttled - first_round.throttled, end.own - first_round.own
    throttled_share = throttled / (throttled + own) if throttled > 0 else 0.0
    others = max((cores for cores in (before, during) if cores is not None), default=0.0)
    # Of cores that a quota leaves idle anyway, others may have what they like.
    taken = max(0.0, usable_cores - (_cpus() - others)) / usable_cores
    shares = [min(share, 0.9) for share in (taken, throttled_share) if share > NOTICED]
    return Noise(before, during, throttled_share, 1 - math.prod(1 - share for share in shares))


def warnings(noise: Noise, calls: Mapping[str, Sequence]) -> list[str]:
    """One line for each thing that makes the figures uncertain, and what the interval does about it."""
    found = []
    rates, count = intervals.parts(calls), len(calls["seconds"])
    if count < intervals.FEW_CALLS:
        about = "there is no interval" if count < 2 else "the interval is as wide as Student's t says"
        found.append(f"few calls: {count} were timed, under {intervals.FEW_CALLS}; {about}; time for longer")
    if count > 1 and intervals.has_drifted(rates, sum(calls["examples"]) / sum(calls["seconds"])):
        among = "rounds" if len(set(calls["round"])) > 1 else "halves"
        ends = f"{_figure(min(rates))} to {_figure(max(rates))} examples/s"
        found.append(f"drift: {among} ran at {ends}; the interval holds them all")
    if noise.other_cores is None:
        found.append("other load is not known: the system does not count CPU time; the interval leaves it out")
    elif max(noise.other_cores_before, noise.other_cores) > NOTICED * _cpus():
        found.append(
            f"other load: {noise.other_cores_before:.2f} of {_cpus()} cores during the warm-up, "
            f"{noise.other_cores:.2f} during the rounds; the interval's upper end allows for it"
        )
    if noise.throttled_share > NOTICED:
        found.append(
            f"throttled: a CPU quota stopped threads for {noise.throttled_share:.0%} of the time that they would have "
            "run; the interval's upper end allows for it"
        )
    return found


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _other_cores(start: Reading, end: Reading) -> float | None:
    if start.busy is None or end.busy is None or end.clock <= start.clock:
        return None
    # The kernel's two accounts are kept in ticks of their own: short spans may come out below 0.
    return max(0.0, end.busy - start.busy - (end.own - start.own)) / (end.clock - start.clock)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _busy_seconds(proc: Path) -> float | None:
    """CPU time of all processes on the CPUs that this one may use; None where the system does not count it."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in environment.lines(proc / "stat"):
        name, *counts = line.split()
        if name in mine:
            user, nice, system, _, _, *rest = map(int, counts[:8])
            ticks += user + nice + system + sum(rest)  # of interrupts, and what the host gave to other guests
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None
