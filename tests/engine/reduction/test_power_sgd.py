"""PowerSGD against the paper's algorithm in NumPy; what its memories add up to; its state in checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.errors import CheckpointError
from crankshaft.engine.reduction import Reduction, per_replica
from crankshaft.engine.reduction.power_sgd import PowerSgd
from crankshaft.engine.step.context import Readings, StepContext
from crankshaft.engine.step.gradients import Gradients
from crankshaft.models.mlp import Model as Mlp
from tests.arrays import assert_close, assert_same
from tests.engine.reduction.noisy_points import four_classes

SHAPES = [(12, 9), (9,), (3, 2, 10)]  # a matrix, a vector, a kernel that is one of [6, 10]
COMPRESSED = (0, 2)


def memories(reduction):
    """[replicas, rows, columns] of each compressed gradient."""
    return [rows.numpy() for rows in per_replica.gather(list(reduction.memory.values()))]


class Run:
    """A `PowerSgd` on its replicas, driven by hand."""

    def __init__(self, strategy, rank=2, dtype="float32", bucket_bytes=4 << 20, shapes=SHAPES):
        self.strategy = strategy
        self.reduction = PowerSgd(rank, dtype, bucket_bytes)
        with strategy.scope():
            self.variables = [tf.Variable(tf.zeros(shape), name=f"v{i}") for i, shape in enumerate(shapes)]
            self.reduction.build(self.variables)
        self._step = tf.function(self._replicated, autograph=False)

    def step(self, gradients, counts, scale=None):
        """One step from gradients of sums [replica][variable]: the mean gradients that each replica would apply."""

        def on_replicas(values):
            return self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.convert_to_tensor(values[context.replica_id_in_sync_group], tf.float32)
            )

        scale = None if scale is None else tf.constant(scale, tf.float32)
        parts = [on_replicas(list(part)) for part in zip(*gradients, strict=True)]
        result = self._step(parts, on_replicas(counts), scale)
        replicas = range(self.strategy.num_replicas_in_sync)
        local = [[self.strategy.experimental_local_results(x)[r].numpy() for x in result] for r in replicas]
        for other in local[1:]:
            assert_same(local[0], other)
        return local[0]

    def _replicated(self, gradients, count, scale):
        def run(gradients, count):
            with StepContext(readings=Readings(scale)):
                gradients, count = self.reduction.sum(gradients, count, (), self.variables)
            means = Gradients(gradients).over(count)
            return list(means if scale is None else means.times(1.0 / scale))

        return self.strategy.run(run, args=(gradients, count))

    def memories(self):
        return memories(self.reduction)

    def first_q(self):
        return [variable.numpy() for variable in self.reduction.q.values()]


def sample(step, replica, count):
    """Gradients of a sum over `count` examples: their size grows as that of sums does."""
    rng = np.random.default_rng([step, replica])
    return [count * (rng.normal(size=shape) + np.ones(shape)) for shape in SHAPES]


def orthonormal(matrix):
    columns = []
    for column in matrix.T:
        for other in columns:
            column = column - other * (other @ column)
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, 1)


class Reference:
    """Algorithms 1 and 2 of arXiv:1905.13727, float64. Workers are weighted so that their mean is the batch's."""

    def __init__(self, first_q, replicas):
        self.q = [q.T.astype(np.float64) for q in first_q]
        self.memory = [np.zeros([replicas, s[0] if len(s) == 2 else 6, s[-1]]) for s in (SHAPES[i] for i in COMPRESSED)]

    def step(self, gradients, counts):
        replicas, total = len(counts), sum(counts)
        means = [sum(parts) / total for parts in zip(*gradients, strict=True)]
        for i, index in enumerate(COMPRESSED):
            memory = self.memory[i]
            send = [
                replicas * gradients[r][index].reshape(memory[r].shape) / total + memory[r] for r in range(replicas)
            ]
            basis = orthonormal(np.mean([m @ self.q[i] for m in send], 0))
            own = [m.T @ basis for m in send]
            self.q[i] = np.mean(own, 0)
            self.memory[i] = np.stack([m - basis @ q.T for m, q in zip(send, own, strict=True)])
            means[index] = (basis @ self.q[i].T).reshape(SHAPES[index])
        return means


@pytest.mark.parametrize(("replicas", "bucket_bytes"), [(1, 0), (2, 100), (3, 0), (3, 100)])
def test_steps_equal_the_papers_algorithm(distribution, replicas, bucket_bytes):
    """Five steps with warm start. 1e-5 of values of size 1: five float32 steps of products over 12 terms."""
    run = Run(distribution(replicas), bucket_bytes=bucket_bytes)
    reference = Reference(run.first_q(), replicas)
    for step in range(5):
        counts = [3.0, 5.0, 2.0][:replicas]
        gradients = [sample(step, r, counts[r]) for r in range(replicas)]
        assert_close(run.step(gradients, counts), reference.step(gradients, counts), atol=1e-5)
        assert_close(run.memories(), reference.memory, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_applied_and_the_memories_add_up_to_the_true_means(distribution, dtype):
    """Over batches of very different sizes, one replica without an example now and then, and a loss scale that moves.

    Also on a 16-bit wire, since the memory holds what the wire's rounding took. 2e-5 of sums of 20 values of size 1.
    """
    run = Run(distribution(2), rank=1, dtype=dtype)
    applied, true = [0.0] * len(COMPRESSED), [0.0] * len(COMPRESSED)
    for step in range(20):
        counts = [(32.0, 32.0), (2.0, 1.0), (1.0, 0.0), (0.0, 7.0)][step % 4]
        scale = 2.0 ** (step % 3)
        gradients = [sample(step, r, counts[r]) for r in range(2)]
        means = run.step([[scale * g for g in parts] for parts in gradients], counts, scale)
        for i, index in enumerate(COMPRESSED):
            applied[i] = applied[i] + means[index]
            true[i] = true[i] + (gradients[0][index] + gradients[1][index]) / sum(counts)
    for i, memory in enumerate(run.memories()):
        assert np.abs(memory).max() > 0.1  # something was kept back
        np.testing.assert_allclose(
            applied[i].reshape(memory[0].shape) + memory.mean(0), true[i].reshape(memory[0].shape), atol=2e-5
        )


def test_a_rank_that_saves_nothing_sums_exactly(distribution):
    """(12, 9) at rank 5.14 and (6, 10) at 3.75 are where P and Q hold as much as the gradient."""
    run = Run(distribution(2), rank=6)
    assert not run.reduction.memory
    gradients = [sample(0, r, 2.0) for r in range(2)]
    for found, a, b in zip(run.step(gradients, [2.0, 2.0]), *gradients, strict=True):
        np.testing.assert_allclose(found, (a + b) / 4, rtol=1e-6)


def test_gradients_of_no_higher_rank_come_whole(distribution):
    """A product of [12, 2] and [2, 9] at rank 2, at once: P's columns are those of the gradient whatever Q is."""
    run = Run(distribution(2), rank=2, shapes=[(12, 9)])
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(12, 2)), rng.normal(size=(2, 2, 9))
    (found,) = run.step([[left @ right[0]], [left @ right[1]]], [1.0, 1.0])
    np.testing.assert_allclose(found, left @ right.mean(0), atol=1e-5)


def test_a_gradient_of_lower_rank_than_asked_leaves_nothing_behind(distribution):
    """One example gives rank 1; Q's other rows are noise or zeros then, and must not spoil what follows."""
    run = Run(distribution(2), rank=2, shapes=[(12, 9)])
    rng = np.random.default_rng(0)
    for _ in range(5):
        outer = np.outer(rng.normal(size=12) * (np.arange(12) > 5), rng.normal(size=9))
        (found,) = run.step([[outer], [outer]], [1.0, 1.0])
        np.testing.assert_allclose(found, outer, atol=1e-5)
        np.testing.assert_allclose(run.memories()[0], 0.0, atol=1e-5)


def test_directions_that_found_nothing_are_looked_at_again(distribution):
    """A gradient of zeros (a layer that is not reached yet) would leave Q zero, and with it all that follow."""
    run = Run(distribution(2), rank=1, shapes=[(12, 9)])
    run.step([[np.zeros((12, 9))]] * 2, [1.0, 1.0])
    outer = np.outer(np.arange(12) > 5, np.ones(9))
    (found,) = run.step([[outer]] * 2, [1.0, 1.0])
    np.testing.assert_allclose(found, outer, atol=1e-5)


def test_a_step_that_is_not_finite_or_has_no_examples_leaves_the_memory_as_it_was(distribution):
    run = Run(distribution(2))
    run.step([sample(0, r, 1.0) for r in range(2)], [1.0, 1.0])
    before = run.memories() + run.first_q()
    for index, bad in ((0, np.nan), (1, np.inf), (2, np.inf)):
        gradients = [sample(1, r, 1.0) for r in range(2)]
        gradients[1][index].flat[3] = bad
        assert not np.isfinite(run.step(gradients, [1.0, 1.0])[index]).all()
    means = run.step([sample(2, r, 1.0) for r in range(2)], [0.0, 0.0])
    assert all((mean == 0).all() for mean in means)
    assert_same(before, run.memories() + run.first_q())


def test_a_replica_without_examples_adds_nothing_whatever_it_computed(distribution):
    run = Run(distribution(2))
    gradients = [sample(0, 0, 4.0), [np.full(shape, np.nan) for shape in SHAPES]]
    means = run.step(gradients, [4.0, 0.0])
    np.testing.assert_allclose(means[1], gradients[0][1] / 4, rtol=1e-6)
    for index, memory in zip(COMPRESSED, run.memories(), strict=True):
        np.testing.assert_array_equal(memory[1], 0.0)
        wanted = gradients[0][index].reshape(memory[0].shape) / 4
        np.testing.assert_allclose(means[index].reshape(memory[0].shape) + memory.mean(0), wanted, atol=1e-5)


# -- in a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(bench):
    """A run of an mlp, 16 by 338 examples: every 22nd batch is one of 2."""

    def make(replicas=2, reduction=None, **options):
        return bench(
            Mlp((32, 24), dropout=0.1),
            four_classes(),
            16,
            replicas,
            num_classes=4,
            reduction=reduction or PowerSgd(2),
            **options,
        )

    return make


@pytest.mark.parametrize(
    ("others", "options"),
    [((2,), {}), pytest.param((4,), {"accumulate_steps": 2}, marks=pytest.mark.slow)],
)
def test_a_run_is_the_same_on_any_number_of_replicas(bench, others, options):
    """30 steps: rounding, 1e-7 a step, grows faster than with exact sums, through what the memories give back."""

    def curve(replicas):
        settings = {"num_classes": 4, "reduction": PowerSgd(2), "optimizer": "momentum", **options}
        made = bench(Mlp((32, 24)), four_classes(), 16, replicas, **settings)
        return made.curve(30)

    one = curve(1)
    for replicas in others:
        np.testing.assert_allclose(curve(replicas), one, rtol=1e-4)


def test_steps_that_float16_leaves_out_do_not_reach_the_memories(run):
    """The loss scale begins too high: the first steps overflow."""
    made = run(precision="float16", learning_rate=1e-2)
    made.trainer.loss_scale.value.assign(2.0**20)
    sums = made.train(60)
    assert sums["skipped"][0] > 0
    for memory in memories(made.trainer.reduction):
        assert np.isfinite(memory).all()
        assert 0 < np.abs(memory).max() < 10  # unscaled, as gradients are
    assert made.curve(80)[-10:].mean() < 1.2  # it learns: guessing has log 4, 1.39, and float32 comes to 0.99


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """A run of two replicas that has saved step 15: the checkpoint's folder, and its memories."""
    made, folder = run(), tmp_path_factory.mktemp("saved")
    made.train(15)
    made.save(folder)
    kept = memories(made.trainer.reduction)
    assert all((memory[0] != memory[1]).any() for memory in kept)
    return folder, kept


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_another_number_of_replicas_keeps_the_memories_mean(run, saved, replicas):
    folder, kept = saved
    second = run(replicas).restore(folder)
    for before, after in zip(kept, memories(second.trainer.reduction), strict=True):
        assert len(after) == replicas
        for row in after:
            np.testing.assert_allclose(row, before.mean(0), rtol=1e-6, atol=1e-9)
    second.train(30)


def test_a_run_may_begin_and_cease_to_compress(run, tmp_path):
    """What is not in the checkpoint stays new; what only the checkpoint has is left out."""
    compressed, exact = run(), run(reduction=Reduction())
    for made, folder in ((compressed, "compressed"), (exact, "exact")):
        put_back = made.state.make_restorer()
        made.train(10)
        made.save(tmp_path / folder)
        put_back()
    exact.restore(tmp_path / "compressed").train(20)
    compressed.restore(tmp_path / "exact")
    assert all((memory == 0).all() for memory in memories(compressed.trainer.reduction))
    compressed.train(20)


def test_another_rank_is_refused_by_name(run, saved):
    with pytest.raises(CheckpointError, match=r"reduction\.q.*\[3, 32\] float32 here, \[2, 32\] float32 in"):
        run(reduction=PowerSgd(3)).restore(saved[0])
