"""That no process outlives the supervisor of a cluster, however it ends: by kill -9 too. Supervisor code, Linux.

Three nets, since none holds alone. The kernel kills each task when the supervisor dies (PR_SET_PDEATHSIG), but not
what the task has started. A process of its own waits for the supervisor's end and kills all that bear its mark, an
environment variable that descendants inherit, wherever they have moved to. And what has cleared its environment is
known by its ancestors: whoever loses its parent becomes the supervisor's own child (PR_SET_CHILD_SUBREAPER), and the
process that waits notes every other second who there is, for an end by kill -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
import uuid
from collections.abc import Collection, Mapping

_MARK = "CRANKSHAFT_SUPERVISOR"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LOOK_SECONDS = 2.0
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
        self._others: set[tuple[int, int]] = set()  # what this process had started before
        self._seen: set[tuple[int, int]] = set()  # in the guard: the supervisor's descendants, as they were last

    def __enter__(self) -> Guard:
        self._others = _descendants(self._supervisor)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        reading, self._writing = os.pipe()  # what nobody writes to ends when the last who might write does
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self._writing)
                self._keep_watch(reading)
            finally:
                os._exit(0)
        os.close(reading)
        self._others |= {each for each in _descendants(self._supervisor) if each[0] == self._pid}
        return self

    def __exit__(self, *_) -> None:
        self.sweep()
        os.close(self._writing)
        os.waitpid(self._pid, 0)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _keep_watch(self, reading: int) -> None:
        os.setsid()  # signals to the supervisor's group are not for this process
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # whoever reads the supervisor's output is not to wait for this process
            os.dup2(nowhere, stream)
        own = os.getpid()
        while not select.select([reading], [], [], _LOOK_SECONDS)[0]:
            self._seen = {each for each in _descendants(self._supervisor) if each[0] != own}
        self.sweep()

    def bind(self) -> None:
        """In a task, between fork and exec: it dies with the supervisor, whose main thread has forked it."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._supervisor:  # it died before the call
            os._exit(1)

    def sweep(self) -> None:
        """Kills every process that bears the mark, and its group, and every descendant, until there is none."""
        for _ in range(_ROUNDS):
            marked, strays = _marked(self._mark), self._strays()
            if not marked and not strays:
                return
            for pid in marked:
                with contextlib.suppress(OSError):  # gone meanwhile
                    os.killpg(os.getpgid(pid), signal.SIGKILL)
            for pid in strays:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.bury_strays()
            time.sleep(0.01)

    def _strays(self) -> list[int]:
        """The supervisor's descendants, those of before aside; in the guard, as far as they were seen and live."""
        now = _descendants(self._supervisor) | (self._seen & _all_processes().keys())
        return sorted(pid for pid, _ in now - self._others)

    def bury_strays(self, tasks: Collection[int] = ()) -> None:
        """Takes the exit codes of children that came to this process when their parents died, up to one of `tasks`."""
        kept = {*tasks, *(pid for pid, _ in self._others)}
        with contextlib.suppress(ChildProcessError):  # there are none, as in the guard
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if dead.si_pid in kept:
                    return
                os.waitpid(dead.si_pid, os.WNOHANG)


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


def _all_processes() -> dict[tuple[int, int], int]:
    """{(pid, when it started, in ticks since boot): parent's pid} of those that live (proc(5))."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *rest = file.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    found[int(name), int(rest[17])] = int(parent)
    return found


def _descendants(ancestor: int) -> set[tuple[int, int]]:
    processes = _all_processes()
    children: dict[int, list[tuple[int, int]]] = {}
    for each, parent in processes.items():
        children.setdefault(parent, []).append(each)
    found, left = set(), [ancestor]
    while left:
        new = children.get(left.pop(), [])
        found.update(new)
        left += [pid for pid, _ in new]
    return found
