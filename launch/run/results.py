"""Writes and reads results. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.machine.files import read_json
from ..host.files import write_json


def write(result: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes a result, which is plain JSON, to the file that --result_json names, if any. Raises OSError."""
    if path := values["result_json"]:
        write_json(path, result)


def step_of(path: str) -> int:
    """Returns the step of the run whose result is at `path`; 0 where no result can be read."""
    try:
        return int(read_json(path)["step"])
    except (OSError, OverflowError, ValueError, KeyError, TypeError):
        return 0
