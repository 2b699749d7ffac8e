"""Sums over replicas against NumPy: dense, sparse and absent gradients, in buckets of any size, on any wire."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.mesh import collectives
from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.engine.step.context import StepContext
from tests.waiting import PATIENCE

SHAPES = [(3, 5), (), (7,), (2, 3, 2)]


def values(replica):
    rng = np.random.default_rng(replica)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def reduce(strategy, reduction, counts, make_gradients, averages=()):
    """What each replica has after the sum: [replica](gradients, count), as tensors."""

    def step():
        replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
        for variable in averages:
            variable.assign(variable + 10.0 * replica)
        count = tf.constant(counts[replica], tf.float32) + 0.0 * tf.random.uniform([])  # not known when traced
        given, has_examples = make_gradients(replica), count > 0
        with StepContext(has_examples=has_examples):
            computed = tf.where(has_examples, count, 1.0)  # one of zeros stands in for none
            gradients, count = reduction.sum(given, computed, averages)
        dense = [
            {"values": g.values, "indices": g.indices} if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
            if g is not None
        ]
        assert [g is None for g in gradients] == [g is None for g in given]
        return dense, count

    result = tf.function(lambda: strategy.run(step), autograph=False)()

    def local(r):
        return tf.nest.map_structure(lambda x: strategy.experimental_local_results(x)[r].numpy(), result)

    return [local(r) for r in range(strategy.num_replicas_in_sync)]


def assert_bit_equal(results):
    for other in results[1:]:
        tf.nest.map_structure(np.testing.assert_array_equal, results[0], other)


@pytest.mark.parametrize("bucket_bytes", [0, 1, 40, 4 << 20])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_sums_equal_numpys_of_values_rounded_as_they_travel(distribution, replicas, wire, bucket_bytes):
    """Exactly: two 16-bit wires are summed in float32 in the order of the replicas, and so is float32 here."""
    reduction = Reduction(wire, bucket_bytes)
    results = reduce(distribution(replicas), reduction, [1.0, 2.0, 5.0], lambda r: [*map(tf.constant, values(r)), None])
    assert_bit_equal(results)
    rounded = [[tf.cast(tf.cast(v, wire), tf.float32).numpy() for v in values(r)] for r in range(replicas)]
    expected = [sum(parts[1:], parts[0]) for parts in zip(*rounded, strict=True)]
    gradients, count = results[0]
    for found, wanted in zip(gradients, expected, strict=True):
        if wire == "float32":  # the order of three summands is the collective's own: half an ulp of each partial sum
            np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-7)
        else:
            np.testing.assert_array_equal(found, wanted)
    assert count == sum([1.0, 2.0, 5.0][:replicas])


@pytest.mark.parametrize("bucket_bytes", [0, 4 << 20])
def test_no_replica_holds_more_than_a_piece_of_what_all_have_sent(distribution, monkeypatch, bucket_bytes):
    """Of three replicas, each of which sends at most 4 values at once: the same bits as without a limit."""
    replicas, sizes = 3, []
    gather = collectives.all_gather

    def measured(context, words):
        sizes.append(context.num_replicas_in_sync * words.shape.num_elements() * words.dtype.size)
        return gather(context, words)

    def sums():
        return reduce(
            distribution(replicas),
            Reduction("bfloat16", bucket_bytes),
            [1.0, 2.0, 5.0],
            lambda r: [tf.constant(v) for v in values(r)],
        )

    monkeypatch.setattr(collectives, "all_gather", measured)
    whole, at_once = sums(), max(sizes)
    sizes.clear()
    monkeypatch.setattr("crankshaft.engine.reduction.all_reduce.GATHERED_BYTES", 4 * 2 * replicas)
    assert_bit_equal([*whole, *sums()])
    assert at_once > 4 * 2 * 2 * replicas >= max(sizes)  # a bucket is closed when it is full, so it may hold twice that


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_counts_are_exact_on_any_wire(distribution, wire):
    """Up to float32's last odd number."""
    for counts in ([16_777_214.0, 1.0], [4097.0, 65_519.0], [0.0, 3.0]):
        results = reduce(distribution(2), Reduction(wire), counts, lambda r: [tf.ones([1])])
        assert [count for _, count in results] == [sum(counts)] * 2


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_slices_come_back_as_those_of_all_replicas(distribution, wire):
    """One replica holds none, but that of zeros which stand in, another the same row twice; rounded as dense values."""
    rows = [np.full((1, 2), np.nan, np.float32), np.array([[1.001, 2], [3, 4], [5, 6]], np.float32)]
    ids = [[0], [1, 4, 1]]

    def gradients(r):
        return [tf.IndexedSlices(tf.constant(rows[r]), tf.constant(ids[r], tf.int32), tf.constant([6, 2])), None]

    results = reduce(distribution(2), Reduction(wire), [0.0, 3.0], gradients)
    assert_bit_equal(results)
    (slices,), count = results[0]
    assert slices["indices"].tolist() == [1, 4, 1]
    np.testing.assert_array_equal(slices["values"], tf.cast(tf.cast(rows[1], wire), tf.float32))
    assert count == 3.0


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_moving_statistics_become_their_mean_weighted_by_examples(distribution, wire):
    strategy = distribution(2)
    with strategy.scope():
        variables = [tf.Variable(tf.constant([1.0, 1.0 / 3])), tf.Variable(100.0)]
    results = reduce(strategy, Reduction(wire), [3.0, 1.0], lambda r: [tf.ones([2])], variables)
    assert_bit_equal(results)
    for variable, start in zip(variables, ([1.0, 1.0 / 3], 100.0), strict=True):
        first, second = (part.numpy() for part in strategy.experimental_local_results(variable))
        np.testing.assert_array_equal(first, second)
        # (3 x + (x + 10)) / 4 in float32: three roundings.
        np.testing.assert_allclose(first, np.array(start) + 2.5, rtol=3e-7)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_replica_without_examples_adds_nothing_whatever_it_computed(distribution, wire):
    strategy = distribution(2)
    with strategy.scope():
        statistic = tf.Variable([1.0, np.nan])  # set to nan by the empty replica, as batch normalisation does

    def gradients(r):
        statistic.assign([5.0, 6.0] if r == 0 else [np.nan, np.nan])
        return [tf.constant([1.0, 2.0] if r == 0 else [np.nan, np.inf])]

    results = reduce(strategy, Reduction(wire), [4.0, 0.0], gradients, [statistic])
    assert [(g.tolist(), count) for (g,), count in results] == [([1.0, 2.0], 4.0)] * 2
    for copy in strategy.experimental_local_results(statistic):
        np.testing.assert_array_equal(copy, [5.0, 6.0])


def test_one_replica_is_left_alone(distribution):
    ((gradients, count),) = reduce(distribution(1), Reduction("float16"), [2.0], lambda r: [tf.constant([1e-9]), None])
    assert gradients == [np.float32(1e-9)]
    assert count == 2.0


@pytest.mark.parametrize("is_local", [False, True])
def test_a_replica_measures_its_own_norm_and_its_wait_for_others(distribution, is_local):
    """The second one begins after the first one has computed, and its gradient is twice the first one's."""
    computed = threading.Event()
    strategy, reduction = distribution(2), LocalSgd(2, outer()) if is_local else Reduction()
    reduction.watched = ("reduce_seconds", "gradient_norm")
    with strategy.scope():
        reduction.build([])

    def compute(is_late):
        if is_late:
            assert computed.wait(PATIENCE)
            time.sleep(0.3)
        computed.set()
        return np.float32(1 + is_late)

    def step():
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        factor = tf.ensure_shape(tf.numpy_function(compute, [bool(replica)], tf.float32), [])
        with StepContext(collect_norm=tf.constant(True)):
            reduction.sum([factor * tf.constant([3.0, 4.0])], tf.constant(2.0))
            return reduction.pop_figures()

    figures = tf.function(lambda: strategy.run(step), autograph=False)()
    waits, norms = ([x.numpy() for x in strategy.experimental_local_results(figures[name])] for name in figures)
    assert norms == [2.5, 5.0]
    assert waits == [0, 0] if is_local else waits[0] > 0.1
