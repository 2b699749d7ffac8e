"""What a run on files leaves of its input: in its result, its history, TensorBoard; what it left out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.source import Source, Spec
from crankshaft.engine.machine.events import read
from crankshaft.launch.run.data.loading import faster_input
from tests.bench import split_of
from tests.engine.hooks.tensorboard.boards import scalars

INPUT = '''"""Rows, of which example 3 can't be read, nor the evaluation's first two."""

import numpy as np

from crankshaft import Source, Spec
from crankshaft.engine.data.source import BadRecordError
from crankshaft.engine.data.data import Data


class Rows(Source):
    element_spec = (Spec((4,), np.float32), Spec((), np.int64))

    def __init__(self, bad):
        self._bad = bad

    def __len__(self):
        return 64

    def read(self, indices):
        for bad in self._bad:
            if bad in indices:
                raise BadRecordError(bad, f"rows.bin: record {bad} is bad")
        return np.ones([len(indices), 4], np.float32), indices % 2


def load(data_dir, seed):
    return Data(Rows([3]), Rows([0, 1]), num_classes=2)
'''
FLAGS = ("--model=logistic", "--jit=off", "--global_batch_size=8", "--max_bad_records=2")
FIGURES = {"input_wait_fraction", "input_wait_ms", "input_bytes_per_sec", "input_steps_ahead"}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(INPUT)
    return f"--input={path}"


def test_a_run_on_files_tells_what_its_input_took_and_what_it_left_out(rows, inside, tmp_path):
    run_dir = tmp_path / "run"
    inside(*FLAGS, rows, "--train_epochs=3", "--resident_data_mb=0", f"--run_dir={run_dir}").ok()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["bad_records"] == {"train": 1, "eval": 2}
    assert set(result) >= FIGURES
    row = next(event for event, _ in read(run_dir / "events.jsonl") if event["event"] == "row")
    assert set(row) >= FIGURES
    assert row["input_bytes_per_sec"] > 0
    assert set(scalars(run_dir / "tensorboard" / "train")) >= FIGURES


def test_data_that_is_kept_in_memory_reads_nothing_and_says_no_rate_of_reading(rows, inside, tmp_path):
    result = tmp_path / "result.json"
    for source, bad in ((rows, {"train": 1, "eval": 2}), ("--input=digits", None)):
        flags = FLAGS if bad else FLAGS[:-1]  # without a number of bad records none are counted
        inside(*flags, source, "--train_steps=2", f"--result_json={result}").ok()
        found = json.loads(result.read_text())
        assert found.get("bad_records") == bad
        assert set(found) & FIGURES == {"input_wait_fraction"}


class Large(Source):
    element_spec = (Spec((1024,), np.float32),)

    def __init__(self, chunk_examples: int = 1, is_random: bool = False, files: tuple[str, ...] = ("a",)):
        self.chunk_examples, self.is_random, self._files = chunk_examples, is_random, files

    def files(self):
        return self._files

    def __len__(self):
        return 1 << 20

    def read(self, indices):
        raise AssertionError


@pytest.mark.parametrize(
    ("split", "window", "says", "not_says"),
    [
        (Large(), 0, ["resident_data_mb=4096", "shuffle_window=64", "crankshaft prepare", "cores"], ["dataset"]),
        (Large(), 8, ["resident_data_mb=4096"], ["shuffle_window"]),
        (Large(files=()), 0, ["crankshaft prepare"], ["shuffle_window"]),  # it may be in memory
        (Large(chunk_examples=64), 0, ["crankshaft prepare"], ["shuffle_window"]),
        (Large(is_random=True), 0, ["crankshaft prepare"], ["resident_data_mb"]),
        (None, 0, ["num_parallel_calls", "crankshaft prepare"], ["resident_data_mb"]),
        ((np.zeros([1 << 19, 1], np.float32),), 0, ["resident_data_mb=2 "], ["crankshaft prepare"]),
    ],
)
def test_the_cure_of_slow_input_is_one_that_can_help(split, window, says, not_says):
    split = split_of(tf.data.Dataset.range(4) if split is None else split)
    line = faster_input(split, 1024 if isinstance(split, Large) else 0, window)
    assert [each for each in says if each not in line] == []
    assert [each for each in not_says if each in line] == []
