"""Ends a process that hangs with Python's lock held, when no Python code could end it.

Some calls of TensorFlow hold that lock while they wait for another host, such as registering a function with it or
removing one, which a checkpoint of several servers does. A host that is there and does not answer then stops all
threads. faulthandler's timer thread needs no lock; a process has only one, so two of these do not nest.
"""

import contextlib
import faulthandler
import threading

_LEAST_SECONDS = 30.0  # a large array's conversion holds the lock for some seconds
_EVERY_SECONDS = 1.0
_STDERR = 2


def put_off(seconds: float) -> None:
    """Schedules the process's end, in place of any scheduled before: exit code 1, with all stacks on stderr."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def cancel() -> None:
    """Cancels the process's end."""
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def watched(seconds: float):
    """Ends the process if, within the context, no Python has run for so many seconds; stopped time counts too.

    Args:
      seconds: half a minute at least; 0 is never.
    """
    if not seconds:
        yield
        return
    over = threading.Event()

    def watch():
        while not over.wait(_EVERY_SECONDS):
            put_off(max(seconds, _LEAST_SECONDS))

    thread = threading.Thread(target=watch, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        cancel()
