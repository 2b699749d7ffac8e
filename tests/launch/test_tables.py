"""Runs of models with embedding tables, as a user starts them: resumed, started from, exported, looked at."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine import Embedding
from tests import runs

CLICKS = (
    "--input=synthetic_clicks",
    *(f"--input_arg={arg}" for arg in ("examples=640", "eval_examples=200", "rows=30", "fields=3")),
    *("--model=wide_deep", "--model_arg=hidden_units=8", "--model_arg=width=4", "--model_arg=crosses=all"),
    *("--global_batch_size=64", "--optimizer=adam", "--progress=plain"),
)


def test_a_run_with_tables_resumes_to_the_same_bits_and_serves_what_it_learned(inside, tmp_path):
    admitting = ("--model_arg=table_capacity=300", "--model_arg=admit_after=2")
    common = (*CLICKS, *admitting, "--ema_decay=0.9", "--clip_norm=1")
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


def in_shards(number, rows=11):
    """A trainer with two tables of so many shards, as around as many servers, and a weight between them."""

    class Tables(Trainer):
        def build_model(self):
            self.tables = [Embedding(name, size, 3, num_shards=number) for name, size in (("a", rows), ("b", 7))]
            return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            first, second = (
                table(features[name], training=training) for table, name in zip(self.tables, "ab", strict=True)
            )
            return self.model(first * second, training=training)

        def loss(self, outputs, batch):
            return mean(tf.square(outputs[:, 0] - batch[1]))

    return Tables


def pairs():
    a, b = np.arange(48) * 5 % 11, np.arange(48) * 3 % 7
    return ({"a": a, "b": b}, np.float32(a % 2 + b % 3)), None


IN_SHARDS = ("--global_batch_size=8", "--learning_rate=0.05", "--clip_norm=1", "--progress=plain", "--mode=train")


def whole_tables(run_dir):
    """What a run keeps of each table and of each slot of one, with its rows in order."""
    kept, found = runs.tensors(run_dir), {}
    updated = runs.manifests(run_dir)[-1]["about"]["updated"]["optimizer"]
    for table in (0, 1):
        names = [name for name in updated if f"tables/{table}/" in name]
        numbers = [updated.index(name) for name in names]
        keys = [names, *([f"trainer/optimizer/slots/{n:04d}_shard/{slot}/" for n in numbers] for slot in "mv")]
        for what, prefixes in zip("wmv", keys, strict=True):
            shards = [kept[f"{prefix}.ATTRIBUTES/VARIABLE_VALUE"] for prefix in prefixes]
            rows = np.empty([sum(map(len, shards)), shards[0].shape[1]], np.float32)
            for number, shard in enumerate(shards):
                rows[number :: len(shards)] = shard
            found[f"{what} {table}"] = rows
    return found


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [(3, 1, ("--strategy=mirrored", "--num_virtual_devices=2")), pytest.param(2, 3, (), marks=pytest.mark.slow)],
)
def test_tables_are_read_into_another_number_of_shards(inside, tmp_path, before, after, where):
    first, whole = tmp_path / "first", tmp_path / "whole"
    for run_dir, steps in ((first, 4), (whole, 9)):
        inside(*IN_SHARDS, f"--run_dir={run_dir}", f"--train_steps={steps}", trainer=in_shards(before), data=pairs).ok()
    taken = tmp_path / "taken"
    flags = ("--optimizer=sgd", "--learning_rate=0", "--train_steps=1", f"--init_from={first}", "--seed=4")
    inside(*IN_SHARDS, *flags, *where, f"--run_dir={taken}", trainer=in_shards(after), data=pairs).ok()
    tensors, expected = runs.tensors(taken), whole_tables(first)
    for table in (0, 1):
        for shard in range(after):
            found = tensors[f"trainer/tables/{table}/shards/{shard}/.ATTRIBUTES/VARIABLE_VALUE"]
            np.testing.assert_array_equal(found, expected[f"w {table}"][shard::after])
    inside(*IN_SHARDS, *where, f"--run_dir={first}", "--train_steps=9", trainer=in_shards(after), data=pairs).ok()
    found, expected = whole_tables(first), whole_tables(whole)
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, atol=3e-6, err_msg=name)
    assert len(runs.manifests(first)[-1]["about"]["updated"]["optimizer"]) == 2 + 2 * after


def test_a_table_that_has_grown_begins_with_the_rows_of_a_smaller_one(inside, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    inside(*IN_SHARDS, f"--run_dir={first}", "--train_steps=3", trainer=in_shards(2), data=pairs).ok()
    flags = (*IN_SHARDS, "--optimizer=sgd", "--learning_rate=0", "--train_steps=1", "--seed=4")
    error = inside(*flags, f"--init_from={first}", trainer=in_shards(1, rows=10), data=pairs).mistake
    assert "do not fit this model; use the same model" in error
    line = (
        "trainer.tables[0].shards[0]: [10, 3] float32 here, [11, 3] float32 in the checkpoint (a table can't lose rows)"
    )
    assert line in error
    error = inside(*IN_SHARDS, f"--run_dir={first}", "--train_steps=4", trainer=in_shards(1, rows=13), data=pairs).error
    assert "load only its weights with init_from" in error
    inside(*flags, f"--run_dir={second}/fresh", trainer=in_shards(3, rows=13), data=pairs).ok()
    init = (f"--init_from={first}", f"--run_dir={second}/grown")
    out = inside(*flags, *init, trainer=in_shards(3, rows=13), data=pairs).ok().out
    assert "rows that it lacks begin as they were made: trainer.tables[0].shards[0] (4 of 5 rows)" in out
    before = whole_tables(first)["w 0"]
    fresh, grown = (runs.tensors(second / name) for name in ("fresh", "grown"))
    keys = [f"trainer/tables/0/shards/{shard}/.ATTRIBUTES/VARIABLE_VALUE" for shard in range(3)]
    for shard, key in enumerate(keys):
        old = before[shard::3]
        np.testing.assert_array_equal(grown[key], np.concatenate([old, fresh[key][len(old) :]]))


def test_the_summary_names_each_table_and_fields_that_share_one_take_no_rows_of_one_another(inside, tmp_path):
    out = inside(*CLICKS, f"--run_dir={tmp_path}/first", "--train_steps=2").ok().out
    assert "Embedding: 'embedding', 90 rows x 5, 0.0 MB, shards: 1" in out
    assert "XLA off: the updates of embeddings touch a few rows" in out
    more = (word.replace("rows=30", "rows=31") for word in CLICKS)
    error = inside(*more, "--train_steps=1", f"--init_from={tmp_path}/first").mistake
    assert error.startswith("feature 'categories' has 31 ids, and 30 in init_from=")
    assert "model_arg=table_capacity=N" in error
