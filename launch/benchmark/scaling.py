"""`--benchmark_replicas`: the same benchmark on several numbers of replicas, and how well it scales. Host code.

Weak: each replica keeps its batch, so more replicas do more work (Gustafson, "Reevaluating Amdahl's law", CACM 31(5),
1988). Strong: the global batch is kept, so each replica does less (Amdahl, AFIPS 1967). Efficiency is, in both, the
rate of examples a replica over that of the fewest replicas: 1 where twice the replicas do twice as much.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from ..cluster import shares
from ..errors import EXIT_FAILED, UsageError
from .children import MeasurementFailed, Process, Stopped
from .program import Program
from .series import RATES, Series, summary

KINDS = ("weak", "strong")


@dataclasses.dataclass(frozen=True)
class Point:
    """A number of replicas and a batch, as they are to be run."""

    replicas: int
    global_batch_size: int
    program: Program
    settings: Mapping[str, str]
    cores: frozenset[int] | None
    variables: Mapping[str, str]

    @property
    def title(self) -> str:
        return f"replicas={self.replicas} global_batch_size={self.global_batch_size}"

    def process(self, path) -> Process:
        """Makes the process that measures the point, and writes its result to `path`."""
        command = [*self.program.command(self.settings), f"--result_json={path}"]
        return Process(command, self.variables, self.cores)


def parse(text: str) -> list[int]:
    """Returns the numbers of replicas, the fewest first."""
    return sorted({int(count) for count in text.split(",")})


def run(program: Program, series: Callable[[int], Series]) -> tuple[dict[str, Any], int]:
    """Runs on each number of replicas, with the batch kept a replica and as a whole. The fewest are run once for both.

    Args:
      program: what is run.
      series: makes a series of so many benchmarks.

    Returns:
      (result, exit code): `scaling`, an entry for each number and kind: replicas, kind, global_batch_size, rates,
      efficiency, or its `error`. The code is not 0 if one failed, or if it was stopped.

    Raises:
      UsageError: one of the runs is a mistake; nothing has been started then.
    """
    counts = parse(flags.FLAGS.benchmark_replicas)
    hardware = Hardware(program, counts[-1], os.environ)
    batches = {(count, kind): _batch(count, counts[0], kind) for count in counts for kind in KINDS}
    points = {
        key: hardware.point(*key) for key in dict.fromkeys((count, batch) for (count, _), batch in batches.items())
    }
    for point in points.values():
        point.program.check_run(point.settings)
    results: dict[tuple[int, int], dict] = {}
    code = 0
    benchmarks = series(len(points))
    try:
        for key, point in points.items():
            try:
                results[key] = benchmarks.measure(point.title, point.process)
            except MeasurementFailed as failure:
                results[key] = {"error": str(failure)}
                code = EXIT_FAILED
    except Stopped as stopped:
        code = stopped.code
    entries = [
        _entry(count, kind, batch, results[count, batch])
        for (count, kind), batch in batches.items()
        if (count, batch) in results
    ]
    _add_efficiency(entries)
    measured = [result for result in results.values() if "error" not in result]
    return {**summary(measured), "scaling": entries, "warnings": [*hardware.warnings, *benchmarks.warnings]}, code


def _batch(count: int, fewest: int, kind: str) -> int:
    """Returns the global batch of `count` replicas; --global_batch_size is that of the fewest replicas."""
    batch = flags.FLAGS.global_batch_size
    if kind == "strong":
        return batch
    if batch % fewest:
        raise UsageError(
            f"--global_batch_size={batch} does not divide over the {fewest} replicas of --benchmark_replicas; "
            f"use {batch // fewest * fewest or fewest}"
        )
    return batch // fewest * count


def _entry(count: int, kind: str, batch: int, result: dict) -> dict:
    entry = {"replicas": count, "kind": kind, "global_batch_size": batch}
    entry |= {name: result.get(name) for name in RATES}
    return entry | ({"error": result["error"]} if "error" in result else {})


def _add_efficiency(entries: list[dict]) -> None:
    first = entries[0] if entries else {}
    for entry in entries:
        rates = first["examples_per_sec"], entry["examples_per_sec"]
        a_replica = [rate and rate / n for rate, n in zip(rates, (first["replicas"], entry["replicas"]), strict=True)]
        entry["efficiency"] = a_replica[1] / a_replica[0] if all(a_replica) else None


class Hardware:
    """The hardware of replicas: processes, GPUs, or virtual devices, each with as many cores as any other.

    Args:
      program: what is run.
      most: the largest number of replicas.
      environment: this process's variables.
    """

    def __init__(self, program: Program, most: int, environment: Mapping[str, str]):
        self._program = program
        self._strategy = flags.FLAGS.strategy if flags.FLAGS["strategy"].present else "mirrored"
        if program.cluster is not None and "ps" in program.tasks:
            self._strategy = "parameter_server"
        elif program.cluster is not None:
            self._strategy = "multi_worker"
        self._check()
        self._gpus = shares.visible_gpus(environment) if self._strategy == "mirrored" else []
        self._cores = shares.usable_cores()
        others = sum(count for kind, count in program.tasks.items() if kind != "worker")
        self._cores_each = len(self._cores) // (most + others)
        self._most = most

    def _check(self) -> None:
        if self._strategy not in ("mirrored", "multi_worker", "parameter_server"):
            raise UsageError(
                f"--benchmark_replicas is for several replicas, and --strategy={self._strategy}; use mirrored or "
                "multi_worker"
            )
        if self._strategy == "parameter_server" and self._program.cluster is None:
            raise UsageError(
                "--benchmark_replicas needs servers for --strategy=parameter_server; use "
                "crankshaft local --ps=1 -- and the flags"
            )
        if flags.FLAGS["num_virtual_devices"].present:
            raise UsageError("--num_virtual_devices is what --benchmark_replicas sets; leave it out")

    @property
    def warnings(self) -> list[str]:
        if self._uses_gpus or self._cores_each:
            return []
        return [f"{self._most} replicas share {len(self._cores)} cores: efficiency is bounded by that too"]

    @property
    def _uses_gpus(self) -> bool:
        return len(self._gpus) >= self._most > 1

    def point(self, count: int, batch: int) -> Point:
        """Returns the point of a number of replicas and a batch."""
        settings = {"strategy": self._strategy, "global_batch_size": str(batch)}
        if self._strategy != "mirrored":
            program = self._program.with_workers(count, self._cores_each or 1)
            return Point(count, batch, program, settings, None, {})
        if self._uses_gpus:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[:count])}
            return Point(count, batch, self._program, settings, None, visible)
        settings["num_virtual_devices"] = str(count)
        cores = frozenset(self._cores[: count * self._cores_each]) or None
        return Point(count, batch, self._program, settings, cores, {})
