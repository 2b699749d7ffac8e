"""Ask a running job for something, by files in its run_dir.

For example:

  crankshaft ask runs/first status
  crankshaft ask --task="worker 1" runs/first profile

profile: a TensorBoard trace of the next ten steps. stacks: the stack of each thread. checkpoint: one now. status: the
progress. stop: a clean end, after which the same command continues. The task's answer is printed; without one, the
exit code is 1.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ...engine.checkpoints import RunDir
from ...engine.errors import visible
from ...engine.machine import threads
from ...engine.record import events
from ...runner.command_line import command_flags
from ...runner.command_line.rules import Number, Text, flag
from ...runner.failures import RunError, UsageError, nearest
from ...runner.host import locks
from . import requests

_USAGE = f"crankshaft ask [flags] RUN_DIR {'|'.join(requests.KINDS)}"


@dataclasses.dataclass(kw_only=True)
class AskFlags:
    """The values of a command line."""

    task: str | None = flag(
        Text("a task's name"), None, "Task to ask, by its name in the run's log; default: the chief."
    )
    wait_seconds: float = flag(
        Number(above=0, upper=requests.LONGEST_SECONDS), 30.0, "How long to wait for the answer."
    )


def main(argv: list[str]) -> int:
    """Sends the command line's request, and prints the answer."""
    flags, words = command_flags.read(argv, AskFlags, _USAGE, takes_words=True)
    if len(words) != 2:
        raise UsageError(f"{len(words)} arguments; use {_USAGE}")
    run_dir, kind = words
    if kind not in requests.KINDS:
        raise UsageError(f"{kind!r} is not a request; {nearest(kind, requests.KINDS, f'use {_USAGE}')}")
    _check_runs(run_dir, flags.task)
    answer = requests.ask(RunDir(run_dir).requests, kind, flags.task, flags.wait_seconds)
    if answer is None:
        raise RunError(
            f"{run_dir}: no answer in {flags.wait_seconds:g} s; a call or a compilation may take longer "
            "(--wait_seconds), or the task is stopped"
        )
    print(visible(answer))  # whoever may write to the run's folder may have answered
    return 0


def _check_runs(run_dir: str, task: str | None) -> None:
    """Raises `UsageError` if there is no such run or task, `RunError` if it has ended or restarts."""
    path = RunDir(run_dir).events
    if not os.path.isfile(path):
        raise UsageError(
            f"{run_dir} holds no run ({os.path.basename(path)} is missing); give the run_dir of one that trains"
        )
    last: dict[str, Mapping[str, Any]] = {}
    for line in events.read(path):
        if line.kind == "start":
            last.clear()
        if line.kind == "end":
            last.pop("restart", None)  # of a single task
        if line.kind in ("start", "cluster", "end", "restart"):
            last[line.kind] = line.event
    start, cluster, end, restart = (last.get(kind, {}) for kind in ("start", "cluster", "end", "restart"))
    pid, space = start.get("pid"), threads.pid_space()
    is_gone = space and start.get("pid_space") == space and pid is not None and not locks.is_alive(pid)
    if restart and (end or is_gone):
        raise RunError(f"{run_dir}: the run restarts, since {restart.get('cause')}; ask again in a minute")
    if end:
        raise RunError(f"{run_dir}: the run has ended at step {end['step']:,}: {end.get('reason')}")
    if is_gone:
        raise RunError(f"{run_dir}: process {pid} ended without recording why; start the run again")
    names = [str(task.get("name")) for job in ("workers", "servers") for task in cluster.get(job) or ()]
    if task is not None and task not in (*names, "chief"):
        raise UsageError(f"--task={task} is not a task of this run; use {', '.join(map(repr, names))}")
