"""Embedding tables against dense NumPy: lookups, combiners, lazy updates, shards, replicas, ids of every kind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import hashing
from crankshaft.engine.checkpoints.manifest import read_all
from crankshaft.engine.hooks import numerics
from crankshaft.engine.hooks.evaluation import averaged_weights
from crankshaft.engine.inventory import Inventory
from crankshaft.engine.step.gradients import sum_duplicate_rows
from crankshaft.parts import tables as embeddings
from crankshaft.parts.tables import Embedding, tables
from tests.engine.trainers import Pull, Squares

ROWS, WIDTH = 11, 3


def table(**arguments):
    made = Embedding("table", arguments.pop("rows", ROWS), WIDTH, **arguments)
    made.build(seed=5)
    return made


def dense(made: Embedding) -> np.ndarray:
    """The whole table, its rows in order."""
    values = np.zeros([made.rows, made.width], np.float32)
    for index, shard in enumerate(made.shards):
        values[index :: len(made.shards)] = shard.numpy()
    return values


@pytest.mark.parametrize("shards", [1, 2, 4, ROWS])
def test_lookup_is_a_row_of_the_table_whatever_its_shards(shards):
    made = table(num_shards=shards)
    assert len(made.shards) == shards
    ids = np.array([[3, 3, 10], [0, 7, 3]], np.int64)
    np.testing.assert_array_equal(made(ids).numpy(), dense(made)[ids])
    np.testing.assert_array_equal(made(ids[:, 0].astype(np.int32)).numpy(), dense(made)[ids[:, 0]])
    assert made(ids[:0]).shape == (0, 3, WIDTH)


def test_values_at_first_depend_on_the_row_and_not_on_the_shards(monkeypatch):
    """Nor on the pieces in which they are filled: here of 2 rows."""
    whole = dense(table())
    assert np.abs(whole).max() < 0.05
    assert len(np.unique(whole)) == whole.size
    np.testing.assert_array_equal(dense(table(num_shards=3)), whole)
    monkeypatch.setattr(tables, "_PIECE_BYTES", 2 * WIDTH * 4)
    np.testing.assert_array_equal(dense(table()), whole)
    np.testing.assert_array_equal(dense(table(num_shards=5)), whole)
    assert not dense(table(initializer=embeddings.zeros())).any()


@pytest.mark.parametrize("shards", [1, 8])
def test_each_row_is_sampled_once_however_many_shards_there_are(shards):
    sampled = []

    def initializer(samples):
        sampled.append(samples.shape[0])
        return samples

    table(rows=1000, num_shards=shards, initializer=initializer)
    assert sum(sampled) == 1000


def test_samples_are_even_and_do_not_depend_on_each_other():
    """Two million, within five standard deviations: their mean, each sixteenth's share, neighbours' products."""
    rows, width = 65_536, 32
    found = hashing.uniform(tf.range(rows), width, 3, 7).numpy()
    number = found.size
    assert 0 < found.min() < 8 / number < 1 - 8 / number < found.max() < 1
    assert abs(found.mean() - 0.5) < 5 * np.sqrt(1 / 12 / number)
    shares = np.histogram(found, 16, (0, 1))[0] / number
    assert np.abs(shares - 1 / 16).max() < 5 * np.sqrt(1 / 16 * 15 / 16 / number)
    z = (found.astype(np.float64) - 0.5) * np.sqrt(12)
    other = hashing.uniform(tf.range(rows), width, 4, 7).numpy()
    pairs = {
        "columns": z[:, 1:] * z[:, :-1],
        "rows": z[1:] * z[:-1],
        "every eighth row": z[8:] * z[:-8],
        "seeds": z * (other - 0.5) * np.sqrt(12),
    }
    for name, products in pairs.items():
        assert abs(products.mean()) < 5 / np.sqrt(products.size), name


def test_an_initializer_that_takes_a_shape_is_told_what_it_is_given():
    with pytest.raises(ValueError, match=r"embedding table: initializer takes \(shape, seed\), and is called with"):
        Embedding("table", 4, 2, initializer=lambda shape, seed: tf.zeros(shape))


def test_shards_are_not_smaller_than_the_least(monkeypatch):
    for servers, smallest, shards in ((4, 1, 4), (4, ROWS * WIDTH * 4, 1), (4, ROWS * WIDTH * 2, 2), (20, 1, ROWS)):
        monkeypatch.setattr(tables, "MIN_SHARD_BYTES", smallest)
        made = Embedding("table", ROWS, WIDTH)
        made.build(seed=0, num_servers=servers)
        assert len(made.shards) == shards
        assert max(shard.shape[0] for shard in made.shards) - min(shard.shape[0] for shard in made.shards) <= 1


WEIGHTS = np.array([[1.0, 2.0, 0.5], [3.0, 1.0, 2.0]], np.float32)
DIVISORS = {
    "sum": lambda w: 1.0,
    "mean": lambda w: w.sum(-1, keepdims=True),
    "sqrtn": lambda w: np.sqrt((w * w).sum(-1, keepdims=True)),
}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_combined_rows_of_dense_and_ragged_ids(combiner, weighted):
    made = table(combiner=combiner, num_shards=2)
    ids, weights = np.array([[3, 3, 10], [0, 7, 1]]), WEIGHTS if weighted else np.ones_like(WEIGHTS)
    expected = (dense(made)[ids] * weights[..., None]).sum(1) / DIVISORS[combiner](weights)
    given = weights if weighted else None
    np.testing.assert_allclose(made(ids, given).numpy(), expected, rtol=1e-5)
    ragged = tf.RaggedTensor.from_row_lengths(ids.reshape(-1), [3, 0, 3])
    given = tf.RaggedTensor.from_row_lengths(weights.reshape(-1), [3, 0, 3]) if weighted else None
    found = made(ragged, given).numpy()
    np.testing.assert_allclose(found[[0, 2]], expected, rtol=1e-5)
    assert not found[1].any()


def test_a_padding_id_is_no_id_and_updates_no_row():
    made = table(combiner="mean", padding_id=-1, unknown="error")
    ids = np.array([[3, -1, -1], [-1, -1, -1], [4, 5, -1]])
    values = dense(made)
    with tf.GradientTape() as tape:
        found = made(ids, np.array([[2.0, 9, 9], [9, 9, 9], [1, 3, 9]], np.float32))
    expected = [values[3], np.zeros(WIDTH), (values[4] + 3 * values[5]) / 4]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert sorted(tape.gradient(found, made.shards)[0].indices.numpy()) == [3, 4, 5]
    with tf.GradientTape() as tape:
        nothing = made(np.full([2, 3], -1))
    assert not nothing.numpy().any()
    assert tape.gradient(nothing, made.shards)[0].indices.shape == [0]


class Padded(Squares):
    """A table whose padding is -1, trained towards ones."""

    def build_model(self):
        self.table = Embedding(
            "table", ROWS, 1, combiner="sum", padding_id=-1, initializer=lambda samples: 0.5 + 0 * samples
        )
        return tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def forward(self, features, training):
        return self.table(features)

    @property
    def trainable_variables(self):
        return self.table.shards


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adagrad", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("replicas", "wholly"), [(1, True), (2, True), (2, False)])
def test_no_row_moves_for_a_batch_or_a_share_of_padding_alone(bench, replicas, wholly, optimizer):
    """Row 0 is trained in the first batch alone; of the second there is padding alone, or in its second half."""
    ids = np.full([16, 2], -1, np.int64)
    ids[:8, 0] = [0, 1, 2, 3, 0, 1, 2, 3]
    if not wholly:
        ids[8:12, 1] = 2
    options = {"shuffle": False, "optimizer": optimizer, "learning_rate": 0.1}
    made = bench(Padded(), (ids, np.ones(16, np.float32)), 8, replicas, **options)
    made.train(1)
    (before,) = made.copies(made.trainer.table.shards[0])[:1]
    assert (before[:4] != 0.5).all()
    made.train(2)
    for after in made.copies(made.trainer.table.shards[0]):
        moved = np.flatnonzero(before != after)
        assert moved.tolist() == ([] if wholly else [2])


def test_ragged_ids_without_a_combiner_stay_ragged():
    made = table()
    found = made(tf.ragged.constant([[1, 2], [], [2]]))
    assert [len(rows) for rows in found] == [2, 0, 1]
    np.testing.assert_array_equal(found.flat_values, dense(made)[[1, 2, 2]])


@pytest.mark.parametrize("shards", [1, 3])
def test_gradients_hold_each_touched_row_once(shards):
    """Features that share the table make one lookup."""
    made = table(num_shards=shards)
    ids = {"seen": np.array([[3, 3], [9, 0]]), "next": np.array([3, 6])}
    factors = {"seen": np.array([[1.0, 2.0], [4.0, 8.0]]), "next": np.array([16.0, 32.0])}
    with tf.GradientTape() as tape:
        found = made(ids)
        total = sum(tf.reduce_sum(found[name] * factors[name][..., None]) for name in ids)
    gradients = tape.gradient(total, made.variables_for_gradients)
    rows = {}
    for shard, gradient in enumerate(gradients):
        assert isinstance(gradient, tf.IndexedSlices)
        for index, value in zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True):
            row = int(index) * shards + shard
            assert row not in rows
            rows[row] = value.tolist()
    assert rows == {row: [value] * WIDTH for row, value in {3: 19.0, 9: 4.0, 0: 8.0, 6: 32.0}.items()}


@pytest.mark.parametrize("compiled", [False, True])
def test_lookups_of_one_table_one_after_another_add_up(compiled):
    """What each of them has made unique is not so together."""
    made = table(num_shards=1)

    def update():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(made(np.array([3, 9, 3]))) + 10 * tf.reduce_sum(made(np.array([9, 1])))
        whole = sum_duplicate_rows(tape.gradient(total, made.shards[0]))
        return whole.indices, whole.values

    indices, values = tf.function(update)() if compiled else update()
    rows = dict(zip(indices.numpy().tolist(), values.numpy()[:, 0], strict=True))
    assert rows == {3: 2.0, 9: 11.0, 1: 10.0}
    assert len(indices) == 3


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_that_one_lookup_made_unique_are_not_searched_again(shards):
    made = table(num_shards=shards)

    @tf.function(autograph=False)
    def update():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(made(np.array([3, 9, 3, 4])))
        gradients = [sum_duplicate_rows(gradient) for gradient in tape.gradient(total, made.shards)]
        return [(gradient.indices, gradient.values) for gradient in gradients]

    rows = {
        int(index) * shards + shard: value.numpy().tolist()
        for shard, (indices, values) in enumerate(update())
        for index, value in zip(indices, values, strict=True)
    }
    assert rows == {3: [2.0] * WIDTH, 9: [1.0] * WIDTH, 4: [1.0] * WIDTH}
    assert [op.type for op in update.get_concrete_function().graph.get_operations()].count("Unique") == 1


def test_ids_out_of_range_go_to_row_0_or_end_the_step():
    made = table()
    np.testing.assert_array_equal(made([-1, ROWS, 2]), dense(made)[[0, 0, 2]])
    strict = table(unknown="error")
    np.testing.assert_array_equal(strict([0, ROWS - 1]), dense(strict)[[0, ROWS - 1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"embedding table: an id is not in 0\.\.10"):
        strict([1, ROWS])


def test_hashed_ids_spread_evenly_and_stay():
    """Of 22,000 consecutive ids or strings over 11 rows each gets 2,000 within six deviations of 43."""
    made = table(hash_ids=True)
    for ids in (np.arange(-11_000, 11_000), np.array([f"user {i}" for i in range(22_000)])):
        rows = made.lookup_rows(tf.constant(ids)).numpy()
        assert np.abs(np.bincount(rows, minlength=ROWS) - 2000).max() < 260
        np.testing.assert_array_equal(rows, made.lookup_rows(tf.constant(ids)))
    # SplitMix64's first outputs from the seed 0, by its authors' reference: 0xE220A8397B1DCDAF.
    assert made.lookup_rows(tf.constant([0], tf.int64)).numpy() == [0xE220A8397B1DCDAF % ROWS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows=0"),
        ({"combiner": "max"}, "combiner=max"),
        ({"unknown": "skip"}, "unknown=skip"),
        ({"padding_id": 0}, "padding_id=0 needs a combiner"),
        ({"rows": None}, "rows=None"),
        ({"num_shards": 0, "rows": 4, "width": 0}, "width=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Embedding("table", arguments.pop("rows", ROWS), arguments.pop("width", WIDTH), **arguments)


BATCH, EXAMPLES = 6, 20


def pull(shards=1, admit_after=None):
    return Pull(ROWS, num_shards=shards, admit_after=admit_after)


def power_law(seed=0):
    """Ids 0..7 that repeat, so that 8, 9 and 10 are never touched; 20 examples in batches of 6 end unevenly."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.zipf(1.5, EXAMPLES), 8) - 1, rng.normal(size=EXAMPLES).astype(np.float32)


def test_replicas_with_a_copy_each_take_no_shards(bench):
    with pytest.raises(ValueError, match=r"table: 2 shards, by num_shards or .*each replica has a copy"):
        bench(pull(2), power_law(), BATCH, 2)


@pytest.mark.thorough
def test_clipping_and_decay_take_tables_and_averages_leave_them_out(bench, caplog):
    options = {"clip_norm": 0.01, "weight_decay": 0.1, "ema_decay": 0.9, "on_nonfinite": "skip"}
    made = bench(pull(2), power_law(), BATCH, optimizer="adamw", learning_rate=0.1, shuffle=False, **options)
    assert "decays only the rows of table/shard_0, table/shard_1 that its batch uses" in caplog.text
    first = dense(made.trainer.table)
    made.train(8)
    now = dense(made.trainer.table)
    np.testing.assert_array_equal(now[8:], first[8:])
    assert (now[:2] != first[:2]).all()
    assert not made.trainer.optimizer.weight_average.shadows
    with averaged_weights(made.trainer):
        np.testing.assert_array_equal(dense(made.trainer.table), now)


def test_tables_are_found_in_lists_and_dictionaries():
    trainer = pull()
    trainer.more = [Embedding("a", 2, 1), Embedding("b", 2, 1)]
    trainer.by_name = {"c": Embedding("c", 2, 1)}
    names = {path: found.name for path, found in Inventory(trainer).tables.items()}
    assert names == {"by_name.c": "c", "more.0": "a", "more.1": "b", "table": "table"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_value_that_is_not_finite_is_found_piece_by_piece(bench, monkeypatch, replicas):
    monkeypatch.setattr(numerics, "_PIECE_BYTES", 4 * WIDTH * 4)
    made = bench(pull(), power_law(), BATCH, replicas)
    assert numerics.first_nonfinite(Inventory(made.trainer).all_weights) is None
    value = made.trainer.table.shards[0].numpy()
    value[ROWS - 1, 1] = np.inf
    made.trainer.table.shards[0].assign(value)
    assert numerics.first_nonfinite(Inventory(made.trainer).all_weights) == "table/shard_0"


@pytest.mark.parametrize(("admit_after", "shards"), [(None, 0), (1, 3)])
def test_a_checkpoint_says_how_tables_were_cut_whose_ids_were_given_rows(bench, tmp_path, admit_after, shards):
    made = bench(pull(3, admit_after), power_law(), BATCH)
    made.save(tmp_path)
    manifest = read_all(tmp_path)[0][0]
    assert manifest.table_shards == shards
    others = {"trainer/model/shards/kernel/.ATTRIBUTES/VARIABLE_VALUE": [], "step/.ATTRIBUTES/VARIABLE_VALUE": []}
    assert dataclasses.replace(manifest, variables=others).table_shards == 0
