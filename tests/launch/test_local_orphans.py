"""`crankshaft local` when it is killed, or a task ends: nothing that tasks have started is left. Real processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal

from tests.launch.local_tasks import IGNORES, is_alive, pids, says, until_dead
from tests.waiting import wait_until

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
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if os.fsencode(folder) in command and b"\0local\0" not in command and is_alive(int(path.parent.name)):
                found.add(int(path.parent.name))
    return found


def keepers(program) -> set[int]:
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


def test_what_has_escaped_ends_with_its_task_and_with_a_keeper_that_is_killed(local, tmp_path):
    program = local(WITH_ESCAPED + FORKED, "--max_restarts=0")
    program.until(says(program, "ready", 2))
    os.kill(min(keepers(program)), signal.SIGKILL)
    outcome = program.wait()
    assert "was killed by SIGKILL; max_restarts=0, so it is not restarted" in outcome.error
    assert not started_by(tmp_path)


def test_tasks_die_with_the_supervisor_although_their_keepers_are_killed_first(local):
    program = local(IGNORES + FORKED)
    program.until(says(program, "ready", 2))
    os.kill(program.process.pid, signal.SIGSTOP)
    for keeper in keepers(program):
        os.kill(keeper, signal.SIGKILL)
    program.process.kill()
    until_dead(*pids(program))


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
    for parent in (program.process.pid, *keepers(program)):
        program.until(lambda parent=parent: len(children_of(parent)) == 1)


def test_what_tasks_have_started_ends_with_them(local):
    outcome = local(WITH_CHILDREN).wait().ok()
    assert len(children(outcome.out)) == 6
    assert not [pid for pid in children(outcome.out) if is_alive(pid)]
