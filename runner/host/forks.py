"""Whether this process is a fork, or is spawned within an import, and since when it runs."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import time

from ...engine.machine.threads import PROCESS
from ..failures import UsageError


def refuse_within_import() -> None:
    """Raises `UsageError` in a process that `multiprocessing` has spawned and that imports its parent's script.

    Python refuses to start processes then, and a pool replaces those that end by it, again and again.
    The parent gets SIGTERM as this process exits, after its error was printed.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing.spawn has it
        return
    atexit.register(_end_parent, os.getppid())
    raise UsageError(
        "the script starts a process by `multiprocessing`, which imports the script and so begins its run again; put "
        'what starts the run below `if __name__ == "__main__":`'
    )


def _end_parent(parent: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        if os.getppid() == parent != 1 and os.path.samefile(f"/proc/{parent}/exe", "/proc/self/exe"):
            os.kill(parent, signal.SIGTERM)


_began = time.monotonic()  # about when this program began, or the fork of it
_lacks_threads = False  # whether this is a fork of a process in which TensorFlow ran, or was being started


def _note_fork() -> None:
    global _began, _lacks_threads
    if is_free := PROCESS.acquire(blocking=False):
        PROCESS.release()
    else:  # another thread, which this process lacks, was changing the process
        PROCESS._at_fork_reinit()  # type: ignore[attr-defined]
    internals = sys.modules.get("crankshaft.engine.internals.tensorflow")
    has_started = getattr(internals, "has_started", lambda: False)
    _began, _lacks_threads = time.monotonic(), not is_free or has_started()


os.register_at_fork(after_in_child=_note_fork)


def refuse_forked_start() -> None:
    """Raises `UsageError` in a process that was forked while TensorFlow ran, whose threads it lacks: it would hang."""
    if _lacks_threads:
        raise UsageError(
            "this process was forked from one in which TensorFlow runs, and lacks its threads; start it by spawn, as "
            'by multiprocessing.get_context("spawn")'
        )


def age_seconds() -> float:
    """Returns the seconds since this module was imported, before TensorFlow; since the fork in a fork of a program."""
    return time.monotonic() - _began
