"""Starts the tasks of a cluster on this machine, watches them, and ends them all. The supervisor's process.

One thread and one loop: everything that happens, a task's death, its output, a signal, wakes the same `select`. Tasks
are forked by the main thread, since the kernel ends them with the thread that forked them (`children`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...runner.failures import EXIT_DIVERGED, EXIT_FAILED, EXIT_PORT_TAKEN, EXIT_USAGE, RunError, fail
from ...runner.host.signals import EXIT_CODES, Handlers
from ..clusters import rendezvous
from ..memory_snapshots.task_memory import TaskMemory, written_line
from . import resources
from .children import Child, Children, wait
from .output import Output, TaskOutput
from .reaper import EXIT_STOPPED
from .restart_loop import Attempt, RestartLoop
from .restarts import Decision, EndTimeouts, Servers, Synchronous, TaskExit
from .template import Template

_OUTPUT_GRACE_SECONDS = 1.0  # wait for a reader of our output after a request to end
# Exit codes that another task's end does not lead to.
_CAUSE_EXIT_CODES = (EXIT_USAGE, EXIT_DIVERGED, EXIT_PORT_TAKEN, EXIT_STOPPED)
_WRITE_SECONDS = 600.0  # limit of writing the tasks' snapshot in memory as a checkpoint
_QUERY_SECONDS = 1.0  # period of the check whether tasks wait for one that has ended
_ANSWER_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """One task of the cluster.

    Attributes:
      kind, index: type, such as "worker", and index of the task in TF_CONFIG.
      cores: logical cores of the task's own; None shares all.
      environment: environment variables of the task besides the supervisor's.
      gpus: value of the task's --gpus; None leaves the flag out.
    """

    kind: str
    index: int
    cores: list[int] | None
    environment: Mapping[str, str]
    gpus: str | None = None

    @property
    def name(self) -> str:
        return self.kind if self.kind in ("chief", "evaluator") else f"{self.kind} {self.index}"


class Task(NamedTuple):
    """A task that runs: its name, its process, and what that prints."""

    name: str
    child: Child
    output: TaskOutput


class Supervisor(RestartLoop):
    """Runs a job: starts all tasks, and again as its rule decides.

    Args:
      command: the first words of each task's command line.
      arguments: last words of each task's command line; the task's own flags come in between.
      environment: environment to which the tasks' own variables are added.
      log_dir: folder for a log file per task, or None.
      events: path of the run's record, where restarts are recorded once it is there; None without one.
      grace_seconds: how long tasks have to save and end after a signal, before they are killed.
      modules: what tasks import, so that they are forked from processes that have; () if it is not known.
      stopped_seconds: how long a task may be stopped, see `Children`.
    """

    def __init__(
        self,
        specs: list[TaskSpec],
        command: list[str],
        arguments: list[str],
        rule: Synchronous | Servers,
        *,
        environment: Mapping[str, str],
        log_dir: str | None,
        coloured: tuple[bool, bool],
        grace_seconds: float,
        events: str | None = None,
        modules: Sequence[str] = (),
        stopped_seconds: float = 0.0,
    ):
        self._specs = specs
        self._command = command
        self._arguments = arguments
        super().__init__(rule, Children(stopped_seconds), TaskMemory(len(specs)), events)
        self._environment = environment
        self._grace_seconds = grace_seconds
        self._selector = selectors.DefaultSelector()
        self._output = Output(self._selector, log_dir, coloured)
        self._modules = modules
        self._templates: dict[frozenset[tuple[str, str]], Template] = {}  # by the tasks' own variables
        self._tasks: list[Task] = []
        self._cluster: dict[str, list[str]] = {}
        self._restarts: list[tuple[float, int]] = []  # (when, index) of tasks to be restarted by themselves
        self._plan: list[tuple[float, signal.Signals]] = []  # when the remaining tasks get which signal
        self._signalled: set[str] = set()  # names of the tasks that got SIGTERM by the plan
        self._ended_early: tuple[float, TaskExit] | None = None  # a task with code 0; when to ask who waits

    def print(self, line: str) -> None:
        self._output.print(line)

    def run(self) -> int:
        """Runs until the job is done, abandoned or stopped. Returns the exit code; none of its processes is left.

        Raises:
          RunError: a task can't be started.
        """
        # Children end with this process even if it is killed: the context is entered before the first of them starts.
        with self._children, self._signals():
            try:
                if self._modules:
                    self._start_templates()
                code = self._make_attempts()
            finally:
                # In this order: once no process of a task is left, snapshots are whole and the lock on run_dir is free.
                self._collect(self._tasks)
                self._children.sweep()
                self._write_unsaved()
                self._memory.close()
            self._finish_output()
            if (lost := self._output.lost) and not code:
                code = fail(EXIT_FAILED, f"a part of the output is lost: {lost.strerror}")
            return code

    def _attempt(self) -> Attempt:
        self._plan, self._signalled, self._restarts, self._cluster, self._ended_early = [], set(), [], {}, None
        # All are found before the first task starts, so that none gets a port that another is about to take.
        ports, host = resources.free_ports(len(self._specs)), resources.loopback()
        # TF_CONFIG has the addresses of a type in the order of the indices.
        for spec, port in sorted(zip(self._specs, ports, strict=True), key=lambda pair: pair[0].index):
            self._cluster.setdefault(spec.kind, []).append(f"{host}:{port}")
        for index in range(len(self._specs)):
            self._start_one(index)
        endings, ended_at = self._watch()
        code = self._exit_code_when_stopped(self._stop_signal, endings) if self._stop_signal else None
        return Attempt(endings, code, ended_at)

    def _exit_code(self, decision: Decision, endings: list[TaskExit]) -> int:
        if decision.cause:
            self._explain(decision.message, decision.cause)
        elif decision.message:
            self._output.print(decision.message)
        assert decision.exit_code is not None  # else another attempt follows
        return decision.exit_code

    def _start_templates(self) -> None:
        """Starts a process for each environment of tasks to fork them from; waits until all have imported TensorFlow.

        Or for a request to end.
        """
        waiting: set[Template] = set()
        for variables in {frozenset(spec.environment.items()) for spec in self._specs}:
            template = self._children.template({**self._environment, **dict(variables)}, self._modules)
            self._templates[variables] = template
            waiting.add(template)
            self._selector.register(template, selectors.EVENT_READ, functools.partial(waiting.discard, template))
        while waiting and not self._stop_signal:
            self._handle_events(None)
        # While a template imports, it may write or die; afterwards only its children matter.
        for template in self._templates.values():
            self._selector.unregister(template)

    def _start_child(self, name: str, variables: frozenset[tuple[str, str]], command: list[str], **options) -> Child:
        """Starts a child that imports TensorFlow: as a fork, if a template of these variables can. Raises `OSError`."""
        if template := self._templates.get(variables):
            try:
                return self._children.start(command, template=template, **options)
            except OSError as error:
                del self._templates[variables]
                self._output.print(f"{name} can't be forked ({error}): it imports TensorFlow itself")
        return self._children.start(command, **options)

    def _write_unsaved(self) -> None:
        """Writes the newest state that ended tasks have left in memory, and did not save."""
        if (step := self._memory.unsaved_step()) is None:
            return
        command, files = self._memory.writing()
        # Any template will do: it has imported TensorFlow, and the rest of the environment is the same.
        variables = next(iter(self._templates), frozenset())
        try:
            child = self._start_child("the saving process", variables, command, env=self._environment, pass_fds=files)
        except OSError as error:
            self._output.print(f"{written_line(step, is_lost=True)}: {error}")
            return
        wait([child], _WRITE_SECONDS)
        (code,) = self._children.end([child])
        self._output.print(written_line(step, bool(code)))

    def _start_one(self, index: int) -> None:
        spec = self._specs[index]
        cluster = {"cluster": self._cluster, "task": {"type": spec.kind, "index": spec.index}}
        try:
            child = self._start_child(
                spec.name,
                frozenset(spec.environment.items()),
                [*self._command, *([f"--gpus={spec.gpus}"] if spec.gpus is not None else []), *self._arguments],
                env={
                    **self._environment,
                    **spec.environment,
                    **self._memory.variables(index),
                    "TF_CONFIG": json.dumps(cluster),
                },
                cores=spec.cores or (),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **self._memory.options(index),
            )
        except OSError as error:
            raise RunError(f"{spec.name} can't be started: {error}") from None
        output = self._output.follow(spec.name, index, child.pid, [*filter(None, (child.stdout, child.stderr))])
        self._tasks.append(Task(spec.name, child, output))
        cores = f", cores {','.join(map(str, spec.cores))}" if spec.cores else ""
        gpus = f", GPU {spec.gpus}" if spec.gpus not in (None, "none") else ""
        self._output.print(f"{spec.name} is process {child.pid} at {self._address(spec.name)}{cores}{gpus}")

    def _watch(self) -> tuple[list[TaskExit], float]:
        """Waits until all tasks have ended; returns how they did, in this order, and the Unix time of the first end."""
        endings: list[TaskExit] = []
        ended_at = 0.0
        while self._tasks or self._restarts:
            self._handle_events(self._seconds_to_next())
            for ending in self._reap():
                if not ending.code and ending.task != "evaluator":
                    self._ended_early = (time.monotonic(), ending)
                if not self._plan_restart(ending):
                    ended_at = ended_at or time.time()
                    endings.append(ending)
                    self._end_others(ending)
            self._check_waiting()
            self._act_on_plans()
        return endings, ended_at

    def _reap(self) -> list[TaskExit]:
        dead = [task for task in self._tasks if task.child.code is not None]
        self._tasks = [task for task in self._tasks if task not in dead]
        endings = self._collect(dead)
        self._children.reap_orphans()
        # Of tasks that died at once, the cause comes first: a signal does not follow from the end of another task, nor
        # do a usage error, a run that diverged, or a port that was taken.
        return sorted(endings, key=lambda ending: (ending.code >= 0, ending.status not in _CAUSE_EXIT_CODES))

    def _collect(self, tasks: list[Task]) -> list[TaskExit]:
        """Collects tasks' exit codes and last output, after killing those that still run."""
        codes = self._children.end([task.child for task in tasks])
        return [TaskExit(task.name, code, task.output.finish()) for task, code in zip(tasks, codes, strict=True)]

    def _plan_restart(self, ending: TaskExit) -> bool:
        """Plans the restart of a single task while the others continue; returns whether it restarts."""
        decision = None if self._stop_signal or self._plan else self._rule.restart_alone(ending)
        if decision is None:
            return False
        index = next(index for index, spec in enumerate(self._specs) if spec.name == ending.task)
        self._restarts.append((time.monotonic() + decision.pause_seconds, index))
        self._output.print(decision.message)
        self._record_restart(ending, time.time())
        return True

    def _end_others(self, ending: TaskExit) -> None:
        if self._stop_signal:
            # Servers hold the variables that the coordinator saves: they end last.
            if not any(self._rule.saves(task.name) for task in self._tasks):
                for task in self._tasks:
                    task.child.send(signal.SIGTERM)
            return
        timeouts = self._rule.end_timeouts(ending)
        others = f"{len(self._tasks)} still running" if self._tasks else "all have ended"
        as_signalled = ending.task in self._signalled and ending.ended_on_request
        self._output.print(f"{f'{ending.task} has ended as requested' if as_signalled else ending}; {others}")
        if timeouts is not None and not self._plan:
            self._end_by(timeouts)

    def _seconds_to_next(self) -> float | None:
        """Returns the seconds until the next signal or start of a task."""
        times = [self._plan[0][0]] if self._plan else [when for when, _ in self._restarts]
        times += [self._ended_early[0]] if self._ended_early and not self._plan else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check_waiting(self) -> None:
        """Ends the job where a task waits for the run to begin, for one that has ended and will not come."""
        if self._ended_early is None or self._plan or self._ended_early[0] > time.monotonic():
            return
        ending = self._ended_early[1]
        queried = [task for task in self._tasks if self._rule.saves(task.name)]  # no task waits for another
        replies = {task.name: rendezvous.answers(self._address(task.name), _ANSWER_SECONDS) for task in queried}
        self._ended_early = (
            None if {*replies.values()} <= {"ready", "serving"} else (time.monotonic() + _QUERY_SECONDS, ending)
        )
        if waiting := next((name for name in replies if replies[name] == "starting"), None):
            why = f"{ending} without joining the run, and {waiting} waits for it"
            fix = "let every task call main, run or open_run, whatever its index"
            self._decision = Decision(EXIT_USAGE, 0.0, f"{why}; {fix}", ending)
            if timeouts := self._rule.end_timeouts(TaskExit(ending.task, EXIT_USAGE)):
                self._end_by(timeouts)

    def _address(self, name: str) -> str:
        spec = next(spec for spec in self._specs if spec.name == name)
        return self._cluster[spec.kind][spec.index]

    def _end_by(self, timeouts: EndTimeouts) -> None:
        leave = time.monotonic() + timeouts.leave_seconds
        self._plan = [(leave, signal.SIGTERM), (leave + timeouts.end_seconds, signal.SIGKILL)]
        self._restarts = []

    def _act_on_plans(self) -> None:
        for restart in [(when, index) for when, index in self._restarts if when <= time.monotonic()]:
            self._restarts.remove(restart)
            self._start_one(restart[1])
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            for task in self._tasks:
                if number == signal.SIGKILL:
                    self._output.print(f"{task.name} has not ended in time; it is killed")
                    task.child.kill()
                else:
                    self._signalled.add(task.name)
                    task.child.send(number)

    def _handle_events(self, timeout_seconds: float | None) -> None:
        """Waits until something happens, and handles output and signals; the caller checks for deaths."""
        for key, _ in self._selector.select(timeout_seconds):
            key.data()

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stop_signal and (left := end - time.monotonic()) > 0:
            self._handle_events(left)

    @contextlib.contextmanager
    def _signals(self):
        """Makes signals and deaths of children, received within, wake the loop, and do nothing else."""
        # A handler of Python runs between any two of its instructions. This one does nothing, and the number comes by a
        # pipe, so that the loop handles it where it is safe.
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        handlers = Handlers([signal.SIGCHLD, *(signal.Signals[name] for name in EXIT_CODES)], lambda *_: None)
        handlers.install(writing)
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._handle_signals(os.read(reading, 4096)))
        try:
            yield
        finally:
            self._selector.unregister(reading)
            handlers.remove()
            os.close(reading)
            os.close(writing)

    def _handle_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            is_second = self._is_second(number)
            if self._stop_signal:
                for task in self._tasks if is_second else ():
                    task.child.kill()
                continue
            self._stop_signal = signal.Signals(number)
            have = f"the tasks have {self._grace_seconds:g} s to save and end; a second one kills them"
            self._output.print(f"{self._stop_signal.name}: {have}")
            # SIGHUP is the terminal's, and theirs is this process: a script that saves does so at SIGTERM.
            passed_on = signal.SIGTERM if number == signal.SIGHUP else self._stop_signal
            for task in [task for task in self._tasks if self._rule.saves(task.name)] or self._tasks:
                task.child.send(passed_on)
            # Tasks end by themselves once they have saved; whatever is left after the grace time is killed.
            self._plan, self._restarts = [(time.monotonic() + self._grace_seconds, signal.SIGKILL)], []

    def _exit_code_when_stopped(self, stop_signal: signal.Signals, endings: Sequence[TaskExit] = ()) -> int:
        for ending in endings:
            if ending.code and not ending.ended_on_request:
                self._explain(f"{ending}, while it was to save and end", ending)
        return EXIT_CODES[stop_signal.name]

    def _explain(self, message: str, cause: TaskExit) -> None:
        log = self._output.log_paths.get(cause.task)
        log_note = f" ({log})" if log else ""
        last = f"its last lines{log_note}:" if cause.last_lines else "it printed nothing"
        self._output.fail(f"{message}; {last}", cause.last_lines)

    def _finish_output(self) -> None:
        """Waits for the reader of our output; only for a moment after a request to end."""
        stopped_at = None
        while self._output.is_pending:
            if self._stop_signal:
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > _OUTPUT_GRACE_SECONDS:
                    return
            self._handle_events(_OUTPUT_GRACE_SECONDS)
