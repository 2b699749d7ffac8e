"""Flags that change a run's arithmetic or its end are seen to do so. In this process."""

from __future__ import annotations

import contextlib
import functools
import json

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Trainer, Update, learning_rate, mean
from crankshaft.engine import optimizers
from crankshaft.engine.layers import recomputed
from crankshaft.engine.step.context import StepContext
from crankshaft.parts.parameter_servers.pulled import OnServers
from crankshaft.runner.command_line.flags import FLAG_INFO

pytestmark = pytest.mark.thorough

MLP = ("--model=mlp", "--model_arg=hidden_units=8", "--input=digits", "--jit=off", "--progress=plain")


@pytest.fixture
def run(finished):
    """`run(*flags)`: the module's run of a small model with these flags."""
    return functools.partial(finished, *MLP)


def difference(some, others) -> float:
    """The largest difference between two checkpoints' weights."""
    weights = [name for name in some if name.startswith("trainer/model/")]
    assert len(weights) == 4
    return max(float(np.abs(some[name] - others[name]).max()) for name in weights)


def test_the_seed_decides_the_run(run):
    first, same, other = (run(*seed, "--train_steps=10") for seed in ((), ("--seed=0",), ("--seed=2",)))
    assert difference(first.tensors, same.tensors) == 0
    assert first.result["train"] == same.result["train"]
    assert difference(first.tensors, other.tensors) > 0.01


def test_an_average_of_the_weights_is_kept_and_evaluated(run, inside, tmp_path):
    plain, averaged = run("--train_steps=10"), run("--train_steps=10", "--ema_decay=0.9")
    assert difference(plain.tensors, averaged.tensors) == 0  # the average changes no step
    assert sum("average" in name for name in averaged.tensors) >= 4
    assert averaged.result["eval"]["loss"] > plain.result["eval"]["loss"]  # it lags behind, early in a run
    for each in (plain, averaged):
        inside("--mode=eval", f"--run_dir={each.folder}", f"--result_json={tmp_path}/eval.json").ok()
        assert json.loads((tmp_path / "eval.json").read_text())["eval"] == each.result["eval"]


def test_gradients_travel_in_the_type_that_was_asked_for(run):
    devices = ("--strategy=mirrored", "--num_virtual_devices=2", "--train_steps=5", "--mode=train")
    exact, rounded = run(*devices).tensors, run(*devices, "--reduce_dtype=bfloat16").tensors
    assert 0 < difference(exact, rounded) < 0.02


@pytest.mark.slow
def test_replicas_meet_as_often_as_asked(run):
    """And what is due without having been asked for is due where they do: an epoch has 23 steps."""
    devices = ("--strategy=mirrored", "--num_virtual_devices=2", "--train_epochs=3")
    synced = run(*devices, "--sync_every_steps=8")
    tensors = synced.tensors
    assert all(f"step {step}/69  evaluation" in synced.out for step in (24, 48, 69))
    assert tensors["trainer/optimizer/iterations/.ATTRIBUTES/VARIABLE_VALUE"].tolist() == [69, 69]
    assert tensors["trainer/reduction/outer/iterations/.ATTRIBUTES/VARIABLE_VALUE"] == 9
    averaged = run(*devices, "--sync_every_steps=8", "--outer_arg=learning_rate=1", "--outer_arg=momentum=0")
    assert difference(tensors, averaged.tensors) > 0


# What a step, or the optimizers that a trainer makes, have to apply: by flag what is given, in runs of one device and
# of two replicas, in which flags go together.
BY_A_STEP = [
    {
        "accumulate_steps": 2,
        "clip_norm": 1.0,
        "ema_decay": 0.5,
        "freeze": ["bias"],
        "learning_rate": 0.5,
        "learning_rate_schedule": "cosine",
        "learning_rate_schedule_arg": {"alpha": 0.5},
        "on_nonfinite": "skip",
        "optimizer": "adamw",
        "optimizer_arg": {"beta_1": 0.5, "weight_decay_exclude": "kernel"},
        "precision": "float16",
        "reduce_lr": {"patience": 1},
        "warmup_steps": 1,
        "weight_decay": 0.1,
    },
    {"optimizer_arg": {"clipvalue": 0.5}},
    {"optimizer_arg": {"clipnorm": 0.5}},
    {"precision": "bfloat16"},
    {"recompute": True},
    {"strategy": "mirrored", "num_virtual_devices": 2, "reduce_dtype": "bfloat16", "shard_optimizer": True},
    {"strategy": "mirrored", "num_virtual_devices": 2, "sync_every_steps": 2},
]
# The engine or the launcher applies these itself, or refuses them, whatever a step does.
BY_OTHERS = set(
    """mode run_dir config seed train_steps train_epochs stop_at_step allow_changed_config max_restarts min_workers
    result_json model model_arg init_from input input_arg data_dir eval_data_dir
    global_batch_size validation_split eval_batch_size resident_data_mb shuffle_window max_bad_records shuffle_buffer
    auto_shard_policy strategy num_virtual_devices mesh gpus steps_per_loop jit communication cluster_hosts
    task_index bind num_ps evaluator cluster_timeout_seconds step_timeout_seconds outer_arg max_staleness_steps
    variable_placement bucket_by eval_every_steps eval_batches checkpoint_every_steps checkpoint_every_minutes
    run_eagerly summary_every_steps
    histogram_every_steps keep_checkpoints snapshot_seconds monitor early_stopping restore_best progress debug
    metrics_port check_sync_every_steps check_numerics eval_checkpoint follow output export_model export_since
    predict_split
    prompt sampling benchmark_arg baseline export_dir tensorboard_dir log_format""".split()
)
WHERE = {"strategy", "num_virtual_devices"}
POINTS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
QUIET = {"data": ((POINTS, POINTS),), "train_steps": 4, "global_batch_size": 8, "jit": "off", "progress": "off"}


class Ignoring(Trainer):
    """Its step updates nothing."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(8, dtype="float32")])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs - batch[1]), 1))

    def train_step(self, batch):
        return {"loss": self.loss(self.model(batch[0]), batch)}


def test_a_steps_options_are_the_values_of_its_flags():
    given = []

    class Noting(Ignoring):
        train_step = Trainer.train_step

        def build_model(self):
            given.append(self.run_context.options)
            return super().build_model()

    flags = BY_A_STEP[0]
    crankshaft.run(Noting, **QUIET, monitor="train_loss", **flags)
    (options,) = given
    beta, exclude = flags["optimizer_arg"].values()
    expected = {**flags, "optimizer_arg": {"beta_1": beta}, "weight_decay_exclude": exclude, "reduce_lr": True}
    del expected["freeze"]
    assert {name: getattr(options, name) for name in expected} == expected
    assert [pattern for pattern, _ in options.freeze] == flags["freeze"]


def test_each_flag_is_applied_by_the_step_or_by_others():
    by_a_step = {name for flags in BY_A_STEP for name in flags} - WHERE
    assert by_a_step | BY_OTHERS == set(FLAG_INFO)
    assert not by_a_step & BY_OTHERS


@pytest.mark.parametrize("flags", BY_A_STEP, ids=lambda flags: " ".join(sorted(flags.keys() - WHERE)))
def test_a_flag_that_a_step_ignores_is_refused_before_the_first_step(flags):
    steps = []

    class Counting(Ignoring):
        def train_step(self, batch):
            tf.py_function(lambda: steps.append(1), [], [])
            return super().train_step(batch)

    with pytest.raises(crankshaft.UsageError, match=r"no effect: Counting.*; (write|make|call) .*, or l") as refused:
        crankshaft.run(Counting, **QUIET, monitor="train_loss", **flags)
    assert not steps
    for name, value in flags.items():
        if name not in WHERE:
            shown = [f"={key}={each}" for key, each in value.items()] if isinstance(value, dict) else [""]
            assert all(f"{name}{each}" in str(refused.value) for each in shown if name != "reduce_lr")


class ByParts(Ignoring):
    """An update of the step's own, by the functions that docs/model.md names, without `minimize`."""

    leaves_out = ""

    def train_step(self, batch):
        variables = self.trainable_variables
        gradients, metrics = self.compute_gradients(batch)
        gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)
        gradients = gradients.over(count)
        update = Update(self, gradients if self.leaves_out == "unscaled" else gradients.unscaled(), variables)
        if self.leaves_out == "apply":
            self.optimizer.apply(update.gradients, variables)
        else:
            update.apply(self.optimizer, variables)
        return metrics if self.leaves_out == "end" else update.end(metrics)


class ByTape(Ignoring):
    """An update by a tape, the reduction and the optimizer alone."""

    def build_model(self):
        block = tf.keras.layers.Dense(8)
        return Recomputing(block) if self.run_context.options.recompute else tf.keras.Sequential([block])

    def train_step(self, batch):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            metrics = {"loss": self.loss(tf.cast(self.model(batch[0]), tf.float32), batch)}
        gradients = tape.gradient(metrics["loss"].total, variables)
        gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)
        self.optimizer.apply(gradients.over(count), variables)
        return metrics


class Recomputing(tf.keras.Model):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def build(self, shape):
        self.block.build(shape)

    def call(self, x):
        return recomputed(self.block, x)


TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
OF_OPTIMIZERS = {
    "freeze": ["bias"],
    "ema_decay": 0.5,
    "reduce_lr": {"patience": 1},
    "monitor": "train_loss",
    "learning_rate": 0.5,
    "learning_rate_schedule": "cosine",
    "warmup_steps": 1,
    "optimizer": "adamw",
    "optimizer_arg": {"beta_1": 0.5},
    "weight_decay": 0.1,
}


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        (ByParts, {"accumulate_steps": 2, "clip_norm": 1.0, "precision": "float16", **OF_OPTIMIZERS}),
        (ByParts, {"on_nonfinite": "skip", "optimizer_arg": {"clipvalue": 0.5}}),
        (ByParts, {"optimizer_arg": {"clipnorm": 0.5}}),
        (ByParts, {**TWO, "reduce_dtype": "bfloat16", "shard_optimizer": True}),
        (ByTape, {**TWO, "reduce_dtype": "bfloat16", "shard_optimizer": True}),
        (ByTape, {**TWO, "sync_every_steps": 2}),
        (ByTape, OF_OPTIMIZERS),
        (ByTape, {"precision": "bfloat16", "recompute": True}),
    ],
)
def test_an_update_without_minimize_applies_flags_by_the_documented_calls(trainer, flags):
    crankshaft.run(trainer, **QUIET, **flags)


@pytest.mark.parametrize(
    ("leaves_out", "flags"),
    [
        ("unscaled", {"precision": "float16"}),
        ("apply", {"precision": "float16"}),
        ("apply", {"on_nonfinite": "skip"}),
        ("end", {"precision": "float16"}),
        ("end", {"on_nonfinite": "skip"}),
        (None, {"clip_norm": 1.0}),
        (None, {"optimizer_arg": {"clipvalue": 0.5}}),
        (None, {"optimizer_arg": {"clipnorm": 0.5}}),
        (None, {"accumulate_steps": 2}),
        (None, {"on_nonfinite": "skip"}),
    ],
)
def test_an_update_that_lacks_a_documented_call_refuses_its_flags(leaves_out, flags):
    trainer = type("Lacking", (ByParts,), {"leaves_out": leaves_out}) if leaves_out else ByTape
    ((name, value),) = flags.items()
    ((name, value),) = (
        ((f"{name}={key}", each) for key, each in value.items()) if isinstance(value, dict) else [(name, value)]
    )
    with pytest.raises(
        crankshaft.UsageError, match=f"{name}={value} has no effect: {trainer.__name__}.train_step makes"
    ):
        crankshaft.run(trainer, **QUIET, **flags)


@pytest.mark.parametrize(("dtype", "is_applied"), [(tf.bfloat16, True), (tf.float32, False)])
def test_an_update_on_servers_applies_reduce_dtype_without_a_sum(dtype, is_applied):
    optimizer, weight = optimizers.build("sgd", 0.1), tf.Variable([1.0])
    optimizer.build([weight])
    optimizer.move_to(OnServers(dtype))  # as `ParameterServer` does, for gradients that are sent
    with StepContext() as step:
        optimizer.apply([tf.constant([1.0])], [weight])
    assert ("Reduction.sum" in step.applied.names) == is_applied


class OwnOptimizer(Ignoring):
    """The default step, with an optimizer that heeds one flag, by a value that was read."""

    def build_optimizer(self):
        return tf.keras.optimizers.Nadam(0.1, beta_1=self.run_context.options.optimizer_arg.get("beta_1", 0.9))

    train_step = Trainer.train_step


class OfTheRunsRate(OwnOptimizer):
    def build_optimizer(self):
        return tf.keras.optimizers.Nadam(learning_rate(self), weight_decay=0.25)


RATE = {"learning_rate": 0.2, "learning_rate_schedule": "cosine", "warmup_steps": 2}


@pytest.mark.parametrize(
    ("trainer", "flags", "ignored"),
    [
        (OwnOptimizer, {"optimizer_arg": {"beta_1": 0.5}, "optimizer": "nadam", "learning_rate": 0.1}, None),
        (OwnOptimizer, {"optimizer_arg": {"beta_2": 0.5}, "optimizer": "nadam"}, "optimizer_arg=beta_2=0.5 has no"),
        (OwnOptimizer, RATE, " and ".join(f"{name}={value}" for name, value in RATE.items())),
        (OwnOptimizer, {"learning_rate": 0.1, "warmup_steps": 2}, "warmup_steps=2 has no effect"),
        (OwnOptimizer, {"weight_decay": 0.5}, "weight_decay=0.5 has no effect"),
        (OfTheRunsRate, {**RATE, "weight_decay": 0.25, "ema_decay": 0.5, "clip_norm": 1.0}, None),
    ],
)
def test_an_own_optimizer_heeds_a_flag_or_the_flag_is_refused(trainer, flags, ignored):
    with pytest.raises(crankshaft.UsageError, match=ignored) if ignored else contextlib.nullcontext():
        crankshaft.run(trainer, **QUIET, **flags)
