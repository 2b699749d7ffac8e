"""Waits for data while there is progress, and no longer.

A call that hangs in the system or in TensorFlow can't be interrupted: its thread is abandoned, and the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ..errors import StuckStreamError, rounded
from ..machine import threads

_POLL_SECONDS = 1.0
_COMPUTING = 0.01  # of the timeout: a stream that computes for less is stuck


def wait_for_result(
    future: Future, timeout_seconds: float, progress: Callable[[], Any], stuck: Callable[[float], Exception]
) -> Any:
    """Waits for a future and returns its result, or raises its exception.

    Args:
      timeout_seconds: limit on time without progress, not counting time while the process is stopped; 0 waits for ever.
      progress: returns another value after any progress.
      stuck: returns the error to raise after so many seconds without progress.
    """
    poll_seconds = min(_POLL_SECONDS, timeout_seconds / 4)
    idle, seen, before = 0.0, progress(), time.monotonic()
    while not wait([future], poll_seconds or None).done:
        now = time.monotonic()
        # A longer gap than this between two looks: the process was stopped meanwhile.
        idle, before = idle + min(now - before, 2 * poll_seconds), now
        if (newest := progress()) != seen:
            idle, seen = 0.0, newest
        elif idle > timeout_seconds:
            raise stuck(idle)
    return future.result()


def quote_files(files: Sequence[str]) -> str:
    """Returns " of" some files, in a few words; "" without files."""
    others = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return f" of {files[0]}{others}" if files else ""


class StreamTimeout:
    """Calls functions that wait for a stream in their own threads.

    A stream that computes is not stuck: filling a shuffle's buffer may take long before the first batch.

    Args:
      timeout_seconds: limit on time without data and without computation; 0 waits for ever.
    """

    def __init__(self, files: Sequence[str], timeout_seconds: float):
        self._files, self._timeout = files, timeout_seconds

    def call(self, function: Callable[[], Any], progress: Callable[[], Any] = lambda: None) -> Any:
        """Returns a function's result, or raises its exception.

        Raises:
          StuckStreamError: no data for too long.
        """
        if not self._timeout:
            return function()
        future = threads.call("crankshaft-stream", function, daemon=True)

        def data_and_time() -> tuple[Any, int]:  # also grows while this process computes
            return progress(), int(time.process_time() / (_COMPUTING * self._timeout))

        return wait_for_result(future, self._timeout, data_and_time, self._stuck)

    def _stuck(self, idle: float) -> StuckStreamError:
        return StuckStreamError(
            f"the data is a stream{quote_files(self._files)} without data or computation for {rounded(idle)} s; see "
            "whether the files or the host that it reads answer, or raise step_timeout_seconds"
        )
