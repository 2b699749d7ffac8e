"""Pauses of this process: SIGSTOP, Ctrl-Z, a frozen container or virtual machine."""

from __future__ import annotations

import threading
import time

_LEAST_SECONDS = 2.0  # between two checks; a thread that checks about twice a second is never that late
_TURN_SECONDS = 0.5


class Pauses:
    """Measures how long this process was paused, by a thread that calls `check` about twice a second.

    A process is not informed that it was stopped. A gap between two checks is a pause, unless the process has used CPU
    time in it, as code that holds Python's lock does.

    Attributes:
      seconds: the seconds of all pauses so far.
    """

    def __init__(self, clock=time.monotonic, cpu_clock=time.process_time):
        self._now, self._cpu_now = clock, cpu_clock
        self._seen: tuple[float, float] | None = None  # wall and CPU seconds at the last check, or later
        self._cpus = 0.0  # recently used by the process
        self._lock = threading.Lock()
        self.seconds = 0.0

    def check(self) -> None:
        """Records that the process is running."""
        with self._lock:
            now, cpu = self._now(), self._cpu_now()
            if self._seen is not None:
                gap, computed = now - self._seen[0], cpu - self._seen[1]
                if gap > _LEAST_SECONDS and computed < self._cpus * _TURN_SECONDS + gap / 2:
                    self.seconds += gap - _TURN_SECONDS / 2  # it was stopped at some time after the last check
                elif gap > 0.1 * _TURN_SECONDS:
                    self._cpus = computed / gap
                else:
                    return  # too short to measure the CPUs in use
            self._seen = now, cpu

    def clock(self) -> float:
        """Returns the seconds of a clock that stops during pauses; without a checking thread it never does."""
        if self._seen is not None:
            self.check()
        return self._now() - self.seconds

    def close(self) -> None:
        """Stops checking, until the next `check`."""
        with self._lock:
            self._seen = None
