"""Local SGD against DiLoCo's algorithm in NumPy, and against synchronous training where the two are one."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.hooks import Hook, Periodic
from crankshaft.engine.internals.variables import assign_local
from crankshaft.engine.inventory import Inventory
from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction import Reduction, per_replica
from crankshaft.engine.reduction.aggregation import Aggregated
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.engine.step.context import StepContext
from crankshaft.models.mlp import Model as Mlp
from tests.arrays import assert_close
from tests.engine.reduction.noisy_points import four_classes

pytestmark = pytest.mark.thorough

SHAPES = [(5, 4), (4,)]


class Syncs:
    """A `LocalSgd` on its replicas, driven by hand: an inner step subtracts what a replica is given."""

    def __init__(self, strategy, *of_outer, **keywords):
        self.strategy = strategy
        self.reduction = LocalSgd(2, outer(*of_outer), **keywords)
        with strategy.scope():
            self.variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
            self.statistic = tf.Variable(0.0)
            self.reduction.build(self.variables, [Aggregated(self.statistic)])
        self._step = tf.function(self._replicated_step, autograph=False)
        self._sync = tf.function(lambda: strategy.run(self.reduction.sync), autograph=False)
        tf.function(lambda: strategy.run(self.reduction.begin_period), autograph=False)()

    def step(self, changes, counts, statistics):
        """Gives replica r, of counts[r] examples, changes[r][variable], and its moving statistic a value."""

        def on_replicas(values):
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.convert_to_tensor(values[context.replica_id_in_sync_group], tf.float32)
            )

        self._step(
            [on_replicas(list(c)) for c in zip(*changes, strict=True)], on_replicas(counts), on_replicas(statistics)
        )

    def sync(self):
        """Ends the period: the weights and the statistic, which are the same on all replicas."""
        self._sync()
        found = [self.copies(variable) for variable in [*self.variables, self.statistic]]
        for first, *others in found:
            for other in others:
                np.testing.assert_array_equal(first, other)
        return [first for first, *_ in found]

    def copies(self, variable):
        return [part.numpy() for part in self.strategy.experimental_local_results(variable)]

    def _replicated_step(self, changes, count, statistic):
        def run(changes, count, statistic):
            present = count > 0
            with StepContext(has_examples=present):
                assign_local(self.statistic, statistic)
                changes, _ = self.reduction.sum(changes, tf.where(present, count, 1.0), [self.statistic])
            for variable, change in zip(self.variables, changes, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=1.0, delta=change)

        self.strategy.run(run, args=(changes, count, statistic))


def sample(step, replica):
    rng = np.random.default_rng([step, replica])
    return [0.1 * rng.normal(size=shape) for shape in SHAPES]


@pytest.mark.parametrize(("replicas", "dtype"), [(1, "bfloat16"), (2, "float32"), (3, "float32"), (3, "bfloat16")])
def test_sync_periods_equal_dilocos_algorithm(distribution, replicas, dtype):
    """Algorithm 1 of arXiv:2311.08105 with the Nesterov momentum of its authors' framework; three periods.

    A bfloat16 has 8 bits: differences of size 0.3 are rounded by up to 1e-3, and momentum adds several syncs' up.
    """
    periods = Syncs(distribution(replicas), 0.7, 0.9, reduce_dtype=dtype)
    weights = [np.ones(shape) for shape in SHAPES]
    momenta = [np.zeros(shape) for shape in SHAPES]
    for first in (0, 2, 4):
        local = [[w.copy() for w in weights] for _ in range(replicas)]
        examples = np.zeros(replicas)
        for step in (first, first + 1):
            counts = np.array([8.0, 4.0, 4.0])[:replicas]
            changes = [sample(step, r) for r in range(replicas)]
            periods.step(changes, counts, np.arange(replicas) + float(step))
            examples += counts
            local = [[w - c for w, c in zip(ws, cs, strict=True)] for ws, cs in zip(local, changes, strict=True)]
        for index, weight in enumerate(weights):
            gradient = np.average([weight - local[r][index] for r in range(replicas)], 0, examples)
            momenta[index] = 0.9 * momenta[index] + gradient
            weights[index] = weight - 0.7 * (gradient + 0.9 * momenta[index])
        *found, statistic = periods.sync()
        assert_close(found, weights, atol=2e-6 if dtype == "float32" or replicas == 1 else 1e-2)
        np.testing.assert_allclose(
            statistic, np.average(np.arange(replicas) + first + 1.0, weights=examples), rtol=1e-6
        )


def test_replicas_drift_between_syncs_and_nothing_else_does(distribution):
    periods = Syncs(distribution(2))
    periods.step([sample(0, 0), sample(0, 1)], [1.0, 1.0], [1.0, 2.0])
    for variable in (*periods.variables, periods.statistic):
        first, second = periods.copies(variable)
        assert (first != second).all()
    periods.sync()


def test_a_replica_without_examples_in_a_step_changes_nothing_by_it(distribution):
    """Neither weights nor statistics, whatever it computed; and one that saw none at all has no say."""
    periods = Syncs(distribution(2), 1.0, 0.0)
    changes = sample(0, 0)
    nothing = [np.full(shape, np.nan) for shape in SHAPES]
    periods.step([changes, nothing], [3.0, 0.0], [5.0, np.nan])
    *found, statistic = periods.sync()
    for weight, change in zip(found, changes, strict=True):
        np.testing.assert_allclose(weight, 1.0 - change, rtol=1e-6)
    assert statistic == 5.0


# -- in a run ---------------------------------------------------------------------------------------------------------


class Normalized(Mlp):
    """With moving statistics."""

    def build_model(self):
        return tf.keras.Sequential(
            [tf.keras.layers.Dense(16), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(4)]
        )


@pytest.fixture(scope="module")
def run(bench):
    """A run of a small net, 16 by 338 examples: every 22nd batch is one of 2, of which some replicas get none."""

    def make(reduction, replicas=2, trainer=None, **options):
        trainer = trainer or Normalized()
        return bench(trainer, four_classes(), 16, replicas, num_classes=4, reduction=reduction, **options)

    return make


@pytest.fixture
def of_four(run, compiled):
    """of_four(optimizer="adam"): two replicas in periods of 4 steps, in calls of 3 at most."""

    def make(optimizer="adam"):
        return compiled(optimizer, lambda: run(LocalSgd(4, outer()), optimizer=optimizer, block_steps=3))

    return make


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_sync_periods_of_one_step_with_plain_averaging_are_synchronous_training(run, replicas):
    """For SGD, uneven batches and all: 40 steps, each rounding the weights at 1e-7."""

    def curve(reduction):
        return run(reduction, replicas, Mlp((16,)), optimizer="sgd", learning_rate=0.1).curve(40)

    np.testing.assert_allclose(curve(LocalSgd(1, outer(1.0, 0.0))), curve(Reduction()), rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("nadam", marks=pytest.mark.slow)])
def test_replicas_hold_the_same_weights_where_something_is_due_and_nowhere_else(of_four, optimizer):
    made = of_four(optimizer)

    def apart():
        variables = [*made.trainer.model.trainable_variables, *Inventory(made.trainer).moving_statistics]
        return [bool((a != b).any()) for a, b in map(made.copies, variables)]

    made.run(8)  # at most 3 a call
    assert made.state.step == 3
    assert not made.strategy.in_step
    assert all(apart())
    made.train(8)
    assert made.strategy.in_step
    assert not any(apart())
    made.train(10)  # ends a period early
    assert made.strategy.in_step
    assert not any(apart())


@pytest.fixture
def saved(of_four, tmp_path):
    """A run of two replicas that has saved step 16: the checkpoint's folder, and the copies of what differs between
    replicas, by path."""
    made = of_four()
    made.train(16)
    made.save(tmp_path)
    differ = [v for v in made.state.variables() if per_replica.differs(v) and v.shape.rank]
    slots = {slot.name: made.copies(slot) for slot in differ}
    assert len(slots) == len(differ) > 0
    alike = {name for name, (a, b) in slots.items() if (a == b).all()}
    assert alike == {name for name in slots if "update_counts" in name}  # which both replicas count
    return tmp_path, slots


@pytest.mark.parametrize("replicas", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_another_number_of_replicas_goes_on_from_the_slots_mean(run, saved, replicas):
    folder, slots = saved
    second = run(LocalSgd(4, outer()), replicas).restore(folder)
    m = next(iter(second.trainer.optimizer.slots.values()))["m"]
    np.testing.assert_allclose(second.held(m), np.mean(slots[m.name], 0), rtol=1e-6, atol=1e-9)
    assert second.trainer.optimizer.iterations.numpy() == 16
    second.train(40)


class StopAfter(Hook):
    """Asks for the end after the first call that goes past a step, wherever that is in a period."""

    def __init__(self, step):
        self.step = step

    def __call__(self, status):
        if status.step >= self.step:
            status.stop = status.stop or "asked"


class Weights(Periodic):
    """What all replicas hold, where it is due and where the run ends."""

    def __init__(self, made, every_steps):
        super().__init__(every_steps)
        self.made, self.seen = made, {}

    def act(self, status):
        self.seen[status.step] = self.made.copies(self.made.trainer.model.trainable_variables[0])

    def end(self, status):
        self.act(status)


def test_a_run_stops_where_a_sync_period_ends(of_four):
    """So that one that was stopped and goes on has the periods of one that was not."""
    made = of_four()
    weights = Weights(made, 0)
    status = made.loop([StopAfter(9), weights], 100)
    assert status.step == 12
    np.testing.assert_array_equal(*weights.seen[12])


def test_the_runs_last_sync_period_may_be_a_shorter_one(of_four):
    made = of_four()
    weights = Weights(made, 16)
    made.loop([weights], 35)
    assert sorted(weights.seen) == [16, 32, 35]
    for first, second in weights.seen.values():
        np.testing.assert_array_equal(first, second)


def test_weights_that_are_set_between_two_periods_are_what_the_next_begins_with(run):
    """With a rate of 0 nothing moves them; an outer rate of 0.5 would go half way back to those of the last period."""
    made = run(LocalSgd(2, outer(0.5, 0.0)), trainer=Mlp((4,)), optimizer="sgd", learning_rate=0.0)
    made.train(4)
    weight = made.trainer.model.trainable_variables[0]
    weight.assign(3 * weight)
    given = weight.numpy()
    made.train(8)
    np.testing.assert_array_equal(made.held(weight), given)
