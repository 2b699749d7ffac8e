"""Writes the files that a user or a run names, as text and JSON. Nothing here starts TensorFlow."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
from collections.abc import Mapping
from typing import Any

from ...engine.machine import files

_PIPE_SECONDS = 60.0  # for which a reader may leave a pipe full


def write_user_file(path: str | os.PathLike, text: str) -> None:
    """Writes a file that a user has named, in UTF-8, whole or not at all.

    What exists there and is not a regular file (a pipe, a terminal, /dev/null) is written to directly. It is opened
    once, and a pipe that nobody reads is an OSError.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "nobody reads it", os.fspath(path)) from None
        files.write_text(path, text)  # there is none, or no right to write to it but to its folder
        return
    with files.naming(path), open(descriptor, "wb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            content = text.encode()
            while content:
                if not select.select([], [file], [], _PIPE_SECONDS)[1]:
                    raise OSError(errno.ETIMEDOUT, "nobody reads it", os.fspath(path))
                content = content[file.write(content) or 0 :]
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
