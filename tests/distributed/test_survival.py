"""Two workers under `crankshaft local`, killed, preempted and changed in number: runs end as one left alone.

Also on files: read by index, by chunks, and streamed, by files.

Runs are of digits, 1,437 examples in batches of 66: 22 steps an epoch, the last of 51 examples. A batch divides over
one, two and three workers.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.distributed import weighing
from tests.distributed.conftest import ROOT
from tests.runs import assert_equal_bits, manifests, metrics, newest, tensors
from tests.waiting import PATIENCE, wait_until

STEPS = 240
MLP = ("--model=mlp", "--model_arg=hidden_units=24,16", "--model_arg=dropout=0.3")
RUN = (*MLP, "--input=digits", "--global_batch_size=66", "--progress=plain", "--steps_per_loop=2")
SIZES = [f"--model_arg={name}" for name in ("layers=2", "width=32", "heads=4")]
DECODER = ("--model=transformer_lm", *SIZES, "--input=text", "--input_arg=context=32", "--global_batch_size=8")
DECODER += ("--progress=plain", "--steps_per_loop=2")
OFTEN = ("--checkpoint_every_steps=20", "--eval_every_steps=110")


class Local:
    """A running `crankshaft local`."""

    def __init__(self, workers: int, flags, run_dir):
        self.run_dir = run_dir
        run_dir.parent.mkdir(exist_ok=True, parents=True)
        self._log = run_dir.with_suffix(".log")
        command = [sys.executable, "-m", "crankshaft", "local", f"--workers={workers}", "--max_restarts=20", "--"]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags, f"--run_dir={run_dir}"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},  # scripts import from tests, which is not installed
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of the newest start's workers."""
        found = re.findall(r"worker (\d+) is process (\d+)", self.output)
        return [int(pid) for _, pid in sorted(dict(found).items())]

    def starts(self) -> int:
        return self.output.count("worker 0 is process")

    def until(self, condition) -> None:
        """Looks often: what is awaited may be a checkpoint that is being written."""
        wait_until(condition, self.process, shows=lambda: self.output, pause=0.002)

    def wait(self) -> int:
        wait_until(lambda: self.process.poll() is not None, shows=lambda: self.output)
        return self.process.returncode

    def ok(self) -> Local:
        assert self.wait() == 0, self.output
        return self

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """local(workers, *flags, run_dir=...): a started `Local`."""
    started = []

    def start(workers: int, *flags, run_dir=None) -> Local:
        run_dir = run_dir or tmp_path_factory.mktemp("local") / "run"
        started.append(Local(workers, flags, run_dir))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def straight(local):
    """The run_dir of an undisturbed run on two workers."""
    return local(2, *RUN, *OFTEN, f"--train_steps={STEPS}").ok().run_dir


def writing_a_checkpoint(run_dir) -> bool:
    """Whether there are files of a checkpoint that has no manifest yet."""
    names = os.listdir(run_dir / "checkpoints")
    sealed = {name.removesuffix(".manifest.json") for name in names if name.endswith(".manifest.json")}
    return any(name.split(".")[0] not in sealed for name in names if name.startswith("ckpt-"))


def until_it_has_trained(run: Local, start: int) -> None:
    """Waits for the first checkpoint of that start; there is then something left to do."""
    run.until(lambda: run.starts() == start)
    before = newest(run.run_dir)
    run.until(lambda: newest(run.run_dir) > before)


def kill_again_and_again(run: Local, kills: int) -> None:
    """Workers in turn, the chief first: at a random moment of training, and each second time during a checkpoint."""
    moments = random.Random(1)
    for number in range(kills):
        until_it_has_trained(run, number + 1)
        if number % 2:
            run.until(lambda: writing_a_checkpoint(run.run_dir))
        else:
            time.sleep(moments.uniform(0, 0.1))
        os.kill(run.pids()[number % 2], signal.SIGKILL)


@pytest.mark.slow
def test_kills_of_chief_and_worker_and_a_preempted_worker_cost_time_and_nothing_else(local, straight):
    """Preempted, all save at one step, from which they go on: no step is lost."""
    run = local(2, *RUN, *OFTEN, f"--train_steps={STEPS}")
    kill_again_and_again(run, 2)
    until_it_has_trained(run, 3)
    os.kill(run.pids()[1], signal.SIGTERM)
    assert run.ok().starts() == 4
    for worker in range(2):
        assert f"worker {worker} was killed by SIGKILL; all tasks start again" in run.output
    stopped = int(re.search(r"stopped at step (\d+): SIGTERM at worker 1", run.output)[1])
    assert f"resumed at step {stopped} of {STEPS}" in run.output
    assert_equal_bits(run.run_dir, straight)


@pytest.mark.slow
def test_five_kills_cost_time_and_nothing_else(local, straight):
    run = local(2, *RUN, *OFTEN, f"--train_steps={STEPS}")
    kill_again_and_again(run, 5)
    assert run.ok().starts() == 6
    assert_equal_bits(run.run_dir, straight)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(1, 2, 1), pytest.param((2, 3, 1), marks=pytest.mark.slow)])
def test_workers_may_change_in_number(local, inside, tmp_path, numbers):
    """One device at last: the same examples at the same steps, so the same run within rounding."""
    steps = 60
    # Without dropout, whose masks are each replica's own.
    without = (word for word in RUN if "dropout" not in word)
    run = (*without, "--checkpoint_every_steps=0", "--jit=off")
    one = tmp_path / "one" / "run"
    inside(*run, f"--train_steps={steps}", f"--run_dir={one}").ok()
    changed = tmp_path / "changed" / "run"
    for number, until in zip(numbers, (20, 40), strict=False):
        if number == 1:
            inside(*run, f"--train_steps={until}", f"--run_dir={changed}").ok()
        else:
            local(number, *run, f"--train_steps={until}", run_dir=changed).ok()
    last = inside(*run, f"--train_steps={steps}", f"--run_dir={changed}").ok()
    assert f"resumed at step 40 of {steps}" in last.out
    assert [each["about"]["strategy"]["replicas"] for each in manifests(changed)] == [*numbers]
    for name, value in metrics(one, "eval")["eval"].items():
        # 60 steps of Adam, float32 sums in three orders: 1e-7 a step.
        np.testing.assert_allclose(metrics(changed, "eval")["eval"][name], value, rtol=1e-5)


@pytest.mark.slow
def test_a_model_cut_over_two_workers_survives_one_of_them_and_goes_on_on_another_mesh(local, inside, tmp_path):
    """Two workers with half of each matrix, one of them killed; then four devices, 2x2: one device's run."""
    one = tmp_path / "one" / "run"
    inside(*DECODER, "--jit=off", "--train_steps=40", f"--run_dir={one}").ok()
    changed = tmp_path / "changed" / "run"
    run = local(2, *DECODER, "--mesh=model:2", "--checkpoint_every_steps=8", "--train_steps=30", run_dir=changed)
    run.until(lambda: newest(changed) >= 8)
    os.kill(run.pids()[1], signal.SIGKILL)
    assert run.ok().starts() == 2
    mesh = ("--strategy=mirrored", "--num_virtual_devices=4", "--mesh=data:2,model:2")
    last = inside(*DECODER, *mesh, "--train_steps=40", f"--run_dir={changed}").ok()
    assert "resumed at step 30 of 40" in last.out
    # 40 steps of Adam, float32 sums in three orders: 1e-7 a step.
    np.testing.assert_allclose(
        metrics(changed, "eval")["eval"]["loss"], metrics(one, "eval")["eval"]["loss"], rtol=1e-5
    )
    held, alone = tensors(changed), tensors(one)
    assert {name: value.shape for name, value in held.items()} == {name: value.shape for name, value in alone.items()}


@pytest.mark.slow
def test_a_mesh_of_four_workers_that_lost_one_ends_with_the_same_bits(local):
    flags = (*DECODER, "--mesh=data:2,model:2", "--checkpoint_every_steps=8", "--train_steps=30")
    flags += ("--model_arg=dropout=0.1", "--ema_decay=0.9", "--clip_norm=1")
    left_alone = local(4, *flags).ok()
    run = local(4, *flags)
    run.until(lambda: newest(run.run_dir) >= 8)
    os.kill(run.pids()[3], signal.SIGKILL)
    assert run.ok().starts() == 2
    assert_equal_bits(run.run_dir, left_alone.run_dir)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The flags of a run on records that are read by index."""
    folder = tmp_path_factory.mktemp("records") / "files"
    weighing.write(folder)
    return weighing.flags(folder)


@pytest.mark.parametrize(
    ("then", "window"),
    [
        pytest.param(1, 0, marks=pytest.mark.slow),
        (1, 2),
        pytest.param(3, 0, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_on_files_another_number_of_workers_goes_on_with_the_same_batches(
    local, inside, records, tmp_path, window, then
):
    """From within an epoch: each example once an epoch, and each step the batch that it has on one device."""
    flags = (*records, f"--shuffle_window={window}")
    one, changed = (tmp_path / name / "run" for name in ("one", "changed"))
    inside(*flags, "--train_steps=24", f"--run_dir={one}").ok()
    local(2, *flags, "--train_steps=11", run_dir=changed).ok()
    if then == 1:
        inside(*flags, "--train_steps=24", f"--run_dir={changed}").ok()
    else:
        local(then, *flags, "--train_steps=24", run_dir=changed).ok()
    found = weighing.sums(changed)
    assert found == weighing.sums(one)
    assert [sum(found[epoch : epoch + 8]) for epoch in (0, 8, 16)] == 3 * [weighing.NUMBERS.sum()]
    assert [each["about"]["strategy"]["replicas"] for each in manifests(changed)] == [2, then]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_workers_that_each_read_files_of_their_own_end_with_the_same_bits(local, tmp_path, kills):
    weighing.write(tmp_path / "files", "GZIP")
    flags = (*weighing.flags(tmp_path / "files"), "--shuffle_buffer=100")
    undisturbed = local(2, *flags, *OFTEN, f"--train_steps={STEPS}").ok()
    assert "divided by files, " in undisturbed.output
    run = local(2, *flags, *OFTEN, f"--train_steps={STEPS}")
    kill_again_and_again(run, kills)
    assert run.ok().starts() == kills + 1
    assert "reading the epoch again" not in run.output
    assert_equal_bits(run.run_dir, undisturbed.run_dir, "train")


def test_a_mistake_of_the_user_s_is_not_tried_again(local):
    run = local(2, "--model=mlp", "--input=digits", "--global_batch_size=65")
    assert run.wait() == 2
    assert run.starts() == 1
    assert "--global_batch_size=65 does not divide over 2 replicas; use 64 or 66" in run.output


@pytest.mark.slow
def test_the_chief_alone_prints_and_writes(straight):
    logs = {path.name: path.read_text() for path in (straight / "logs").iterdir()}
    assert "evaluation at step" in logs["worker-0.log"]
    assert "step" not in logs["worker-1.log"].replace("process", "")
    result = json.loads((straight / "result.json").read_text())
    assert (result["strategy"], result["num_replicas"], result["step"]) == ("multi_worker", 2, STEPS)
