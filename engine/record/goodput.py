"""How a run's wall time was spent, since its first start and over all attempts."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .. import logging
from .events import Line

# Repeated after a resume: such time since the checkpoint becomes `lost`.
_DONE_AGAIN = ("steps", "input", "waiting", "checkpoints", "evaluation", "other")
_CLOCK_SECONDS = 5.0  # by which hosts' clocks may differ
KINDS = ("steps", "start", "compile", "input", "waiting", "checkpoints", "evaluation", "other", "lost", "down")


@dataclasses.dataclass
class Past:
    """The earlier attempts of a run, by its record.

    Attributes:
      newest: the newest lines that may have seconds by `KINDS`.
      alive_at: the last sign of work of the last attempt, in Unix seconds.
      end: the event `end`, if the last process has written one; `cause`, from others' events about its end.
    """

    attempts: int = 0
    step: int = 0
    newest: collections.deque[Line] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=8))
    alive_at: float = 0.0
    kind: str = ""
    end: Mapping[str, Any] | None = None
    cause: str | None = None

    def replay(self, line: Line) -> None:
        """Processes the line of an event, in order."""
        kind = line.kind
        self.step = max(self.step, line.step)
        if kind == "start":
            self.attempts = max(self.attempts, line.event.get("attempt") or 0) + 1
            self.end = self.cause = None
        elif kind == "end":
            self.end = line.event
            self.cause = self.end.get("reason")
        elif kind == "restart":
            self.cause = line.event.get("cause")
        # Between two restarts no process has reached its first step.
        if kind == "end" or (self.end is None and not kind == self.kind == "restart"):
            self.alive_at = line.time
        self.kind = kind
        if kind in ("start", "window", "end"):
            self.newest.append(line)  # to be parsed if it is asked for, since a run may have a million

    def spent(self) -> tuple[Mapping[str, float], float]:
        """Returns the seconds by `KINDS` that were recorded last, and when, in Unix seconds; ({}, inf) without any."""
        for line in reversed(self.newest):
            event = line.event
            ends = line.kind == "end" and event.get("goodput")
            spent = event["goodput"].get("seconds") if ends else event.get("spent")
            if isinstance(spent, Mapping):
                return spent, line.time
        return {}, math.inf


class Goodput:
    """Seconds by kind, which add up to the time since the run's first start.

    A pause after exit code 0 does not count: the run was complete, and is extended.

    Attributes:
      seconds: the seconds spent so far, by kind (`KINDS`).
    """

    def __init__(self):
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._compiling = self._steady = (0.0, 0)  # seconds and steps of calls that compiled, and of others

    def resume(self, past: Past, saved: Mapping[str, float] | None, step: int, began_at: float) -> None:
        """Continues the figures of earlier processes.

        Args:
          saved: the checkpoint's `seconds`; None without one.
          began_at: this process's start, in Unix seconds.
        """
        if not past.attempts:
            return
        spent, spent_at = past.spent()
        last = {kind: float(spent.get(kind) or 0.0) for kind in KINDS}
        alive_at = min(past.alive_at, began_at)  # a clock that was ahead recorded a time that has not come yet
        if (ahead := past.alive_at - began_at) > _CLOCK_SECONDS:
            logging.warning(
                "the run's record is of a clock %.0f s ahead of this host's: its time down is unknown, and left out",
                ahead,
            )
        unrecorded = max(0.0, alive_at - spent_at)
        if past.end is not None and past.step <= step:
            last["other"] += unrecorded
        else:
            was = {kind: min(last[kind], float((saved or {}).get(kind, 0.0))) for kind in _DONE_AGAIN}
            last["lost"] += sum(last[kind] - was[kind] for kind in _DONE_AGAIN) + unrecorded
            last |= was
        if past.end is None or past.end.get("exit_code"):
            last["down"] += began_at - alive_at
        self.seconds = last

    def add(
        self,
        elapsed: float,
        calls: tuple[float, int],
        compiling: tuple[float, int],
        input_seconds: float = 0.0,
        waiting_seconds: float = 0.0,
        aside: Mapping[str, float] | None = None,
    ) -> None:
        """Adds a period of time.

        Args:
          elapsed: the period's length by the wall clock, in seconds.
          calls: seconds and steps of all calls of the inner loop in it.
          compiling: seconds and steps of the calls that compiled.
          input_seconds: seconds for which steps waited within calls for input.
          waiting_seconds: seconds for which steps waited within calls for other workers.
          aside: seconds between calls, by kind; the rest of `elapsed` is `other`.
        """
        aside, seconds = aside or {}, self.seconds
        input_seconds = min(input_seconds, calls[0])
        before = self._compile_seconds
        self._compiling = self._compiling[0] + compiling[0], self._compiling[1] + compiling[1]
        steady = calls[0] - compiling[0] - min(input_seconds, calls[0] - compiling[0])
        self._steady = self._steady[0] + steady, self._steady[1] + calls[1] - compiling[1]
        # Below 0 once other calls show how long a step is: less of the earlier calls was compilation than it seemed.
        compiled = min(self._compile_seconds - before, calls[0] - input_seconds)
        waited = max(0.0, min(waiting_seconds, calls[0] - input_seconds - compiled))
        for kind, more in (*aside.items(), ("input", input_seconds), ("compile", compiled), ("waiting", waited)):
            seconds[kind] += more
        seconds["steps"] += calls[0] - input_seconds - compiled - waited
        seconds["other"] += elapsed - calls[0] - sum(aside.values())

    @property
    def _compile_seconds(self) -> float:
        """The extra seconds of calls that compiled, compared with other calls' steps, if known."""
        (seconds, steps), (steady_seconds, steady_steps) = self._compiling, self._steady
        return max(0.0, seconds - steps * steady_seconds / steady_steps) if steady_steps else seconds

    @property
    def spent(self) -> dict[str, float]:
        """The seconds by kind, and their `total`."""
        return {"total": sum(self.seconds.values()), **self.seconds}

    def report(self) -> dict[str, Any]:
        """Returns `share`, the fraction of useful steps' time, and `seconds`, which is `spent`."""
        spent = self.spent
        return {"share": spent["steps"] / spent["total"] if spent["total"] > 0 else 0.0, "seconds": spent}
