"""Ends of `crankshaft local` by signals: which tasks are notified, and when. Real processes, signals and a terminal.

`crankshaft local` when it is killed, or a task ends: nothing that tasks have started is left. Real processes.
"""

from __future__ import annotations

import os
import pathlib
import pty
import re
import signal
import sys
import time

import pytest

from crankshaft.runner.host.signals import SAME_REQUEST_SECONDS
from tests.launch.local_tasks import IGNORES, ROOT, TASK, pids, says, until_dead
from tests.processes import is_alive, proc
from tests.waiting import wait_until

SAVES = """
def save(number, _):
    print("saving for", signal.Signals(number).name, flush=True)
    time.sleep(0.2)
    print("saved")
    sys.exit({signal.SIGINT: 130, signal.SIGTERM: 143}[number])
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
print("ready")
while True: time.sleep(0.01)
"""


def test_a_hangup_reaches_all_who_save_and_end(local):
    program = local(SAVES)
    program.until(says(program, "ready", 2))
    program.send(signal.SIGHUP)
    outcome = program.wait()
    assert (outcome.code, outcome.out.count("saved\n")) == (129, 2)
    assert "error: " not in outcome.err
    until_dead(*pids(program))


def test_a_signal_that_comes_twice_is_the_same_one_and_a_stopped_task_hears_it(local):
    program = local(SAVES)
    program.until(says(program, "ready", 2))
    os.kill(pids(program)[1], signal.SIGSTOP)
    program.send(signal.SIGINT)
    program.send(signal.SIGTERM)  # another: of one kind the kernel keeps one
    outcome = program.wait()
    assert outcome.code in (130, 143)  # by the one that is heard first
    assert outcome.out.count("saved\n") == 2
    assert "error: " not in outcome.err
    until_dead(*pids(program))


def test_after_the_grace_all_are_killed(local):
    program = local(IGNORES, "--grace_seconds=0.2")
    program.until(says(program, "ready", 2))
    program.send(signal.SIGTERM)
    outcome = program.wait()
    assert outcome.code == 143
    assert outcome.err.count("has not ended in time; it is killed") == 2
    until_dead(*pids(program))


def test_a_second_signal_kills_at_once(local):
    program = local(IGNORES)
    program.until(says(program, "ready", 2))
    program.send(signal.SIGINT)
    program.until(says(program, "SIGINT: the tasks have 30 s to save and end; a second one kills them"))
    time.sleep(1.5 * SAME_REQUEST_SECONDS)
    program.send(signal.SIGINT)
    assert program.wait().code == 130
    until_dead(*pids(program))


@pytest.mark.thorough
def test_a_signal_in_the_pause_before_a_restart_ends_it(local):
    program = local("sys.exit(1)")
    program.until(says(program, "start again in 4 s"))
    started = len(pids(program))
    program.send(signal.SIGTERM)
    assert program.wait().code == 143
    assert len(pids(program)) == started


def test_what_fails_while_it_is_to_save_is_said(local):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('disk full'))\nprint('ready')\ntime.sleep(900)"
    program = local(script, "--workers=1")
    program.until(says(program, "ready"))
    program.send(signal.SIGTERM)
    outcome = program.wait()
    assert outcome.code == 143
    assert outcome.error == "worker 0 ended with exit code 1, while it was to save and end; its last lines:"
    assert outcome.err.endswith("\n    disk full\n")


def test_a_terminals_ctrl_c_comes_once_and_prefixes_have_colours(tmp_path):
    (tmp_path / "task.py").write_text(TASK + SAVES)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.environ.pop("NO_COLOR", None)
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-m", "crankshaft", "local", "--", str(tmp_path / "task.py")])
    seen, code = b"", None
    try:
        while seen.count(b"ready") < 2:
            seen += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        try:
            while data := os.read(terminal, 4096):
                seen += data
        except OSError:  # the other side is closed
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
    assert code == 130
    assert seen.count(b"saving for SIGINT") == seen.count(b"saved\r\n") == 2
    assert b"\x1b[36m[worker 0]\x1b[0m ready" in seen
    assert b"\x1b[33m[worker 1]\x1b[0m ready" in seen


# One child in the task's group, one that has left it, as a daemon does, and one that has no environment either.
WITH_CHILDREN = """
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"]
for how in ({}, {"start_new_session": True}, {"start_new_session": True, "env": {}}):
    print("child", subprocess.Popen(sleep, **how).pid)
print("ready")
"""

FORKED = "# tensorflow"  # a script that names it is forked from a process that has imported it


def children(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"child (\d+)", text)]


# Daemons without parent, session and environment, and one that is never the same process for long.
WITH_ESCAPED = """
sleep = [sys.executable, "-ISc", "import time; time.sleep(900)", str(here)]
for _ in range(20):
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve(sleep[0], sleep, {})
if not os.fork():
    for _ in range(50_000):
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(0.01)
    os._exit(0)
print("ready")
time.sleep(900)
"""


def children_of(pid: int) -> list[str]:
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def started_by(folder: pathlib.Path) -> set[int]:
    """All live processes whose command names the folder, but the supervisor and what it has forked."""
    found = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        command = proc(pid, "cmdline")
        if str(folder) in command and "\0local\0" not in command and is_alive(pid):
            found.add(pid)
    return found


def reapers(program) -> set[int]:
    return {int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids(program)}


def test_kill_9_of_the_supervisor_leaves_nothing(local):
    program = local(IGNORES.replace("print", WITH_CHILDREN + "print") + FORKED)
    program.until(says(program, "ready", 4))
    tasks = pids(program)
    assert len(tasks) == 2
    assert len(children(program.out)) == 6
    assert all(is_alive(pid) for pid in tasks + children(program.out))
    program.process.kill()
    until_dead(*tasks, *children(program.out))


def test_kill_9_of_the_supervisor_leaves_nothing_that_has_escaped_just_before(local, tmp_path):
    program = local(WITH_ESCAPED)
    program.until(says(program, "ready", 2))
    program.until(lambda: len(started_by(tmp_path)) >= 2 * 21)
    program.process.kill()
    wait_until(lambda: not started_by(tmp_path), shows=lambda: started_by(tmp_path))


@pytest.mark.thorough
def test_what_has_escaped_ends_with_its_task_and_with_a_reaper_that_is_killed(local, tmp_path):
    program = local(WITH_ESCAPED + FORKED, "--max_restarts=0")
    program.until(says(program, "ready", 2))
    os.kill(min(reapers(program)), signal.SIGKILL)
    outcome = program.wait()
    assert "was killed by SIGKILL; max_restarts=0, so it is not restarted" in outcome.error
    assert not started_by(tmp_path)


def test_tasks_die_with_the_supervisor_although_their_reapers_are_killed_first(local):
    program = local(IGNORES + FORKED)
    program.until(says(program, "ready", 2))
    os.kill(program.process.pid, signal.SIGSTOP)
    for reaper in reapers(program):
        os.kill(reaper, signal.SIGKILL)
    program.process.kill()
    until_dead(*pids(program))


@pytest.mark.thorough
def test_orphans_that_end_by_themselves_leave_no_zombies(local):
    script = """
for _ in range(3):  # each orphaned at once
    subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '0.2'], env={})"], check=True)
time.sleep(1)
subprocess.run(["true"])
print("ready", flush=True)
time.sleep(900)
"""
    program = local(script, "--workers=1")
    program.until(says(program, "ready"))
    for parent in (program.process.pid, *reapers(program)):
        program.until(lambda parent=parent: len(children_of(parent)) == 1)


def test_what_tasks_have_started_ends_with_them(local):
    outcome = local(WITH_CHILDREN).wait().ok()
    assert len(children(outcome.out)) == 6
    assert not [pid for pid in children(outcome.out) if is_alive(pid)]
