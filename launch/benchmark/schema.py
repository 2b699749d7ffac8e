"""A benchmark's result: its version, what every result begins with, and checks of one read from a file.

Host code; nothing here starts TensorFlow. docs/benchmark_result.md says what each key means.
"""

from __future__ import annotations

import datetime
import numbers
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

VERSION = "crankshaft.benchmark/1"

_NUMBER: Any = numbers.Real  # of which type checkers do not know that it compares with an int
_TEXT, _LIST, _OBJECT, _NONE = str, list, Mapping, type(None)
_KINDS: dict[Any, str] = {
    _NUMBER: "a number",
    _TEXT: "a text",
    _LIST: "a list",
    _OBJECT: "an object",
    _NONE: "null",
    int: "an integer",
}
_HEADING = {"schema": (_TEXT,), "date": (_TEXT,), "command": (_TEXT,), "global_batch_size": (int,)}
# What a run that measured has beside.
_MEASURED = {
    **dict.fromkeys(("mode", "part", "model", "strategy"), (_TEXT,)),
    **dict.fromkeys(("num_replicas", "step", "steps"), (int,)),
    **dict.fromkeys(("model_arg", "input_arg", "train", "environment", "noise", "calls", "step_ms"), (_OBJECT,)),
    **dict.fromkeys(("rounds", "warnings"), (_LIST,)),
    **dict.fromkeys(("examples_per_sec", "steps_per_sec", "wall_seconds", "mean", "jitter"), (_NUMBER,)),
    **dict.fromkeys(("input_wait_fraction", "compile_seconds", "first_step_seconds", "peak_rss_mb"), (_NUMBER,)),
    **dict.fromkeys(("stderr", "reduce_fraction", "device_peak_mb"), (_NUMBER, _NONE)),
    "input": (_TEXT, _NONE),
    "interval": (_LIST, _NONE),
}
_COLUMNS = ("steps", "examples", "seconds", "input_seconds", "reduce_seconds", "round")


def heading(global_batch_size: int) -> dict[str, Any]:
    """Returns a result's beginning: schema, date (UTC, ISO 8601), command (as one would type it), global_batch_size."""
    program, *arguments = sys.orig_argv
    return {
        "schema": VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(program), *arguments]),
        "global_batch_size": global_batch_size,
    }


def check(result: Any) -> list[str]:
    """Returns what is missing or of a wrong kind in a result of this version, a line each; none if it is whole."""
    if not isinstance(result, Mapping):
        return [f"the whole is {_kind(result)}, not an object"]
    if "schema" not in result:
        return ["schema is missing"]
    if result["schema"] != VERSION:
        return [f"schema is {result['schema']}, and this is {VERSION}"]
    wrong = [line for name, kinds in {**_HEADING, **_MEASURED}.items() if (line := _wrong(result, name, kinds))]
    return wrong or _check_calls(result["calls"])


def _wrong(values: Mapping, name: str, kinds: tuple) -> str | None:
    if name not in values:
        return f"{name} is missing"
    if isinstance(values[name], bool) or not isinstance(values[name], kinds):
        return f"{name} is {_kind(values[name])}, not {' or '.join(_KINDS[kind] for kind in kinds)}"
    return None


def _check_calls(calls: Mapping[str, Any]) -> list[str]:
    """Checks columns of numbers, as many in each; times and examples above 0, so that rates exist."""
    found = [line for name in _COLUMNS if (line := _wrong(calls, name, (_LIST, _NONE)))]
    if found:
        return [f"calls: {line}" for line in found]
    columns = {name: calls[name] for name in _COLUMNS if calls[name] is not None}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or not lengths.get("seconds"):
        return [f"calls: columns are of {', '.join(f'{name} {count}' for name, count in lengths.items())} values"]
    for name, column in columns.items():
        least = 0 if name in ("seconds", "examples", "steps") else -1
        if not all(isinstance(value, _NUMBER) and value > least for value in column):
            return [f"calls: {name} holds what is no number above {least}"]
    return []


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return next((text for kind, text in _KINDS.items() if isinstance(value, kind)), type(value).__name__)
