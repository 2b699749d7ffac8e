"""Features that are ids: how many there are reaches the model, from an input's files or a user's own data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean

QUIET = ("--jit=off", "--progress=plain", "--global_batch_size=8", "--train_steps=4")


class Factors(Trainer):
    """A rating as the product of a user's and an item's vector."""

    def build_model(self):
        ids = {name: tf.keras.Input((), dtype="int64", name=name) for name in self.run_context.vocabulary}
        vectors = [tf.keras.layers.Embedding(self.run_context.vocabulary[name], 3)(ids[name]) for name in ids]
        return tf.keras.Model(ids, tf.keras.layers.Dot(1)(vectors))

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


@pytest.fixture
def ratings(tmp_path):
    """A file of 40 ratings by 5 users of 7 items, and one line that is none."""
    path = tmp_path / "ratings.csv"
    rows = [f"u{i % 5},i{i % 7},{i % 5},{i}" for i in range(40)]
    path.write_text("\n".join(["user,item,rating,timestamp", *rows[:9], "torn li", *rows[9:]]))
    return path


def table_rows(folder, step) -> set[int]:
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    shapes = reader.get_variable_to_shape_map()
    return {shape[0] for name, shape in shapes.items() if "/model/" in name and len(shape) == 2}


def test_tables_are_as_large_as_the_files_vocabularies_and_skipped_lines_are_told_in_one(inside, ratings, tmp_path):
    run = tmp_path / "run"
    flags = ("--input=ratings", f"--data_dir={ratings}", "--input_arg=max_bad_records=1", f"--run_dir={run}", *QUIET)
    outcome = inside(*flags, trainer=Factors).ok()
    assert table_rows(run, 4) == {6, 8}  # five users, seven items, and what is not known
    warned = [line for line in outcome.err.splitlines() if "malformed" in line]
    assert len(warned) == 1
    assert f"1 malformed record was skipped; the first: {ratings}:11: expected 4 fields" in warned[0]
    inside(*flags, "--train_steps=6", trainer=Factors).ok()
    assert json.loads((run / "result.json").read_text())["step"] == 6


def test_malformed_lines_end_a_run_before_tensorflow_with_one_line(crank, ratings):
    outcome = crank("--model=mlp", "--input=ratings", f"--data_dir={ratings}", tensorflow=False)
    assert outcome.mistake.startswith(f"{ratings}:11: expected 4 fields, as the header has, found 1 ('torn li'); ")


def test_a_users_own_data_brings_its_vocabulary(inside, tmp_path):
    def data():
        ids = {"user": np.arange(16) % 3, "item": np.arange(16) % 11}
        split = ids, np.ones(16, np.float32)
        return split, split, None, {"user": 3, "item": 11}

    inside(*QUIET, f"--run_dir={tmp_path}", trainer=Factors, data=data).ok()
    assert table_rows(tmp_path, 4) == {3, 11}
