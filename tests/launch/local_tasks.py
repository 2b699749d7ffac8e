"""What tests of `crankshaft local` share: the script that each task runs, and where its processes are."""

from __future__ import annotations

import pathlib
import re

from tests.processes import is_alive
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What every task's script starts with.
TASK = """
import json, os, pathlib, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
here = pathlib.Path(__file__).parent
def started():  # how often, this time included
    file = here / f"starts-{index}"
    file.write_text(file.read_text() + "." if file.exists() else ".")
    return len(file.read_text())
def meet(name, other):  # waits until the other task is there too
    (here / f"{name}-{index}").touch()
    while not (here / f"{name}-{other}").exists(): time.sleep(0.01)
def leave(code, n=1):  # ends this task, which another may outlive(n)
    (here / f"leaves-{n}").write_text(str(os.getpid()))
    sys.exit(code)
def outlive(n=1):  # waits until the supervisor, which writes to `supervisor`, knows that the task has ended
    file = here / f"leaves-{n}"
    while not (file.exists() and file.read_text()): time.sleep(0.01)
    log = here / "supervisor"
    while not log.exists() or log.read_text().count("; 1 still running") < n: time.sleep(0.01)
"""

# A task that only SIGKILL ends.
IGNORES = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
time.sleep(900)
"""


def pids(program) -> list[int]:
    """Of the tasks that were started, in order."""
    return [int(pid) for pid in re.findall(r"^\[local\] worker \d+ is process (\d+)", program.err, re.MULTILINE)]


def until_dead(*processes: int) -> None:
    """Waits until these processes have ended; fails if one does not."""
    wait_until(lambda: not any(map(is_alive, processes)), shows=lambda: [pid for pid in processes if is_alive(pid)])


def lines_of(text: str, task: str) -> list[str]:
    return [line.removeprefix(f"[{task}] ") for line in text.splitlines() if line.startswith(f"[{task}] ")]


def says(program, text: str, times: int = 1):
    return lambda: (program.out + program.err).count(text) >= times
