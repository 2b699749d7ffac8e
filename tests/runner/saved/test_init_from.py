"""Runs that begin with another run's weights."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Averaged
from tests import runs
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
_RNG = np.random.default_rng(0)
POINTS = _RNG.normal(size=(16, 3)).astype("float32"), _RNG.normal(size=16).astype("float32")


class Line(Squares):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="ones")])


class Taught(Line):
    def build(self):
        super().build()
        self.teacher = Averaged(self.model, decay=0.9)


@pytest.mark.parametrize("where", [pytest.param({}, marks=pytest.mark.slow), TWO], ids=["one device", "two replicas"])
def test_a_teacher_is_the_source_s_or_begins_at_the_model_and_a_line_says_so(tmp_path, capsys, where):
    common = {"data": (POINTS, None), "global_batch_size": 16, "jit": "off", **where}
    for trainer in (Taught, Line):
        crankshaft.run(trainer, **common, train_steps=3, mode="train", run_dir=tmp_path / trainer.__name__)

    def begun(source=None, **flags):
        """The model's weights and the teacher's as a run begins, and what it printed."""
        flags |= {"init_from": tmp_path / source} if source else {"run_dir": tmp_path / "Line"}
        with crankshaft.open_run(Taught, **common, train_steps=3, **flags) as run:
            weights = [run.models[name].get_weights() for name in ("model", "teacher")]
        return *(np.concatenate([np.ravel(each) for each in arrays]) for arrays in weights), capsys.readouterr().out

    kept = runs.tensors(tmp_path / "Taught")
    averages = [np.ravel(value) for key, value in kept.items() if key.startswith("trainer/teacher/")]
    model, teacher, printed = begun("Taught")
    np.testing.assert_array_equal(np.sort(teacher), np.sort(np.concatenate(averages)))
    assert (model != teacher).all()
    assert "4 weights taken from" in printed
    assert "teacher: not in" not in printed
    student, teacher, printed = begun("Line")
    np.testing.assert_array_equal(teacher, student)
    assert "teacher: not in" in printed
    np.testing.assert_array_equal(begun(allow_changed_config=True)[:2], [student, student])  # resumed


class Anchored(Line):
    """Is pulled to the weights with which it begins, as an array and as variables."""

    def build(self):
        super().build()
        self.array = [np.asarray(weight) for weight in self.model.trainable_variables]
        self.anchor = [tf.Variable(weight.value, trainable=False) for weight in self.model.trainable_variables]

    def training_loss(self, outputs, batch):
        anchors = zip(self.model.trainable_variables, self.array, self.anchor, strict=True)
        away = tf.add_n([tf.reduce_sum((weight - x) ** 2 + (weight - y) ** 2) for weight, x, y in anchors])
        return {"task": self.loss(outputs, batch), "away": crankshaft.Mean(away, 1.0)}


@pytest.mark.parametrize("where", [pytest.param({}, marks=pytest.mark.slow), TWO], ids=["one device", "two replicas"])
def test_a_run_begins_at_the_averages_of_its_source_which_build_may_copy(tmp_path, where):
    common = {"data": (POINTS, POINTS), "global_batch_size": 16, "jit": "off", "learning_rate": 0.1, **where}
    source = crankshaft.run(Line, **common, train_steps=3, ema_decay=0.5, run_dir=tmp_path / "source")
    source.model.save(tmp_path / "source.keras")
    for name in ("source", "source.keras"):
        with crankshaft.open_run(Anchored, **common, init_from=tmp_path / name) as run:
            assert run.evaluate()["loss"] == pytest.approx(source.result["eval"]["loss"], rel=1e-6)
            assert run.train(steps=1)["away"] == 0.0
    common |= {"init_from": tmp_path / "source", "mode": "train"}
    for steps in (2, 4):
        crankshaft.run(Anchored, **common, train_steps=steps, run_dir=tmp_path / "resumed")
    crankshaft.run(Anchored, **common, train_steps=4, run_dir=tmp_path / "whole")
    resumed, whole = runs.tensors(tmp_path / "resumed"), runs.tensors(tmp_path / "whole")
    assert [name for name in whole if whole[name].tobytes() != resumed[name].tobytes()] == []


class Wide(Squares):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2, name="head")])


def test_a_layer_of_another_shape_is_named_as_keras_names_it_with_the_way_to_take_others(tmp_path):
    common = {"data": (POINTS, None), "global_batch_size": 16, "jit": "off", "train_steps": 1, "mode": "train"}
    crankshaft.run(Line, **common, run_dir=tmp_path)
    for flags in ({"init_from": tmp_path}, {"run_dir": tmp_path, "allow_changed_config": True}):
        with pytest.raises(crankshaft.UsageError, match=r"build_model.*crankshaft\.load_model.*head/kernel: \[3, 2\]"):
            crankshaft.run(Wide, **common, **flags)
