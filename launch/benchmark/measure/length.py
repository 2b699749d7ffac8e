"""The length of what a benchmark times."""

from __future__ import annotations

import dataclasses

ENDLESS = 1 << 31  # steps that no benchmark reaches: the pace alone decides how long a call is


@dataclasses.dataclass(frozen=True)
class Length:
    """How much is timed.

    Attributes:
      steps: of a round; None: as many as `seconds` hold.
      seconds: of a round, about, where `steps` is None.
      rounds: how many, one after another.
    """

    steps: int | None = None
    seconds: float | None = None
    rounds: int = 1

    def check(self) -> None:
        """Raises ValueError for a round of no steps, or no rounds."""
        if self.rounds < 1:
            raise ValueError(f"benchmark_rounds={self.rounds} leaves nothing to time; use 1 or more")
        if self.steps is None and not (self.seconds and self.seconds > 0):
            raise ValueError(f"benchmark_seconds={self.seconds} leaves nothing to time; use more than 0")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"benchmark_steps={self.steps} leaves nothing to time; use 1 or more")

    def agreed_steps(self, strategy, steps_per_sec: float, share: float = 1.0) -> int:
        """Returns the steps of a round; of seconds, as many as fill a `share` of them at the chief's rate.

        So they are the same in all processes. Where replicas meet each so many steps, and a round is long enough, it
        ends where they meet.
        """
        if self.steps is not None:
            return self.steps
        filling, each = self.seconds * share * steps_per_sec, strategy.sync_period_steps
        return strategy.exchange(each * round(filling / each) if filling >= each else max(1, round(filling)))[0]
