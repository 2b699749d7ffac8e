"""Reports mistakes: one line, an exit code, no traceback. The errors' classes are the engine's."""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys

from ..engine.errors import (
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_PORT_TAKEN,
    EXIT_SLOWER,
    EXIT_USAGE,
    CrankshaftError,
    RunError,
    UsageError,
    one_line,
)
from . import terminal

__all__ = [  # the engine's, which the rest of launch imports from here
    "EXIT_DIVERGED",
    "EXIT_FAILED",
    "EXIT_PORT_TAKEN",
    "EXIT_SLOWER",
    "EXIT_USAGE",
    "CrankshaftError",
    "RunError",
    "UsageError",
]

EXIT_REGROUP = 76  # the attempt's workers change: it has saved, and its agents begin the next one
EXIT_HUNG_UP = 129  # SIGHUP, a terminal that closed, after saving
EXIT_INTERRUPTED = 130  # Ctrl-C, after saving
EXIT_TERMINATED = 143  # SIGTERM, after saving; Kubernetes restarts on 128 and above


def nearest(misspelt: str, names, otherwise: str | None = None) -> str:
    """Suggests 'did you mean X?' if one of `names` is similar, else returns `otherwise`, or lists all of them."""
    names = list(names) if isinstance(names, (list, tuple)) else sorted(names)  # a list begins with the most frequent
    word = misspelt.lower()
    whole = [name for name in names if f"_{name}".endswith(f"_{word}")]  # batch_size: global_batch_size
    near = list(dict.fromkeys([*whole, *difflib.get_close_matches(word, names, n=3, cutoff=0.6)]))[:3]
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"use one of {', '.join(names)}"


def signal_name(number: int) -> str:
    """Names a signal, SIGKILL for 9; "signal 35" for those between SIGRTMIN and SIGRTMAX, which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def fail(code: int, line: str) -> int:
    """Prints an error as one line, and returns the exit code."""
    print_line(f"error: {one_line(line)}")
    return code


def print_line(line: str) -> None:
    """Prints a line to standard error, whose terminal may be closed."""
    with contextlib.suppress(OSError):
        print(terminal.fitted(line, sys.stderr), file=sys.stderr, flush=True)
