"""Clusters for tests: `start`, real processes under `crankshaft local`, ended with the test."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from crankshaft.engine.checkpoints.slots import Slots
from tests import runs
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "distributed" / "counting.py"
STEPS_PER_EPOCH = 16  # 1000 examples in batches of 64: the last is of 40


class Job:
    """Two workers with two servers, unless `local` has other numbers, whose output goes to a file.

    What each task runs is a `script`, `-m` and a module, or with `()` `crankshaft train`. It `saves` into its run_dir.
    """

    def __init__(self, run_dir: pathlib.Path, *flags, local=(), script: str | os.PathLike | tuple = SCRIPT, saves=True):
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True, parents=True)
        self._log = run_dir.with_suffix(f".{time.monotonic_ns()}.log")
        command = [sys.executable, "-m", "crankshaft", "local", "--workers=2", "--ps=2", *local, "--"]
        program = script if isinstance(script, tuple) else (str(script),)
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *program, *([f"--run_dir={run_dir}"] if saves else []), "--progress=plain", *flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, condition, pause: float = 0.01) -> None:
        wait_until(condition, self.process, shows=lambda: self.output[-4000:], pause=pause)

    def starts(self) -> int:
        """How often all tasks were started."""
        return self.output.count("worker 0 is process")

    def snapshot(self, tasks: int) -> int:
        """The newest step of which so many tasks have left a snapshot in the supervisor's memory; 0 without one."""
        return newest_snapshot(self.process.pid, tasks)

    def send(self, task: str, number: signal.Signals) -> None:
        os.kill(int(re.findall(rf"\[local\] {task} is process (\d+)", self.output)[-1]), number)

    def kill(self, task: str) -> None:
        self.send(task, signal.SIGKILL)

    def wait(self) -> int:
        wait_until(lambda: self.process.poll() is not None, shows=lambda: self.output[-4000:])
        return self.process.returncode

    def ok(self) -> Job:
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.output[-4000:]}"
        return self

    @property
    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())

    @property
    def left(self) -> list[str]:
        """Processes of this job that are still there."""
        pids = re.findall(r"is process (\d+)", self.output)
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "counting" in _command_of(pid)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the guard ends its tasks
            self.process.wait()


def newest_snapshot(pid: int, tasks: int = 1) -> int:
    """The newest step of which so many tasks have left a snapshot in a process's memory; 0 without one."""
    folder = f"/proc/{pid}/fd"
    descriptors = [os.open(f"{folder}/{name}", os.O_RDWR) for name in os.listdir(folder) if is_slot(folder, name)]
    found: collections.Counter = collections.Counter()
    for descriptor in descriptors:
        with contextlib.suppress(ValueError):  # it is being written
            found.update(each.step for each in Slots([descriptor]).read())
        os.close(descriptor)
    return max((step for step, count in found.items() if count == tasks), default=0)


def _command_of(pid: str) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def start(tmp_path):
    """start(name, *flags, local=(), script=SCRIPT): a started `Job`, ended with the test."""
    started = []

    def start(name: str, *flags: str, **more) -> Job:
        started.append(Job(tmp_path / name, *flags, **more))
        return started[-1]

    yield start
    for each in started:
        each.end()


def variable(run_dir: pathlib.Path, name: str) -> np.ndarray:
    """A variable of the newest checkpoint whose key ends so."""
    found = {key: value for key, value in runs.tensors(run_dir).items() if name in key}
    (value,) = found.values()
    return value


def is_slot(folder: str, name: str) -> bool:
    path = pathlib.Path(folder, name)
    return path.is_symlink() and os.readlink(path).startswith("/memfd:crankshaft")


def check_updates(job: Job, steps: int) -> np.ndarray:
    """Exactly so many updates, by the run's own count and by the checkpoint's. Returns how often each was seen.

    Its tasks were forks throughout: none has imported TensorFlow itself.
    """
    assert "imports TensorFlow itself" not in job.output
    assert job.result["step"] == steps
    assert variable(job.run_dir, "step/.ATT") == steps
    seen = variable(job.run_dir, "seen/")
    assert variable(job.run_dir, "optimizer/iterations") >= steps
    return seen
