"""Programs that stay, and run a piece of their work in turn: for ratios that a drifting machine blurs otherwise.

Each gets the number of steps of a piece as a line of its standard input, and answers with steps per second. While one
works the others are stopped, lest they read ahead in its time. What is compared are the pieces of one turn, a fraction
of a second apart.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from crankshaft.launch.cluster.children import Child, Children, wait
from crankshaft.launch.cluster.resources import usable_cores

from . import children
from .children import MeasurementFailed, Process
from .markdown import spread, table
from .race import ROOT, cpu_model

_READY = "ready"
_SHARED = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # or the first takes all of a GPU
_SECONDS_TO_END = 10.0
_FEWEST = 6  # values whose extremes hold their median in 95 % of cases: 1 - 2 / 2**6


def take_turns(rate: Callable[[int], float], answers: TextIO | None = None) -> None:
    """The side of a peer, warmed up: answers each line of standard input, a number of steps, until there is none.

    `answers` is its standard output, if `sys.stdout` is not.
    """
    print(_READY, file=answers, flush=True)
    for line in sys.stdin:
        print(rate(int(line)), file=answers, flush=True)


def compare(title: str, peers: Mapping[str, Process], steps: int, turns: int) -> None:
    """Runs all in turn, and prints each one's rate and how the last one's stands to it."""
    rates = rates_in_turn(peers, steps, turns, str(ROOT))
    ours = rates[list(peers)[-1]]
    print(f"{cpu_model()}, {len(usable_cores())} cores, {turns} turns of {steps} steps\n")
    rows = [[f"`{name}`", spread(own_rates), ratio(ours, own_rates)] for name, own_rates in rates.items()]
    print(table([title, "steps/s: median (least–most)", "the last against it (95 %)"], rows))


def add_turns(parser: argparse.ArgumentParser, default: int) -> None:
    """--turns, which has to be one or more."""
    parser.add_argument("--turns", type=_count, default=default, help="pieces of each (%(default)s)")


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} measures nothing; use 1 or more")
    return number


def rates_in_turn(peers: Mapping[str, Process], steps: int, turns: int, folder: str) -> dict[str, list[float]]:
    """Steps a second of each peer's pieces, by turns; every other turn goes backwards. Raises `MeasurementFailed`."""
    running: dict[str, Child] = {}
    rates: dict[str, list[float]] = {name: [] for name in peers}
    with Children() as kept:
        for name, peer in peers.items():
            variables = {**children.untuned(os.environ), **_SHARED, **peer.variables}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            running[name] = kept.start(peer.command, env=variables, cwd=folder, **pipes)
            if (line := running[name].stdout.readline().decode().strip()) != _READY:
                raise MeasurementFailed(f"{name} printed {line!r} instead of {_READY!r}")
            running[name].send(signal.SIGSTOP)
        for _ in range(2):  # to warm up
            for name, child in running.items():
                _measure(name, child, steps)
        for turn in range(turns):
            for name in sorted(running, reverse=bool(turn % 2)):
                rates[name].append(_measure(name, running[name], steps))
        for child in running.values():
            child.send(signal.SIGCONT)
            child.stdin.close()  # it ends by itself, and leaves nothing behind
        wait(running.values(), _SECONDS_TO_END)
    return rates


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the turns' ratios, and its 95 % interval if there are enough of them."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    sure = " ({:.2f} to {:.2f})".format(*interval(ratios)) if len(ratios) >= _FEWEST else ""
    return f"{statistics.median(ratios):.2f}x{sure}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % for the median of `_FEWEST` independent values or more: as many of the sorted ones are left out at each end.

    Conover 1999, Practical Nonparametric Statistics, 3.2.
    """
    values = sorted(values)
    left_out = max(0, math.floor(len(values) / 2 - 0.98 * len(values) ** 0.5))
    return values[left_out], values[-1 - left_out]


def _measure(name: str, child: Child, steps: int) -> float:
    line = ""
    try:
        child.send(signal.SIGCONT)
        child.stdin.write(b"%d\n" % steps)
        line = child.stdout.readline().decode()
        child.send(signal.SIGSTOP)
        return float(line)
    except (OSError, ValueError):
        raise MeasurementFailed(f"{name} printed {line!r} instead of steps a second") from None
