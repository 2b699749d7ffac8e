"""Processes that tests start, and what they read of any process in /proc.

A test that starts one ends it, whether it passes or fails: by the fixtures `crank`, `start_workers` and `start`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
from collections.abc import Mapping, Sequence

from crankshaft.parts.launchers.resources import free_ports
from crankshaft.parts.memory_snapshots.snapshot_memory import Slots
from tests import forked
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[1]
# ENOENT before a file of /proc is open, ESRCH afterwards.
_ENDED = (FileNotFoundError, ProcessLookupError)


def assert_says(line: str, words: str) -> None:
    """Checks that a line has the pieces of `words`, between " ... ", in their order: the flag, the value, the cure."""
    assert re.search(".*".join(map(re.escape, words.split(" ... "))), line), f"{words!r} in {line!r}"


@dataclasses.dataclass
class Outcome:
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what was wrong; fails the test if there are more, or a traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"{len(lines)} error lines in:\n{self.err}\n{self.out[-2000:]}"
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")

    @property
    def mistake(self) -> str:
        """The one line, of a program that ended by a mistake of its user's."""
        assert self.code == 2, f"exit code {self.code}\n{self.err}"
        return self.error

    def refused(self, words: str) -> None:
        """Checks that the program ended by a mistake of its user's, whose line says these words, see `assert_says`."""
        assert_says(self.mistake, words)

    def ok(self) -> Outcome:
        """Itself, if the program ended well."""
        assert self.code == 0, f"exit code {self.code}\n{self.err}\n{self.out[-2000:]}"
        return self


class Program:
    """A Python program in a process. Its output goes to files, so that it never blocks: two, or one for both streams.

    Attributes:
      process: the newest one; it may be started again, and appends to the files.
      output: all of it.
    """

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike],
        folder: pathlib.Path,
        environment: Mapping[str, str],
        one_file: bool = False,
    ):
        folder.mkdir(parents=True)
        self._arguments, self._environment = arguments, environment
        self.out_path = folder / "out"
        self.err_path = self.out_path if one_file else folder / "err"
        self.start()

    def start(self) -> None:
        with open(self.out_path, "ab") as out, open(self.err_path, "ab") as err:
            self.process = forked.start(self._arguments, self._environment, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    @property
    def output(self) -> str:
        return self.out if self.err_path == self.out_path else f"{self.err}\n{self.out}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, condition, pause: float = 0.01) -> None:
        """Waits for `condition()`; fails if the program ends before, or time does."""
        wait_until(condition, self.process, shows=lambda: self.output, pause=pause)

    def wait(self) -> Outcome:
        """Waits until it has ended by itself."""
        wait_until(lambda: self.process.poll() is not None, shows=lambda: self.output)
        return Outcome(self.process.returncode, self.out, self.err)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # a stopped one too; what guards a job's supervisor ends its tasks
            self.process.wait()


class Workers:
    """`count` processes of one command, at `addresses`, each told by TF_CONFIG which it is."""

    def __init__(self, count: int, command: Sequence, folder: pathlib.Path, **environment: str):
        self.addresses = [f"localhost:{port}" for port in free_ports(count)]
        self.programs = []
        for index in range(count):
            task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": index}}
            variables = {**os.environ, **environment, "TF_CONFIG": json.dumps(task), "PYTHONPATH": forked.PYTHON_PATH}
            self.programs.append(Program(command, folder / f"worker-{index}", variables, one_file=True))

    @property
    def processes(self) -> list:
        return [program.process for program in self.programs]

    def output(self, worker: int) -> str:
        return self.programs[worker].output

    def until(self, condition) -> None:
        """Waits for `condition()`; fails if a process ends before, or time does."""
        wait_until(condition, *self.processes, shows=self._outputs)

    def wait(self) -> list[int]:
        """The exit codes, once all have ended by themselves."""
        wait_until(lambda: all(process.poll() is not None for process in self.processes), shows=self._outputs)
        return [process.returncode for process in self.processes]

    def ok(self) -> Workers:
        """Itself, once all have ended well."""
        codes = self.wait()
        assert not any(codes), f"exit codes {codes}\n{self._outputs()}"
        return self

    def end(self) -> None:
        for program in self.programs:
            program.end()

    def _outputs(self) -> str:
        return "\n".join(f"-- worker {i}\n{self.output(i)[-3000:]}" for i in range(len(self.programs)))


class Job(Program):
    """A cluster under `crankshaft local`: two workers with two servers, unless `local` has other numbers.

    What each task runs is a `script`, `-m` and a module, or with `()` `crankshaft train`. It `saves` into its run_dir.
    """

    def __init__(self, run_dir: pathlib.Path, *flags, local=(), script: str | os.PathLike | tuple, saves=True):
        run_dir.mkdir(exist_ok=True, parents=True)
        self.run_dir = run_dir
        program = script if isinstance(script, tuple) else (script,)
        tasks = (*program, *([f"--run_dir={run_dir}"] if saves else []), "--progress=plain", *flags)
        number = len(list(run_dir.parent.glob(f"{run_dir.name}.job-*")))
        super().__init__(
            ["-m", "crankshaft", "local", "--workers=2", "--ps=2", *local, "--", *tasks],
            run_dir.with_name(f"{run_dir.name}.job-{number}"),
            {**os.environ, "PYTHONPATH": forked.PYTHON_PATH},
            one_file=True,
        )

    def starts(self) -> int:
        """How often all tasks were started."""
        return self.output.count("worker 0 is process")

    def snapshot(self, tasks: int) -> int:
        """The newest step of which so many tasks have left a snapshot in the supervisor's memory; 0 without one."""
        return newest_snapshot(self.process.pid, tasks)

    def send_to(self, task: str, number: signal.Signals) -> None:
        os.kill(int(re.findall(rf"\[local\] {task} is process (\d+)", self.output)[-1]), number)

    def kill(self, task: str) -> None:
        self.send_to(task, signal.SIGKILL)

    def ok(self) -> Job:
        """Itself, once it has ended well."""
        self.wait().ok()
        return self

    @property
    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())

    @property
    def left(self) -> list[int]:
        """Its tasks' processes that are still there."""
        return [pid for pid in map(int, re.findall(r"is process (\d+)", self.output)) if is_alive(pid)]


def proc(pid: int | str, name: str) -> str:
    """Reads a file of /proc/PID; empty if the process has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except _ENDED:
        return ""


def is_alive(pid: int) -> bool:
    state = proc(pid, "stat").rpartition(")")[2].split()[:1]
    return state not in ([], ["Z"])


def peak_mib(pid: int | str) -> int:
    """The most memory that a process has had until now, in MiB; 0 if it has ended."""
    found = re.search(r"VmHWM:\s+(\d+) kB", proc(pid, "status"))
    return int(found[1]) // 1024 if found else 0


def newest_snapshot(pid: int, tasks: int = 1) -> int:
    """The newest step of which so many tasks have left a snapshot in a process's memory; 0 without one."""
    found: collections.Counter = collections.Counter()
    for descriptor in _open_slots(pid):
        with contextlib.suppress(ValueError):  # it is being written
            found.update(snapshot.step for snapshot in Slots([descriptor]).read())
        os.close(descriptor)
    return max((step for step, count in found.items() if count == tasks), default=0)


def _open_slots(pid: int) -> list[int]:
    """Opens the memory that a process holds for its tasks' snapshots; it may end, or close some, meanwhile."""
    opened = []
    with contextlib.suppress(*_ENDED):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(*_ENDED):
                if os.readlink(path := f"/proc/{pid}/fd/{name}").startswith("/memfd:crankshaft"):
                    opened.append(os.open(path, os.O_RDWR))
    return opened
