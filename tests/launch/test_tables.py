"""Runs of models with embedding tables, as a user starts them: resumed, started from, exported, looked at."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import runs

CLICKS = (
    "--input=synthetic_clicks",
    *(f"--input_arg={arg}" for arg in ("examples=600", "eval_examples=200", "rows=30", "fields=3")),
    *("--model=wide_deep", "--model_arg=hidden_units=8", "--model_arg=width=4", "--model_arg=crosses=all"),
    *("--global_batch_size=64", "--optimizer=adam", "--progress=plain"),
)


GIVEN = ("--model_arg=table_capacity=300", "--model_arg=admit_after=2")


@pytest.mark.parametrize(
    "strategy",
    [
        ("--strategy=one_device", *GIVEN),
        pytest.param(("--strategy=mirrored", "--num_virtual_devices=2"), marks=pytest.mark.slow),
    ],
)
def test_a_run_with_tables_resumes_to_the_same_bits_and_serves_what_it_learned(inside, tmp_path, strategy):
    common = (*CLICKS, *strategy, "--ema_decay=0.9", "--clip_norm=1")
    once, twice = tmp_path / "once", tmp_path / "twice"
    inside(*common, f"--run_dir={once}", "--train_steps=24", "--histogram_every_steps=12").ok()
    inside(*common, f"--run_dir={twice}", "--train_steps=11").ok()
    inside(*common, f"--run_dir={twice}", "--train_steps=24").ok()
    runs.assert_equal_bits(once, twice)
    found = json.loads((once / "result.json").read_text())["eval"]
    assert set(found) == {"loss", "auc", "log_loss"}
    again = inside(*common, f"--run_dir={once}", "--mode=eval").ok()
    assert f"auc {found['auc']:g}" in again.out

    inside(*common, f"--run_dir={once}", "--mode=export").ok()
    serve = tf.saved_model.load(str(once / "export" / "24")).signatures["serving_default"]
    ids = np.array([[1, 2, 3], [29, 0, 7]], np.int64)
    served = serve(categories=tf.constant(ids))["outputs"].numpy()
    assert served.shape == (2,)
    assert "trainer/embedding/shards/0/.ATTRIBUTES/VARIABLE_VALUE" in runs.tensors(once)
    assert np.isfinite(served).all()
    other = serve(categories=tf.constant(ids[:, ::-1]))["outputs"].numpy()
    assert (served != other).all()


def test_tables_are_taken_from_another_run(inside, tmp_path):
    inside(*CLICKS, f"--run_dir={tmp_path}/first", "--train_steps=9").ok()
    flags = ("--optimizer=sgd", "--learning_rate=0", "--train_steps=1", f"--init_from={tmp_path}/first", "--seed=7")
    inside(*CLICKS, *flags, f"--run_dir={tmp_path}/second").ok()
    first, second = (runs.tensors(tmp_path / name) for name in ("first", "second"))
    tables = [name for name in second if "shards" in name and "optimizer" not in name]
    assert len(tables) == 2  # of the ids, and of their crosses
    assert all(first[name].tobytes() == second[name].tobytes() for name in tables)
    wider = (word.replace("width=4", "width=5") for word in CLICKS)
    other = (*wider, "--train_steps=1", f"--init_from={tmp_path}/first")
    assert "do not fit this model" in inside(*other, f"--run_dir={tmp_path}/third").error


def test_the_summary_names_each_table(inside):
    out = inside(*CLICKS, "--train_steps=1").ok().out
    assert "Embedding: 'embedding', 90 rows x 5, 0.0 MB, shards: 1" in out
    assert "XLA off: the updates of embeddings touch a few rows" in out
