"""A run that ends with the weights of its best evaluation, and what counts as better.

--freeze: when weights train, and that a run resumes to the same bits.

An open run that returns to its last checkpoint, with its Keras callbacks; a replica that differs is named.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Mean, auc, mean
from crankshaft.engine.hooks import Hook
from crankshaft.runner.failures import UsageError
from tests import runs
from tests.engine.trainers import Squares
from tests.launch.conftest import MLP
from tests.launch.line import FEATURES, LABELS, Line, data
from tests.parts.tensorboard.boards import scalars
from tests.runs import manifests, tensors

pytestmark = pytest.mark.thorough

# The bias swings further out at each step: the first steps mend more than that spoils.
SWINGS = (
    *("--optimizer=sgd", "--learning_rate=1.2", "--train_steps=12", "--eval_every_steps=1", "--global_batch_size=8"),
    *("--jit=off", "--progress=plain"),
)


class Kept(Line):
    """Can be looked at after its run."""

    def build(self):
        super().build()
        Kept.last = self


def loss_of(trainer) -> float:
    return float(np.mean((trainer.model(FEATURES).numpy()[:, 0] - LABELS) ** 2))


@pytest.mark.parametrize(
    ("kept", "devices"), [("checkpoint", ("--strategy=mirrored", "--num_virtual_devices=2")), ("copy", ())]
)
def test_the_best_weights_are_given_back_and_named(inside, tmp_path, kept, devices):
    run_dir = (f"--run_dir={tmp_path}/run",) if kept == "checkpoint" else ()
    flags = (*SWINGS, *run_dir, *devices, f"--result_json={tmp_path}/result.json")
    outcome = inside(*flags, "--restore_best", trainer=Kept, data=data).ok()
    found = runs.result(tmp_path)
    best = found["best"]
    assert best["metric"] == "eval_loss"
    assert 0 < best["step"] < 12
    # Of the weights that the run ends with, and of the best evaluation: sums of 32 float32 values in another order.
    assert found["eval"] == best["eval"] == {"loss": best["value"]}
    assert loss_of(Kept.last) == pytest.approx(best["value"], rel=1e-5)
    assert best["value"] < 0.9 * float(re.findall(r"step 12/12  evaluation  loss (\S+)", outcome.out)[0])
    said = f"best eval_loss {best['value']:.6g} at step {best['step']}, whose weights the model ends with"
    assert said in outcome.out
    assert (found["step"], re.search(r"^evaluation at step 12", outcome.out, re.MULTILINE) is None) == (12, False)
    if run_dir:
        assert runs.steps(tmp_path / "run") == [12]  # a longer run goes on from there
        outcome = inside("--mode=export", *run_dir, trainer=Kept, data=data).ok()
        assert f"SavedModel of step {best['step']}, best/ckpt-{best['step']}: " in outcome.out


def test_without_being_asked_a_run_ends_with_its_last_weights_and_names_the_best(inside, tmp_path):
    run_dir = f"--run_dir={tmp_path}"
    outcome = inside(*SWINGS, run_dir, trainer=Kept, data=data).ok()
    found = runs.result(tmp_path)
    assert loss_of(Kept.last) == pytest.approx(found["eval"]["loss"], rel=1e-5)
    assert found["best"]["eval"] == {"loss": found["best"]["value"]} != found["eval"]
    assert re.search(rf"^best eval_loss \S+ at step {found['best']['step']}$", outcome.out, re.MULTILINE)
    outcome = inside("--mode=export", run_dir, f"--result_json={tmp_path}/export.json", trainer=Kept, data=data).ok()
    assert "SavedModel of step 12, checkpoints/ckpt-12: " in outcome.out


SLOW = ("--optimizer=sgd", "--eval_every_steps=1", "--jit=off", "--progress=plain")


@pytest.mark.parametrize(("flags", "lowered"), [((), True), (("--reduce_lr=min_delta=0",), False)])
def test_a_plateau_is_what_gains_less_than_a_ten_thousandth(inside, tmp_path, flags, lowered):
    """As Keras's ReduceLROnPlateau has it."""
    watching = ("--reduce_lr=patience=2", *flags, f"--run_dir={tmp_path}")
    inside(*SLOW, "--learning_rate=1e-6", "--train_steps=6", *watching, trainer=Line, data=data).ok()
    (scale,) = (value for name, value in runs.tensors(tmp_path).items() if "learning_rate_scale" in name)
    assert (scale < 1) == lowered


class Ranked(Line):
    """Its metrics rise from evaluation to evaluation, as the line comes closer; `tune_loss` is the loss again."""

    def metrics(self, outputs, batch):
        close = 1.0 - tf.square(outputs[:, 0] - batch[1])
        return {"score": mean(close), "found": mean(close, direction="max"), "tune_loss": self.loss(outputs, batch)}


def test_a_metric_of_training_alone_is_named_at_the_start_with_its_direction(inside):
    flags = ("--mode=train", "--train_steps=2", "--early_stopping=patience=9", "--jit=off", "--progress=plain")
    outcome = inside(*flags, "--monitor=max:train_score", trainer=Ranked, data=data).ok()
    assert outcome.out.index("monitored: train_score, higher is better") < outcome.out.index("step 2/2")


@pytest.mark.parametrize("watching", ["--early_stopping=patience=2", "--reduce_lr=patience=2", "--restore_best"])
def test_a_direction_that_nobody_knows_is_refused_before_the_first_step(inside, watching):
    outcome = inside(*SWINGS, "--monitor=eval_score", watching, trainer=Ranked, data=data)
    assert "monitor=eval_score: whether a higher or a lower score is better is not known" in outcome.mistake
    assert "use max:eval_score or min:eval_score" in outcome.mistake
    assert "step 1" not in outcome.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--monitor=train_score --early_stopping=patience=9", "use max:train_score or min:train_score"),
        ("--restore_best", "restore_best takes the best evaluation's ... mode=train makes no evaluations"),
        ("--eval_every_steps=5", "eval_every_steps=5: mode=train makes no evaluations; use mode=train_and_eval"),
    ],
)
def test_what_a_run_of_training_alone_cannot_do_is_refused(inside, flags, says):
    inside("--mode=train", "--train_steps=2", "--jit=off", *flags.split(), trainer=Ranked, data=data).refused(says)


class Sparse(Line):
    """Predicts ever more as positive: the precision has no value before the first of them; the AUC has one never."""

    def metrics(self, outputs, batch):
        high = tf.cast(outputs[:, 0] > 0.1, tf.float32)
        right = Mean(tf.reduce_sum(high * tf.cast(batch[1] > 0, tf.float32)), tf.reduce_sum(high))
        one_class = auc(tf.ones_like(batch[1]), outputs[:, 0])
        return {"precision": right, "auc": one_class, "loss_of_none": Mean(0.0, 0.0)}


RISING = ("--optimizer=sgd", "--learning_rate=0.01", "--eval_every_steps=1", "--jit=off", "--global_batch_size=32")


def test_a_metric_without_a_value_is_nan_on_the_console_and_null_in_every_record(inside, tmp_path):
    flags = (*RISING, "--train_steps=2", f"--run_dir={tmp_path}", "--progress=plain")
    outcome = inside(*flags, trainer=Sparse, data=data).ok()
    assert len(re.findall(r"evaluation  loss \S+  auc nan  loss_of_none nan  precision nan", outcome.out)) == 2
    assert re.search(r"^evaluation at step 2: auc nan, ", outcome.out, re.MULTILINE)
    missing = {"auc": None, "loss_of_none": None, "precision": None}
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["eval"] == {"loss": pytest.approx(result["eval"]["loss"]), **missing}
    assert result["train"] | missing == result["train"]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    of = {kind: [event for event in events if event["event"] == kind] for kind in ("evaluation", "window", "row")}
    assert [event["metrics"] | missing == event["metrics"] for event in of["evaluation"]] == [True, True]
    assert of["window"][0]["metrics"] | missing == of["window"][0]["metrics"]
    columns = {f"{split}_{name}": None for split in ("train", "eval") for name in missing}
    assert [row | columns == row for row in of["row"]] == [True, True]
    for split in ("train", "eval"):
        shown = scalars(tmp_path / "tensorboard" / split)
        assert all(np.isnan(value) for name in missing for value in shown[name].values())
        assert missing.keys() <= shown.keys()


def test_patience_counts_evaluations_without_a_value(inside, tmp_path):
    watching = ("--monitor=eval_auc", "--early_stopping=patience=3", f"--run_dir={tmp_path}", "--train_steps=9")
    outcome = inside(*RISING, *watching, "--progress=plain", trainer=Sparse, data=data).ok()
    assert "stopped at step 3: eval_auc has not improved for 3 evaluations (never a number)" in outcome.out


def test_the_results_evaluation_is_of_the_returned_weights_after_a_restart_too(tmp_path):
    """With all metrics of the best evaluation, and its report by class."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype("float32"), rng.integers(0, 3, 60).astype("int32")
    swings = {"model": "logistic", "optimizer": "sgd", "learning_rate": 6.0, "eval_every_steps": 1, "jit": "off"}
    how = {"data": ((x, y), (x, y), 3), "restore_best": True, "monitor": "eval_accuracy", "progress": "off", **swings}
    best = None
    for steps in (8, 10):  # the second ends with what the first one kept
        done = crankshaft.run(run_dir=tmp_path, train_steps=steps, global_batch_size=60, **how)
        assert best in (None, done.result["best"])
        best = done.result["best"]
        assert done.result["eval"] == pytest.approx(done.evaluate()) == best["eval"]
        assert best["eval"]["accuracy"] == best["value"]
        confusion = np.histogram2d(y, done.predict(x).argmax(-1), 3)[0].tolist()
        assert done.result["by_class"]["confusion"]["matrix"] == confusion
        rows = {row["step"]: row for row in done.history}
        assert rows[best["step"]]["eval_loss"] == best["eval"]["loss"] != rows[steps]["eval_loss"]


ASKED = (*MLP, "--mode=train", "--progress=off", "--global_batch_size=128", "--freeze=dense/:1", "--freeze=bias:0.5")
FREED = 12  # an epoch, at which the first layer's weights are; biases at 6


def weights(run_dir) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors(run_dir).items() if name.startswith("trainer/model/")}


def test_a_run_resumes_to_the_same_bits_before_and_as_weights_are_freed(inside, tmp_path):
    inside(*ASKED, "--train_steps=20", f"--run_dir={tmp_path}/whole").ok()
    for steps in (FREED - 3, FREED, 20):
        inside(*ASKED, f"--train_steps={steps}", f"--run_dir={tmp_path}/parts").ok()
    whole, parts = (tensors(tmp_path / name) for name in ("whole", "parts"))
    assert [name for name in whole if whole[name].tobytes() != parts[name].tobytes()] == []
    states = [manifests(tmp_path / name)[-1]["host_state"]["state"] for name in ("whole", "parts")]
    assert states[0] == states[1]


def test_a_run_goes_on_with_all_weights_where_that_is_asked(inside, tmp_path):
    """The slots are there, and begin where the weights do."""
    asked = (*MLP, "--mode=train", "--progress=off", f"--run_dir={tmp_path}")
    inside(*asked, "--freeze=dense/", "--train_steps=10").ok()
    before = weights(tmp_path)
    refused = inside(*asked, "--train_steps=11")
    assert "freeze: ['dense/'] -> []" in refused.mistake
    inside(*asked, "--train_steps=11", "--allow_changed_config").ok()
    moved = [np.abs(value - before[name]) for name, value in weights(tmp_path).items() if "kernel" in name]
    assert all(np.median(each[each > 0]) < 1.1e-3 for each in moved)  # the rate, as in a first update


class Backbone(tf.keras.layers.Layer):
    """A layer in a layer, as KerasHub's are."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.inner = tf.keras.layers.Dense(3, name="dense")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def lora():
    """A compiled model, of which what LoRA adds trains, and biases."""
    model = tf.keras.Sequential([tf.keras.Input([4]), Backbone()])
    model.layers[0].inner.enable_lora(rank=2)
    model.compile("adam", "mse")
    return model


def moved_variables(before, after):
    """The names of the variables whose values differ."""
    return {path.split("/")[-1] for path, value in after.items() if not np.array_equal(value, before[path])}


def test_lora_trains_what_it_adds_and_a_copy_of_it_is_one_line():
    x, y = np.ones([16, 4], np.float32), np.zeros([16, 3], np.float32)
    run = crankshaft.fit(lora, x, y, epochs=2, verbose=0, seed=1)
    once = crankshaft.fit(lora, x, y, epochs=1, verbose=0, seed=1)
    before, after = ({v.path: v.numpy() for v in each.model.variables} for each in (once, run))
    assert moved_variables(before, after) == {"bias", "lora_kernel_a", "lora_kernel_b"}
    model = lora()
    before = {v.path: v.numpy() for v in model.variables}
    crankshaft.fit(model, x, y, epochs=2, verbose=0)
    assert moved_variables(before, {v.path: v.numpy() for v in model.variables}) == {
        "bias",
        "lora_kernel_a",
        "lora_kernel_b",
    }
    with pytest.raises(UsageError, match=r"dense has 4 variables, and its copy has 2, as after enable_lora"):
        crankshaft.fit(lora(), x, y, verbose=0, strategy="mirrored", num_virtual_devices=1)


def test_mistakes_that_only_the_model_shows_are_one_line(inside):
    assert "freeze=nowhere matches the path of none of the 4 weights" in inside(*MLP, "--freeze=nowhere").mistake
    assert "nothing is left to train" in inside(*MLP, "--freeze=kernel", "--freeze=bias:2").mistake
    drifting = ("--strategy=mirrored", "--num_virtual_devices=2", "--sync_every_steps=16")
    line = inside(*MLP, *drifting, "--freeze=bias:1", "--eval_every_steps=0").mistake
    assert "freeze=bias:1 ends at step 23, between two syncs (sync_every_steps=16)" in line


def test_an_open_run_frees_weights_within_a_call_on_data_that_is_handed_in():
    x = np.random.default_rng(0).normal(size=(64, 8, 8)).astype(np.float32)
    y = np.arange(64) % 10
    asked = {"model": "mlp", "model_arg": {"hidden_units": [4]}, "freeze": ["dense/:1"], "jit": "off"}
    with crankshaft.open_run(data=((x, y), None, 10), **asked, progress="off", global_batch_size=16) as run:
        first = run.model.layers[1].kernel
        before = first.numpy()
        run.train(data=(x, y), steps=4)
        assert np.array_equal(first.numpy(), before)
        run.train(data=(x, y), steps=1)
        assert 0 < np.abs(first.numpy() - before).max() < 1.1e-3


INPUTS = np.random.default_rng(1).normal(size=[32, 3]).astype("f")
TARGETS = INPUTS @ np.array([1, -2, 3], "f")
SHORT_RUN = {
    "global_batch_size": 4,
    "jit": "off",
    "progress": "off",
    "mode": "train",
    "train_steps": 20,
    "optimizer": "adam",
}
MIRRORED = {"strategy": "mirrored", "num_virtual_devices": 2}


class Plane(Squares):
    """Batch normalization's statistics and the optimizer's slots are of the state that is put back."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)])


def of_finite():
    return (INPUTS, TARGETS), None


class Write(Hook):
    """Changes a weight on the last replica alone, once, at the end of a step."""

    def __init__(self, at: int):
        self._at, self._is_done = at, False

    def __call__(self, status):
        if status.step >= self._at and not self._is_done:
            self._is_done = True
            kernel = status.state.trainer.model.layers[1].kernel.value
            last = status.strategy.distribution.experimental_local_results(kernel)[-1]
            last.assign_add(tf.ones_like(last) * 1e-6)


def test_a_replica_that_differs_is_named(tmp_path):
    differs = r"replica 1 \(.*\) of 2 replicas holds other values of \S*kernel \[3, 1\] than the rest"
    # A snapshot in memory is checked as a checkpoint is, and a clock decides at which step.
    how = {**SHORT_RUN, **MIRRORED, "checkpoint_every_steps": 3, "snapshot_seconds": 0, "run_dir": str(tmp_path)}
    with pytest.raises(crankshaft.RunError, match=f"step 9: {differs}"):
        crankshaft.run(Plane, data=of_finite, hooks=[Write(7)], **how)


class Counts(tf.keras.callbacks.Callback):
    ended = 0

    def on_epoch_end(self, epoch, logs=None):
        self.ended += 1

    def get_state(self):
        return {"ended": self.ended}

    def set_state(self, state):
        self.ended = state["ended"]


class Zeroed(tf.keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])


def test_the_evaluation_of_the_result_is_of_the_weights_that_callbacks_leave():
    run = crankshaft.run(Line, data=data, hooks=[Zeroed()], train_steps=4, jit="off", progress="off")
    assert run.result["eval"]["loss"] == pytest.approx(np.mean(LABELS**2), rel=1e-6)


class Stateless(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.opened = object()


def test_keras_callbacks_return_with_the_run(tmp_path, caplog):
    """Epochs of 8 steps and a checkpoint every 12: the run returns before its first epoch's end, and within one.

    No loss is an improvement, so early stopping ends the run after 5 epochs, and the rate falls after 2 and 4.
    """

    def trained_by_calls(name, until):
        tf.keras.utils.set_random_seed(0)
        counts, kwargs = Counts(), {"min_delta": 100.0}
        called = [
            tf.keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, **kwargs),
            tf.keras.callbacks.EarlyStopping("loss", patience=4, restore_best_weights=True, **kwargs),
            tf.keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
            *(counts, Stateless()),
        ]
        how = {**SHORT_RUN, "train_steps": 72, "checkpoint_every_steps": 12, "run_dir": str(tmp_path / name)}
        with crankshaft.open_run(Plane, data=of_finite, hooks=called, **how) as run:
            for step in until:
                run.train(steps=step - run.step)
                run.restore("latest")
            run.train()
            weights = [each.tolist() for each in run.trainer.model.get_weights()]
        return run.step, counts.ended, (tmp_path / f"{name}.csv").read_text(), weights

    expected = trained_by_calls("undisturbed", [])
    assert expected[:2] == (40, 5)
    with caplog.at_level("WARNING", logger="absl"):
        assert trained_by_calls("returns", [20, 29]) == expected
    names = "Keras callback Stateless has no state, so it does not return to step"
    assert sum(record.getMessage().startswith(names) for record in caplog.records) == 1
    assert "as it was traced" not in caplog.text  # stop_training
