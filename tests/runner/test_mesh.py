"""A run whose model is sharded over a mesh: resumed, evaluated, exported, as any other."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Averaged, load_model, mean, run
from crankshaft.parts.sharding import Attention, Dense, Embedding, RMSNorm
from tests.engine.trainers import Columns, Squares
from tests.runner.modes.test_generation import RUN, text
from tests.runs import result

_ = text  # the fixture
TOKENS = np.arange(64, dtype=np.int32).reshape(2, 32) % 40 + 60
PAIR = ("--strategy=mirrored", "--num_virtual_devices=2", "--mesh=model:2")
MESH = ("--strategy=mirrored", "--num_virtual_devices=4", "--mesh=data:2,model:2")
FLAGS = (
    *(word.replace("layers=2", "layers=1") for word in RUN),
    *("--global_batch_size=8", "--ema_decay=0.9", "--checkpoint_every_steps=3"),
)


@pytest.fixture
def ran(inside, tmp_path, text):
    """ran(name, steps, *flags): the result of a run, or of its going on."""

    def run(name, steps, *flags):
        length = (f"--train_steps={steps}", "--eval_every_steps=3", f"--run_dir={tmp_path / name}")
        out = inside(*FLAGS, *text, *length, *flags).ok().out
        return {**result(tmp_path / name), "out": out}

    return run


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh_and_is_evaluated_and_exported(ran, inside, tmp_path, text):
    first = ran("run", 3, *MESH)
    assert "parameters, each replica holds these" in first["out"]
    shutil.copytree(tmp_path / "run", tmp_path / "pairs")
    here, there = ran("run", 6, *MESH), ran("pairs", 6, "--strategy=mirrored", "--num_virtual_devices=2")
    assert here["resumed_from"] == there["resumed_from"] == 3
    assert there["eval"] == pytest.approx(here["eval"], rel=1e-5)
    common = (*FLAGS, *text, f"--run_dir={tmp_path}/run")
    inside("--mode=eval", *common, f"--result_json={tmp_path}/eval.json").ok()
    alone = json.loads((tmp_path / "eval.json").read_text())
    assert alone["eval"] == pytest.approx(here["eval"], rel=1e-5)
    inside("--mode=export", *common, *MESH, f"--output={tmp_path}/export").ok()
    serve = tf.saved_model.load(f"{tmp_path}/export/6").signatures["serving_default"]
    expected = load_model(tmp_path / "run")(TOKENS)
    np.testing.assert_allclose(serve(features=TOKENS)["outputs"], expected, rtol=0, atol=1e-6)  # compiled, and not


@pytest.mark.parametrize("mesh", ["data:2,model:3", "data:1", "model:3"])
def test_a_mesh_that_does_not_fit_is_answered_with_those_that_do(inside, text, mesh):
    error = inside(*FLAGS[:-2], *text, *MESH[:2], f"--mesh={mesh}", "--train_steps=1").error
    fitting = "data:4,model:1 or data:2,model:2 or data:1,model:4"
    assert f"mesh={mesh} does not lay out 4 replicas; use {fitting}" in error


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model=mlp", "--input=digits", *PAIR), "mesh=model:2: mlp has no layer sharded over the model"),
        (("--model=transformer_lm", "--input=digits"), "features are not sequences of tokens, whole numbers [batch,"),
        ((*FLAGS[:3], "--model_arg=hidden=15", *PAIR), "hidden=15 does not divide over the mesh's model:2; use 14 or"),
    ],
)
def test_a_model_that_is_not_for_the_mesh_or_the_data_is_one_line(inside, flags, says):
    inside(*flags, "--train_steps=1", "--jit=off").refused(says)


@pytest.mark.thorough
def test_a_run_in_python_hands_its_model_out_whole(text):
    given = (flag for flag in (*FLAGS, *PAIR, *text) if "checkpoint" not in flag)
    names = (flag.removeprefix("--").split("=", 1) for flag in given)
    asked = {}
    for name, value in names:
        asked[name] = [*asked.get(name, []), value] if name.endswith("_arg") else value
    done = run(train_steps=2, **asked)
    model, found = done.model, done.predict(TOKENS)
    assert model.get_layer("embedding").weights[0].shape[0] == model.vocabulary
    np.testing.assert_allclose(found, model(TOKENS), rtol=0, atol=1e-6)  # compiled, and op by op


def in_a_row(inputs):
    """A model that is built as it is called."""
    inner = [Dense(16, "columns", "gelu"), tf.keras.layers.Activation("tanh"), Dense(8, "rows")]
    return tf.keras.Sequential([tf.keras.layers.Rescaling(0.1), *inner, tf.keras.layers.Dense(1)])


def as_functions(inputs):
    tokens = tf.keras.Input(inputs.shape[1:])
    x = Embedding(11, 8, split="vocabulary")(tokens)
    x += Attention(2, dropout=0.1)(RMSNorm()(x))
    x = tf.keras.layers.GlobalAveragePooling1D()(Dense(8, "rows")(Dense(16, "columns")(x)))
    return tf.keras.Model(tokens, tf.keras.layers.Dense(1)(x))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [in_a_row, pytest.param(as_functions, marks=pytest.mark.slow)])
def test_a_model_of_cut_layers_is_loaded_whole_where_there_is_no_mesh(tmp_path, make):
    class Own(Squares):
        def build_model(self):
            return make(self.run_context.example[0])

    numbers = np.arange(240, dtype=np.float32).reshape(40, 6) % 11
    mesh = {"strategy": "mirrored", "num_virtual_devices": 4, "mesh": "data:2,model:2"}
    data = ((numbers, numbers[:, 0]), None)
    done = run(Own, data=data, train_steps=3, global_batch_size=8, run_dir=tmp_path / "run", **mesh)
    expected = done.predict(numbers)
    loaded = load_model(tmp_path / "run")  # by its configuration alone
    loaded.save(tmp_path / "whole.keras")
    for model in (done.model, loaded, tf.keras.models.load_model(tmp_path / "whole.keras")):
        np.testing.assert_allclose(model(numbers), expected, rtol=0, atol=1e-5)  # op by op, and compiled
    still = {"train_steps": 1, "optimizer": "sgd", "learning_rate": 1e-30, "global_batch_size": 8}
    begun = run(Own, data=data, init_from=tmp_path / "whole.keras", **still, **mesh)
    np.testing.assert_allclose(begun.predict(numbers), expected, rtol=0, atol=1e-5)


ON_MESH = {"strategy": "mirrored", "num_virtual_devices": 4, "mesh": "data:2,model:2"}
HOW = {"global_batch_size": 6, "learning_rate": 0.01, "seed": 3, "jit": "off", "optimizer": "adam", "train_steps": 7}
X = np.random.default_rng(0).normal(size=(45, 2)).astype("float32")
Y = X[:, :1] * X[:, 1:]


class Shared(Columns):
    def build_model(self):
        layers = [Dense(8, "columns", "gelu"), Dense(4, "rows"), tf.keras.layers.Dense(1)]
        return tf.keras.Sequential([tf.keras.Input([2]), *layers])


class Taught(Shared):
    def build(self):
        super().build()
        self.teacher = Averaged(self.model, decay=0.5)

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1])[:, 0] + tf.square(outputs - self.teacher(batch[0]))[:, 0])


def next_day(tmp_path, **where):
    first = tmp_path / str(len(where))
    run(Shared, data=((X, Y), None), run_dir=first, **HOW, **where)
    return run(Shared, data=((X[::-1], Y[::-1]), (X, Y)), init_from=first, **HOW, **where)


def taught(tmp_path, **where):
    return run(Taught, data=((X, Y), (X, Y)), **HOW, **where)


@pytest.mark.parametrize("how", [taught, pytest.param(next_day, marks=pytest.mark.slow)])
def test_a_mesh_gives_what_one_device_gives(tmp_path, how):
    one, mesh = how(tmp_path), how(tmp_path, **ON_MESH)
    for part in ("train", "eval"):
        assert (mesh.result.get(part) or {}) == pytest.approx(
            one.result.get(part) or {}, rel=1e-5
        )  # sums in another order
    if how is taught:
        outputs = [each.models["teacher"](X) for each in (one, mesh)]
        np.testing.assert_allclose(*outputs, rtol=0, atol=1e-5)
