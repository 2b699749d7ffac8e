"""Shows a benchmark to a person while it runs: a bar in a terminal, a line a round elsewhere. Host code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..run.progress import Bar, as_shown, duration
from .measure.rounds import Watcher
from .sections import number

_REDRAW_SECONDS = 1.0  # within a round; a drawing takes about a millisecond, so that is 0.1 % of what is timed


class Live:
    """Shows which stage or round runs, how fast the steps so far were, and how long the others will take.

    Use it in a `with`, which restores the terminal at its end.

    Args:
      mode: --progress. "plain" and "off" do nothing within a round, "bar" draws once a second.
      rounds: how many there will be.
      file: where to; None is standard output.
    """

    def __init__(self, mode: str, rounds: int, file=None):
        self._file = file or sys.stdout
        self.mode = as_shown(mode, self._file)
        self._count = rounds
        self._bar: Bar | None = None
        self._done: Sequence[Mapping[str, Any]] = ()
        self._steps = 0
        self._drawn_at = 0.0

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_failure) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def stage(self, name: str) -> None:
        """Announces a stage that is no round."""
        if self.mode == "bar":
            self._draw(len(self._done), name, "")
        elif self.mode == "plain":
            self._print(name)

    def at_round(self, rounds: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Takes the rounds so far at the end of a stage, and the steps of the next one."""
        self._done, self._steps, self._drawn_at = rounds, steps, 0.0
        if self.mode == "bar":
            self._draw_round(0, 0.0)
        elif self.mode == "plain" and rounds:
            last = rounds[-1]
            rates = f"{number(last['steps_per_sec'])} steps/s  {number(last['examples_per_sec'])} examples/s"
            timed = f"{last['steps']:,} steps in {last['wall_seconds']:.2f} s"
            self._print(f"round {len(rounds)} of {self._count}  {timed}  {rates}")

    @property
    def watcher(self) -> Watcher:
        """The watcher for `launch.benchmark.measure.rounds.run`; it is called within a round only to draw a bar."""
        return Watcher(self.at_round, self._at_call if self.mode == "bar" else None)

    def _at_call(self, steps: int, seconds: float) -> None:
        if seconds - self._drawn_at >= _REDRAW_SECONDS:
            self._drawn_at = seconds
            self._draw_round(steps, seconds)

    def _draw_round(self, steps: int, seconds: float) -> None:
        """Draws a running round, of which `steps` have been done in `seconds`."""
        done = len(self._done)
        if done == self._count:
            return
        all_steps = steps + sum(each["steps"] for each in self._done)
        all_seconds = seconds + sum(each["wall_seconds"] for each in self._done)
        text = ""
        if all_steps:
            left = (self._count - done) * self._steps - steps
            text = f"{number(all_steps / all_seconds)} steps/s  {duration(left * all_seconds / all_steps)} left"
        self._draw(done + steps / self._steps, f"round {done + 1} of {self._count}", text)

    def _draw(self, completed: float, description: str, text: str) -> None:
        if self._bar is None:
            self._bar = Bar(self._file, description, self._count, stays=False)
        self._bar.draw(completed, description, text)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)
