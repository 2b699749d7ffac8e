"""Runs from beginning to end, as a user sees them: what is printed, written, resumed, evaluated and exported."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from engine.checkpoints import Checkpoints

DIGITS = ("--input=digits", "--jit=off")
MLP = ("--model=mlp", "--model_arg=hidden_units=16", *DIGITS)


def result(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


def checkpoints(run_dir, folder="checkpoints") -> list[int]:
    return sorted(int(re.search(r"\d+", path.name)[0]) for path in (run_dir / folder).glob("*.manifest.json"))


def tensors(run_dir, folder="checkpoints") -> dict[str, np.ndarray]:
    """The newest checkpoint's variables."""
    reader = tf.train.load_checkpoint(str(run_dir / folder / f"ckpt-{checkpoints(run_dir, folder)[-1]}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "ATTRIBUTES" in name}


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """A finished run of 50 steps, two epochs of 23 and a bit: (run_dir, standard output). A process, as users have."""
    run_dir = tmp_path_factory.mktemp("runs") / "deep" / "er"
    command = [sys.executable, "-m", "launch.train", *MLP, "--train_steps=50", "--checkpoint_every_steps=20"]
    done = subprocess.run(
        [*command, f"--run_dir={run_dir}", f"--result_json={run_dir}/copy.json", "--summary_every_steps=10"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return run_dir, done


def test_a_first_run_prints_what_it_does_and_nothing_else(digits_run):
    run_dir, done = digits_run
    assert "dense (Dense)" in done.stdout
    assert "mlp: 1,437 examples, 23 steps an epoch of 64, 50 steps; one_device, 1 replica(s)" in done.stdout
    assert "XLA off, as asked" in done.stdout
    assert re.search(r"step 50/50  loss \d\.\d+  accuracy \d\.\d+  [\d,]+ examples/s  0s left", done.stdout)
    assert re.search(r"step 46/50  evaluation  loss \d\.\d+  accuracy \d\.\d+", done.stdout)
    assert f"The run's files: {run_dir}" in done.stdout
    assert f"tensorboard.main --logdir {run_dir}/tensorboard" in done.stdout
    assert done.stderr == ""


def test_a_runs_folder_has_all_that_it_is_said_to_have(digits_run):
    run_dir, _ = digits_run
    assert checkpoints(run_dir) == [20, 40, 50]
    assert checkpoints(run_dir, "best") == [50]
    for part in ("train", "eval"):
        assert list((run_dir / "tensorboard" / part).glob("events.out.tfevents.*"))
    config = json.loads((run_dir / "config.json").read_text())
    assert config["flags"]["train_steps"] == 50
    assert config["deciding"]["model_arg"] == {"hidden_units": [16], "dropout": 0.0}


def test_the_result_has_its_documented_keys(digits_run):
    run_dir, _ = digits_run
    found = result(run_dir)
    assert json.loads((run_dir / "copy.json").read_text()) == found
    for name, value in {
        "mode": "train_and_eval",
        "model": "mlp",
        "input": "digits",
        "strategy": "one_device",
        "num_replicas": 1,
        "step": 50,
    }.items():
        assert found[name] == value
    for split in ("train", "eval"):
        assert {"loss", "accuracy"} == set(found[split])
    assert found["eval"]["accuracy"] > 0.4  # by chance: 0.1
    # An epoch is 22 batches of 64 and one of 29: two of the 50 steps are such last ones. The first call is left out,
    # whose few steps are full ones.
    assert found["examples_per_sec"] == pytest.approx((48 * 64 + 2 * 29) / 50 * found["steps_per_sec"], rel=0.02)
    assert 0 < found["wall_seconds"] < 90


def test_a_second_call_of_a_complete_run_says_so_and_shows_its_evaluation(digits_run, inside, tmp_path):
    run_dir, _ = digits_run
    before = tensors(run_dir)
    again = inside(*MLP, "--train_steps=50", f"--run_dir={run_dir}", f"--result_json={tmp_path}/again.json").ok()
    assert "resumed at step 50: this run is complete" in again.out
    assert re.search(r"evaluation at step 50: accuracy \d\.\d+, loss \d\.\d+", again.out.split("complete")[1])
    found = json.loads((tmp_path / "again.json").read_text())
    assert found["eval"] == result(run_dir)["eval"]
    assert found["steps_per_sec"] is None  # no step was done
    after = tensors(run_dir)
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


def test_eval_is_over_every_example_whatever_the_batch(digits_run, inside, tmp_path):
    run_dir, _ = digits_run
    found = []
    for batch in (7, 360):
        to = tmp_path / f"{batch}.json"
        inside("--mode=eval", f"--run_dir={run_dir}", f"--eval_batch_size={batch}", f"--result_json={to}").ok()
        found.append(json.loads(to.read_text())["eval"])
    assert found[0]["accuracy"] == found[1]["accuracy"]
    # The same float32 losses, summed in another order.
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)


def test_export_gives_the_same_outputs_in_another_process(digits_run, inside, tmp_path):
    run_dir, _ = digits_run
    outcome = inside("--mode=export", f"--run_dir={run_dir}", f"--export_dir={tmp_path}/served").ok()
    folder = tmp_path / "served" / "50"
    assert f"SavedModel of step 50: {folder}" in outcome.out
    readme = (folder / "README.md").read_text()
    assert "serving_default" in readme
    command = re.search(r"^python (-c '.*') \| curl -d @- http", readme, re.MULTILINE)[1]
    request = subprocess.run([sys.executable, *shlex.split(command)], capture_output=True, timeout=30, check=True)
    assert np.shape(json.loads(request.stdout)["inputs"]["features"]) == (1, 28, 28, 1)
    snippet = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    exec(snippet, {"FOLDER": str(folder), "print": lambda outputs: np.testing.assert_equal(outputs.shape, (1, 10))})
    features = np.random.default_rng(0).random((5, 28, 28, 1), np.float32)
    np.save(tmp_path / "features.npy", features)
    asking = (
        "import sys, numpy as np, tensorflow as tf\n"
        "serve = tf.saved_model.load(sys.argv[1]).signatures['serving_default']\n"
        "for batch in np.split(np.load(sys.argv[2]), [1]):\n"
        "    print(*serve(features=tf.constant(batch))['outputs'].numpy().ravel(), sep='\\n')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", asking, folder, tmp_path / "features.npy"],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    served = np.array(process.stdout.split(), np.float32).reshape(5, 10)
    weights = tensors(run_dir)
    layer = "trainer/model/_functional/_operations/{}/{}/.ATTRIBUTES/VARIABLE_VALUE"
    hidden, logits = (
        (weights[layer.format(number, "_kernel")], weights[layer.format(number, "bias")]) for number in (2, 3)
    )
    batches = [batch.reshape(len(batch), -1) for batch in np.split(features, [1])]
    expected = [tf.nn.relu(batch @ tf.constant(hidden[0]) + hidden[1]) @ logits[0] + logits[1] for batch in batches]
    np.testing.assert_allclose(served, np.concatenate(expected), rtol=1e-6, atol=1e-6)

    again = inside("--mode=export", f"--run_dir={run_dir}", f"--export_dir={tmp_path}/served")
    assert again.code == 2
    assert f"{folder} exists; remove it" in again.error


def test_train_mode_evaluates_nothing(inside, tmp_path):
    outcome = inside(*MLP, "--mode=train", "--train_steps=25", f"--run_dir={tmp_path}").ok()
    assert "evaluation" not in outcome.out
    found = result(tmp_path)
    assert found["mode"] == "train"
    assert "eval" not in found
    assert found["train"]["loss"] > 0
    assert checkpoints(tmp_path) == [25]
    assert not (tmp_path / "best").exists() or not checkpoints(tmp_path, "best")


def test_a_run_of_one_call_has_that_calls_rate(inside, tmp_path):
    inside(*MLP, "--mode=train", "--train_steps=1", f"--result_json={tmp_path}/r.json").ok()
    assert json.loads((tmp_path / "r.json").read_text())["steps_per_sec"] > 0


def test_a_model_that_gained_a_layer_is_not_evaluated_with_random_weights(digits_run, inside):
    run_dir, _ = digits_run
    wider = ("--model_arg=hidden_units=16,16", "--allow_changed_config")
    for mode in ("eval", "export"):
        outcome = inside(f"--mode={mode}", f"--run_dir={run_dir}", *wider)
        assert outcome.code == 2
        assert "ckpt-50" in outcome.error
        assert "is of another model or optimizer" in outcome.error


def test_eval_takes_what_belongs_to_the_run_and_no_more(digits_run, inside, tmp_path):
    source, _ = digits_run
    run = (*MLP, "--mode=train", f"--run_dir={tmp_path}/run")
    shutil.copytree(source, tmp_path / "source")
    inside(*run, "--train_steps=2", f"--init_from={tmp_path}/source").ok()
    shutil.rmtree(tmp_path / "source")
    # The source has done its work; the run has weights of its own. The length may be said in the other unit.
    inside("--mode=eval", f"--run_dir={tmp_path}/run", "--train_epochs=3").ok()
    inside("--mode=eval", f"--run_dir={tmp_path}/run", "--train_steps=0").ok()
    again = inside(*run, "--train_steps=4", f"--init_from={tmp_path}/source").ok()
    assert "resumed at step 2 of 4" in again.out
    assert inside("--mode=benchmark", *MLP, "--train_steps=0", "--warmup_steps=3", "--benchmark_steps=3").ok()


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("pull_every_steps", 4),
        ("result_jsonl", "all.jsonl"),
        ("strategy", "mirrored"),
        ("strategy", "parameter_server"),
    ],
)
def test_eval_by_one_process_of_what_others_have_trained(digits_run, inside, tmp_path, flag, values):
    """What only they had use for, or wrote to, is left out; a number of devices belongs to its strategy."""
    shutil.copytree(digits_run[0], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["flags"] |= {flag: values, "num_virtual_devices": 2 if values == "mirrored" else 0}
    if flag in config["deciding"]:
        config["deciding"][flag] = values
    path.write_text(json.dumps(config))
    inside(
        "--mode=eval", f"--run_dir={tmp_path}/run", *(["--strategy=one_device"] if values == "mirrored" else [])
    ).ok()
    assert not pathlib.Path("all.jsonl").exists()


def test_eval_takes_the_newer_one_of_the_best_that_is_removed_meanwhile(digits_run, inside, tmp_path, monkeypatch):
    shutil.copytree(digits_run[0], tmp_path / "run")
    latest, asked = Checkpoints.latest, []

    def and_then_removed(self):
        found = latest(self)
        asked.append(found.step)
        if len(asked) == 1:
            for path in (tmp_path / "run" / "checkpoints").glob(f"{found.name}.*"):
                path.unlink()
        return found

    monkeypatch.setattr(Checkpoints, "latest", and_then_removed)
    outcome = inside("--mode=eval", f"--run_dir={tmp_path}/run").ok()
    assert asked == [50, 40]
    assert "ckpt-50 was removed" in outcome.err


def test_a_checkpoint_without_replicas_of_their_own_is_refused_by_one_that_has_them(inside, tmp_path):
    run = (*MLP, "--mode=train", "--strategy=mirrored", "--num_virtual_devices=2", "--optimizer=sgd")
    run = (*run, f"--run_dir={tmp_path}")
    inside(*run, "--train_steps=2").ok()
    outcome = inside(*run, "--train_steps=4", "--sync_every_steps=2", "--allow_changed_config")
    assert outcome.code == 2
    assert "is of another model or optimizer" in outcome.error
    assert "iterations: [None] int64 here, [] int64 in the checkpoint" in outcome.err


def test_a_complete_run_says_what_it_takes_to_go_on(inside, tmp_path):
    run = (*MLP, "--mode=train", "--learning_rate_schedule=cosine", f"--run_dir={tmp_path}")
    inside(*run, "--train_steps=2").ok()
    assert (
        "--allow_changed_config: --learning_rate_schedule=cosine ends here" in inside(*run, "--train_steps=2").ok().out
    )
    assert "--allow_changed_config" in inside(*run, "--train_steps=4").error
    assert "resumed at step 2 of 4" in inside(*run, "--train_steps=4", "--allow_changed_config").ok().out


def test_eval_leaves_out_a_checkpoint_that_a_live_run_removes_meanwhile(digits_run, inside, tmp_path, monkeypatch):
    source, _ = digits_run
    shutil.copytree(source, tmp_path / "run")
    listed = Checkpoints.all

    def and_then_removed(self):
        found = listed(self)
        for path in (tmp_path / "run" / "checkpoints").glob("ckpt-20.*"):
            path.unlink()
        return found

    monkeypatch.setattr(Checkpoints, "all", and_then_removed)
    to = tmp_path / "eval.json"
    flags = ("--mode=eval", f"--run_dir={tmp_path}/run", "--eval_checkpoint=all", f"--result_json={to}")
    outcome = inside(*flags).ok()
    assert list(json.loads(to.read_text())["evals"]) == ["40", "50"]
    assert "ckpt-20 was removed" in outcome.err


def test_a_resumed_run_keeps_its_choice_of_xla_through_a_process_that_cannot_follow_it(inside, tmp_path):
    run = (*MLP[:2], "--input=digits", "--mode=train", "--checkpoint_every_steps=0", f"--run_dir={tmp_path}")
    inside(*run, "--jit=on", "--train_steps=1").ok()
    outcome = inside(*run, "--debug", "--train_steps=2").ok()
    assert "XLA off: XLA leaves the checks of --debug out" in outcome.out
    assert result(tmp_path)["jit"] is False
    assert "XLA on, as this run began" in inside(*run, "--train_steps=3").ok().out
    assert result(tmp_path)["jit"] is True


@pytest.mark.parametrize("how", [("--mode=train",), ("--eval_every_steps=0",)])
def test_the_training_loss_can_stop_what_makes_no_evaluations(inside, tmp_path, how):
    stopping = ("--monitor=train_loss", "--early_stopping_patience=1", "--learning_rate=0")
    outcome = inside(*MLP, *stopping, *how, "--train_epochs=9", f"--run_dir={tmp_path}").ok()
    assert re.search(r"stopped at step \d+: train_loss has not improved for 1 evaluations", outcome.out)
    assert result(tmp_path)["step"] < 9 * 23


def test_benchmark_times_steps_and_leaves_the_run_alone(inside, tmp_path):
    outcome = inside(
        *MLP, "--mode=benchmark", "--benchmark_steps=60", f"--run_dir={tmp_path}", f"--result_json={tmp_path}/b.json"
    ).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["mode"] == "benchmark"
    assert set(found["step_ms"]) == {"p50", "p90", "p99"}
    for name in (
        *("mean", "stderr", "jitter", "input_wait_fraction", "compile_seconds", "peak_rss_mb", "environment"),
        *("examples_per_sec", "steps_per_sec", "wall_seconds", "model", "input", "strategy", "num_replicas"),
    ):
        assert name in found
    assert "steps/s" in outcome.out
    assert not (tmp_path / "config.json").exists()
    assert not (tmp_path / "result.json").exists()
    assert not list(tmp_path.glob("checkpoints/ckpt*"))


def test_benchmark_of_all_parts_explains_the_whole_and_names_the_ops(inside, tmp_path):
    outcome = inside(
        *(*MLP, "--mode=benchmark", "--benchmark_seconds=0.05", "--benchmark_part=all", "--profile", "--jit=off"),
        *(f"--run_dir={tmp_path}", f"--result_json={tmp_path}/b.json"),
    ).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    timed, shares = found["parts"], found["parts"]["shares"]
    assert timed["reduce"] is None
    assert any("reduce was not timed: one replica" in line for line in found["warnings"])
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(timed[name]["ms_per_step"] > 0 for name in ("whole", "step", "input", "update"))
    assert timed["checkpoint"]["mb"] > 0
    # 784-16-10: forward, for the weights, and for the second layer's inputs.
    assert found["flops_per_step"] == 2 * 64 * (2 * 784 * 16 + 3 * 16 * 10)
    assert found["roofline"]["bound"] in ("compute", "memory")
    assert any("MatMul" in op["type"] for op in found["profile"]["ops"])
    assert len(found["profile"]["ops"]) == 10
    assert list(tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb"))
    assert not list(tmp_path.glob("checkpoints/*"))
    assert "share of limit" in outcome.out


def test_benchmark_on_replicas_says_what_share_their_sums_take(inside, tmp_path):
    place = ("--strategy=mirrored", "--num_virtual_devices=2", "--mode=benchmark", "--benchmark_seconds=0.1")
    inside(*MLP, *place, f"--result_json={tmp_path}/b.json").ok()
    found = json.loads((tmp_path / "b.json").read_text())
    assert 0 < found["reduce_fraction"] <= 1
    inside(*MLP, "--mode=benchmark", "--benchmark_seconds=0.1", f"--result_json={tmp_path}/b.json").ok()
    assert json.loads((tmp_path / "b.json").read_text())["reduce_fraction"] is None


def test_init_from_takes_the_weights_and_nothing_else(digits_run, inside, tmp_path):
    source, _ = digits_run
    flags = (*MLP, "--mode=train", "--learning_rate=0", "--train_steps=1", "--optimizer=sgd")
    inside(*flags, f"--init_from={source}", f"--run_dir={tmp_path}").ok()
    old, new = tensors(source), tensors(tmp_path)
    weights = [name for name in old if name.startswith("trainer/model/")]
    assert len(weights) == 4
    assert all(np.array_equal(old[name], new[name]) for name in weights)
    assert new["step/.ATTRIBUTES/VARIABLE_VALUE"] == 1
    outcome = inside("--model=logistic", *DIGITS, f"--init_from={source}")
    assert outcome.code == 2
    assert "do not fit this model" in outcome.error


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "logistic"])
def test_every_model_learns_in_every_precision(inside, tmp_path, model, precision):
    small = [
        "--input=synthetic",
        "--input_arg=shape=12,12,1",
        "--input_arg=examples=256",
        "--input_arg=eval_examples=64",
    ]
    flags = [f"--model={model}", *small, "--jit=off", f"--precision={precision}", "--train_steps=24"]
    inside(*flags, "--learning_rate=0.005", f"--result_json={tmp_path}/r.json").ok()
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["precision"] == precision
    assert found["eval"]["loss"] < 2.1  # ten classes by chance: 2.3, and float16 leaves out a step or two
    assert np.isfinite(found["train"]["loss"])


def test_digits_are_learned_on_two_replicas_as_on_one(inside, tmp_path):
    found = []
    for name, place in {"one": (), "two": ("--strategy=mirrored", "--num_virtual_devices=2")}.items():
        inside(*MLP, *place, "--train_steps=30", f"--run_dir={tmp_path}/{name}").ok()
        found.append(result(tmp_path / name))
    assert [each["num_replicas"] for each in found] == [1, 2]
    # Float32 rounding of sums over 64 examples, 30 steps on.
    assert found[1]["eval"]["loss"] == pytest.approx(found[0]["eval"]["loss"], rel=1e-5)
    assert found[1]["train"]["loss"] == pytest.approx(found[0]["train"]["loss"], rel=1e-5)
