"""Two workers under `crankshaft local`, killed, preempted and changed in number: runs end as one left alone.

Also on files: read by index, by chunks, and streamed, by files.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time

import numpy as np
import pytest

from tests.distributed import weighing
from tests.processes import Job
from tests.runs import assert_equal_bits, manifests, newest, tensors

STEPS = 240
# 1,437 examples in batches of 66: 22 steps an epoch, the last of 51 examples.
RUN = (
    *("--model=mlp", "--model_arg=hidden_units=24,16", "--model_arg=dropout=0.3", "--input=digits"),
    *("--global_batch_size=66", "--steps_per_loop=2"),
)
OFTEN = ("--checkpoint_every_steps=20", "--eval_every_steps=110", f"--train_steps={STEPS}")


@pytest.fixture
def workers(start):
    """workers(name, *flags, number=2): a started `Job` of `crankshaft train` without servers."""

    def run(name: str, *flags: str, number: int = 2) -> Job:
        return start(name, *flags, local=(f"--workers={number}", "--ps=0", "--max_restarts=20"), script=())

    return run


def writing_a_checkpoint(run_dir) -> bool:
    """Whether there are files of a checkpoint that has no manifest yet."""
    names = os.listdir(run_dir / "checkpoints")
    sealed = {name.removesuffix(".manifest.json") for name in names if name.endswith(".manifest.json")}
    return any(name.split(".")[0] not in sealed for name in names if name.startswith("ckpt-"))


def until_it_has_trained(run: Job, start: int) -> None:
    """Waits for the first checkpoint of that start; there is then something left to do."""
    run.until(lambda: run.starts() == start)
    before = newest(run.run_dir)
    run.until(lambda: newest(run.run_dir) > before)


def kill_chief_and_worker(run: Job) -> None:
    """The chief at a random moment of training, the worker during a checkpoint."""
    until_it_has_trained(run, 1)
    time.sleep(random.Random(1).uniform(0, 0.1))
    run.kill("worker 0")
    until_it_has_trained(run, 2)
    run.until(lambda: writing_a_checkpoint(run.run_dir), pause=0.002)
    run.kill("worker 1")


@pytest.mark.slow
def test_kills_of_chief_and_worker_and_a_preempted_worker_cost_time_and_nothing_else(workers):
    """Preempted, all save at one step, from which they go on: no step is lost. The chief alone prints and writes."""
    straight = workers("straight", *RUN, *OFTEN).ok()
    logs = {path.name: path.read_text() for path in (straight.run_dir / "logs").iterdir()}
    assert "evaluation at step" in logs["worker-0.log"]
    # It warns of its own input, as on a busy machine, and prints nothing of the run's.
    printed = [line for line in logs["worker-1.log"].splitlines() if "steps wait for input" not in line]
    assert not [line for line in printed if "step" in line]
    result = straight.result
    assert (result["strategy"], result["num_replicas"], result["step"]) == ("multi_worker", 2, STEPS)
    run = workers("run", *RUN, *OFTEN)
    kill_chief_and_worker(run)
    until_it_has_trained(run, 3)
    run.send_to("worker 1", signal.SIGTERM)
    assert run.ok().starts() == 4
    for worker in range(2):
        assert f"worker {worker} was killed by SIGKILL; all tasks start again" in run.output
    stopped = int(re.search(r"stopped at step (\d+): SIGTERM at worker 1", run.output)[1])
    assert f"resumed at step {stopped} of {STEPS}" in run.output
    assert_equal_bits(run.run_dir, straight.run_dir)


@pytest.mark.slow
def test_killed_workers_that_each_read_files_of_their_own_end_with_the_same_bits(workers, tmp_path):
    weighing.write(tmp_path / "files", "GZIP")
    flags = (*weighing.flags(tmp_path / "files"), "--shuffle_buffer=100", *OFTEN, "--eval_every_steps=0")
    undisturbed = workers("undisturbed", *flags).ok()
    assert "divided by files, " in undisturbed.output
    run = workers("run", *flags)
    kill_chief_and_worker(run)
    assert run.ok().starts() == 3
    assert "reading the epoch again" not in run.output
    assert_equal_bits(run.run_dir, undisturbed.run_dir, "train")


@pytest.mark.thorough
@pytest.mark.parametrize(("numbers", "window"), [((2, 1), 2), pytest.param((1, 2, 3, 1), 0, marks=pytest.mark.slow)])
def test_on_files_another_number_of_workers_goes_on_with_the_same_batches(workers, inside, tmp_path, numbers, window):
    """From within an epoch: each example once an epoch, each step's batch and the weights are those of one device."""
    weighing.write(tmp_path / "files")
    flags = (*weighing.flags(tmp_path / "files"), f"--shuffle_window={window}")
    one, changed = tmp_path / "one", tmp_path / "changed"
    inside(*flags, "--train_steps=24", f"--run_dir={one}").ok()
    for place, number in enumerate(numbers, 1):
        steps = f"--train_steps={24 * place // len(numbers) - (place < len(numbers))}"
        if number == 1:
            inside(*flags, steps, f"--run_dir={changed}").ok()
        else:
            workers("changed", *flags, steps, number=number).ok()
    found = weighing.sums(changed)
    assert found == weighing.sums(one)
    assert [sum(found[epoch : epoch + 8]) for epoch in (0, 8, 16)] == 3 * [weighing.NUMBERS.sum()]
    assert [each["about"]["strategy"]["replicas"] for each in manifests(changed)] == [*numbers]
    expected = tensors(one)
    for name, value in tensors(changed).items():  # float32 sums in three orders: 1e-7 a step
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


def test_a_mistake_of_the_users_is_not_tried_again(workers):
    run = workers("run", "--model=mlp", "--input=digits", "--global_batch_size=65")
    assert run.wait().code == 2
    assert run.starts() == 1
    assert "global_batch_size=65 does not divide over 2 replicas; use 64 or 66" in run.output
