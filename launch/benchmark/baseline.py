"""Reads and checks `--baseline`, an earlier result that a benchmark is compared with, before TensorFlow starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..command_line import paths
from ..command_line.config import Config
from ..command_line.values import differences
from ..errors import UsageError
from . import schema

# Defines the work that is measured: two rates of different work can't be compared.
_WORK = ("part", "model", "model_arg", "input", "input_arg", "global_batch_size")
_MOST_BYTES = 64 << 20
_MACHINE = ("cpu", "usable_cores", "gpus")


def work_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the work that a result measured."""
    return {name: values[name] for name in _WORK}


def work_asked(config: Config) -> dict[str, Any]:
    """Returns the work that these flags measure, as their result names it."""
    part = "whole" if config.benchmark_part == "all" else config.benchmark_part
    return work_of({"part": part, **config.deciding()})


def check(config: Config) -> None:
    """Raises `UsageError` for a baseline that can't be read, or has no use."""
    if config.mode != "benchmark":
        return
    if config.fail_below is not None and not config.baseline:
        raise UsageError(f"--fail_below={config.fail_below:g} has nothing to compare with; add --baseline")
    if not config.baseline:
        return
    if config.benchmark_part == "checkpoint":
        raise UsageError("--baseline compares rates of steps, and --benchmark_part=checkpoint has none; leave it out")
    read(config.baseline)


def check_work(config: Config) -> None:
    """Raises `UsageError` for a baseline that is of other work than these flags measure."""
    if config.baseline and (found := differences(work_of(read(config.baseline)), work_asked(config))):
        raise UsageError(
            f"--baseline={config.baseline} is of other work ({'; '.join(found)}); use the same flags, or a baseline of "
            "this work"
        )


def read(path: str) -> dict[str, Any]:
    """Reads a result with its calls, from --result_json. Raises `UsageError`."""
    cure = "give what --mode=benchmark --result_json wrote"
    text = paths.read_text("baseline", path, cure, _MOST_BYTES)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"--baseline={path} is no JSON; {cure}") from None
    problems = schema.check(result)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UsageError(f"--baseline={path} is no result of this benchmark: {problems[0]}{more}; {cure}")
    return result


def warnings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns what makes a comparison with the baseline uncertain: the baseline's warnings, and another machine."""
    machines = [{name: each["environment"].get(name) for name in _MACHINE} for each in (theirs, ours)]
    found = [f"baseline: {line}" for line in theirs["warnings"]]
    if changed := differences(*machines):
        found.append(f"baseline: it is of another machine ({'; '.join(changed)})")
    return found
