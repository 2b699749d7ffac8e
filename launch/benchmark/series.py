"""Runs benchmarks one after another, each in a separate process, and reports them. Host code, without TensorFlow."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .children import MeasurementFailed, Process, Stopped, run


class Series:
    """Runs benchmarks, and prints of each what it is, how fast it was or why it failed.

    Args:
      count: how many there will be.
      environment: the variables that their processes get.
      quiet: print only failures.
      timeout_seconds: how long one may take; None is for ever.

    Attributes:
      warnings: those of the results so far, each with its title.
    """

    def __init__(
        self, count: int, environment: Mapping[str, str], *, quiet: bool = False, timeout_seconds: float | None = None
    ):
        self._count = count
        self._environment = environment
        self._quiet = quiet
        self._timeout_seconds = timeout_seconds
        self._begun = 0
        self.warnings: list[str] = []

    def measure(self, title: str, make: Callable[[Path], Process]) -> dict:
        """Runs one benchmark and returns its result.

        Args:
          title: what it is.
          make: returns the process, given the path that it has to write its result to.

        Raises:
          MeasurementFailed: there is no result.
        """
        self._begun += 1
        self._say(f"[{self._begun}/{self._count}] {title}: ")
        before = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "result.json")
                result = run(make(path), path, environment=self._environment, timeout_seconds=self._timeout_seconds)
            if not isinstance(result.get("steps_per_sec"), (int, float)):
                raise MeasurementFailed("its result has no steps_per_sec; is it a benchmark (--mode=benchmark)?")
        except MeasurementFailed as failure:
            self._say("failed\n")
            lines = [f"{title} failed: {failure}", *(f"    {line}" for line in failure.last_lines)]
            print("\n".join(lines), file=sys.stderr, flush=True)
            raise
        except Stopped:
            self._say("stopped\n")
            raise
        self.warnings += [f"{title}: {line}" for line in result.get("warnings") or ()]
        self._say(f"{result['steps_per_sec']:,.1f} steps/s ({time.monotonic() - before:.0f} s)\n")
        return result

    def skip(self) -> None:
        """Counts a benchmark that is not to be run."""
        self._begun += 1

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", flush=True)
