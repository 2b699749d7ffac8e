"""Runs measurements in separate processes, side by side, to their ends; none is left behind. Host code.

TensorFlow is not imported here: a process that only waits takes nothing from those that measure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from crankshaft.launch.cluster.children import Child, Children, wait
from crankshaft.launch.cluster.output import last_lines
from crankshaft.launch.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, signal_name
from crankshaft.launch.host.signals import SAME_REQUEST_SECONDS

_GRACE_SECONDS = 10.0  # from SIGTERM, which TensorFlow may swallow, to SIGKILL
_POLL_SECONDS = 0.2
_REASON = re.compile(r"(?:^|\] )error: (.*)")  # crankshaft local puts the task's name before a line

# Variables that change how fast a program is, by the beginning of their names.
_TUNING = ("GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "OMP_", "ONEDNN_", "TF_", "XLA_")


class MeasurementFailed(Exception):
    """A process of a measurement failed, did not end in time or wrote no result: which, and why. One line.

    Attributes:
      last_lines: the end of what it printed.
    """

    def __init__(self, line: str, last_lines: Sequence[str] = ()):
        super().__init__(line)
        self.last_lines = tuple(last_lines)


class Stopped(BaseException):
    """A request that this process end. Raised by `stoppable` where a signal finds the main thread.

    Attributes:
      code: the exit code.
    """

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def untuned(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those that change how fast a program is: each peer runs with its defaults."""
    return {name: value for name, value in environment.items() if not name.startswith(_TUNING)}


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Makes SIGTERM and Ctrl-C, within, raise `Stopped`, so that what has been measured can still be reported.

    A second signal, except one that comes with the first, does what it would have done without.
    """
    codes = {signal.SIGTERM: EXIT_TERMINATED, signal.SIGINT: EXIT_INTERRUPTED}

    before = {number: signal.getsignal(number) for number in codes}
    stopped_at = None

    def stop(number, _frame):
        nonlocal stopped_at
        if stopped_at is None:
            stopped_at = time.monotonic()
            raise Stopped(codes[number])
        if time.monotonic() - stopped_at > SAME_REQUEST_SECONDS:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # a job in the background gets no Ctrl-C
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that is to be run.

    Attributes:
      command: the program and its arguments.
      variables: environment variables that it gets besides those of `run_together`.
      cores: the logical cores that it may use; None: all that this process may.
      serves: it does not end by itself, and is ended once those that do not serve have ended.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: frozenset[int] | None = None
    serves: bool = False

    def shown(self) -> str:
        """Returns the command as one would type it."""
        pinned = ["taskset", "-c", ",".join(map(str, sorted(self.cores)))] if self.cores else []
        variables = ["env", *(f"{name}={value}" for name, value in self.variables.items())] if self.variables else []
        return shlex.join([*pinned, *variables, *self.command])


def run(process: Process, result_path: Path, **options) -> dict:
    """Runs one process to its end and returns the result that it wrote. `options` are those of `run_together`.

    Raises:
      MeasurementFailed: it failed, or wrote none.
    """
    [output] = run_together([process], **options)
    try:
        return json.loads(result_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = "nothing" if isinstance(error, FileNotFoundError) else f"no JSON ({error})"
        raise MeasurementFailed(f"it ended well and wrote {why} to its --result_json", output) from None


def run_together(
    processes: Sequence[Process],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float | None = None,
    folder: str | None = None,
) -> list[tuple[str, ...]]:
    """Runs processes side by side to their ends, and returns the last lines that each printed.

    However this ends, even by kill -9 of this process, none of them or of their children is left.

    Args:
      processes: what to run.
      environment: the variables that they get, each its own besides.
      timeout_seconds: how long they may take; None is for ever.
      folder: where they run; None is where this process does.

    Raises:
      MeasurementFailed: one can't be started or failed, or time is up.
    """
    with tempfile.TemporaryDirectory() as outputs, Children() as children:
        paths = [Path(outputs, str(index)) for index in range(len(processes))]
        started: list[Child] = []
        try:
            for process, path in zip(processes, paths, strict=True):
                started.append(_start(children, process, path, environment, folder))
            failed = _wait(started, [process.serves for process in processes], timeout_seconds)
        finally:
            for child in started:
                if child.code is None:
                    child.send(signal.SIGTERM)
            wait(started, _GRACE_SECONDS)
            children.end(started)
        printed = [last_lines(path.read_bytes()) for path in paths]
    if failed:
        index, why = failed
        raise MeasurementFailed(_with_reason(why, printed[index]), printed[index])
    return printed


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
        self._print(f"[{self._begun}/{self._count}] {title}: ")
        before = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "result.json")
                result = run(make(path), path, environment=self._environment, timeout_seconds=self._timeout_seconds)
            if not isinstance(result.get("steps_per_sec"), (int, float)):
                raise MeasurementFailed("its result has no steps_per_sec; is it a benchmark (--mode=benchmark)?")
        except MeasurementFailed as failure:
            self._print("failed\n")
            lines = [f"{title} failed: {failure}", *(f"    {line}" for line in failure.last_lines)]
            print("\n".join(lines), file=sys.stderr, flush=True)
            raise
        except Stopped:
            self._print("stopped\n")
            raise
        self.warnings += [f"{title}: {line}" for line in result.get("warnings") or ()]
        self._print(f"{result['steps_per_sec']:,.1f} steps/s ({time.monotonic() - before:.0f} s)\n")
        return result

    def skip(self) -> None:
        """Counts a benchmark that is not to be run."""
        self._begun += 1

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", flush=True)


def _start(
    children: Children, process: Process, path: Path, environment: Mapping[str, str], folder: str | None
) -> Child:
    """Starts a process with its output into a file, as a pipe that nobody reads stops its writer."""
    with path.open("wb") as output:
        variables, cores = {**environment, **process.variables}, process.cores or ()
        try:
            return children.start(
                process.command, env=variables, cores=cores, cwd=folder, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise MeasurementFailed(f"{process.command[0]} can't be started: {error.strerror}") from None


def _wait(started: Sequence[Child], serves: Sequence[bool], timeout_seconds: float | None) -> tuple[int, str] | None:
    """Waits until all but those that serve have ended well (None), or one has failed: its index, and how it ended."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        codes = [child.code for child in started]
        for index, code in enumerate(codes):
            if code:
                return index, f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
        if all(code == 0 or server for code, server in zip(codes, serves, strict=True)):
            return None
        if deadline is not None and time.monotonic() > deadline:
            return next(index for index, code in enumerate(codes) if code is None), f"not done in {timeout_seconds:g} s"
        time.sleep(_POLL_SECONDS)


def _with_reason(why: str, printed: Sequence[str]) -> str:
    """Returns how a program ended, and the line in which it says why, if there is one."""
    reason = next(filter(None, map(_REASON.search, printed)), None)
    return f"{why}: {reason[1]}" if reason else why
