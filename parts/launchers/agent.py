"""The parent of one task, which it forks, and forks again after a failure, as `--max_restarts` of a task allows.

The process has run its script up to `main`, and has imported TensorFlow, whose runtime has not started: the task goes
on from there. So what dies while its host survives recovers in its place, in seconds, without the scheduler's help.
With `--min_workers` the parents agree before each attempt on the workers that are part of it.

It is not the supervisor of `crankshaft local` with one task: it forks the script that it runs in, passes on no output,
and agrees with agents on other hosts. Both are a `RestartLoop` (`cluster/restart_loop.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...engine import logging
from ...engine.checkpoints.run_dir import RunDir
from ...runner.command_line import checks, following
from ...runner.failures import EXIT_FAILED, EXIT_REGROUP, EXIT_TERMINATED, CrankshaftError, UsageError, fail, print_line
from ...runner.host import locks, process, startup
from ...runner.host.signals import EXIT_CODES, Handlers
from ..clusters import arrival, rendezvous
from ..elastic.members import Members
from ..memory_snapshots.task_memory import TaskMemory, written_line
from . import template
from .children import Child, Children, stopped_seconds
from .restart_loop import Attempt, RestartLoop
from .restarts import WINDOW_SECONDS, Decision, Synchronous, TaskExit, recorded_restarts

if TYPE_CHECKING:
    from ...runner.command_line.config import Config


def can_fork(config: Config, modules: Sequence[str]) -> bool:
    """Returns whether this process can fork the task, whose modules it imports; else logs why not.

    Raises:
      UsageError: it can't, and `--min_workers` needs that.
    """
    process.prepare()
    with startup.quiet_startup(quiet=config.cluster is not None and not config.debug):
        obstacle = _obstacle(config) or template.import_libraries(modules)
    if obstacle and config.min_workers:
        raise UsageError(
            f"min_workers={config.min_workers} needs a task that starts again in its place, and {obstacle}"
        )
    if obstacle:
        logging.warning("max_restarts=%d: %s; the task is not restarted in its place", config.max_restarts, obstacle)
    return not obstacle


def run(config: Config, task: Callable[[Config], int]) -> int:
    """Forks the task, and returns the exit code once it is done or given up.

    Args:
      task: executes the configuration of an attempt, in the fork, and returns the exit code.
    """
    with Children(stopped_seconds(config.step_timeout_seconds)) as children:
        return _Agent(config, task, children).run()


def _obstacle(config: Config) -> str | None:
    """Describes why this process can't fork the task; None if it can, as far as is known before the imports."""
    if threading.active_count() > 1 or threading.current_thread() is not threading.main_thread():
        return "the script has started threads, which a fork would lack"
    return "run_dir is not on this file system" if config.remote else None


class _Agent(RestartLoop):
    def __init__(self, config: Config, task: Callable[[Config], int], children: Children):
        self._config, self._task = config, task
        self._name = config.cluster.task if config.cluster else "the run"
        record = RunDir(config.run_dir).events if config.run_dir else None
        ages = recorded_restarts(record) if record else ()
        # By the monotonic clock: one that is set meanwhile changes no count.
        before = [time.monotonic() - age for age in ages]
        rule = Synchronous(config.max_restarts, WINDOW_SECONDS, 0.0, before=before, restarts="it starts again")
        super().__init__(rule, children, TaskMemory(1), record)
        self._members = None
        if config.min_workers:
            fits = functools.partial(checks.fits, config)
            timeout_seconds = config.cluster_timeout_seconds
            self._members = Members(config.tasks, config.files.path, config.min_workers, timeout_seconds, fits)
        self._cluster = config.cluster if config.coordinates and config.writes_run else None  # its servers come and go
        self._child: Child | None = None
        self._port_seconds = 0.0

    def run(self) -> int:
        os.environ |= self._memory.variables(0)
        handlers = Handlers([signal.Signals[name] for name in EXIT_CODES], self._pass_on)
        handlers.install()
        try:
            return self._end(self._make_attempts())
        finally:
            handlers.remove()

    def _attempt(self) -> Attempt:
        try:
            with rendezvous.refusing(self._config.cluster):
                self._config = self._agree()
        except CrankshaftError as error:
            if self._members and self._members.is_late and following.exit_code(self._events) == 0:
                print_line(f"{self._name} has not been included, and the run has come to its end")
                return Attempt([], 0)
            return Attempt([], fail(error.exit_code, error.message))
        if self._stop_signal:
            return Attempt([])
        recorded_bytes = self._record_bytes()
        # In the task the signal handlers are those of before.
        self._child = child = self._children.fork(functools.partial(self._task, self._config))
        self._port_seconds = self._config.cluster_timeout_seconds  # from now on its port is this job's
        if self._members and (lock := self._config.tasks.lock):
            lock.release()  # the fork still has it
        if self._stop_signal:
            # One that came during the fork found no child to be passed on to.
            child.send(self._stop_signal)
        ending = TaskExit(self._name, child.wait())
        self._child = None  # a signal is not passed on to a process id that may be another's
        self._children.end([child])
        if ending.code == EXIT_REGROUP and not self._stop_signal:
            return Attempt([])
        code = None
        if self._stop_signal and (ending.code < 0 or ending.code == EXIT_REGROUP):
            code = self._exit_code_when_stopped(self._stop_signal)
        # A task that has saved on a request, as with a notice of preemption, is not started again.
        elif self._stop_signal or not ending.code or (ending.ended_on_request and ending.code > 0):
            code = ending.code
        elif ending.port_was_taken:
            code = ending.code  # Slurm gives it another as the job is requeued
        elif ending.code > 0 and self._record_bytes() > recorded_bytes and following.exit_code(self._events) == 0:
            code = ending.code  # the run is complete; what failed came after it, such as its output
        return Attempt([ending], code, time.time())

    def _exit_code(self, decision: Decision, endings: list[TaskExit]) -> int:
        (ending,) = endings
        if ending.mistake is None:  # else the task has explained it
            fail(EXIT_FAILED, decision.message)
        return ending.code if ending.code > 0 else EXIT_FAILED

    def _exit_code_when_stopped(self, stop_signal: signal.Signals) -> int:
        return EXIT_CODES[stop_signal.name]

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop_signal and (left := until - time.monotonic()) > 0:
            # In short sleeps: Python continues one that a signal's handler has interrupted (PEP 475).
            time.sleep(min(left, 0.1))

    def print(self, line: str) -> None:
        print_line(line)

    def _writes_run(self) -> bool:
        return self._config.writes_run

    def _agree(self) -> Config:
        cluster = self._members.agree(lambda: self._stop_signal is not None) if self._members else None
        if self._members and not cluster and not self._stop_signal:
            least = f"min_workers={self._config.min_workers}"
            print_line(f"{self._name} ends: others have notices of preemption, and {least}; the same command resumes")
            self._stop_signal = signal.SIGTERM
        if self._cluster:
            cluster = arrival.with_newcomers(self._cluster, self._config.files.workers)
        if self._stop_signal and cluster and cluster.lock:
            cluster.lock.release()  # whoever saves what is in memory takes it
        if cluster := cluster or self._config.cluster:
            cluster = dataclasses.replace(cluster, port_seconds=self._port_seconds)
        return dataclasses.replace(self._config, cluster=cluster)

    def _record_bytes(self) -> int:
        return os.path.getsize(self._events) if self._events and os.path.isfile(self._events) else 0

    def _pass_on(self, number: int, frame) -> None:
        """Passes a signal on to the task, which saves and ends; a second one kills it."""
        is_second = self._is_second(number)
        if self._stop_signal is None:
            self._stop_signal = signal.Signals(number)
            if self._child:
                self._child.send(self._stop_signal)
        elif is_second and self._child:
            self._child.kill()

    def _end(self, code: int) -> int:
        """Writes the task's snapshot in memory, if this process is responsible for it; returns the code.

        After a notice of preemption, tells the other agents that this worker leaves.
        """
        step = self._memory.unsaved_step()
        if self._members:
            is_last = self._members.is_left
        else:  # whoever has the lock holds the newest state too
            folder = self._config.run_dir if code == EXIT_FAILED and step is not None else None
            is_last = folder is not None and locks.can_lock(folder)
        if step is not None and (self._config.writes_run or is_last):
            child = self._children.fork(self._memory.write)
            lost = child.wait()
            self._children.end([child])
            print_line(written_line(step, bool(lost)))
        has_notice = code == EXIT_TERMINATED or (code and self._stop_signal in (signal.SIGTERM, signal.SIGUSR1))
        if self._members and has_notice:
            self._members.leave()
        return code
