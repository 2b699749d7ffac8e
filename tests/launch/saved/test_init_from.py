"""Runs that begin with another run's weights."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Trainer, mean
from crankshaft.engine import Averaged, Embedding
from tests import runs

pytestmark = pytest.mark.thorough

TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
_RNG = np.random.default_rng(0)
DAYS = [(_RNG.normal(size=(16, 3)).astype("float32"), _RNG.normal(size=16).astype("float32")) for _ in range(2)]


class Line(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


def tables(rows, shards):
    """A trainer with a table of so many rows and shards."""

    class Rows(Trainer):
        def build_model(self):
            self.table = Embedding("users", rows, 2, num_shards=shards)
            return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            return self.model(self.table(features["user"], training=training), training=training)

        loss = Line.loss

    return Rows


CLICKS = [({"user": np.arange(32) * 7 % (9 + 4 * day)}, np.float32(np.arange(32) % 3)) for day in range(2)]


def after_two_days(folder, first, then, **more):
    """The table after a day with users 0 to 8 and one with users 0 to 12; rows in the order of users."""
    common = {"train_steps": 4, "global_batch_size": 8, "mode": "train", "jit": "off", "progress": "off", **more}
    crankshaft.run(first, data=(CLICKS[0], None), **common, run_dir=folder / "1")
    begun = {"init_from": folder / "1", "run_dir": folder / "2"}
    crankshaft.run(then, data=(CLICKS[1], None), **common, **begun)
    kept, slots = runs.tensors(folder / "2"), runs.manifests(folder / "2")[-1]["about"]["updated"]["optimizer"]
    shards = [kept[f"{name}.ATTRIBUTES/VARIABLE_VALUE"] for name in slots if "table" in name]
    rows = np.empty([sum(map(len, shards)), 2], np.float32)
    for number, shard in enumerate(shards):
        rows[number :: len(shards)] = shard
    return rows


@pytest.mark.parametrize("more", [{}, pytest.param(TWO, marks=pytest.mark.slow)], ids=["one device", "two replicas"])
def test_a_table_grows_with_the_next_days_ids(tmp_path, more):
    expected = after_two_days(tmp_path / "whole", tables(13, 1), tables(13, 1))
    grown = (tables(9, 1), tables(13, 1)) if more else (tables(9, 2), tables(13, 3))
    found = after_two_days(tmp_path / "grown", *grown, **more)
    np.testing.assert_allclose(found, expected, atol=1e-6)


class Taught(Line):
    def build(self):
        super().build()
        self.teacher = Averaged(self.model, decay=0.9)


@pytest.mark.parametrize("where", [pytest.param({}, marks=pytest.mark.slow), TWO], ids=["one device", "two replicas"])
def test_a_teacher_is_the_source_s_or_begins_at_the_model_and_a_line_says_so(tmp_path, capsys, where):
    common = {"data": (DAYS[0], None), "global_batch_size": 16, "jit": "off", **where}
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
