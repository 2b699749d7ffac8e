"""Values that differ by replica, and what becomes of them on another number of replicas."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.reduction import per_replica

BY = tf.VariableAggregation


@pytest.mark.parametrize(
    ("by", "dtype", "values", "expected"),
    [
        (BY.SUM, "int64", [3, 2, 6], [5, 2, 2, 2]),  # what does not divide is the first's
        (BY.SUM, "int64", [-3], [0, -1, -1, -1]),
        (BY.SUM, "float32", [3, 2, 4], [2.25] * 4),
        (BY.MEAN, "float32", [3, 2, 4], [3] * 4),
        ("own", "float32", [3, 2, 4], [3] * 4),
        (BY.ONLY_FIRST_REPLICA, "int64", [3, 2, 4], [9] * 4),  # kept
        (BY.SUM, "int64", [3, 2, 4, 7], [3, 2, 4, 7]),
        (BY.ONLY_FIRST_REPLICA, "int64", [3, 2, 4, 7], [3, 2, 4, 7]),
        (BY.SUM, "int64", 7, [4, 1, 1, 1]),  # without the axis
    ],
)
def test_values_of_other_replicas_are_divided(distribution, caplog, by, dtype, values, expected):
    strategy = distribution(4)
    with strategy.scope():
        if by == "own":
            variable = per_replica.variable(9.0, "kept")
        else:
            how = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ, "aggregation": by}
            variable = tf.Variable(tf.constant(9, dtype), name="kept", **how)
    assert per_replica.differs(variable)
    per_replica.assign_values(variable, tf.constant(values, dtype))
    found = [component.numpy().item() for component in per_replica.components(variable)]
    assert found == expected
    np.testing.assert_array_equal(per_replica.gather([variable])[0], expected)
    is_kept = expected == [9] * 4
    assert ("kept is reset: each replica keeps its own, the checkpoint has that of 3 rep" in caplog.text) == is_kept


def test_of_no_variables_nothing_is_gathered():
    assert per_replica.gather([]) == []
    assert not per_replica.differs(tf.Variable(1.0))
