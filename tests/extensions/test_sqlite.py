"""A source that reads rows of an SQLite database by their numbers."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
import tensorflow as tf

import crankshaft

pytestmark = pytest.mark.thorough

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Table(crankshaft.Source):
    element_spec = (crankshaft.Spec((3,), np.float32), crankshaft.Spec((1,), np.float32))

    def __init__(self, path):
        self.path = path

    def __len__(self):
        with sqlite3.connect(self.path) as database:
            return database.execute("SELECT COUNT(*) FROM points").fetchone()[0]

    def read(self, indices):
        with sqlite3.connect(self.path) as database:  # of this thread
            rows = [
                database.execute("SELECT a, b, c, y FROM points WHERE id = ?", [int(i)]).fetchone() for i in indices
            ]
        values = np.float32(rows)
        return values[:, :3], values[:, 3:]

    def identity(self):
        return str(self.path)


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


def test_rows_train_what_numpy_computes(trained, tmp_path):
    path = tmp_path / "points.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE points (id INTEGER PRIMARY KEY, a REAL, b REAL, c REAL, y REAL)")
        rows = [(number, *map(float, row)) for number, row in enumerate(np.hstack([X, Y]))]
        database.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?)", rows)
    weights, _ = trained(Line, Table(path), steps=6)
    expected = np.zeros([3, 1])
    for step in range(6):  # in the data's order, two batches an epoch
        x, y = (array[step % 2 * 8 :][:8] for array in (X, Y))
        expected -= 0.1 * 2 * x.T @ (x @ expected - y) / 8
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)
