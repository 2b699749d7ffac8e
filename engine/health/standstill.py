"""Ends a process that stands still even where no Python runs, so that nothing written in Python could end it.

TensorFlow waits for other hosts with Python's lock held at some places, such as where it registers a function with them
or removes one, which a checkpoint of several servers does. A host that is there and does not answer so stops all
threads. faulthandler's own thread needs no lock; a process has one, so two of these do not nest.
"""

import contextlib
import faulthandler
import threading

_LEAST_SECONDS = 30.0  # a large array's conversion holds the lock for some seconds
_EVERY_SECONDS = 1.0
_STDERR = 2


def put_off(seconds: float) -> None:
    """Sets the process to end so many seconds from now, and no earlier: with exit code 1, all stacks on stderr."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def call_off() -> None:
    """Cancels the process's end."""
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def watched(seconds: float):
    """Ends the process if, within, no Python has run for so many seconds. Time in which it was stopped counts too.

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
        call_off()
