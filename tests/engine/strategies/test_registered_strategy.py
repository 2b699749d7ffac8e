"""A sixth strategy, that of examples/, written from its contract alone, registered, and trained with as any other."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.errors import UsageError
from crankshaft.engine.hooks import every_epoch
from crankshaft.engine.strategies import register
from crankshaft.launch.composition import devices
from tests.arrays import assert_close
from tests.engine.trainers import Squares
from tests.pages import ROOT

pytestmark = pytest.mark.thorough

EXAMPLE = (ROOT / "examples" / "step_by_step.py").read_text("utf-8")
FEATURES = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 3
ASKED = {"global_batch_size": 16, "train_epochs": 4, "learning_rate": 0.1, "jit": "off", "progress": "off"}


class Plane(Squares):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])


def data():
    return (FEATURES, LABELS), (FEATURES[:10], LABELS[:10])


@pytest.fixture(autouse=True)
def _registered():
    exec(compile(EXAMPLE, "step_by_step.py", "exec"), {"__name__": "step_by_step"})


def test_it_trains_evaluates_and_resumes_as_one_device_does(tmp_path):
    epochs = []
    hook = every_epoch(lambda status, metrics: epochs.append(metrics["loss"]))
    one = crankshaft.run(Plane, data=data, **ASKED)
    first = crankshaft.run(
        Plane, data=data, hooks=[hook], strategy="step_by_step", run_dir=tmp_path, **{**ASKED, "train_epochs": 2}
    )
    assert (first.result["step"], first.result["strategy"]) == (6, "step_by_step")
    assert epochs[1] < 0.8 * epochs[0]
    rest = crankshaft.run(Plane, data=data, strategy="step_by_step", run_dir=tmp_path, **ASKED)
    assert rest.result["step"] == one.result["step"] == 12
    assert rest.result["eval"]["loss"] == pytest.approx(one.result["eval"]["loss"], rel=1e-5)  # float32's rounding
    assert_close(rest.model.get_weights(), one.model.get_weights(), rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"strategy": "step_by_stop"}, "strategy=step_by_stop is unknown; did you mean step_by_step?"),
        ({"strategy": "step_by_step", "jit": "on"}, "jit=on: strategy=step_by_step does not define how its steps"),
    ],
)
def test_what_it_lacks_is_one_line(asked, says):
    with pytest.raises(crankshaft.UsageError, match=says.replace(".", r"\.")):
        crankshaft.run(Plane, data=data, **{**ASKED, **asked})


def test_benchmark_mode_times_it_and_warns_of_what_it_cannot_count():
    asked = {**ASKED, "mode": "benchmark", "benchmark_arg": {"steps": 5}, "strategy": "step_by_step"}
    asked.pop("train_epochs")
    found = crankshaft.run(Plane, data=data, **asked).result
    assert found["steps"] % 5 == 0
    assert found["examples_per_sec"] > 0
    assert found["flops_per_step"] is None
    assert any("the strategy step_by_step compiles its steps in a way of its own" in line for line in found["warnings"])


def test_a_name_that_is_taken_and_a_maker_of_something_else_are_refused():
    with pytest.raises(ValueError, match="the strategy mirrored comes with Crankshaft; register yours by another name"):
        register("mirrored", lambda options: None)
    with pytest.raises(ValueError, match="'two words' is not a name of a strategy"):
        register("two words", lambda options: None)
    register("step_by_step", lambda options: "none")
    with pytest.raises(UsageError, match="registered as the strategy step_by_step makes a str; make a Strategy"):
        devices.create("step_by_step")
