"""The rule by which a cluster's tasks are started again, or not: from how tasks ended, what is to happen.

A rule is an object of two methods, `patience` and `settle`; the supervisor does what they say. Supervisor code.
"""

from __future__ import annotations

import collections
import dataclasses
import signal
import time

from launch.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE

# A task that somebody else asked to end: saved, or ended before it could catch the signal.
_ASKED_TO_END = (EXIT_INTERRUPTED, EXIT_TERMINATED, -signal.SIGINT, -signal.SIGTERM)
_LEAVE_SECONDS = 5.0  # a peer's death is seen within a tenth of a second; the rest is for what is to be said about it
_MISTAKE_SECONDS = 1.0  # all tasks find the same mistake, at about the same time
# From SIGTERM to SIGKILL where a peer is dead: nothing can be saved any more, and a task that waits for its peers
# within TensorFlow hears no signal.
_END_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a task ended.

    Attributes:
      task: its name, "worker 0".
      code: its exit code, or minus the signal that killed it.
      last_lines: the end of its output.
    """

    task: str
    code: int
    last_lines: tuple[str, ...] = ()

    @property
    def was_asked(self) -> bool:
        """Whether it ended since somebody asked it to, by Ctrl-C or SIGTERM."""
        return self.code in _ASKED_TO_END

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.task} was killed by {_signal_name(-self.code)}"
        return f"{self.task} ended with exit code {self.code}"


@dataclasses.dataclass(frozen=True)
class Patience:
    """How many seconds the tasks that are left have: to end by themselves before SIGTERM, and then before SIGKILL."""

    leave_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Settlement:
    """What follows when all tasks have ended.

    Attributes:
      exit_code: the supervisor's, or None: all start again.
      pause_seconds: before that.
      message: what to tell the user; None is nothing.
      cause: the ending that it was for.
    """

    exit_code: int | None
    pause_seconds: float = 0.0
    message: str | None = None
    cause: Ending | None = None


class Synchronous:
    """Tasks that go in step: when one fails, none can go on, and all start again from the last checkpoint.

    A preempted task (asked to end, though not by the supervisor) is no failure: it and its peers have saved.

    Args:
      max_restarts: after failures, within `window_seconds`.
      grace_seconds: what preempted tasks have to save.
      clock: seconds, monotonic.
    """

    def __init__(self, max_restarts: int, window_seconds: float, grace_seconds: float, clock=time.monotonic):
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._failures: collections.deque[float] = collections.deque()
        self._preemptions: collections.deque[float] = collections.deque()

    def patience(self, ending: Ending) -> Patience | None:
        """How long the other tasks have to end after this one; None: they go on."""
        if ending.code == 0:
            return None
        if ending.was_asked:
            leave = self._grace_seconds
        else:
            leave = _MISTAKE_SECONDS if ending.code == EXIT_USAGE else _LEAVE_SECONDS
        return Patience(leave, min(_END_SECONDS, self._grace_seconds))

    def settle(self, endings: list[Ending]) -> Settlement:
        """What follows when all tasks have ended, given in the order of their ends."""
        cause = next((ending for ending in endings if ending.code), None)
        if cause is None:
            return Settlement(0)
        if cause.code == EXIT_USAGE:
            return Settlement(EXIT_USAGE, 0.0, f"{cause}: a mistake in what was asked, so it is not restarted", cause)
        if cause.was_asked:
            count = self._count(self._preemptions)
            pause = _pause(count - 1)
            when = f"in {pause:g} s" if pause else "at once"
            return Settlement(None, pause, f"{cause}, preempted; all tasks start again {when}", cause)
        count = self._count(self._failures)
        if count > self._max_restarts:
            return Settlement(EXIT_FAILED, 0.0, f"{cause}; {self._used_up(count)}", cause)
        pause = _pause(count)
        number = f"restart {count} of {self._max_restarts} within {self._window_seconds:g} s"
        return Settlement(None, pause, f"{cause}; all tasks start again in {pause:g} s ({number})", cause)

    def _count(self, times: collections.deque[float]) -> int:
        """Notes that it is now, and returns how many there were within the window, this one included."""
        now = self._clock()
        times.append(now)
        while now - times[0] > self._window_seconds:
            times.popleft()
        return len(times)

    def _used_up(self, failures: int) -> str:
        if not self._max_restarts:
            return "--max_restarts=0, so it is not restarted"
        return (
            f"it is failure {failures} within {self._window_seconds:g} s, and --max_restarts={self._max_restarts} "
            "restarts are used up"
        )


def _pause(count: int) -> float:
    """0 for none, then 1, 2, 4 s and so on."""
    return min(2.0 ** (count - 1), _LONGEST_PAUSE_SECONDS) if count else 0.0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
