"""(total, count) pairs: exact on uneven and empty batches, merged on the host in float64."""

import numpy as np
import tensorflow as tf

from engine import mean
from engine.metrics import LoopSums, Sums, stack


def test_mean_of_values_and_of_an_empty_batch():
    pair = mean(tf.constant([1.0, 2.0, 6.0]))
    assert (pair.total.numpy(), pair.count.numpy()) == (9.0, 3.0)
    assert [x.numpy() for x in mean(tf.zeros([0]))] == [0.0, 0.0]
    assert [x.numpy() for x in mean(tf.constant([True, False, True]))] == [2.0, 3.0]


def test_weights_broadcast_and_padding_may_hold_anything():
    values = tf.constant([[1.0, 2.0], [np.nan, np.inf]])
    pair = mean(values, tf.constant([[2.0], [0.0]]))
    assert (pair.total.numpy(), pair.count.numpy()) == (6.0, 4.0)


def test_sixteen_bit_values_are_summed_in_float32():
    """4,097 ones: bfloat16 could not count past 256."""
    assert mean(tf.ones([4097], tf.bfloat16)).total.numpy() == 4097.0


def loop_sums(**pairs):
    metrics = {name: mean(tf.constant(values, tf.float32)) for name, values in pairs.items()}
    return LoopSums(sorted(metrics), stack(metrics, tf.float64))


def test_uneven_batches_weigh_by_their_examples():
    sums = Sums()
    sums.add(loop_sums(loss=[1.0, 1.0, 1.0], accuracy=[0.0, 1.0, 1.0]))
    sums.add(loop_sums(loss=[5.0], accuracy=[0.0]))
    assert sums.means() == {"loss": 2.0, "accuracy": 0.5}
    assert sums.values()["loss"][1] == 4


def test_a_metric_that_nothing_was_counted_for_is_left_out():
    sums = Sums()
    sums.add(loop_sums(loss=[1.0], norm=[]))
    assert sums.means() == {"loss": 1.0}


def test_a_long_window_is_summed_exactly():
    sums = Sums()
    for _ in range(3 * Sums.COLLAPSE_AT + 1):
        sums.add(loop_sums(loss=[0.1, 0.7]))
    each = np.float64(np.float32(0.1) + np.float32(0.7))
    assert sums.values()["loss"] == (each * (3 * Sums.COLLAPSE_AT + 1), 2.0 * (3 * Sums.COLLAPSE_AT + 1))


def test_what_was_read_outlives_the_window():
    sums = Sums({"loss": (3.0, 2.0)})
    sums.add(loop_sums(loss=[1.0]))
    values = sums.values()
    sums.add(loop_sums(loss=[2.0]))
    assert values == {"loss": (4.0, 3.0)}
    assert sums.values() == {"loss": (6.0, 4.0)}


def test_adding_never_reads_the_newest_sums():
    """They may be what a device is at work on; older ones are read now and then, so that a window stays small."""
    window, added = Sums(), []
    for _ in range(3 * Sums.COLLAPSE_AT):
        added.append(loop_sums(loss=[1.0]))
        window.add(added[-1])
        assert all(sums._read is None for sums in added[-Sums.IN_FLIGHT :])
    assert sum(sums._read is None for sums in added) < Sums.COLLAPSE_AT
