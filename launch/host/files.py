"""Writes the files that a user or a run names, as text and JSON. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from typing import Any

from ...engine.machine import files
from . import lock_file


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file that a user has named, in UTF-8, whole or not at all.

    A path that exists and is no regular file (a pipe, a terminal, /dev/null) is written to as it is.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    files.write_text(path, text)


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Writes values as JSON by `write_text`; numbers that are not finite, which JSON cannot express, become null."""
    write_text(path, _as_json(values))


def write_of_run(run_dir: str, name: str, values: Mapping[str, Any]) -> None:
    """Writes a run's own file as JSON, replacing whatever is there."""
    files.write_text(os.path.join(run_dir, name), _as_json(values))


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(_finite(values), indent=2) + "\n"


def append_json_line(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Appends a line of JSON to a file, all of it or nothing, and waits until it is on the disk.

    A partial line that a killed writer has left stays as it is, as a separate line. Several processes may write at
    once. Numbers that are not finite become null, as in `write_json`.
    """
    line = json.dumps(_finite(values)).encode() + b"\n"
    if os.path.exists(path) and not os.path.isfile(path):
        write_text(path, line.decode())
        return
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        is_alone = lock_file.flock(file, fcntl.LOCK_EX)  # without a lock, one write at the end is whole too
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            written = os.write(file, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            os.fsync(file)
        except OSError:
            if is_alone:
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as they are read back from JSON, with None for inf and nan at any depth."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
