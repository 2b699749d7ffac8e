"""A package of one's own, named by flags: its model, its input and its optimizer, each with its arguments."""

from __future__ import annotations

import json
import sys

import pytest

import crankshaft
from tests.arrays import assert_same

PARTS = '''
"""A line."""
import numpy as np
import tensorflow as tf
import crankshaft
from crankshaft.engine.optimizers import SGD
from .rates import FACTOR


class Model(crankshaft.Trainer):
    def __init__(self, units: int = 1):
        super().__init__()
        self.units = units

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(self.units, use_bias=False, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.reduce_mean(tf.square(outputs - batch[1]), 1))


def points(data_dir, seed, *, examples: int = 16):
    x = np.random.default_rng(seed).normal(size=(examples, 3)).astype(np.float32)
    return (x, x.sum(1, keepdims=True)), (x, x.sum(1, keepdims=True))


class Doubled(SGD):
    def __init__(self, learning_rate, factor: float = FACTOR, **arguments):
        super().__init__(learning_rate, **arguments)
        self.factor = factor

    def scalars(self, learning_rate, step):
        return {"lr": learning_rate * self.factor}
'''
FLAGS = {
    "global_batch_size": 8,
    "learning_rate": 0.05,
    "jit": "off",
    "input": "ours.parts:points",
    "model": "ours.parts",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `ours` on the search path, whose modules import one another."""
    (tmp_path / "ours").mkdir()
    for name, text in {"__init__": "", "rates": "FACTOR = 2.0\n", "parts": PARTS}.items():
        (tmp_path / "ours" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "run"
    for name in [name for name in sys.modules if name.partition(".")[0] == "ours"]:
        del sys.modules[name]


def test_a_package_trains_resumes_and_is_read_without_its_optimizer(package, replicas, monkeypatch):
    on = {"strategy": "mirrored", "num_virtual_devices": 2} if replicas > 1 else {}
    own = {"optimizer": "ours.parts:Doubled", "optimizer_arg": {"factor": 4}, "input_arg": {"examples": 24}}
    for steps in (2, 4):
        run = crankshaft.run(**FLAGS, **own, **on, run_dir=package, train_steps=steps)
    same = crankshaft.run(
        **FLAGS | {"learning_rate": 0.2}, **on, optimizer="sgd", input_arg=own["input_arg"], train_steps=4
    )
    assert_same(run.model.get_weights(), same.model.get_weights())
    config = json.loads((package / "config.json").read_text())["flags"]
    assert (config["optimizer"], config["optimizer_arg"]) == ("ours.parts:Doubled", {"factor": 4.0})
    read = {**FLAGS, **own, "run_dir": package, "mode": "eval"}
    del read["optimizer"], read["optimizer_arg"], read["learning_rate"], read["input_arg"]
    monkeypatch.setattr("pkgutil.resolve_name", None)  # which would import it
    found = crankshaft.run(**read).result["eval"]["loss"]
    assert found == pytest.approx(run.result["eval"]["loss"], rel=1e-6)


def test_a_run_of_somebody_elses_names_no_code(package, tmp_path):
    crankshaft.run(model="mlp", input="digits", train_steps=1, run_dir=tmp_path / "theirs", jit="off")
    path = tmp_path / "theirs" / "config.json"
    content = json.loads(path.read_text())
    content["flags"]["optimizer"] = "ours.parts:Doubled"
    path.write_text(json.dumps(content))
    with pytest.raises(
        crankshaft.UsageError, match=r"names ours.parts:Doubled, which does not run on that file's word"
    ):
        crankshaft.run(config=path, train_steps=2)
    assert "ours" not in sys.modules


@pytest.mark.parametrize("kind", ["model", "input", "optimizer"])
def test_a_mistake_in_a_name_is_one_line(package, kind):
    def refused(name, match):
        with pytest.raises(crankshaft.UsageError, match=match):
            crankshaft.run(**{**FLAGS, kind: name}, train_steps=1)

    for name in (".x", "x.", "a:b:c"):
        refused(name, f"{kind}={name} is neither package.module nor package.module:Name; write one of them")
    refused("ours.missing", f"{kind}=ours.missing.*: there is no module ours.missing; install its package")
    refused("ours.rates", f"{kind}=ours.rates.* has no")
