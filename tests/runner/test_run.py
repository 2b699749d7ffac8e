"""Runs that train: what they print, write and refuse, how they are resumed, and how many micro-batches they compute."""

from __future__ import annotations

import json
import shutil

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import manifest
from crankshaft.runner.restored import state
from tests import runs
from tests.launch.conftest import MLP
from tests.runner.command_line.test_config import asked

pytestmark = pytest.mark.thorough


def test_train_mode_evaluates_nothing(finished):
    run = finished(*MLP, "--mode=train", "--train_steps=25")
    assert "evaluation" not in run.out
    assert run.result["mode"] == "train"
    assert "eval" not in run.result
    assert run.result["train"]["loss"] < 2.2  # ten classes by chance: 2.3
    assert runs.steps(run.folder) == [25]
    assert runs.steps(run.folder, "best") == []
    assert run.result["steps_per_sec"] > 0


@pytest.mark.parametrize(("epochs", "steps"), [("1.101", 111), ("1e-05", 1)])
def test_parts_of_epochs_are_as_many_steps_as_they_are_written(inside, tmp_path, epochs, steps):
    data = ("--input=synthetic", "--input_arg=examples=100", "--global_batch_size=1", "--jit=off")
    inside("--model=logistic", *data, "--mode=train", f"--train_epochs={epochs}", f"--run_dir={tmp_path}").ok()
    assert runs.steps(tmp_path) == [steps]


def test_a_run_of_one_call_has_that_calls_rate(inside, tmp_path):
    inside(*MLP, "--mode=train", "--train_steps=1", f"--result_json={tmp_path}/r.json").ok()
    assert json.loads((tmp_path / "r.json").read_text())["steps_per_sec"] > 0


def test_replicas_that_drift_begin_with_a_checkpoints_one_state_and_cant_become_one(inside, tmp_path):
    run = (*MLP, "--mode=train", "--strategy=mirrored", "--num_virtual_devices=2", "--optimizer=sgd")
    run = (*run, f"--run_dir={tmp_path}", "--allow_changed_config")
    inside(*run, "--train_steps=3").ok()
    inside(*run, "--train_steps=6", "--sync_every_steps=2").ok()
    checkpoint = tf.train.load_checkpoint(str(tmp_path / "checkpoints" / "ckpt-6"))
    (updates,) = (name for name in checkpoint.get_variable_to_shape_map() if "optimizer/iterations" in name)
    assert checkpoint.get_tensor(updates).tolist() == [6, 6]
    outcome = inside(*run, "--train_steps=8")
    assert "is of another model or optimizer" in outcome.mistake
    assert "iterations: [] int64 here, [2] int64 in the checkpoint" in outcome.err


def test_a_complete_run_says_what_it_takes_to_go_on(inside, tmp_path):
    run = (*MLP, "--mode=train", "--learning_rate_schedule=cosine", f"--run_dir={tmp_path}")
    inside(*run, "--train_steps=2").ok()
    again = inside(*run, "--train_steps=2").ok()
    assert "allow_changed_config: learning_rate_schedule=cosine ends here" in again.out
    assert "allow_changed_config" in inside(*run, "--train_steps=4").error
    assert "resumed at step 2 of 4" in inside(*run, "--train_steps=4", "--allow_changed_config").ok().out


def test_a_resumed_run_keeps_its_choice_of_xla_past_one_that_cannot_follow_it(inside, tmp_path):
    run = (*MLP[:2], "--input=digits", "--mode=train", "--checkpoint_every_steps=0", f"--run_dir={tmp_path}")
    inside(*run, "--jit=on", "--train_steps=1").ok()
    outcome = inside(*run, "--debug", "--train_steps=2").ok()
    assert "XLA off: XLA leaves the checks of debug out" in outcome.out
    assert runs.result(tmp_path)["jit"] is False
    assert "XLA on, as this run began" in inside(*run, "--train_steps=3").ok().out
    assert runs.result(tmp_path)["jit"] is True


def test_an_evaluation_loss_that_is_not_finite_fails_a_run_and_mode_eval(inside, tmp_path):
    steep = (*MLP, "--optimizer=sgd", "--learning_rate=1e30", "--train_steps=1")
    inside(*steep, "--mode=train", f"--run_dir={tmp_path}").ok()
    for flags in (("--mode=eval", f"--run_dir={tmp_path}"), steep):
        outcome = inside(*flags)
        assert outcome.code == 65
        assert "error: evaluation at step 1: loss is nan; look in the evaluation data for inf" in outcome.err


def test_a_run_begun_by_other_rules_is_read_but_goes_on_only_where_that_is_allowed(finished, inside, tmp_path):
    shutil.copytree(finished(*MLP, "--mode=train", "--train_steps=2").folder, tmp_path, dirs_exist_ok=True)
    run = (*MLP, "--mode=train", f"--run_dir={tmp_path}")
    (path,) = (tmp_path / "checkpoints").glob("*.manifest.json")
    record = json.loads(path.read_text())
    record["host_state"]["state"]["rules"] = 8
    path.write_text(json.dumps(manifest.with_digest(record)))
    before = (tmp_path / "config.json").read_text()
    outcome = inside(*run, "--train_steps=4")
    outcome.refused(f"run_dir={tmp_path} was begun by other rules ... updates (since 0.1.0) ... allow_changed_config")
    assert (runs.steps(tmp_path), (tmp_path / "config.json").read_text()) == ([2], before)
    assert "evaluation at step 2" in inside("--mode=eval", f"--run_dir={tmp_path}").ok().out
    outcome = inside(*run, "--train_steps=4", "--allow_changed_config").ok()
    assert f"run_dir={tmp_path} was begun by other rules than these: " in outcome.err
    assert "rules" not in inside(*run, "--train_steps=6").ok().err


OTHER = {"crankshaft": "0.9.0"}


@pytest.mark.parametrize(
    ("versions", "digests", "names"), [(OTHER, None, False), ({}, ["0"], False), (OTHER, ["0"], True)]
)
def test_a_resume_by_another_build_names_it_if_its_step_computes_otherwise(
    finished, inside, tmp_path, versions, digests, names
):
    shutil.copytree(finished(*MLP, "--mode=train", "--train_steps=2").folder, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "checkpoints").glob("*.manifest.json")
    record = json.loads(path.read_text())
    steps = record["host_state"]["state"]["steps"]
    steps |= {"versions": steps["versions"] | versions, "digests": digests or steps["digests"]}
    path.write_text(json.dumps(manifest.with_digest(record)))
    outcome = inside(*MLP, "--mode=train", f"--run_dir={tmp_path}", "--train_steps=4").ok()
    assert ("computes otherwise than in the attempt before, of crankshaft 0.9.0: the" in outcome.err) == names


def test_a_run_without_progress_prints_nothing(inside, tmp_path):
    assert inside(*MLP, "--progress=off", "--train_steps=2", f"--run_dir={tmp_path}/run").ok().out == ""
    assert inside("--mode=eval", "--progress=off", f"--run_dir={tmp_path}/run").ok().out == ""


@pytest.mark.parametrize(
    ("flags", "threads", "micro_batches"),
    [
        ("--model=cnn", 4, 4),
        ("--model=cnn", 1, 1),
        ("--model=cnn", 5, 1),  # of 12 examples each
        ("--model=cnn --accumulate_steps=2", 4, 1),
        ("--model=cnn --model_arg=batch_norm=True", 4, 1),
        ("--model=cnn --strategy=mirrored", 4, 1),
        ("--model=cnn --jit=on", 4, 1),
        ("--model=mlp", 4, 1),
        ("--model=dlrm", 4, 4),
        ("--model=wide_deep --model_arg=table_capacity=100", 4, 1),
    ],
)
def test_there_are_as_many_micro_batches_as_cores_where_that_pays(monkeypatch, flags, threads, micro_batches):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", str(threads))
    assert state.parallel_micro_batches(asked("--input=digits", *flags.split())) == micro_batches
