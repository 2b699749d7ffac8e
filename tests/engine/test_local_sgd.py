"""Local SGD against DiLoCo's algorithm in NumPy, and against synchronous training where the two are one."""

import numpy as np
import pytest
import tensorflow as tf

from engine.local_sgd import LocalSgd
from engine.loss_scale import assign_local

SHAPES = [(5, 4), (4,)]


class Rounds:
    """A `LocalSgd` on its replicas, driven by hand: an inner step subtracts what a replica is given."""

    def __init__(self, strategy, *arguments, **keywords):
        self.strategy = strategy
        self.reduction = LocalSgd(2, *arguments, **keywords)
        with strategy.scope():
            self.variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
            self.statistic = tf.Variable(0.0)
            self.reduction.build(self.variables, [self.statistic])
        self._step = tf.function(self._replicated_step, autograph=False)
        self._sync = tf.function(lambda: strategy.run(self.reduction.sync), autograph=False)
        tf.function(lambda: strategy.run(self.reduction.begin_round), autograph=False)()

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
        """Ends the round: the weights and the statistic, which are the same on all replicas."""
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
            self.reduction.begin_step(present)
            assign_local(self.statistic, statistic)
            changes, _ = self.reduction.sum(changes, tf.where(present, count, 1.0), [self.statistic])
            for variable, change in zip(self.variables, changes, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=1.0, delta=change)

        self.strategy.run(run, args=(changes, count, statistic))


def draw(step, replica):
    rng = np.random.default_rng([step, replica])
    return [0.1 * rng.normal(size=shape) for shape in SHAPES]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_rounds_equal_dilocos_algorithm(distribution, replicas, dtype):
    """Algorithm 1 of arXiv:2311.08105 with the Nesterov momentum of its authors' framework; three rounds.

    A bfloat16 has 8 bits: differences of size 0.3 are rounded by up to 1e-3, and momentum adds rounds up.
    """
    rounds = Rounds(distribution(replicas), 0.7, 0.9, dtype=dtype)
    weights = [np.ones(shape) for shape in SHAPES]
    momenta = [np.zeros(shape) for shape in SHAPES]
    for first in (0, 2, 4):
        local = [[w.copy() for w in weights] for _ in range(replicas)]
        examples = np.zeros(replicas)
        for step in (first, first + 1):
            counts = np.array([8.0, 4.0, 4.0])[:replicas]
            changes = [draw(step, r) for r in range(replicas)]
            rounds.step(changes, counts, np.arange(replicas) + float(step))
            examples += counts
            local = [[w - c for w, c in zip(ws, cs, strict=True)] for ws, cs in zip(local, changes, strict=True)]
        for place, weight in enumerate(weights):
            gradient = np.average([weight - local[r][place] for r in range(replicas)], 0, examples)
            momenta[place] = 0.9 * momenta[place] + gradient
            weights[place] = weight - 0.7 * (gradient + 0.9 * momenta[place])
        *found, statistic = rounds.sync()
        for a, b in zip(found, weights, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6 if dtype == "float32" or replicas == 1 else 1e-2)
        np.testing.assert_allclose(
            statistic, np.average(np.arange(replicas) + first + 1.0, weights=examples), rtol=1e-6
        )


def test_replicas_drift_between_syncs_and_nothing_else_does(distribution):
    rounds = Rounds(distribution(2))
    rounds.step([draw(0, 0), draw(0, 1)], [1.0, 1.0], [1.0, 2.0])
    for variable in (*rounds.variables, rounds.statistic):
        first, second = rounds.copies(variable)
        assert (first != second).all()
    rounds.sync()


def test_a_replica_without_examples_in_a_step_changes_nothing_by_it(distribution):
    """Neither weights nor statistics, whatever it computed; and one that saw none all round has no say."""
    rounds = Rounds(distribution(2), 1.0, 0.0)
    changes = draw(0, 0)
    nothing = [np.full(shape, np.nan) for shape in SHAPES]
    rounds.step([changes, nothing], [3.0, 0.0], [5.0, np.nan])
    *found, statistic = rounds.sync()
    for weight, change in zip(found, changes, strict=True):
        np.testing.assert_allclose(weight, 1.0 - change, rtol=1e-6)
    assert statistic == 5.0
