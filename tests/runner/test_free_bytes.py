"""What a run's variables need is compared with the memory and the disk that are left, before there are any."""

from __future__ import annotations

import pytest
import tensorflow as tf

from crankshaft import UsageError, run
from crankshaft.engine.machine import files, memory
from tests.engine.trainers import Squares
from tests.runs import assert_equal_bits

pytestmark = pytest.mark.thorough

CLICKS = ("--model=wide_deep", "--input=synthetic_clicks", "--input_arg=examples=500")
CLICKS += ("--mode=train", "--train_steps=3", "--jit=off")


def test_a_table_larger_than_the_memory_is_refused_before_it_is_made(inside, tmp_path):
    line = inside(*CLICKS, "--model_arg=hash_buckets=10000000000", f"--run_dir={tmp_path}/run").mistake
    assert "the variables of wide_deep, with the optimizer state, take 1,945," in line
    assert "model_arg=hash_buckets=N or table_capacity=N), several servers (num_ps), devices" in line


class Large(Squares):
    """A Keras model whose table has 1 TiB."""

    def build_model(self):
        ids = tf.keras.Input((), dtype="int64")
        return tf.keras.Sequential([ids, tf.keras.layers.Embedding(1 << 32, 64), tf.keras.layers.Dense(1)])


def test_a_models_own_table_is_too(tmp_path):
    data = (tf.range(20, dtype=tf.int64), tf.ones([20]))
    for run_dir, snapshots in ((None, ""), (tmp_path / "run", r" \(.* with 2 snapshots\)")):
        with pytest.raises(
            UsageError, match=rf"the variables of Large, .* take 3,145,728 MiB in memory{snapshots}, of w"
        ):
            run(Large, data=lambda: (data, None), train_steps=1, jit="off", progress="off", run_dir=run_dir)


@pytest.mark.slow
def test_more_than_half_of_what_is_left_is_a_line_and_changes_no_bit(inside, tmp_path, monkeypatch):
    flags = (*CLICKS, "--model_arg=hash_buckets=20000")
    inside(*flags, f"--run_dir={tmp_path}/plain").ok()
    needed = 20_000 * 17 * 3 * 4
    monkeypatch.setattr(memory, "available_bytes", lambda: 5.5 * needed)
    outcome = inside(*flags, f"--run_dir={tmp_path}/memory").ok()
    assert "take 4 MiB in memory (13 MiB with 2 snapshots), of which 21 MiB are left" in outcome.err
    monkeypatch.undo()
    monkeypatch.setattr(files, "free_bytes", lambda path: int(1.5 * needed))
    outcome = inside(*flags, f"--run_dir={tmp_path}/disk").ok()
    assert f"run_dir={tmp_path}/disk: its disk is nearly full: a checkpoint of the variables of" in outcome.err
    for other in ("memory", "disk"):
        assert_equal_bits(tmp_path / "plain", tmp_path / other, "train")
    monkeypatch.setattr(files, "free_bytes", lambda path: int(0.9 * needed))
    outcome = inside(*flags, f"--run_dir={tmp_path}/full")
    assert "its disk is full: a checkpoint of" in outcome.error
    assert "takes 4 MiB, and 4 MiB are free; free space on it, or use a run_dir on another" in outcome.error
    assert outcome.code == 1  # when there is space, the same command trains
