"""Starts child processes, signals them, and leaves none of their descendants, even if this one is killed. Linux.

For the tasks of a cluster, and for benchmarks. Each child is below a small process, its reaper. A process below the
reaper that loses its parent becomes the reaper's child (PR_SET_CHILD_SUBREAPER), wherever it has moved and whatever it
has cleared, so once the reaper has no child, nothing is left. As soon as the child or this process has ended, which the
kernel signals, the reaper kills its children until none is left. If the reaper is killed, the kernel kills the child
(PR_SET_PDEATHSIG), and its other descendants become this process's children.

A child is a program that is started, or a fork of a process that has imported TensorFlow, see `template`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import IO

from ...engine.strategies.options import DEFAULT_TIMEOUT_SECONDS
from ...runner.host import exits
from ...runner.host.tasks import MARK
from . import reaper
from .template import Template

_POLL_SECONDS = 0.1
_PEERS_SECONDS = 10.0  # time for a stopped task's peers, which detect it too, to log what they know


class Child:
    """A child process, which leads its own session.

    So a terminal's Ctrl-C reaches its parent alone, and what the child starts can be ended with it.

    Attributes:
      pids: process ids of the child's reaper and of the child, which are reused only after `Children.end` and
        `reap_orphans`.
      stdin, stdout, stderr: the pipes that it was started with, unbuffered.
    """

    def __init__(self, reaper: int, pid: int, pipes: Sequence[IO[bytes] | None]):
        self.pid = pid
        self.pids = (reaper, pid)
        self.stdin, self.stdout, self.stderr = pipes
        self._reaper = reaper  # ends with the child and all its descendants

    @property
    def code(self) -> int | None:
        """Its exit code or minus its signal; None while it or a descendant runs."""
        return self._code(os.WNOHANG | os.WNOWAIT)

    def _code(self, options: int) -> int | None:
        ended = os.waitid(os.P_PID, self._reaper, os.WEXITED | options)
        return ended and (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def send(self, number: signal.Signals) -> None:
        """Signals the child alone, not its own children, which it may need to save; a stopped one continues."""
        os.kill(self.pid, number)
        if number != signal.SIGSTOP:  # a stopped process handles no signal
            os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> int:
        """Waits until it and all its descendants have ended; returns its `code`."""
        code = self._code(os.WNOWAIT)
        assert code is not None  # only a call with WNOHANG returns before the end
        return code

    def kill(self) -> None:
        """Kills it with its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Waits for its death, after killing it if need be; returns how it ended, as `code`. Once."""
        self.kill()
        code = self.wait()
        self._code(0)  # once more, since its process id may be another's from then on
        return code


def stopped_seconds(step_timeout_seconds: float | None) -> float:
    """Computes how long a task may be stopped, see `Children`, by its --step_timeout_seconds."""
    timeout = DEFAULT_TIMEOUT_SECONDS if step_timeout_seconds is None else step_timeout_seconds
    return timeout + min(2 * timeout, _PEERS_SECONDS)


def wait(children: Collection[Child], seconds: float) -> None:
    """Waits until the children have ended, at most for so many seconds."""
    deadline = time.monotonic() + seconds
    while any(child.code is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


class Children:
    """The children of this process that have reapers. They also end with the thread that starts them.

    Args:
      stopped_seconds: the time for which a child may be stopped (SIGSTOP) before it is killed; 0 does not kill it.
    """

    def __init__(self, stopped_seconds: float = 0.0):
        self._stopped_seconds = stopped_seconds
        self._environment = {MARK: uuid.uuid4().hex}
        self._others: set[int] = set()  # children of this process that are not kept: earlier ones
        self._templates: list[Template] = []
        self._kept: list[Child] = []

    def __enter__(self) -> Children:
        self._others = set(reaper.children())
        reaper.adopt_orphans()
        return self

    def __exit__(self, *_) -> None:
        self.end(self._kept)
        for template in self._templates:
            template.close()
        self._templates = []
        self.sweep()
        reaper.adopt_orphans(False)

    def template(self, env: Mapping[str, str], modules: Sequence[str]) -> Template:
        """Starts a process with this environment that imports modules, from which children can be forked."""
        self._templates.append(Template({**env, **self._environment}, modules))
        return self._templates[-1]

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cores: Iterable[int] = (),
        template: Template | None = None,
        **options,
    ) -> Child:
        """Starts a child below a reaper. Raises `OSError`.

        Args:
          command: the program and its arguments; with a template `[sys.executable, script or "-m", ...]`.
          cores: the logical cores that it may use; none: all that this process may.
          template: template process that forks the child, with an environment like its own; None: a new process.
          **options: streams, folder (`cwd`) and further inherited descriptors (`pass_fds`) of the child, as of
            `subprocess.Popen`; by default without standard input.
        """
        parent, env, (reading, report) = os.getpid(), {**env, **self._environment}, os.pipe()
        options = {"stdin": subprocess.DEVNULL, **options}
        limits = frozenset(cores), self._stopped_seconds
        try:
            if template is not None:
                started, pipes = 0, template.fork(command, env, limits, report, **options)
            else:
                process = subprocess.Popen(
                    command,
                    env=env,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=lambda: reaper.fork_below_reaper(parent, report, *limits),
                    **options,
                )
                started, pipes = process.pid, (process.stdin, process.stdout, process.stderr)
                process.returncode = 0  # it is waited for here
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(report)
        return self._started(reading, started, pipes)

    def fork(self, work: Callable[[], int | None]) -> Child:
        """Forks this process to do some work, see `exits.run_fork`; it has a reaper too. Raises `OSError`."""
        parent, (reading, report), numbers = os.getpid(), os.pipe(), random.getstate()

        def begin() -> int | None:
            os.setsid()
            reaper.fork_below_reaper(parent, report, stopped_seconds=self._stopped_seconds)
            os.close(report)
            os.close(reading)
            random.setstate(numbers)  # the program's own state: Python seeds it again in each fork
            return work()

        # Else both processes would write what open files hold back.
        exits.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # libraries' threads, which the child does not need
            started = os.fork()
        if not started:
            exits.run_fork(begin)
        os.close(report)
        return self._started(reading, started, (None, None, None))

    def _started(self, reading: int, started: int, pipes: Sequence[IO[bytes] | None]) -> Child:
        """Returns the child that a reaper reports to a pipe; `started` is the reaper, 0 if only the report says."""
        with open(reading, "rb", buffering=0) as pipe:
            # A child that was killed before has written nothing.
            above, pid = map(int, pipe.read(64).split() or (started, started))
        if pid <= 0:
            if above:
                os.waitpid(above, 0)
            raise OSError(-pid, os.strerror(-pid) if pid else "its template has ended")
        self._kept.append(Child(above, pid, pipes))
        return self._kept[-1]

    def end(self, children: Collection[Child]) -> list[int]:
        """Ends children, and returns how each ended; those that still run are killed."""
        codes = [child.end() for child in children]
        self._kept = [child for child in self._kept if child not in children]
        return codes

    def sweep(self) -> None:
        """Kills all children of this process, except earlier ones, and their children, until none is left."""
        reaper.end_children(self._others | {template.pid for template in self._templates})

    def reap_orphans(self) -> None:
        """Reaps processes that came to this one when their parents died, up to one that has a reaper."""
        others = {template.pid for template in self._templates} | self._others
        reaper.reap({pid for child in self._kept for pid in child.pids} | others)


def job_processes(environment: Mapping[str, str]) -> list[int]:
    """Lists the job's processes on this host: all that the same supervisor started, or only this one."""
    mark = environment.get(MARK)
    if not mark:
        return [os.getpid()]
    pids = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        # One that is gone meanwhile, or another user's, can't be read.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                pids.append(pid)
    return pids
