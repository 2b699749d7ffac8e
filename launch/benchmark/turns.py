"""`--baseline_cmd`: this benchmark and another command in turn, A B A B, so that a drifting machine is fair to both.

Host code; TensorFlow is not started before the last turn has ended.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from .. import errors
from ..command_line.values import differences
from ..errors import EXIT_FAILED, UsageError
from ..host import process
from . import baseline, schema
from .children import MeasurementFailed, Process, Stopped
from .program import Program
from .series import Series

_ONE_ROUND = {"benchmark_rounds": "1"}


def run(program: Program, series: Callable[[int], Series]) -> tuple[dict[str, Any] | None, int]:
    """Runs each of the two --benchmark_rounds times.

    Args:
      program: what is run.
      series: makes a series of so many benchmarks.

    Returns:
      (result, exit code): our turns as the rounds of one benchmark, and `baseline`, what `compare` returns of the
      pairs; None without a whole pair. The code is not 0 if a turn failed or it was stopped.

    Raises:
      UsageError: a mistake in our flags, before anything is started; or the command wrote what can't be compared.
    """
    command, turns = flags.FLAGS.baseline_cmd, flags.FLAGS.benchmark_rounds
    program.check_run(_ONE_ROUND)
    ours: list[dict] = []
    theirs: list[dict] = []
    code = 0
    benchmarks = series(2 * turns)
    try:
        for turn in range(1, turns + 1):
            ours.append(_whole(benchmarks.measure(f"turn {turn}", lambda path: _our_process(program, path)), "this"))
            found = benchmarks.measure(f"turn {turn} of the baseline", lambda path: _their_process(command, path))
            theirs.append(_whole(found, "--baseline_cmd"))
    except MeasurementFailed:
        code = errors.fail(EXIT_FAILED, f"--baseline_cmd: not all of {turns} turns were run; see above")
    except Stopped as stopped:
        code = stopped.code
    pairs = len(theirs)
    if not pairs:
        return None, code
    return _compared(ours[:pairs], theirs, command, turns), code


def _our_process(program: Program, path: Path) -> Process:
    return Process([*program.command(_ONE_ROUND), f"--result_json={path}"])


def _their_process(command: str, path: Path) -> Process:
    return Process(["/bin/sh", "-c", f"{command} --result_json={shlex.quote(str(path))}"])


def _whole(result: dict, of: str) -> dict:
    problems = schema.check(result) or ([] if "calls" in result else ["calls is missing: it is of several runs"])
    if problems:
        raise UsageError(f"{of}: what it wrote to --result_json is no such result: {problems[0]}; use --mode=benchmark")
    return result


def _compared(ours: Sequence[dict], theirs: Sequence[dict], command: str, turns: int) -> dict[str, Any]:
    with process.without_start_up_noise():
        from .compare import compare

    result = merged(ours)
    result["baseline"] = {"command": command, **compare(ours, theirs)}
    result["warnings"] += [line for each in theirs for line in baseline.warnings(ours[0], each)]
    if other := differences(*map(baseline.work_of, (theirs[0], ours[0]))):
        result["warnings"].append(f"baseline: it is of other work ({'; '.join(other)})")
    if len(theirs) < turns:
        result["warnings"].append(f"stopped after {len(theirs)} of {turns} turns")
    result["warnings"] = list(dict.fromkeys(result["warnings"]))
    return result


def merged(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges results of the same benchmark into one: all their rounds, and the figures of all calls.

    What has no sum is the first's (environment, warm-up), or that of the turn that was disturbed most (noise).
    """
    from .measure import intervals, statistics

    rounds = [calls for turn in turns for calls in _rounds(turn["calls"])]
    timed = statistics.columns(rounds)
    noise = max((turn["noise"] for turn in turns), key=lambda found: found.get("lost_share") or 0)
    return {
        **turns[0],
        **statistics.summarize([call for calls in rounds for call in calls]),
        "calls": timed,
        "rounds": [statistics.describe_round(calls) for calls in rounds],
        "interval": intervals.interval(timed, noise.get("lost_share") or 0),
        "noise": noise,
        "warnings": list(dict.fromkeys(line for turn in turns for line in turn["warnings"])),
    }


def _rounds(calls: Mapping[str, Any]) -> list[list]:
    """Returns the timed calls of a result, by round."""
    from .measure.statistics import Call

    columns = [calls[name] or itertools.repeat(None) for name in Call._fields]
    rows = zip(calls["round"], *columns, strict=False)  # what is not known has no column
    return [
        [Call(*values) for _, *values in group] for _, group in itertools.groupby(rows, key=lambda values: values[0])
    ]
