"""`crankshaft local` when tasks fail: who is named, and what starts again. Small scripts for tasks: real processes."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback

import pytest

from crankshaft.engine.errors import NonfiniteError
from crankshaft.engine.record.events import record_restart
from crankshaft.input.checks import InputError
from crankshaft.parts.launchers.restarts import Servers, Synchronous, TaskExit, recorded_restarts
from crankshaft.runner.failures import EXIT_DIVERGED, EXIT_PORT_TAKEN, EXIT_SLOWER, RunError
from crankshaft.runner.host.locks import RunDirInUse
from tests.launch.local_tasks import lines_of, pids, says, until_dead
from tests.processes import assert_says


def test_a_crash_restarts_all_at_new_ports_and_each_tasks_log_grows(local, tmp_path):
    script = """
n = started()
print("start", n)
print("to stderr", file=sys.stderr)
print(config["cluster"])
if n == 1:
    if index == 1:
        leave("it broke")
    outlive()  # sees it, and leaves
    sys.exit(1)
"""
    outcome = local(script, own=("--run_dir", tmp_path)).wait().ok()
    assert "[local] worker 1 ended with exit code 1; all tasks start again at once (restart 1 of 5" in outcome.err
    first, second = (line for line in lines_of(outcome.out, "worker 0") if line.startswith("{"))
    assert first != second
    for index in (0, 1):
        log = (tmp_path / f"logs/worker-{index}.log").read_text()
        assert len(re.findall(rf"^=== .* worker {index} starts as process \d+ ===$", log, re.MULTILINE)) == 2
        assert log.index("start 1") < log.index("start 2")
        assert log.count("to stderr") == 2


def test_a_kill_is_named_and_not_what_followed_from_it(local):
    program = local("print('here', index)\ntime.sleep(900)", "--max_restarts=0")
    program.until(says(program, "here", 2))
    first, second = pids(program)
    os.kill(second, signal.SIGKILL)
    program.until(says(program, "worker 1 was killed by SIGKILL"))
    os.kill(first, signal.SIGABRT)
    outcome = program.wait()
    assert outcome.code == 1
    assert outcome.error == ("worker 1 was killed by SIGKILL; max_restarts=0, so it is not restarted; its last lines:")
    assert outcome.err.endswith(":\n    here 1\n")


def test_a_task_that_stays_stopped_is_killed(local):
    own = ("--step_timeout_seconds=0.1",)
    program = local("print('here')\ntime.sleep(900)", "--max_restarts=0", "--workers=1", own=own)
    program.until(says(program, "here", 1))
    os.kill(pids(program)[0], signal.SIGSTOP)
    outcome = program.wait()
    assert outcome.code == 1
    assert outcome.error.startswith("worker 0 was stopped, did not continue in time, and was killed; max_restarts=0")
    until_dead(*pids(program))


def test_a_task_that_printed_nothing_is_said_to_have(local):
    program = local("time.sleep(3600)", "--max_restarts=0", "--workers=1")
    program.until(lambda: pids(program))
    os.kill(pids(program)[0], signal.SIGKILL)
    assert program.wait().error.endswith("it printed nothing")


def test_when_restarts_are_used_up_the_failure_is_explained(local, tmp_path):
    script = """
print("start", n := started())
if index == 1:
    outlive(n)  # sees it, and leaves
    sys.exit(1)
leave("step failed: \\x1b[31mnot finite\\x1b[0m", n)
"""
    outcome = local(script, "--max_restarts=1", own=(f"--run_dir={tmp_path}",)).wait()
    assert outcome.code == 1
    assert outcome.error == (
        "worker 0 ended with exit code 1; it is failure 2 within 600 s, and max_restarts=1 restarts are used up; "
        f"its last lines ({tmp_path}/logs/worker-0.log):"
    )
    assert outcome.err.endswith(":\n    start 2\n    step failed: not finite\n")
    assert outcome.err.count(" is process ") == 4


@pytest.mark.thorough
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
    assert (
        "worker 1 ended with exit code 2: a mistake in its flags, script or data, so it is not restarted"
        in outcome.mistake
    )
    assert outcome.err.endswith("\n    error: --model=cmm is unknown\n")
    assert "worker 0 has not ended in time; it is killed" in outcome.err
    until_dead(*pids(program))


def test_a_run_that_diverged_is_not_restarted_whoever_ends_first():
    """All find it; one may only see its peer gone."""
    lost, diverged = TaskExit("worker 1", 1), TaskExit("worker 0", EXIT_DIVERGED)
    for rule, task in ((Synchronous, "worker 0"), (Servers, "chief")):
        endings = [dataclasses.replace(each, task=each.task.replace("worker 0", task)) for each in (lost, diverged)]
        settled = rule(5, 600.0, 30.0).decide(endings)
        assert settled.exit_code == EXIT_DIVERGED
        assert (
            settled.message
            == f"{task} ended with exit code 65: the run has diverged, and would again, so it is not restarted"
        )
    assert Servers(5, 600.0, 30.0).restart_alone(diverged) is None


@pytest.mark.parametrize("line", ["import nowhere_to_be_found", "from os import nowhere", "def broken(:"])
def test_a_script_that_cannot_begin_is_not_restarted(line):
    """What Python prints of it last is the reason, and nothing that a script prints before it fails otherwise."""
    said = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True).stderr.splitlines()
    assert TaskExit("worker 0", 1, tuple(said)).mistake == "its script can't be run as it stands"
    assert TaskExit("worker 0", 1, (*said, "ValueError: another")).mistake is None
    assert TaskExit("worker 0", -9, tuple(said)).mistake is None  # killed as it said so


def test_a_script_whose_absl_does_not_know_a_flag_is_not_restarted():
    code = "from absl import app; app.run(print)"
    done = subprocess.run([sys.executable, "-c", code, "--strategy=multi_worker"], capture_output=True, text=True)
    said = TaskExit("worker 0", done.returncode, tuple(done.stderr.splitlines()))
    assert said.mistake.startswith("absl's app.run in its script does not know the flag strategy (call crankshaft.main")


@pytest.mark.thorough
def test_an_error_that_a_script_leaves_to_python_is_what_it_is_with_main(local):
    """A script that does not call `crankshaft.main` ends with 1, and the last line of its report names the error."""
    lines = """
from crankshaft.engine.errors import UsageError
raise UsageError("learning_rate=-1 is not positive")
"""
    outcome = local(lines).wait()
    assert outcome.code == 2
    assert "ended with exit code 1: a mistake in its flags, script or data, so it is not restarted" in outcome.err
    assert outcome.err.endswith("crankshaft.engine.errors.UsageError: learning_rate=-1 is not positive\n")
    for kind, code in ((InputError, 2), (RunDirInUse, 2), (NonfiniteError, EXIT_DIVERGED), (RunError, None)):
        report = traceback.format_exception_only(kind("this failed"))
        settled = Synchronous(5, 600.0, 30.0).decide([TaskExit("worker 0", 1, (*map(str.rstrip, report),))])
        assert settled.exit_code == code
    assert TaskExit("worker 0", 1, (*map(str.rstrip, report), "MemoryError")).mistake is None


_REFUSED = "F0000 00:00:1795785336.164458    8686 env.cc:84] Check failed: ret == 0 (11 vs. 0) Thread tf_numa_-1_Eigen "
_REFUSED += "creation via pthread_create() failed."  # TensorFlow's line, and below it the stack


def test_threads_that_ran_out_are_named_and_not_the_stack_and_nothing_starts_again(local, tmp_path):
    script = f"""
print({_REFUSED!r}, "*** Check failure stack trace: ***", sep="\\n", file=sys.stderr)
for number in range(20):
    print(f"    @     0x7f5b0cb1d3{{number}}  tsl::(anonymous namespace)::PThread::PThread()", file=sys.stderr)
os.abort()
"""
    outcome = local(script, own=(f"--run_dir={tmp_path}",)).wait()
    assert_says(outcome.mistake, "was killed by SIGABRT: threads ran out ( ... ), so it is not restarted")
    assert outcome.err.endswith(f":\n    {_REFUSED}\n")
    assert "PThread" not in outcome.err
    assert (tmp_path / "logs/worker-0.log").read_text().count("PThread::PThread()") == 20


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (-signal.SIGABRT, _REFUSED),
        (-signal.SIGABRT, "LLVM ERROR: pthread_create failed: Resource temporarily unavailable"),
        (-signal.SIGABRT, "  what():  Resource temporarily unavailable"),
        (
            -signal.SIGABRT,
            "F0000 00:00:1795786760.508695   20855 thread_manager.cc:144] Check failed: worker->created() ",
        ),
        (1, "error: RuntimeError: can't start new thread; debug=true shows the traceback; this process may have 9 "),
        (1, "RuntimeError: unable to start watchdog thread"),
        (1, "error: Resource temporarily unavailable; this process may have 9 processes and threads of this user"),
    ],
)
def test_all_ways_of_a_thread_that_is_refused_are_known(code, line):
    assert TaskExit("worker 0", code, ("before", line, "after")).mistake.startswith("threads ran out (")
    assert TaskExit("worker 0", -signal.SIGKILL, (line,)).mistake is None
    assert TaskExit("worker 0", code, ("the thread of this story",)).mistake is None


def test_a_preempted_worker_restarts_all_at_once_and_is_no_failure(local, tmp_path):
    script = """
n = started()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("ready", n)
if n > 1: sys.exit(0)
while not (here / "stop").exists(): time.sleep(0.01)
sys.exit(143)
"""
    program = local(script, "--max_restarts=0")
    program.until(says(program, "ready", 2))
    os.kill(pids(program)[1], signal.SIGTERM)
    program.until(says(program, "worker 1 ended with exit code 143; 1 still running"))
    (tmp_path / "stop").touch()
    outcome = program.wait().ok()
    assert "worker 1 ended with exit code 143, preempted; all tasks start again at once" in outcome.err


@pytest.mark.thorough
def test_a_port_that_another_program_takes_before_its_task_listens_is_chosen_again(local, tmp_path):
    """Which is no failure (`--max_restarts=0`). The program may be what started the supervisor, as here."""
    script = """
n, (_, port) = started(), config["cluster"]["worker"][index].split(":")
print("port", port, flush=True)
if n == 1:
    while index == 1 and not os.path.exists(os.path.join(os.path.dirname(__file__), "taken")):
        time.sleep(0.01)
    from crankshaft.launch import train
    train.main(argv=["crankshaft train", "--model=mlp", "--input=digits", *sys.argv[1:]])
"""
    program = local(script, "--max_restarts=0")
    program.until(says(program, "[worker 1] port "))
    with socket.create_server(("127.0.0.1", int(lines_of(program.out, "worker 1")[0].removeprefix("port ")))):
        (tmp_path / "taken").touch()
        outcome = program.wait().ok()
    again = "as another program has taken its port; all tasks start again at once with other ports"
    assert f"[local] worker 1 ended with exit code 75, {again}" in outcome.err
    first, second = (line for line in lines_of(outcome.out, "worker 1") if line.startswith("port"))
    assert first != second


@pytest.mark.thorough
@pytest.mark.parametrize("kinds", [(), ("--workers=1", "--ps=1")], ids=["workers", "servers"])
def test_a_task_that_ends_well_without_joining_the_run_is_not_awaited(local, kinds):
    """A script with `if index == 0`, which waits for the others until --cluster_timeout_seconds, and again."""
    script = """
if config["task"]["type"] == "chief" or (config["task"]["type"] == "worker" and index == WHO):
    from crankshaft.launch import train
    train.main(argv=["crankshaft train", "--model=mlp", "--input=digits", *sys.argv[1:]])
elif config["task"]["type"] == "ps":
    time.sleep(900)
"""
    outcome = local(script.replace("WHO", "9" if kinds else "0"), *kinds).wait()
    left, waits = ("worker 0", "chief") if kinds else ("worker 1", "worker 0")
    why = f"{left} ended with exit code 0 without joining the run, and {waits} waits for it; let every task call main"
    assert outcome.mistake.startswith(why)
    assert outcome.err.count(f"[local] {waits} is process ") == 1


@pytest.mark.thorough
def test_what_a_task_starts_is_not_taken_for_the_task(local):
    """An evaluation of its run, for example: it would wait for the peers instead of its parent, or take its port."""
    script = """
if index == 0:
    code = "import sys; from crankshaft.launch import train; train.main(argv=sys.argv)"
    command = [sys.executable, "-c", code, "--model=mlp", "--input=mnist", "--data_dir=/no/data"]
    for more in ([], ["--strategy=one_device"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        print(done.returncode, os.getpid(), done.stderr.strip())
"""
    first, second = lines_of(local(script).wait().ok().out, "worker 0")
    _, pid, *_ = first.split()
    assert first.startswith(f"2 {pid} error: TF_CONFIG's worker 0 is process {pid}, not this one; the task has started")
    assert "unset TF_CONFIG for this one, or give it strategy=one_device" in first
    assert "data_dir=/no/data does not exist" in second


def test_a_worker_with_servers_is_not_restarted_by_itself_at_a_port_that_is_taken():
    tasks, taken = Servers(0, 600.0, 30.0), TaskExit("worker 0", EXIT_PORT_TAKEN)
    assert tasks.restart_alone(taken) is None
    assert tasks.decide([taken, TaskExit("chief", -signal.SIGTERM)]).exit_code is None


@pytest.mark.parametrize("rule", [Synchronous, Servers])
def test_a_task_that_a_signal_killed_has_saved_nothing_and_nobody_is_waited_for(rule):
    """SIGTERM before it could be answered, while TensorFlow starts: the others have nothing to save either."""
    tasks = rule(3, 600.0, 30.0)
    killed, failed = TaskExit("ps 0", -signal.SIGTERM), TaskExit("ps 0", 1)
    assert tasks.end_timeouts(killed) == tasks.end_timeouts(failed)
    assert "ps 0 was killed by SIGTERM; all tasks start again at once (restart 1 of 3" in tasks.decide([killed]).message


def test_who_ends_well_waits_for_the_others(local):
    outcome = local("print('bye')\noutlive() if index else leave(0)").wait().ok()
    assert outcome.out.count("bye") == 2
    assert "[local] worker 0 ended with exit code 0; 1 still running" in outcome.err


def test_a_scripts_own_exit_code_is_not_taken_for_a_slow_benchmark():
    slower = [TaskExit("worker 0", EXIT_SLOWER)]
    assert "fail_below" in Synchronous(2, 100, 30, compares=True).decide(slower).message
    assert Synchronous(2, 100, 30).decide(slower).exit_code is None


def test_failures_outside_the_window_are_forgotten_and_pauses_grow():
    now = [0.0]
    rule = Synchronous(2, 100, 30, clock=lambda: now[0])
    failed = [TaskExit("worker 1", -9), TaskExit("worker 0", 1)]
    assert [rule.decide(failed).pause_seconds for _ in range(2)] == [0, 1]
    now[0] = 101
    assert (rule.decide(failed).exit_code, rule.decide(failed).pause_seconds) == (None, 1)
    assert rule.decide(failed).exit_code == 1
    rule = Synchronous(9, 100, 30)
    assert [rule.decide(failed, advanced).pause_seconds for advanced in (True, False, False, True)] == [0, 1, 2, 0]


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
        assert f"[local] {task} has ended as requested; " in outcome.err
    assert "exit code 143" not in outcome.err


def test_preemptions_without_end_do_not_spin():
    rule = Synchronous(0, 100, 30, clock=lambda: 0.0)
    settled = [rule.decide([TaskExit("worker 0", 0), TaskExit("worker 1", 143)]) for _ in range(4)]
    assert [each.exit_code for each in settled] == [None] * 4
    assert [each.pause_seconds for each in settled] == [0, 1, 2, 4]


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_restarts_are_as_old_as_by_the_clock_of_the_host_that_recorded_them(tmp_path, ahead):
    path, now = tmp_path / "events.jsonl", time.time()
    path.touch()
    for ago in (900, 400, 100):
        record_restart(str(path), now + ahead - ago, 0, "", "worker 0", 1)
    os.utime(path, (now - 100,) * 2)  # by the file system's clock
    assert recorded_restarts(str(path)) == pytest.approx([400, 100], abs=30)
    os.utime(path, (now - 500,) * 2)
    assert recorded_restarts(str(path)) == pytest.approx([500], abs=30)
