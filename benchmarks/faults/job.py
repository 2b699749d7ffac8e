"""One job that faults disturb: its processes, what they have left, and what its run comes to.

The job's own supervisor restarts tasks; whoever starts the job here is its scheduler: a command that ends with an error
is started again, as Slurm and Kubernetes do.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from crankshaft.engine.errors import EXIT_DIVERGED, EXIT_USAGE
from crankshaft.engine.record.events import read
from crankshaft.parts.launchers.resources import free_ports

from ..bits import digests, saved
from . import machine
from .plan import BATCH_SIZE, EPOCHS, PLAN, RECORD, STEPS, Notes
from .table import FAULTS

ROOT = Path(__file__).resolve().parents[2]
STEP_TIMEOUT_SECONDS = 20
CLUSTER_TIMEOUT_SECONDS = 60
_HANG_SECONDS = 30  # beyond a timeout
_MOST_STARTS = 6
_LEAVE_SECONDS = 20  # from the end of a command to that of the last of its processes

TASKS = {
    "one_device": ("worker 0",),
    "two_workers": ("worker 0", "worker 1"),
    "mesh": ("worker 0", "worker 1"),
    "servers": ("chief", "worker 0", "worker 1", "ps 0", "ps 1"),
    "hosts": ("worker 0", "worker 1"),
    "program": ("worker 0",),
}
STRATEGIES = tuple(TASKS)
_LOCAL = {
    "one_device": (),
    "two_workers": ("--workers=2",),
    "mesh": ("--workers=2",),
    "servers": ("--workers=2", "--ps=2"),
    "program": (),
}
# With `hosts`: each task is a command of its own, an agent, and one of them may train alone for a while.
_ELASTIC = ("--strategy=multi_worker", "--max_restarts=9", "--min_workers=1", "--cluster_timeout_seconds=4")


class JobFailed(Exception):
    """The job did not end as it must. One line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a job trains with, apart from its faults.

    Attributes:
      program: the seed of a program of `benchmarks.programs`; None is the model that a mesh can shard.
    """

    strategy: str
    files: bool
    shard_optimizer: bool
    precision: str
    program: int | None = None

    @property
    def chiefs(self) -> tuple[str, ...]:
        """The tasks that note the job's steps."""
        return TASKS[self.strategy] if self.strategy == "hosts" else TASKS[self.strategy][:1]

    @property
    def title(self) -> str:
        sharded = ", sharded optimizer" if self.shard_optimizer else ""
        return f"{'files' if self.files else 'in memory'}, {self.precision}{sharded}"


class Job:
    """The processes of a job, in a folder of its own.

    Args:
      settings: the training's settings.
      injections: the faults that are planned.
      folder: in which everything is kept.
      data: the folder of the data's files.

    Attributes:
      run_dir: the run's folder.
      data: a copy of the files, if the job reads any.
      lost: the tasks whose hosts are lost: they are not started again.
      slow_now: while this file exists, writes to run_dir are slow, if a fault needs that.
    """

    def __init__(self, settings: Settings, injections, folder: Path, data: Path):
        self.settings, self.folder = settings, folder
        self.run_dir, self.data, self.lost = folder / "run", folder / "data", set[str]()
        self._log = folder / "log"
        self._processes: dict[str, subprocess.Popen] = {}  # by task, or all of them in one
        self._starts = collections.Counter[str]()
        self._notes = {task: Notes(folder, task) for task in TASKS[settings.strategy]}
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
        (folder / "tmp").mkdir(parents=True)
        self.disk = None if machine.enter() else machine.Disk(folder / "disk", self.run_dir)
        if settings.files:
            self.data.mkdir()
            for path in data.iterdir():
                (self.data / path.name).write_bytes(path.read_bytes())
        self.slow_now, self._variables = folder / "slow now", {}
        if any(FAULTS[each.fault].slow_writes for each in injections):
            self._variables = machine.slow_writes(folder, self.run_dir, self.slow_now)
        plan = {**dataclasses.asdict(settings), "injections": [dataclasses.asdict(each) for each in injections]}
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")

    # -- Its processes ------------------------------------------------------------------------------------------------

    @property
    def starts(self) -> int:
        """How often a command was started."""
        return max(self._starts.values(), default=0)

    def start(self) -> None:
        if self.settings.strategy != "hosts":
            self._start("")
            return
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        for task in self._notes:
            self._start(task)

    def _start(self, task: str) -> None:
        """Starts a command: that of a task, or of all of them."""
        self._starts[task] += 1
        local, variables = _LOCAL.get(self.settings.strategy), {}
        start = ["-m", "crankshaft", "local", *local, "--grace_seconds=10", "--"] if local else []
        if task:
            config = {"cluster": {"worker": self._addresses}, "task": {"type": "worker", "index": int(task[-1])}}
            variables = {"TF_CONFIG": json.dumps(config)}
        with self._log.open("ab") as log:
            self._processes[task] = subprocess.Popen(
                [sys.executable, *start, "-m", "benchmarks.faults.training", *self._flags()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={
                    **os.environ,
                    **self._variables,
                    **variables,
                    PLAN: str(self.folder),
                    "PYTHONPATH": f"{ROOT.parent}:{ROOT}",
                    "TMPDIR": str(self.folder / "tmp"),
                },
                start_new_session=True,
            )

    def _flags(self) -> list[str]:
        settings = self.settings
        flags = [
            *(f"--run_dir={self.run_dir}", f"--train_steps={STEPS}", f"--global_batch_size={BATCH_SIZE}", "--seed=1"),
            *("--checkpoint_every_steps=20", "--eval_every_steps=64", "--summary_every_steps=16", "--jit=off"),
            *(f"--step_timeout_seconds={STEP_TIMEOUT_SECONDS}", "--keep_checkpoints=2"),
            *("--progress=plain", f"--precision={settings.precision}"),
        ]
        if settings.files:
            flags += ["--input=tfrecord", f"--data_dir={self.data}", "--resident_data_mb=0"]
            flags += [f"--eval_data_dir={self.data}/part-0.tfrecord", f"--input_arg=features={RECORD}"]
        if settings.shard_optimizer:
            flags += ["--shard_optimizer"]
        several = f"--cluster_timeout_seconds={CLUSTER_TIMEOUT_SECONDS}"
        alone = ["--strategy=one_device"]
        own = {"one_device": alone, "program": alone, "mesh": ["--mesh=model:2", several], "hosts": _ELASTIC}
        return [*flags, *own.get(settings.strategy, [several])]

    def processes(self, target: str) -> list[int]:
        """Returns the process IDs that a target names now: a task, all of them ("tasks") or the "supervisor".

        With `hosts`, a task's process is its agent.
        """
        if target == "supervisor":
            return [process.pid for process in self._processes.values()]
        if target == "tasks":
            return [pid for task in self._notes for pid in self.processes(task)]
        return [step for _, event, step in self._notes[target].read() if event == "starts"][-1:]

    def ports(self, target: str) -> list[int]:
        """Returns the ports at which the tasks that a target names listen now."""
        tasks = self._notes if target == "tasks" else [target]
        newest = ([port for _, event, port in self._notes[task].read() if event == "listens"] for task in tasks)
        return [ports[-1] for ports in newest if ports]

    def send(self, target: str, number: signal.Signals) -> None:
        for pid in self.processes(target):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def steps(self) -> list[tuple[float, str, int]]:
        """The notes of the job's steps: when, "begins" or "step", and the step."""
        return sorted(row for task in self.settings.chiefs for row in self._notes[task].read())

    @property
    def step(self) -> int:
        """The newest step of this attempt."""
        return next((step for _, event, step in reversed(self.steps) if event in ("begins", "step")), 0)

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    @property
    def code(self) -> int | None:
        """The command's exit code; None while one runs."""
        codes = [process.poll() for task, process in self._processes.items() if task not in self.lost]
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def ended_by_mistake(self) -> bool:
        """Whether the command has ended with what a restart alone does not change."""
        return self.code in (EXIT_USAGE, EXIT_DIVERGED)

    def go_on(self, may_end: bool = False) -> bool:
        """Returns whether the job still runs; starts it again if its command has failed, as a scheduler does.

        Args:
          may_end: whether it is also started again after a mistake, which somebody has mended.

        Raises:
          JobFailed: it gives no sign of life, has failed too often or as by a mistake, or has left processes.
        """
        if self.code is None:
            signs = [path for path in (self._log, *(notes.path for notes in self._notes.values())) if path.exists()]
            silent = time.time() - max(path.stat().st_mtime for path in signs)
            if silent > max(STEP_TIMEOUT_SECONDS, CLUSTER_TIMEOUT_SECONDS) + _HANG_SECONDS:
                raise JobFailed(f"it hangs: no step and no line for {silent:.0f} s")
            self._start_failed()
            return True
        deadline = time.monotonic() + _LEAVE_SECONDS
        while left := self.left():
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"exit code {self.code}, and {len(left)} processes are left: {'; '.join(left.values())}"
                )
            time.sleep(0.05)
        if not self.code:
            return False
        if self.ended_by_mistake and not may_end:
            raise JobFailed(f"the job ended with {self.code}: {self.last_error()}")
        self._start_failed()
        return True

    def _start_failed(self) -> None:
        """Starts the commands that have failed again, as schedulers do, each its own."""
        for task, process in self._processes.items():
            if process.poll() and task not in self.lost:
                if self._starts[task] == _MOST_STARTS:
                    raise JobFailed(
                        f"start {_MOST_STARTS} of the job ended with {process.returncode}: {self.last_error()}"
                    )
                self._start(task)

    def last_error(self) -> str:
        """Returns the newest line that says why a task or the job has ended."""
        lines = re.findall(r"(?:^|\] )(error: .*|.* was killed by .*|stopped at .*)", self.output, re.MULTILINE)
        return lines[-1] if lines else "without a line that says why"

    def left(self) -> dict[int, str]:
        """Returns the processes of this job that run, with their commands."""
        mark, found = f"{PLAN}={self.folder}".encode(), {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(path.name)] = command.strip()[-120:]
        return found

    def end(self) -> None:
        """Ends all that runs."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            for pid in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for process in self._processes.values():
            process.wait()
        if self.disk:
            self.disk.remove()

    # -- What its run comes to ----------------------------------------------------------------------------------------

    def values(self) -> dict:
        """Returns a digest of each variable, with `hosts` its value, and the metrics of every row and evaluation.

        Not of windows: each attempt begins one.
        """
        found = variables(self.run_dir, saved if self.settings.strategy == "hosts" else digests)
        for line in read(str(self.run_dir / "events.jsonl")):
            if (kind := line.kind) in ("evaluation", "row"):
                metrics = line.event["metrics"] if kind == "evaluation" else line.event
                names = [name for name in metrics if kind == "evaluation" or name.startswith(("train_", "eval_"))]
                found |= {f"{kind} {line.step} {name}": metrics[name] for name in names}
        return found

    def check_counts(self, disturbed: int) -> None:
        """Checks how often each example was trained on, with servers.

        Each example once an epoch, and once more at most two batches for each worker's end: those that it had applied
        and not yet counted.

        Args:
          disturbed: how many faults a worker met.

        Raises:
          JobFailed: a count is wrong.
        """
        import tensorflow as tf

        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(self.run_dir / "checkpoints")))
        names = reader.get_variable_to_shape_map()
        (seen,) = (reader.get_tensor(name) for name in names if "seen/" in name)
        step = int(reader.get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE"))
        more = int(seen.sum()) - EPOCHS * len(seen)
        if step != STEPS or seen.min() < EPOCHS or more > 2 * BATCH_SIZE * disturbed:
            raise JobFailed(
                f"step {step} of {STEPS}; examples trained on {seen.min()} to {seen.max()} times instead of {EPOCHS}, "
                f"{more} more in all"
            )

    def kinds_left(self) -> set[str]:
        """Returns the kinds of files in the run_dir, and all temporary files that a kill may not leave."""
        return kinds_of_files(self.folder) | (
            {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()} if self.disk else set()
        )


def kinds_of_files(folder: Path) -> set[str]:
    """Returns the paths of files below run/ and tmp/ in a job's folder, with 0 for each number in them.

    Leaves out the code that AutoGraph generates, which a process has until its first step.
    """
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {
        re.sub(r"\d+", "0", str(path))
        for path in paths
        if path.parts[0] in ("run", "tmp") and not path.name.startswith("__autograph_generated_file")
    }


def is_metric(name: str) -> bool:
    """Returns whether a name of `Job.values` is of the record of metrics, not of a variable."""
    return name.startswith(("evaluation ", "row "))


_VARYING = ("save_counter", "input")  # how often it was saved; what is read ahead


def variables(run_dir: Path, read: Callable[[Path], dict] = digests) -> dict:
    """Returns a digest of each variable at a run's end, or what else `read` returns of it, by name."""
    return {name: value for name, value in read(run_dir).items() if name.split("/")[0] not in _VARYING}
