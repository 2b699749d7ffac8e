"""Rows of ids that training no longer sees: when they are freed, how they begin again, and which updates they get."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import learning_rate
from crankshaft.engine import optimizers
from crankshaft.engine.checkpoints import load_weights
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.engine.step.context import StepContext
from crankshaft.parts.parameter_servers.pulled import OnServers, PulledValues
from crankshaft.parts.tables import Embedding
from tests.arrays import assert_close, assert_same
from tests.engine.trainers import Pull

EVICT_AFTER, PERIOD = 8, 2
BATCH, STEPS = 12, 40
FREE = np.iinfo(np.int64).min
ADAM = {"optimizer": "adam", "learning_rate": 0.1}


def drifting():
    """Ids of which 20 are alive at a time, and three leave at each step, with labels."""
    rng = np.random.default_rng(0)
    ids = rng.choice(2**40, 20 + 3 * STEPS, replace=False)
    alive = 3 * np.arange(STEPS)[:, None] + rng.integers(0, 20, [STEPS, BATCH])
    return ids[alive.reshape(-1)], rng.normal(size=STEPS * BATCH).astype(np.float32)


def with_rows(ids, steps: int) -> tuple[set[int], int]:
    """The ids that have a row after so many steps, and how many rows were freed."""
    seen: dict[int, int] = {}
    freed = 0
    for step in range(steps):
        seen |= dict.fromkeys(ids[step * BATCH : (step + 1) * BATCH].tolist(), step)
        if (step + 1) % PERIOD == 0:
            kept = {i: last for i, last in seen.items() if step + 1 - last <= EVICT_AFTER}
            seen, freed = kept, freed + len(seen) - len(kept)
    return set(seen), freed


class ByKeras(Pull):
    def build_optimizer(self):
        return tf.keras.optimizers.Adagrad(learning_rate(self), initial_accumulator_value=0.2)


class ByColumns(Pull):
    def build_optimizer(self):
        class Averages(tf.keras.optimizers.SGD):
            def build(self, variables):
                super().build(variables)
                self.averages = [self.add_variable(shape=v.shape[1:], name="average") for v in variables]

        return Averages(learning_rate(self), name="by_columns")


@pytest.fixture
def made(bench):
    """made(replicas, ...): a trainer of a table of 100 rows in each shard, with its drifting data."""

    def make(replicas=1, trainer=Pull, admit_after=1, evict_after=EVICT_AFTER, num_shards=1, **options):
        options = {"optimizer": "adagrad", "learning_rate": 0.1, "shuffle": False} | options
        table = {"admit_after": admit_after, "evict_after": evict_after, "num_shards": num_shards}
        return bench(trainer(100 * num_shards, **table), drifting(), BATCH, replicas, **options)

    return make


def slots(made, shard: int) -> list[tuple[tf.Variable, float]]:
    """The optimizer's slots of a shard, with their initial value."""
    optimizer = made.trainer.optimizer
    if isinstance(optimizer, optimizers.KerasOptimizer):
        return [(v.value, 0.2) for v in optimizer.keras_optimizer.variables if v.shape.rank]
    values = optimizer.initial_slots()
    return [(slot, values[name]) for name, slot in optimizer.slots[f"{shard:04d}_shard"].items()]


@pytest.mark.parametrize(
    ("replicas", "shards", "how"),
    [
        (1, 3, {}),
        (1, 1, ADAM),
        (1, 1, {"trainer": ByKeras}),
        (2, 1, {}),
        pytest.param(2, 1, ADAM, marks=pytest.mark.slow),
    ],
)
def test_rows_of_ids_no_longer_seen_are_freed_as_they_began_and_given_to_others(made, replicas, shards, how):
    run, (ids, _) = made(replicas, num_shards=shards, **how), drifting()
    table = run.trainer.table
    first = [run.held(shard) for shard in table.shards]
    had_ids, had_other_ids = ([set() for _ in table.shards] for _ in range(2))
    recycled = 0

    def look(status, _):
        nonlocal recycled
        owners, freed = with_rows(ids, status.step)
        figures = {name: int(value) for name, value in table.figures().items()}
        assert figures == {"rows_given": len(owners), "rows_freed": freed, "turned_away": 0}
        keys = [run.held(shard.keys).reshape(-1) for shard in table.admissions]
        assert owners == {int(key) for part in keys for key in part if key > FREE + 1}
        for number, (part, shard) in enumerate(zip(keys, table.shards, strict=True)):
            free = np.flatnonzero(part == FREE)
            np.testing.assert_array_equal(run.held(shard)[free], first[number][free])
            for slot, value in slots(run, number):
                np.testing.assert_array_equal(run.held(slot)[free], np.float32(value))
            recycled += sum(row in had_other_ids[number] for row in np.flatnonzero(part > FREE + 1))
            had_other_ids[number] |= {*free} & had_ids[number]
            had_ids[number] |= {*np.flatnonzero(part > FREE + 1)}

    run.loop([every_steps(1, look)], STEPS)
    assert recycled > 0
    assert with_rows(ids, STEPS)[1] > 50


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_neither_calls_nor_hooks_nor_a_resume_change_a_bit(made, tmp_path, replicas):
    straight, halves = made(replicas, **ADAM), made(replicas, **ADAM)
    straight.loop([], STEPS)
    halves.loop([every_steps(1, lambda *_: None)], 15)
    halves.loop([], 17)
    halves.save(tmp_path)
    again = made(replicas, **ADAM).restore(tmp_path)
    again.loop([every_steps(3, lambda *_: None)], STEPS)
    assert_same(again.arrays(), straight.arrays())
    one = made(**ADAM)
    one.loop([], STEPS)
    for assigned, others in zip(straight.trainer.table.admissions, one.trainer.table.admissions, strict=True):
        for variable, other in ((assigned.keys, others.keys), (assigned.stamps, others.stamps)):
            np.testing.assert_array_equal(straight.held(variable), one.held(other))
    assert_close(
        straight.copies(straight.trainer.table.shards[0])[:1], one.copies(one.trainer.table.shards[0]), atol=1e-5
    )


@pytest.mark.thorough
def test_a_run_may_get_it_and_lose_it_with_stamps_that_begin_where_it_does(made, tmp_path):
    plain = made(evict_after=None)
    plain.loop([], 11)
    plain.save(tmp_path / "plain")
    evicting = made().restore(tmp_path / "plain")
    table = evicting.trainer.table
    evicting.loop([], 19)
    assert int(table.figures()["rows_freed"]) == 0
    evicting.loop([], 20)  # step 11 was more than 8 steps ago
    assert int(table.figures()["rows_freed"]) > 0
    evicting.save(tmp_path / "evicting")
    keys = evicting.held(table.admissions[0].keys)
    without = made(evict_after=None).restore(tmp_path / "evicting")
    np.testing.assert_array_equal(without.held(without.trainer.table.admissions[0].keys), keys)
    assert "rows_freed" not in without.trainer.table.figures()
    # Another run's stamps are of other steps.
    new = made()
    load_weights(str(tmp_path / "evicting"), new.trainer.table, "trainer.table")
    assert new.held(new.trainer.table.admissions[0].stamps).max() == 19
    new.loop([], 1)
    assert new.held(new.trainer.table.admissions[0].stamps).max() == 0


def test_an_evaluation_looks_up_and_stamps_nothing(made, bench):
    run = bench(Pull(100, admit_after=1, evict_after=EVICT_AFTER), drifting(), BATCH, eval_source=drifting())
    run.train(10)
    before = run.arrays()
    run.strategy.evaluate()
    assert_same(run.arrays(), before)


@pytest.mark.parametrize(("rule", "decay"), [("adagrad", 0.0), ("adam", 0.1)])
def test_an_update_by_a_step_that_began_before_rows_were_freed_is_refused(made, rule, decay):
    """Such a step's lease was given up, and done by another worker."""
    run = made(optimizer=rule, weight_decay=decay)
    table, optimizer = run.trainer.table, run.trainer.optimizer
    (shard,), (assigned,) = table.shards, table.admissions
    optimizer.move_to(OnServers())
    with StepContext(step=tf.constant(0, tf.int64)):
        rows = table.lookup_rows(tf.constant([7]), admits=True)
    gradient = tf.IndexedSlices(tf.ones([1, 3]), rows, shard.shape)
    variables = [shard, *(slot for slot, _ in slots(run, 0))]

    def push(freed: tf.Tensor) -> list[np.ndarray]:
        start_values = PulledValues(freed={id(shard): (freed, assigned.freed)})
        with StepContext(step=tf.constant(0, tf.int64), start_values=start_values):
            optimizer.apply([gradient], [shard])
        return [variable.numpy() for variable in variables]

    began = assigned.freed.read_value()
    first = [variable.numpy() for variable in variables]
    changed = push(began)
    assert all((x != y).any() for x, y in zip(changed, first, strict=True))
    for part, freed in table.free_rows(20):
        optimizer.reset_rows(part, freed)
    assert_same([variable.numpy() for variable in variables], first)
    assert_same(push(began), first)
    changed = push(assigned.freed.read_value())
    assert all((x != y).any() for x, y in zip(changed, first, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"evict_after": 0, "admit_after": 1}, "evict_after=0 frees no row; use 1 or more steps"),
        ({"evict_after": -3}, "evict_after=-3 frees no row; use 1 or more"),
        ({"evict_after": 5}, "evict_after=5 frees no row; set admit_after"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Embedding("table", 100, 3, **arguments)


def test_what_cannot_begin_again_by_rows_is_refused_before_the_first_step(made):
    run = made(trainer=ByColumns)
    with pytest.raises(
        ValueError, match=r"rows of table/shard_0 can't .* Keras optimizer by_columns: \S+ is not by row"
    ):
        run.loop([], 1)
    shared = made(trainer=ByKeras)
    shared.trainer.optimizer.move_to(OnServers())
    with pytest.raises(ValueError, match=r"Keras optimizer adagrad\w*: servers can't refuse a late update by it"):
        shared.loop([], 1)
    assert run.state.step == shared.state.step == 0
    local = LocalSgd(4, optimizers.outer())
    with pytest.raises(ValueError, match="evict_after=8 frees rows of all replicas, and sync_every_steps=4"):
        made(2, reduction=local)
