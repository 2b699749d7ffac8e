"""`python -m launch.local` as a user starts it, with small scripts for tasks: real processes, signals, pipes and a
terminal. TensorFlow can't be imported here, so nothing needs it."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from launch import shares
from launch.output import Lines
from launch.restarts import Ending, Synchronous

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOON = 15.0  # seconds; what is awaited takes a tenth of one on an idle machine

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
"""


@pytest.fixture
def local(crank, tmp_path):
    """`local(script, *flags)` starts a cluster whose tasks run a script of these lines; it ends with the test."""
    script = tmp_path / "task.py"

    def start(lines: str, *flags: str, own: tuple = ()):
        script.write_text(TASK + lines)
        return crank.start("launch.local", *flags, "--", script, *own, script="-m", tensorflow=False)

    return start


def pids(program) -> list[int]:
    """Of the tasks that were started, in order."""
    return [int(pid) for pid in re.findall(r"^\[local\] worker \d+ is process (\d+)", program.err, re.MULTILINE)]


def is_alive(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_dead_soon(*processes: int, seconds: float = SOON) -> None:
    end = time.monotonic() + seconds
    while left := [pid for pid in processes if is_alive(pid)]:
        assert time.monotonic() < end, f"still alive: {left}"
        time.sleep(0.01)


def lines_of(text: str, task: str) -> list[str]:
    return [line.removeprefix(f"[{task}] ") for line in text.splitlines() if line.startswith(f"[{task}] ")]


def says(program, text: str, times: int = 1):
    return lambda: (program.out + program.err).count(text) >= times


# --- what a task is given


def test_each_task_is_told_who_it_is_and_where_all_are(local):
    script = "print(json.dumps([config, sys.argv[1:], os.environ['PYTHONUNBUFFERED']]))"
    outcome = local(script, "--workers=3", own=("--lr", "0.1")).wait().ok()
    told = [json.loads(lines_of(outcome.out, f"worker {index}")[0]) for index in range(3)]
    addresses = told[0][0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for index, (config, arguments, unbuffered) in enumerate(told):
        assert config == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        assert arguments == ["--strategy=multi_worker", "--lr", "0.1"]
        assert unbuffered == "1"


SHOW_SHARE = (
    "print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ['TF_NUM_INTRAOP_THREADS'],"
    " os.environ['OMP_NUM_THREADS']]))"
)


def shown_shares(outcome, workers: int) -> list:
    return [json.loads(lines_of(outcome.out, f"worker {index}")[0]) for index in range(workers)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two tasks of one core each need two cores")
def test_tasks_get_cores_of_their_own_and_as_many_threads(local):
    outcome = local(SHOW_SHARE, "--workers=2").wait().ok()
    (some, *threads), (others, *_) = shown_shares(outcome, 2)
    assert len(some) == len(others) == len(os.sched_getaffinity(0)) // 2
    assert not set(some) & set(others)
    assert threads == [str(len(some))] * 2


def test_more_tasks_than_cores_share_them_all(local):
    usable = sorted(os.sched_getaffinity(0))
    outcome = local(SHOW_SHARE, f"--workers={len(usable) + 1}").wait().ok()
    assert shown_shares(outcome, len(usable) + 1) == [[usable, "1", "1"]] * (len(usable) + 1)


def test_ports_are_different_free_and_not_for_outgoing_connections():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = shares.free_ports(50)
        assert taken.getsockname()[1] not in ports
    assert len(set(ports)) == 50
    first, last = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ports if first <= port <= last]


def test_cores_are_divided_evenly_or_shared():
    assert shares.divide_cores([0, 4, 1, 5, 2], 2, 2) == [[0, 4], [1, 5]]
    assert shares.divide_cores([0, 1], 3, 1) == [None, None, None]


# --- what it prints


def test_lines_are_prefixed_whole_and_in_order_on_the_stream_they_were_for(local):
    script = """
for i in range(300):
    print(index, i)
    print("error", index, i, file=sys.stderr)
"""
    outcome = local(script).wait().ok()
    for index in (0, 1):
        assert lines_of(outcome.out, f"worker {index}") == [f"{index} {i}" for i in range(300)]
        assert lines_of(outcome.err, f"worker {index}") == [f"error {index} {i}" for i in range(300)]
    assert len(outcome.out.splitlines()) == 600


def test_bytes_that_are_no_text_long_lines_and_no_line_end_come_through(tmp_path):
    script = r"sys.stdout.buffer.write(b'\xff\xfe caf\xe9\n\n' + b'x' * 3_000_000 + b'\nlast, without end')"
    (tmp_path / "task.py").write_text(TASK + script)
    command = [sys.executable, "-m", "launch.local", "--workers=1", "--", str(tmp_path / "task.py")]
    shown = subprocess.run(
        [*command, f"--run_dir={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    assert shown.startswith(b"[worker 0] \xff\xfe caf\xe9\n[worker 0] \n[worker 0] xxx")
    assert shown.endswith(b"\n[worker 0] last, without end\n")
    assert shown.count(b"x") == 3_000_000
    assert b"\n\xff\xfe caf\xe9\n\nxxx" in (tmp_path / "run/logs/worker-0.log").read_bytes()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_they_are_cut(size):
    data = b"one\r\n\r\ntwo\n 10%\r 20%\r 30%\n\nend\r"
    lines = Lines()
    found = [line for start in range(0, len(data), size) for line in lines.feed(data[start : start + size])]
    assert found + lines.end() == [b"one", b"", b"two", b" 10%", b" 20%", b" 30%", b"", b"end"]


def test_a_log_file_a_task_grows_over_restarts(local, tmp_path):
    run_dir = tmp_path / "run"
    script = """
n = started()
print("start", n)
print("to stderr", file=sys.stderr)
sys.exit(3 if n == 1 and index == 1 else 0)
"""
    local(script, own=("--run_dir", run_dir)).wait().ok()
    for index in (0, 1):
        log = (run_dir / f"logs/worker-{index}.log").read_text()
        assert len(re.findall(rf"^=== .* worker {index} starts as process \d+ ===$", log, re.MULTILINE)) == 2
        assert log.index("start 1") < log.index("start 2")
        assert log.count("to stderr") == 2


def test_logs_that_cannot_be_written_do_not_stop_the_job(local, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = local("print('done')", own=(f"--run_dir={tmp_path / 'file'}",)).wait().ok()
    assert outcome.out.count("done") == 2
    assert "[local] no logs of worker 0: " in outcome.err


def test_a_reader_who_has_gone_does_not_end_the_job(local, tmp_path):
    command = [sys.executable, "-m", "launch.local", "--workers=1", "--", str(tmp_path / "task.py")]
    (tmp_path / "task.py").write_text(TASK + "print('x' * 200_000); (here / 'done').touch()")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    process.stdout.close()
    assert process.wait(timeout=SOON) == 0
    assert (tmp_path / "done").exists()


def test_a_reader_who_does_not_read_holds_up_no_signal(tmp_path):
    (tmp_path / "task.py").write_text(TASK + "print(os.getpid(), file=sys.stderr)\nwhile True: print('x' * 1000)")
    command = [sys.executable, "-m", "launch.local", "--workers=1", "--", str(tmp_path / "task.py")]
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, cwd=ROOT)
    try:
        time.sleep(1.0)  # for the pipes to be full
        process.terminate()
        assert process.wait(timeout=SOON) == 143
    finally:
        process.kill()
        process.stdout.close()
    assert_dead_soon(*map(int, re.findall(r"^\[worker 0\] (\d+)", (tmp_path / "err").read_text(), re.MULTILINE)))


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
    program = local("print('here', index)\ntime.sleep(60)", "--max_restarts=0")
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


def test_a_death_is_noticed_at_once(local):
    program = local("time.sleep(60)", "--max_restarts=0", "--workers=1")
    program.until(lambda: pids(program))
    os.kill(pids(program)[0], signal.SIGKILL)
    killed = time.monotonic()
    program.until(says(program, "was killed by SIGKILL"), seconds=5)
    assert time.monotonic() - killed < 1  # a hundredth on an idle machine
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
time.sleep(60)
"""
    program = local(script, "--grace_seconds=0.3")
    outcome = program.wait()
    assert outcome.code == 2
    assert "worker 1 ended with exit code 2: a mistake in what was asked, so it is not restarted" in outcome.error
    assert outcome.err.endswith("\n    error: --model=cmm is unknown\n")
    assert "worker 0 has not ended in time; it is killed" in outcome.err
    assert_dead_soon(*pids(program))


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


def test_failures_outside_the_window_are_forgotten_and_pauses_grow():
    now = [0.0]
    rule = Synchronous(2, 100, 30, clock=lambda: now[0])
    failed = [Ending("worker 1", -9), Ending("worker 0", 1)]
    assert [rule.settle(failed).pause_seconds for _ in range(2)] == [1, 2]
    now[0] = 101
    assert (rule.settle(failed).exit_code, rule.settle(failed).pause_seconds) == (None, 2)
    assert rule.settle(failed).exit_code == 1


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
time.sleep(60)
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
    assert_dead_soon(*pids(program))


def test_after_the_grace_all_are_killed(local):
    program = local(IGNORES, "--grace_seconds=0.2")
    program.until(says(program, "ready", 2))
    program.send(signal.SIGTERM)
    outcome = program.wait()
    assert outcome.code == 143
    assert outcome.err.count("has not ended in time; it is killed") == 2
    assert_dead_soon(*pids(program))


def test_a_second_signal_kills_at_once(local):
    program = local(IGNORES)
    program.until(says(program, "ready", 2))
    program.send(signal.SIGINT)
    program.until(says(program, "SIGINT: the tasks have 30 s to save and end; a second one kills them"))
    program.send(signal.SIGINT)
    assert program.wait(SOON).code == 130
    assert_dead_soon(*pids(program))


def test_a_stopped_task_hears_it_too(local):
    program = local(SAVES)
    program.until(says(program, "ready", 2))
    os.kill(pids(program)[1], signal.SIGSTOP)
    program.send(signal.SIGTERM)
    outcome = program.wait(SOON)
    assert (outcome.code, outcome.out.count("saved\n")) == (143, 2)


def test_a_signal_in_the_pause_before_a_restart_ends_it(local):
    program = local("sys.exit(1)")
    program.until(says(program, "start again in 4 s"))
    program.send(signal.SIGTERM)
    assert program.wait(3).code == 143


def test_what_fails_while_it_is_to_save_is_said(local):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('disk full'))\nprint('ready')\ntime.sleep(60)"
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
        os.execv(sys.executable, [sys.executable, "-m", "launch.local", "--", str(tmp_path / "task.py")])
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

# One child in the task's group, one that has left it, as a daemon does.
WITH_CHILDREN = """
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
for apart in (False, True):
    print("child", subprocess.Popen(sleep, start_new_session=apart).pid)
print("ready")
"""


def children(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"child (\d+)", text)]


def test_kill_9_of_the_supervisor_leaves_nothing(local):
    program = local(IGNORES.replace("print", WITH_CHILDREN + "print"))
    program.until(says(program, "ready", 4))
    tasks = pids(program)
    assert len(tasks) == 2
    assert len(children(program.out)) == 4
    assert all(is_alive(pid) for pid in tasks + children(program.out))
    program.process.kill()
    assert_dead_soon(*tasks, *children(program.out), seconds=5)


def test_tasks_die_with_the_supervisor_although_its_guard_is_killed_first(local):
    program = local(IGNORES)
    program.until(says(program, "ready", 2))
    tasks, supervisor = pids(program), program.process.pid
    (guard,) = set(map(int, pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())) - {
        *tasks
    }
    os.kill(guard, signal.SIGKILL)
    program.process.kill()
    assert_dead_soon(*tasks, seconds=5)


def test_what_tasks_have_started_ends_with_them(local):
    outcome = local(WITH_CHILDREN).wait(SOON).ok()
    assert len(children(outcome.out)) == 4
    assert not [pid for pid in children(outcome.out) if is_alive(pid)]


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "what the workers run is missing; write it after --, e.g. python -m launch.local -- --model=mlp "),
        (["--workers=2", "--"], "what the workers run is missing; "),
        (["--workers=0", "--", "--model=mlp"], "--workers=0 can't be used: it takes an integer from 1 to 1000; "),
        (["--workers=two", "--", "--model=mlp"], "--workers=two can't be used: it takes an integer from 1 to 1000; "),
        (["--max_restarts=-1", "--", "--model=mlp"], "--max_restarts=-1 can't be used: it takes an integer from 0 on"),
        (["--grace_seconds=nan", "--", "--model=mlp"], "--grace_seconds=nan is not finite; "),
        (["--wrkers=2", "--", "--model=mlp"], "--wrkers is unknown; did you mean workers?"),
        (["--model=mlp"], "--model is a flag of the tasks; write it after --, see --help"),
        (["two", "--", "--model=mlp"], "'two' is no flag; "),
        (["--", "missing.py"], "the script missing.py does not exist; "),
        (["--", "train"], "'train' is neither a flag of launch.train nor a script; "),
        (["--cores_per_task=99999", "--", "--model=mlp"], "--cores_per_task=99999 is more than the "),
        (["--", "--strategy=mirrored"], "--strategy=mirrored is not for workers; "),
    ],
)
def test_a_mistake_is_one_line(crank, arguments, error):
    outcome = crank("launch.local", *arguments, script="-m", tensorflow=False)
    assert outcome.code == 2
    assert outcome.error.startswith(error)
    assert outcome.seconds < 5  # a tenth of one on an idle machine


def test_help_names_every_flag(crank):
    outcome = crank("launch.local", "--help", script="-m", tensorflow=False).ok()
    for name in ("workers", "cores_per_task", "max_restarts", "restart_window_seconds", "grace_seconds"):
        assert f"\n  --{name}=...\n" in outcome.out


def test_flags_alone_are_those_of_launch_train(crank):
    outcome = crank("launch.local", "--", "--modle=mlp", script="-m", tensorflow=False)
    assert outcome.code == 2
    assert "\n    error: --modle is unknown; did you mean " in outcome.err
