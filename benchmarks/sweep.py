r"""Benchmark mode on every combination of some flags' values, or on several numbers of replicas: a loop over runs.

    python -m benchmarks.sweep "global_batch_size=64,256;jit=on,off" -- --model=mlp --input=digits
    python -m benchmarks.sweep --replicas=1,2 -- --model=mlp --input=digits
    python -m benchmarks.sweep --replicas=1,2 --workers -- --model=mlp --input=digits

What stands after `--` are flags of `crankshaft train`. Each run is a process of its own (with --workers, a cluster on
this machine); one that fails is named, and the others continue. A comma within a value is written `\,`.

Weak scaling keeps the batch of a replica (Gustafson, "Reevaluating Amdahl's law", CACM 31(5), 1988), strong that of all
(Amdahl, AFIPS 1967); a replica has as many cores in each run. Efficiency is the rate of examples a replica over that of
the fewest replicas: 1 where twice the replicas do twice as much.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from crankshaft.launch.cluster import resources

from .children import MeasurementFailed, Process, Series
from .markdown import number, table
from .race import run_script


@dataclasses.dataclass(frozen=True)
class Point:
    """A run.

    Attributes:
      title: what it is.
      command: without --result_json.
      cores: that it may use; None: all.
      replicas: how many, where that is what differs.
    """

    title: str
    command: Sequence[str]
    cores: frozenset[int] | None = None
    replicas: int = 1

    def process(self, path: Path) -> Process:
        """Makes the process that measures the point, and writes its result to `path`."""
        return Process([*self.command, f"--result_json={path}"], cores=self.cores)


def combinations(text: str) -> list[list[str]]:
    """Returns the flags of each point of NAME=VALUE,VALUE;NAME=VALUE,VALUE: the last name's values change fastest."""
    axes = []
    for part in filter(None, re.split(r"(?<!\\);", text)):
        name, equals, values = part.partition("=")
        plain = [re.sub(r"\\([,;])", r"\1", value.strip()) for value in re.split(r"(?<!\\),", values)]
        if not equals or "" in plain:
            raise argparse.ArgumentTypeError(f"{part!r} has no values; write NAME=VALUE,VALUE;NAME=VALUE,VALUE")
        axes.append([f"--{name.strip().removeprefix('--')}={value}" for value in plain])
    return [list(point) for point in itertools.product(*axes)]


def scaled(counts: Sequence[int], batch: int, workers: bool, flags: Sequence[str]) -> list[Point]:
    """Returns the points of some numbers of replicas, the fewest first: weak, then strong scaling of each."""
    counts, cores = sorted({*counts}), resources.usable_cores()
    each = len(cores) // counts[-1]
    points = []
    for count in counts:
        for kind, size in (("weak", batch // counts[0] * count), ("strong", batch)):
            more = [f"--global_batch_size={size}", *flags]
            if workers:
                cluster = [f"--workers={count}", "--max_restarts=0"]
                command = _crankshaft("local", *cluster, "--", *more, "--mode=benchmark")
            else:
                command = _train("--strategy=mirrored", f"--num_virtual_devices={count}", *more)
            own = frozenset(cores[: count * each]) or None
            points.append(Point(f"{count} replicas, {kind}, batch {size}", command, own, count))
    return points


def _crankshaft(*words: str) -> list[str]:
    return [sys.executable, "-m", "crankshaft", *words]


def _train(*flags: str) -> list[str]:
    return _crankshaft("train", *flags, "--mode=benchmark")


def measure(points: Sequence[Point]) -> list[dict]:
    """Runs all; the result of one that failed is its `error`."""
    series, results = Series(len(points), os.environ), []
    for point in points:
        try:
            results.append(series.measure(point.title, point.process))
        except MeasurementFailed as failure:
            results.append({"error": str(failure)})
    return results


def shown(points: Sequence[Point], results: Sequence[dict]) -> str:
    """Returns the table of all points; the one with the most examples a second is marked."""
    rates = [result.get("examples_per_sec") for result in results]
    best = max(filter(None, rates), default=None)
    first = next((rate / point.replicas for point, rate in zip(points, rates, strict=True) if rate), None)
    rows = []
    for point, result, rate in zip(points, results, rates, strict=True):
        if rate is None:
            rows.append([point.title, "failed", "", ""])
            continue
        interval = " – ".join(map(number, result["interval"])) if result.get("interval") else "–"
        title = f"{point.title} (best)" if rate == best and len(points) > 1 else point.title
        efficiency = f"{rate / point.replicas / first:.1%}"
        rows.append([title, number(result["steps_per_sec"]), f"{number(rate)} ({interval})", efficiency])
    scales = any(point.replicas > 1 for point in points)
    header = ["run", "steps/s", "examples/s (95 %)", "efficiency"]
    return table(header, rows) if scales else table(header[:3], [row[:3] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="?", type=combinations, default=[[]], help="NAME=VALUE,VALUE;NAME=...")
    parser.add_argument("--replicas", help="numbers of replicas, such as 1,2,4")
    parser.add_argument("--workers", action="store_true", help="replicas are workers, not virtual devices")
    parser.add_argument("--global_batch_size", type=int, default=64, help="of the fewest replicas (%(default)s)")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:at]), words[at + 1 :]
    if args.replicas:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.replicas):
            parser.error(f"--replicas={args.replicas} has to be whole numbers, such as 1,2,4")
        scale = functools.partial(scaled, [int(n) for n in args.replicas.split(",")], args.global_batch_size)
        points = [
            dataclasses.replace(point, title=" ".join([*each, point.title]))
            for each in args.settings
            for point in scale(args.workers, [*flags, *each])
        ]
    else:
        points = [Point(" ".join(each) or "as it is", _train(*flags, *each)) for each in args.settings]
    results = measure(points)
    print(f"\n{shown(points, results)}")
    sys.exit(any("error" in result for result in results))


if __name__ == "__main__":
    run_script(main)
