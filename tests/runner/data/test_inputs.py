"""What a run on files leaves of its input: in its result, its history, TensorBoard; what it left out.

A language model on text files: what is damaged, and text that is cut by the vocabulary of another run.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.data.source import Source, Spec
from crankshaft.engine.record.events import read
from crankshaft.runner.data.loading import faster_input
from tests.bench import split_of
from tests.parts.tensorboard.boards import scalars

INPUT = '''"""Rows, of which example 3 can't be read, nor the evaluation's first two."""

import numpy as np

from crankshaft import Source, Spec
from crankshaft.engine.data.source import BadRecordError
from crankshaft.engine.data.run_data import Data


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
    row = next(line.event for line in read(run_dir / "events.jsonl") if line.kind == "row")
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


TEXT = b"the cat sat on the mat, and the mat lay under the cat. " * 40
TEXT_RUN = ("--input=text", "--input_arg=context=16", "--global_batch_size=8", "--jit=off", "--progress=plain")
RATE = ("--seed=3", "--learning_rate=0.1")
FILES = "--resident_data_mb=0"


class NextToken(Trainer):
    """Tells the next token from the one before it."""

    def build_model(self):
        return tf.keras.Sequential(
            [
                tf.keras.layers.Embedding(self.run_context.num_classes, 8),
                tf.keras.layers.Dense(self.run_context.num_classes),
            ]
        )

    def losses(self, outputs, labels):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), outputs)

    def loss(self, outputs, batch):
        return mean(self.losses(outputs, batch[1]), weights=batch[1] >= 0)

    def metrics(self, outputs, batch):
        return {"padding": mean(tf.cast(batch[1] < 0, tf.float32)), "sum": mean(tf.reduce_sum(batch[1], 1))}


def folders(tmp_path):
    for name, text in (("train", TEXT), ("eval", TEXT[:301])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(text)
    return f"--data_dir={tmp_path}/train", f"--eval_data_dir={tmp_path}/eval"


@pytest.mark.thorough
def test_a_window_that_is_damaged_ends_the_run_in_one_line_or_is_left_out(inside, tmp_path):
    data = folders(tmp_path)
    run = (*TEXT_RUN, *data, FILES, "--train_steps=18")
    inside(*run, trainer=NextToken).ok()
    (path,) = (tmp_path / "train" / ".crankshaft").iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[38 * 5] ^= 1
    path.write_bytes(damaged)
    outcome = inside(*run, trainer=NextToken)
    assert outcome.code == 2
    assert outcome.error.endswith("window 5 is damaged (its checksum differs); remove the file: it is rebuilt")
    outcome = inside(*run, "--max_bad_records=1", trainer=NextToken).ok()
    assert "window 5 is damaged" in outcome.err


@pytest.mark.slow
def test_other_text_is_tokenized_by_the_vocabulary_of_the_run(inside, tmp_path):
    pytest.importorskip("tokenizers")
    first, found = tmp_path / "first", tmp_path / "found.json"
    (tmp_path / "cat.txt").write_bytes(TEXT)
    (tmp_path / "dog.txt").write_bytes(b"a dog dug one deep hole under our old garden wall, then he slept. " * 30)
    own, dog = "--input_arg=vocabulary_size=270", f"--data_dir={tmp_path}/dog.txt"
    run = (*TEXT_RUN, *RATE, own, f"--data_dir={tmp_path}/cat.txt", "--validation_split=0.2", "--train_steps=20")
    inside(*run, f"--run_dir={first}", trainer=NextToken).ok()

    warnings = []

    def loss(*flags):
        warnings.append(inside(*flags, f"--result_json={found}", trainer=NextToken).ok().err)
        return json.loads(found.read_text())["eval"]["loss"]

    begins = (*TEXT_RUN, "--optimizer=sgd", "--learning_rate=1e-12", "--train_steps=1", f"--init_from={first}")
    by_run = (*begins, dog, f"--input_arg=tokenizer={first}/model.json")
    error = inside(*begins, dog, own, "--validation_split=0.2", trainer=NextToken).mistake
    assert error.startswith(f"init_from={first} was trained with other words, tokens or classes than this data has")
    assert f"input_arg=tokenizer={first}/model.json" in error
    expected = loss(*by_run, "--validation_split=0.2")
    assert abs(loss(*begins, dog, own, "--validation_split=0.2", "--allow_changed_config") - expected) > 0.01
    reads = ("--mode=eval", f"--run_dir={first}", "--progress=plain")
    np.testing.assert_allclose(loss(*reads, dog), expected, rtol=1e-6)
    predicts = ("--mode=predict", f"--run_dir={first}", dog, f"--output={tmp_path}/dog.npz")
    for err in (warnings[-1], inside(*predicts, trainer=NextToken).ok().err):
        assert re.search(r"\d+ of \d+ examples are read: data_dir=.*dog.txt .* divided .* set eval_data_dir", err)
    other = inside(*reads, "--input_arg=vocabulary_size=300", "--allow_changed_config", trainer=NextToken).mistake
    assert "was fitted with another input_arg (vocabulary_size: 270 -> 300), and is not fitted again" in other
    whole = loss(*reads, f"--eval_data_dir={tmp_path}/dog.txt")  # beside the run's own --validation_split
    assert "examples are read" not in warnings[-1]
    np.testing.assert_allclose(whole, loss(*by_run, f"--eval_data_dir={tmp_path}/dog.txt"), rtol=1e-6)
    error = inside(*by_run, "--input_arg=separator=x", trainer=NextToken).mistake
    assert "separator=x: tokenizer=" in error
