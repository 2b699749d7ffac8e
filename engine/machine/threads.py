"""Threads that start, or fail to, in limited time; the lock on what they share. Host code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_START_SECONDS = 10
# Held while a thread changes what is the process's: descriptors, environment, warnings, random generators, TensorFlow's
# start. Another thread's run would change it in between, and would find or restore what is this one's.
PROCESS = threading.RLock()


class Thread(threading.Thread):
    """A thread whose start does not wait for ever: where memory is short, one may end before its first line."""

    def start(self) -> None:
        """Starts it. Raises RuntimeError, as Python's own does, where that can't be done."""
        started = self._started  # type: ignore[attr-defined]
        wait = started.wait
        # Second by second, as time in which this process is stopped does not count.
        started.wait = lambda: any(wait(1.0) for _ in range(_START_SECONDS))
        super().start()
        if not started.is_set():
            raise RuntimeError("can't start new thread")


def call(name: str, function: Callable, *arguments: Any, daemon: bool = False) -> Future:
    """Calls a function in a thread of its own, and returns its result to be."""
    future: Future = Future()
    Thread(target=_set_result, args=(future, function, *arguments), name=name, daemon=daemon).start()
    return future


def _set_result(future: Future, function: Callable, *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # raised where the result is used
        future.set_exception(error)
    finally:
        del future, function, arguments  # which the error's frame would keep
