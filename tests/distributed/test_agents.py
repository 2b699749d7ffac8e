"""Tasks that are restarted in their place, `--max_restarts`: by their own process, without a scheduler."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import numpy as np
import pytest

from crankshaft.parts.elastic.members import is_waiting
from crankshaft.parts.launchers.children import Children
from crankshaft.parts.launchers.restarts import recorded_restarts
from crankshaft.runner.command_line.following import exit_code
from crankshaft.runner.failures import EXIT_PORT_TAKEN
from crankshaft.runner.host.tasks import Cluster
from tests import forked
from tests.distributed import weighing
from tests.processes import newest_snapshot
from tests.runs import newest, tensors
from tests.waiting import PATIENCE, wait_until

RUN = (
    *("--model=mlp", "--model_arg=hidden_units=32", "--model_arg=dropout=0.3", "--input=digits", "--jit=off"),
    *("--global_batch_size=66", "--steps_per_loop=2", "--eval_every_steps=0"),
)
# Each word "STEP:TASK:ACTION" acts once, in the script's folder: kill, an exit code, or term, sent to the agent.
SCRIPT = """
import json, os, pathlib, signal, sys, threading
from crankshaft import main
from crankshaft.engine.hooks import every_steps

here, agent = pathlib.Path(__file__).parent, os.getpid()
print("script of", agent, flush=True)
acts = [word.split(":") for word in sys.argv[1].split(",") if word]
index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]

def act(status, means):
    for thread in threading.enumerate():
        if thread.name.startswith("snapshot-"):
            thread.join()
    for number, (step, task, action) in enumerate(acts):
        done = here / f"done-{number}"
        if status.step >= int(step) and index == int(task) and not done.exists():
            done.touch()
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif action.isdecimal():
                os._exit(int(action))
            os.kill(agent, signal.SIGTERM)

main(hooks=[every_steps(2, act)], argv=[sys.argv[0], *sys.argv[2:]])
"""


def script(folder):
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


@pytest.mark.slow
def test_an_agent_counts_restarts_of_schedulers_too_and_passes_signals_on(crank, tmp_path):
    program, run_dir = script(tmp_path / "own"), tmp_path / "run"
    flags = (*RUN, "--train_steps=60", "--checkpoint_every_steps=10", "--snapshot_seconds=1e-6")
    flags += (f"--run_dir={run_dir}",)
    run = lambda acts, restarts: crank(acts, *flags, f"--max_restarts={restarts}", script=program)  # noqa: E731
    failed = run("6:0:1,26:0:1", 1)
    assert failed.code == 1
    assert "the run ended with exit code 1; it is failure 2 within 600 s" in failed.err
    (saved,) = re.findall(r"^step (\d+) was in memory, and is saved now$", failed.err, re.MULTILINE)
    assert 20 < int(saved) <= 26
    record = run_dir / "events.jsonl"
    assert len(recorded_restarts(record)) == 1
    stopped = run("0:1:-,0:1:-,30:0:term", 9)  # the scheduler's restart
    assert f"resumed at step {saved} of 60" in stopped.out
    assert stopped.code == 128 + signal.SIGTERM
    assert "stopped at step" in stopped.out
    assert len(recorded_restarts(record)) == 2
    used_up = run("0:1:-,0:1:-,0:1:-,40:0:kill", 2)
    assert used_up.code == 1
    assert "the run was killed by SIGKILL; it is failure 3 within 600 s" in used_up.err
    assert exit_code(record) != 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    yesterday = [line | {"time": line["time"] - 86400} for line in lines]
    record.write_text("".join(json.dumps(line) + "\n" for line in yesterday))
    os.utime(record, (time.time() - 86400,) * 2)
    ended = run("0:1:-,0:1:-,0:1:-,0:1:-,50:0:kill", 2).ok()
    assert "it starts again at once (restart 1 of 2 within 600 s)" in ended.out + ended.err
    assert "evaluation at step 60" in ended.out
    assert exit_code(record) == 0


def test_a_signal_between_two_attempts_ends_the_run_as_one_within_an_attempt(crank, tmp_path):
    flags = (*RUN, "--train_steps=60", f"--run_dir={tmp_path / 'run'}", "--max_restarts=9", "--snapshot_seconds=0")
    program = crank.start("2:0:1,2:0:1", *flags, script=script(tmp_path / "own"))
    program.until(lambda: "it starts again in 1 s" in program.err)
    program.send(signal.SIGHUP)
    ended = program.wait()
    assert (ended.code, "error" in ended.err) == (128 + signal.SIGHUP, False), ended.err


@pytest.mark.thorough
def test_a_task_whose_port_is_taken_is_started_again_by_the_scheduler_which_gives_it_another(crank, tmp_path):
    flags = (*RUN, "--train_steps=4", f"--run_dir={tmp_path / 'run'}", "--max_restarts=9")
    ended = crank(f"2:0:{EXIT_PORT_TAKEN}", *flags, script=script(tmp_path / "own"))
    assert (ended.code, "starts again" in ended.err) == (EXIT_PORT_TAKEN, False), ended.err


@pytest.mark.thorough
def test_a_complete_run_whose_output_is_lost_does_not_start_again(tmp_path):
    flags = (*RUN, "--train_steps=4", f"--run_dir={tmp_path / 'run'}", "--max_restarts=9")
    with open("/dev/full", "wb") as full, open(tmp_path / "err", "wb") as err:
        program = forked.start(["-m", "crankshaft", "train", *flags], os.environ, stdout=full, stderr=err)
    try:
        assert program.wait(PATIENCE) == 1
    finally:
        program.kill()
    said = (tmp_path / "err").read_text()
    assert "a part of the output is lost: No space left on device" in said
    assert "starts again" not in said
    assert exit_code(tmp_path / "run" / "events.jsonl") == 0


@pytest.mark.slow
def test_a_host_with_a_notice_of_preemption_leaves_while_enough_are_left(start_workers, tmp_path):
    flags = (*RUN, "--strategy=multi_worker", "--train_steps=200", "--max_restarts=9", "--min_workers=2")
    run_dir, program = tmp_path / "run", script(tmp_path / "own")
    workers = start_workers(3, program, "10:0:term,30:1:term", *flags, f"--run_dir={run_dir}")
    assert workers.wait() == [128 + signal.SIGTERM] * 3
    (step,) = re.findall(r"^stopped at step (\d+): SIGTERM at worker 0; saved", workers.output(0), re.MULTILINE)
    assert f"2 of 3 workers continue from step {step}, without worker 0 (" in workers.output(1)  # now the chief
    (last,) = re.findall(r"^stopped at step (\d+): SIGTERM at worker 1", workers.output(1), re.MULTILINE)
    assert newest(run_dir) == int(last) >= 30
    assert "worker 2 ends: others have notices of preemption, and min_workers=2" in workers.output(2)
    assert not any("it starts again" in workers.output(index) for index in range(3))  # none of this is a failure


def test_a_task_continues_the_random_numbers_of_its_script():
    random.seed(5)
    expected = random.Random(5).random()
    with Children() as children:
        child = children.fork(lambda: random.random() != expected)  # Python has seeded them from the system
        assert child.wait() == 0
        children.end([child])


# Registers ends of every kind, before `main` and in the task, whose first attempt fails.
ENDS = """
import atexit, multiprocessing, multiprocessing.util, os, pathlib, sys, tempfile, time
import numpy as np
from crankshaft import main
from crankshaft.engine.hooks import every_steps

here, program, kept = pathlib.Path(__file__).parent, os.getpid(), []
log = open(here / "log", "a")
log.write("script\\n")

def end(kind, owner=program):
    with open(here / "ends", "a") as file:
        print(kind, "of script" if owner == program else "of task", owner == os.getpid(), file=file)

def register(name):
    atexit.register(tempfile.TemporaryDirectory(prefix=f"{name}-", dir=here).cleanup)  # which nothing else holds
    kept.append(tempfile.TemporaryDirectory(prefix=f"{name}-", dir=here))
    atexit.register(end, "atexit", os.getpid())
    multiprocessing.util.Finalize(None, end, ("Finalize", os.getpid()), exitpriority=1)

register("script")
served = multiprocessing.get_context("fork").Process(target=time.sleep, args=(900,), daemon=True)
served.start()

def data():
    assert len(list(here.glob("script-*"))) == 3
    register("task")
    return (np.ones((64, 3), np.float32), np.zeros(64, np.int32)), None, 2

def fail_once(status, means):
    log.write("task\\n")
    if not (here / "failed").exists():
        (here / "failed").touch()
        raise OSError(5, "Input/output error")

try:
    with tempfile.TemporaryDirectory(prefix="script-", dir=here):
        main(data=data, hooks=[every_steps(2, fail_once)])
except SystemExit as error:
    end(f"exit {error.code}")
assert served.is_alive()
sys.exit(7)
"""


def test_a_task_ends_only_what_it_has_begun_and_the_code_after_main_is_its_scripts(crank, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    flags = ("--model=mlp", "--jit=off", "--train_steps=4", "--max_restarts=3", "--progress=off")
    outcome = crank(*flags, script=tmp_path / "ends.py")
    assert (outcome.code, outcome.err.count("it starts again at once")) == (7, 1), outcome.err
    task, script = (
        ["atexit of task True", "Finalize of task True"],
        ["atexit of script True", "Finalize of script True"],
    )
    assert (tmp_path / "ends").read_text().splitlines() == [*task, *task, "exit 0 of script True", *script]
    assert not [*tmp_path.glob("script-*"), *tmp_path.glob("task-*")]
    assert (tmp_path / "log").read_text().split() == ["script", "task", "task", "task"]


# Trains up to the step that a file names, and then waits for a later one.
HELD = """
import pathlib, sys, time
from crankshaft import main
from crankshaft.engine.hooks import every_steps

until = pathlib.Path(sys.argv[1])

def hold(status, means):
    while status.step >= int(until.read_text() or 0):
        time.sleep(0.01)

main(hooks=[every_steps(2, hold)], argv=[sys.argv[0], *sys.argv[2:]])
"""
STEPS = 160


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [(), ("--shard_optimizer",)], ids=["replicas", "shards of each"])
def test_lost_hosts_are_left_out_and_included_again_in_the_run_of_one_device(start_workers, inside, tmp_path, sharded):
    """Of three workers the last is lost, then the chief: each time two continue, and from a checkpoint on all three.

    At last two are lost at once: the third saves what it has, and ends.
    """
    weighing.write(tmp_path / "files")
    flags = (*weighing.flags(tmp_path / "files"), f"--train_steps={STEPS}")
    one, run_dir, until = tmp_path / "one", tmp_path / "run", tmp_path / "until"
    (program := tmp_path / "held.py").write_text(HELD)
    elastic = ("--max_restarts=9", "--min_workers=2", "--cluster_timeout_seconds=4", "--snapshot_seconds=0.05")
    own = ("--strategy=multi_worker", "--checkpoint_every_steps=4", f"--run_dir={run_dir}")

    def advance(steps: int = 6) -> None:
        """Lets the workers make the steps up to the next checkpoint."""
        until.write_text(str(newest(run_dir) + steps))

    def look(chief: int, pattern: str):
        return re.search(pattern, workers.output(chief))

    advance()
    workers = start_workers(3, program, until, *flags, *own, *elastic, *sharded)
    identity = Cluster(tuple((f"worker {number}", at) for number, at in enumerate(workers.addresses)), 0).identity
    outputs = {"shows": lambda: [workers.output(index)[-3000:] for index in range(3)], "pause": 0.5}
    for lost, chief in ((2, 0), (0, 1)):
        all_three = newest(run_dir)
        wait_until(lambda: newest(run_dir) > all_three or advance(), *workers.processes, **outputs)  # noqa: B023
        workers.programs[lost].send(signal.SIGKILL)  # and the kernel its task
        workers.processes[lost].wait()
        advance()
        continued = rf"2 of 3 workers continue from step (\d+), without worker {lost} "
        wait_until(lambda: look(chief, continued), **outputs)  # noqa: B023
        two = int(look(chief, continued)[1])
        assert two >= all_three
        wait_until(lambda: newest(run_dir) > two or advance(), **outputs)  # noqa: B023
        workers.programs[lost].start()
        wait_until(lambda: is_waiting(workers.addresses[lost], identity), **outputs)  # noqa: B023
        included = rf"to include worker {lost} \S+, which has come\n"
        wait_until(lambda: look(chief, included) or advance(), *workers.processes, **outputs)  # noqa: B023
    # All wait at a step with a checkpoint, before it is written: the last one's agent holds the state of two steps ago.
    unsaved = lambda: newest_snapshot(workers.processes[2].pid) == int(until.read_text()) - 2  # noqa: E731
    if not sharded:
        wait_until(lambda: unsaved() or advance(8), *workers.processes, **outputs)
    for lost in (0, 1):
        workers.programs[lost].send(signal.SIGKILL)
        workers.processes[lost].wait()
    advance(16)  # out of the hook in which its task waits
    assert workers.processes[2].wait() == 1
    assert "(1 of 3 workers are here, and min_workers=2)" in workers.output(2)
    saved = re.search(r"^step (\d+) was in memory, and is saved now$", workers.output(2), re.MULTILINE)
    assert sharded or newest(run_dir) == int(saved[1])
    for index in range(3):
        workers.programs[index].start()
    until.write_text(str(STEPS + 1))
    workers.ok()
    inside(*flags, f"--run_dir={one}").ok()
    assert weighing.sums(run_dir) == weighing.sums(one)  # each step had its own examples
    expected = tensors(one)
    for name, value in tensors(run_dir).items():  # float32 sums in three orders: 1e-7 a step
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)
