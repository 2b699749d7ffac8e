"""Keras's process-wide defaults are of a run's configuration, wherever they came from: later uses have the same."""

from __future__ import annotations

import json
import threading
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import StepOptions, UsageError, load_model, open_run, run
from crankshaft.engine.build import prepare
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.step.options import RunContext
from crankshaft.models import cnn, resnet
from crankshaft.runner.host.isolation import Isolation
from tests import runs
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

config = tf.keras.config
NEW = {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}
OTHERS = {"floatx": "float64", "epsilon": 0.25, "image_data_format": "channels_first"}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 4, 4, 2)).astype("float32"), RNG.normal(size=64).astype("float32")
QUIET = {"progress": "off", "jit": "off", "global_batch_size": 16}


def now() -> dict:
    return {name: getattr(config, name)() for name in NEW}


def set_defaults(values) -> None:
    for name, value in values.items():
        getattr(config, f"set_{name}")(value)


@pytest.fixture(autouse=True)
def keras():
    """Sets Keras's defaults as another machine or program has them, until `set_defaults(NEW)`."""
    set_defaults(OTHERS)
    yield
    set_defaults(NEW)
    config.set_dtype_policy("float32")


@tf.keras.utils.register_keras_serializable("tests")
class PlusEpsilon(tf.keras.layers.Layer):
    def call(self, x):
        return x * (1 + config.epsilon())


class Pixels(Squares):
    """Weighs pixels, whose order Keras's default decides; its outputs depend on epsilon."""

    seen: ClassVar[list[dict]] = []

    def build_model(self):
        self.seen.append(now())
        return tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1), PlusEpsilon()])


class Outputs(Pixels):
    def forward(self, features, training):
        return self.model(features, training=training)


def data():
    return (X, Y), (X[:32], Y[:32])


def trained(run_dir, epochs=1, trainer=Pixels, **flags):
    return run(trainer, data=data, run_dir=str(run_dir), train_epochs=epochs, **{**QUIET, **flags})


def test_every_later_use_of_a_run_has_them_and_the_program_its_own(tmp_path, caplog):
    there = trained(tmp_path / "run").result["eval"]
    expected = load_model(tmp_path / "run", trainer_class=Pixels).predict(X)
    trained(tmp_path / "whole", 2)
    Pixels.seen.clear()
    set_defaults(NEW)
    caplog.clear()
    asked = {"run_dir": str(tmp_path / "run"), "data": data, **QUIET}
    assert run(Pixels, mode="eval", **asked).result["eval"] == there
    (line,) = (each.getMessage() for each in caplog.records)
    assert line.startswith(f"the run has Keras's defaults of {tmp_path}/run/config.json, not this program's (floatx: ")
    assert "image_data_format: channels_first -> channels_last" in line
    for trainer_class in (None, Pixels, Outputs):
        model = load_model(tmp_path / "run", trainer_class=trainer_class)
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
        np.testing.assert_array_equal(model.predict(ArraySource(X)), expected)
    run(Pixels, mode="export", output=str(tmp_path / "exported"), **asked)
    served = tf.saved_model.load(str(next((tmp_path / "exported").iterdir()))).signatures["serving_default"]
    np.testing.assert_array_equal(next(iter(served(tf.constant(X)).values())), expected)
    assert now() == NEW
    with open_run(Pixels, train_epochs=2, **asked) as opened:
        assert now() == NEW
        assert opened.evaluate() == there
        np.testing.assert_array_equal(opened.predict(X), expected)
        np.testing.assert_array_equal(opened.model.predict(X, verbose=0), expected)
        np.testing.assert_array_equal(opened.best_model().predict(X, verbose=0), expected)
        opened.train()
        assert now() == NEW
    runs.assert_equal_bits(tmp_path / "run", tmp_path / "whole")
    assert len(Pixels.seen) == 6
    assert all(each == OTHERS for each in Pixels.seen)


def test_a_run_that_begins_from_another_has_the_defaults_that_its_weights_mean(tmp_path):
    trained(tmp_path / "run")
    set_defaults(NEW)
    Pixels.seen.clear()
    trained(tmp_path / "tuned", 1, init_from=str(tmp_path / "run"))
    trained(tmp_path / "repeated", config=str(tmp_path / "run" / "config.json"))
    assert Pixels.seen == [{**NEW, "image_data_format": "channels_first"}, OTHERS]
    runs.assert_equal_bits(tmp_path / "run", tmp_path / "repeated")
    assert now() == NEW


def test_a_run_of_an_earlier_version_has_the_program_s_with_one_line(tmp_path, caplog):
    trained(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in saved.items() if name != "keras"}))
    set_defaults({"epsilon": 1e-7})
    trained(tmp_path / "run", 2, allow_changed_config=True)  # its checkpoint has epsilon
    (line,) = (each.getMessage() for each in caplog.records)
    assert line == f"{path} is without Keras's defaults, so the run has this program's"
    assert json.loads(path.read_text())["keras"] == {**OTHERS, "epsilon": 1e-7, "dtype_policy": "float64"}


def test_a_damaged_default_is_one_line_that_changes_nothing(tmp_path):
    trained(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    saved = json.loads(path.read_text())
    for name in (*OTHERS, "dtype_policy", "another"):
        path.write_text(json.dumps({**saved, "keras": {**saved["keras"], name: "none such"}}))
        with pytest.raises(UsageError, match=rf"^{path} has .*none such.*restore it from a copy"):
            trained(tmp_path / "run", 2)
        assert now() == OTHERS


def test_a_checkpoint_of_other_defaults_than_the_process_s_is_refused(tmp_path):
    """As an evaluator meets one that began before the run's configuration was there."""
    trained(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace("channels_first", "channels_last"))
    changed = r"ckpt-4.*keras image_data_format: channels_first -> channels_last"
    with pytest.raises(UsageError, match=changed):
        run(Pixels, mode="eval", data=data, run_dir=str(tmp_path / "run"), **QUIET)


def make_model():
    model = tf.keras.Sequential([tf.keras.Input([4, 4, 2]), tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_function_makes_its_model_as_the_run_began_and_another_is_refused(tmp_path):
    how = {"run_dir": str(tmp_path / "run"), "verbose": 0, "jit": "off"}
    set_defaults({"floatx": "float32"})
    config.set_dtype_policy("mixed_bfloat16")
    crankshaft.fit(make_model, X, Y, **how)
    set_defaults(NEW)
    config.set_dtype_policy("float32")
    *_, dense = crankshaft.fit(make_model, X, Y, epochs=2, **how).model.layers
    assert dense.dtype_policy.name == "mixed_bfloat16"
    assert dense.input.shape == (None, 32)
    assert config.dtype_policy().name == "float32"
    with pytest.raises(
        UsageError, match=r"image_data_format: channels_first -> channels_last.*before the model is made"
    ):
        crankshaft.fit(make_model(), X, Y, epochs=3, **how)
    assert now() == NEW


def test_runs_of_two_threads_have_the_same_or_the_second_is_refused(tmp_path):
    """Within a hook, in the same thread, another run has its own."""

    def other(trainer=Pixels):
        def act():
            try:
                results.append(run(trainer, mode="eval", data=data, run_dir=str(tmp_path / "run"), **QUIET))
            except UsageError as error:
                results.append(str(error))

        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    def hook(status, metrics):
        other()
        load_model(tmp_path / "run")
        results.append(now())

    results: list = []
    trained(tmp_path / "run")
    again = {"data": data, "train_steps": 1, "hooks": [every_steps(1, hook)], **QUIET}
    run(Pixels, **again)
    set_defaults(NEW)
    run(Pixels, **again)
    agreed, same, refused, own = results
    assert agreed.result["eval"]
    assert (same, own) == (OTHERS, NEW)
    assert refused.startswith("Keras's floatx is float64 in this run, and float32 in one of another thread; ")
    assert now() == NEW


LARGE = pytest.param(resnet.Model(depth=50), marks=pytest.mark.slow)


@pytest.mark.parametrize("trainer", [cnn.Model(), cnn.Model(batch_norm=True), resnet.Model(), LARGE])
def test_bundled_models_of_images_are_the_same_whatever_keras_is_set_to(trainer):
    images, found = tf.random.stateless_uniform([2, 12, 12, 3], [1, 2]), []
    for values in (OTHERS, NEW):
        set_defaults({"image_data_format": values["image_data_format"]})
        with Isolation().entered():
            model = prepare(trainer, RunContext(StepOptions(), 10, example=(images, np.zeros([2], np.int32)))).model
        found.append((model.to_json(), model(images).numpy().tolist()))
    assert found[0] == found[1]
