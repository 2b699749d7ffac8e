"""Text in a terminal: no line ends within a word, and what its encoding lacks is escaped. Log lines."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from typing import Any, TextIO

from absl.logging import PythonFormatter, get_absl_handler

from ..engine.errors import as_line, visible

_ESCAPE = "backslashreplace"
_LEAST_COLUMNS = 16


def stream_errors() -> list[tuple[Any, str | None]]:
    """Lists stdout and stderr, each with its handling of unencodable characters, such as "strict"."""
    return [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]


def escaping_streams() -> list[tuple[Any, str | None]]:
    """Lists stdout and stderr, each with the handling that escapes unencodable characters."""
    return [(stream, _ESCAPE) for stream, _ in stream_errors()]


def set_stream_errors(streams: list[tuple[Any, str | None]]) -> None:
    """Sets each stream's handling of unencodable characters."""
    for stream, errors in streams:
        # Python sets it, and then wants the position in a file that has become a pipe, as in Ray's: "Illegal seek".
        with contextlib.suppress(OSError):
            if stream.errors != errors:
                stream.reconfigure(errors=errors)


def is_interactive() -> bool:
    """Returns whether this is a session of Python or IPython, a notebook among them."""
    return hasattr(sys, "ps1")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that a program has put in its place may have no more than `write`."""
    try:
        return stream.isatty()
    except AttributeError:
        return False


def columns() -> int:
    """Returns the terminal's number of columns; 80 without a terminal."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int) -> list[str]:
    """Wraps a line to lines of this width; a word that is longer stays whole.

    A terminal that has not even `_LEAST_COLUMNS` for them ends its lines itself, where it likes.
    """
    return textwrap.wrap(text, max(width, _LEAST_COLUMNS), break_long_words=False, break_on_hyphens=False, tabsize=1)


def fitted(line: str, file: TextIO) -> str:
    """Formats a line for printing to `file`: without control characters or line breaks, and wrapped in a terminal."""
    line = as_line(line)  # names in it may be from a file that anyone has written
    return "\n".join(wrapped(line, columns())) if is_terminal(file) else line


class _Fitted(PythonFormatter):
    def format(self, record) -> str:
        lines = visible(super().format(record)).split("\n")  # several of a traceback, or of another library's
        return "\n".join(fitted(line, sys.stderr) for line in lines)


def fit_log() -> None:
    """Fits later log lines of a command, on standard error, into the terminal too."""
    get_absl_handler().setFormatter(_Fitted())
    get_absl_handler().python_handler.setStream(sys.stderr)  # absl has the stream of when it was imported


def redirect_log(before: TextIO, after: TextIO) -> None:
    """Sends later log lines to another stream, if they go to `before`."""
    handler = get_absl_handler().python_handler
    if handler.stream is before:
        handler.setStream(after)
