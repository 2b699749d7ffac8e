"""A signal within an evaluation: it ends between two batches, and the run that is resumed makes it first."""

from __future__ import annotations

import functools
import json
import os
import signal

import pytest
import tensorflow as tf

from crankshaft.engine.hooks import Hook, every_steps
from tests.launch.line import RUN, Line, data
from tests.processes import Program

pytestmark = pytest.mark.thorough

# The evaluation at step 8 halves the learning rate: it is no better than the first by the least difference.
EACH = (*RUN, "--train_steps=12", "--eval_every_steps=4", "--eval_batch_size=4", "--learning_rate=0.001")
HALVES = ("--reduce_lr=patience=1", "--reduce_lr=min_delta=1")


class Signal(Hook):
    """Sends SIGTERM after a number of batches of evaluations; counts them."""

    def __init__(self, at: int):
        self.at, self.done = at, 0

    def begin(self, status):
        strategy, run = status.strategy, status.strategy.run

        def counted(program, limit):
            result = run(program, limit)
            if program is strategy.evaluation:
                self.done += result.steps
                if self.done - result.steps < self.at <= self.done:
                    os.kill(os.getpid(), signal.SIGTERM)
            return result

        strategy.run = counted


def test_it_is_saved_at_once_and_the_evaluation_made_by_the_run_that_is_resumed(inside, tmp_path):
    results, lines = [], []
    for name in ("whole", "ended"):
        run = (*EACH, *HALVES, f"--run_dir={tmp_path}/{name}")
        if name == "ended":
            ending = Signal(at=1)  # the first of 8 batches, at step 4
            outcome = inside(*run, trainer=Line, data=data, hooks=[ending])
            assert outcome.code == 143
            saved = f"; saved, and the same command resumes from {tmp_path}/ended\n"
            assert f"stopped at step 4: SIGTERM{saved}" in outcome.out
            assert ending.done < 8
            manifest = json.loads((tmp_path / name / "checkpoints" / "ckpt-4.manifest.json").read_text())
            assert manifest["host_state"]["hooks"]["evaluation"]["is_pending"]
        inside(*run, trainer=Line, data=data).ok()
        results.append(json.loads((tmp_path / name / "result.json").read_text()))
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        lines.append([(each["step"], each["metrics"]) for each in events if each["event"] == "evaluation"])
    assert [step for step, _ in lines[0]] == [4, 8, 12]
    assert lines[1] == lines[0]
    for name in ("eval", "best", "train"):
        assert results[1][name] == results[0][name]


class Calls(tf.keras.callbacks.Callback):
    """Lists the calls of its methods."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def get_state(self):
        return {}  # a resumed run has a list of its own

    def set_state(self, state):
        pass

    def on_train_begin(self, logs=None):
        self.calls.append("train begins")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} begins")

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(f"batch {batch} ends")

    def on_test_begin(self, logs=None):
        self.calls.append("test begins")

    def on_test_end(self, logs=None):
        self.calls.append(f"test ends: {logs['loss']}")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} ends: {logs['loss']}, {logs.get('val_loss')}")

    def on_train_end(self, logs=None):
        self.calls.append("train ends")


@pytest.mark.parametrize("steps", [6, 3])  # the evaluation is at the end of the first epoch, or of the run within it
def test_callbacks_see_it_begin_again_and_then_the_end_of_its_epoch(inside, tmp_path, steps):
    run = (*RUN, f"--train_steps={steps}", "--eval_batch_size=4", "--learning_rate=0.001")
    calls = {}
    for name, folder in (("whole", "whole"), ("ended", "ended"), ("resumed", "ended")):
        calls[name] = callback = Calls()
        hooks = [Signal(at=1), callback] if name == "ended" else [callback]
        outcome = inside(*run, f"--run_dir={tmp_path}/{folder}", trainer=Line, data=data, hooks=hooks)
        assert outcome.code == (143 if name == "ended" else 0)
    whole, ended, resumed = (calls[name].calls for name in ("whole", "ended", "resumed"))
    assert ended.pop() == "train ends"
    assert ended == whole[: len(ended)]
    rest = whole[len(ended) :]
    assert rest[0].startswith("test ends" if steps == 6 else "train ends")
    assert resumed == ["train begins", "epoch 0 begins", *(["test begins"] if steps == 6 else []), *rest]


class Halves(tf.keras.callbacks.Callback):
    """Evaluates the model with halves of its weights."""

    def multiply(self, factor):
        self.model.set_weights([factor * weight for weight in self.model.get_weights()])

    def on_test_begin(self, logs=None):
        self.multiply(0.5)

    def on_test_end(self, logs=None):
        self.multiply(2.0)


def test_one_of_other_weights_ends_first_so_that_the_run_is_resumed_with_those_that_it_trains(inside, tmp_path):
    results = []
    for name, at in (("whole", None), ("ended", 1)):
        run = (*RUN, "--train_steps=12", "--eval_batch_size=4", f"--run_dir={tmp_path}/{name}")
        if at:
            ending = Signal(at)
            assert inside(*run, trainer=Line, data=data, hooks=[ending, Halves()]).code == 143
            assert ending.done == 8
        inside(*run, trainer=Line, data=data, hooks=[Halves()]).ok()
        results.append(json.loads((tmp_path / name / "result.json").read_text()))
    assert results[0]["eval"] == results[1]["eval"]


def test_without_a_folder_the_run_ends_without_it(inside):
    ending = Signal(at=1)
    outcome = inside(*EACH, trainer=Line, data=data, hooks=[ending])
    assert outcome.code == 143
    assert "stopped at step 4: SIGTERM; nothing is kept without run_dir\n" in outcome.out
    assert ending.done < 8


def test_an_evaluation_that_follows_a_run_waits_for_its_first_checkpoint_and_ends_with_it(inside, tmp_path):
    """Not with an attempt that is preempted. Also where its environment describes a cluster; it writes no best/."""
    folder, mlp = tmp_path / "run", ("--model=mlp", "--input=digits", "--jit=off")
    flags = ("--mode=eval", f"--run_dir={folder}", "--eval_checkpoint=all", "--follow")
    tasks = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
    command = ["-m", "crankshaft", "train", *flags, f"--result_json={tmp_path}/evals.json"]
    beside = Program(command, tmp_path / "beside", {**os.environ, "TF_CONFIG": json.dumps(tasks)})
    try:
        beside.until(lambda: "waiting for the first checkpoint" in beside.err)
        steps = ("--mode=train", "--train_steps=9", "--checkpoint_every_steps=3", "--keep_checkpoints=9")
        train = functools.partial(inside, *mlp, *steps, f"--run_dir={folder}", "--progress=off")
        assert train(hooks=[every_steps(6, lambda *_: os.kill(os.getpid(), signal.SIGTERM))]).code == 143
        beside.until(lambda: "has ended with exit code 143, after which it may be started again" in beside.out)
        train().ok()
        outcome = beside.wait().ok()
    finally:
        beside.end()
    result = json.loads((tmp_path / "evals.json").read_text())
    assert list(result["evals"]) == ["3", "6", "9"]
    assert result["eval"] == result["evals"]["9"]
    assert "evaluation at step 3" in outcome.out
    assert not list(folder.glob("best/*"))
    again = inside(*flags, "--progress=plain").ok()  # of a run that has ended: all at once
    assert [f"evaluation at step {step}" in again.out for step in (3, 6, 9)] == [True] * 3
    inside(*flags, "--eval_checkpoint=latest").refused("follow evaluates each checkpoint, and eval_checkpoint=latest")
