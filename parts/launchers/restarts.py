"""The rules for restarting a cluster's tasks: from how tasks ended to the next action.

A rule is an object of four methods, `restart_alone`, `saves`, `end_timeouts`, `decide`; the supervisor follows them.
Supervisor code.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterable

from ...engine.machine.files import file_system_time
from ...engine.record import events
from ...runner.explanations import thread_limit
from ...runner.failures import (
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_PORT_TAKEN,
    EXIT_REGROUP,
    EXIT_SLOWER,
    EXIT_USAGE,
    CrankshaftError,
    signal_name,
)
from ...runner.host.signals import EXIT_CODES
from .reaper import EXIT_STOPPED

# Exit codes of a task that was requested to end: it saved, or ended before it could catch the signal.
_STOP_CODES = (*EXIT_CODES.values(), *(-signal.Signals[name] for name in EXIT_CODES))
# How Python's report ends on an error of Crankshaft's that a script has not caught.
_UNCAUGHT_ERROR = re.compile(r"crankshaft\.[\w.]*\b(\w+)(:|$)")
# And on a script that it can't compile, or whose imports fail, or on -m and no module's name.
_CANNOT_BEGIN = re.compile(
    r"(ModuleNotFound|Import|Syntax|Indentation|Tab)Error\b|.*python\S*: (No module named|Error while finding module) "
)
# And absl's, of a flag that it does not know.
_UNKNOWN_FLAG = re.compile(r"FATAL Flags parsing error: Unknown command line flag '(\S+?)'")
# What TensorFlow, LLVM, OpenBLAS, C++, gRPC and Python print where the system refuses them a thread.
_NO_THREAD = re.compile(
    r"pthread_create\b.*\bfailed|what\(\): +Resource temporarily unavailable|Check failed: worker->created\(\)|"
    r"(can't|unable to) start \w+ thread|^error: Resource temporarily unavailable; "
)
_LEAVE_SECONDS = 5.0  # a peer's death is seen within a tenth of a second; the rest is for reporting it
_MISTAKE_SECONDS = 1.0  # all tasks find the same mistake, at about the same time
# From SIGTERM to SIGKILL where a peer is dead: nothing can be saved any more, and a task that waits for its peers
# within TensorFlow handles no signal.
_END_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0
WINDOW_SECONDS = 600.0  # failures longer ago are forgotten


@dataclasses.dataclass(frozen=True)
class TaskExit:
    """How a task ended.

    Attributes:
      task: name of the task, such as "worker 0".
      code: exit code of the task, or minus the signal that killed it.
    """

    task: str
    code: int
    last_lines: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """Its exit code as `crankshaft.main` returns it: for an error that a script leaves to Python, the error's."""
        # Python ends with 1 for any error; the last line of its report names the class, which has the code.
        reported = _UNCAUGHT_ERROR.match(self.last_lines[-1]) if self.code == EXIT_FAILED and self.last_lines else None
        return _exit_codes(CrankshaftError).get(reported[1], self.code) if reported else self.code

    @property
    def ended_on_request(self) -> bool:
        """Whether it ended on request, by Ctrl-C or another signal of `EXIT_CODES`."""
        return self.code in _STOP_CODES

    @property
    def mistake(self) -> str | None:
        """The cause of its end if a restart would repeat it, as a mistake or numbers that are not finite; else None."""
        if self.status == EXIT_USAGE:
            return "a mistake in its flags, script or data"
        if self.status == EXIT_DIVERGED:
            return "the run has diverged, and would again"
        if self.code == EXIT_FAILED and self.last_lines and _CANNOT_BEGIN.match(self.last_lines[-1]):
            return "its script can't be run as it stands"
        if self.code == EXIT_FAILED and (unknown := [*filter(None, map(_UNKNOWN_FLAG.search, self.last_lines))]):
            return (
                f"absl's app.run in its script does not know the flag {unknown[0][1]} (call crankshaft.main(MyTrainer, "
                "data=data) instead, which reads the script's flags too, or app.run(main, flags_parser=lambda words: "
                "flags.FLAGS(words, known_only=True)), and give run the strategy)"
            )
        if self.code in (EXIT_FAILED, -signal.SIGABRT) and any(map(_NO_THREAD.search, self.last_lines)):
            return f"threads ran out ({thread_limit()})"
        return None

    @property
    def port_was_taken(self) -> bool:
        """Whether it ended because another program took the port that was chosen for it."""
        return self.status == EXIT_PORT_TAKEN

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.task} was killed by {signal_name(-self.code)}"
        if self.code == EXIT_STOPPED:
            return f"{self.task} was stopped, did not continue in time, and was killed"
        return f"{self.task} ended with exit code {self.code}"


def _exit_codes(kind: type[CrankshaftError]) -> dict[str, int]:
    """Maps the names of a class of errors and its subclasses to their exit codes."""
    codes = {kind.__name__: kind.exit_code}
    return codes | {name: code for subclass in kind.__subclasses__() for name, code in _exit_codes(subclass).items()}


@dataclasses.dataclass(frozen=True)
class EndTimeouts:
    """How many seconds the remaining tasks have to end by themselves before SIGTERM, and then before SIGKILL."""

    leave_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Decision:
    """The action after the end of all tasks, or of one that is restarted by itself.

    Attributes:
      exit_code: exit code of the supervisor; None starts the tasks again.
      message: line for the user; empty without one.
    """

    exit_code: int | None
    pause_seconds: float = 0.0
    message: str = ""
    cause: TaskExit | None = None


class Synchronous:
    """The rule of synchronous tasks: when one fails, none can continue, and all restart from the newest state.

    A preempted task (requested to end, but not by the supervisor) is not a failure: it and its peers have saved.

    Args:
      max_restarts: number of restarts allowed after failures, within `window_seconds`.
      window_seconds: how long a failure counts.
      grace_seconds: how long preempted tasks have to save.
      compares: whether `EXIT_SLOWER` is that of a benchmark with fail_below; otherwise it may be a script's own code.
      before: times of earlier failures, by `clock`.
      restarts: words of the message that announce a restart, such as "all tasks start again".
    """

    def __init__(
        self,
        max_restarts: int,
        window_seconds: float,
        grace_seconds: float,
        *,
        compares: bool = False,
        clock=time.monotonic,
        before: Iterable[float] = (),
        restarts: str = "all tasks start again",
    ):
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._grace_seconds = grace_seconds
        self._compares = compares
        self._clock = clock
        self._restarts = restarts
        self._failures = collections.deque(before)
        self._in_a_row = 0  # consecutive failures without a new step
        self._preemptions: collections.deque[float] = collections.deque()

    def restart_alone(self, ending: TaskExit) -> Decision | None:
        """Decides whether a task is restarted by itself, and after which pause; None: it is not."""
        return None

    def saves(self, task: str) -> bool:
        """Whether a task has to save when all are to end; the others are signalled once these are done."""
        return True

    def end_timeouts(self, ending: TaskExit) -> EndTimeouts | None:
        """Decides how long the other tasks have to end after this one; None: they continue."""
        if ending.code == 0:
            return None
        if self._was_preempted(ending):
            leave = self._grace_seconds
        else:
            leave = _MISTAKE_SECONDS if ending.mistake or ending.port_was_taken else _LEAVE_SECONDS
        return EndTimeouts(leave, min(_END_SECONDS, self._grace_seconds))

    def decide(self, endings: list[TaskExit], advanced: bool = False) -> Decision:
        """Decides what follows once all tasks have ended, which are in the order of their ends.

        `advanced`: whether the run has new steps since the last failure. The first restart waits for nothing.
        """
        # A run diverges in all tasks: one that reports a lost peer has only seen a diverged peer's end.
        diverged = (ending for ending in endings if ending.status == EXIT_DIVERGED)
        cause = next(diverged, None) or next((ending for ending in endings if ending.code), None)
        if cause is None:
            return Decision(0)
        if final := self._final(cause):
            code, reason = final
            return Decision(code, 0.0, f"{cause}: {reason}, so it is not restarted", cause)
        if cause.port_was_taken:
            return self._restart_all(f"{cause}, as another program has taken its port", "with other ports", cause)
        if self._was_preempted(cause):
            return self._restart_all(f"{cause}, preempted", "", cause)
        return self._failed(cause, advanced)

    def _restart_all(self, why: str, action: str, cause: TaskExit) -> Decision:
        """Starts all tasks again after an end that is not the run's failure."""
        pause = _pause_seconds(self._count(self._preemptions) - 1)
        when = " ".join(filter(None, (_when(pause), action)))
        return Decision(None, pause, f"{why}; {self._restarts} {when}", cause)

    def _final(self, ending: TaskExit) -> tuple[int, str] | None:
        """Finds the supervisor's exit code, and why a restart would give the same; None if it might not."""
        if self._compares and ending.code == EXIT_SLOWER:
            return EXIT_SLOWER, "the benchmark is slower than fail_below allows"
        if not ending.mistake:
            return None
        return (EXIT_DIVERGED if ending.status == EXIT_DIVERGED else EXIT_USAGE), ending.mistake

    def _was_preempted(self, ending: TaskExit) -> bool:
        """Returns whether the ending loses nothing: one that a signal killed, as at its start, has saved nothing."""
        return ending.ended_on_request and ending.code > 0

    def _failed(self, cause: TaskExit, advanced: bool) -> Decision:
        count = self._count(self._failures)
        # Failures that the window has forgotten do not lengthen the pause.
        self._in_a_row = 1 if advanced else min(self._in_a_row + 1, count)
        if count > self._max_restarts:
            exhausted = "max_restarts=0, so it is not restarted"
            if self._max_restarts:
                exhausted = (
                    f"it is failure {count} within {self._window_seconds:g} s, and max_restarts={self._max_restarts} "
                    "restarts are used up"
                )
            return Decision(EXIT_FAILED, 0.0, f"{cause}; {exhausted}", cause)
        pause = _pause_seconds(self._in_a_row - 1)
        number = f"restart {count} of {self._max_restarts} within {self._window_seconds:g} s"
        return Decision(None, pause, f"{cause}; {self._restarts} {_when(pause)} ({number})", cause)

    def _count(self, times: collections.deque[float]) -> int:
        """Records the present time, and returns how many were recorded within the window, this one included."""
        now = self._clock()
        times.append(now)
        while now - times[0] > self._window_seconds:
            times.popleft()
        return len(times)


class Servers(Synchronous):
    """The rule of a coordinator ("chief"), workers, parameter servers, and perhaps an evaluator.

    A worker is restarted by itself and at once: the others continue, and it joins them; but the pause grows each time
    a worker fails again. A parameter server's death loses variables, and the coordinator's loses all work in progress:
    then all restart from the newest state. Only the coordinator saves on a request to end, and is preempted; a
    server's end is a failure. An evaluator is not part of the run. The coordinator's end is the run's.

    Arguments are those of `Synchronous`; `max_restarts` also bounds the restarts of each worker by itself.
    """

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._deaths: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)

    def restart_alone(self, ending: TaskExit) -> Decision | None:
        kind = ending.task.split()[0]
        done = kind == "evaluator" and not ending.code
        if kind not in ("worker", "evaluator") or ending.mistake or ending.port_was_taken or done:
            return None
        count = self._count(self._deaths[ending.task])
        if count > self._max_restarts:
            return None
        pause = _pause_seconds(count - 1)
        return Decision(None, pause, f"{ending}; it starts again {_when(pause)}, the others continue")

    def saves(self, task: str) -> bool:
        return task in ("chief", "evaluator")

    def end_timeouts(self, ending: TaskExit) -> EndTimeouts | None:
        if ending.task == "chief" and (not ending.code or ending.ended_on_request):
            return EndTimeouts(0.0, self._grace_seconds)  # the evaluator has yet to evaluate the last checkpoint
        if ending.task == "evaluator":
            return None
        if not ending.code:
            return EndTimeouts(_LEAVE_SECONDS, min(_END_SECONDS, self._grace_seconds))
        return super().end_timeouts(ending)

    def decide(self, endings: list[TaskExit], advanced: bool = False) -> Decision:
        chief = next((ending for ending in endings if ending.task == "chief"), None)
        if chief is not None and not chief.code:
            waited = "evaluator" in self._deaths and all(ending.task != "evaluator" for ending in endings)
            line = "evaluator is not started again: the last checkpoint is not evaluated; mode=eval evaluates it"
            return Decision(0, message=line if waited else "")
        # The evaluator only reads the run's files: how it ended does not decide about the run.
        part = [ending for ending in endings if ending.task != "evaluator" and ending.code]
        if not part:  # a server ended with code 0 before the run did, without a request
            return self._failed(endings[0], advanced)
        if chief is not None and self._final(chief):
            part = [chief]  # what the coordinator has found explains more than a task that was ended for it
        return super().decide(part, advanced)

    def _was_preempted(self, ending: TaskExit) -> bool:
        return ending.task == "chief" and super()._was_preempted(ending)


def recorded_restarts(path: str) -> list[float]:
    """Reads from a run's record how many seconds ago it was restarted after failures, in place or by a scheduler.

    Those within `WINDOW_SECONDS`, the oldest first. A process that begins the run again without an end of the one
    before, or a restart in its place, was started by a scheduler.

    The clock of the host that wrote last counts, which may be another's: the file's time is that of its last event.
    """
    if not os.path.isfile(path):
        return []
    times, failed, now = [], False, 0.0
    since_last = max(0.0, file_system_time(os.path.dirname(path)) - os.path.getmtime(path))
    for line in events.read(path):
        kind, now = line.kind, line.time + since_last
        if kind == "restart" or (kind == "start" and failed):
            times.append(line.time)
        if kind in ("start", "restart", "end"):
            exit_code = line.event.get("exit_code")
            failed = kind == "start" or (kind == "end" and exit_code not in (0, EXIT_REGROUP, *_STOP_CODES))
    return sorted((now - time for time in times if 0 <= now - time <= WINDOW_SECONDS), reverse=True)


def _pause_seconds(count: int) -> float:
    """Computes the pause before a restart: 0 s for a count of 0, then 1, 2, 4 and so on."""
    return min(2.0 ** (count - 1), _LONGEST_PAUSE_SECONDS) if count else 0.0


def _when(pause_seconds: float) -> str:
    return f"in {pause_seconds:g} s" if pause_seconds else "at once"
