"""Rows given to ids as training meets them: which ids have one, that it stays theirs, what a full table does."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import hashing
from crankshaft.parts.tables import Embedding, zeros
from crankshaft.parts.tensorboard.probe import Probe
from tests.arrays import assert_same
from tests.engine.trainers import Pull

WIDTH = 3
FAR = 2**40  # ids up to here


def table(rows=100, admit_after=1, **arguments):
    made = Embedding("table", rows, WIDTH, admit_after=admit_after, **arguments)
    made.build(seed=5)
    return made


def rows_of(made: Embedding, ids, training=False) -> np.ndarray:
    return made.lookup_rows(tf.convert_to_tensor(ids), admits=training).numpy()


def train_on(made: Embedding, parts: np.ndarray) -> None:
    """Gives rows to ids [steps, batch], by one compiled function."""
    step = tf.function(lambda ids: made.lookup_rows(ids, admits=True), autograph=False)
    for ids in parts:
        step(tf.constant(ids))


def figures(made: Embedding) -> tuple[int, int]:
    found = made.figures()
    return int(found["rows_given"]), int(found["turned_away"])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["integers", "strings"])
def test_an_id_that_is_trained_on_gets_a_row_of_its_own_and_keeps_it(shards, kind):
    made = table(num_shards=shards)
    ids = np.array([7, -5, FAR, 7, 2**63 - 1, -(2**63)])
    ids = ids if kind == "integers" else np.array([f"user {i}" for i in ids])
    assert not rows_of(made, ids).any()
    rows = rows_of(made, ids, training=True)
    assert rows[0] == rows[3]
    assert len(set(rows)) == 5
    assert 0 < rows.min() <= rows.max() < 100
    rows_of(made, ids[::-1][:3], training=True)
    np.testing.assert_array_equal(rows_of(made, ids), rows)
    assert figures(made) == (5, 0)
    values = np.zeros([100, WIDTH], np.float32)
    for index, shard in enumerate(made.shards):
        values[index::shards] = shard.numpy()
    np.testing.assert_array_equal(made(ids, training=False), values[rows])


def test_an_id_is_counted_until_it_was_seen_often_enough():
    made = table(admit_after=3)
    assert not rows_of(made, [1, 1, 2], training=True).any()
    assert list(rows_of(made, [1, 2, 3], training=True) > 0) == [True, False, False]
    rows_of(made, [2, 2, 2])  # looked up, not trained on
    assert list(rows_of(made, [3, 3, 2], training=True) > 0) == [True, True, True]
    assert figures(made) == (3, 0)


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_ids_of_several_fields_are_told_apart_at_the_ends_of_int64(columns):
    """A product by the number of fields would make -2^63 the id 0."""
    ids = np.array([-(2**63), -(2**63) + 1, -(2**63) + 2, -(2**62), 0, 1, 2**62, 2**63 - 1])
    keys = hashing.by_column(tf.constant(np.repeat(ids[:, None], columns, 1)))
    rows = rows_of(table(), tf.reshape(keys, [-1]), training=True)
    assert len(set(rows)) == len(ids) * columns
    assert rows.min() > 0


def test_a_padding_id_is_not_counted_and_gets_no_row():
    made = table(admit_after=2, combiner="sum", padding_id=-1)
    made(np.array([[5, -1], [-1, -1]]), training=True)
    made(np.array([[5, 6], [-1, -1]]), training=True)
    assert list(rows_of(made, [5, 6, -1]) > 0) == [True, False, False]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_full_table_sends_further_ids_to_row_0_and_says_how_often(shards):
    """Ids begin to find none when more than eight rows of ten are given, also where they come many at once."""
    made = table(rows=1000, num_shards=shards)
    rng = np.random.default_rng(0)
    ids = rng.choice(FAR, 3000, replace=False)
    before_full = rows_of(made, ids[:800], training=True)
    assert figures(made) == (800, 0)
    assert len(set(before_full)) == 800
    train_on(made, ids[800:].reshape(-1, 50))
    given, turned_away = figures(made)
    assert 980 <= given <= 999
    assert turned_away > 0
    rows = rows_of(made, ids)
    np.testing.assert_array_equal(rows[:800], before_full)
    own = rows[rows > 0]
    assert len(own) == len(set(own)) == given


@pytest.mark.slow
def test_counts_are_halved_before_a_stream_of_new_ids_fills_them():
    """Were they never halved, 60,000 different ids would bring a new one to 4 or more in each of its cells."""
    made = table(rows=100, admit_after=4)
    train_on(made, np.random.default_rng(0).choice(FAR, [60, 1000], replace=False))
    assert figures(made)[0] < 10
    assert made.admissions[0].read_tally().sighted.numpy() <= 1024
    rows_of(made, [1, 1, 1, 1], training=True)
    assert rows_of(made, [1])[0] > 0


def pull(rows=64, admit_after=1, shards=1, **more):
    return Pull(rows, admit_after=admit_after, num_shards=shards, initializer=zeros(), **more)


def power_law(examples=200, spread=True):
    """Ids of 0..31 by a power law, spread over 2^40 or as they are."""
    rng = np.random.default_rng(0)
    indices = np.minimum(rng.zipf(1.3, examples), 32) - 1
    ids = np.random.default_rng(1).choice(FAR, 32, replace=False)[indices] if spread else indices
    return ids, rng.normal(size=examples).astype(np.float32)


def looked_up(made, ids) -> np.ndarray:
    return made.trainer.table(np.unique(ids), training=False).numpy()


@pytest.mark.parametrize(("replicas", "rule"), [(1, "sgd"), pytest.param(2, "adam", marks=pytest.mark.slow)])
def test_a_table_of_given_rows_learns_what_a_table_of_all_ids_does(bench, replicas, rule):
    """16 steps in batches of 30, each 7th of 20 examples. Rows begin with zeros; float32 sums in another order."""
    options = {"optimizer": rule, "learning_rate": 0.1, "shuffle": False}
    every, given = power_law(spread=False), power_law()
    plain = bench(pull(32, admit_after=None), every, 30, replicas, **options)
    made = bench(pull(), given, 30, replicas, **options)
    plain.train(16)
    made.train(16)
    order = np.argsort(given[0][np.unique(every[0], return_index=True)[1]])
    np.testing.assert_allclose(looked_up(made, given[0]), looked_up(plain, every[0])[order], rtol=1e-4, atol=1e-6)
    for variable in made.state.variables():
        made.held(variable)
    assert figures(made.trainer.table) == (len(np.unique(given[0])), 0)


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "model"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_an_id_that_replicas_of_a_mesh_are_given_together_is_seen_once(bench, replicas, model):
    options = {"optimizer": "adam", "learning_rate": 0.1, "shuffle": False}
    one = bench(pull(admit_after=4), power_law(), 30, **options)
    mesh = bench(pull(admit_after=4), power_law(), 30, replicas, model=model, **options)
    for run in (one, mesh):
        run.train(3)
    assert 0 < figures(one.trainer.table)[0] < 32
    assert figures(mesh.trainer.table) == figures(one.trainer.table)
    ids = power_law()[0]
    np.testing.assert_allclose(looked_up(mesh, ids), looked_up(one, ids), rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_what_stands_in_for_examples_that_a_replica_lacks_gets_no_row(bench):
    """Two of four have none, nor has a third of the last batch's one. Zeros stand in, and no example has id 0."""
    ids = 1 + np.arange(7)
    examples = tf.data.Dataset.from_tensor_slices((ids, np.ones(7, np.float32)))
    made = bench(pull(), examples, 12, 4, workers=2)
    made.train(4)
    assert figures(made.trainer.table) == (7, 0)
    assert rows_of(made.trainer.table, [0])[0] == 0


def test_ids_of_a_space_of_2_to_the_40_take_the_memory_of_the_rows_that_there_are(bench):
    """40,000 different ids pass by a table of 500 rows."""
    ids = np.random.default_rng(0).choice(FAR, 40_000, replace=False)
    made = bench(pull(500, admit_after=2), (ids, np.ones(len(ids), np.float32)), 500, optimizer="adagrad")
    size = sum(array.nbytes for array in made.arrays())
    made.train(80)
    assert sum(array.nbytes for array in made.arrays()) == size < 500 * (2 * 4 * WIDTH + 8) + 16 * 1024 + 1000


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "admit_after"), [(2, 1), (1, None)])
def test_an_evaluation_changes_nothing_and_gives_no_rows(bench, replicas, admit_after):
    data = power_law(spread=admit_after is not None)
    made = bench(pull(admit_after=admit_after), data, 30, replicas, eval_source=data)
    before = made.arrays()
    probe = Probe(made.strategy, made.trainer)
    made.strategy.evaluate()
    assert_same(made.arrays(), before)
    made.train(3)
    assert list(probe.gradients()) == ["table/shard_0"]
    assert admit_after is None or figures(made.trainer.table)[0] > 0


@pytest.mark.thorough
def test_micro_batches_give_rows_on_one_replica_and_are_refused_on_several(bench):
    made = bench(pull(), power_law(180), 30, accumulate_steps=3)
    made.train(6)
    assert figures(made.trainer.table) == (len(np.unique(power_law(180)[0])), 0)
    with pytest.raises(ValueError, match=r"there are 2 with accumulate_steps=3; use 1, one replica"):
        bench(pull(), power_law(), 30, 2, accumulate_steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "micro_batches", "admit_after", "evict_after"), [(1, 3, 2, 9), (2, 1, 2, None), (2, 1, 1, 9)]
)
def test_a_skipped_step_gives_no_rows_counts_and_stamps_nothing(
    bench, replicas, micro_batches, admit_after, evict_after
):
    """Two batches of 300 new ids, each twice. A label of the second, in which counts are halved, is NaN."""
    ids = np.repeat(np.random.default_rng(0).choice(FAR, [2, 300], replace=False), 2, 1).reshape(-1)
    labels = np.ones(1200, np.float32)
    labels[900] = np.nan
    options = {"accumulate_steps": micro_batches, "on_nonfinite": "skip", "shuffle": False}
    made = bench(pull(400, admit_after, evict_after=evict_after), (ids, labels), 600, replicas, **options)
    assert made.train(1)["skipped"] == (0, replicas)
    before = made.arrays()
    assert figures(made.trainer.table)[0] > 250
    assert made.train(2)["skipped"] == (replicas, replicas)
    made.state.step_variable.assign(1)
    assert_same(made.arrays(), before)
    assert not looked_up(made, ids[600:]).any()
    for variable in made.state.variables():
        made.held(variable)


def test_a_lookup_that_does_not_say_what_it_is_for_is_refused():
    with pytest.raises(ValueError, match="call it with training=training"):
        table()([1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"admit_after": 0}, "admit_after=0 is out of range; use 1 to 255"),
        ({"admit_after": 256}, "admit_after=256"),
        ({"hash_ids": True}, "hash_ids can't be combined with admit_after=1"),
        ({"unknown": "error"}, "unknown can't be combined with"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        table(**arguments)
