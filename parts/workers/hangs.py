"""Ends a process that hangs with Python's lock held, when no Python code can.

Some calls of TensorFlow hold that lock while they wait for another host, e.g. registering a function there or removing
one, as checkpoints of several servers do. A host that does not answer then stops all threads. faulthandler's timer
thread needs no lock; a process has only one, so these contexts don't nest.
"""

import contextlib
import faulthandler
import threading

_LEAST_SECONDS = 30.0  # converting a large array holds the lock for seconds
_EVERY_SECONDS = 1.0
_STDERR = 2


def put_off(seconds: float) -> None:
    """Schedules the process's end, replacing an earlier schedule: exit code 1, with all stacks on stderr."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def cancel() -> None:
    """Cancels the process's end."""
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def watched(seconds: float):
    """Ends the process if no Python code runs for so many seconds within the context; stopped time counts, too.

    Args:
      seconds: at least half a minute; 0 disables it.
    """
    if not seconds:
        yield
        return
    over = threading.Event()

    def watch():
        while not over.wait(_EVERY_SECONDS):
            put_off(max(seconds, _LEAST_SECONDS))

    thread = threading.Thread(target=watch, name="hang-detection", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # Before the cancellation, or the thread could put the end off once more after it.
        thread.join()
        cancel()
