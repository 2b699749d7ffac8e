"""The confusion matrix of an evaluation and its report by class: exact on replicas, as result, table and image."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Data, fit, open_run, run
from crankshaft.engine.hooks.evaluation import Evaluated
from crankshaft.engine.metrics.by_class import picture, report
from crankshaft.models.logistic import Model
from crankshaft.parts.keras_models.keras_trainer import KerasTrainer
from crankshaft.runner.modes.evaluate import by_class

pytestmark = pytest.mark.thorough

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(100, 4)).astype(np.float32)
# Class 3 is there in training alone.
LABELS = np.where(np.arange(100) < 50, rng.integers(0, 4, 100), rng.integers(0, 3, 100)).astype(np.int32)
NAMES = ("cat", "dog", "tit", "rat")
# Batches of 30 and 20, which three replicas share out unevenly.
ASKED = {"train_steps": 20, "eval_batch_size": 30, "learning_rate": 0.3, "jit": "off"}


def data():
    halves = ((FEATURES[part], LABELS[part]) for part in (slice(0, 50), slice(50, 100)))
    return Data(*halves, num_classes=4, classes=NAMES)


def by_hand(predicted, labels=LABELS[50:]):
    """What scikit-learn's confusion_matrix and precision_recall_fscore_support(zero_division=0) give."""
    matrix = [[int(np.sum((labels == a) & (predicted == b))) for b in range(4)] for a in range(4)]
    found = {"matrix": matrix, "precision": [], "recall": [], "f1": [], "support": [sum(row) for row in matrix]}
    for each in range(4):
        right, of_it = matrix[each][each], sum(row[each] for row in matrix)
        precision, recall = right / of_it if of_it else 0.0, right / sum(matrix[each]) if sum(matrix[each]) else 0.0
        found["precision"].append(precision)
        found["recall"].append(recall)
        found["f1"].append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return found


def assert_by_hand(found, predicted):
    expected = by_hand(predicted)
    assert (found["matrix"], found["support"]) == (expected["matrix"], expected["support"])
    for name in ("precision", "recall", "f1"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-15)


@pytest.mark.slow
def test_an_evaluation_of_three_replicas_reports_each_class_and_one_finds_the_same(tmp_path, capfd):
    asked = {"data": data, "run_dir": tmp_path / "run", "global_batch_size": 12, **ASKED}
    replicas = {"strategy": "mirrored", "num_virtual_devices": 3}
    done = run(Model, **asked, **replicas)
    found = json.loads((tmp_path / "run" / "result.json").read_text())["by_class"]["confusion"]
    assert_by_hand(found, done.predict(split="eval").argmax(1))
    assert set(done.result["eval"]) == {"loss", "accuracy"}
    assert done.evaluate().confusion["confusion"].tolist() == found["matrix"]
    out = capfd.readouterr().out
    header = "class  precision  recall     f1  support  as 0  as 1  as 2  as 3"
    assert header in out
    row = next(line.split() for line in out.splitlines() if line.startswith("1 dog"))
    shares = [f"{found[name][1]:.3f}" for name in ("precision", "recall", "f1")]
    assert row == ["1", "dog", *shares, str(found["support"][1]), *map(str, found["matrix"][1])]
    assert "classes that are not in the data: 3 rat" in out
    folder = next((tmp_path / "run" / "tensorboard" / "eval").iterdir())
    values = [each for event in tf.compat.v1.train.summary_iterator(str(folder)) for each in event.summary.value]
    width, height, png = [each for each in values if each.tag == "confusion"][-1].tensor.string_val
    assert tf.io.decode_png(png).shape == (int(height), int(width), 3)
    # What a checkpoint keeps of the evaluation has it too, and evaluating again finds the same.
    kept, again = run(Model, **asked, **replicas), run(Model, mode="eval", **asked)
    assert kept.result["by_class"] == again.result["by_class"] == done.result["by_class"]


@pytest.mark.parametrize("form", [pytest.param("sparse", marks=pytest.mark.slow), "categorical"])
def test_a_compiled_classifier_has_a_report_and_other_models_none(form):
    model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(4, "softmax")])
    model.compile("sgd", f"{'sparse_' * (form == 'sparse')}categorical_crossentropy")
    labels = LABELS if form == "sparse" else np.eye(4, dtype=np.float32)[LABELS]
    halves = [(FEATURES[part], labels[part]) for part in (slice(0, 50), slice(50, 100))]
    done = fit(model, *halves[0], validation_data=halves[1], verbose=0, jit="off")
    assert_by_hand(done.result["by_class"]["confusion"], done.predict(FEATURES[50:]).argmax(1))
    assert set(done.history.history) == {"loss", "val_loss"}
    if form == "categorical":
        model.compile("sgd", "mse")
        done = fit(model, FEATURES, labels, validation_split=0.5, verbose=0, jit="off")
        assert "by_class" not in done.result


def test_the_matrix_of_a_compiled_model_counts_what_its_loss_counts():
    """Not padding, nor labels of the ignored class (which is none of the classes), nor examples of weight 0."""
    words = rng.integers(1, 9, [21, 5]).astype(np.int32)
    words[np.arange(5) >= rng.integers(1, 6, 21)[:, None]] = 0
    tags = np.where(words > 0, words % 3, 2).astype(np.int32)
    tags[::4, 0] = 200
    weights = (np.arange(21) % 5 > 0).astype(np.float32) * 1.5
    layers = [tf.keras.layers.Embedding(9, 3, mask_zero=True), tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential([tf.keras.Input([5], dtype="int32"), *layers])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=200))
    two = {"strategy": "mirrored", "num_virtual_devices": 2}
    done = fit(model, words, tags, validation_data=(words, tags, weights), validation_batch_size=8, verbose=0, **two)
    counted = (words > 0) & (tags != 200) & (weights[:, None] > 0)
    expected = np.zeros([3, 3], int)
    np.add.at(expected, (tags[counted], done.predict(words).argmax(-1)[counted]), 1)
    assert done.result["by_class"]["confusion"]["matrix"] == expected.tolist()


def test_the_matrix_of_a_compiled_model_has_its_classes_where_the_loss_has_them():
    pixels = rng.normal(size=(12, 3, 4)).astype(np.float32)  # the classes are the second axis
    labels = np.eye(3, dtype=np.float32)[rng.integers(0, 3, [12, 4])].transpose(0, 2, 1)
    labels[2, :, 1] = 0.0  # of no class
    model = tf.keras.Sequential([tf.keras.Input([3, 4]), tf.keras.layers.Softmax(axis=1)])
    model.compile("sgd", tf.keras.losses.CategoricalCrossentropy(axis=1))
    with open_run(KerasTrainer.for_model(model), data=((pixels, labels), None), progress="off", jit="off") as opened:
        matrix = opened.evaluate((pixels, labels)).confusion["confusion"]
    expected = np.zeros([3, 3], int)
    counted = labels.sum(1) > 0
    np.add.at(expected, (labels.argmax(1)[counted], pixels.argmax(1)[counted]), 1)
    assert matrix.tolist() == expected.tolist()


def test_a_mask_leaves_labels_out_of_a_matrix():
    outputs = np.eye(3, dtype=np.float32)[[[0, 1], [2, 2]]]
    pair = crankshaft.confusion_matrix([[0, -100], [1, 2]], outputs, mask=[[True, False], [True, True]])
    assert pair.matrix().tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert pair.mistake() is None
    assert crankshaft.confusion_matrix([[0, -100], [1, 2]], outputs).mistake().startswith("1 labels are not classes")


def test_training_adds_up_no_matrix_and_labels_beyond_the_classes_are_named():
    class Lenient(Model):
        def loss(self, outputs, batch):
            return crankshaft.mean(tf.square(outputs))

    with open_run(Lenient, data=data, progress="off", **{**ASKED, "train_steps": None}) as opened:
        assert set(opened.train(steps=2)) == {"loss", "accuracy"}
        with pytest.raises(crankshaft.UsageError, match="confusion: 2 labels are not classes from 0 to 3; number them"):
            opened.evaluate((FEATURES[:3], np.array([4, -1, 0], np.int32)))


def test_shares_of_nothing_are_zero():
    assert report(np.array([[3, 1, 0], [0, 0, 0], [0, 2, 0]])) == {
        "matrix": [[3, 1, 0], [0, 0, 0], [0, 2, 0]],
        "precision": [1.0, 0.0, 0.0],
        "recall": [0.75, 0.0, 0.0],
        "f1": [6 / 7, 0.0, 0.0],
        "support": [4, 0, 2],
    }


def test_a_table_is_of_at_most_twenty_classes_and_says_which_are_lacking():
    def tabled(matrix, classes=None):
        of = types.SimpleNamespace(names=types.SimpleNamespace(classes=classes))
        entries, lines = by_class(of, Evaluated({}, {"mine": matrix}))
        assert entries == {"by_class": {"mine": report(np.array(matrix))}}
        return lines

    assert tabled([[3, 1, 0], [0, 0, 0], [0, 2, 0]], ("cat", "dog", "tit")) == [
        "class  precision  recall     f1  support  as 0  as 1  as 2",
        "0 cat      1.000   0.750  0.857        4     3     1     0",
        "1 dog      0.000   0.000  0.000        0     0     0     0",
        "2 tit      0.000   0.000  0.000        2     0     2     0",
        "classes that are never predicted, so their precision is 0: 2 tit",
        "classes that are not in the data: 1 dog",
    ]
    assert tabled([[1, 0], [0, 1000000]])[2] == "1          1.000   1.000  1.000  1000000     0  1000000"
    assert [len(tabled(np.eye(count, dtype=int))) for count in (20, 21)] == [21, 0]
    assert by_class(None, Evaluated({})) == ({}, [])


def test_a_cell_is_darker_the_larger_its_share_of_its_labels_examples():
    drawn = picture(np.array([[3, 1], [0, 0]]))
    assert (drawn.shape, drawn.dtype) == ((400, 400, 3), np.uint8)
    lines = np.arange(400) % 200 == 0
    assert (drawn[lines] == 200).all()
    assert (drawn[:, lines] == 200).all()
    cells = [[(69, 99, 144), (193, 203, 218)], [(255, 255, 255)] * 2]  # white, and up to (8, 48, 107)
    for row, column in np.ndindex(2, 2):
        cell = drawn[200 * row + 1 : 200 * (row + 1), 200 * column + 1 : 200 * (column + 1)]
        assert (cell == cells[row][column]).all()
    assert picture(np.eye(2, dtype=np.int64))[1, 1].tolist() == [8, 48, 107]
    assert picture(np.zeros([150, 150])).shape == (450, 450, 3)
