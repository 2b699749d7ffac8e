"""Writes and reads results. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import logging

from ...engine.machine.files import read_json
from ..host.files import write_json


def write(result: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes a result, which is plain JSON, to the file that --result_json names, if any. Raises OSError."""
    if path := values["result_json"]:
        write_json(path, result)


def step_of(path: str) -> int:
    """Returns the step at which the run ended well whose result is at `path`; 0 where there is no such result."""
    try:
        return 0 if (result := read_json(path)).get("error") else int(result["step"])
    except (OSError, OverflowError, AttributeError, ValueError, KeyError, TypeError):
        return 0


def warn_of_full_tables(tables: Mapping[str, int]) -> None:
    """Warns of each table that had no row left for an id that was to be admitted."""
    for name in sorted({name.rpartition("/")[0] for name in tables}):
        rows, turned_away = (tables[f"{name}/{figure}"] for figure in ("rows_given", "turned_away"))
        if turned_away:
            logging.warning(
                "table %s: %s rows are given, and %s times an id found none free and shared row 0; "
                "give the table more rows, or raise admit_after",
                *(name, f"{rows:,}", f"{turned_away:,}"),
            )
