"""`crankshaft local` when tasks fail, when it is told to end, and when it is killed: who is named, what starts
again, and that nothing is left. Small scripts for tasks: real processes, signals, pipes and a terminal."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import re
import signal
import sys
import time

import pytest

from crankshaft.launch.cluster.restarts import Ending, Synchronous
from crankshaft.launch.errors import EXIT_SLOWER
from crankshaft.launch.host.process import SAME_REQUEST_SECONDS
from tests.launch.local_tasks import ROOT, TASK, is_alive, lines_of, pids, says, until_dead
from tests.waiting import wait_until

# --- failures and restarts


def test_a_crash_restarts_all_at_new_ports(local):
    script = """
n = started()
print(config["cluster"])
if n == 1:
    if index == 1:
        sys.exit("it broke")
    time.sleep(0.3)  # sees it, and leaves
    sys.exit(1)
"""
    outcome = local(script).wait().ok()
    assert "[local] worker 1 ended with exit code 1; all tasks start again in 1 s (restart 1 of 5" in outcome.err
    first, second = dict.fromkeys(lines_of(outcome.out, "worker 0"))
    assert first != second


def test_a_kill_is_named_and_not_what_followed_from_it(local):
    program = local("print('here', index)\ntime.sleep(900)", "--max_restarts=0")
    program.until(says(program, "here", 2))
    first, second = pids(program)
    os.kill(second, signal.SIGKILL)
    program.until(says(program, "worker 1 was killed by SIGKILL"))
    os.kill(first, signal.SIGABRT)
    outcome = program.wait()
    assert outcome.code == 1
    assert outcome.error == (
        "worker 1 was killed by SIGKILL; --max_restarts=0, so it is not restarted; its last lines:"
    )
    assert outcome.err.endswith(":\n    here 1\n")


def test_a_task_that_printed_nothing_is_said_to_have(local):
    program = local("time.sleep(3600)", "--max_restarts=0", "--workers=1")
    program.until(lambda: pids(program))
    os.kill(pids(program)[0], signal.SIGKILL)
    assert program.wait().error.endswith("it printed nothing")


def test_when_restarts_are_used_up_the_failure_is_explained(local, tmp_path):
    script = """
print("start", started())
if index == 1:
    time.sleep(0.5)  # sees it, and leaves
    sys.exit(1)
sys.exit("step failed: \\x1b[31mnot finite\\x1b[0m")
"""
    outcome = local(script, "--max_restarts=1", "--restart_window_seconds=100", own=(f"--run_dir={tmp_path}",)).wait()
    assert outcome.code == 1
    assert outcome.error == (
        "worker 0 ended with exit code 1; it is failure 2 within 100 s, and --max_restarts=1 restarts are used up; "
        f"its last lines ({tmp_path}/logs/worker-0.log):"
    )
    assert outcome.err.endswith(":\n    start 2\n    step failed: not finite\n")
    assert outcome.err.count(" is process ") == 4


def test_a_mistake_is_not_restarted_and_who_hangs_is_killed(local):
    script = """
if index == 1:
    print("error: --model=cmm is unknown", file=sys.stderr)
    sys.exit(2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(900)
"""
    program = local(script, "--grace_seconds=0.3")
    outcome = program.wait()
    assert outcome.code == 2
    assert "worker 1 ended with exit code 2: a mistake in what was asked, so it is not restarted" in outcome.error
    assert outcome.err.endswith("\n    error: --model=cmm is unknown\n")
    assert "worker 0 has not ended in time; it is killed" in outcome.err
    until_dead(*pids(program))


@pytest.mark.parametrize("line", ["import nowhere_to_be_found", "from os import nowhere", "def broken(:"])
def test_a_script_that_cannot_begin_is_not_restarted(local, line):
    outcome = local(f"print('begins', flush=True)\n{line}").wait()
    assert outcome.code == 2
    assert "ended with exit code 1: its script can't be run as it stands, so it is not restarted" in outcome.err
    assert outcome.err.count(" is process ") == 2


def test_a_worker_whose_script_cannot_begin_is_not_started_again_by_itself(local):
    wait = "while config['task']['type'] != 'worker': time.sleep(0.01)"
    outcome = local(f"{wait}\nimport nowhere_to_be_found", "--workers=1", "--ps=1", "--grace_seconds=1").wait()
    assert outcome.code == 2
    assert "worker 0 ended with exit code 1: its script can't be run as it stands" in outcome.err


def test_what_a_script_prints_of_an_import_before_it_fails_is_no_reason():
    lines = ("ImportError: no such thing, going on without", "ValueError: another")
    assert Ending("worker 0", 1, lines).mistake is None
    assert Ending("worker 0", -9, ("ImportError: killed as it said so",)).mistake is None


def test_a_preempted_worker_restarts_all_at_once_and_is_no_failure(local, tmp_path):
    script = """
n = started()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("ready", n)
for _ in range(6000):
    time.sleep(0.01)
    if n > 1: sys.exit(0)
    if (here / "stop").exists(): sys.exit(143)
"""
    program = local(script, "--max_restarts=0")
    program.until(says(program, "ready", 2))
    os.kill(pids(program)[1], signal.SIGTERM)
    program.until(says(program, "worker 1 ended with exit code 143; 1 still running"))
    (tmp_path / "stop").touch()
    outcome = program.wait().ok()
    assert "worker 1 ended with exit code 143, preempted; all tasks start again at once" in outcome.err


def test_who_ends_well_waits_for_the_others(local):
    outcome = local("time.sleep(index)\nprint('bye')").wait().ok()
    assert outcome.out.count("bye") == 2
    assert "[local] worker 0 ended with exit code 0; 1 still running" in outcome.err


def test_a_scripts_own_exit_code_is_not_taken_for_a_slow_benchmark():
    slower = [Ending("worker 0", EXIT_SLOWER)]
    assert "--fail_below" in Synchronous(2, 100, 30, compares=True).settle(slower).message
    assert Synchronous(2, 100, 30).settle(slower).exit_code is None


def test_failures_outside_the_window_are_forgotten_and_pauses_grow():
    now = [0.0]
    rule = Synchronous(2, 100, 30, clock=lambda: now[0])
    failed = [Ending("worker 1", -9), Ending("worker 0", 1)]
    assert [rule.settle(failed).pause_seconds for _ in range(2)] == [1, 2]
    now[0] = 101
    assert (rule.settle(failed).exit_code, rule.settle(failed).pause_seconds) == (None, 2)
    assert rule.settle(failed).exit_code == 1


def test_an_evaluator_that_is_not_started_again_is_told_of(local, tmp_path):
    script = """
kind = config["task"]["type"]
if kind == "evaluator":
    sys.exit(1)
while kind != "chief" or not (here / "stop").exists():
    time.sleep(0.01)
"""
    program = local(script, "--workers=1", "--ps=1", "--evaluator", own=(f"--run_dir={tmp_path}/run",))
    program.until(says(program, "evaluator ended with exit code 1; it starts again in 4 s"))
    (tmp_path / "stop").touch()
    outcome = program.wait().ok()
    assert outcome.err.endswith("the last checkpoint is not evaluated; --mode=eval evaluates it\n")


def test_servers_that_are_told_to_end_have_not_failed(local, tmp_path):
    script = """
if config["task"]["type"] != "chief":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("ready")
    time.sleep(900)
while not (here / "stop").exists():
    time.sleep(0.01)
"""
    program = local(script, "--workers=1", "--ps=1")
    program.until(says(program, "ready", 2))
    (tmp_path / "stop").touch()
    outcome = program.wait().ok()
    assert "[local] chief ended with exit code 0; 2 still running" in outcome.err
    for task in ("worker 0", "ps 0"):
        assert f"[local] {task} has ended, as it was told to; " in outcome.err
    assert "143" not in outcome.err


def test_preemptions_without_end_do_not_spin():
    rule = Synchronous(0, 100, 30, clock=lambda: 0.0)
    settled = [rule.settle([Ending("worker 0", 0), Ending("worker 1", 143)]) for _ in range(4)]
    assert [each.exit_code for each in settled] == [None] * 4
    assert [each.pause_seconds for each in settled] == [0, 1, 2, 4]


# --- signals to the supervisor

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
IGNORES = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
time.sleep(900)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_reaches_all_who_save_and_end(local, number, code):
    program = local(SAVES)
    program.until(says(program, "ready", 2))
    program.send(number)
    outcome = program.wait()
    assert outcome.code == code
    assert outcome.out.count("saved\n") == 2
    assert "error: " not in outcome.err
    until_dead(*pids(program))


def test_a_signal_that_comes_twice_at_once_is_the_same_one(local):
    program = local(SAVES)
    program.until(says(program, "ready", 2))
    program.send(signal.SIGTERM)
    program.until(says(program, "SIGTERM: the tasks have 30 s"))
    program.send(signal.SIGTERM)
    outcome = program.wait()
    assert (outcome.code, outcome.out.count("saved\n")) == (143, 2)


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


def test_a_stopped_task_hears_it_too(local):
    program = local(SAVES)
    program.until(says(program, "ready", 2))
    os.kill(pids(program)[1], signal.SIGSTOP)
    program.send(signal.SIGTERM)
    outcome = program.wait()
    assert (outcome.code, outcome.out.count("saved\n")) == (143, 2)


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


# --- nothing is left

# One child in the task's group, one that has left it, as a daemon does, and one that has no environment either.
WITH_CHILDREN = """
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"]
for how in ({}, {"start_new_session": True}, {"start_new_session": True, "env": {}}):
    print("child", subprocess.Popen(sleep, **how).pid)
print("ready")
"""


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
    program = local(IGNORES.replace("print", WITH_CHILDREN + "print"))
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
    program = local(WITH_ESCAPED, "--max_restarts=0")
    program.until(says(program, "ready", 2))
    os.kill(min(keepers(program)), signal.SIGKILL)
    outcome = program.wait()
    assert "was killed by SIGKILL; --max_restarts=0, so it is not restarted" in outcome.error
    assert not started_by(tmp_path)


def test_tasks_die_with_the_supervisor_although_their_keepers_are_killed_first(local):
    program = local(IGNORES)
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
