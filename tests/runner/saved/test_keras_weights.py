"""--init_from with a file that Keras wrote. In this process."""

from __future__ import annotations

import re
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.errors import CheckpointError
from crankshaft.runner.saved.keras_weights import load_keras_weights
from tests.launch.line import RUN, Line, data

pytestmark = pytest.mark.thorough

STILL = (*RUN, "--learning_rate=0", "--mode=train")


class Net(Line):
    """Two layers, batch normalisation between them, whose names are not the file's."""

    def __init__(self, width=4):
        super().__init__()
        self.width = width

    def build_model(self):
        layers = tf.keras.layers
        parts = [layers.Dense(self.width, name="first"), layers.BatchNormalization(), layers.Dense(1, name="last")]
        return tf.keras.Sequential(parts)


def keras_model(width=4, more=()):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input([1]),
            layers.Dense(width, name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(1, name="head"),
            *more,
        ]
    )


@pytest.fixture(scope="module")
def fitted():
    """A model that Keras has trained."""
    model = keras_model()
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 1)), np.ones((8, 1)), epochs=2, verbose=0)
    return model


@pytest.fixture
def trained():
    """The weights that a trainer has at a run's end."""
    kept = []

    class Kept(Net):
        def build(self):
            super().build()
            kept.append(self)

    return Kept, lambda: [np.array(v) for v in kept[-1].model.weights]


@pytest.mark.parametrize(
    ("ending", "where"),
    [(".keras", ()), (".weights.h5", ("--strategy=mirrored", "--num_virtual_devices=2"))],
    ids=["keras-one", "weights-mirrored"],
)
def test_a_run_starts_from_a_keras_file(inside, fitted, trained, tmp_path, ending, where):
    path = str(tmp_path / f"net{ending}")
    fitted.save(path) if ending == ".keras" else fitted.save_weights(path)
    trainer, weights = trained
    outcome = inside(*STILL, *where, f"--init_from={path}", trainer=trainer, data=data).ok()
    assert f"8 weights taken from {path}" in outcome.out
    for ours, other in zip(weights(), fitted.weights, strict=True):
        if "moving" not in other.path:  # which four steps have moved on
            np.testing.assert_array_equal(ours, other)


def test_a_backbone_that_the_trainer_keeps_too_is_a_part_of_its_model(inside, tmp_path):
    class Kept(Line):
        def build_model(self):
            self.backbone = tf.keras.Sequential([tf.keras.layers.Dense(3)])
            return tf.keras.Sequential([self.backbone, tf.keras.layers.Dense(1)])

    path = str(tmp_path / "whole.keras")
    for width in (3, 5):
        theirs = tf.keras.Sequential([tf.keras.Sequential([tf.keras.layers.Dense(width)]), tf.keras.layers.Dense(1)])
        theirs(np.ones([1, 1]))
        theirs.save(path)
        outcome = inside(*STILL, f"--init_from={path}", trainer=Kept, data=data)
        if width == 3:
            assert f"4 weights taken from {path}" in outcome.ok().out
            assert outcome.out.count('Model: "') == 1
    assert re.search(r"<Dense name=dense\S*, built=True>.*\(1, 3\).*\(1, 5\)", outcome.mistake)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: keras_model(width=5), "<Dense name=first, built=True>: The shape of the target variable"),
        (lambda: keras_model(more=[tf.keras.layers.Dense(1, name="extra")]), "only the file has extra;"),
        (
            lambda: tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(4)]),
            "expected 4 variables, but received 0",
        ),
    ],
    ids=["shape", "extra", "missing"],
)
def test_layers_that_do_not_match_are_named(inside, tmp_path, model, says):
    path = str(tmp_path / "net.weights.h5")
    model().save_weights(path)
    outcome = inside(*STILL, f"--init_from={path}", trainer=Net, data=data)
    assert f"{path} does not fit model" in outcome.mistake
    assert says in outcome.error
    assert outcome.error.count("\n") <= 1


@pytest.mark.parametrize("name", ["broken.keras", "broken.weights.h5"])
def test_a_file_that_is_none_of_keras_is_named(inside, tmp_path, name):
    (tmp_path / name).write_text("nothing of the kind")
    outcome = inside(*STILL, f"--init_from={tmp_path / name}", trainer=Net, data=data)
    assert f"{tmp_path / name} can't be read as a file of Keras's weights" in outcome.mistake


def test_a_file_of_the_older_format_is_refused(inside, tmp_path):
    (tmp_path / "old.h5").touch()
    assert "older format" in inside(*STILL, f"--init_from={tmp_path}/old.h5", trainer=Net, data=data).mistake


@pytest.mark.holds("a checkpoint; `.keras`, `.weights.h5` as `--init_from`")
def test_of_a_keras_file_the_weights_alone_are_read(fitted, tmp_path):
    """Its configuration may hold code, or be none."""
    fitted.save(path := str(tmp_path / "net.keras"))
    with zipfile.ZipFile(path) as whole:
        weights = whole.read("model.weights.h5")
    with zipfile.ZipFile(path, "w") as changed:
        changed.writestr("model.weights.h5", weights)
        changed.writestr("config.json", '{"module": "os", "class_name": "system", "config": "exit 1"}')
    model = keras_model()
    assert load_keras_weights(path, model) == 8
    for ours, other in zip(model.weights, fitted.weights, strict=True):
        np.testing.assert_array_equal(ours, other)


@pytest.mark.holds("Weights that the file has in other files")
@pytest.mark.parametrize("kind", ["external", "link", "virtual"])
def test_a_file_whose_weights_are_in_other_files_is_refused(inside, tmp_path, kind):
    """It would have any file of this user's read as weights."""
    path = tmp_path / "net.weights.h5"
    keras_model().save_weights(path)
    (tmp_path / "secret").write_bytes(bytes(64))
    with h5py.File(path, "r+") as file:
        group = next(_groups_of_weights(file))
        shape, name = group["0"].shape, f"{group.name}/0"
        del group["0"]
        if kind == "external":
            group.create_dataset("0", shape, "float32", external=[(str(tmp_path / "secret"), 0, 64)])
        elif kind == "link":
            group["0"] = h5py.ExternalLink(str(tmp_path / "secret"), "/x")
        else:
            layout = h5py.VirtualLayout(shape, "float32")
            layout[...] = h5py.VirtualSource(str(tmp_path / "secret"), "x", shape)
            group.create_virtual_dataset("0", layout)
    outcome = inside(*STILL, f"--init_from={path}", trainer=Net, data=data)
    assert (
        f"{path} can't be read as a file of Keras's weights: {name} has its values in another file" in outcome.mistake
    )


@pytest.mark.parametrize("is_cycle", [False, True])
def test_groups_within_groups_are_read_so_deep_and_each_once(fitted, tmp_path, is_cycle):
    fitted.save_weights(path := tmp_path / "net.weights.h5")
    with h5py.File(path, "r+") as file:
        inner = file.create_group("extra")
        if is_cycle:
            inner["self"] = inner["again"] = file["/"]
        else:
            for _ in range(300):
                inner = inner.create_group("a")
    if is_cycle:
        assert load_keras_weights(str(path), keras_model()) == 8
    else:
        with pytest.raises(CheckpointError, match="its groups are nested more than 200 deep"):
            load_keras_weights(str(path), keras_model())


def _groups_of_weights(file):
    found = []
    file.visititems(lambda name, part: found.append(part) if name.endswith("/vars") and "0" in part else None)
    yield from found
