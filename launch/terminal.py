"""Text in a terminal: no line ends within a word. Host code."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

from absl import logging


def columns() -> int:
    """Returns how many columns the terminal has; 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int) -> list[str]:
    """Returns a line's words in lines of this width; a word that is longer stays whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, tabsize=1)


def fitted(text: str, file: TextIO) -> str:
    """Returns a text as it is printed to `file`: wrapped in a terminal, as it is elsewhere."""
    if not file.isatty():
        return text
    return "\n".join("\n".join(wrapped(line, columns())) for line in text.split("\n"))


class _Fitted(logging.PythonFormatter):
    def format(self, record) -> str:
        return fitted(super().format(record), sys.stderr)


def fit_log() -> None:
    """Fits later log lines into the terminal too."""
    logging.get_absl_handler().setFormatter(_Fitted())
