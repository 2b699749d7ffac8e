"""Attempts of a run, one after another: what a job's supervisor and the parent of one task have in common."""

from __future__ import annotations

import abc
import signal
from typing import NamedTuple

from ...engine import version
from ...engine.record import events
from ...runner.host.signals import SecondSignal
from ..memory_snapshots.task_memory import TaskMemory
from .children import Children
from .restarts import Decision, Synchronous, TaskExit


class Attempt(NamedTuple):
    """How an attempt ended.

    Attributes:
      endings: how its tasks ended, in the order of their ends; none if another attempt follows without a decision.
      code: exit code, if that is known without the rule.
      ended_at: Unix time at which the first task ended.
    """

    endings: list[TaskExit]
    code: int | None = None
    ended_at: float = 0.0


class RestartLoop(abc.ABC):
    """Makes attempts until the rule for restarts decides the exit code, or a signal asks for the end.

    Args:
      rule: decides after each attempt.
      children: the processes of an attempt, none of which is left when the next one begins.
      memory: what tasks leave in memory.
      record: path of the run's record; None without one.
    """

    def __init__(self, rule: Synchronous, children: Children, memory: TaskMemory, record: str | None):
        self._rule, self._children, self._memory, self._events = rule, children, memory, record
        self._decision: Decision | None = None  # before the attempt has ended
        self._stop_signal: signal.Signals | None = None  # asks for the end
        self._is_second = SecondSignal()
        self._recorded = events.NewestStep(record)
        self._step = self._newest_step()  # as the last attempt ended

    @abc.abstractmethod
    def _attempt(self) -> Attempt:
        """Starts the tasks, and waits for their ends."""

    @abc.abstractmethod
    def _exit_code(self, decision: Decision, endings: list[TaskExit]) -> int:
        """Says why no other attempt follows, and returns the exit code."""

    @abc.abstractmethod
    def _exit_code_when_stopped(self, stop_signal: signal.Signals) -> int:
        """Returns the exit code after a signal."""

    @abc.abstractmethod
    def _pause(self, seconds: float) -> None:
        """Waits, but not for longer than until a signal asks for the end."""

    @abc.abstractmethod
    def print(self, line: str) -> None:
        """Prints a line for people."""

    def _make_attempts(self) -> int:
        while not self._stop_signal:
            endings, code, ended_at = self._attempt()
            self._children.sweep()  # processes that tasks have left behind, in their own sessions
            if code is not None:
                return code
            if not endings:
                continue
            step, before = self._newest_step(), self._step
            self._step = max(step, before)
            # Whether the run has got further decides about a restart: a failure that repeats at the same step would
            # repeat for ever.
            decision = self._decision or self._rule.decide(endings, step > before)
            if decision.exit_code is not None:
                return self._exit_code(decision, endings)
            self.print(decision.message)
            self._record_restart(decision.cause, ended_at)
            # A host that is out of memory, or a port that is taken, needs some seconds.
            self._pause(decision.pause_seconds)
        return self._exit_code_when_stopped(self._stop_signal)

    def _record_restart(self, ending: TaskExit | None, at: float) -> None:
        """Records a restart, why, and a build that has replaced this one; a run without a record has lost nothing."""
        if replaced := version.replaced():
            self.print(replaced)
        if ending is not None and self._writes_run():
            cause = f"{ending}; {replaced}" if replaced else str(ending)
            events.record_restart(self._events, at, self._recorded(), cause, ending.task, ending.code)

    def _writes_run(self) -> bool:
        return True

    def _newest_step(self) -> int:
        return max(self._recorded(), self._memory.newest_step())
