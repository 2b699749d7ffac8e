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
