"""Writes the files that a user or a run names, as text and JSON. Nothing here starts TensorFlow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ...engine.machine import files


def write_user_file(path: str | os.PathLike, text: str) -> None:
    """Writes a file that a user has named, in UTF-8, whole or not at all.

    A path that exists and is not a regular file (a pipe, a terminal, /dev/null) is written to directly.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with files.naming(path), open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    files.write_text(path, text)


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Writes a file that a user has named as JSON; numbers that are not finite, which JSON lacks, become null."""
    write_user_file(path, _as_json(values))


def write_run_file(path: str, values: Mapping[str, Any]) -> None:
    """Writes a run's own file as JSON, replacing whatever is there."""
    files.write_text(path, _as_json(values))


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(finite(values), indent=2) + "\n"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON keeps them, with None for inf and nan at any depth."""
    # Python's `json` writes NaN and Infinity, which other parsers refuse.
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
