"""Updates on two replicas (two logical CPUs): identical to the bit, and nothing communicates."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import optimizers

SHAPES = [(7, 5), (3, 3, 2, 4), (), (6, 2)]


def make(name):
    rng = np.random.default_rng(1)
    variables = [tf.keras.Variable(rng.normal(size=shape).astype("float32")) for shape in SHAPES]
    optimizer = optimizers.build(name, 0.01, weight_decay=0.01)
    optimizer.build(variables)
    return variables, optimizer


def gradients_of_step(step, dense):
    """For all variables; those of the last are rows, one of them twice, if not `dense`."""
    rng = np.random.default_rng(step)
    gradients = [tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES[:-1]]
    rows = tf.constant(rng.normal(size=(3, 2)), tf.float32)
    slices = tf.IndexedSlices(rows, tf.constant([step % 6, 1, 1]), tf.constant([6, 2]))
    return [*gradients, tf.convert_to_tensor(slices) if dense else slices]


@pytest.mark.parametrize("name", [*optimizers.NAMES, "nadam"])
def test_two_replicas_stay_identical_to_the_bit(name):
    dense = name == "nadam"  # Keras itself turns some sparse gradients into dense ones, and warns
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables, optimizer = make(name)
    alone, lone_optimizer = make(name)
    start = [variable.numpy() for variable in variables]

    @tf.function
    def update_replicas(gradients):
        def update():
            # Conditional, as after a check for finite gradients: communication would fail here.
            apply = lambda: optimizer.apply(gradients, variables)  # noqa: E731
            tf.cond(tf.constant(True), apply, lambda: None)

        strategy.run(update)

    for step in range(20):
        gradients = gradients_of_step(step, dense)
        update_replicas(gradients)
        lone_optimizer.apply(gradients, alone)

    held = [*variables, *optimizer.variables]
    if name == "nadam":
        held += optimizer.keras_optimizer.variables
    for variable in held:
        value = variable.value if isinstance(variable, tf.keras.Variable) else variable
        first, second = (part.numpy() for part in strategy.experimental_local_results(value))
        np.testing.assert_array_equal(first, second)
    assert strategy.experimental_local_results(optimizer.iterations)[1].numpy() == 20
    for variable, single, old in zip(variables, alone, start, strict=True):
        np.testing.assert_allclose(variable.numpy(), single.numpy(), rtol=2e-6, atol=1e-7)
        assert np.all(variable.numpy() != old)


@pytest.mark.parametrize("name", ["momentum", "lion"])
def test_replicas_do_not_meet_even_if_the_variable_asks_for_a_mean(name):
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
    tf.function(lambda: strategy.run(apply, (gradients,)))()
    first, second = (part.numpy() for part in strategy.experimental_local_results(variable))
    np.testing.assert_allclose(first, [-0.1, 0.1, -0.1], rtol=1e-6)
    np.testing.assert_array_equal(first, -second)
