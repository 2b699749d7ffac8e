"""Measures the CPU time that other processes and quotas took while something was timed.

Figures that the system does not report are None, and named in a warning.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ....engine.machine import cpus
from . import intervals

NOTICED = 0.02  # smaller fractions of the machine are a quiet system's own work


class LoadCounters(NamedTuple):
    """Counters at one moment.

    Attributes:
      cpus: number of CPUs that the benchmark's processes may use.
      clock: time of the reading, in seconds.
      busy: CPU seconds of all processes on those CPUs, and of the host's other guests; None if the system does not
        report it.
      benchmark: CPU seconds of the benchmark's processes.
      throttled: CPU seconds during which a quota kept the benchmark's threads from running.
    """

    cpus: int
    clock: float
    busy: float | None
    benchmark: float
    throttled: float


def read(pids: Iterable[int], proc: Path = Path("/proc")) -> LoadCounters:
    """Reads the counters; takes about a millisecond. `pids` are the benchmark's processes on this host."""
    pids = list(pids)
    usable = cpus.usable_cpus(pids)
    benchmark, clock = cpus.cpu_seconds(pids, proc), time.monotonic()
    names, ticks = {f"cpu{number}" for number in usable}, 0
    for line in cpus.lines(proc / "stat"):
        name, *counts = line.split()
        if name in names:
            user, nice, system, _, _, *rest = map(int, counts[:8])
            ticks += user + nice + system + sum(rest)  # of interrupts, and what the host gave to other guests
    busy = ticks / os.sysconf("SC_CLK_TCK") if ticks else None
    return LoadCounters(len(usable), clock, busy, benchmark, cpus.throttled_seconds())


class Noise(NamedTuple):
    """The load of the machine beside the benchmark.

    Attributes:
      cpus: number of CPUs that the benchmark may use.
      other_cores_before: cores that other processes and the host's other guests used during the warm-up; None where it
        cannot be seen.
      other_cores: cores that they used during the rounds; None where it cannot be seen.
      throttled_share: fraction, 0 to 1, of the time that the benchmark's threads would have run in which their quota
        was used up.
      lost_share: largest fraction of the rate, 0 to 1, that was lost to the above; 0 where it is less than `NOTICED`.
    """

    cpus: int
    other_cores_before: float | None
    other_cores: float | None
    throttled_share: float
    lost_share: float


def measure(start: LoadCounters, first_round: LoadCounters, end: LoadCounters, quota_cores: float = math.inf) -> Noise:
    """Computes the noise from readings before the warm-up, before the first round and after the last."""
    before, during = _other_cores(start, first_round), _other_cores(first_round, end)
    throttled, used = end.throttled - first_round.throttled, end.benchmark - first_round.benchmark
    throttled_share = throttled / (throttled + used) if throttled > 0 else 0.0
    others = max((cores for cores in (before, during) if cores is not None), default=0.0)
    wanted = min(end.cpus, quota_cores)
    # Other processes may have the time that a quota leaves idle anyway.
    missing = max(0.0, wanted - (end.cpus - others)) / wanted
    # Below 1, so that the interval's upper end stays finite.
    lost = [min(fraction, 0.9) for fraction in (missing, throttled_share) if fraction > NOTICED]
    return Noise(end.cpus, before, during, throttled_share, 1 - math.prod(1 - fraction for fraction in lost))


def warnings(noise: Noise, calls: Mapping[str, Sequence]) -> list[str]:
    """Returns one line for each cause of uncertainty, and whether the interval covers it."""
    notes = []
    rates, count = intervals.round_rates(calls), len(calls["seconds"])
    if count < intervals.FEW_CALLS:
        interval = "no interval" if count < 2 else "the interval is widened by Student's t"
        notes.append(f"few calls: {count} were timed, under {intervals.FEW_CALLS}; {interval}; time for longer")
    if count > 1 and intervals.has_drifted(rates, sum(calls["examples"]) / sum(calls["seconds"])):
        parts = "rounds" if len(set(calls["round"])) > 1 else "halves"
        least, most = (f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}" for rate in (min(rates), max(rates)))
        notes.append(f"drift: {parts} ran at {least} to {most} examples/s; the interval holds them all")
    if noise.other_cores is None or noise.other_cores_before is None:
        notes.append("other load is not known: the system does not count CPU time; the interval leaves it out")
    elif max(noise.other_cores_before, noise.other_cores) > NOTICED * noise.cpus:
        notes.append(
            f"other load: {noise.other_cores_before:.2f} of {noise.cpus} cores during the warm-up, "
            f"{noise.other_cores:.2f} during the rounds; the interval's upper end allows for it"
        )
    if noise.throttled_share > NOTICED:
        notes.append(
            f"throttled: a CPU quota stopped threads for {noise.throttled_share:.0%} of the time that they would have "
            "run; the interval's upper end allows for it"
        )
    return notes


def _other_cores(start: LoadCounters, end: LoadCounters) -> float | None:
    if start.busy is None or end.busy is None:
        return None
    # The kernel's two accounts have separate ticks: short spans may come out below 0.
    others = max(0.0, end.busy - start.busy - (end.benchmark - start.benchmark))
    return others / (end.clock - start.clock) if end.clock > start.clock else 0.0
