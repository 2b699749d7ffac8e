"""Programs that are measured: how they are started, run to their ends, and ended; none is left behind. Host code.

TensorFlow is not imported here: a process that only waits takes nothing from those that measure.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crankshaft.parts.launchers.children import Child, Children, wait
from crankshaft.parts.launchers.output import last_lines
from crankshaft.runner.failures import EXIT_INTERRUPTED, EXIT_TERMINATED, signal_name

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600.0
_GRACE_SECONDS = 10.0  # from SIGTERM, which TensorFlow may swallow, to SIGKILL
_POLL_SECONDS = 0.2
_REASON = re.compile(r"(?:^|\] )error: (.*)")  # crankshaft local puts the task's name before a line

# Variables that change how fast a program is, by the beginning of their names.
_TUNING = ("GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "OMP_", "ONEDNN_", "TF_", "XLA_")
_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


class MeasurementFailed(Exception):
    """A process of a measurement failed, did not end in time or wrote no result: which, and why. One line.

    Attributes:
      last_lines: the end of what it printed.
    """

    def __init__(self, line: str, last_lines: Sequence[str] = ()):
        super().__init__(line)
        self.last_lines = tuple(last_lines)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that is to be run.

    Attributes:
      command: the program and its arguments.
      variables: environment variables that it gets besides those of `untuned`.
      cores: the logical cores that it may use; None: all that this process may.
      serves: it does not end by itself, and is ended once those that do not serve have ended.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: frozenset[int] | None = None
    serves: bool = False

    def __str__(self) -> str:
        """Returns the command as one would type it."""
        pinned = ["taskset", "-c", ",".join(map(str, sorted(self.cores)))] if self.cores else []
        variables = ["env", *(f"{name}={value}" for name, value in self.variables.items())] if self.variables else []
        return shlex.join([*pinned, *variables, *self.command])

    def start(self, children: Children, folder: str | Path | None = None, **streams) -> Child:
        """Starts it in a folder; None is this process's. Raises `MeasurementFailed`."""
        variables = {**untuned(), **self.variables}
        try:
            return children.start(self.command, env=variables, cores=self.cores or (), cwd=folder, **streams)
        except OSError as error:
            raise MeasurementFailed(f"{self.command[0]} can't be started: {error.strerror}") from None


def untuned() -> dict[str, str]:
    """Returns this process's variables without those that change how fast a program is: each peer has its defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TUNING)}


def importable(checkout: Path, folder: Path) -> Path:
    """Makes a folder from which any Python imports a checkout's `crankshaft` and `benchmarks`, and returns it.

    Processes that are to import these have it as PYTHONPATH, and run in a folder that has no others.
    """
    scripts = [
        path for path in (checkout / "benchmarks", checkout / "tests/benchmarks") if (path / "bare.py").is_file()
    ]
    if not scripts:
        raise SystemExit(f"error: {checkout} has no benchmarks/bare.py; name a checkout of Crankshaft")
    folder.mkdir()
    (folder / "crankshaft").symlink_to(checkout)  # a package is found by its folder's name
    (folder / "benchmarks").symlink_to(scripts[0])
    return folder


def find_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Finds the versions of packages in a Python, given by its path. Raises `SystemExit` if it lacks one."""
    try:
        done = subprocess.run([python, "-c", _VERSIONS, *packages], capture_output=True, text=True, check=False)
        if not done.returncode:
            return json.loads(done.stdout.splitlines()[-1])
        why = done.stderr.splitlines()[-1]
    except OSError as error:
        why = error.strerror
    raise SystemExit(f"error: {python} lacks {', '.join(packages)} ({why}); name a Python that has them")


def run_together(
    processes: Sequence[Process],
    *,
    timeout_seconds: float | None = TIMEOUT_SECONDS,
    folder: str | Path | None = None,
    meanwhile: Callable[[Sequence[Path]], None] = lambda outputs: None,
) -> list[tuple[str, ...]]:
    """Runs processes side by side to their ends, and returns the last lines that each printed.

    However this ends, even by kill -9 of this process, none of them or of their children is left.

    Args:
      processes: what to run.
      timeout_seconds: how long they may take; None is for ever.
      folder: where they run; None is where this process does.
      meanwhile: called again and again, with the files that have what each has printed.

    Raises:
      MeasurementFailed: one can't be started or failed, or time is up.
    """
    with tempfile.TemporaryDirectory() as outputs, Children() as children:
        paths = [Path(outputs, str(index)) for index in range(len(processes))]
        started: list[Child] = []
        try:
            for process, path in zip(processes, paths, strict=True):
                with path.open("wb") as output:  # a pipe that nobody reads would stop its writer
                    started.append(process.start(children, folder, stdout=output, stderr=subprocess.STDOUT))
            failed = _wait(started, processes, timeout_seconds, lambda: meanwhile(paths))
        finally:
            for child in started:
                if child.code is None:
                    child.send(signal.SIGTERM)
            wait(started, _GRACE_SECONDS)
            children.end(started)
        printed = [last_lines(path.read_bytes()) for path in paths]
    if failed:
        index, why = failed
        reason = next(filter(None, map(_REASON.search, printed[index])), None)
        raise MeasurementFailed(f"{why}: {reason[1]}" if reason else why, printed[index])
    return printed


def read_result(path: Path) -> dict[str, Any]:
    """Reads what a process has written as its result. Raises `MeasurementFailed`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementFailed(f"it ended well, and its result can't be read: {error}") from None


def _wait(
    started: Sequence[Child], processes: Sequence[Process], timeout_seconds: float | None, meanwhile: Callable[[], None]
) -> tuple[int, str] | None:
    """Waits until all but those that serve have ended well (None), or one has failed: its index, and how it ended."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        codes = [child.code for child in started]
        for index, code in enumerate(codes):
            if code:
                return index, f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
        if all(code == 0 or process.serves for code, process in zip(codes, processes, strict=True)):
            return None
        if deadline is not None and time.monotonic() > deadline:
            return next(index for index, code in enumerate(codes) if code is None), f"not done in {timeout_seconds:g} s"
        meanwhile()
        time.sleep(_POLL_SECONDS)


def run_script(main: Callable[[], None]) -> None:
    """Calls `main`. SIGTERM ends it, with what it has started, as Ctrl-C does; what failed is a line, no traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        main()
    except MeasurementFailed as failure:
        sys.exit("\n".join([f"a measurement failed: {failure}", *failure.last_lines]))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
