"""A user's own script, made a program by train.main: own data, own steps, own hooks."""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine import Trainer, build_layers, make_optimizer, mean

QUIET = ("--jit=off", "--progress=plain")
FEATURES = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 0.25


class Regression(Trainer):
    """Least squares."""

    def __init__(self, units: int = 1):
        super().__init__()
        self.units = units

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(self.units)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))

    def metrics(self, outputs, batch):
        return {"error": mean(tf.abs(outputs[:, 0] - batch[1]))}


def arrays():
    return (FEATURES, LABELS), (FEATURES[:30], LABELS[:30])


def found_in(path) -> dict:
    return json.loads(path.read_text())


def test_a_script_is_a_whole_program_with_flags_of_its_own(crank, tmp_path):
    script = tmp_path / "lines.py"
    script.write_text(
        textwrap.dedent(
            '''
            """Fits lines."""
            import numpy as np
            import tensorflow as tf
            from absl import flags
            from crankshaft.engine import Trainer, mean
            from crankshaft.engine.hooks import every_epoch
            from crankshaft.launch import train

            SLOPE = flags.DEFINE_float("slope", 2.0, "Of the line.")

            class Line(Trainer):
                def build_model(self):
                    return tf.keras.Sequential([tf.keras.layers.Dense(1)])
                def loss(self, outputs, batch):
                    return mean(tf.square(outputs[:, 0] - batch[1]))

            def data():
                x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(64, 1)
                return (x, SLOPE.value * x[:, 0]), (x, SLOPE.value * x[:, 0])

            def slope_now(status, means):
                print("epoch", status.epoch, "slope", float(status.state.trainer.model.layers[0].kernel[0, 0]))

            if __name__ == "__main__":
                train.main(Line, data=data, hooks=[every_epoch(slope_now)])
            '''
        )
    )
    helped = crank("--help", script=script).ok()
    assert "Fits lines." in helped.out
    assert "This script:\n  --slope" in helped.out
    flags = ("--slope=-3", "--optimizer=sgd", "--learning_rate=0.3", "--global_batch_size=32", "--jit=off")
    length = ("--train_epochs=40", "--eval_every_steps=0", f"--run_dir={tmp_path}/run")
    outcome = crank(*flags, *length, script=script).ok()
    seen = re.findall(r"^epoch (\d+) slope (\S+)$", outcome.out, re.MULTILINE)
    assert [int(epoch) for epoch, _ in seen] == list(range(1, 41))
    assert float(seen[-1][1]) == pytest.approx(-3, abs=0.01)
    mistaken = crank("--slop=1", script=script)
    assert mistaken.code == 2
    assert "did you mean slope" in mistaken.error


def test_a_trainers_arguments_are_flags(inside, tmp_path):
    run = (*QUIET, "--train_steps=2", f"--result_json={tmp_path}/r.json")
    outcome = inside(*run, "--model_arg=units=2", trainer=Regression, data=arrays).ok()
    assert "(None, 2)" in outcome.out
    assert found_in(tmp_path / "r.json")["model"] == "Regression"
    assert set(found_in(tmp_path / "r.json")["eval"]) == {"loss", "error"}
    outcome = inside(*run, "--model_arg=unit=2", trainer=Regression, data=arrays)
    assert "--model_arg unit: Regression has no such argument; did you mean units?" in outcome.error


@pytest.mark.parametrize(
    "devices", [pytest.param((), marks=pytest.mark.slow), ("--strategy=mirrored", "--num_virtual_devices=2")]
)
def test_features_may_be_a_dictionary(inside, tmp_path, devices):
    class Two(Regression):
        def build_model(self):
            left, right = tf.keras.Input([2], name="left"), tf.keras.Input([1], name="right")
            joined = tf.keras.layers.Concatenate()([left, right])
            return tf.keras.Model({"left": left, "right": right}, tf.keras.layers.Dense(1)(joined))

    def data():
        named = {"left": FEATURES[:, :2], "right": FEATURES[:, 2:]}
        return (named, LABELS), (named, LABELS)

    flags = (*QUIET, *devices, "--global_batch_size=32", "--learning_rate=0.1")
    length = ("--train_epochs=40", "--eval_every_steps=0", f"--run_dir={tmp_path}/run")
    inside(*flags, *length, trainer=Two, data=data).ok()
    assert found_in(tmp_path / "run" / "result.json")["eval"]["loss"] < 1e-2
    inside("--mode=export", f"--run_dir={tmp_path}/run", trainer=Two, data=data).ok()
    serve = tf.saved_model.load(str(tmp_path / "run" / "export" / "120")).signatures["serving_default"]
    outputs = serve(left=tf.constant(FEATURES[:5, :2]), right=tf.constant(FEATURES[:5, 2:]))["outputs"]
    np.testing.assert_allclose(outputs[:, 0], LABELS[:5], atol=0.3)
    readme = (tmp_path / "run" / "export" / "120" / "README.md").read_text()
    request = json.loads(re.search(r"^curl -d '(.*)' http", readme, re.MULTILINE)[1])
    assert request == {"inputs": {"left": [[0.0, 0.0]], "right": [[0.0]]}}


@pytest.mark.slow
def test_data_may_be_datasets_on_any_number_of_replicas(crank, inside, tmp_path):
    def data():
        return tuple(tf.data.Dataset.from_tensor_slices(split) for split in arrays())

    flags = (*QUIET, "--train_epochs=5", "--global_batch_size=32", "--learning_rate=0.05")
    found = []
    for name, devices in {"one": (), "two": ("--strategy=mirrored", "--num_virtual_devices=2")}.items():
        outcome = inside(*flags, *devices, f"--run_dir={tmp_path}/{name}", trainer=Regression, data=data).ok()
        assert "Regression: 96 examples, 3 steps an epoch of 32, 15 steps" in outcome.out
        found.append(found_in(tmp_path / name / "result.json"))
    assert found[0]["eval"]["loss"] < found[0]["train"]["loss"]
    # The same batches, summed in two parts.
    assert found[1]["eval"]["loss"] == pytest.approx(found[0]["eval"]["loss"], rel=1e-5)
    # In a process of its own, where the data function is the first to use TensorFlow, virtual devices come before it.
    script = tmp_path / "datasets.py"
    script.write_text(
        "import tensorflow as tf\n"
        "from crankshaft.launch import train\n"
        "def data():\n"
        "    split = tf.data.Dataset.from_tensor_slices((tf.random.normal([32, 4]), tf.zeros([32], tf.int32)))\n"
        "    return split, split, 2\n"
        "train.main(data=data)\n"
    )
    outcome = crank("--model=logistic", *devices, "--train_steps=2", script=script).ok()
    assert "mirrored, 2 replicas" in outcome.out


def test_a_script_that_changes_its_folder_finds_all_files_where_they_were_typed(inside, tmp_path, monkeypatch):
    """As hydra does for each job. Also where a run is resumed, and its model is loaded."""
    (elsewhere := tmp_path / "elsewhere").mkdir()

    def data():
        os.chdir(elsewhere)
        return arrays()

    flags = ("--run_dir=runs/a b", "--result_json=r.json", "--train_epochs=2", "--checkpoint_every_steps=1", *QUIET)
    for epochs in (2, 3):
        monkeypatch.chdir(tmp_path)
        outcome = inside(*flags, f"--train_epochs={epochs}", trainer=Regression, data=data).ok()
    assert outcome.out.endswith(f" -m tensorboard.main --logdir '{tmp_path}/runs/a b/tensorboard'\n")  # can be pasted
    monkeypatch.chdir(tmp_path)
    model = crankshaft.load_model("runs/a b")
    inside("--mode=eval", *flags[:2], trainer=Regression, data=data).ok()
    assert model.predict(FEATURES, verbose=0).shape == (96, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "r.json", "runs"]
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    "kind", [tf.constant, pytest.param(np.float64, marks=pytest.mark.slow)], ids=["tensors", "float64"]
)
def test_data_may_be_of_other_kinds_of_arrays(inside, tmp_path, kind):
    def data():
        return tuple(tuple(kind(array) for array in split) for split in arrays())

    for name, each in {"others": data, "arrays": arrays}.items():
        inside(*QUIET, "--train_steps=4", f"--result_json={tmp_path}/{name}.json", trainer=Regression, data=each).ok()
    assert found_in(tmp_path / "others.json")["eval"] == found_in(tmp_path / "arrays.json")["eval"]


def test_an_average_begins_with_the_weights_that_were_brought(inside, tmp_path):
    flags = (*QUIET, "--mode=train", "--optimizer=sgd", "--global_batch_size=32")
    trained = ("--train_epochs=40", "--learning_rate=0.1", f"--run_dir={tmp_path}/source")
    inside(*flags, *trained, trainer=Regression, data=arrays).ok()
    still = ("--train_steps=1", "--learning_rate=0", "--ema_decay=0.99", f"--init_from={tmp_path}/source")
    inside(*flags, *still, f"--run_dir={tmp_path}/run", trainer=Regression, data=arrays).ok()
    losses = []
    for run in ("source", "run"):  # the second by its average
        to = tmp_path / f"{run}.json"
        evaluated = ("--mode=eval", f"--run_dir={tmp_path}/{run}", f"--result_json={to}")
        inside(*evaluated, trainer=Regression, data=arrays).ok()
        losses.append(found_in(to)["eval"]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_layers_beside_the_model_are_brought_too(inside, tmp_path):
    class Parts(Regression):
        def build_model(self):
            self.parts = [tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)]
            for part, size in zip(self.parts, (3, 4), strict=True):
                part.build((None, size))
            return tf.keras.Sequential([tf.keras.layers.Identity()])

        def forward(self, features, training):
            for part in self.parts:
                features = part(features, training=training)
            return features

        @property
        def trainable_variables(self):
            return [variable for part in self.parts for variable in part.trainable_variables]

    flags = (*QUIET, "--mode=train", "--optimizer=sgd", "--global_batch_size=32")
    inside(*flags, "--train_epochs=9", f"--run_dir={tmp_path}/source", trainer=Parts, data=arrays).ok()
    still = ("--train_steps=1", "--learning_rate=0", f"--init_from={tmp_path}/source")
    inside(*flags, *still, f"--run_dir={tmp_path}/run", trainer=Parts, data=arrays).ok()
    losses = []
    for run in ("source", "run"):
        to = tmp_path / f"{run}.json"
        inside("--mode=eval", f"--run_dir={tmp_path}/{run}", f"--result_json={to}", trainer=Parts, data=arrays).ok()
        losses.append(found_in(to)["eval"]["loss"])
    assert losses[1] == losses[0]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (lambda mean, spread: {"mean": mean, "spread": spread}, ["mean", "spread"]),
        (lambda mean, spread: (mean, spread), ["outputs_0", "outputs_1"]),
        pytest.param(
            lambda mean, spread: {"both": {"mean": mean, "spread": spread}},
            ["outputs_0", "outputs_1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["named", "pair", "nested"],
)
def test_an_export_has_all_layers_and_outputs(inside, tmp_path, shape, names):
    """An encoder beside the model, and two outputs of it."""

    class Encoded(Regression):
        def build(self):
            self.encoder = tf.keras.Sequential([tf.keras.layers.Dense(4)])
            self.encoder.build((None, 3))
            inputs = tf.keras.Input((4,))
            self.model = tf.keras.Model(inputs, shape(*(tf.keras.layers.Dense(1)(inputs) for _ in range(2))))
            self.optimizer = make_optimizer(self, self.trainable_variables)

        @property
        def trainable_variables(self):
            return [*self.encoder.trainable_variables, *self.model.trainable_variables]

        def forward(self, features, training):
            return self.model(self.encoder(features))

        def loss(self, outputs, batch):
            return super().loss(tf.add_n(tf.nest.flatten(outputs)), batch)

        metrics = Trainer.metrics

    run = f"--run_dir={tmp_path}/run"
    inside(*QUIET, "--train_epochs=2", "--global_batch_size=32", run, trainer=Encoded, data=arrays).ok()
    inside("--mode=export", run, trainer=Encoded, data=arrays).ok()
    folder = tmp_path / "run" / "export" / "6"
    outputs = tf.saved_model.load(str(folder)).signatures["serving_default"](features=tf.constant(FEATURES[:30]))
    assert sorted(outputs) == names
    error = np.mean((sum(each.numpy() for each in outputs.values())[:, 0] - LABELS[:30]) ** 2)
    assert found_in(tmp_path / "run" / "result.json")["eval"]["loss"] == pytest.approx(error, rel=1e-5)
    readme = (folder / "README.md").read_text()
    assert ", ".join(f"`{name}`" for name in names) + " out." in readme
    assert f"['{names[0]}'])" in readme


def test_a_hook_sees_every_epochs_means_and_may_end_the_run(inside, tmp_path):
    from crankshaft.engine.hooks import every_epoch

    seen = []

    def watch(status, means):
        seen.append((status.epoch, status.step, means["loss"]))
        if status.epoch == 3:
            status.stop = "three are enough"

    flags = (*QUIET, "--train_epochs=9", "--global_batch_size=32", "--learning_rate=0.05", f"--run_dir={tmp_path}")
    outcome = inside(*flags, trainer=Regression, data=arrays, hooks=[every_epoch(watch)]).ok()
    assert [(epoch, step) for epoch, step, _ in seen] == [(1, 3), (2, 6), (3, 9)]
    assert seen[0][2] > seen[1][2] > seen[2][2]
    assert "stopped at step 9: three are enough" in outcome.out
    assert found_in(tmp_path / "result.json")["stop"] == "three are enough"


def test_a_run_stopped_between_evaluations_shows_the_evaluation_of_its_last_step(inside, tmp_path):
    from crankshaft.engine.hooks import every_steps

    def stop(status, means):
        status.stop = "far enough" if status.step == 5 else None

    flags = (*QUIET, "--train_epochs=9", "--global_batch_size=32", "--learning_rate=0.05", f"--run_dir={tmp_path}")
    inside(*flags, trainer=Regression, data=arrays, hooks=[every_steps(1, stop)]).ok()
    evaluated = ("--mode=eval", f"--run_dir={tmp_path}", f"--result_json={tmp_path}/eval.json")
    inside(*evaluated, trainer=Regression, data=arrays).ok()
    assert found_in(tmp_path / "eval.json")["step"] == found_in(tmp_path / "result.json")["step"] == 5
    assert found_in(tmp_path / "eval.json")["eval"] == found_in(tmp_path / "result.json")["eval"]


def test_an_own_train_step_is_taken(inside, tmp_path):
    class Two(Regression):
        """Two models, two optimizers: one learns the features' part, the other the constant."""

        def build(self):
            super().build()
            self.other = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
            build_layers(self, self.other)
            self.other_optimizer = make_optimizer(self, self.other.trainable_variables)

        def train_step(self, batch):
            variables = [*self.model.trainable_variables, *self.other.trainable_variables]
            with tf.GradientTape() as tape:
                loss = self.loss(self.model(batch[0]) + self.other(batch[0]), batch)
            gradients, count = self.reduction.sum(tape.gradient(loss.total, variables), loss.count)
            gradients = [gradient / count for gradient in gradients]
            mine = len(self.model.trainable_variables)
            self.optimizer.apply(gradients[:mine], variables[:mine])
            self.other_optimizer.apply(gradients[mine:], variables[mine:])
            return {"loss": loss}

        def eval_step(self, batch):
            return {"loss": self.loss(self.model(batch[0]) + self.other(batch[0]), batch)}

    flags = (*QUIET, "--train_epochs=40", "--eval_every_steps=0", "--global_batch_size=32", "--learning_rate=0.1")
    flags += (f"--run_dir={tmp_path}",)
    inside(*flags, trainer=Two, data=arrays).ok()
    assert found_in(tmp_path / "result.json")["eval"]["loss"] < 1e-2
    again = inside(*flags, trainer=Two, data=arrays).ok()
    assert "this run is complete" in again.out
    for folder in ("checkpoints", "best"):
        shutil.rmtree(tmp_path / folder)
    assert "resumed" not in inside(*flags, trainer=Two, data=arrays).ok().out


@pytest.mark.parametrize(("mode", "regularizer"), [("train", "l2"), ("train_and_eval", "l2"), ("train", None)])
def test_the_summary_of_a_run_says_what_loss_leaves_out(inside, mode, regularizer):
    class Penalized(Regression):
        def build_model(self):
            return tf.keras.Sequential([tf.keras.layers.Dense(1, activity_regularizer=regularizer)])

    done = inside(
        "--jit=off", "--progress=plain", f"--mode={mode}", "--train_steps=3", trainer=Penalized, data=arrays
    ).ok()
    assert ("loss leaves out what layers add to it; loss_with_penalties" in done.out) == bool(regularizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_a_run_goes_on_with_a_layer_unfrozen(inside, tmp_path, optimizer):
    class Tuned(Regression):
        def __init__(self, frozen: bool = True):
            super().__init__()
            self.frozen = frozen

        def build_model(self):
            first = tf.keras.layers.Dense(3)
            first.trainable = not self.frozen
            return tf.keras.Sequential([first, tf.keras.layers.Dense(1)])

    run = (*QUIET, f"--optimizer={optimizer}", "--ema_decay=0.9", f"--run_dir={tmp_path}/run")
    inside(*run, "--train_steps=4", trainer=Tuned, data=arrays).ok()
    run = (*run, "--train_steps=8", "--model_arg=frozen=false")
    assert "--allow_changed_config" in inside(*run, trainer=Tuned, data=arrays).error
    done = inside(*run, "--allow_changed_config", trainer=Tuned, data=arrays).ok()
    assert "only what matches is restored: missing in the checkpoint (" in done.err
    assert "resumed at step 4 of 8" in done.out
    inside(*run, "--train_steps=12", trainer=Tuned, data=arrays).ok()
