"""Files that are there whole or not at all. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file in UTF-8 beside `path`, and puts it in its place once all of it is on the disk."""
    temporary = f"{os.fspath(path)}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """`write_text` of values as JSON."""
    write_text(path, json.dumps(values, indent=2) + "\n")
