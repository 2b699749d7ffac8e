"""That no process outlives the supervisor of a cluster, however it ends: by kill -9 too. Supervisor code, Linux.

Two nets, since neither holds alone. The kernel kills each task when the supervisor dies (PR_SET_PDEATHSIG), but not
what the task has started. And a process of its own waits for the supervisor's end and kills all that bear its mark, an
environment variable that every descendant inherits, wherever it has moved to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import uuid
from collections.abc import Mapping

_MARK = "CRANKSHAFT_SUPERVISOR"
_PR_SET_PDEATHSIG = 1  # prctl(2)
_ROUNDS = 500  # of 10 ms: what a SIGKILL has not ended by then waits in the kernel, on a lost disk for example


class Guard:
    """A process that waits for this one's end and then kills what is left of its tasks and of all that they started.

    Start it before threads, signal handlers and tasks.

    Attributes:
      environment: what every task has to have in its environment to be found.
    """

    def __init__(self):
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._prctl = ctypes.CDLL(None).prctl  # looked up here: not between fork and exec
        self._supervisor = os.getpid()
        self.environment = dict([self._mark.split("=")])

    def __enter__(self) -> Guard:
        reading, self._writing = os.pipe()  # what nobody writes to ends when the last who might write does
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self._writing)
                self._keep_watch(reading)
            finally:
                os._exit(0)
        os.close(reading)
        return self

    def __exit__(self, *_) -> None:
        self.sweep()
        os.close(self._writing)
        os.waitpid(self._pid, 0)

    def _keep_watch(self, reading: int) -> None:
        os.setsid()  # signals to the supervisor's group are not for this process
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # whoever reads the supervisor's output is not to wait for this process
            os.dup2(nowhere, stream)
        os.read(reading, 1)
        self.sweep()

    def bind(self) -> None:
        """In a task, between fork and exec: it dies with the supervisor, whose main thread has forked it."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._supervisor:  # it died before the call
            os._exit(1)

    def sweep(self) -> None:
        """Kills every process that bears the mark, and its group, until there is none."""
        for _ in range(_ROUNDS):
            found = _marked(self._mark)
            if not found:
                return
            for pid in found:
                with contextlib.suppress(OSError):  # gone meanwhile
                    os.killpg(os.getpgid(pid), signal.SIGKILL)
            time.sleep(0.01)


def job_of(environment: Mapping[str, str]) -> list[int]:
    """The processes of this one's job on this host: all that the same supervisor has started, or this one alone.

    Args:
      environment: of this process.
    """
    mark = environment.get(_MARK)
    return _marked(f"{_MARK}={mark}") if mark else [os.getpid()]


def _marked(mark: str) -> list[int]:
    return [pid for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) if _bears(mark, pid)]


def _bears(mark: str, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False
