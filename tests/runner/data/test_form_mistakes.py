"""What a script's data may be beside (features, labels): weights, features alone, several inputs, text, batches.

Each mistake in a source of one's own, and each fault of its files during a run, is one line, and no hang.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.data.order import plain_order
from crankshaft.engine.data.reader import Reader, raising_source_error
from crankshaft.engine.data.source import Source, SourceSlice, Spec
from crankshaft.engine.errors import SourceError
from tests.launch.line import FEATURES, LABELS, RUN, Line, location_of
from tests.processes import assert_says

TWO = ("--strategy=mirrored", "--num_virtual_devices=2")


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


@pytest.mark.thorough
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


# -- text


class Words(Line):
    def build_model(self):
        words, numbers = tf.keras.Input([], dtype="string", name="word"), tf.keras.Input([1], name="number")
        known = tf.keras.layers.StringLookup(vocabulary=["small", "large"], output_mode="one_hot")(words)
        joined = tf.keras.layers.Concatenate()([known, numbers])
        return tf.keras.Model({"word": words, "number": numbers}, tf.keras.layers.Dense(1)(joined))


WORDS = np.where(LABELS > 0, "large", "small")


class Adapted(Words):
    def build_model(self):
        words = tf.keras.layers.StringLookup(output_mode="one_hot")
        words.adapt(WORDS)
        text = tf.keras.layers.TextVectorization(output_mode="tf_idf")
        text.adapt(WORDS)
        inputs = {"word": tf.keras.Input([], dtype="string", name="word")}
        joined = tf.keras.layers.Concatenate()([words(inputs["word"]), text(inputs["word"])])
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(joined))


@pytest.mark.slow
def test_lookup_layers_that_adapt_are_saved_and_resumed(results, tmp_path):
    def data():
        return (({"word": WORDS}, LABELS),) * 2

    run = f"--run_dir={tmp_path}/run"
    results(data, run, *TWO, trainer=Adapted)
    resumed, _ = results(data, run, "--train_steps=8", *TWO, trainer=Adapted)
    assert resumed["resumed_from"] == 4
    assert resumed["eval"] == results(data, "--train_steps=8", *TWO, trainer=Adapted)[0]["eval"]


@pytest.mark.thorough
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


# -- no evaluation data


@pytest.mark.thorough
@pytest.mark.parametrize("form", [pytest.param("none", marks=pytest.mark.slow), "dataset"])
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


STREAMED = ("--resident_data_mb=0",)


class Lines(Source):
    """The line's examples; a test changes what it gives."""

    element_spec = (Spec((1,), np.float32), Spec((), np.float32))

    def __init__(self, change=None, examples=32):
        self.change, self.examples = change, examples

    def __len__(self):
        return self.examples

    def read(self, indices):
        found = FEATURES[indices % 32], LABELS[indices % 32]
        return self.change(*found) if self.change else found


def _raise(*found):
    return {}["missing"]


SPEC = "and the source's spec has"
MISTAKES = {
    "too few": (lambda x, y: (x[:-1], y[:-1]), "Lines.read was called for 8 examples and returned 7 examples; return"),
    "too few of one part": (lambda x, y: (x, y[:1]), "Lines.read was called for 8 examples and returned 1 examples"),
    "one value": (lambda x, y: (x, y[0]), "Lines.read was called for 8 examples and returned a single value; return"),
    "another shape": (lambda x, y: (x[:, 0], y), f"Lines.read returned examples of shape [], {SPEC} [1]"),
    "another type": (lambda x, y: (x, y.astype("S4")), f"Lines.read returned |S4, {SPEC} float32"),
    "numbers that may not fit": (lambda x, y: (x, y.astype(np.int64)), f"Lines.read returned int64, {SPEC} float32"),
    "no labels": (lambda x, y: x, f"Lines.read returned one array, {SPEC} a tuple of 2; return an array"),
    "a list": (
        lambda x, y: ([*x], y),
        f"Lines.read returned a tuple of 2 (a list of 8, one array), {SPEC} a tuple of 2; return an array",
    ),
    "nothing": (lambda x, y: None, f"Lines.read returned a NoneType, {SPEC} a tuple of 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_read_otherwise_than_said_is_one_line(mistake):
    change, said = MISTAKES[mistake]
    source = SourceSlice(Lines(change), 4, 20)
    for chunk_examples in (1, 8):
        order = plain_order(source, 8, 1, 5, shuffle_window=0 if chunk_examples == 1 else 1)
        if chunk_examples > 1:
            order = dataclasses.replace(order, chunk_examples=chunk_examples)
        reader = Reader(source, order)
        zero = tf.zeros([], tf.int64)
        with pytest.raises(SourceError, match="^" + re.escape(said)), raising_source_error(reader):
            reader.read(order.examples(zero), zero)


ROUTES = {
    "streamed": STREAMED,
    "by chunks": (*STREAMED, "--shuffle_window=1"),
    "kept": (),
    "two replicas": (*STREAMED, *TWO),
}


SLOW = {"by chunks", "kept"}


@pytest.mark.parametrize("route", [pytest.param(r, marks=[pytest.mark.slow] if r in SLOW else []) for r in ROUTES])
def test_what_a_source_raises_ends_the_run_and_names_its_place(inside, route):
    outcome = inside(*RUN, *ROUTES[route], trainer=Line, data=lambda: (Lines(_raise), None))
    assert outcome.mistake.startswith(f"KeyError: 'missing', at {location_of(_raise)}")


def test_float64_is_rounded_and_smaller_types_are_taken(inside):
    inside(*RUN, trainer=Line, data=lambda: (Lines(lambda x, y: (x.astype(float), y.astype(np.float16))), None)).ok()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda: Lines(examples=0), " has no examples; give at least one"),
        (lambda: Lines(examples=-1), "'s Lines.__len__: __len__() should return >= 0; return how many examples there"),
        (lambda: Lines(examples=1.5), "'s Lines.__len__: 'float' object cannot be interpreted as an integer; return"),
    ],
    ids=["none", "negative", "a fraction"],
)
def test_a_source_of_no_length_or_shape_is_one_line(inside, source, said):
    inside(*RUN, trainer=Line, data=lambda: (source(), None)).refused(f"the train data{said}")


class Hanging(Lines):
    """Never reads before the test ends."""

    over = threading.Event()

    def read(self, indices):
        self.over.wait()
        return super().read(indices)


@pytest.mark.thorough
@pytest.mark.parametrize("route", [pytest.param(r, marks=[pytest.mark.slow] if r in SLOW else []) for r in ROUTES])
def test_a_read_that_hangs_ends_the_run_and_names_its_place(inside, route):
    try:
        outcome = inside(*RUN, *ROUTES[route], "--step_timeout_seconds=2", trainer=Line, data=lambda: (Hanging(), None))
    finally:
        Hanging.over.set()
        Hanging.over = threading.Event()
    assert outcome.code == 1, "it may go well the next time"
    assert outcome.error.startswith("Hanging.read has not returned for ")
    assert_says(outcome.error, f"{location_of(Hanging.read)}, from example  ... or raise step_timeout_seconds")


STREAM = """
import crankshaft
import tensorflow as tf
from tests.launch.line import Line

FIFO = __file__.replace("script.py", "fifo")  # nobody writes to it
lines = tf.data.TextLineDataset(FIFO).map(lambda line: (tf.zeros([1]), tf.strings.to_number(line)))
crankshaft.main(Line, data=lambda: (lines.apply(tf.data.experimental.assert_cardinality(32)), None))
"""


@pytest.mark.slow
def test_a_stream_that_hangs_ends_the_process(crank, tmp_path):
    """Its own, as TensorFlow's threads wait for ever."""
    (tmp_path / "script.py").write_text(STREAM)
    os.mkfifo(tmp_path / "fifo")
    outcome = crank(*RUN, "--step_timeout_seconds=4", script=tmp_path / "script.py")
    assert outcome.code == 1
    assert re.match(r"the data is a stream without data or computation for 2\S* s; see", outcome.error)
