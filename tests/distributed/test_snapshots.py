"""Snapshots in memory: what killed tasks have left there is where the run continues, or what the job's end saves."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.processes import Job
from tests.runs import assert_equal_bits, newest, steps
from tests.waiting import PATIENCE

STEPS, HELD = 240, 210
MLP = (
    *("--model=mlp", "--model_arg=hidden_units=24,16", "--model_arg=dropout=0.3", "--input=digits"),
    "--global_batch_size=66",
)
SHARDED = (
    *("--model=transformer_lm", "--model_arg=layers=1", "--model_arg=width=32", "--model_arg=heads=4"),
    *("--model_arg=dropout=0.1", "--input=text", "--input_arg=context=16", "--global_batch_size=8", "--mesh=model:2"),
)
RUN = (
    *("--steps_per_loop=5", f"--train_steps={STEPS}", "--snapshot_seconds=0.01"),
    *("--checkpoint_every_steps=100000", "--eval_every_steps=110", "--eval_batches=2", "--eval_batch_size=8"),
)
# Waits at a step until a file lets the run end: until then it can be killed. Then, once, worker 1 gets SIGTERM within
# the next evaluation.
SCRIPT = f"""
import os, pathlib, signal, sys, time
from crankshaft.engine.hooks import Hook, every_steps
from crankshaft.launch import train

go, mark = (pathlib.Path(__file__).with_name(name) for name in ("go", "preempted"))

def hold(status, means):
    while not go.exists():
        time.sleep(0.01)

class Preempted(Hook):
    def begin(self, status):
        strategy, run = status.strategy, status.strategy.run

        def preempted(program, limit):
            if program is strategy.evaluation and strategy.host == 1 and go.exists() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGTERM)
            return run(program, limit)

        strategy.run = preempted

if __name__ == "__main__":
    train.main(hooks=[every_steps({HELD}, hold), Preempted()])
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags", [MLP, pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["replicas", "model over both"]
)
def test_killed_workers_lose_no_more_than_the_steps_since_the_newest_snapshot(start, tmp_path, flags):
    """Restarted, or at the job's end written as a checkpoint: the run ends with the bits of an undisturbed one.

    An evaluation within which one worker gets SIGTERM ends on all, and is made after the restart.
    """
    (script := tmp_path / "holding.py").write_text(SCRIPT)

    def job(name: str, restarts: int) -> Job:
        local = ("--workers=2", "--ps=0", f"--max_restarts={restarts}")
        return start(name, *RUN, *flags, local=local, script=script)

    run = job("run", 1)
    run.until(lambda: run.snapshot(2) >= 20)
    run.kill("worker 1")
    run.until(lambda: run.starts() == 2 and "resumed at step" in run.output)
    resumed = int(re.search(r"step (\d+) is taken from memory.*there is no checkpoint yet", run.output)[1])
    assert resumed >= 20
    assert f"resumed at step {resumed} of {STEPS}" in run.output
    run.until(lambda: run.snapshot(2) > resumed)
    run.kill("worker 0")
    assert run.wait().code == 1
    saved = int(re.search(r"step (\d+) was in memory, and is saved now", run.output)[1])
    assert steps(run.run_dir) == [resumed, saved]
    assert saved > resumed
    (tmp_path / "go").touch()
    again = job("run", 1).ok()
    assert f"resumed at step {saved} of {STEPS}" in again.output
    assert "taken from memory" not in again.output
    before, at, after = re.split(r"stopped at step (\d+): SIGTERM at worker 1", again.output)
    assert f"step {at}/{STEPS}  evaluation" not in before
    assert f"step {at}/{STEPS}  evaluation" in after
    straight = job("straight", 0).ok()
    assert newest(straight.run_dir) == STEPS
    assert_equal_bits(run.run_dir, straight.run_dir)


# A run whose snapshot can't be written, as TensorFlow waits for a lost worker in its first operation of a kind.
STUCK = """
import time
from types import SimpleNamespace as Any
from crankshaft.engine.errors import LostPeerError
from crankshaft.launch.composition import training
from crankshaft.parts.memory_snapshots import run_snapshots as in_memory

in_memory._WRITE_SECONDS = 0.2
nothing = Any(close=lambda: None)
snapshots = Any(write_alone=lambda: time.sleep(3600))
strategy = Any(worker_names=["worker 0", "worker 1"])
run = Any(signals=nothing, hooks=[nothing], strategy=strategy, config=Any(writes_run=True))
training.close(run, snapshots, LostPeerError("no update for step_timeout_seconds=40: worker 0 does not answer"))
"""


@pytest.mark.thorough
def test_a_snapshot_that_can_not_be_written_does_not_keep_a_run_that_has_lost_a_worker():
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    assert "what was in memory is lost: it could not be written within 0.2 s" in ended.stderr
    assert "error: no update for step_timeout_seconds=40: worker 0 does not answer" in ended.stderr
