"""Where a result goes: the files that --result_json and its kin name. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crankshaft.launch.benchmark import html
from crankshaft.launch.files import append_json_line, write_json


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
    """The updates done by the run whose result is there; 0 where there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return int(json.load(file)["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
