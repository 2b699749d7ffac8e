"""What a script's data may be beside (features, labels): weights, features alone, several inputs, text, batches."""

from __future__ import annotations

import json

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


# -- weights


def test_weights_of_a_dataset_are_those_of_arrays(results):
    """In an evaluation, whose batches are the same: shuffles differ."""
    split = (FEATURES, LABELS, WEIGHTS)
    flags = ("--learning_rate=0", "--eval_batch_size=12")
    found = [
        results(lambda made=made: (made, made), *flags, *devices)[0]["eval"]["loss"]
        for made, devices in ((split, ()), (dataset(*split), TWO))
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    unweighted = results(lambda: (split, split[:2]), *flags)[0]["eval"]["loss"]
    assert unweighted != pytest.approx(found[0], rel=1e-2)


def test_weights_are_part_of_what_a_run_is_resumed_with(inside, results, tmp_path):
    run = f"--run_dir={tmp_path}/run"
    results(lambda: ((FEATURES, LABELS, WEIGHTS), (FEATURES, LABELS)), run)
    again = ("--train_steps=8", run)
    whole = results(lambda: ((FEATURES, LABELS, WEIGHTS), (FEATURES, LABELS)), *again)[0]
    assert whole["resumed_from"] == 4
    at_once = results(lambda: ((FEATURES, LABELS, WEIGHTS), (FEATURES, LABELS)), "--train_steps=8")[0]
    assert whole["eval"] == at_once["eval"]


@pytest.mark.parametrize(
    ("model", "given"), [("logistic", "1,2"), ("mlp", "1,-1,2"), ("cnn", "2"), ("resnet", "a,b,c")]
)
def test_class_weights_are_one_for_each_class(inside, model, given):
    images = ("--input=synthetic", "--input_arg=shape=8,8,1", "--input_arg=examples=32", "--input_arg=classes=3")
    outcome = inside(*RUN, f"--model={model}", *images, f"--model_arg=class_weight={given}")
    assert f"class_weight={given} is not one number of 0 or more for each of the 3 classes" in outcome.mistake


def test_a_model_without_labels_says_so(inside):
    outcome = inside(*RUN, "--model=logistic", data=lambda: ((FEATURES,), (FEATURES,), 2))
    assert "logistic needs labels, and the data has none; return (features, labels) for each split" in outcome.mistake


# -- features alone


class Mirror(Trainer):
    """An autoencoder."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch))


def test_features_alone_are_the_batch(results, inside, tmp_path):
    class Labelled(Mirror):
        def loss(self, outputs, batch):
            return super().loss(outputs, batch[1])

    class Named(Mirror):
        def forward(self, features, training):
            return self.model(features["x"])

        def build_model(self):
            model = super().build_model()
            model.build((None, FEATURES.shape[1]))
            return model

        def loss(self, outputs, batch):
            return super().loss(outputs, batch["x"])

    run = f"--run_dir={tmp_path}/run"
    weighted = ((FEATURES, None, 0 * LABELS + 1), (FEATURES,))
    found = {
        name: results(lambda data=data: data, *flags, trainer=trainer)[0]
        for name, data, flags, trainer in (
            ("array", FEATURES, (), Mirror),
            ("tuple", ((FEATURES,), (FEATURES,)), (), Mirror),
            ("weighted", weighted, (), Mirror),
            ("labelled", ((FEATURES, FEATURES),) * 2, (), Labelled),
            ("named", ({"x": FEATURES}, {"x": FEATURES}), (run,), Named),
            ("two replicas", weighted, TWO, Mirror),
            ("streamed", (dataset(FEATURES), dataset(FEATURES)), (*TWO, "--shuffle_buffer=1"), Mirror),
        )
    }
    assert found["tuple"]["eval"] == found["weighted"]["eval"] == found["labelled"]["eval"] == found["named"]["eval"]
    assert found["two replicas"]["eval"] == pytest.approx(found["tuple"]["eval"], rel=1e-6)
    assert found["array"]["train"] == found["tuple"]["train"]
    assert "eval" not in found["array"]
    assert found["streamed"]["train"]["loss"] > 0
    inside("--mode=export", run, trainer=Named, data=lambda: ({"x": FEATURES}, None)).ok()
    assert (tmp_path / "run" / "export" / "4" / "saved_model.pb").exists()


# -- several inputs


class Sum(Line):
    def build_model(self):
        inputs = [tf.keras.Input([1]), tf.keras.Input([1])]
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(inputs)))


def test_lists_of_inputs_are_tuples_and_exported_by_number(results, inside, tmp_path):
    """As Keras's functional models take them."""
    split, run = ([FEATURES, -FEATURES], LABELS), f"--run_dir={tmp_path}/run"
    tupled = results(lambda: (((FEATURES, -FEATURES), LABELS),) * 2, trainer=Sum)[0]["eval"]
    for flags in ((run,), (*TWO, "--resident_data_mb=0"), ("--accumulate_steps=3",)):
        listed = results(lambda: (split, split), *flags, trainer=Sum)[0]["eval"]
        assert listed == (tupled if flags == (run,) else pytest.approx(tupled, rel=1e-5))  # sums in another order
    found = tupled["loss"]
    inside("--mode=export", run, trainer=Sum, data=lambda: (split, split)).ok()
    serve = tf.saved_model.load(str(tmp_path / "run" / "export" / "4")).signatures["serving_default"]
    outputs = serve(features_0=tf.constant(FEATURES), features_1=tf.constant(-FEATURES))["outputs"]
    assert np.mean((outputs[:, 0] - LABELS) ** 2) == pytest.approx(found, rel=1e-5)


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
    found = [
        results(lambda words=words: (({"word": words, "number": FEATURES}, LABELS),) * 2, *flags, trainer=Words)[0]
        for words, flags in (
            (WORDS, ()),
            (tf.constant(WORDS), ()),
            (as_objects, ("--resident_data_mb=0",)),
            (as_objects, TWO),
        )
    ]
    assert found[0]["eval"] == found[1]["eval"] == found[2]["eval"]
    assert found[3]["eval"] == pytest.approx(found[0]["eval"], rel=1e-5)  # sums in another order


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
    assert (
        "--jit=on: features['word'] holds strings, for which XLA has no kernels; use --jit=auto or" in outcome.mistake
    )
    inside("--mode=export", run, trainer=Words, data=data).ok()
    serve = tf.saved_model.load(str(tmp_path / "run" / "export" / "4")).signatures["serving_default"]
    assert serve(word=tf.constant(WORDS), number=tf.constant(FEATURES))["outputs"].shape == (32, 1)
    assert '"word": [""]' in (tmp_path / "run" / "export" / "4" / "README.md").read_text()


def test_text_that_a_model_does_not_take_is_one_line_that_names_it(inside):
    outcome = inside(*RUN, trainer=Line, data=lambda: ((WORDS[:, None], LABELS),) * 2)
    assert "features holds strings, and Line computes with them as with numbers; look them up" in outcome.mistake


# -- no evaluation data


@pytest.mark.parametrize("form", ["none", "dataset"])
def test_training_data_may_be_all_there_is(results, tmp_path, form):
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--eval_every_steps=2",), "--eval_every_steps=2 needs evaluation data, and the data has none; return (tr"),
        (("--restore_best",), "--restore_best needs evaluation data, and the data has none; return (train, eval)"),
        (("--early_stopping=patience=2",), "--early_stopping watches --monitor=eval_loss, and there is no"),
        (("--monitor=eval_accuracy",), "--monitor=eval_accuracy, and there is no evaluation data; use --monitor=tr"),
        (("--validation_split=1",), "--validation_split=1.0 of 32 examples leaves 0 to train on and 32 to evaluate"),
    ],
)
def test_what_needs_evaluation_data_says_so(inside, flags, says):
    assert says in inside(*RUN, *flags, trainer=Line, data=lambda: ((FEATURES, LABELS), None)).mistake


def test_an_evaluation_needs_data(inside, results, tmp_path):
    run = f"--run_dir={tmp_path}/run"
    results(lambda: ((FEATURES, LABELS), None), run)
    outcome = inside("--mode=eval", run, trainer=Line, data=lambda: ((FEATURES, LABELS), None))
    assert "--mode=eval needs evaluation data, and the data has none; return (train, eval)" in outcome.error


# -- --validation_split


def test_the_last_examples_are_for_validation_as_in_keras(results, tmp_path):
    def data():
        return {"a": FEATURES}, LABELS, WEIGHTS

    class Named(Line):
        def forward(self, features, training):
            return self.model(features["a"])

        def build_model(self):
            model = super().build_model()
            model.build((None, FEATURES.shape[1]))
            return model

    first = 25  # floor(32 x 0.8)
    parts = [({"a": FEATURES[part]}, LABELS[part], WEIGHTS[part]) for part in (slice(first), slice(first, None))]
    by_hand, _ = results(lambda: tuple(parts), trainer=Named)
    run = f"--run_dir={tmp_path}/run"
    for flags in (TWO, (run,)):
        found, out = results(lambda: (data(), None), "--validation_split=0.2", *flags, trainer=Named)
        assert found["eval"] == pytest.approx(by_hand["eval"], rel=1e-6)
        assert "Named: 25 examples" in out
    resumed, _ = results(lambda: (data(), None), "--validation_split=0.2", "--train_steps=8", run, trainer=Named)
    at_once, _ = results(lambda: tuple(parts), "--train_steps=8", trainer=Named)
    assert resumed["eval"] == at_once["eval"]


def test_a_split_is_refused_where_it_cannot_be(inside, results, tmp_path):
    whole, split = (FEATURES, LABELS), "--validation_split=0.2"
    for data, says in (
        ((whole, whole), "takes evaluation data from the training data, and the data has its own"),
        ((dataset(*whole), None), "divides arrays, and the data is a tf.data.Dataset; return (dataset.skip(n),"),
    ):
        outcome = inside(*RUN, split, trainer=Line, data=lambda data=data: data)
        assert f"--validation_split=0.2 {says}" in outcome.mistake
    run = f"--run_dir={tmp_path}/run"
    results(lambda: (whole, None), split, run)
    outcome = inside(*RUN, "--validation_split=0.3", run, trainer=Line, data=lambda: (whole, None))
    assert "a run of another configuration (validation_split: 0.2 -> 0.3)" in outcome.error


# -- datasets of batches


def test_a_dataset_of_batches_is_one_of_examples(results):
    single = dataset(FEATURES, LABELS, WEIGHTS)
    flags = (*TWO, "--shuffle_buffer=40")
    expected, quiet = results(lambda: (single, single), *flags)
    found, out = results(lambda: (single.batch(5), single.batch(7).prefetch(1)), *flags)
    assert found["eval"] == expected["eval"]
    assert "32 examples, 4 steps an epoch of 8" in out
    assert "the train dataset comes in batches: taken apart into examples" in out
    assert "comes in batches" not in quiet


def test_elements_that_may_be_batches_or_examples_are_refused(inside):
    rows = dataset(*(np.ones([12, 4], np.float32) for _ in range(2)))
    made = rows.flat_map(lambda *parts: dataset(*(tf.tile(part[None], [4, 1]) for part in parts)).batch(4, True))
    outcome = inside(*RUN, trainer=Line, data=lambda: (made.map(lambda x, y: (x[:, 0], y[:, 0])), None))
    assert "elements have 4 rows in each component, which are 4 examples or one" in outcome.mistake
    assert "end the dataset with unbatch(); if it is one example, with batch(1)" in outcome.mistake
    made = tf.data.Dataset.from_generator(lambda: iter([np.ones([8, 3])]), output_signature=tf.TensorSpec([8, 3]))
    outcome = inside(*RUN, trainer=Mirror, data=lambda: (made, None))
    assert "elements have 8 rows in each component, which are 8 examples or one" in outcome.mistake
