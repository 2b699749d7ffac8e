"""Reports mistakes: one line, an exit code, no traceback. The errors' classes are the engine's."""

from __future__ import annotations

import contextlib
import signal
import sys

from ..engine.arguments import nearest
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
    "nearest",
]

EXIT_REGROUP = 76  # the attempt's workers change: it has saved, and its agents begin the next one
EXIT_HUNG_UP = 129  # SIGHUP, a terminal that closed, after saving
EXIT_INTERRUPTED = 130  # Ctrl-C, after saving
EXIT_TERMINATED = 143  # SIGTERM, after saving; Kubernetes restarts on 128 and above


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
