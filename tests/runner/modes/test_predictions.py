"""Predictions: of anything that has features, each example once and in order, on any devices; and as files."""

from __future__ import annotations

import csv
import itertools
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Data, Embedding, UsageError, load_model, open_run, run
from crankshaft.models.mlp import Model
from crankshaft.runner.modes.prediction_files import prediction_columns, write
from tests.engine.trainers import Columns, Squares
from tests.launch.conftest import MLP

pytestmark = pytest.mark.thorough

QUIET = {"jit": "off", "progress": "off"}
PETS = ("cat", "dog", "tit, great")
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(37, 4)).astype(np.float32)
LABELS = rng.integers(0, 3, 37).astype(np.int32)
IDS = [f"pets/{index}" for index in range(3, 8)]


class Pets(crankshaft.Source):
    element_spec = (crankshaft.Spec((4,), np.float32), crankshaft.Spec((), np.int32))

    def __len__(self):
        return 37

    def read(self, indices):
        return FEATURES[indices], LABELS[indices]

    def ids(self, indices):
        return [f"pets/{index}" for index in indices]


def pets():
    return Data(Pets(), Pets().between(7, 37), num_classes=3, classes=PETS)


# Of 30 examples by 7 the last batch has 2, fewer than the three replicas.
ASKED = {"data": pets, "train_steps": 3, "global_batch_size": 12, "eval_batch_size": 7, **QUIET}


@pytest.fixture(scope="module")
def pets_run(tmp_path_factory):
    return run(Model, run_dir=tmp_path_factory.mktemp("runs") / "pets", **ASKED)


def columns_of(outputs, name=None, kind="classes", classes=3, names=PETS, examples=None):
    """What `prediction_columns` makes of outputs of a run of such a model."""
    info = types.SimpleNamespace(num_classes=classes)
    of = types.SimpleNamespace(data_info=info, names=types.SimpleNamespace(classes=names), logits_kind=kind)
    return prediction_columns(of, examples, outputs, name)


def assert_columns(found, expected):
    assert [*found] == [*expected]
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, strict=name not in ("id", "class_name"))


def test_outputs_are_classes_with_probabilities_or_as_they_are():
    clicks = np.float32([[-1e30], [-1.0], [0.0], [0.5], [1e30]])
    sigmoid = [0.0, 1 / (1 + np.e), 0.5, 1 / (1 + np.exp(-0.5)), 1.0]
    of_two = {"class": np.int64([0, 0, 0, 1, 1]), "probability": np.float32(sigmoid)}
    assert_columns(columns_of(clicks, kind="clicks", classes=2, names=None), of_two)
    assert_columns(columns_of(clicks[:, 0], kind="clicks", classes=2, names=None), of_two)
    logits = np.float32([[1000.0, 0.0, 0.0], [0.0, np.log(2.0), 0.0]])
    classes = {"class": np.int64([0, 1]), "class_name": ["cat", "dog"]}
    shares = np.float32([[1.0, 0.0, 0.0], [0.25, 0.5, 0.25]])
    assert_columns(columns_of(logits), {**classes, "probability": shares})
    assert_columns(columns_of(logits, kind=None), {**classes, "output": logits})
    assert_columns(columns_of(logits, "student"), {**classes, "output": logits})  # of a model alone it is not known
    assert_columns(columns_of([clicks], examples=Pets().between(3, 8)), {"id": IDS, "output_0": clicks})
    assert_columns(columns_of(logits, kind=None, classes=4), {"prediction": logits})
    assert_columns(columns_of(logits, kind=None, classes=None), {"prediction": logits})
    assert_columns(columns_of(clicks, kind=None, classes=None), {"prediction": clicks[:, 0]})
    assert_columns(columns_of((logits, clicks)), {"output_0": logits, "output_1": clicks})
    assert_columns(columns_of({"b": clicks, "a": logits}), {"b": clicks, "a": logits})


def test_all_forms_of_data_are_predicted_in_order():
    replicas = {"strategy": "mirrored", "num_virtual_devices": 3}
    with open_run(Model, **{**ASKED, **replicas, "train_steps": None, "eval_batch_size": 9}) as opened:
        opened.train(steps=2)
        expected = opened.model(FEATURES).numpy()
        stream = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).filter(lambda *_: True)
        features = stream.map(lambda x, y: x)
        for data in (FEATURES, Pets(), stream, features.batch(5), features.batch(37, drop_remainder=True)):
            np.testing.assert_allclose(opened.predict(data), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(opened.predict(split="train"), expected, rtol=1e-5, atol=1e-6)
        for split in ({"split": "eval"}, {}):
            np.testing.assert_allclose(opened.predict(**split), expected[7:], rtol=1e-5, atol=1e-6)
        opened.train(steps=1)  # what was computed before is not kept
        np.testing.assert_allclose(opened.predict(FEATURES), opened.model(FEATURES), rtol=1e-5, atol=1e-6)


class Drops(Model):
    """Drops out in predictions and evaluations too, as Monte-Carlo dropout does, by a layer beside the model."""

    def build_model(self):
        self.drop = tf.keras.layers.Dropout(0.5)
        return super().build_model()

    def forward(self, features, training):
        return self.drop(super().forward(features, training), training=True)


def test_a_run_whose_training_data_is_gone_evaluates_and_predicts_other_files(inside, tmp_path):
    towns = ("Bonn", "Rome", "Oslo")
    for name, rows in (("train", 60), ("new", 9)):  # of which Oslo and the third class are missing
        lines = [f"{towns[i % 3 if rows == 60 else i % 2]},{i / 7},{i % 2}" for i in range(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["town,size,label", *lines]))
    run_dir, other = f"--run_dir={tmp_path}/run", f"--eval_data_dir={tmp_path}/new.csv"
    flags = ("--model=wide_deep", "--input=csv", f"--data_dir={tmp_path}/train.csv", "--global_batch_size=16")
    inside(*flags, run_dir, "--mode=train", "--train_steps=5", "--jit=off").ok()

    def answers(name):
        evaluated = inside("--mode=eval", run_dir, other).ok().out
        outcome = inside("--mode=predict", run_dir, other, f"--output={tmp_path}/{name}.csv").ok()
        return evaluated.splitlines()[-1], (tmp_path / f"{name}.csv").read_text(), outcome.err

    before = answers("before")
    (tmp_path / "train.csv").unlink()
    after = answers("after")
    assert after[:2] == before[:2]
    assert f"data_dir={tmp_path}/train.csv of the run is not there, and not needed" in after[2]
    assert "is not that of" not in after[2]
    refused = inside("--mode=predict", run_dir, other, f"--output={tmp_path}/x.csv", "--predict_split=train")
    refused.refused(f"data_dir={tmp_path}/train.csv does not exist")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_call_of_predict_samples_anew_and_each_evaluation_the_same(replicas, tmp_path):
    asked = {**ASKED, "run_dir": tmp_path, "strategy": "mirrored", "num_virtual_devices": replicas}
    with open_run(Drops, **asked) as opened:
        opened.train()
        predicted = [opened.predict(FEATURES) for _ in range(4)]
        assert all(0.2 < np.mean(a == b) < 0.8 for a, b in itertools.pairwise(predicted))
        assert opened.evaluate() == opened.evaluate()
    with open_run(Drops, **asked) as opened:
        np.testing.assert_array_equal(predicted, [opened.predict(FEATURES) for _ in range(4)])
    loaded = load_model(tmp_path, trainer_class=Drops)
    first, second = (loaded.predict(Pets()) for _ in range(2))
    assert 0.2 < np.mean(first == second) < 0.8
    with open_run(Drops, **ASKED, init_from=str(tmp_path)) as begun:
        for mine, theirs in zip(begun.model.get_weights(), loaded.trainer.model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_loaded_model_predicts_on_what_its_run_does(pets_run, tmp_path):
    model, expected = load_model(pets_run.run_dir), pets_run.predict(Pets())
    pairs = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
    for data in (FEATURES, Pets(), pairs, pairs.batch(5), pairs.batch(37, drop_remainder=True)):
        np.testing.assert_allclose(model.predict(data, verbose=0), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="was passed by its program; pass predict the examples, or an input's name"):
        model.predict()
    with pytest.raises(
        UsageError, match="split='eval' is one of the run's own data or of a named input's; give it or data"
    ):
        model.predict(FEATURES, split="eval")
    digits = run(model="logistic", input="digits", run_dir=tmp_path / "digits", train_steps=1, **QUIET)
    model = load_model(digits.run_dir)
    for split in ({}, {"x": "digits"}, {"split": "train"}, {"x": "digits", "split": "train"}):
        expected = digits.predict(split=split.get("split"))
        np.testing.assert_allclose(model.predict(**split), expected, rtol=1e-5, atol=1e-6)


class Spelled(Squares):
    """Takes text, which a layer of its model looks up."""

    def build_model(self):
        look_up = tf.keras.layers.StringLookup(vocabulary=[*PETS[:2]], output_mode="one_hot")
        word = tf.keras.Input([], dtype="string")
        return tf.keras.Model(word, tf.keras.layers.Dense(1)(look_up(word)))


def test_text_is_predicted_in_every_form_by_every_model_of_a_run(tmp_path):
    words = np.array(PETS)[LABELS]
    done = run(Spelled, data=((words, FEATURES[:, 0]), None), train_steps=2, run_dir=tmp_path / "run", **QUIET)
    expected = done.predict(words)
    for model in (done.model, load_model(tmp_path / "run", trainer_class=Spelled)):
        for given in (words, words.astype("S"), words.astype(object), words.tolist(), tf.constant(words)):
            np.testing.assert_allclose(model.predict(given, verbose=0), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"data": FEATURES[:, :2]},
            r"^features are float32\[2\] an example; this run's are float32\[4\]; model.predict",
        ),
        ({"data": Pets().between(0, 2), "split": "eval"}, "^split='eval' is one of the run's own data or of a named"),
        ({"split": "test"}, r"^split='test': the run's data has no such split; it has train, eval$"),
        ({"data": "digit"}, r"^input=digit is unknown; .*digits"),
        ({"data": "digits"}, r"^features are float32\[28, 28, 1\] an example"),
    ],
    ids=["fewer features", "data and a split", "no such split", "no such input", "another input"],
)
def test_what_cannot_be_predicted_is_one_line(pets_run, given, line):
    with pytest.raises(UsageError, match=line):
        pets_run.predict(**given)


def test_files_name_examples_and_classes(pets_run, tmp_path):
    asked = {**ASKED, "run_dir": pets_run.run_dir, "mode": "predict"}
    logits = pets_run.predict(split="eval").astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    names = [PETS[number] for number in logits.argmax(1)]
    result = run(Model, output=tmp_path / "pets.csv", **asked, strategy="mirrored", num_virtual_devices=2).result
    assert (result["examples"], result["output"]) == (30, str(tmp_path / "pets.csv"))
    with open(tmp_path / "pets.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "class", "class_name", *(f"probability_{name}" for name in PETS)]
    assert [row["id"] for row in rows] == [f"pets/{index}" for index in range(7, 37)]
    assert [row["class_name"] for row in rows] == names
    found = [[float(row[f"probability_{name}"]) for name in PETS] for row in rows]
    np.testing.assert_allclose(found, probabilities, rtol=1e-5)
    run(Model, output=tmp_path / "pets.npz", predict_split="train", **asked)
    with np.load(tmp_path / "pets.npz") as arrays:
        assert arrays["id"].tolist() == [f"pets/{index}" for index in range(37)]
        np.testing.assert_allclose(arrays["probability"][7:], probabilities, rtol=1e-5)
        assert arrays["class"][7:].tolist() == logits.argmax(1).tolist()
        for predict in (pets_run.predict, load_model(pets_run.run_dir).predict):
            found = predict(Pets(), columns=True)
            assert list(found) == list(arrays)
            assert [found[name].tolist() == arrays[name].tolist() for name in ("id", "class", "class_name")] == [
                True
            ] * 3
            np.testing.assert_allclose(found["probability"], arrays["probability"], rtol=1e-5)
    run(Model, output=tmp_path / "pets.parquet", **asked)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "pets.parquet")
    assert table.column_names == list(rows[0])
    assert table["class_name"].to_pylist() == names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pets.csv", "pets.npz", "pets.parquet"]


def test_names_that_are_not_utf_8_are_written_as_their_bytes_and_escaped_in_parquet(tmp_path):
    """As Python has names of files and folders: in Latin-1, of a cafe's."""
    import pyarrow.parquet

    class Files(Pets):
        def ids(self, indices):
            return [f"caf\udce9/{index}" for index in indices]

    asked = {"data": lambda: Data(Files(), Files(), num_classes=3, classes=("caf\udce9", r"caf\xe9", "tea")), **QUIET}
    asked = {**asked, "run_dir": tmp_path / "run", "global_batch_size": 12}
    run(Model, **asked, train_steps=1)
    for name in ("p.csv", "p.parquet", "p.npz"):
        run(Model, mode="predict", output=tmp_path / name, **asked)
    with open(tmp_path / "p.csv", encoding="latin-1") as file:
        assert file.readline() == "id,class,class_name,probability_caf\xe9,probability_caf\\xe9,probability_tea\n"
        assert file.readline().startswith("caf\xe9/0,")
    table = pyarrow.parquet.ParquetFile(tmp_path / "p.parquet").read()
    probabilities = [r"probability_caf\xe9", r"probability_caf\xe9", "probability_tea"]
    assert table.column_names == ["id", "class", "class_name", *probabilities]
    assert table["id"].to_pylist() == [rf"caf\xe9/{index}" for index in range(37)]
    assert {*table["class_name"].to_pylist()} <= {r"caf\xe9", "tea"}
    np.testing.assert_allclose(sum(table.column(number).to_numpy() for number in (3, 4, 5)), 1.0, rtol=1e-6)
    assert np.load(tmp_path / "p.npz")["id"][36] == "caf\udce9/36"


def test_outputs_that_are_no_classes_are_named(tmp_path):
    class Several(Columns):
        def forward(self, features, training=False):
            return {"height": self.model(features), "twice": tf.concat([features, features], 1)}

        def loss(self, outputs, batch):
            return super().loss(outputs["height"], batch)

    asked = {"data": ((FEATURES, LABELS[:, None].astype(np.float32)),), "train_steps": 1, **QUIET}
    wanted = {Columns: ["prediction"], Several: ["height_0", *(f"twice_{number}" for number in range(8))]}
    for trainer, columns in wanted.items():
        asked["run_dir"] = tmp_path / trainer.__name__
        run(trainer, **asked)
        run(trainer, mode="predict", output=f"{asked['run_dir']}.csv", **asked)
        with open(f"{asked['run_dir']}.csv") as file:
            assert file.readline().strip().split(",") == columns
            assert len(file.readlines()) == 37


def test_mistakes_of_files_are_one_line(pets_run, inside, tmp_path, monkeypatch):
    (tmp_path / "there.csv").touch()
    asked = (*MLP, "--mode=predict", f"--run_dir={pets_run.run_dir}")
    for more, line in (
        ((), "mode=predict needs output=FILE, one of .csv, .parquet, .npz"),
        ((f"--output={tmp_path}/a.txt",), f"output={tmp_path}/a.txt ends in .txt; give a file of predictions one of"),
        ((f"--output={tmp_path}/there.csv",), "there.csv exists; remove it or use another output"),
        (("--output=/proc/a.csv",), "output: /proc can't be written"),
        ((f"--output={tmp_path}/no/a.csv",), f"the folder {tmp_path}/no does not exist; make it or correct the path"),
        (
            (f"--output={tmp_path}/a.csv", "--eval_checkpoint=all"),
            "=all is for mode=eval, and mode=predict takes one",
        ),
        (
            (f"--output={tmp_path}/a.csv", "--predict_split=test"),
            "predict_split=test can't be used: it is none of eval, train, eval/NAME",
        ),
    ):
        assert line in inside(*asked, *more).mistake
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    mistake = inside(*asked, f"--output={tmp_path}/a.parquet").mistake
    assert "is written by pyarrow; pip install pyarrow, or write" in mistake
    assert [path.name for path in tmp_path.iterdir()] == ["there.csv"]


class Celsius(crankshaft.Trainer):
    """Predicts from degrees, in thousandths, and from a table's rows: more than its Keras model computes."""

    def build_model(self):
        self.places = Embedding("places", rows=64, width=3, admit_after=2)
        return tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])

    def forward(self, features, training):
        degrees = features["degrees"][:, None] / 30.0
        rows = self.places(features["place"], training=training)
        return 1000.0 * self.model(tf.concat([rows, degrees], 1), training=training)

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.reduce_sum(tf.square(outputs / 1000.0 - batch[1][:, None]), 1))


PLACES = rng.choice(rng.integers(-(2**61), 2**61, 9), 48)
DEGREES = rng.uniform(-20, 40, 48).astype(np.float32)
ROWS = {"place": PLACES, "degrees": DEGREES}
SEEN_AND_NOT = {"place": np.r_[PLACES[:5], [3, -4]], "degrees": DEGREES[:7]}


def temperatures():
    split = ROWS, (PLACES % 5).astype(np.float32)
    return Data(split, split)


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.slow), {"strategy": "mirrored", "num_virtual_devices": 2, "ema_decay": 0.5}],
    ids=["one", "averages of two"],
)
def test_every_model_of_a_run_predicts_by_its_forward(tmp_path, more):
    asked = {"data": temperatures, "run_dir": tmp_path / "run", "global_batch_size": 16, **QUIET}
    # The best weights are the last: the loss falls at each evaluation.
    done = run(Celsius, train_steps=9, learning_rate=0.02, eval_every_steps=3, **asked, **more)
    expected = done.predict(SEEN_AND_NOT)
    assert len(np.unique(expected[5:] - expected[6], axis=0)) == 2  # degrees count, for unknown places too
    for model in (done.model, done.best_model(), load_model(tmp_path / "run", trainer_class=Celsius)):
        for outputs in (model.predict(SEEN_AND_NOT, verbose=0), model(SEEN_AND_NOT)):
            np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-3)
        rows = tf.data.Dataset.from_tensor_slices(ROWS)
        np.testing.assert_allclose(model.predict(rows), done.predict(ROWS), rtol=1e-5, atol=1e-3)
        assert model.count_params() == 10
        model.compile(loss=lambda y, outputs: tf.reduce_mean(tf.square(outputs - y)))
        with pytest.raises(UsageError, match=r"^save: a \.keras file can't hold Celsius\.forward; export a SavedModel"):
            model.save(tmp_path / "model.keras")
        with pytest.raises(UsageError, match=r"^fit: this model computes Celsius\.forward; train it by crankshaft.run"):
            model.fit(ROWS, PLACES)
    line = r"whose forward computes .*; give load_model\(\.\.\., trainer_class=Celsius\), or name="
    with pytest.raises(UsageError, match=line):
        load_model(tmp_path / "run")
    alone = load_model(tmp_path / "run", name="model", trainer_class=Celsius if more else None)
    assert alone(np.zeros([3, 4], np.float32)).shape == (3, 2)
    with pytest.raises(UsageError, match=r": a \.keras file can't hold Celsius\.forward; give output a folder"):
        run(Celsius, mode="export", output=tmp_path / "a.keras", **asked)


def test_files_have_bytes_as_they_are_or_name_the_format_that_has(tmp_path):
    columns = {"mask": np.array([b"\0a", b"b\0"], object), "name": np.array([b"caf\xe9", b""], object)}
    for ending in ("csv", "parquet"):
        write(str(tmp_path / f"p.{ending}"), columns, None)
    with open(tmp_path / "p.csv", encoding="latin-1") as file:
        assert file.read() == "mask,name\n\0a,caf\xe9\nb\0,\n"
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pydict() == {
        name: column.tolist() for name, column in columns.items()
    }
    with pytest.raises(
        UsageError, match=r"mask has text that ends in zero bytes, which .npz can't hold; write .parquet"
    ):
        write(str(tmp_path / "p.npz"), columns, None)
    write(str(tmp_path / "p.npz"), {"name": columns["name"]}, None)
    with np.load(tmp_path / "p.npz") as arrays:
        assert arrays["name"].tolist() == [b"caf\xe9", b""]


class Scaled(Columns):
    """Multiplies its outputs by variables of its own, which each step changes."""

    def build_model(self):
        self.scales = {"one": tf.Variable(1.0, trainable=False), "two": tf.keras.Variable(1.0, trainable=False)}
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def forward(self, features, training):
        return self.model(features) * self.scales["one"] * self.scales["two"]

    def train_step(self, batch):
        metrics = super().train_step(batch)
        self.scales["one"].assign_add(0.5)
        self.scales["two"].assign(self.scales["two"] * 0.5)
        return metrics


def test_a_model_that_is_copied_or_loaded_has_the_trainers_own_variables(tmp_path):
    x = np.ones((8, 3), np.float32)
    two = {"strategy": "mirrored", "num_virtual_devices": 2}
    done = run(Scaled, data=((x, x[:, :1]), None), train_steps=3, run_dir=tmp_path, **QUIET, **two)
    outputs = done.predict(x)
    for model in (done.model, load_model(tmp_path, trainer_class=Scaled)):
        np.testing.assert_array_equal(model(x), outputs)
