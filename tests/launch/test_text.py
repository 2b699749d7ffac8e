"""A language model on text files: a run that is resumed is one that was not, and padding counts for nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean
from tests.runs import assert_equal_bits, result

TEXT = b"the cat sat on the mat, and the mat lay under the cat. " * 40
RUN = ("--input=text", "--input_arg=context=16", "--global_batch_size=8", "--jit=off", "--progress=plain")
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


def test_a_resumed_run_on_files_of_text_is_one_on_text_in_memory_that_was_not(inside, tmp_path):
    data = folders(tmp_path)
    for steps, name in ((14, "parts"), (30, "parts"), (30, "whole")):  # an epoch is 18 steps
        flags = (f"--train_steps={steps}", f"--run_dir={tmp_path}/{name}", *([FILES] if name == "parts" else []))
        inside(*RUN, *data, *RATE, *flags, trainer=NextToken).ok()
    assert_equal_bits(tmp_path / "parts", tmp_path / "whole", "eval")
    found = result(tmp_path / "whole")["eval"]
    windows, labels = -(-302 // 16), 301 + 1  # the separator at the end
    assert found["padding"] == np.float32(1 - labels / (16 * windows))
    assert found["loss"] < 3.5  # of 5.55 for 257 tokens


def test_a_window_that_is_damaged_ends_the_run_in_one_line_or_is_left_out(inside, tmp_path):
    data = folders(tmp_path)
    run = (*RUN, *data, FILES, "--train_steps=18")
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


def test_other_text_is_tokenized_by_the_vocabulary_of_the_run(inside, tmp_path):
    pytest.importorskip("tokenizers")
    first, found = tmp_path / "first", tmp_path / "found.json"
    (tmp_path / "cat.txt").write_bytes(TEXT)
    (tmp_path / "dog.txt").write_bytes(b"a dog dug one deep hole under our old garden wall, then he slept. " * 30)
    own, dog = "--input_arg=vocabulary_size=270", f"--data_dir={tmp_path}/dog.txt"
    run = (*RUN, *RATE, own, f"--data_dir={tmp_path}/cat.txt", "--validation_split=0.2", "--train_steps=20")
    inside(*run, f"--run_dir={first}", trainer=NextToken).ok()

    def loss(*flags):
        inside(*flags, f"--result_json={found}", trainer=NextToken).ok()
        return json.loads(found.read_text())["eval"]["loss"]

    begins = (*RUN, "--optimizer=sgd", "--learning_rate=1e-12", "--train_steps=1", f"--init_from={first}")
    by_run = (*begins, dog, f"--input_arg=tokenizer={first}/model.json")
    error = inside(*begins, dog, own, "--validation_split=0.2", trainer=NextToken).mistake
    assert error.startswith(f"init_from={first} was trained with other words, tokens or classes than this data has")
    assert f"input_arg=tokenizer={first}/model.json" in error
    expected = loss(*by_run, "--validation_split=0.2")
    assert abs(loss(*begins, dog, own, "--validation_split=0.2", "--allow_changed_config") - expected) > 0.01
    reads = ("--mode=eval", f"--run_dir={first}", "--progress=plain")
    np.testing.assert_allclose(loss(*reads, dog), expected, rtol=1e-6)
    other = inside(*reads, "--input_arg=vocabulary_size=300", "--allow_changed_config", trainer=NextToken).mistake
    assert "was fitted with another input_arg (vocabulary_size: 270 -> 300), and is not fitted again" in other
    whole = loss(*reads, f"--eval_data_dir={tmp_path}/dog.txt")  # beside the run's own --validation_split
    np.testing.assert_allclose(whole, loss(*by_run, f"--eval_data_dir={tmp_path}/dog.txt"), rtol=1e-6)
    error = inside(*by_run, "--input_arg=separator=x", trainer=NextToken).mistake
    assert "separator=x: tokenizer=" in error
