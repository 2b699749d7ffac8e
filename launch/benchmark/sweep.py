"""`--benchmark_sweep`: every combination of some flags' values, each in a separate process. Host code."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from ..command_line.flags import GROUPS
from ..errors import EXIT_FAILED, UsageError, nearest
from .children import MeasurementFailed, Process, Stopped
from .program import Program
from .sections import settings as described
from .series import RATES, Series, summary

_FORM = "write NAME=VALUE,VALUE;NAME=VALUE,VALUE"
# Flags in which points can't differ: what is done, and what is written where.
_FIXED = {"mode", "run_dir", "export_dir", "export_format", "eval_checkpoint", "progress"}


def parse(text: str) -> list[dict[str, str]]:
    """Returns the settings of each point, in the order in which they are run: the last name's values change fastest.

    A comma or semicolon that belongs to a value has a backslash before it.

    Raises:
      UsageError: a name is no flag or can't be swept, or has no values; values are not checked.
    """
    axes: dict[str, list[str]] = {}
    for part in filter(None, re.split(r"(?<!\\);", text)):
        name, equals, values = part.partition("=")
        name = name.strip().removeprefix("--")
        if not equals:
            raise UsageError(f"--benchmark_sweep={text}: {part!r} has no values; {_FORM}")
        _check_name(name)
        if name in axes:
            raise UsageError(f"--benchmark_sweep={text}: {name} is there twice; write all its values in one place")
        axes[name] = [_plain(value) for value in re.split(r"(?<!\\),", values)]
        if "" in axes[name]:
            raise UsageError(f"--benchmark_sweep={text}: {name} has an empty value; {_FORM}")
        if twice := next((value for value in axes[name] if axes[name].count(value) > 1), None):
            raise UsageError(f"--benchmark_sweep={text}: {name} has the value {twice} twice; leave one out")
    if not axes:
        raise UsageError(f"--benchmark_sweep={text} names no flag; {_FORM}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _plain(value: str) -> str:
    return re.sub(r"\\([,;])", r"\1", value.strip())


def _check_name(name: str) -> None:
    if name not in flags.FLAGS:
        known = [each for names in GROUPS.values() for each in names]
        raise UsageError(f"--benchmark_sweep: --{name} is unknown; {nearest(name, known, 'see --help')}")
    if name in _FIXED or name in GROUPS["Benchmark mode"] or name.startswith("result_"):
        raise UsageError(f"--benchmark_sweep: --{name} is the same for all points; give it by itself")


def run(program: Program, series: Callable[[int], Series]) -> tuple[dict[str, Any], int]:
    """Runs each point of --benchmark_sweep. A failure is reported, and the other points go on.

    Args:
      program: what is run.
      series: makes a series of so many benchmarks.

    Returns:
      (result, exit code): `sweep`, a point each: its settings and rates, or its `error`; `best`, that with the most
      examples a second. The code is not 0 if a point failed, or if it was stopped: then the later ones are missing.

    Raises:
      UsageError: a point is a mistake; nothing has been started then.
    """
    points = parse(flags.FLAGS.benchmark_sweep)
    for settings in points:
        program.check_run(settings)
    measured: list[dict] = []
    sweep: list[dict] = []
    code = 0
    benchmarks = series(len(points))
    try:
        for settings in points:
            command = program.command(settings)
            try:
                result = benchmarks.measure(described(settings), functools.partial(_process, command))
            except MeasurementFailed as failure:
                sweep.append({"settings": settings, **dict.fromkeys(RATES), "error": str(failure)})
                code = EXIT_FAILED
                continue
            measured.append(result)
            sweep.append({"settings": settings, **{name: result.get(name) for name in RATES}})
    except Stopped as stopped:
        code = stopped.code
    best = max((point for point in sweep if point["examples_per_sec"]), key=_rate, default=None)
    return {
        **summary(measured),
        "sweep": sweep,
        "best": best and {"settings": best["settings"]},
        "warnings": [*_missing(sweep, len(points)), *_close_to(best, sweep), *benchmarks.warnings],
    }, code


def _process(command: list[str], path: Path) -> Process:
    """Makes the process that measures one setting, and writes its result to `path`."""
    return Process([*command, f"--result_json={path}"])


def _rate(point: dict) -> float:
    return point["examples_per_sec"]


def _missing(sweep: list[dict], count: int) -> list[str]:
    return [f"stopped after {len(sweep)} of {count} points"] if len(sweep) < count else []


def _close_to(best: dict | None, sweep: list[dict]) -> list[str]:
    """Returns one line with the points whose intervals overlap the best's, so that it may not be better."""
    if not best or not best["interval"]:
        return []
    close = [
        described(point["settings"])
        for point in sweep
        if point is not best and point["interval"] and point["interval"][1] >= best["interval"][0]
    ]
    return [f"within the best's interval, so perhaps as fast: {'; '.join(close)}"] if close else []
