"""Programs that stay, and run a piece of their work in turn: for ratios that a drifting machine blurs otherwise.

Each is asked for pieces of so many steps by lines of its standard input, and answers with steps a second. While one
works the others wait for their line. What is compared are the pieces of one turn, a fraction of a second apart.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from launch.benchmark import children
from launch.benchmark.children import MeasurementFailed, Process

_READY = "ready"


def take_turns(rate: Callable[[int], float]) -> None:
    """The side of a peer, warmed up: answers each line of standard input, a number of steps, until there is none."""
    print(_READY, flush=True)
    for line in sys.stdin:
        print(rate(int(line)), flush=True)


def rates_in_turn(peers: Mapping[str, Process], steps: int, turns: int, folder: str) -> dict[str, list[float]]:
    """Steps a second of each peer's pieces, by turns; every other turn goes backwards. Raises `MeasurementFailed`."""
    running: dict[str, subprocess.Popen] = {}
    try:
        for name, peer in peers.items():
            running[name] = _start(name, peer, folder)
        rates: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(2):  # to warm up
            for name, process in running.items():
                _ask(name, process, steps)
        for turn in range(turns):
            for name in sorted(running, reverse=bool(turn % 2)):
                rates[name].append(_ask(name, running[name], steps))
        return rates
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the turns' ratios, and its 95 % interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return "{:.2f}x ({:.2f} to {:.2f})".format(statistics.median(ratios), *interval(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % for the median of independent values: of the sorted ones, those that binomial chance leaves outside."""
    values, half = sorted(values), 0.98 * len(values) ** 0.5  # Conover 1999, Practical Nonparametric Statistics, 3.2
    low, high = round(len(values) / 2 - half), round(len(values) / 2 + half)
    return values[max(0, low)], values[min(len(values) - 1, high)]


def _start(name: str, peer: Process, folder: str) -> subprocess.Popen:
    environment = {**children.untuned(os.environ), "TF_CPP_MIN_LOG_LEVEL": "2", **peer.variables}
    process = subprocess.Popen(
        peer.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    while (line := process.stdout.readline()).strip() != _READY:
        if not line:
            raise MeasurementFailed(f"{name} ended with code {process.wait()} before its first piece")
    return process


def _ask(name: str, process: subprocess.Popen, steps: int) -> float:
    try:
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        return float(process.stdout.readline())
    except (OSError, ValueError):
        raise MeasurementFailed(f"{name} ended with code {process.wait()} within a piece") from None
