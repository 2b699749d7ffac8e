"""Writes a result to the files that --result_json and its kin name. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.machine.files import read_json
from ..benchmark import html
from ..host.files import append_json_line, write_json


def write(result: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes a result to the files that were asked for. Raises OSError.

    Args:
      result: plain JSON.
      values: of flags, by name: `result_json`, `result_jsonl`, `result_html`; None writes none.
    """
    if path := values["result_json"]:
        write_json(path, result)
    if path := values["result_jsonl"]:
        append_json_line(path, result)
    if path := values["result_html"]:
        html.write(path, result)


def step_of(path: str) -> int:
    """Returns the step of the run whose result is at `path`; 0 where no result can be read."""
    try:
        return int(read_json(path)["step"])
    except (OSError, OverflowError, ValueError, KeyError, TypeError):
        return 0
