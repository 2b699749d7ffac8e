"""How a process of a run ends.

A fork of a program has a copy of all that the program will do at its end: `with` and `finally` around the calls that it
is in, and what it has registered, such as to remove its temporary folders. All of that stays the parent's.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import io
import multiprocessing.util
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from logging import Handler
from typing import NoReturn

from ..failures import EXIT_FAILED, EXIT_INTERRUPTED, print_line


def end_left_open(run_dir: str | None) -> None:
    """Saves and closes runs of this process: one that is open in a folder, and those that no program holds any more.

    A run that is within a call stays open.
    """
    for end, folder in [*LEFT_OPEN.items()]:
        if folder == DROPPED or (folder and folder == run_dir):
            end(asks_others=folder != DROPPED)


def run_fork(work: Callable[[], int | None]) -> NoReturn:
    """Does the work of this fork, and ends it as Python ends, but by its own finalizers alone.

    The calls that its parent was in never return here. `work` returns the exit code, or None for 0.
    """
    code = EXIT_FAILED
    try:
        for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
            finalizer.atexit = False
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]
        # They are called from the last to the first, so `_end` after the fork's, and before the parent's.
        atexit.register(_end)
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        try:
            code = work() or 0
        except SystemExit as error:
            if isinstance(error.code, int | None):
                code = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
            _end.interrupted = isinstance(error, KeyboardInterrupt)
        leave(code)
    finally:
        os._exit(EXIT_FAILED)  # the report of an error has failed


def leave(code: int) -> NoReturn:
    """Ends the process after its threads and finalizers, without TensorFlow's end, which waits for lost peers."""
    _end.code = code & 0xFF
    for function in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            function()
        except BaseException as error:  # Ctrl-C, too
            sys.excepthook(type(error), error, error.__traceback__)
    _end()


class _End:
    """Ends the process.

    Attributes:
      interrupted: whether it dies by Ctrl-C instead, as Python does.
    """

    code = EXIT_FAILED
    interrupted = False

    def __call__(self) -> NoReturn:
        try:
            flush()
            if self.interrupted:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
                self.code = EXIT_INTERRUPTED  # the program has blocked it
        finally:
            os._exit(self.code)


_end = _End()
LEFT_OPEN: dict[Callable[..., None], str | None] = {}  # the method that ends each open run, and the run's folder
DROPPED = ""  # in place of the folder: nothing holds the run


def flush() -> None:
    """Writes what open files, and handlers of `logging`, hold back: `os._exit` loses it, and each fork has a copy."""
    objects = gc.get_objects()
    kinds = {kind for kind in {*map(type, objects)} if issubclass(kind, (io.IOBase, Handler))}
    # The standard streams by their names, since a template's (`gc.freeze`) are not among the objects.
    for file in [sys.stdout, sys.stderr, *(item for item in objects if type(item) in kinds)]:
        try:
            file.flush()
        except OSError as error:
            if error.errno != errno.EPIPE:  # nobody reads it any more
                print_line(f"error: {getattr(file, 'name', file)} can't be written: {error.strerror or error}")
        except Exception:  # it is closed, or half made
            continue
    ctypes.CDLL(None).fflush(None)  # those of C
