"""Waits beside a run that another process trains: for its first checkpoint, and for its end. Needs no TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable

from ...engine.checkpoints import RunDir
from ..failures import EXIT_DIVERGED, EXIT_USAGE
from . import checks

POLL_SECONDS = 1.0
FLAGS = "--mode=eval --eval_checkpoint=all --follow"  # of a process that does so
# Exit codes after which nobody starts a run again unchanged.
FINAL = (0, EXIT_USAGE, EXIT_DIVERGED)
_TAIL_BYTES = 1 << 16  # of a record, which has a process's last events


def await_checkpoint(run_dir: str, tell: Callable[[str], None]) -> None:
    """Waits until a folder has a run's checkpoint, or the run has ended for good without one."""
    has_told = False
    while not (checks.checkpoint_steps(run_dir) or exit_code(RunDir(run_dir).events) in FINAL):
        if not has_told:
            tell(f"waiting for the first checkpoint in {run_dir}")
            has_told = True
        time.sleep(POLL_SECONDS)


def exit_code(record: str | None) -> int | None:
    """Returns the exit code of the process that trained a run last, by the run's record; None if it may still train."""
    with contextlib.suppress(OSError), open(record or "", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):  # a line that is cut off
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") in ("start", "restart", "end"):
                    return event.get("exit_code") if event["event"] == "end" else None
    return None
