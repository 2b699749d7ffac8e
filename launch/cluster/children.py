"""Starts child processes, signals them, and leaves none of their descendants, even if this one is killed. Linux.

For the tasks of a cluster, and for benchmarks. Each child is below a small process, its keeper. A process below the
keeper that loses its parent becomes the keeper's child (PR_SET_CHILD_SUBREAPER), wherever it has moved and whatever it
has cleared, so once the keeper has no child, nothing is left. As soon as the child or this process has ended, which the
kernel signals, the keeper kills its children until none is left. If the keeper is killed, the kernel kills the child
(PR_SET_PDEATHSIG), and its other descendants become this process's children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence

MARK = "CRANKSHAFT_SUPERVISOR"  # in the environment of each child
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # prctl(2)
_ATTEMPTS = 500  # of 10 ms: what SIGKILL has not ended by then waits in the kernel, on a lost disk for example
_LAST_WORDS = 20  # of them, before SIGKILL: what passes a child's output on has yet to write its end
_POLL_SECONDS = 0.1


class Child:
    """A child process, which leads its own session.

    So a terminal's Ctrl-C reaches its parent alone, and what the child starts can be ended with it.

    Attributes:
      pid: its process id.
      pids: its keeper's and its own, which are reused only after `Children.end` and `reap_orphans`.
      stdin, stdout, stderr: the pipes that it was started with, unbuffered.
    """

    def __init__(self, keeper: subprocess.Popen, pid: int):
        self.pid = pid
        self.pids = (keeper.pid, pid)
        self.stdin, self.stdout, self.stderr = keeper.stdin, keeper.stdout, keeper.stderr
        self._keeper = keeper  # ends when the child and all that it has started have ended

    @property
    def code(self) -> int | None:
        """Its exit code or minus its signal; None while it, or anything that it has started, lives."""
        ended = os.waitid(os.P_PID, self._keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send(self, number: signal.Signals) -> None:
        """Signals the child alone, not its own children, which it may need to save; a stopped one continues."""
        os.kill(self.pid, number)
        if number != signal.SIGSTOP:  # a stopped process handles no signal
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills it with its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Waits for its death, after killing it if need be; returns how it ended, as `code`. Once."""
        self.kill()
        return self._keeper.wait()


def wait(children: Collection[Child], seconds: float) -> None:
    """Waits for so long until they have ended."""
    deadline = time.monotonic() + seconds
    while any(child.code is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


class Children:
    """The children of this process that are kept. They also end with the thread that starts them."""

    def __init__(self):
        self._environment = {MARK: uuid.uuid4().hex}
        self._prctl = ctypes.CDLL(None).prctl  # looked up here: not between fork and exec
        self._others: set[int] = set()  # earlier children of this process
        self._kept: list[Child] = []

    def __enter__(self) -> Children:
        self._others = set(_children())
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_) -> None:
        self.end(self._kept)
        self.sweep()
        self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cores: Iterable[int] = (),
        blocked: Collection[signal.Signals] = (),
        **options,
    ) -> Child:
        """Starts a child. Raises `OSError`.

        Args:
          command: the program and its arguments.
          env: its environment.
          cores: the logical cores that it may use; none: all that this process may.
          blocked: the signals that wait until its program unblocks them.
          **options: its streams and its folder, as of `subprocess.Popen`; by default without standard input.
        """
        parent, cores, (reading, writing) = os.getpid(), frozenset(cores), os.pipe()

        def start_keeper() -> None:  # between fork and exec
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            keeper = os.getpid()
            try:
                child = os.fork()
            except OSError as error:  # Popen would not report it
                os.write(writing, b"-%d" % error.errno)
                os._exit(1)
            if child:
                self._keep(child, parent)
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:  # the keeper died before the call
                os._exit(1)
            os.setsid()
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            os.write(writing, b"%d" % os.getpid())
            if cores:
                with contextlib.suppress(OSError):  # they were taken away: then it runs on the others
                    os.sched_setaffinity(0, cores)

        try:
            try:
                keeper = subprocess.Popen(
                    command,
                    env={**env, **self._environment},
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=start_keeper,
                    **{"stdin": subprocess.DEVNULL, **options},
                )
            finally:
                os.close(writing)
            pid = int(os.read(reading, 32) or keeper.pid)  # a child that was killed before has written nothing
        finally:
            os.close(reading)
        if pid < 0:
            keeper.wait()
            raise OSError(-pid, os.strerror(-pid))
        self._kept.append(Child(keeper, pid))
        return self._kept[-1]

    def end(self, children: Collection[Child]) -> list[int]:
        """Ends children, and returns how each ended; those that still run are killed."""
        codes = [child.end() for child in children]
        self._kept = [child for child in self._kept if child not in children]
        return codes

    def _keep(self, child: int, parent: int) -> None:
        """Runs a keeper, up to the end of its process."""
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # it handles none; sigwait takes two
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            for descriptor in os.listdir("/proc/self/fd"):  # a reader of the child's output waits for no other process
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(int(descriptor))
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it keeps its number until the keeper has ended
            while not (ended := os.waitid(os.P_PID, child, options)) and os.getppid() == parent:
                signal.sigwait({signal.SIGCHLD, signal.SIGTERM})
                _reap({child})
            _end_children({child} if ended else ())
            if ended and ended.si_code == os.CLD_EXITED:
                os._exit(ended.si_status)
            self._die_by(ended.si_status if ended else signal.SIGKILL)
        finally:
            os._exit(1)

    def _die_by(self, number: int) -> None:
        self._prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the child has dumped its core, if any
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no other handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    def sweep(self) -> None:
        """Kills all children of this process, except earlier ones, and their children, until none is left."""
        _end_children(self._others)

    def reap_orphans(self) -> None:
        """Takes the exit codes of processes that came to this one when their parents died, up to one that is kept."""
        _reap({pid for child in self._kept for pid in child.pids} | self._others)


def job_of(environment: Mapping[str, str]) -> list[int]:
    """Returns the processes of this one's job on this host: all that the same supervisor started, or this one alone.

    Args:
      environment: of this process.
    """
    mark = environment.get(MARK)
    if not mark:
        return [os.getpid()]
    return [pid for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) if _has_mark(mark, pid)]


def _has_mark(mark: str, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False


def _children() -> list[int]:
    """Returns this process's children, including dead ones that were not waited for (proc(5))."""
    pids, own = [], str(os.getpid()).encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == own:
                    pids.append(int(name))
    return pids


def _reap(others: Collection[int]) -> None:
    """Takes the exit codes of this process's dead children, up to one of `others`."""
    with contextlib.suppress(ChildProcessError):  # without children
        while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if dead.si_pid in others:
                return
            os.waitpid(dead.si_pid, os.WNOHANG)


def _end_children(others: Collection[int]) -> None:
    """Ends this process's children except `others`, and theirs, which then become its own, until none is left.

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
