"""Pauses of this process: SIGSTOP, Ctrl-Z, a frozen container, a virtual machine that stands still. Host code."""

from __future__ import annotations

import threading
import time

_LEAST_SECONDS = 2.0  # from one look to the next; a thread that looks about twice a second is never that late
_TURN_SECONDS = 0.5


class Pauses:
    """Notes for how long this process stood still, by a thread that calls `look` about twice a second.

    Nothing tells a process that it was stopped. A gap between two looks is a pause, unless the process has computed in
    it, as code that holds Python's lock does.

    Args:
      clock: returns seconds, for tests.
      cpu_clock: returns the seconds that this process has computed, likewise.

    Attributes:
      seconds: of all pauses so far.
    """

    def __init__(self, clock=time.monotonic, cpu_clock=time.process_time):
        self._now, self._cpu_now = clock, cpu_clock
        self._seen: tuple[float, float] | None = None  # wall and CPU seconds at the last look of the thread, or later
        self._cpus = 0.0  # that the process has used, of late
        self._lock = threading.Lock()
        self.seconds = 0.0

    def look(self) -> None:
        """Notes that the process is at work."""
        with self._lock:
            now, cpu = self._now(), self._cpu_now()
            if self._seen is not None:
                gap, computed = now - self._seen[0], cpu - self._seen[1]
                if gap > _LEAST_SECONDS and computed < self._cpus * _TURN_SECONDS + gap / 2:
                    self.seconds += gap - _TURN_SECONDS / 2  # it was stopped some time after the last look
                elif gap > 0.1 * _TURN_SECONDS:
                    self._cpus = computed / gap
                else:
                    return  # too short to say how many CPUs are used
            self._seen = now, cpu

    def clock(self) -> float:
        """Returns seconds of a clock that stands still in pauses; without a thread that looks, there are none."""
        if self._seen is not None:
            self.look()
        return self._now() - self.seconds

    def close(self) -> None:
        """Ends the looking, until it begins again."""
        with self._lock:
            self._seen = None
