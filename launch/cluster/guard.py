"""Ensures that no process outlives the supervisor of a cluster, even one ended by kill -9. Supervisor code, Linux.

Each task is the child of a small process, its keeper. A process below the keeper that loses its parent becomes the
keeper's child (PR_SET_CHILD_SUBREAPER), wherever it has moved and whatever it has cleared, so once the keeper has no
child, nothing is left. The keeper kills its children until then as soon as the task, or the supervisor, of which the
kernel tells it, has ended. If the keeper is killed, the kernel kills the task (PR_SET_PDEATHSIG), and its other
descendants become the supervisor's children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

_MARK = "CRANKSHAFT_SUPERVISOR"  # in the environment of each task
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # prctl(2)
_ATTEMPTS = 500  # of 10 ms: what SIGKILL has not ended by then waits in the kernel, on a lost disk for example
_LAST_WORDS = 20  # of them, before SIGKILL: what passes a task's output on has yet to write its end


class StartedTask(NamedTuple):
    """A started task, which leads its own session.

    Attributes:
      keeper: ends when the task has ended and nothing is left of what the task has started.
      pid: the task's process id; it is reused only after both the keeper and the task are waited for
        (`Guard.reap_orphans`).
    """

    keeper: subprocess.Popen
    pid: int


class Guard:
    """Starts tasks, and leaves nothing of them. Tasks also end with the thread that starts them."""

    def __init__(self):
        self._environment = {_MARK: uuid.uuid4().hex}
        self._prctl = ctypes.CDLL(None).prctl  # looked up here: not between fork and exec
        self._others: set[int] = set()  # what this process had started before

    def __enter__(self) -> Guard:
        self._others = set(_children())
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_) -> None:
        self.sweep()
        self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def start(
        self, command: Sequence[str], *, prepare: Callable[[], None], env: Mapping[str, str], **options
    ) -> StartedTask:
        """Starts a task. Raises `OSError`.

        Args:
          command: the program and its arguments.
          prepare: called by the task between fork and exec.
          env: its environment.
          **options: as of `subprocess.Popen`.
        """
        supervisor = os.getpid()
        reading, writing = os.pipe()

        def become_the_keepers_child() -> None:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            keeper = os.getpid()
            try:
                task = os.fork()
            except OSError as error:  # Popen would not report it
                os.write(writing, b"-%d" % error.errno)
                os._exit(1)
            if task:
                self._keep(task, supervisor)
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:  # the keeper died before the call
                os._exit(1)
            os.setsid()
            os.write(writing, b"%d" % os.getpid())
            prepare()

        try:
            try:
                keeper = subprocess.Popen(
                    command,
                    env={**env, **self._environment},
                    start_new_session=True,
                    preexec_fn=become_the_keepers_child,
                    **options,
                )
            finally:
                os.close(writing)
            task = int(os.read(reading, 32) or keeper.pid)  # a task that was killed before has written nothing
        finally:
            os.close(reading)
        if task < 0:
            keeper.wait()
            raise OSError(-task, os.strerror(-task))
        return StartedTask(keeper, task)

    def _keep(self, task: int, supervisor: int) -> None:
        """Runs a keeper, up to the end of its process."""
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # it handles none; sigwait takes two
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            for descriptor in os.listdir("/proc/self/fd"):  # a reader of the task's output waits for no other process
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(int(descriptor))
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it keeps its number until the keeper has ended
            while not (ended := os.waitid(os.P_PID, task, how)) and os.getppid() == supervisor:
                signal.sigwait({signal.SIGCHLD, signal.SIGTERM})
                _reap({task})
            _end_children({task} if ended else ())
            if ended and ended.si_code == os.CLD_EXITED:
                os._exit(ended.si_status)
            self._die_by(ended.si_status if ended else signal.SIGKILL)
        finally:
            os._exit(1)

    def _die_by(self, number: int) -> None:
        self._prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the task has dumped its core, if any
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no other handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    def sweep(self) -> None:
        """Kills every child of this process, except earlier ones, and their children, until there is none."""
        _end_children(self._others)

    def reap_orphans(self, tasks: Collection[int] = ()) -> None:
        """Takes the exit codes of children that came to this process when their parents died, up to one of `tasks`."""
        _reap({*tasks, *self._others})


def job_of(environment: Mapping[str, str]) -> list[int]:
    """Returns the processes of this one's job on this host: all that the same supervisor started, or this one alone.

    Args:
      environment: of this process.
    """
    mark = environment.get(_MARK)
    if not mark:
        return [os.getpid()]
    return [pid for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) if _bears(mark, pid)]


def _bears(mark: str, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{_MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False


def _children() -> list[int]:
    """Returns this process's children, including dead ones that were not waited for (proc(5))."""
    found, own = [], str(os.getpid()).encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == own:
                    found.append(int(name))
    return found


def _reap(others: Collection[int]) -> None:
    """Takes the exit codes of this process's dead children, up to one of `others`."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if dead.si_pid in others:
                return
            os.waitpid(dead.si_pid, os.WNOHANG)


def _end_children(others: Collection[int]) -> None:
    """Ends this process's children except `others`, and theirs, which then become its own, until there is none.

    Nothing else waits for them, so a signalled process id can't belong to another process by now.
    """
    for attempt in range(_ATTEMPTS):
        children = set(_children()).difference(others)
        if not children:
            return
        for pid in children if attempt >= _LAST_WORDS else ():
            with contextlib.suppress(OSError):  # another user's
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
