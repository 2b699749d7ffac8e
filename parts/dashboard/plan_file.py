"""Reads a plan that `crankshaft plan --result_json` wrote. Without TensorFlow.

Anybody may have written the file: figures that a plan can't have are an error of one line.
"""

from __future__ import annotations

import math
import os
from typing import Any

from ...engine.machine.files import read_json
from ...runner.failures import UsageError

_MOST_BYTES = 4 << 20
_FIGURES = ("hosts", "host_bytes", "examples_per_sec", "goodput")


def read(path: str, flags: int = os.O_RDONLY) -> dict[int, dict[str, Any]]:
    """Reads some figures of a plan by the number of hosts, as `plan_report.entry` names them. Raises `UsageError`.

    With them is `network_share`: the fraction of a step's time in which it waits for the network.
    """
    try:
        plan = read_json(path, flags=flags, most_bytes=_MOST_BYTES)
        figures = [_figures(entry) for entry in plan["hosts"]]
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise UsageError(f"{path} is not a plan ({error!r}); give a file of crankshaft plan --result_json") from None
    return {entry["hosts"]: entry for entry in figures}


def _figures(entry: dict[str, Any]) -> dict[str, Any]:
    step = entry["step"]
    fraction = 0.0 if step["bound"] == "input" else step["network_seconds"] / step["seconds"]
    figures = {**{name: entry[name] for name in _FIGURES}, "network_share": fraction}
    for name, value in figures.items():
        kind = int if name == "hosts" else (int, float)
        if type(value) is bool or not isinstance(value, kind) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}")
    return figures
