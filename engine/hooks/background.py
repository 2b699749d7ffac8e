"""The thread that writes hooks' records, so that no step waits for a file or a metric's value."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

from .. import logging
from ..errors import reason

# Approximate period. A thread that woke for each piece of work would disturb training.
_TURN_SECONDS = 0.5
_CLOSE_SECONDS = 30.0  # for values that may never arrive if other processes are lost


class BackgroundThread:
    """A thread that executes submitted work in order, about twice a second. It runs while any user has it open."""

    def __init__(self, name: str = "writer"):
        self._name = name
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._each_turn: list[Callable[[], Any] | None] = []  # one per user

    def open(self, each_turn: Callable[[], Any] | None = None) -> None:
        """Starts the thread, which calls `each_turn`, if any, whenever its queue is empty."""
        # A new list: the thread may be in the middle of the old one.
        self._each_turn = [*self._each_turn, each_turn]
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # if the system lets it
            self._thread = thread
            atexit.register(self._end)  # after an exception nothing else might

    def submit(self, work: Callable[[], Any]) -> None:
        """Queues work."""
        self._queue.put(work)

    def flush(self, seconds: float | None = None) -> None:
        """Waits until all queued work is done, for at most so many seconds."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            self._wake.set()
            done.wait(seconds)

    def close(self, each_turn: Callable[[], Any] | None = None) -> None:
        """Flushes, and ends the thread if no other user has it open; may be called again."""
        self.flush(_CLOSE_SECONDS)
        self._each_turn = [function for function in self._each_turn if function != each_turn]
        if not self._each_turn:
            self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._wake.set()
            self._thread.join(_CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._thread = None
                atexit.unregister(self._end)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(_TURN_SECONDS)
            self._wake.clear()
            flushed = []
            while not self._queue.empty():
                work = self._queue.get()
                if work is None:
                    closing = True
                elif isinstance(work, threading.Event):
                    flushed.append(work)
                else:
                    _attempt(work)
            for function in filter(None, self._each_turn):
                _attempt(function)
            # Last: who waits for the work waits for `each_turn`, too, which writes files' buffers.
            for done in flushed:
                done.set()


def _attempt(work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception as error:  # of any kind: a record must end neither a run nor the writing thread
        logging.warning("a part of the run's log is lost: %s", reason(error))
