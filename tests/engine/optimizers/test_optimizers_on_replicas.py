"""Updates on two replicas (two logical CPUs): nothing communicates."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import optimizers


@pytest.mark.parametrize("name", [*optimizers.NAMES, "nadam", "lion"])
def test_replicas_do_not_meet_even_if_the_variable_asks_for_a_mean(name):
    """Within a condition, as after a check for finite gradients, communication would fail; by opposite gradients each
    goes its own way."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable(tf.zeros(3), aggregation=tf.VariableAggregation.MEAN)
        optimizer = optimizers.build(name, 0.1)
        optimizer.build([variable])

    def apply(gradient):
        update = lambda: optimizer.apply([gradient], [variable])  # noqa: E731
        tf.cond(tf.constant(True), update, lambda: None)

    def gradient_of(context):
        sign = 1.0 - 2.0 * context.replica_id_in_sync_group
        return sign * tf.constant([1.0, -1.0, 1.0])

    gradients = strategy.experimental_distribute_values_from_function(gradient_of)
    step = tf.function(lambda: strategy.run(apply, (gradients,)))
    for _ in range(3):
        step()
    first, second = (part.numpy() for part in strategy.experimental_local_results(variable))
    assert (first * [-1, 1, -1] > 0).all()
    np.testing.assert_array_equal(first, -second)
    assert [part.numpy() for part in strategy.experimental_local_results(optimizer.iterations)] == [3, 3]
