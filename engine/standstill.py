"""Ends a process in which Python stands still, since then nothing written in Python can.

TensorFlow speaks to other hosts with Python's lock held at some places: where it makes a function known to them, which
a checkpoint of several servers does, or takes one back. A host that is there and does not answer stops all threads so.
"""

import contextlib
import faulthandler
import threading

_LEAST_SECONDS = 30.0  # a large array's conversion holds the lock for some
_EVERY_SECONDS = 1.0
_STDERR = 2


@contextlib.contextmanager
def ends_process(seconds: float):
    """Within, the process ends with exit code 1 and all stacks on stderr once no Python has run for so long.

    Args:
      seconds: half a minute at least; 0 is never. Time in which the process itself was stopped counts too.
    """
    if not seconds:
        yield
        return
    over = threading.Event()

    def put_off():
        while not over.wait(_EVERY_SECONDS):
            # A thread without Python counts it down.
            faulthandler.dump_traceback_later(max(seconds, _LEAST_SECONDS), exit=True, file=_STDERR)

    thread = threading.Thread(target=put_off, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
