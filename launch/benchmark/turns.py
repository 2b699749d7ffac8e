"""`--baseline_cmd`: this benchmark and another command in turn, A B A B, so that a drifting machine is fair to both.

Host code; TensorFlow is not started before the last turn has ended.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from absl.testing import flagsaver

from .. import errors, explanations
from ..command_line import checks, paths, uses
from ..command_line import config as configs
from ..command_line.flags import USES
from ..command_line.values import differences
from ..errors import EXIT_FAILED, UsageError
from ..host import process
from ..run import results
from . import baseline, schema, table
from . import program as programs
from .children import MeasurementFailed, Process, Stopped, stoppable
from .program import Program
from .series import Series


def is_asked_for() -> bool:
    """Returns whether the flags, which have been parsed, ask for turns with another command."""
    return bool(flags.FLAGS.baseline_cmd)


def run_train(argv: Sequence[str], trainer_class: type | None, has_data: bool) -> int:
    """Runs crankshaft train, or a script that calls its `main`, in turn with the other command.

    Returns the exit code. Raises `UsageError`.
    """
    strategy = flags.FLAGS.strategy
    if "TF_CONFIG" in os.environ and strategy in ("multi_worker", "parameter_server"):
        raise UsageError(
            f"--baseline_cmd starts --strategy={strategy} itself, on one machine, and TF_CONFIG makes this process a "
            "part of a cluster; use crankshaft local, or unset TF_CONFIG"
        )

    def check(environment: Mapping[str, str]) -> None:
        _check(configs.from_flags(trainer_class, has_data, environment))

    return run(programs.of_this_process(argv, check))


def run_local(
    start: tuple[str, ...], cluster: Sequence[str], tasks: Mapping[str, int], unknown: tuple[str, ...]
) -> int:
    """Runs what crankshaft local was asked to, in turn with the other command.

    Returns the exit code; raises `UsageError`.

    Args:
      start: as in `Program`.
      cluster: crankshaft local's own flags.
      tasks: how many it starts of each type.
      unknown: arguments that only the script knows.
    """

    def check(environment: Mapping[str, str]) -> None:
        if start != programs.TRAIN:
            return  # only the script knows what it trains, and on what
        with flagsaver.flagsaver(strategy="parameter_server" if "ps" in tasks else "multi_worker"):
            _check(configs.from_flags(None, False, environment))

    return run(Program(start, check, tuple(cluster), tasks, unknown))


def _check(config: configs.Config) -> None:
    checks.check(config)
    baseline.check(config)


def run(program: Program) -> int:
    """Runs both --benchmark_rounds times, prints and writes the result. Returns the exit code; raises `UsageError`."""
    values = flags.FLAGS.flag_values_dict()
    if values["baseline"]:
        raise UsageError("--baseline_cmd and --baseline are both given; use one of them")
    if values["benchmark_part"] == "checkpoint":
        raise UsageError(
            "--baseline_cmd compares rates of steps, and --benchmark_part=checkpoint has none; leave it out"
        )
    uses.check({"baseline_cmd": USES["baseline_cmd"]}, values)
    paths.check(values)
    paths.check_results(values)
    program.check_run()
    try:
        with stoppable():
            result, code = _measure(program)
    except Stopped as stopped:  # while it summed up
        return stopped.code
    if result is None:
        return code
    table.print_benchmark(result)
    try:
        results.write(result, values)
    except OSError as error:
        return errors.fail(*explanations.explain(error))
    if not code:
        from .compare import exit_code

        code = exit_code(result["baseline"], flags.FLAGS.fail_below)
    return code


def _measure(program: Program) -> tuple[dict[str, Any] | None, int]:
    """Returns (result, exit code): our turns as the rounds of one benchmark, and `baseline`, what `compare` returns.

    There is no result without a whole pair. The code is not 0 if a turn failed or it was stopped.
    """
    command, turns = flags.FLAGS.baseline_cmd, flags.FLAGS.benchmark_rounds
    ours: list[dict] = []
    theirs: list[dict] = []
    code = 0
    series = Series(2 * turns, os.environ, quiet=flags.FLAGS.progress == "off")
    try:
        for turn in range(1, turns + 1):
            ours.append(_whole(series.measure(f"turn {turn}", lambda path: _our_process(program, path)), "this"))
            result = series.measure(f"turn {turn} of the baseline", lambda path: _their_process(command, path))
            theirs.append(_whole(result, "--baseline_cmd"))
    except MeasurementFailed:
        code = errors.fail(EXIT_FAILED, f"--baseline_cmd: not all of {turns} turns were run; see above")
    except Stopped as stopped:
        code = stopped.code
    pairs = len(theirs)
    if not pairs:
        return None, code
    heading = schema.heading(flags.FLAGS.global_batch_size)
    result = _compared(ours[:pairs], theirs, command, turns)
    return {**heading, **{name: value for name, value in result.items() if name not in heading}}, code


def _our_process(program: Program, path: Path) -> Process:
    return Process([*program.one_round(), f"--result_json={path}"])


def _their_process(command: str, path: Path) -> Process:
    return Process(["/bin/sh", "-c", f"{command} --result_json={shlex.quote(str(path))}"])


def _whole(result: dict, of: str) -> dict:
    problems = schema.check(result)
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
