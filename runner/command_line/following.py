"""Waits beside a run that another process trains: for its first checkpoint, and for its end. Needs no TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable

from ...engine.checkpoints import RunDir
from . import checks

POLL_SECONDS = 1.0
_TAIL_BYTES = 1 << 16  # of a record, which has a process's last events


def await_checkpoint(run_dir: str, tell: Callable[[str], None]) -> None:
    """Waits until a folder has a run's checkpoint, or the run has ended without one."""
    has_told = False
    while not (checks.checkpoint_steps(run_dir) or has_ended(run_dir)):
        if not has_told:
            tell(f"waiting for the first checkpoint in {run_dir}")
            has_told = True
        time.sleep(POLL_SECONDS)


def has_ended(run_dir: str) -> bool:
    """Returns whether a run's record ends with the end of a process that trains it."""
    with contextlib.suppress(OSError), open(RunDir(run_dir).events, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):  # a line that is cut off
                event = json.loads(line)
                if isinstance(event, dict) and (kind := event.get("event")) in ("start", "end"):
                    return kind == "end"
    return False
