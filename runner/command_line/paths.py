"""Checks the paths that flags give: what can't be read or written is found before TensorFlow starts."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from typing import Any, BinaryIO

from ...engine.checkpoints import RunDir
from ...engine.machine import files
from ..failures import UsageError

_MOST_BYTES = 1 << 20  # largest file of flags or of Python
_PATTERN = r"[]\*?{}"  # tf.train.load_checkpoint finds files by a pattern, in which these can't be escaped


def open_file(flag: str, path: str, fix: str) -> BinaryIO:
    """Opens a regular file that a flag names; never waits, as for a pipe's other end, and reads no device.

    Args:
      path: path of the file; empty is a mistake too.
      fix: what to do instead, for the message, e.g. "give ...".

    Raises:
      UsageError: it can't be read, or is not a regular file.
    """
    if not path:
        raise UsageError(f"{flag} is empty; {fix}")
    try:
        return open(files.open_regular(os.path.expanduser(path)), "rb")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise UsageError(f"{flag}={path} can't be read ({getattr(error, 'strerror', error)}); {fix}") from None


def read(flag: str, path: str, fix: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """Reads a file, opened by `open_file`. Raises `UsageError`, also if the file is too large to be meant."""
    with open_file(flag, path, fix) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UsageError(f"{flag}={path} has more than {most_bytes >> 20} MiB; {fix}")
    return data


def read_text(flag: str, path: str, fix: str, most_bytes: int = _MOST_BYTES) -> str:
    """Reads a file's text in UTF-8, see `read`. Raises `UsageError`, also where it is not text."""
    try:
        return read(flag, path, fix, most_bytes).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}={path} is not text in UTF-8 ({error.reason}); write it as such") from None


def check(values: Mapping[str, Any]) -> None:
    """Raises `UsageError` for the first path, of the flags' values, at which TensorFlow can't read checkpoints."""
    for name in ("run_dir", "init_from"):
        if special := next((character for character in values[name] or "" if character in _PATTERN), None):
            raise UsageError(
                f"{name}={values[name]} has a {special} in it, and TensorFlow, which takes [ ] \\ * ? {{ }} for a "
                "pattern, reads no checkpoint there; use a path without"
            )


def is_pattern(path: str) -> bool:
    """Returns whether a path of data is several, a pattern, or on another file system."""
    return bool(re.search(r"[,*?\[]|^[a-z0-9]+://", path))


def check_results(values: Mapping[str, Any]) -> None:
    """Raises `UsageError` where --result_json names a file that can't be written."""
    if path := values["result_json"]:
        if os.path.isdir(path) or path.endswith(os.sep):
            raise UsageError(f"result_json={path} is a folder; give the path of a file")
        layout = RunDir(values["run_dir"]) if values["run_dir"] else None
        if layout and os.path.realpath(path) in map(os.path.realpath, (layout.config, layout.lock)):
            raise UsageError(f"result_json={path} is a file of the run's own; give another path")
        check_writable("result_json", os.path.dirname(path))
        if os.path.exists(path) and not os.path.isfile(path):
            return  # the existing file, such as a pipe, is written to
        try:  # whether a file of this name can exist, and its temporary one before it
            with contextlib.suppress(_TriedError), files.replacing(path, files.make_file):
                raise _TriedError
        except OSError as error:
            raise UsageError(f"result_json={path} can't be written ({error.strerror}); give another path") from None


class _TriedError(Exception):
    """Raised before a file that was made as a trial replaces another."""


def check_writable(flag: str, folder: str) -> None:
    """Raises `UsageError` if no file can be made in a folder, which is made if it does not exist."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror
        if isinstance(error, FileExistsError):
            why = f"a link to {os.readlink(folder)}, which is not a folder" if os.path.islink(folder) else "a file"
        raise UsageError(f"{flag}: {folder} can't be written ({why}); use a folder that can") from None
