"""Speeds of a run, and what its input costs, over some calls of the inner loop. Host code."""

from __future__ import annotations

from .base import Status


class Rates:
    """Adds up calls of the inner loop.

    Attributes:
      calls: that were added.
      seconds: wall time of them.
    """

    def __init__(self):
        self.calls = 0
        self.seconds = 0.0
        self._steps = self._examples = self._input_seconds = 0.0
        self._bytes: int | None = None
        self._steps_ahead: list[float] = []

    def count(self, status: Status) -> None:
        """Adds one call."""
        self.calls += 1
        self.seconds += status.seconds
        self._steps += status.steps
        self._examples += status.examples
        self._input_seconds += status.input_seconds
        if status.input_bytes is not None:
            self._bytes = (self._bytes or 0) + status.input_bytes
        if status.steps_ahead is not None:
            self._steps_ahead.append(status.steps_ahead)

    @property
    def speeds(self) -> dict[str, float]:
        """`steps_per_sec` and `examples_per_sec`; none where no time has passed."""
        if not self.seconds:
            return {}
        return {"steps_per_sec": self._steps / self.seconds, "examples_per_sec": self._examples / self.seconds}

    @property
    def input(self) -> dict[str, float]:
        """What input takes, of this process; none where no time has passed.

        `input_wait_fraction`: the share of the time in which steps wait for input. And of what is read as steps go,
        from files or a dataset: `input_wait_ms`, of a step; `input_bytes_per_sec`; where it is known,
        `input_steps_ahead`: steps whose examples are there before they are asked for, on average over the calls.
        """
        if not self.seconds:
            return {}
        found = {"input_wait_fraction": min(1.0, self._input_seconds / self.seconds)}
        if self._bytes is not None:
            found["input_wait_ms"] = 1e3 * self._input_seconds / max(1.0, self._steps)
            found["input_bytes_per_sec"] = self._bytes / self.seconds
        if self._steps_ahead:
            found["input_steps_ahead"] = sum(self._steps_ahead) / len(self._steps_ahead)
        return found
