"""What the races beside other programs share: the workloads, processes run to their end, medians, tables.

Code of scripts, not of tests, on the host. Imports no library that computes: each peer's process brings its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import children
from .children import MeasurementFailed, Process
from .markdown import spread, table
from .workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[1]
# From the repository, where commands are run, so that they can be copied to another machine.
PYTHON = os.path.relpath(sys.executable, ROOT) if sys.executable.startswith(f"{ROOT}{os.sep}") else sys.executable
NEEDED = ("benchmarks.children", "benchmarks.workloads")  # by peers of other Pythons
IMAGES = ("mlp", "wide", "cnn")  # the workloads that every library's peer has
MEASUREMENT_TIMEOUT_SECONDS = 600


# -- Processes --------------------------------------------------------------------------------------------------------


def run_together(processes: Sequence[Process]) -> None:
    """Runs the processes side by side to their ends, each as it comes. Raises `MeasurementFailed`."""
    children.run_together(
        processes,
        environment=children.untuned(os.environ),
        timeout_seconds=MEASUREMENT_TIMEOUT_SECONDS,
        folder=ROOT,
    )


def run_process(command: Sequence[str], result_path: Path) -> dict:
    """Runs one peer to its end and reads the result that it wrote."""
    run_together([Process(command)])
    return read_result(result_path)


def read_result(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_result(path: str, result: dict) -> None:
    Path(path).write_text(json.dumps(result), encoding="utf-8")


def run_script(main: Callable[[], None]) -> None:
    """Calls `main`; ends the processes of a measurement on SIGTERM too; a failed one is not a traceback."""
    try:
        with children.stoppable():
            main()
    except MeasurementFailed as failure:
        raise SystemExit("\n".join([f"a measurement failed: {failure}", *failure.last_lines])) from None
    except children.Stopped as stopped:
        raise SystemExit(stopped.code) from None


def runs_with(python: str, *modules: str) -> bool:
    """Whether a Python, given by its path, can import modules."""
    try:
        return not subprocess.run(
            [python, "-c", f"import {', '.join(modules)}"], capture_output=True, cwd=ROOT
        ).returncode
    except OSError:
        return False


# -- The race ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Race:
    """One workload's peers and what has been measured of each: name to a list, one entry a round."""

    name: str
    seconds: float
    quality_steps: int
    measured: dict[str, list[dict]] = dataclasses.field(default_factory=dict)
    commands: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    def rates(self, peer: str) -> list[float]:
        return [measurement["steps_per_sec"] for measurement in self.measured.get(peer, [])]

    def rate(self, peer: str) -> float:
        return statistics.median(self.rates(peer))

    def cell(self, peer: str) -> str:
        """For a table."""
        return spread(self.rates(peer))

    def measure(self, peer: str, commands: str, run: Callable[[Path], dict]) -> None:
        """Keeps what `run` gives, called with an empty folder; `commands` is what the report says of it."""
        with tempfile.TemporaryDirectory() as folder:
            started, load_before = time.perf_counter(), os.getloadavg()[0]
            result = run(Path(folder))
        self.commands[peer] = commands
        self.measured.setdefault(peer, []).append({**result, "load_before": load_before})
        print(
            f"{self.name:<5} {peer:<20} {result['steps_per_sec']:9.1f} steps/s  "
            f"(load before {load_before:.2f}, took {time.perf_counter() - started:.0f} s)",
            file=sys.stderr,
        )

    def quality(self, peer: str, run: Callable[[], dict]) -> dict:
        """Loss and metric of Crankshaft after some steps: a run of its own, the same each time, so made once."""
        result = self.measured[peer][0] if peer in self.measured else run()["eval"]
        return {name: result[name] for name in ("loss", self.workload.metric)}


# -- The report -------------------------------------------------------------------------------------------------------


def quality_table(races: Sequence[Race], steps: int) -> str:
    """Loss and metric of the peers that have them: who computes something else, shows here."""
    metrics = dict.fromkeys(race.workload.metric for race in races)
    return table(
        [f"after {steps} steps", "peer", "evaluation loss", " or ".join(metrics)],
        [row for race in races for row in _quality(race)],
    )


def _quality(race: Race) -> Iterator[list[str]]:
    for peer, (first, *_) in race.measured.items():
        if "loss" in first:
            yield [race.workload.title, peer, f"{first['loss']:.4f}", f"{first[race.workload.metric]:.2%}"]


def find_facts(arguments: argparse.Namespace) -> dict:
    """When, by which command and on how busy a machine: as it is before the first measurement."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": shlex.join([".venv/bin/python", *sys.argv]),
        "load_before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        **{name: getattr(arguments, name) for name in ("rounds", "seconds", "quality_steps")},
    }


def find_versions(races: Sequence[Race]) -> dict[str, str]:
    versions = {}
    for race in races:
        for result, *_ in race.measured.values():
            versions |= result.get("versions") or result.get("environment", {}).get("versions", {})
    return versions


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else "unknown CPU"


def report(races: Sequence[Race], facts: dict, note: str, *tables: str) -> str:
    """In Markdown: the machine, the note, the tables, the commands. `facts` needs cpu, usable_cores, versions too."""
    commands = "\n".join(command for race in races for command in race.commands.values())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return "\n\n".join(
        (
            f"{facts['date']}, {facts['cpu']}, {facts['usable_cores']:g} cores, load before {facts['load_before']}; "
            + versions,
            note,
            *tables,
            f"```\n{facts['command']}\n\n# each measurement, in a process of its own:\n{commands}\n```",
        )
    )


def write_figures(path: str, facts: dict, races: Sequence[Race]) -> None:
    measured = {race.name: race.measured for race in races}
    Path(path).write_text(json.dumps({**facts, "measured": measured}, indent=1), encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser, workloads: Sequence[str] = IMAGES) -> None:
    """The options of every race; `workloads` are those that it can run."""
    parser.add_argument("--workloads", default=",".join(workloads), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each peer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="steady state of each measurement (%(default)s)")
    parser.add_argument("--quality_steps", type=int, default=100, help="before loss and accuracy are compared")
    parser.add_argument("--json", help="write the figures here too")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    arguments.workloads = arguments.workloads.split(",")
    known = parser.get_default("workloads").split(",")
    if unknown := set(arguments.workloads) - set(known):
        parser.error(f"--workloads={','.join(sorted(unknown))} is unknown; use some of {', '.join(known)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds={arguments.rounds} measures nothing; use 1 or more")


def parse_peer_arguments(doc: str, **counts: int) -> argparse.Namespace:
    """The command line of a process in peers/. All workers of a measurement get the same.

    `counts` are the integers that this peer takes besides, with their defaults.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--quality_steps", type=int, required=True, help="trained before loss and accuracy are taken")
    parser.add_argument("--warm_up_steps", type=int, required=True, help="more steps before the clock starts")
    parser.add_argument("--steps", type=int, required=True, help="timed")
    parser.add_argument("--result_json", required=True, help="where the first worker writes what it found")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()
