"""Measures peers in rounds, in turn, so that a machine that drifts is fair to all: statistics and tables. Host code.

A peer is a function that measures once and returns a result. `Resident` makes one of a program that stays (`peer.py`)
and does a piece of its work in each round, a fraction of a second beside the others' pieces; a program that runs to its
end (`processes.run_together`) makes another. What is compared are the results of one round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crankshaft.parts.launchers.children import Child, Children, wait
from crankshaft.parts.launchers.output import last_lines
from crankshaft.parts.launchers.resources import usable_cores

from .markdown import spread, table
from .peer import READY
from .processes import MeasurementFailed, Process, find_versions

FEWEST = 6  # values whose extremes hold their median in 95 % of cases: 1 - 2 / 2**6
_FIRST_STEPS, _GROWTH = 2, 10
_SECONDS_TO_END = 10.0
_SHARED = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # or the first takes all of a GPU

Result = Mapping[str, Any]  # steps_per_sec, examples_per_sec, and what else a peer finds


# -- Programs that stay -----------------------------------------------------------------------------------------------


class Resident:
    """A program that stays, and does a piece of its work at each call. It is stopped in between.

    Args:
      children: where it is started, at the first call.
      process: the program.
      batch: examples in its step.
      seconds: about how long a piece takes.
      steps: in a piece; None: as many as take `seconds`.
      folder: where it runs.

    Attributes:
      child: its process, from the first call on.
    """

    def __init__(
        self,
        children: Children,
        process: Process,
        batch: int,
        *,
        seconds: float = 0.5,
        steps: int | None = None,
        folder: str | Path | None = None,
    ):
        self._process = dataclasses.replace(process, variables={**_SHARED, **process.variables})
        self._children, self._folder = children, folder
        self._batch, self._seconds, self._steps = batch, seconds, steps
        self.child: Child | None = None
        self._quality: Result = {}

    def __call__(self) -> Result:
        """Runs a piece. Raises `MeasurementFailed`."""
        if not self.child:
            self._start()
        rate = self._rate(self._steps)
        return {"steps_per_sec": rate, "examples_per_sec": rate * self._batch, **self._quality}

    def _start(self) -> None:
        """Starts it, and warms it up with pieces of growing length."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it stays as long as this does
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self.child = self._process.start(self._children, self._folder, **pipes)
        word, _, losses = self._answer().partition(" ")
        if word != READY:
            raise self._failed(f"it printed {word!r} instead of {READY!r}")
        self._quality = json.loads(losses) if losses else {}
        steps = self._steps or _FIRST_STEPS
        self._rate(steps)  # compiles
        rate = self._rate(steps)
        while not self._steps and steps / rate < self._seconds / 2:  # of few steps a call's start takes most
            steps = min(_GROWTH * steps, math.ceil(rate * self._seconds))
            rate = self._rate(steps)
        self._steps = self._steps or max(1, round(rate * self._seconds))

    def _rate(self, steps: int) -> float:
        self.child.send(signal.SIGCONT)
        try:
            self.child.stdin.write(b"%d\n" % steps)
            line = self._answer()
            self.child.send(signal.SIGSTOP)  # lest it reads ahead in others' time
            return float(line)
        except (OSError, ValueError):
            raise self._failed("it did not answer with steps per second") from None

    def _answer(self) -> str:
        return self.child.stdout.readline().decode().strip()

    def _failed(self, why: str) -> MeasurementFailed:
        self._log.seek(0)
        return MeasurementFailed(why, last_lines(self._log.read()))

    def end_input(self) -> None:
        """Has it end by itself, so that it leaves nothing behind."""
        if self.child:
            with contextlib.suppress(OSError):
                self.child.send(signal.SIGCONT)
                self.child.stdin.close()


@contextlib.contextmanager
def residents(processes: Mapping[str, Process], batches: Mapping[str, int], **options) -> Iterator[dict[str, Resident]]:
    """Yields programs as peers that stay until the end of the context. `options` are those of `Resident`."""
    with Children() as children:
        peers = {name: Resident(children, process, batches[name], **options) for name, process in processes.items()}
        try:
            yield peers
        finally:
            for peer in peers.values():
                peer.end_input()
            wait([peer.child for peer in peers.values() if peer.child], _SECONDS_TO_END)


# -- Rounds and statistics --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Measured:
    """What has been measured of a workload.

    Attributes:
      title: the workload.
      results: by peer, one for each round.
      failed: by peer, why it has none.
      quality: by peer, loss and metric of the evaluation data after some steps, of those that have them.
      commands: by peer, as one would type it.
    """

    title: str
    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    results: dict[str, list[Result]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    quality: dict[str, Result] = dataclasses.field(default_factory=dict)

    def rates(self, peer: str, key: str = "steps_per_sec") -> list[float]:
        return [result[key] for result in self.results.get(peer, [])]

    def cell(self, peer: str | None, column: str) -> str:
        """Formats a peer's rates; with its name, if the column has another one."""
        if peer is None:
            return "–"
        shown = "failed" if peer in self.failed else spread(self.rates(peer))
        return shown if peer == column else f"{shown} {peer}"

    def ratios(self, ours: str, theirs: str) -> list[float]:
        """Returns our examples per second over theirs, by rounds."""
        both = (self.rates(peer, "examples_per_sec") for peer in (ours, theirs))
        return [a / b for a, b in zip(*both, strict=False)]

    def fastest(self, peers: Sequence[str]) -> str | None:
        """Returns the peer with the highest median."""
        return max(filter(self.rates, peers), key=lambda peer: statistics.median(self.rates(peer)), default=None)


def measure(title: str, peers: Mapping[str, Callable[[], Result]], rounds: int, commands: Mapping = {}) -> Measured:
    """Measures each peer once a round, every other round backwards. One that fails is left out of the rest."""
    measured = Measured(title, commands, {name: [] for name in peers})
    for number in range(rounds):
        for name in reversed(peers) if number % 2 else peers:
            if name in measured.failed:
                continue
            try:
                result = peers[name]()
                measured.results[name].append(result)
                if found := quality(result):
                    measured.quality[name] = found
            except MeasurementFailed as failure:
                measured.failed[name] = str(failure)
                measured.results[name] = []
                print("\n".join([f"{title}: {name} failed: {failure}", *failure.last_lines]), file=sys.stderr)
        newest = [f"{name} {spread(measured.rates(name)[-1:])}" for name in peers]
        print(f"{title}, round {number + 1} of {rounds}: {', '.join(newest)} steps/s", file=sys.stderr, flush=True)
    return measured


def quality(result: Result) -> Result:
    """Returns loss and metric of the evaluation data, if a result has them."""
    return {key: result[key] for key in ("loss", "accuracy", "auc") if key in result}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes the 95 % interval of the median of independent values, from `FEWEST` on; of fewer their extremes.

    As many of the sorted values are left out at each end. Conover 1999, Practical Nonparametric Statistics, 3.2.
    """
    values = sorted(values)
    left_out = max(0, math.floor(len(values) / 2 - 0.98 * len(values) ** 0.5))
    return values[left_out], values[-1 - left_out]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Formats the median of the rounds' ratios, and its 95 % interval if there are enough of them."""
    return shown_ratio([a / b for a, b in zip(ours, theirs, strict=True)])


def shown_ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    sure = " ({:.2f}–{:.2f})".format(*interval(ratios)) if len(ratios) >= FEWEST else ""
    return f"{statistics.median(ratios):.2f}x{sure}"


# -- The report -------------------------------------------------------------------------------------------------------

Rows = Sequence[tuple[str, Mapping[str, str]]]  # one of ours, and what it is beside: the peer, by the column's title
Compared = Sequence[tuple[Measured, Rows]]


def speed_table(compared: Compared) -> str:
    """Returns a row for each of ours, with a column for its rate, for each that it is beside, and for each ratio."""
    columns = list(dict.fromkeys(column for _, rows in compared for _, beside in rows for column in beside))
    names = list(dict.fromkeys(ours for _, rows in compared for ours, _ in rows))
    lines = []
    for measured, rows in compared:
        for ours, beside in rows:
            theirs = [measured.cell(beside.get(column), column) for column in columns]
            ratios = [shown_ratio(measured.ratios(ours, beside.get(column, ""))) for column in columns]
            lines.append([measured.title, ours, measured.cell(ours, ours), *theirs, *ratios])
    header = ["", "", "steps/s: median (least–most)", *columns, *(f"against {column} (95 %)" for column in columns)]
    if len(names) == 1:
        header[2], lines = f"{names[0]}, steps/s", [[line[0], *line[2:]] for line in lines]
        return table([header[0], *header[2:]], lines)
    return table(header, lines, 2)


def quality_table(all_measured: Sequence[Measured]) -> str:
    """Returns loss and metric of the peers that have them: who computes something else, shows here."""
    rows = [
        [measured.title, peer, ", ".join(f"{name} {value:.4f}" for name, value in quality.items())]
        for measured in all_measured
        for peer, quality in measured.quality.items()
    ]
    return table(["", "", "of the evaluation data, after equal steps"], rows, 3) if rows else ""


def cpu_model() -> str:
    """Reads the processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else "unknown CPU"


def facts(others: Iterable[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """Finds when, by which command, on which machine and how busy it is, before the first measurement.

    `others`: other Pythons, and the packages that they must have. Raises `SystemExit` if one lacks them.
    """
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras")}
    for python, packages in others:
        versions |= find_versions(python, packages) if packages else {}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "cpu": cpu_model(),
        "usable_cores": len(usable_cores()),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def report(found: Mapping[str, Any], compared: Compared, args: argparse.Namespace) -> str:
    """Returns everything in Markdown, and writes every figure to `--json`."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['cpu']}, {found['usable_cores']} cores, load before {found['load_before']}; {versions}"
    note = f"{found['date']}, {machine}. Rounds: {args.rounds}, {args.seconds:g} s each: `{found['command']}`"
    failed = [f"- {m.title}: {peer} failed: {why}" for m, _ in compared for peer, why in m.failed.items()]
    if args.json:
        Path(args.json).write_text(json.dumps(figures(found, compared), indent=1), encoding="utf-8")
    tables = speed_table(compared), "\n".join(failed), quality_table([measured for measured, _ in compared])
    return "\n\n".join(filter(None, [note, *tables]))


def figures(found: Mapping[str, Any], compared: Compared) -> dict[str, Any]:
    """Returns everything that was measured. Plain JSON."""
    workloads = [
        {
            **dataclasses.asdict(measured),
            "ratios": [
                {"ours": ours, "beside": peer, "by_rounds": measured.ratios(ours, peer)}
                for ours, beside in rows
                for peer in beside.values()
            ],
        }
        for measured, rows in compared
    ]
    return {**found, "workloads": workloads}


# -- The command line -------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
    """The options of every comparison, with their defaults."""
    parser.add_argument("--rounds", type=count, default=rounds, help="measurements of each peer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=seconds, help="of a measurement (%(default)s)")
    parser.add_argument("--json", help="write all figures here")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line; what stands after `--` are `flags`."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.flags = words[at + 1 :]
    return args


def count(text: str) -> int:
    """Converts a number of rounds, one or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} measures nothing; use 1 or more")
    return number


def check_names(parser: argparse.ArgumentParser, option: str, names: Sequence[str], there_are: Sequence[str]) -> None:
    """Ends the program with a line if a name is unknown."""
    if unknown := [name for name in names if name not in there_are]:
        parser.error(f"{option}={','.join(unknown)} is unknown; use some of {', '.join(there_are)}")
