"""What a script's data may be beside (features, labels): weights, features alone, several inputs, text, batches."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean
from tests.launch.line import FEATURES, LABELS, RUN, Line

TWO = ("--strategy=mirrored", "--num_virtual_devices=2")
WEIGHTS = np.linspace(0, 2, 32, dtype=np.float32) ** 2


@pytest.fixture
def results(inside, tmp_path):
    """results(data, *flags, trainer=): the result of a run that ended well, and what it printed."""
    made = []

    def run(data, *flags, trainer=Line):
        path = tmp_path / f"{len(made)}.json"
        made.append(path)
        outcome = inside(*RUN, *flags, f"--result_json={path}", trainer=trainer, data=data).ok()
        return json.loads(path.read_text()), outcome.out

    return run


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts[0] if len(parts) == 1 else parts)


# -- features alone


class Named(Line):
    """Its features have a name."""

    def forward(self, features, training):
        return self.model(features["x"])

    def build_model(self):
        model = super().build_model()
        model.build((None, FEATURES.shape[1]))
        return model


class Mirror(Trainer):
    """An autoencoder."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch))


def test_features_alone_are_the_batch(results, inside, tmp_path):
    class NamedMirror(Named):
        def loss(self, outputs, batch):
            return mean(tf.square(outputs - batch["x"]))

    run = f"--run_dir={tmp_path}/run"
    weighted = ((FEATURES, None, 0 * LABELS + 1), (FEATURES,))
    found = {
        name: results(lambda data=data: data, *flags, trainer=trainer)[0]
        for name, data, flags, trainer in (
            ("array", FEATURES, (), Mirror),
            ("weighted", weighted, (), Mirror),
            ("named", ({"x": FEATURES}, {"x": FEATURES}), (run,), NamedMirror),
            ("two replicas", weighted, TWO, Mirror),
            ("streamed", (dataset(FEATURES), dataset(FEATURES)), (*TWO, "--shuffle_buffer=1"), Mirror),
        )
    }
    assert found["weighted"]["eval"] == found["named"]["eval"]
    assert found["two replicas"]["eval"] == pytest.approx(found["weighted"]["eval"], rel=1e-6)
    assert found["array"]["train"] == found["weighted"]["train"]
    assert "eval" not in found["array"]
    assert found["streamed"]["train"]["loss"] > 0
    inside("--mode=export", run, trainer=NamedMirror, data=lambda: ({"x": FEATURES}, None)).ok()
    assert (tmp_path / "run" / "export" / "4" / "saved_model.pb").exists()


# -- several inputs


class Sum(Line):
    def build_model(self):
        inputs = [tf.keras.Input([1]), tf.keras.Input([1])]
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(inputs)))


def test_lists_of_inputs_are_tuples(results):
    """As Keras's functional models take them. Their export: test_api."""
    split = ([FEATURES, -FEATURES], LABELS)
    tupled = results(lambda: (((FEATURES, -FEATURES), LABELS),) * 2, trainer=Sum)[0]["eval"]
    for flags in ((*TWO, "--resident_data_mb=0"), ("--accumulate_steps=3",)):
        listed = results(lambda: (split, split), *flags, trainer=Sum)[0]["eval"]
        assert listed == pytest.approx(tupled, rel=1e-5)  # sums in another order


# -- text


class Words(Line):
    def build_model(self):
        words, numbers = tf.keras.Input([], dtype="string", name="word"), tf.keras.Input([1], name="number")
        known = tf.keras.layers.StringLookup(vocabulary=["small", "large"], output_mode="one_hot")(words)
        joined = tf.keras.layers.Concatenate()([known, numbers])
        return tf.keras.Model({"word": words, "number": numbers}, tf.keras.layers.Dense(1)(joined))


WORDS = np.where(LABELS > 0, "large", "small")


def test_text_is_fed_as_tensors_of_strings(results):
    as_objects = WORDS.astype(object)
    forms = ((tf.constant(WORDS), ()), (as_objects, ("--resident_data_mb=0",)), (WORDS, TWO))
    found = [
        results(lambda words=words: (({"word": words, "number": FEATURES}, LABELS),) * 2, *flags, trainer=Words)[0]
        for words, flags in forms
    ]
    assert found[0]["eval"] == found[1]["eval"]
    assert found[2]["eval"] == pytest.approx(found[0]["eval"], rel=1e-5)  # sums in another order


class Adapted(Words):
    def build_model(self):
        words = tf.keras.layers.StringLookup(output_mode="one_hot")
        words.adapt(WORDS)
        text = tf.keras.layers.TextVectorization(output_mode="tf_idf")
        text.adapt(WORDS)
        inputs = {"word": tf.keras.Input([], dtype="string", name="word")}
        joined = tf.keras.layers.Concatenate()([words(inputs["word"]), text(inputs["word"])])
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(joined))


def test_lookup_layers_that_adapt_are_saved_and_resumed(results, tmp_path):
    def data():
        return (({"word": WORDS}, LABELS),) * 2

    run = f"--run_dir={tmp_path}/run"
    results(data, run, *TWO, trainer=Adapted)
    resumed, _ = results(data, run, "--train_steps=8", *TWO, trainer=Adapted)
    assert resumed["resumed_from"] == 4
    assert resumed["eval"] == results(data, "--train_steps=8", *TWO, trainer=Adapted)[0]["eval"]


def test_text_keeps_xla_away(inside, results, tmp_path):
    def data():
        return (({"word": WORDS, "number": FEATURES}, LABELS),) * 2

    run = f"--run_dir={tmp_path}/run"
    _, out = results(data, "--jit=auto", run, trainer=Words)
    assert "XLA off: features['word'] holds strings, for which XLA has no kernels" in out
    outcome = inside(*RUN, "--jit=on", trainer=Words, data=data)
    outcome.refused("jit=on: features['word'] holds strings, for which XLA has no kernels; use jit=auto or")
    inside("--mode=export", run, trainer=Words, data=data).ok()
    serve = tf.saved_model.load(str(tmp_path / "run" / "export" / "4")).signatures["serving_default"]
    assert serve(word=tf.constant(WORDS), number=tf.constant(FEATURES))["outputs"].shape == (32, 1)
    readme = (tmp_path / "run" / "export" / "4" / "README.md").read_text()
    request = json.loads(re.search(r"^curl -d '(.*)' http", readme, re.MULTILINE)[1])
    assert request == {"inputs": {"word": [""], "number": [[0.0]]}}


# -- no evaluation data


@pytest.mark.parametrize("form", ["none", "dataset"])
def test_training_data_may_be_all_there_is(inside, results, tmp_path, form):
    whole = (FEATURES, LABELS)
    data = {"none": (whole, None), "dataset": dataset(*whole)}[form]
    run = (f"--run_dir={tmp_path}/run", "--early_stopping=patience=9", "--monitor=train_loss")
    found, out = results(lambda: data, *run)
    assert "no evaluation data: no evaluation is made" in out
    assert "eval" not in found
    assert found["train"]["loss"] > 0
    assert found["step"] == 4
    one = (whole,) if form == "none" else data  # a tuple of one is the same
    assert results(lambda: one, *run, "--train_steps=6")[0]["resumed_from"] == 4
    evaluated = inside("--mode=eval", run[0], trainer=Line, data=lambda: data)
    assert "mode=eval needs evaluation data, and the data has none; return (train, eval)" in evaluated.error


# -- --validation_split


def test_the_last_examples_are_for_validation_as_in_keras(inside, results, tmp_path):
    def data():
        return {"x": FEATURES}, LABELS, WEIGHTS

    first = 25  # floor(32 x 0.8)
    parts = [({"x": FEATURES[part]}, LABELS[part], WEIGHTS[part]) for part in (slice(first), slice(first, None))]
    by_hand, _ = results(lambda: tuple(parts), trainer=Named)
    run = f"--run_dir={tmp_path}/run"
    for flags in (TWO, (run,)):
        found, out = results(lambda: (data(), None), "--validation_split=0.2", *flags, trainer=Named)
        assert found["eval"] == pytest.approx(by_hand["eval"], rel=1e-6)
        assert "Named: 25 examples" in out
    resumed, _ = results(lambda: (data(), None), "--validation_split=0.2", "--train_steps=8", run, trainer=Named)
    at_once, _ = results(lambda: tuple(parts), "--train_steps=8", trainer=Named)
    assert resumed["eval"] == at_once["eval"]
    outcome = inside(*RUN, "--validation_split=0.3", run, trainer=Named, data=lambda: (data(), None))
    assert "a run of another configuration (validation_split: 0.2 -> 0.3)" in outcome.error
