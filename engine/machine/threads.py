"""A call in a thread of its own; the lock on what threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

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
