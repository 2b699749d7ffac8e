"""The files that AutoGraph writes in TMPDIR: none is there while a run trains, so none is left by a kill."""

from __future__ import annotations

import linecache
import os
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import every_steps


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


@pytest.mark.fast
@pytest.mark.parametrize("resident_data_mb", [0, 1])
def test_a_run_of_arrays_writes_none(monkeypatch, resident_data_mb):
    written, make = [], tempfile.NamedTemporaryFile
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *_, **given: written.append(given) or make(**given))
    x = np.ones([640, 8], np.float32)
    how = {"resident_data_mb": resident_data_mb, "global_batch_size": 32, "train_steps": 100, "steps_per_loop": 4}
    crankshaft.run(Line, data=((x, x[:, :1]), None), progress="off", jit="off", **how)
    assert not written


@pytest.mark.fast
def test_a_step_that_is_traced_leaves_no_file_and_keeps_its_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (others := tmp_path / "__autograph_generated_file_of_another.py").write_text("living = True\n")
    written, left = set[str](), []

    def halved(x, y):
        written.update(str(path) for path in tmp_path.glob("*.py"))
        return (x / 2 if tf.reduce_sum(x) > 0 else x), y

    x = np.ones([64, 8], np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).map(halved).batch(32)
    look = every_steps(1, lambda *_: left.append([path for path in tmp_path.rglob("*") if path.is_file()]))
    crankshaft.run(Line, data=(data, None), train_steps=2, hooks=[look], progress="off", jit="off")
    assert left == [[others]] * 2
    (own,) = written - {str(others)}
    linecache.checkcache()
    assert any("tf__halved" in line for line in linecache.getlines(own))
    assert not os.path.exists(own)
