"""Variables whose value differs by replica, saved as one array [replicas, ...].

They are TensorFlow's variables that synchronize on read: the engine's own (read as the first replica's value, changed
in replica code by raw ops on `handle`), users' that declare it, and the state of Keras's stateful layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .. import logging
from ..internals.variables import compiled_once, read_local, tf_variable, variable_path
from ..mesh import collectives

_OTHER_REPLICAS = (
    "%s is reset: each replica keeps its own, the checkpoint has that of %d replicas, and there are %d now"
)


def variable(initial_value: Any, name: str) -> tf.Variable:
    """Makes such a variable, of float dtype, equal on all replicas at first. In the strategy's scope."""
    with tf.variable_creator_scope(create):
        return tf.Variable(initial_value, trainable=False, name=name)


def create(next_creator: Callable, **keywords: Any) -> tf.Variable:
    """Creates one of the engine's, for `tf.variable_creator_scope`: all variables created within it are.

    Replicas keep values in them whose mean matters: a moment of gradients, or an error to add to a mean gradient.
    """
    variable = create_own(next_creator, **keywords)
    variable.is_divisible = True
    return variable


def create_own(next_creator: Callable, **keywords: Any) -> tf.Variable:
    """Creates a variable of this kind that can't be restored on another number of replicas."""
    keywords["synchronization"] = tf.VariableSynchronization.ON_READ
    keywords["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return next_creator(**keywords)


def differs(variable: Any) -> bool:
    """Returns whether a variable, Keras's or TensorFlow's, is one of these."""
    variable = tf_variable(variable)
    return isinstance(variable, tf.Variable) and variable.synchronization == tf.VariableSynchronization.ON_READ


def gather(variables: Sequence) -> list[tf.Tensor]:
    """Gathers each replica's value of each variable, [replicas, ...], in the order of the replicas, on the host.

    A collective if replicas are in several processes: all have to call it for the same variables in the same order.
    """
    if not variables:
        return []
    variables = [tf_variable(variable) for variable in variables]
    strategy = _strategy(variables[0])
    if len(components(variables[0])) == strategy.num_replicas_in_sync:
        with tf.device("CPU:0"):
            return [tf.stack([component.read_value() for component in components(variable)]) for variable in variables]

    def replica_values():
        context = tf.distribute.get_replica_context()
        return [collectives.all_gather(context, read_local(variable)) for variable in variables]

    values = compiled_once(lambda: strategy.run(replica_values))()  # eagerly, TensorFlow would trace each of them
    return [strategy.experimental_local_results(copies)[0] for copies in values]


def assign_values(variable: tf.Variable, values: tf.Tensor) -> None:
    """Assigns each replica its own value of an array [replicas, ...].

    If their number differs from the number of replicas, each replica gets the mean of all, or an equal part if the
    variable is summed on read. A variable with neither keeps its value, with a warning. An array without that axis is
    one value.
    """
    strategy = _strategy(variable)
    values = values[tf.newaxis] if values.shape.rank == variable.shape.rank else values
    same = values.shape[0] == strategy.num_replicas_in_sync
    by = variable.aggregation
    is_divisible = by in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN) or hasattr(variable, "is_divisible")
    if not (same or is_divisible):
        logging.warning(_OTHER_REPLICAS, variable_path(variable), values.shape[0], strategy.num_replicas_in_sync)
        return

    def own_value(context: tf.distribute.ValueContext) -> tf.Tensor:
        if same:
            return values[context.replica_id_in_sync_group]
        if by != tf.VariableAggregation.SUM:
            return tf.reduce_mean(values, 0)
        total, replicas = tf.reduce_sum(values, 0), context.num_replicas_in_sync
        if total.dtype.is_floating:
            return total / replicas
        # The first has the remainder, too, so that a sum of integers stays what it was.
        first = tf.cast(context.replica_id_in_sync_group == 0, total.dtype)
        return total // replicas + first * (total % replicas)

    own_values = strategy.experimental_distribute_values_from_function(own_value)
    for component, value in zip(components(variable), strategy.experimental_local_results(own_values), strict=True):
        component.assign(value)


def _strategy(variable: tf.Variable) -> tf.distribute.Strategy:
    """Returns the variable's strategy; a plain variable, of one replica, belongs to any."""
    distributed = isinstance(variable, tf.distribute.DistributedValues)
    return variable.distribute_strategy if distributed else tf.distribute.get_strategy()


def components(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns a variable's components on the replicas of this process, in order; a plain variable is its only one."""
    return _strategy(variable).experimental_local_results(variable)
