"""What tells a split from another: the number of examples, and a digest that any change of size changes.

What a model's numbers stand for: in a run's result, predictions and export, and beside a loaded model.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Data, Trainer, UsageError, load_model, mean, run
from crankshaft.engine.checkpoints import Manifest
from crankshaft.engine.data.preprocessing import ColumnPreprocessing, Preprocessing
from crankshaft.runner.saved import fingerprints
from tests.bench import split_of


def of(split, ids=None) -> dict[str, int]:
    split = split_of(split)
    return fingerprints.fingerprint(split, len(split) if split.by_index else split.length, ids)


def arrays(examples=3000):
    rng = np.random.default_rng(0)
    return {"ids": rng.integers(0, 9, (examples, 2)), "dense": rng.random((examples, 3))}, np.arange(examples)


def test_the_same_data_in_another_form_is_the_same():
    features, labels = arrays()
    turned = {"dense": np.asfortranarray(features["dense"]), "ids": features["ids"][::-1].copy()[::-1]}
    assert of((features, labels)) == of((turned, labels.copy()))
    assert of((features, labels))["examples"] == 3000


@pytest.mark.parametrize(
    "change",
    [
        lambda f, y: ({"ids": f["ids"], "thick": f["dense"]}, y),
        lambda f, y: ({"ids": f["ids"], "dense": f["dense"].astype("float32")}, y),
        lambda f, y: ({"ids": f["ids"], "dense": f["dense"][:, :2]}, y),
        lambda f, y: (f, y[::-1]),
        lambda f, y: ({"ids": f["ids"], "dense": f["dense"] * 2}, y),
        lambda f, y: (f, np.append(y[:-1], 7)),
        lambda f, y: (f, np.append(7, y[1:])),
    ],
    ids=["name", "type", "shape", "order", "scale", "last", "first"],
)
def test_other_data_of_as_many_examples_has_another_digest(change):
    before, after = of(arrays()), of(change(*arrays()))
    assert before["examples"] == after["examples"]
    assert before["digest"] != after["digest"]


def test_a_sample_is_of_all_rows_of_wide_arrays_and_ignores_rounding():
    wide = np.random.default_rng(0).random((20, 784))
    other = np.concatenate([wide[:-1], wide[:1]])
    samples = [fingerprints.sample(split_of((each,))) for each in (wide, wide * (1 + 1e-6), other)]
    assert len(samples[0]["examples"][0]) <= 256
    assert [fingerprints.differs(samples[0], sample) for sample in samples] == [False, False, True]


def test_strings_are_digested_by_what_they_say():
    words = ["".join(["a", str(i)]) for i in range(5)]
    labels = np.zeros(5)
    assert of((np.array(words, object), labels)) == of((np.array([w + "" for w in words], object), labels))
    assert of((np.array(words, object), labels)) != of((np.array(words[::-1], object), labels))


def test_one_example_has_one_row():
    assert of((np.zeros((1, 2)), np.zeros(1)))["digest"] != of((np.ones((1, 2)), np.zeros(1)))["digest"]


def test_datasets_differ_by_their_elements_and_not_by_what_is_in_them():
    zeros, ones = (tf.data.Dataset.from_tensor_slices((make((6, 2)), make(6))) for make in (tf.zeros, tf.ones))
    assert of(zeros) == of(ones)
    assert of(zeros)["digest"] != of(zeros.map(lambda x, y: (tf.cast(x, tf.float16), y)))["digest"]


def test_samples_differ_by_more_than_rounding_whatever_they_are_of():
    def sampled(*values, dtype=None):
        return fingerprints.sample(split_of((np.array(values, dtype),)))

    bfloat16 = tf.bfloat16.as_numpy_dtype
    largest = float(np.finfo(np.float64).max)  # JSON has no infinity
    assert sampled(np.nan, np.inf, -np.inf) == {"examples": [[0.0, largest, -largest]]}
    assert sampled(0.5, 2.0, dtype=bfloat16) == sampled(0.5, 2.0) == {"examples": [[0.5, 2.0]]}
    assert sampled(1, 2) != sampled(2, 1)
    assert sampled() == {"examples": [[]]}
    assert len(sampled(*range(257), dtype=np.float32)["examples"][0]) == 16
    for one, other, differ in [
        (1.0, 1.00009, False),
        (1.0, 1.00011, True),
        (0.0, 9e-5, False),
        (0.0, 2e-4, True),
        ([1.0], [1.0, 1.0], True),
        ([1.0, 2.0], [1.0, 3.0], True),
        ({"a": 1}, {"b": 1}, True),
        ({"a": [1.0], "b": 2}, {"a": [1.0], "b": 3}, True),
        ({"a": [1.0], "b": 2}, {"a": [1.0], "b": 2}, False),
        (1, 1.0, False),
        (1.0, [1.0], True),
        ([1], {"a": 1}, True),
        (3, 4, True),
    ]:
        assert fingerprints.differs(one, other) == fingerprints.differs(other, one) == differ, (one, other)


def test_an_evaluation_of_the_first_batches_is_of_other_data():
    assert "eval_batches" not in of(arrays())
    assert fingerprints.fingerprint(split_of(arrays()), 3000, eval_batches=2) == {**of(arrays()), "eval_batches": 2}


def checkpoint(**about):
    return Manifest("/at/run/checkpoints/ckpt-5", 5, 1, about, {}, {}, {}, {}, "")


def asked(**values):
    return types.SimpleNamespace(run_dir="run", **{"allow_changed_config": False, "input_entry": None, **values})


BY_FILE, BY_EXAMPLE = {"by": "file", "counts": [1200, 7]}, {"by": "example", "counts": [1207]}
SIDE_BY_SIDE = {"by": "example", "counts": [9], "members": {"a": BY_EXAMPLE, "b": {"by": "index", "batch_size": 4}}}
WIDER = {**SIDE_BY_SIDE, "members": {"a": BY_EXAMPLE, "b": {"by": "index", "batch_size": 8}}}
FILES, OLDER, BATCHES = r"files among 2 workers \(1,200, 7 examples\)", "an older rule", "the examples of a batch"


@pytest.mark.parametrize(
    ("before", "now", "replicas", "line"),
    [
        (BY_FILE, BY_FILE, 2, None),
        (BY_FILE, None, 2, None),
        (None, BY_FILE, 1, None),
        (BY_EXAMPLE, {"by": "example", "counts": [5, 5]}, 2, None),  # batches are the same for any number of workers
        (
            BY_FILE,
            {"by": "file", "counts": [1207]},
            1,
            rf"by {FILES}, and this .* files among 1 workers \(1,207 ",
        ),
        (BY_FILE, BY_EXAMPLE, 2, rf"by {FILES}, and .* divides it by {BATCHES}: begin in"),
        (BY_EXAMPLE, BY_FILE, 2, rf"training data by {BATCHES}, and this run divides it by files among 2 workers"),
        (None, BY_EXAMPLE, 2, rf"divided its training data by {OLDER}, and this run divides it by {BATCHES}"),
        (SIDE_BY_SIDE, SIDE_BY_SIDE, 2, None),
        (SIDE_BY_SIDE, WIDER, 1, r"has other inputs per step \(b batch_size: 4 -> 8\); begin in another run_dir"),
        (SIDE_BY_SIDE, BY_EXAMPLE, 1, r"has other inputs per step \(a: .* -> None; b: .* -> None\)"),
        (BY_EXAMPLE, SIDE_BY_SIDE, 1, r"has other inputs per step \(a: None -> .*; b: None -> "),
    ],
)
def test_a_stream_that_is_divided_otherwise_is_not_gone_on_with_unless_that_is_allowed(before, now, replicas, line):
    manifest = checkpoint(**({"input": {"train": before}} if before else {}))
    about = {"input": {"train": now}} if now else {}
    fingerprints.check_division(asked(allow_changed_config=True), manifest, about, replicas)
    with pytest.raises(UsageError, match=line) if line else contextlib.nullcontext():
        fingerprints.check_division(asked(), manifest, about, replicas)


def test_weights_of_other_words_begin_no_run_unless_that_is_allowed():
    ours = fingerprints.hash_ids("a b")
    tokens = types.SimpleNamespace(defaults={"tokenizer": None})
    for data in ({}, {"train": 3}, {"train": {}}, {"train": {"ids": ours}}):
        fingerprints.check_begun(asked(init_from="it"), checkpoint(data=data), "a b")
    other = checkpoint(data={"train": {"ids": ours + 1}})
    fingerprints.check_begun(asked(init_from="it"), other, None)
    fingerprints.check_begun(asked(init_from="it", allow_changed_config=True), other, "a b")
    for entry, fix in (
        (None, "use that run's data, or"),
        (types.SimpleNamespace(defaults={}), "use that run's data, or"),
        (tokens, "use input_arg=tokenizer=/at/run/model.json instead of vocabulary_size, or"),
    ):
        with pytest.raises(UsageError, match=rf"init_from=it was trained with other words, .*; {fix} allow_changed"):
            fingerprints.check_begun(asked(init_from="it", input_entry=entry), other, "a b")


def test_ids_are_told_apart_where_they_are_said():
    split = arrays()
    assert "ids" not in of(split)
    assert of(split, "a b")["ids"] == of(split, "a b")["ids"] != of(split, "b a")["ids"]


WORDS = [b"bern", b"rome\nlazio", b"\xff\xfe"]  # a line's end, and no UTF-8
CLASSES = ("small", "middle", "large")
IDS = np.arange(40, dtype=np.int64) % 4
SIZES = np.linspace(0, 1, 40, dtype=np.float32)
RAW = {"city": np.array([*WORDS, b"unseen", b""], object), "size": SIZES[:5]}
LOOKED_UP = {"city": np.array([1, 2, 3, 0, 0]), "size": SIZES[:5]}


class Towns(Trainer):
    def build_model(self):
        city, size = tf.keras.Input((), dtype="int64", name="city"), tf.keras.Input((), name="size")
        rows = tf.keras.layers.Embedding(self.run_context.vocabulary["city"], 3)(city)
        return tf.keras.Model({"city": city, "size": size}, rows * tf.keras.layers.Reshape((1,))(size))

    def loss(self, outputs, batch):
        return mean(tf.keras.losses.sparse_categorical_crossentropy(batch[1], outputs, from_logits=True))


def data(classes=CLASSES, words=WORDS, name="city"):
    train = ({"city": IDS, "size": SIZES}, IDS % 3)
    preprocessing = Preprocessing({name: ColumnPreprocessing("category", words=tuple(words))})
    return Data(train, None, 3, {"city": 4}, "of the words", classes=classes, preprocessing=preprocessing)


def run_towns(run_dir, mode="train", given=None):
    return run(Towns, data=given or data, mode=mode, train_steps=2, run_dir=run_dir, jit="off", progress="off")


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    return run_towns(tmp_path_factory.mktemp("runs") / "towns")


def test_text_is_predicted_as_it_was_looked_up_for_training(towns):
    np.testing.assert_array_equal(towns.predict(RAW), towns.predict(LOOKED_UP))
    as_text = {**RAW, "city": np.array(["bern", "rome\nlazio", "x", "y", ""])}
    np.testing.assert_array_equal(towns.predict(as_text)[:2], towns.predict(LOOKED_UP)[:2])


def test_an_export_takes_text_and_has_its_classes(towns):
    # What the run was trained on is in the export: no data is read.
    folder = pathlib.Path(run_towns(towns.run_dir, "export", lambda: 1 / 0).result["export"])
    serve = tf.saved_model.load(folder).signatures["serving_default"]
    assert serve.structured_input_signature[1]["city"].dtype == tf.string
    found = serve(city=tf.constant(RAW["city"]), size=tf.constant(RAW["size"]))["outputs"]
    np.testing.assert_allclose(found, towns.predict(LOOKED_UP), rtol=1e-6)
    assert json.loads((folder / "assets.extra" / "data.json").read_text())["classes"] == [*CLASSES]


def test_a_run_and_a_loaded_model_name_their_classes_and_words(towns):
    assert towns.result["classes"] == [*CLASSES]
    model = load_model(towns.run_dir)
    for names in (towns.names, model.names):
        assert names.classes == CLASSES
        assert names.words == {"city": WORDS}
        assert str(names) == f"Names(classes={CLASSES}, words={{'city': '{len(WORDS)} words'}})"
        np.testing.assert_array_equal(names.ids(RAW)["city"], LOOKED_UP["city"])
    for given in (RAW, LOOKED_UP, tf.data.Dataset.from_tensor_slices(RAW).batch(2)):
        np.testing.assert_allclose(model.predict(given, verbose=0), towns.predict(RAW), rtol=1e-5)
    for columns in (False, True):
        with pytest.raises(UsageError, match="column 'size' is text, and the model takes numbers there; make numbers"):
            model.predict({**RAW, "size": np.full([len(RAW["city"])], "large")}, columns=columns)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"classes": CLASSES[:2]}, "the data names 2 classes, and num_classes=3; name each"),
        ({"name": "size"}, "the data has words of 'size', which is not a feature of integers by that name; leave"),
        ({"name": "town"}, "the data has words of 'town', which is not a feature of integers by that name; leave"),
    ],
)
def test_names_that_are_not_of_the_data_are_one_line(tmp_path, given, line):
    with pytest.raises(UsageError, match=line):
        run_towns(tmp_path / "run", given=data(**given))
