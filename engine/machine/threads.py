"""A call in a thread of its own; the lock on what threads share; the end of a process, and where its ID counts."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..errors import EXIT_FAILED, one_line

# Held while a thread changes what is the process's: descriptors, environment, warnings, random generators, TensorFlow's
# start. Another thread's run would change it meanwhile, and would see or restore this run's values.
PROCESS = threading.RLock()
# Held while a step is traced, and its objects are compared with a trace's: two traces at once, of one model, would find
# each other's contexts and attributes. Nothing is read or computed meanwhile that may wait for another thread.
TRACING = threading.RLock()


def call(name: str, function: Callable, *arguments: Any, daemon: bool = False) -> Future:
    """Calls a function in a new thread, and returns its future result."""
    future: Future = Future()
    threading.Thread(target=_set_result, args=(future, function, *arguments), name=name, daemon=daemon).start()
    return future


def _set_result(future: Future, function: Callable, *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # raised where the result is used
        future.set_exception(error)
    finally:
        del future, function, arguments  # which the error's frame would keep


def end_process(line: str) -> None:
    """Prints the line and all threads' stacks, and ends the process, whatever its main thread is doing."""
    print(f"error: {one_line(line)}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(2)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    # Not sys.exit: TensorFlow's shut-down would wait for the same peers again.
    os._exit(EXIT_FAILED)


def pid_space() -> str:
    """Names the processes among which a process ID is one: of this boot and PID namespace; empty if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
