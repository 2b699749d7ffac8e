"""A model whose layers differ from those of the run whose weights it would get is named, and refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Trainer
from crankshaft.engine.inventory import Inventory
from crankshaft.runner.saved import architecture

K, L = tf.keras, tf.keras.layers
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
MOST = 5  # of a line's changes
DATA = ((X[:48], X[:48, :1]), (X[48:], X[48:, :1]))


class Of(Trainer):
    def __init__(self, model, **others):
        self.model = model
        vars(self).update(others)
        self.inventory = Inventory(self)  # as `prepare` sets it


class Scaled(L.Layer):
    """Keras can't read its configuration, as it is not registered."""

    def __init__(self, by=2.0, **arguments):
        super().__init__(**arguments)
        self.by = by

    def get_config(self):
        return {**super().get_config(), "by": self.by}


@K.utils.register_keras_serializable("tests")
class Gate(L.Layer):
    """Keras writes its arguments alone, since it has no `get_config`."""

    def __init__(self, penalty=0.0, **arguments):
        super().__init__(**arguments)
        self.penalty = penalty

    def call(self, x):
        return x


class Subclassed(K.Model):
    def __init__(self, *layers):
        super().__init__()
        self.all = list(layers)


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def chain(*layers, inputs=("a", "b")):
    """A functional model of two inputs, the first of which goes through all layers."""
    a, b = (L.Input([8], name=name) for name in inputs)
    x = a
    for layer in layers:
        x = layer(x)
    return K.Model([a, b], L.Add()([x, b]))


def sequence(*layers):
    return K.Sequential([L.Input([8]), *layers])


def rewired(again):
    i = L.Input([8])
    x = L.Dense(8)(i)
    return sequence(K.Model(i, L.Add()([L.Dense(8)(x), i if again else x])))


SAME = {
    "automatic names of a layer without get_config": 2 * (lambda: chain(L.Dense(8), Gate(), L.Dense(8)),),
    "automatic names": 2 * (lambda: sequence(L.Dense(8, "relu"), L.Dense(8)),),
    "seeds": (lambda: sequence(L.Dropout(0.1, seed=1)), lambda: sequence(L.Dropout(0.1, seed=2))),
    "trainable": (lambda: sequence(L.Dense(8)), lambda: sequence(L.Dense(8, trainable=False))),
    "wrapped layers": (
        lambda: sequence(L.Reshape([8, 1]), L.Bidirectional(L.LSTM(3))),
        lambda: sequence(L.Reshape([8, 1]), L.Bidirectional(L.LSTM(3, name="mine"))),
    ),
    "code of lambdas": (lambda: sequence(L.Lambda(lambda x: x)), lambda: sequence(L.Lambda(lambda x: x + 1))),
    "subclassed": 2 * (lambda: Subclassed(L.Dense(8), sequence(L.Dense(3))),),
}
CHANGED = {
    "an activation": (
        lambda: chain(L.Dense(8, "relu", name="first"), L.Dense(8)),
        lambda: chain(L.Dense(8, "gelu", name="first"), L.Dense(8)),
        "first (Dense) activation: relu -> gelu",
    ),
    "order": (
        lambda: sequence(L.Dense(8, "relu"), L.Dense(8, "tanh")),
        lambda: sequence(L.Dense(8, "tanh"), L.Dense(8, "relu")),
        "layer 2 (Dense): layer 3 -> layer 2",
    ),
    "an added layer": (
        lambda: sequence(L.Dense(8), L.Dense(8, "relu"), L.Dense(1)),
        lambda: sequence(L.Dense(8), L.LayerNormalization(), L.Dense(8, "relu"), L.Dense(1)),
        "layer 3 (LayerNormalization) is new",
    ),
    "two for one": (
        lambda: sequence(L.Dense(8, name="a"), L.Dense(1, name="end")),
        lambda: sequence(L.LayerNormalization(name="b"), L.Activation("relu", name="c"), L.Dense(1, name="end")),
        "b (LayerNormalization) is new; c (Activation) is new; a (Dense) is gone",
    ),
    "more than are shown": (
        lambda: sequence(*(L.Dense(8, name=f"d{i}") for i in range(MOST + 2))),
        lambda: sequence(*(L.Dense(8, "relu", name=f"d{i}") for i in range(MOST + 2))),
        "; ".join([*(f"d{i} (Dense) activation: linear -> relu" for i in range(MOST)), "2 more"]),
    ),
    "as many as are shown": (
        lambda: sequence(*(L.Dense(8, name=f"d{i}") for i in range(MOST))),
        lambda: sequence(*(L.Dense(8, "relu", name=f"d{i}") for i in range(MOST))),
        "; ".join(f"d{i} (Dense) activation: linear -> relu" for i in range(MOST)),
    ),
    "a regularizer": (
        lambda: sequence(L.Dense(8, kernel_regularizer=K.regularizers.L2(0.1))),
        lambda: sequence(L.Dense(8, kernel_regularizer=K.regularizers.L2(0.2))),
        "layer 2 (Dense) kernel_regularizer.l2: 0.1 -> 0.2",
    ),
    "functions": (
        lambda: sequence(L.Lambda(double)),
        lambda: sequence(L.Lambda(triple)),
        "layer 2 (Lambda) function: double -> triple",
    ),
    "a class": (
        lambda: sequence(L.LayerNormalization(name="norm")),
        lambda: sequence(L.BatchNormalization(name="norm")),
        "norm (LayerNormalization) -> norm (BatchNormalization)",
    ),
    "connections": (
        lambda: rewired(False),
        lambda: rewired(True),
        'inputs of layer 2/layer 4 (Add): [{"args": [["layer 3", "layer 2"]], "kwargs": {}}] -> '
        '[{"args": [["layer 3", "layer 1"]], "kwargs": {}}]',
    ),
    "inputs": (lambda: chain(), lambda: chain(inputs=("b", "a")), "b (InputLayer): layer 2 -> layer 1"),
    "a subclassed model's layers": (
        lambda: Subclassed(L.Dense(8, "relu"), sequence(L.Dense(3))),
        lambda: Subclassed(L.Dense(8, "gelu"), sequence(L.Dense(3))),
        "layer 2 (Dense) activation: relu -> gelu",
    ),
    "a layer of one's own": (
        lambda: sequence(Scaled(2.0)),
        lambda: sequence(Scaled(3.0)),
        "layer 2 (Scaled) by: 2.0 -> 3.0",
    ),
}


def written(trainer):
    return json.loads(json.dumps(architecture.describe(trainer)))


@pytest.mark.parametrize("name", SAME)
def test_what_decides_no_number_is_no_change(name):
    then, now = SAME[name]
    assert architecture.changes(written(Of(then())), Of(now())) == ""


@pytest.mark.parametrize("name", CHANGED)
def test_what_differs_of_a_models_layers_is_named(name):
    then, now, line = CHANGED[name]
    assert architecture.changes(written(Of(then())), Of(now())) == line


def test_layers_of_a_trainer_are_named_by_its_attributes_and_older_descriptions_lack_them():
    then = written(Of(sequence(L.Dense(8)), head=L.Dense(3, "relu")))
    now = Of(sequence(L.Dense(8)), head=L.Dense(3, "gelu"))
    assert architecture.changes(then, now) == "head/layer 1 (Dense) activation: relu -> gelu"
    del then["layers"]
    assert architecture.changes(then, now) == ""


def test_what_another_version_of_keras_wrote_is_compared_as_this_one_reads_it():
    dense, scaled = lambda: sequence(L.Dense(8)), lambda: sequence(Scaled())
    for make in (dense, scaled):  # Keras can't make the second
        then = written(Of(make()))
        config = then["keras"]["config"]["layers"][1]["config"]
        if make is dense:
            config["dtype"] = "float32"  # as Keras 3.0 wrote it
        else:
            del config["by"]
        assert architecture.changes(then, Of(make())) == ""
    then["keras"]["config"]["layers"][1]["config"] = None
    assert architecture.changes(then, Of(scaled())) == "its layers can't be read"


@pytest.mark.thorough
def test_a_run_and_each_reader_of_it_refuses_other_layers_or_is_warned(inside, tmp_path, caplog):
    class Net(Trainer):
        activation = "relu"

        def build_model(self):
            return sequence(L.Dense(8, self.activation, name="hidden"), L.Dense(1))

        def loss(self, outputs, batch):
            return crankshaft.mean(tf.square(outputs - batch[1]))

    class Other(Net):
        activation = "gelu"

    Other.__name__, run = "Net", f"--run_dir={tmp_path}/run"
    inside("--train_steps=2", run, trainer=Net, data=DATA)
    line = "model.json is of a model of other layers than this program's (hidden (Dense) activation: relu -> gelu)"
    for mode in ("train", "eval", "predict", "export"):
        flags = {"train": ("--train_steps=4",), "predict": (f"--output={tmp_path}/p.csv",)}.get(mode, ())
        inside(f"--mode={mode}", run, *flags, trainer=Other, data=DATA).refused(f"{line}; use another run_dir")
    crankshaft.load_model(f"{tmp_path}/run", trainer_class=Other)
    assert "than this trainer's (hidden (Dense) activation: relu -> gelu)" in caplog.text
    inside("--train_steps=4", run, "--allow_changed_config", trainer=Other, data=DATA)
    assert f"{line}: its weights are used in these" in caplog.text
    assert not inside("--train_steps=6", run, trainer=Other, data=DATA).code  # which the run is of from now on
