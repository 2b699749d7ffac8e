"""A run as a user has it: what it prints and leaves. It is evaluated, exported, and gives its weights to another."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import load_model
from crankshaft.engine.checkpoints import Checkpoints
from crankshaft.engine.checkpoints import manifest as manifests
from tests import runs
from tests.launch.conftest import MLP
from tests.runner.command_line.test_config import checked
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

# In a process that does not import crankshaft, and then does.
SERVED = """
import sys, numpy as np, tensorflow as tf
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
for batch in np.split(np.load(sys.argv[2]), [1]):
    print(*serve(features=tf.constant(batch))["outputs"].numpy().ravel(), sep="\\n")
import crankshaft.engine.layers
"""


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """A finished run of 50 steps, two epochs of 23 and a bit: (run_dir, standard output). A process, as users have."""
    run_dir = tmp_path_factory.mktemp("runs") / "deep" / "er"
    command = [sys.executable, "-m", "crankshaft", "train", *MLP, "--train_steps=50", "--checkpoint_every_steps=20"]
    done = subprocess.run(
        [*command, f"--run_dir={run_dir}", f"--result_json={run_dir}/copy.json", "--summary_every_steps=10"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return run_dir, done


def test_a_first_run_prints_what_it_does_and_nothing_else(digits_run):
    run_dir, done = digits_run
    assert "dense (Dense)" in done.stdout
    assert "mlp: 1,437 examples, 23 steps an epoch of 64, 50 steps; one_device, 1 replica" in done.stdout
    assert "XLA off, as configured" in done.stdout
    assert re.search(r"step 50/50  loss \d\.\d+  accuracy \d\.\d+  epoch 2.17  [\d,]+ examples/s  0s left", done.stdout)
    assert re.search(r"step 46/50  evaluation  loss \d\.\d+  accuracy \d\.\d+", done.stdout)
    assert f"The run's files: {run_dir}" in done.stdout
    assert f"tensorboard.main --logdir {run_dir}/tensorboard" in done.stdout
    assert done.stderr == ""


def test_a_runs_folder_has_all_that_it_is_said_to_have(digits_run):
    run_dir, _ = digits_run
    assert runs.steps(run_dir) == [20, 40, 50]
    assert runs.steps(run_dir, "best") == [50]
    for part in ("train", "eval"):
        assert list((run_dir / "tensorboard" / part).glob("events.out.tfevents.*"))
    config = json.loads((run_dir / "config.json").read_text())
    assert config["flags"]["train_steps"] == 50
    assert config["deciding"]["model_arg"] == {"hidden_units": [16], "dropout": 0.0, "class_weight": None}


def test_the_result_has_its_documented_keys(digits_run):
    run_dir, _ = digits_run
    found = runs.result(run_dir)
    assert json.loads((run_dir / "copy.json").read_text()) == found
    expected = {"mode": "train_and_eval", "model": "mlp", "input": "digits", "strategy": "one_device"}
    assert {**expected, "num_replicas": 1, "step": 50}.items() <= found.items()
    for split in ("train", "eval"):
        assert {"loss", "accuracy"} == set(found[split])
    assert found["eval"]["accuracy"] > 0.4  # by chance: 0.1
    # An epoch is 22 batches of 64 and one of 29: two of the 50 steps are such last ones. The first call is left out,
    # whose few steps are full ones.
    assert found["examples_per_sec"] == pytest.approx((48 * 64 + 2 * 29) / 50 * found["steps_per_sec"], rel=0.02)
    assert found["wall_seconds"] > 0


def test_a_second_call_of_a_complete_run_says_so_and_shows_its_evaluation(digits_run, inside, tmp_path):
    run_dir = shutil.copytree(digits_run[0], tmp_path / "run")
    before = runs.tensors(run_dir)
    again = inside(*MLP, "--train_steps=50", f"--run_dir={run_dir}", f"--result_json={tmp_path}/again.json").ok()
    assert "resumed at step 50: this run is complete" in again.out
    assert re.search(r"evaluation at step 50: accuracy \d\.\d+, loss \d\.\d+", again.out.split("complete")[1])
    found = json.loads((tmp_path / "again.json").read_text())
    assert found["eval"] == runs.result(run_dir)["eval"]
    assert found["steps_per_sec"] is None  # no step was done
    after = runs.tensors(run_dir)
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("which", ["latest", "best", "all", "20"])
def test_eval_takes_the_run_as_it_is_and_agrees_with_it(digits_run, inside, tmp_path, which):
    run_dir, done = digits_run
    # No --model, no --input: they are in the run's config.json.
    to = tmp_path / "eval.json"
    outcome = inside("--mode=eval", f"--run_dir={run_dir}", f"--eval_checkpoint={which}", f"--result_json={to}").ok()
    found = json.loads(to.read_text())
    assert found["mode"] == "eval"
    assert found["model"] == "mlp"
    shown = re.findall(r"^evaluation at step (\d+): accuracy \S+, loss \S+$", outcome.out, re.MULTILINE)
    assert [int(step) for step in shown] == {"all": [20, 40, 50], "20": [20]}.get(which, [50])
    assert found["step"] == int(shown[-1])
    if which == "all":
        assert list(found["evals"]) == ["20", "40", "50"]
    if which != "20":
        loss, accuracy = re.findall(r"step 50/50  evaluation  loss (\S+)  accuracy (\S+)", done.stdout)[0]
        assert f"{found['eval']['loss']:.4f}" == loss
        assert f"{found['eval']['accuracy']:.4f}" == accuracy


def test_exports_give_the_same_outputs_in_another_process(digits_run, inside, tmp_path):
    """A SavedModel without Crankshaft, .keras files once it imports it."""
    run_dir, _ = digits_run
    refused = inside("--mode=export", f"--run_dir={run_dir}", f"--output={tmp_path}/served.txt")
    refused.refused(f"output={tmp_path}/served.txt ends in .txt, and an export is a folder or a .keras file")
    outcome = inside("--mode=export", f"--run_dir={run_dir}", f"--output={tmp_path}/served").ok()
    folder = tmp_path / "served" / "50"
    assert f"SavedModel of step 50, checkpoints/ckpt-50: {folder}" in outcome.out
    features = np.random.default_rng(0).random((5, 28, 28, 1), np.float32)
    np.save(tmp_path / "features.npy", features)
    clicks = ("--model=dlrm", "--input=synthetic_clicks", "--input_arg=examples=64", "--model_arg=width=4")
    inside(*clicks, "--train_steps=1", "--global_batch_size=32", "--jit=off", f"--run_dir={tmp_path}/run").ok()
    asking, expected = SERVED, []
    computing = "x = [tf.ones([1, *each.shape[1:]]) for each in model.inputs]; y = model(x if x[1:] else x[0]).numpy()"
    for number, run_dir in enumerate((digits_run[0], tmp_path / "run")):
        exporting = ("--mode=export", f"--run_dir={run_dir}", f"--output={tmp_path}/{number}.keras")
        outcome = inside(*exporting, "--export_model=model").ok()
        assert re.search(
            r"not Keras's, .*crankshaft\.engine\.layers\.\w+\.\w+: import crankshaft\.engine\.layers\.\w+ before",
            outcome.err,
        )
        exec(computing, values := {"tf": tf, "model": load_model(str(run_dir), name="model")})
        expected.append(values["y"].ravel())
        asking += f"model = tf.keras.models.load_model('{tmp_path}/{number}.keras')\n"
        asking += f"{computing}\nprint(*y.ravel(), sep='\\n')\n"
    command = [sys.executable, "-c", asking, folder, tmp_path / "features.npy"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    printed = np.array(process.stdout.split(), np.float32)
    served = printed[:50].reshape(5, 10)
    np.testing.assert_allclose(printed[50:], np.concatenate(expected), rtol=1e-5)
    weights = runs.tensors(digits_run[0])
    layer = "trainer/model/_functional/_operations/{}/{}/.ATTRIBUTES/VARIABLE_VALUE"
    hidden, logits = (
        (weights[layer.format(number, "_kernel")], weights[layer.format(number, "bias")]) for number in (2, 3)
    )
    batches = [batch.reshape(len(batch), -1) for batch in np.split(features, [1])]
    expected = [tf.nn.relu(batch @ tf.constant(hidden[0]) + hidden[1]) @ logits[0] + logits[1] for batch in batches]
    np.testing.assert_allclose(served, np.concatenate(expected), rtol=1e-6, atol=1e-6)

    again = ("--mode=export", f"--run_dir={digits_run[0]}", f"--output={tmp_path}/served")
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    assert f"{folder} has it already" in inside(*again).ok().out
    for other in ("--export_model=model", "--eval_checkpoint=best"):
        inside(*again, other).refused(f"{folder} exists;")
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_a_model_that_gained_a_layer_is_not_evaluated_with_random_weights(digits_run, inside):
    run_dir, _ = digits_run
    wider = ("--model_arg=hidden_units=16,16", "--allow_changed_config")
    for mode in ("eval", "export"):
        inside(f"--mode={mode}", f"--run_dir={run_dir}", *wider).refused("ckpt-50 ... is of another model or optimizer")


def test_eval_takes_what_belongs_to_the_run_and_no_more(digits_run, inside, tmp_path):
    source, _ = digits_run
    run = (*MLP, "--mode=train", f"--run_dir={tmp_path}/run")
    shutil.copytree(source, tmp_path / "source")
    inside(*run, "--train_steps=2", f"--init_from={tmp_path}/source").ok()
    shutil.rmtree(tmp_path / "source")
    # The source has done its work; the run has weights of its own. The length may be said in the other unit.
    inside("--mode=eval", f"--run_dir={tmp_path}/run", "--train_epochs=3").ok()
    again = inside(*run, "--train_steps=4", f"--init_from={tmp_path}/source").ok()
    assert "resumed at step 2 of 4" in again.out
    checked("--mode=benchmark", *MLP, "--train_steps=1", "--warmup_steps=3", "--benchmark_arg=steps=3")


@pytest.mark.parametrize(
    ("flag", "values"), [("result_json", "all.json"), ("strategy", "mirrored"), ("strategy", "parameter_server")]
)
def test_eval_by_one_process_of_what_others_have_trained(digits_run, inside, tmp_path, flag, values):
    """What only they had use for, or wrote to, is left out; a number of devices belongs to its strategy."""
    shutil.copytree(digits_run[0], tmp_path / "run")
    kept = [tmp_path / "run" / "config.json", *(tmp_path / "run" / "checkpoints").glob("*.manifest.json")]
    for path in kept:
        record = json.loads(path.read_text())
        config = record.get("about", record)
        config["flags"] |= {flag: values, "num_virtual_devices": 2 if values == "mirrored" else 0}
        if flag in config["deciding"]:
            config["deciding"][flag] = values
        path.write_text(json.dumps(record if record is config else manifests.with_digest(record)))
    inside(
        "--mode=eval", f"--run_dir={tmp_path}/run", *(["--strategy=one_device"] if values == "mirrored" else [])
    ).ok()
    assert not pathlib.Path("all.jsonl").exists()


@pytest.mark.parametrize(
    ("method", "which", "removed", "left"), [("latest", "latest", 50, ["40"]), ("all", "all", 20, ["40", "50"])]
)
def test_eval_takes_those_that_are_left_where_a_live_run_removes_one_meanwhile(
    digits_run, inside, tmp_path, monkeypatch, method, which, removed, left
):
    shutil.copytree(digits_run[0], tmp_path / "run")
    listed = getattr(Checkpoints, method)

    def and_then_removed(self, *where):
        found = listed(self, *where)
        for path in (tmp_path / "run" / "checkpoints").glob(f"ckpt-{removed}.*"):
            path.unlink()
        return found

    monkeypatch.setattr(Checkpoints, method, and_then_removed)
    to = tmp_path / "eval.json"
    flags = ("--mode=eval", f"--run_dir={tmp_path}/run", f"--eval_checkpoint={which}", f"--result_json={to}")
    outcome = inside(*flags).ok()
    found = json.loads(to.read_text())
    assert list(found.get("evals", {str(found["step"]): None})) == left
    assert f"ckpt-{removed} was removed" in outcome.err
