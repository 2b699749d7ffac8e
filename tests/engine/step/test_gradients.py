"""A list of gradients and its factors."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.step.context import StartValues, StepContext
from crankshaft.engine.step.gradients import NO_ROW, Gradients, sum_duplicate_rows

TWICE = np.float32([[3, 0], [1, 1], [1, -1]])  # row 2 twice: [4, 1]


def given(*factors):
    """Makes four gradients: dense, None, sparse with a duplicate row, and bfloat16."""
    rows = tf.IndexedSlices(tf.constant(TWICE), tf.constant([2, 0, 2]), tf.constant([5, 2]))
    half = tf.constant([0.25, -3.0], tf.bfloat16)
    return Gradients([tf.constant([3.0, -0.5]), None, rows, half], tuple(map(tf.constant, factors)))


def values(gradients):
    """The gradients as arrays; rows are as [rows, values] of the rows that they are of, summed."""
    found = []
    for gradient in gradients:
        assert isinstance(gradient, tf.IndexedSlices) == (gradient is not None and gradient.shape == [5, 2])
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 5)
        found.append(None if gradient is None else gradient.numpy().tolist())
    return found


def whole(factor):
    rows = np.float32([[1, 1], [0, 0], [4, -1], [0, 0], [0, 0]])
    return [(factor * np.float32(x)).tolist() if x is not None else None for x in ([3, -0.5], None, rows, [0.25, -3])]


def test_factors_are_multiplied_once_in_whatever_order_they_come():
    assert values(given()) == whole(1)
    assert values(given(2.0, 0.25)) == whole(0.5)
    times = given(2.0).times(tf.constant(4.0))
    assert values(times) == values(Gradients(times)) == values(Gradients(given(2.0), (tf.constant(4.0),))) == whole(8)
    assert times[3].dtype == tf.float32
    assert len(times) == 4
    assert values(times[1:]) == whole(8)[1:]
    assert values(times.with_values(given().values[:2], ())) == whole(1)[:2]
    plain, factor = times.without_factors()
    assert (values(plain), float(factor)) == (whole(1), 8.0)
    assert values(given(2.0).joined([given(), given(4.0)])) == [*whole(2), *whole(1), *whole(4)]


def test_a_count_that_is_a_factor_is_removed_and_another_is_divided_by():
    count = tf.constant(4.0)
    gradients = given(2.0).times(count)
    assert values(gradients.over(count)) == whole(2)
    assert values(gradients.over(tf.constant(4.0))) == whole(2)
    assert values(gradients.over(tf.constant(2.0))) == whole(4)
    assert values(gradients.over(tf.constant(0.0))) == whole(0)
    third = tf.constant(49.0)  # 1 / 49 * 49 is not 1 in float32
    ones = tf.ones(3)
    assert Gradients(Gradients([ones], (third,))).over(third)[0] is ones


def test_a_loss_scale_is_divided_by_if_there_is_one():
    with StepContext(start_values=StartValues(loss_scale=tf.constant(4.0))):
        assert values(given(2.0).unscaled()) == whole(0.5)
    with StepContext():
        assert values(given(2.0).unscaled()) == whole(2)


@pytest.mark.parametrize(
    ("indices", "rows"),
    [([0, 0, 0], [0]), ([NO_ROW, 3, NO_ROW], [3]), ([NO_ROW] * 3, []), ([2, 1, 2], [2, 1]), ([], [])],
)
def test_rows_that_occur_twice_are_summed_and_padding_is_left_out(indices, rows):
    dense = np.zeros([5, 2], np.float32)
    changes = np.float32([[1, 2], [4, 8], [16, 32]]) * (np.array([*indices, 0, 0, 0])[:3, np.newaxis] != NO_ROW)
    np.add.at(dense, indices, changes[: len(indices)])
    slices = tf.IndexedSlices(tf.constant(changes[: len(indices)]), tf.constant(indices, tf.int64), tf.constant([5, 2]))
    summed = sum_duplicate_rows(slices)
    assert summed.indices.numpy().tolist() == rows
    np.testing.assert_array_equal(summed.values, dense[rows])
    assert sum_duplicate_rows(summed) is summed
    whole = tf.constant(dense)
    assert sum_duplicate_rows(whole) is whole
    assert sum_duplicate_rows(None) is None


def norm(*numbers):
    return np.sqrt(sum(np.square(numbers)))


def test_norms_and_clipping_are_of_summed_rows_times_the_factors():
    gradients = given(2.0)
    norms = [norm(6, 1), norm(2, 2, 8, 2), norm(0.5, 6)]
    np.testing.assert_allclose(gradients.norm(), norm(*norms), rtol=1e-6)
    np.testing.assert_allclose(
        gradients.norms([[0, 1], [2], [3, 0]]), [norms[0], norms[1], norm(norms[2], norms[0])], rtol=1e-6
    )
    dense, absent, rows, half = values(gradients.clipped_by_value(1.5))
    assert (dense, absent, rows[0], rows[2], half) == ([1.5, -1.0], None, [1.5, 1.5], [1.5, -1.5], [0.5, -1.5])
    # The first and the last are of one variable; of another are the rows, whose norm is at most the limit.
    clipped = values(gradients.clipped_by_norms(8.75, [7, 8, 9, 7]))
    assert clipped == [*whole(2)[:3], whole(2)[3]]
    clipped = values(gradients.clipped_by_norms(4.0, [7, 8, 9, 7]))
    shared, own = 2 * 4 / norm(norms[0], norms[2]), 2 * 4 / norms[1]
    for found, expected in zip(clipped, (whole(shared)[0], None, whole(own)[2], whole(shared)[3]), strict=True):
        if expected is None:
            assert found is None
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-6)
