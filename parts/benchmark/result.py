"""A benchmark's result: its heading, and the check of `--baseline`, an earlier one to compare with.

Nothing here starts TensorFlow.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...runner import failures
from ...runner.command_line import paths
from ...runner.command_line.config import Config
from ...runner.command_line.values import differences
from ...runner.failures import UsageError
from ...runner.results import MOST_BYTES, SCHEMA

_NUMBER, _NONE = (int, float), (type(None),)


class ResultKey(NamedTuple):
    """The contents of a key of a result.

    Attributes:
      description: meaning of the key, for docs/benchmark.md.
      types: types that the key's value may have; () if it is not checked, since no rate is computed from it.
    """

    description: str
    types: tuple[type, ...] = ()


KEYS = {
    "schema": ResultKey("the version, `crankshaft.benchmark/2`: the meaning of a key changes only with it"),
    "date": ResultKey("UTC, ISO 8601", (str,)),
    "command": ResultKey("as typed", (str,)),
    "mode": ResultKey("`benchmark`", (str,)),
    "model": ResultKey("the model; with the next four, the work that a baseline must share", (str,)),
    "model_arg": ResultKey("its arguments", (dict,)),
    "input": ResultKey("the input", (str, *_NONE)),
    "input_arg": ResultKey("its arguments", (dict,)),
    "global_batch_size": ResultKey("examples per step, across all replicas", (int,)),
    "strategy": ResultKey("the strategy", (str,)),
    "num_replicas": ResultKey("the number of replicas", (int,)),
    "jit": ResultKey("whether XLA compiled the steps"),
    "precision": ResultKey("the precision"),
    "steps": ResultKey("of all rounds", (int,)),
    "wall_seconds": ResultKey("of all rounds", _NUMBER),
    "steps_per_sec": ResultKey("`steps` divided by `wall_seconds`", _NUMBER),
    "examples_per_sec": ResultKey("examples of all rounds divided by `wall_seconds`", _NUMBER),
    "rounds": ResultKey("the totals of each round: the same four", (list,)),
    "calls": ResultKey(
        "every timed call of the inner loop, in order, as columns: `steps`, `examples`, `seconds`, `input_seconds`, "
        "`reduce_seconds`, `round`",
        (dict,),
    ),
    "interval": ResultKey("95 % of `examples_per_sec`, [low, high]; null for a single call", (list, *_NONE)),
    "warnings": ResultKey("what makes the figures uncertain, a line each", (list,)),
    "noise": ResultKey(
        "`cpus` that the run may use; `other_cores_before` and `other_cores` that others used during warm-up and "
        "rounds; `throttled_share`; `lost_share`",
        (dict,),
    ),
    "step_ms": ResultKey("p50, p90, p99 of a step's milliseconds: a call's time divided by its steps", (dict,)),
    "mean": ResultKey("of the calls' examples per second, weighted by steps", _NUMBER),
    "stderr": ResultKey("of that mean", _NUMBER + _NONE),
    "jitter": ResultKey("1.4826 times the median absolute deviation of the calls' rates", _NUMBER),
    "input_wait_fraction": ResultKey("the share of the wall time that steps waited for input", _NUMBER),
    "reduce_fraction": ResultKey("that workers waited for each other, on average; null with one", _NUMBER + _NONE),
    "first_step_seconds": ResultKey(
        "to the end of the first step: tracing, compiling, the choice of `--jit=auto`", _NUMBER
    ),
    "compile_seconds": ResultKey("the whole warm-up", _NUMBER),
    "peak_rss_mb": ResultKey("most memory of the process, MiB", _NUMBER),
    "device_peak_mb": ResultKey("most memory of one of its GPUs, MiB", _NUMBER + _NONE),
    "train": ResultKey("means of the metrics over the last call", (dict,)),
    "step": ResultKey("updates done, those of the warm-up too", (int,)),
    "environment": ResultKey("the machine and the software before the first step", (dict,)),
    "flops_per_step": ResultKey("operations of a step's matrix products and convolutions, counted in its graph"),
    "flops_source": ResultKey("how they were counted"),
    "bytes_per_step": ResultKey(
        "at least: products' operands and results, gradients, variables and slots of the update"
    ),
    "machine": ResultKey(
        "`matmul_gflops` by dtype, `memory_gb_per_sec` (STREAM's triad on arrays of four caches), `cache_gb_per_sec` "
        "(the same within `cache_mb`), medians of `samples`"
    ),
    "roofline": ResultKey(
        "`bound` (compute, memory), `limit_steps_per_sec`, `share_of_limit`, `intensity_flops_per_byte`, "
        "`matmul_dtype`, `bandwidth` (cache if a step's data fits there), `compute_seconds`, `memory_seconds`"
    ),
    "profile": ResultKey(
        "with `profile=true`: `trace`, the folder for TensorBoard; `steps` in it; `ops`, the ten that took longest, "
        "each `name`, `type`, `ms_per_step`, `share` of all ops' time (`ops_ms_per_step`, threads added up)"
    ),
    "baseline": ResultKey(
        "with `--baseline`: `path`, `ratio`, `interval`, `verdict`, `rounds` ({ours, theirs, ratio} of each pair)"
    ),
}
# Defines the work that is measured: two rates of different work can't be compared.
_WORK = ("model", "model_arg", "input", "input_arg", "global_batch_size")
_MACHINE = ("cpu", "usable_cores", "gpus")


def heading(global_batch_size: int) -> dict[str, Any]:
    """Returns a result's beginning: schema, date (UTC, ISO 8601), command (as one would type it), global_batch_size."""
    program, *arguments = sys.orig_argv
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(program), *arguments]),
        "global_batch_size": global_batch_size,
    }


def problems(result: Any) -> list[str]:
    """Lists the missing keys and wrong types in a result of this version, a line each; none if it is complete."""
    version = result.get("schema") if isinstance(result, Mapping) else None
    if version != SCHEMA:
        return [f"its schema is {version}, and this is {SCHEMA}"]
    wrong = [
        f"{name} is {repr(result[name])[:40] if name in result else 'missing'}"
        for name, (_, types) in KEYS.items()
        if types and (name not in result or not isinstance(result[name], types))
    ]
    if wrong:
        return wrong
    # The columns from which rates are computed have equally many numbers above 0.
    columns = [result["calls"].get(name, ()) for name in ("steps", "examples", "seconds", "round")]
    if not all(isinstance(column, list) and column and len(column) == len(columns[0]) for column in columns):
        return ["calls has no columns steps, examples, seconds and round of one length"]
    if not all(isinstance(value, _NUMBER) and value > 0 for column in columns[:3] for value in column):
        return ["calls has values that are not numbers above 0"]
    return []


def measured_work(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the work that a result measured."""
    return {name: values[name] for name in _WORK}


def configured_work(config: Config) -> dict[str, Any]:
    """Returns the work that these flags measure, as `measured_work` of their result would."""
    return measured_work(config.deciding())


def check_baseline(config: Config) -> None:
    """Raises `UsageError` for a baseline that can't be read, or that nothing is compared with."""
    if config.mode != "benchmark":
        return
    arguments = config.arguments("benchmark_arg")
    flag = "benchmark_arg"
    if arguments["steps"] and arguments["seconds"]:
        raise UsageError(
            f"{flag}: steps={arguments['steps']} and seconds={arguments['seconds']:g} are both given; use one of them"
        )
    if arguments["fail_below"] is not None and not config.baseline:
        raise UsageError(f"{flag} fail_below={arguments['fail_below']:g} has nothing to compare with; add baseline")
    if config.baseline:
        read_baseline(config.baseline)


def check_baseline_work(config: Config) -> None:
    """Raises `UsageError` for a baseline of other work than these flags measure."""
    if not config.baseline:
        return
    if changed := differences(measured_work(read_baseline(config.baseline)), configured_work(config)):
        raise UsageError(
            f"baseline={config.baseline} is of other work ({'; '.join(changed)}); use the same flags, or a baseline of "
            "this work"
        )


def read_baseline(path: str) -> dict[str, Any]:
    """Reads a result with its calls, from --result_json. Raises `UsageError`."""
    fix = "give what mode=benchmark wrote to result_json"
    text = paths.read_text("baseline", path, fix, MOST_BYTES)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"baseline={path} is not JSON; {fix}") from None
    if lines := problems(result):
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        raise UsageError(f"baseline={path} is not a result of this benchmark: {lines[0]}{more}; {fix}")
    return result


def warnings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Warns where a comparison with the baseline is uncertain: the baseline's own warnings, and another machine."""
    machines = [{name: result["environment"].get(name) for name in _MACHINE} for result in (theirs, ours)]
    lines = [f"baseline: {line}" for line in theirs["warnings"]]
    if changed := differences(*machines):
        lines.append(f"baseline: it is of another machine ({'; '.join(changed)})")
    return lines


def exit_code(comparison: Mapping[str, Any], fail_below: float | None) -> int:
    """Returns `EXIT_SLOWER`, and prints why, if the ratio is shown to be below `fail_below`; else 0."""
    interval = comparison["interval"]
    if fail_below is None or interval is None or interval[1] >= fail_below:
        return 0
    return failures.fail(
        failures.EXIT_SLOWER,
        f"fail_below={fail_below:g}: the rate is {comparison['ratio']:.3f} times the baseline's "
        f"({interval[0]:.3f} to {interval[1]:.3f}); find what made it slower, or measure a new baseline",
    )
