"""A benchmark's result: what it begins with, and the check of `--baseline`, an earlier one to compare with. Host code.

Nothing here starts TensorFlow. docs/benchmark_result.md says what each key means.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from .. import errors
from ..command_line import paths
from ..command_line.config import Config
from ..command_line.values import differences
from ..errors import UsageError

VERSION = "crankshaft.benchmark/2"
_NUMBER, _NONE = (int, float), (type(None),)
# What a result of steps has, by type.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("date", "command", "mode", "model", "strategy"), (str,)),
    **dict.fromkeys(("global_batch_size", "num_replicas", "step", "steps"), (int,)),
    **dict.fromkeys(("model_arg", "input_arg", "train", "environment", "noise", "calls", "step_ms"), (dict,)),
    **dict.fromkeys(("rounds", "warnings"), (list,)),
    **dict.fromkeys(("examples_per_sec", "steps_per_sec", "wall_seconds", "mean", "jitter"), _NUMBER),
    **dict.fromkeys(("input_wait_fraction", "compile_seconds", "first_step_seconds", "peak_rss_mb"), _NUMBER),
    **dict.fromkeys(("stderr", "reduce_fraction", "device_peak_mb"), _NUMBER + _NONE),
    "input": (str, *_NONE),
    "interval": (list, *_NONE),
}
# Defines the work that is measured: two rates of different work can't be compared.
_WORK = ("model", "model_arg", "input", "input_arg", "global_batch_size")
MOST_BYTES = 64 << 20
_MACHINE = ("cpu", "usable_cores", "gpus")


def heading(global_batch_size: int) -> dict[str, Any]:
    """Returns a result's beginning: schema, date (UTC, ISO 8601), command (as one would type it), global_batch_size."""
    program, *arguments = sys.orig_argv
    return {
        "schema": VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(program), *arguments]),
        "global_batch_size": global_batch_size,
    }


def problems(result: Any) -> list[str]:
    """Returns what is missing or of a wrong type in a result of this version, a line each; none if it is whole."""
    version = result.get("schema") if isinstance(result, Mapping) else None
    if version != VERSION:
        return [f"its schema is {version}, and this is {VERSION}"]
    wrong = [
        f"{name} is {repr(result[name])[:40] if name in result else 'missing'}"
        for name, types in _TYPES.items()
        if not isinstance(result.get(name), types) or name not in result
    ]
    return wrong or _problems_of_calls(result["calls"])


def _problems_of_calls(calls: Mapping[str, Any]) -> list[str]:
    """Checks the columns that rates are computed of: as many numbers in each, above 0."""
    columns = [calls.get(name) for name in ("steps", "examples", "seconds", "round")]
    if not all(isinstance(column, list) and column and len(column) == len(columns[0]) for column in columns):
        return ["calls has no columns steps, examples, seconds and round of one length"]
    if not all(isinstance(value, _NUMBER) and value > 0 for column in columns[:3] for value in column):
        return ["calls holds what is not a number above 0"]
    return []


def work_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the work that a result measured."""
    return {name: values[name] for name in _WORK}


def work_asked(config: Config) -> dict[str, Any]:
    """Returns the work that these flags measure, as their result names it."""
    return work_of(config.deciding())


def check_baseline(config: Config) -> None:
    """Raises `UsageError` for a baseline that can't be read, or has no use."""
    if config.mode != "benchmark":
        return
    if config.fail_below is not None and not config.baseline:
        raise UsageError(f"--fail_below={config.fail_below:g} has nothing to compare with; add --baseline")
    if config.baseline:
        read_baseline(config.baseline)


def check_work_of_baseline(config: Config) -> None:
    """Raises `UsageError` for a baseline that is of other work than these flags measure."""
    if not config.baseline:
        return
    if changed := differences(work_of(read_baseline(config.baseline)), work_asked(config)):
        raise UsageError(
            f"--baseline={config.baseline} is of other work ({'; '.join(changed)}); use the same flags, or a baseline "
            "of this work"
        )


def read_baseline(path: str) -> dict[str, Any]:
    """Reads a result with its calls, from --result_json. Raises `UsageError`."""
    cure = "give what --mode=benchmark --result_json wrote"
    text = paths.read_text("baseline", path, cure, MOST_BYTES)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"--baseline={path} is not JSON; {cure}") from None
    if lines := problems(result):
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        raise UsageError(f"--baseline={path} is not a result of this benchmark: {lines[0]}{more}; {cure}")
    return result


def warnings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns what makes a comparison with the baseline uncertain: the baseline's warnings, and another machine."""
    machines = [{name: each["environment"].get(name) for name in _MACHINE} for each in (theirs, ours)]
    lines = [f"baseline: {line}" for line in theirs["warnings"]]
    if changed := differences(*machines):
        lines.append(f"baseline: it is of another machine ({'; '.join(changed)})")
    return lines


def exit_code(comparison: Mapping[str, Any], fail_below: float | None) -> int:
    """Returns `EXIT_SLOWER`, and prints why, if the ratio is shown to be below `fail_below`; else 0."""
    interval = comparison["interval"]
    if fail_below is None or interval is None or interval[1] >= fail_below:
        return 0
    return errors.fail(
        errors.EXIT_SLOWER,
        f"--fail_below={fail_below:g}: the rate is {comparison['ratio']:.3f} times the baseline's "
        f"({interval[0]:.3f} to {interval[1]:.3f}); find what made it slower, or measure a new baseline",
    )
