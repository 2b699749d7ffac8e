"""A reaper: the process above a child, which ends all that the child has started. Linux.

Nothing here imports more than Python: a reaper is a fork of its parent, which may be a large process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # prctl(2)
_ATTEMPTS = 500  # of 10 ms: what SIGKILL has not ended by then waits in the kernel, on a lost disk for example
_OUTPUT_GRACE_ATTEMPTS = 20  # attempts before SIGKILL: the process that passes the output on has to finish
EXIT_STOPPED = 128 + signal.SIGSTOP  # of a child that was stopped for too long, and is killed
_prctl = ctypes.CDLL(None).prctl  # looked up here: not between fork and exec


def adopt_orphans(adopts: bool = True) -> None:
    """Makes processes below this one that lose their parent its own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process once the thread that is its parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def fork_below_reaper(parent: int, report: int, cores: Collection[int] = (), stopped_seconds: float = 0.0) -> None:
    """Turns this process into a reaper, for good, and returns in its new child, which leads a session.

    Args:
      parent: this process's parent, which the child ends with.
      report: a descriptor; gets the process ids of reaper and child, or minus the number of the error of its fork.
      cores: the logical cores that the child may use; none: all that this process may.
      stopped_seconds: how long the child may be stopped (SIGSTOP); then it is killed. 0: for ever.
    """
    adopt_orphans()
    reaper = os.getpid()
    try:
        child = os.fork()
    except OSError as error:  # Popen would not report it
        os.write(report, b"%d %d" % (reaper, -(error.errno or 0)))
        os._exit(1)
    if child:
        _keep(child, parent, stopped_seconds)
    die_with_parent()
    if os.getppid() != reaper:  # the reaper died before the call
        os._exit(1)
    os.setsid()
    os.write(report, b"%d %d" % (reaper, os.getpid()))
    if cores:
        with contextlib.suppress(OSError):  # they were taken away: then it runs on the others
            os.sched_setaffinity(0, cores)


def _keep(child: int, parent: int, stopped_seconds: float) -> NoReturn:
    """Runs a reaper, up to the end of its process."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # it handles none; sigwait takes two
        die_with_parent(signal.SIGTERM)
        for descriptor in os.listdir("/proc/self/fd"):  # a reader of the child's output waits for no other process
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(descriptor))
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it keeps its number until the reaper has ended
        signals, stopped = {signal.SIGCHLD, signal.SIGTERM}, 0.0  # the latter in seconds
        while not (ended := os.waitid(os.P_PID, child, options)) and os.getppid() == parent:
            began, watched_seconds = time.monotonic(), min(1.0, stopped_seconds / 8)
            if stopped_seconds and _status(child)[0] == "T":
                signal.sigtimedwait(signals, watched_seconds)
                stopped += min(time.monotonic() - began, 2 * watched_seconds)  # this process may be stopped, too
            else:
                signal.sigwait(signals)
                stopped = 0.0
            if stopped > stopped_seconds:
                break
            # Orphans of the child's have come to this process, and nothing else waits for them.
            reap({child})
        end_children({child} if ended else ())
        if not ended and os.getppid() == parent:
            os._exit(EXIT_STOPPED)
        if ended and ended.si_code == os.CLD_EXITED:
            os._exit(ended.si_status)
        # It dies by the child's signal.
        number = ended.si_status if ended else signal.SIGKILL
        _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the child has dumped its core, if any
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no other handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    finally:
        os._exit(1)


def children() -> list[int]:
    """Lists this process's children, including dead ones that were not waited for (proc(5))."""
    parent = str(os.getpid())
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _status(int(name))[1] == parent]


def _status(pid: int) -> tuple[str, str]:
    """Reads a process's state, "T" where it is stopped, and its parent; empty without such a process (proc(5))."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return "", ""
    return state, parent


def reap(others: Collection[int]) -> None:
    """Reaps this process's dead children, up to one of `others`."""
    with contextlib.suppress(ChildProcessError):  # without children
        while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if dead.si_pid in others:
                return
            os.waitpid(dead.si_pid, os.WNOHANG)


def end_children(others: Collection[int]) -> None:
    """Ends this process's children except `others`, and theirs, which then become its own, until none is left.

    Nothing else waits for them, so a signalled process id can't belong to another process by now.
    """
    for attempt in range(_ATTEMPTS):
        left = set(children()).difference(others)
        if not left:
            return
        for pid in left if attempt >= _OUTPUT_GRACE_ATTEMPTS else ():
            with contextlib.suppress(OSError):  # another user's
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
