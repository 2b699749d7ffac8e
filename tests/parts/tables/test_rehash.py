"""Ids that get rows in a table of another size or number of shards: by the hashes and rules of training, and values."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import hashing
from crankshaft.parts.tables import Embedding, rehash
from tests.arrays import assert_same
from tests.engine.trainers import Pull

LEAST, MOST = -(2**63), 2**63 - 1


def sampled(count: int) -> np.ndarray:
    """Different ids of all of int64, but for the two that stand for none, with the extremes."""
    random = np.random.default_rng(0).integers(LEAST, MOST, count - 5, endpoint=True)
    return np.unique(np.concatenate([random, [LEAST + 2, LEAST + 3, -1, 0, MOST]]))


def table(rows: int, shards: int) -> Embedding:
    made = Embedding("table", rows, 3, admit_after=1, num_shards=shards)
    made.build(seed=5)
    return made


def former(made: Embedding, **more) -> dict:
    parts = {"keys": [a.keys.numpy() for a in made.admissions], "tally": [a.tally.numpy() for a in made.admissions]}
    return {**parts, **more}


def test_hashes_are_those_of_lookups():
    ids = np.concatenate([sampled(2000), [LEAST, LEAST + 1]])
    np.testing.assert_array_equal(rehash.mixed(ids), hashing.mixed(tf.constant(ids)))
    for buckets in (1, 7, 625_000):
        found = rehash.two_buckets(ids, buckets)
        np.testing.assert_array_equal(found, hashing.hash_columns(tf.constant(ids), [buckets] * 2))
    owner = hashing.bucket(tf.bitcast(hashing.mixed(tf.constant(ids)), tf.int64), 3)
    np.testing.assert_array_equal(rehash.mixed(rehash.mixed(ids)) % np.uint64(3), owner.numpy())


@pytest.mark.parametrize(("before", "after"), [((1000, 2), (1100, 3)), ((1000, 3), (500, 2)), ((40, 1), (2000, 1))])
def test_ids_get_the_rows_that_training_would_give_them(before, after):
    made, expected = table(*before), table(*after)
    made.lookup_rows(tf.constant(sampled(800)), admits=True)
    there = np.full([max(a.keys.numpy().size for a in made.admissions), before[1]], LEAST)
    for shard, admission in enumerate(made.admissions):
        there[: admission.keys.numpy().size, shard] = admission.keys.numpy().ravel()
    rows, ids = np.flatnonzero(there > LEAST + 1), there[there > LEAST + 1]
    spec = tf.TensorSpec([None], tf.int64)
    admit = tf.function(lambda ids: expected.lookup_rows(ids, admits=True), [spec], autograph=False)
    owners = rehash.mixed(rehash.mixed(ids)) % np.uint64(after[1])
    for owner, admission in enumerate(expected.admissions):
        mine, turn = ids[owners == owner], admission.keys.shape[0]
        for first in range(0, len(mine), turn):
            admit(tf.constant(mine[first : first + turn]))
    given = expected.lookup_rows(tf.constant(ids)).numpy()
    found = rehash.rehash(former(made), *after)
    np.testing.assert_array_equal(found.rows[rows], np.where(given == 0, -1, given))
    assert found.rows[0] == 0
    assert (np.delete(found.rows, [0, *rows]) == -1).all()
    assert (found.num_placed, found.num_dropped) == (np.count_nonzero(given), np.count_nonzero(given == 0))
    for shard, admission in enumerate(expected.admissions):
        np.testing.assert_array_equal(found.values[shard]["keys"], admission.keys.numpy())
        assert found.values[shard]["tally"][0] == admission.read_tally().assigned.numpy()
    turned_away = sum(int(a.read_tally().turned_away) for a in made.admissions)
    assert sum(values["tally"][1] for values in found.values) == turned_away


def test_ids_that_were_looked_up_last_are_placed_first():
    """The oldest are placed last, of 800 ids in 320 rows; a table of many turns, as large ones have."""
    made, stamps = table(1000, 2), [np.zeros(512, np.int64) for _ in range(2)]
    ids = sampled(800)
    rows = made.lookup_rows(tf.constant(ids), admits=True).numpy()
    for step, row in enumerate(rows):
        stamps[row % 2][row // 2] = step
    found = rehash.rehash(former(made, stamps=stamps), 320, 2)
    after = found.rows[rows]
    assert len(set(after[after > 0])) == found.num_placed == np.count_nonzero(after > 0)
    assert (after[-250:] > 0).all()
    assert not (after[:400] > 0).any()
    for row, step in zip(after[after > 0], np.flatnonzero(after > 0), strict=True):
        assert found.values[row % 2]["stamps"][row // 2] == step


def trained(bench, rows, shards, steps=6, folder=None, replicas=1, **options):
    """A run of 60 ids among 2^40, each thrice."""
    ids = np.repeat(np.random.default_rng(1).choice(2**40, 60, replace=False), 3)
    options = {"optimizer": "adam", "learning_rate": 0.1, **options}
    trainer = Pull(rows, admit_after=2, evict_after=100, num_shards=shards)
    made = bench(trainer, (ids, np.arange(180, dtype=np.float32)), 30, replicas, **options)
    made.train(steps)
    if folder:
        checkpoints = made.checkpoints(folder, about={"updated": made.state.updated()})
        checkpoints.save(steps, {"state": made.state.host_state()}, wait=True)
    return made, np.unique(ids)


def by_id(made, ids) -> list[np.ndarray]:
    """The rows of ids in a table and in each of its slots, those of row 0 first, and the ids' stamps."""
    embedding = made.trainer.table
    rows = np.concatenate([[0], embedding.lookup_rows(tf.constant(ids)).numpy()])
    slots = [made.trainer.optimizer.slots[key] for key in sorted(made.trainer.optimizer.slots)]
    found = []
    for parts in (embedding.shards, *([slot[name] for slot in slots] for name in ("m", "v"))):
        whole = np.empty([embedding.rows, 3], np.float32)
        for shard, part in enumerate(parts):
            whole[shard :: len(parts)] = part.numpy()
        found.append(whole[rows])
    stamps = [admission.stamps.numpy() for admission in embedding.admissions]
    return [*found, np.array([stamps[row % len(stamps)][row // len(stamps)] for row in rows[1:]])]


@pytest.mark.parametrize(
    ("before", "after", "replicas"),
    [
        ((100, 1), (200, 3), 1),
        pytest.param((100, 1), (300, 1), 1, marks=pytest.mark.slow),
        pytest.param((300, 2), (90, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_restores_a_table_of_another_size_id_by_id(bench, tmp_path, caplog, before, after, replicas):
    first, ids = trained(bench, *before, folder=tmp_path)
    assert (first.trainer.table.figures()["rows_given"] > 50).numpy()
    caplog.set_level(logging.WARNING)
    again = trained(bench, *after, steps=0, replicas=replicas, seed=3)[0].restore(tmp_path)
    assert_same(by_id(again, ids), by_id(first, ids))
    assert f"60 ids move to a table of {after[0]} rows (shards: {after[1]}); 0 get no row" in caplog.text
    # A state that was trained before, as of a run that goes back, is then the same: rows without ids begin again.
    other = trained(bench, *after, steps=4, replicas=replicas, seed=3)[0].restore(tmp_path)
    assert_same(other.arrays(), again.arrays())
    other.train(8)
    for variable in other.state.variables():
        other.held(variable)


def test_ids_that_get_no_row_share_row_0_and_are_counted_from_0(bench, tmp_path, caplog):
    first, ids = trained(bench, 100, 1, folder=tmp_path)
    again = trained(bench, 32, 1, steps=0)[0].restore(tmp_path)
    rows = again.trainer.table.lookup_rows(tf.constant(ids)).numpy()
    assert np.count_nonzero(rows) == 31 == int(again.trainer.table.figures()["rows_given"])
    assert "29 get no row and share row 0" in caplog.text
    found, expected = ([x[-len(ids) :][rows > 0] for x in by_id(made, ids)] for made in (again, first))
    assert_same(found, expected)
    assert expected[-1].min() >= np.sort(by_id(first, ids)[-1])[10]  # the oldest are not among them
    assert not again.trainer.table.admissions[0].counts.numpy().any()
