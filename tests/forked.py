"""Programs of tests that start as forks of a process that has imported TensorFlow, which is most of a program's start.

There is one such process for each process of pytest, from the first program on.
"""

from __future__ import annotations

import functools
import os
import pathlib
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from crankshaft.launch.command import TASK_MODULES
from crankshaft.parts.launchers import reaper
from crankshaft.parts.launchers.template import Template

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Environment variables that may differ from those with which the process that is forked has started: nothing reads them
# as it is imported, or they are set by imports and runs of this process, as of any.
_VARIES = {"COLUMNS", "CRANKSHAFT_JOB_SECRET", "GRPC_FAIL_FAST", "HDF5_PLUGIN_PATH", "HOST", "PYTEST_CURRENT_TEST"}
_VARIES |= {"ENABLE_RUNTIME_UPTIME_TELEMETRY", "OMP_NUM_THREADS", "TF2_BEHAVIOR", "TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL"}
_VARIES |= {
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
    "XLA_FLAGS",
    "http_proxy",
    "no_grpc_proxy",
    "no_proxy",
}
# Of the tests' processes: they find `tests`, and the package where these tests do, as in a worktree of git.
PYTHON_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
_START = {**os.environ, "PYTHONPATH": PYTHON_PATH, "KERAS_BACKEND": "tensorflow"}


class Forked:
    """A fork, with the members of a `subprocess.Popen`; it ends when all that it has started has ended."""

    def __init__(self, template: Template, command: Sequence[str], env: Mapping[str, str], **how):
        self.args, self.returncode = command, None
        reading, report = os.pipe()
        reaper.adopt_orphans()  # as the fork is first
        try:
            self.stdin, self.stdout, self.stderr = template.fork(command, env, ((), 0.0), report, **how)
        finally:
            os.close(report)
            with open(reading) as file:
                self._reaper, self.pid = map(int, file.read().split())
            reaper.adopt_orphans(False)
        self._ended = os.pidfd_open(self._reaper)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._reaper, 0)[1])
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _template() -> Template:
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        return Template(_START, TASK_MODULES)  # whose forks answer signals as in a terminal
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _as_in_a_terminal() -> None:
    """Signals do what they do there: whoever runs the tests in the background may have them ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(arguments: Sequence[str], env: Mapping[str, str], **streams: int | IO) -> subprocess.Popen | Forked:
    """Starts Python with these arguments: as a fork, if it is a script or a training with the usual variables."""
    command = [sys.executable, *map(str, arguments)]
    imports = command[1].endswith(".py") or (command[1] == "-m" and command[2:4] != ["crankshaft", "local"])
    streams = {"stdin": subprocess.DEVNULL, **streams}
    if imports and all(_START.get(name) == value for name, value in env.items() if name not in _VARIES):
        return Forked(_template(), command, env, **streams)
    return subprocess.Popen(command, env=env, preexec_fn=_as_in_a_terminal, **streams)
