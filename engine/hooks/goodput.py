"""What a run's wall time went to, since its first start and over all that followed. Host code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# What is done again where a run goes on from a checkpoint: of the time since that checkpoint it makes `lost`.
_DONE_AGAIN = ("steps", "input", "waiting", "checkpoints", "evaluation", "other")
KINDS = ("steps", "start", "compile", "input", "waiting", "checkpoints", "evaluation", "other", "lost", "down")


@dataclasses.dataclass
class Past:
    """What a run's record has of the attempts before this one.

    Attributes:
      attempts: their number.
      step: the last that was recorded.
      spent: seconds by `KINDS`, as recorded last, and `spent_at`, when that was.
      alive_at: when the last of them was last seen at work, in Unix seconds.
      kind: of the last event.
      end: the last event `end`, if the last process has written one; `cause` what another says of its end.
      rows: of the history.
    """

    attempts: int = 0
    step: int = 0
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    spent_at: float = 0.0
    alive_at: float = 0.0
    kind: str = ""
    end: Mapping[str, Any] | None = None
    cause: str | None = None
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def see(self, event: Mapping[str, Any]) -> None:
        """Takes up an event, in their order."""
        kind = event["event"]
        self.step = max(self.step, event["step"])
        if kind == "start":
            self.attempts += 1
            self.end = self.cause = None
        elif kind == "end":
            self.end, self.cause = event, event.get("reason")
        elif kind == "restart":
            self.cause = event.get("cause")
        elif kind == "row":
            self.rows.append({name: value for name, value in event.items() if name not in ("event", "time")})
        # Between two restarts no process has come to its first step.
        if kind == "end" or (self.end is None and not kind == self.kind == "restart"):
            self.alive_at = event["time"]
        self.kind = kind
        spent = event["goodput"].get("seconds") if kind == "end" and event.get("goodput") else event.get("spent")
        if isinstance(spent, Mapping):
            self.spent, self.spent_at = spent, event["time"]


class Goodput:
    """Seconds by what they went to; they add up to all that has passed since the run's first start.

    A pause after an end with exit code 0 does not count: the run was complete, and is prolonged.

    Attributes:
      seconds: by `KINDS`.
    """

    def __init__(self):
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._compiling = self._steady = (0.0, 0)  # seconds and steps, of calls that compiled and of the others

    def resume(self, past: Past, kept: Mapping[str, float] | None, step: int, began_at: float) -> None:
        """Goes on where the processes before left off.

        Args:
          past: what they have recorded.
          kept: `seconds` as the checkpoint has them; None without one.
          step: of the checkpoint.
          began_at: when this process began, in Unix seconds.
        """
        if not past.attempts:
            return
        last = {kind: float(past.spent.get(kind) or 0.0) for kind in KINDS}
        unrecorded = max(0.0, past.alive_at - past.spent_at)
        if past.end is not None and past.step <= step:
            last["other"] += unrecorded
        else:
            was = {kind: min(last[kind], float((kept or {}).get(kind, 0.0))) for kind in _DONE_AGAIN}
            last["lost"] += sum(last[kind] - was[kind] for kind in _DONE_AGAIN) + unrecorded
            last |= was
        if past.end is None or past.end.get("exit_code"):
            last["down"] += max(0.0, began_at - past.alive_at)
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
        """Adds a stretch of time.

        Args:
          elapsed: of the wall clock.
          calls: seconds and steps of all calls of the inner loop in it.
          compiling: those of the calls that compiled.
          input_seconds: for which steps waited within calls for input.
          waiting_seconds: likewise, for other workers.
          aside: seconds between calls, by kind; what is left of `elapsed` is `other`.
        """
        aside, seconds = aside or {}, self.seconds
        input_seconds = min(input_seconds, calls[0])
        before = self._compile_seconds
        self._compiling = self._compiling[0] + compiling[0], self._compiling[1] + compiling[1]
        steady = calls[0] - compiling[0] - min(input_seconds, calls[0] - compiling[0])
        self._steady = self._steady[0] + steady, self._steady[1] + calls[1] - compiling[1]
        compiled = min(self._compile_seconds - before, calls[0] - input_seconds)
        waited = max(0.0, min(waiting_seconds, calls[0] - input_seconds - compiled))
        for kind, more in (*aside.items(), ("input", input_seconds), ("compile", compiled), ("waiting", waited)):
            seconds[kind] += more
        seconds["steps"] += calls[0] - input_seconds - compiled - waited
        seconds["other"] += elapsed - calls[0] - sum(aside.values())

    @property
    def _compile_seconds(self) -> float:
        """What calls that compiled took longer than their steps do otherwise, as far as that is known by now."""
        (seconds, steps), (steady_seconds, steady_steps) = self._compiling, self._steady
        return max(0.0, seconds - steps * steady_seconds / steady_steps) if steady_steps else seconds

    @property
    def spent(self) -> dict[str, float]:
        """The seconds by kind, and their `total`."""
        return {"total": sum(self.seconds.values()), **self.seconds}

    def report(self) -> dict[str, Any]:
        """Returns `share`, that of steps that count, and `seconds`, which is `spent`."""
        spent = self.spent
        return {"share": spent["steps"] / spent["total"] if spent["total"] > 0 else 0.0, "seconds": spent}
