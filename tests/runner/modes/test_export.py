"""What was trained is served: exports and loaded models give what `run.predict` gives."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
import crankshaft.engine.layers
import crankshaft.parts.sharding
from crankshaft import Source, Spec, Trainer, UsageError, load_model, mean, run
from crankshaft.engine.data import form
from crankshaft.parts.keras_models.keras_trainer import KerasTrainer
from tests.engine.trainers import Columns

pytestmark = pytest.mark.thorough

L = tf.keras.layers
QUIET = {"jit": "off", "progress": "off"}
rng = np.random.default_rng(0)
LENGTHS = np.array([3, 1, 5, 2] * 4, np.int32)
MEAN = L.GlobalAveragePooling2D
LABELS = rng.normal(size=(16, 1)).astype(np.float32)
PICTURES = rng.normal(size=(16, 8, 8, 3)).astype(np.float32)
FAMILIES = {
    "logistic": {"input": "digits"},
    "mlp": {"input": "digits"},
    "cnn": {"input": "digits"},
    "resnet": {"input": "digits"},
    "dlrm": {"input": "synthetic_clicks"},
    "wide_deep": {"input": "synthetic_clicks"},
    "transformer_lm": {
        "model_arg": {"layers": 1, "width": 16, "heads": 2},
        "input": "text",
        "input_arg": {"context": 8},
    },
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in ("mlp", "wide_deep")]


class MeanOfWords(tf.keras.Model):
    """Computes something else of dense rows of words than of ragged ones."""

    def __init__(self):
        super().__init__()
        self.rows, self.dense = L.Embedding(10, 4), L.Dense(1)

    def call(self, words):
        if not isinstance(words, tf.RaggedTensor):
            return self.dense(9.0 * self.rows(words[:, 0]))
        rows = self.rows(words.values)
        return self.dense(tf.math.unsorted_segment_mean(rows, words.value_rowids(), words.nrows()))


def compiled_model():
    model = MeanOfWords()
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Trains and exports a model by its name: the folder, five examples' features by name, and their outputs."""

    @functools.cache
    def exported(name):
        how = {"model": name, "run_dir": tmp_path_factory.mktemp(name) / "run", **FAMILIES[name], **QUIET}
        done = run(mode="train", train_steps=2, global_batch_size=16, **how)
        features = form.features(done.splits["train"].read(np.arange(5)))
        by_name = features if isinstance(features, dict) else {"features": features}
        return run(mode="export", **how).result["export"], by_name, done.predict(features)

    return exported


def served(folder, **features):
    """The outputs of an exported model by name, NumPy arrays."""
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return {name: x.numpy() for name, x in serve(**{name: tf.constant(x) for name, x in features.items()}).items()}


def test_a_compiled_model_is_loaded_and_exported_as_it_was_trained(tmp_path):
    words = tf.RaggedTensor.from_row_lengths(rng.integers(1, 9, sum(LENGTHS)), LENGTHS)
    done = crankshaft.fit(compiled_model, words, LABELS, batch_size=8, epochs=2, verbose=0, run_dir=tmp_path / "run")
    expected, trainer_class = done.predict(words), KerasTrainer.for_model(compiled_model)
    loaded = load_model(tmp_path / "run", trainer_class=trainer_class)
    np.testing.assert_allclose(loaded.predict(words, verbose=0), expected, rtol=1e-5)
    how = {"data": ((words, LABELS), None), "run_dir": tmp_path / "run", **QUIET}
    folder = run(trainer_class, mode="export", **how).result["export"]
    outputs = served(folder, features=words.to_tensor(), features_lengths=LENGTHS)["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)


def test_an_export_that_is_there_is_not_made_again_and_one_of_another_forward_is_refused(tmp_path):
    class Fitted(Trainer):
        scale = 1.0

        def build_model(self):
            return tf.keras.Sequential([L.Input([4]), L.Dense(3)])

        def forward(self, features, training):
            return self.scale * self.model(features)

        def loss(self, outputs, batch):
            return mean(tf.reduce_sum(tf.square(outputs), -1))

    class Other(Fitted):
        scale = 2.0

    Other.__name__ = Fitted.__name__
    how = {"data": ((np.ones([8, 4], "float32"),),), "run_dir": tmp_path / "run", "global_batch_size": 8, **QUIET}
    run(Fitted, train_steps=1, **how)
    folders = [run(Fitted, mode="export", **how).result["export"] for _ in range(2)]
    assert folders[0] == folders[1] == str(tmp_path / "run" / "export" / "1")
    with pytest.raises(UsageError, match=f"{folders[0]} exists; remove it"):
        run(Other, mode="export", **how)
    (tmp_path / "since" / "tables").mkdir(parents=True)
    with pytest.raises(UsageError, match="the model has no table with admit_after to compare; leave it out"):
        run(Fitted, mode="export", export_since=tmp_path / "since", output=tmp_path / "2", **how)


AUGMENTED = {
    "flip": lambda: L.RandomFlip(),
    "rotation": lambda: L.RandomRotation(0.1),
    "zoom": lambda: L.RandomZoom(0.1),
    "translation": lambda: L.RandomTranslation(0.1, 0.1),
    "contrast": lambda: L.RandomContrast(0.1),
    "brightness": lambda: L.RandomBrightness(0.1, value_range=(0, 1)),
    "crop": lambda: L.RandomCrop(6, 6),
    "noise": lambda: L.GaussianNoise(0.1),
}


class Augmented(Trainer):
    """Changes pictures at random in training, by layers of its model."""

    def build_model(self):
        layers = [make() for make in AUGMENTED.values()]
        return tf.keras.Sequential(
            [L.Input([8, 8, 3]), *layers[:4], tf.keras.Sequential(layers[4:]), MEAN(), L.Dense(3)]
        )

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs), -1))


def test_a_model_with_layers_that_augment_is_exported(tmp_path):
    how = {"data": (PICTURES,), "run_dir": tmp_path / "run", "global_batch_size": 8, **QUIET}
    expected = run(Augmented, train_steps=1, **how).predict(PICTURES)
    outputs = served(run(Augmented, mode="export", **how).result["export"], features=PICTURES)["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "wide_deep", *SLOW])
def test_tflite_of_each_family_computes_what_the_run_predicts(family, name):
    folder, features, expected = family(name)
    content = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=["serving_default"]).convert()
    compute = tf.lite.Interpreter(model_content=content).get_signature_runner("serving_default")
    for count in (1, 5):
        outputs = compute(**{key: x[:count] for key, x in features.items()})["outputs"]
        np.testing.assert_allclose(outputs, expected[:count], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES])
def test_onnx_of_each_family_computes_what_the_run_predicts(family, name, tmp_path):
    pytest.importorskip("tf2onnx")
    runtime = pytest.importorskip("onnxruntime")
    folder, features, expected = family(name)
    convert = (sys.executable, "-m", "tf2onnx.convert", "--saved-model", folder, "--output", f"{tmp_path}/model.onnx")
    subprocess.run([*convert, "--opset", "17"], check=True, capture_output=True)
    session = runtime.InferenceSession(f"{tmp_path}/model.onnx")
    for count in (1, 5):
        (outputs,) = session.run(None, {key: x[:count] for key, x in features.items()})
        np.testing.assert_allclose(outputs, expected[:count], rtol=1e-4, atol=1e-5)


class Global(Columns):
    """Reads a table that is none of its attributes."""

    def build_model(self):
        return tf.keras.Sequential([L.Dense(1)])

    def forward(self, features, training=False):
        return self.model(features) + table().lookup(tf.constant(0))


@functools.cache
def table():
    with tf.init_scope():
        return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0], [2.0]), 0.0)


def test_a_table_that_is_no_attribute_is_one_line(tmp_path):
    how = {"data": ((LABELS, LABELS), None), "run_dir": tmp_path / "run", "global_batch_size": 8, **QUIET}
    run(Global, train_steps=1, **how)
    with pytest.raises(UsageError, match=r"mode=export: Global computes with a table .* make it self\.NAME in build$"):
        run(Global, mode="export", **how)


class Typed(Trainer):
    """Outputs of a dtype each: ids that float32 would round, text, truth, and floats of 16 and 64 bits."""

    def build_model(self):
        return tf.keras.Sequential([L.Dense(3)])

    def forward(self, features, training=False):
        scores = self.model(features, training=training)
        best = tf.argmax(scores, -1)
        return {
            "id": tf.gather(tf.constant([9007199254740993, 16777217, 33554435], tf.int64), best),
            "label": tf.gather(tf.constant(["cat", "dog", "fox"]), best),
            "is_first": best == 0,
            "half": tf.cast(scores, tf.bfloat16),
            "double": tf.cast(scores, tf.float64) + 1e-9,
            "scores": scores,
        }

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs["scores"]), -1))


def test_outputs_are_served_in_the_dtypes_that_the_run_predicts(tmp_path):
    points = rng.normal(size=(16, 4)).astype(np.float32)
    how = {"data": (points,), "run_dir": tmp_path / "run", "global_batch_size": 8, **QUIET}
    expected = run(Typed, train_steps=1, **how).predict(points)
    dtypes = {"id": "i8", "is_first": "?", "half": "f4", "double": "f8", "scores": "f4"}
    assert {name: expected[name].dtype for name in dtypes} == {name: np.dtype(each) for name, each in dtypes.items()}
    loaded = load_model(tmp_path / "run", trainer_class=Typed).predict(points, verbose=0)
    for outputs in (served(run(Typed, mode="export", **how).result["export"], features=points), loaded):
        assert outputs.keys() == expected.keys()
        for name, values in expected.items():
            assert outputs[name].dtype == values.dtype or name == "label"
            np.testing.assert_array_equal(outputs[name].astype(values.dtype), values)


class Walks(Source):
    """Features that differ in length: one's lengths have another's name, and one has a name that no signature can."""

    element_spec = (
        {
            "words": Spec((None,), "int64"),
            "walk": Spec((None, 2), "float32"),
            "walk_lengths": Spec((), "float32"),
            "2nd": Spec((None,), "float32"),
        },
        Spec((1,), "float32"),
    )

    def __len__(self):
        return 16

    def read(self, indices):
        words, walk = (
            [np.full([LENGTHS[i], *more], i + 1, dtype) for i in indices]
            for more, dtype in (((), "int64"), ((2,), "float32"))
        )
        return {
            "words": words,
            "walk": walk,
            "walk_lengths": LENGTHS[indices].astype("float32"),
            "2nd": [x[:, 0] for x in walk],
        }, LABELS[indices]


class OfWalks(Trainer):
    """Predicts from all positions that are an example's own; its outputs are a nest."""

    def build_model(self):
        return tf.keras.Sequential([L.Input([4]), L.Dense(1)])

    def forward(self, features, training=False):
        columns = [features["walk_lengths"]]
        for padded in (features[name] for name in ("words", "walk", "2nd")):
            values = tf.cast(padded.values, tf.float32)
            values = values if values.shape.rank == 2 else values[..., 0]
            columns.append(tf.reduce_sum(tf.where(padded.mask, values, 0.0), 1) / tf.cast(padded.lengths, tf.float32))
        height = self.model(tf.stack(columns, 1), training=training)
        return {"plane": {"height": height}, "both": (height, -height)}

    def loss(self, outputs, batch):
        return mean(tf.square(outputs["plane"]["height"] - batch[1])[:, 0])


def test_features_of_varying_length_and_nested_outputs_keep_their_names(tmp_path):
    how = {"data": (Walks(), None), "run_dir": tmp_path / "run", "global_batch_size": 8, **QUIET}
    done = run(OfWalks, train_steps=2, **how)
    expected = done.predict(Walks())
    folder = pathlib.Path(run(OfWalks, mode="export", **how).result["export"])
    given = Walks().read(np.arange(16))[0]
    varying = {name: np.concatenate(x) for name, x in given.items() if name != "walk_lengths"}
    ragged = {name: tf.RaggedTensor.from_row_lengths(x, LENGTHS) for name, x in varying.items()}
    rows = {name: x.to_tensor().numpy() for name, x in ragged.items()}
    loaded = load_model(tmp_path / "run", trainer_class=OfWalks).predict({**given, **ragged})
    np.testing.assert_allclose(loaded["both"][0], expected["both"][0], rtol=1e-5)
    features = {name if name != "2nd" else "x2nd": x for name, x in rows.items()}
    features |= {f"{name}_lengths": LENGTHS for name in ("words", "x2nd")}
    features |= {"walk_lengths": given["walk_lengths"], "walk_lengths_2": LENGTHS}
    outputs = served(folder, **features)
    for name, values in {
        "plane_height": expected["plane"]["height"],
        "both_0": expected["both"][0],
        "both_1": expected["both"][1],
    }.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-5)


class Remembers(Columns):
    """Has a layer with a state, of batches of 4."""

    def build_model(self):
        return tf.keras.Sequential([L.Input(batch_shape=(4, 5, 2)), L.GRU(6, stateful=True), L.Dense(1)])


def test_requests_of_a_stateful_model_are_of_its_batch_size_and_begin_with_zeros(tmp_path):
    walks = rng.normal(size=(16, 5, 2)).astype(np.float32)
    how = {"data": ((walks, LABELS), None), "run_dir": tmp_path / "run", "global_batch_size": 4, **QUIET}
    done = run(Remembers, train_steps=3, **how)
    folder = pathlib.Path(run(Remembers, mode="export", **how).result["export"])
    model = done.model
    assert np.abs(model.layers[0].states[0]).sum() > 0
    model.layers[0].reset_state()
    expected = model(walks[:4])
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    assert serve.structured_input_signature[1]["features"].shape == [4, 5, 2]
    for _ in range(2):
        np.testing.assert_allclose(serve(features=tf.constant(walks[:4]))["outputs"], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError)):
        serve(features=tf.constant(walks[:1]))


def test_another_process_opens_a_keras_file_once_it_has_imported_the_modules_of_its_layers(tmp_path):
    path = tmp_path / "own.keras"
    layers = [crankshaft.engine.layers.Dense(3), crankshaft.parts.sharding.Dense(2)]
    tf.keras.Sequential([L.Input([4]), *layers]).save(path)
    code = "import sys, crankshaft.engine.layers, crankshaft.parts.sharding as parts, keras\n"
    code += "assert type(keras.models.load_model(sys.argv[1]).layers[1]) is parts.Dense"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
