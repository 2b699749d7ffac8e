"""Flags that change a run's arithmetic or its end are seen to do so. In this process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

MLP = ("--model=mlp", "--model_arg=hidden_units=8", "--input=digits", "--jit=off", "--progress=plain")
STEP = "step/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def run(inside, tmp_path):
    """`run(name, *flags)`: (result, variables of the last checkpoint, what was printed) of a run of its own."""

    def run(name, *flags):
        outcome = inside(*MLP, *flags, f"--run_dir={tmp_path}/{name}").ok()
        found = json.loads((tmp_path / name / "result.json").read_text())
        reader = tf.train.load_checkpoint(str(tmp_path / name / "checkpoints" / f"ckpt-{found['step']}"))
        names = [key for key in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in key]
        return found, {key: reader.get_tensor(key) for key in names}, outcome.out

    return run


def difference(some, others) -> float:
    """The largest difference between two checkpoints' weights."""
    weights = [name for name in some if name.startswith("trainer/model/")]
    assert len(weights) == 4
    return max(float(np.abs(some[name] - others[name]).max()) for name in weights)


def slots(tensors) -> set[str]:
    return {name.split("/")[-3] for name in tensors if "/slots/" in name}


def test_the_seed_decides_the_run(run):
    first, same, other = (
        run(name, f"--seed={seed}", "--train_steps=5") for name, seed in zip("abc", (1, 1, 2), strict=True)
    )
    assert difference(first[1], same[1]) == 0
    assert first[0]["train"] == same[0]["train"]
    assert difference(first[1], other[1]) > 0.01


def test_early_stopping_ends_a_run_that_does_not_improve(run):
    found, _, out = run(
        "a", "--learning_rate=0", "--early_stopping=patience=2", "--eval_every_steps=5", "--train_steps=50"
    )
    assert found["step"] == 15  # the first evaluation is the best one; two more are not better
    assert "stopped at step 15: eval_loss has not improved for 2 evaluations" in out


def test_a_plateau_lowers_the_rate(run):
    watching = ("--monitor=eval_loss", "--reduce_lr=patience=1", "--reduce_lr=factor=0.5", "--eval_every_steps=5")
    _, tensors, _ = run("a", "--learning_rate=0", *watching, "--train_steps=15")
    assert tensors["trainer/optimizer/learning_rate_scale/.ATTRIBUTES/VARIABLE_VALUE"] == 0.25


def test_a_monitor_of_accuracy_takes_more_for_better(run, tmp_path):
    run("a", "--monitor=eval_accuracy", "--eval_every_steps=10", "--train_steps=40")
    best = json.loads(next((tmp_path / "a" / "best").glob("*.manifest.json")).read_text())
    assert best["step"] > 10
    assert best["host_state"]["hooks"]["best_checkpoint"]["monitor"] == "eval_accuracy"


def test_clipping_reaches_the_update(run):
    sgd = ("--optimizer=sgd", "--learning_rate=1", "--train_steps=1", "--mode=train")
    start = run("start", "--optimizer=sgd", "--learning_rate=0", "--train_steps=1", "--mode=train")[1]

    def changes(name, *flags):
        found = run(name, *sgd, *flags)[1]
        return [found[name] - start[name] for name in start if name.startswith("trainer/model/")]

    def norm(changes):
        return np.sqrt(sum(np.square(x).sum() for x in changes))

    assert norm(changes("free")) > 0.1
    # Weights of about 0.3 in float32, less their start: to 1e-4.
    assert norm(changes("norm", "--clip_norm=0.01")) == pytest.approx(0.01, rel=1e-3)
    # Some of the many values of each variable are beyond it.
    values = [np.abs(x).max() for x in changes("value", "--optimizer_arg=clipvalue=0.001")]
    assert values == pytest.approx([0.001] * 4, rel=1e-3)
    norms = [np.linalg.norm(x) for x in changes("each", "--optimizer_arg=clipnorm=0.001")]
    assert norms == pytest.approx([0.001] * 4, rel=1e-3)


def test_accumulated_micro_batches_make_the_same_update(run):
    whole, parts = (run(f"by{n}", f"--accumulate_steps={n}", "--train_steps=10") for n in (1, 4))
    assert difference(whole[1], parts[1]) < 1e-5
    assert whole[0]["train"]["loss"] == pytest.approx(parts[0]["train"]["loss"], rel=1e-5)


def test_an_average_of_the_weights_is_kept_and_evaluated(run, inside, tmp_path):
    plain, averaged = run("plain", "--train_steps=20"), run("averaged", "--train_steps=20", "--ema_decay=0.9")
    assert difference(plain[1], averaged[1]) == 0  # the average changes no step
    assert sum("average" in name for name in averaged[1]) >= 4
    assert averaged[0]["eval"]["loss"] > plain[0]["eval"]["loss"]  # it lags behind, early in a run
    for run_dir, found in (("plain", plain[0]), ("averaged", averaged[0])):
        inside("--mode=eval", f"--run_dir={tmp_path}/{run_dir}").ok()
        assert json.loads((tmp_path / run_dir / "result.json").read_text())["eval"] == found["eval"]


@pytest.mark.parametrize(
    ("optimizer", "rate", "kept"),
    [("sgd", 0.1, set()), ("momentum", 0.1, {"accum"}), ("adamw", 0.02, {"m", "v"}), ("lion", 0.005, set())],
)
def test_the_optimizer_is_the_one_that_was_asked_for(run, optimizer, rate, kept):
    found, tensors, _ = run("a", f"--optimizer={optimizer}", f"--learning_rate={rate}", "--train_steps=40")
    assert slots(tensors) == kept
    assert any("keras_optimizer" in name for name in tensors) == (optimizer == "lion")  # which is Keras's own
    assert found["eval"]["loss"] < 1.9  # ten classes by chance: 2.3


def test_a_schedule_and_its_warm_up_reach_the_steps(run):
    sgd = ("--optimizer=sgd", "--learning_rate=0.1", "--mode=train")
    piecewise = ("--learning_rate_schedule=piecewise", "--learning_rate_schedule_arg=boundaries=2,4")
    zero_after = (*piecewise, "--learning_rate_schedule_arg=values=0.1,0,0")
    # Keras changes the rate after the step of a boundary: steps 0, 1 and 2 have the first.
    three, many = run("three", *sgd, "--train_steps=3")[1], run("many", *sgd, *zero_after, "--train_steps=9")[1]
    assert difference(three, many) == 0
    assert difference(three, run("warm", *sgd, "--warmup_steps=2", "--train_steps=3")[1]) > 1e-4


def test_weight_decay_spares_what_is_excluded(run):
    frozen = ("--optimizer=adamw", "--learning_rate=0.01", "--train_steps=3", "--mode=train")
    plain, decayed = run("plain", *frozen, "--weight_decay=0")[1], run("decayed", *frozen, "--weight_decay=1")[1]
    kernels = [name for name in plain if name.startswith("trainer/model/") and "kernel" in name]
    assert all(np.abs(decayed[name]).mean() < np.abs(plain[name]).mean() for name in kernels)
    spared = run("spared", *frozen, "--weight_decay=1", "--weight_decay_exclude=.")[1]
    assert difference(plain, spared) == 0


def test_gradients_travel_in_the_type_that_was_asked_for(run):
    place = ("--strategy=mirrored", "--num_virtual_devices=2", "--train_steps=5", "--mode=train")
    exact, rounded = run("a", *place)[1], run("b", *place, "--reduce_dtype=bfloat16")[1]
    assert 0 < difference(exact, rounded) < 0.02
    compressed = run("c", *place, "--powersgd_rank=2")[1]
    assert 0 < difference(exact, compressed) < 0.02
    assert any(name.startswith("trainer/reduction/memory/") for name in compressed)


def test_replicas_meet_as_often_as_asked(run):
    """And what is due without having been asked for is due where they do: an epoch has 23 steps."""
    place = ("--strategy=mirrored", "--num_virtual_devices=2", "--train_epochs=3")
    _, tensors, out = run("a", *place, "--sync_every_steps=8", "--progress=plain")
    assert all(f"step {step}/69  evaluation" in out for step in (24, 48, 69))
    assert tensors["trainer/optimizer/iterations/.ATTRIBUTES/VARIABLE_VALUE"].tolist() == [69, 69]
    assert tensors["trainer/reduction/outer/iterations/.ATTRIBUTES/VARIABLE_VALUE"] == 9
    averaged = run("b", *place, "--sync_every_steps=8", "--outer_arg=learning_rate=1", "--outer_arg=momentum=0")[1]
    assert difference(tensors, averaged) > 0


def test_only_so_many_checkpoints_are_kept(run, tmp_path):
    run("a", "--checkpoint_every_steps=2", "--keep_checkpoints=3", "--train_steps=11", "--mode=train")
    kept = sorted(path.name for path in (tmp_path / "a" / "checkpoints").glob("ckpt-*.index"))
    assert kept == ["ckpt-10.index", "ckpt-11.index", "ckpt-8.index"]


def test_streamed_data_gives_the_same_run_as_resident_data(run):
    resident, streamed = (run(f"{mb}", f"--resident_data_mb={mb}", "--train_steps=30") for mb in (1024, 0))
    assert difference(resident[1], streamed[1]) == 0
    assert resident[0]["eval"] == streamed[0]["eval"]
