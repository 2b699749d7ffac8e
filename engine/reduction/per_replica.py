"""Variables whose value differs by replica, saved as one array with a row for each replica. Host code.

They are made in a strategy's scope, and changed in replica code by raw ops on `handle`.

They are TensorFlow's variables that synchronise on read, of the first replica's value. Nothing else in the engine is.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ..internals.variables import read_local, tf_variable
from ..mesh import collectives


def variable(initial_value, name: str) -> tf.Variable:
    """Makes one, float, equal on all replicas at first. In the strategy's scope."""
    with tf.variable_creator_scope(create):
        return tf.Variable(initial_value, trainable=False, name=name)


def create(next_creator, **keywords) -> tf.Variable:
    """Creates a variable of this kind, for `tf.variable_creator_scope`: all variables within it are."""
    keywords["synchronization"] = tf.VariableSynchronization.ON_READ
    keywords["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return next_creator(**keywords)


def differs(variable) -> bool:
    """Returns whether a variable, Keras's or TensorFlow's, is one of these."""
    variable = tf_variable(variable)
    return (
        isinstance(variable, tf.Variable)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def gather(variables: Sequence) -> list[tf.Tensor]:
    """Gathers each replica's value of each variable, [replicas, ...], in the order of the replicas, on the host.

    A collective where replicas live in several processes: all of them have to call it, for the same variables in the
    same order.
    """
    if not variables:
        return []
    variables = [tf_variable(variable) for variable in variables]
    strategy = _strategy(variables[0])
    if len(components(variables[0])) == strategy.num_replicas_in_sync:
        with tf.device("CPU:0"):
            return [tf.stack([component.read_value() for component in components(variable)]) for variable in variables]

    def replica_rows():
        context = tf.distribute.get_replica_context()
        return [collectives.all_gather(context, read_local(variable)) for variable in variables]

    # Not eager: TensorFlow would trace each of them, and warn of it.
    rows = tf.function(lambda: strategy.run(replica_rows), autograph=False)()
    return [strategy.experimental_local_results(each)[0] for each in rows]


def assign_rows(variable: tf.Variable, rows: tf.Tensor) -> None:
    """Assigns each replica its own row of an array.

    If the array has another number of rows than there are replicas, each replica takes the mean of all. What replicas
    keep for themselves is of a kind whose mean counts (what a gradient's mean is owed, a moment of the gradients), and
    the mean is then what it was.
    """
    strategy = _strategy(variable)

    def row(context: tf.distribute.ValueContext) -> tf.Tensor:
        same = rows.shape[0] == context.num_replicas_in_sync
        return rows[context.replica_id_in_sync_group] if same else tf.reduce_mean(rows, 0)

    values = strategy.experimental_distribute_values_from_function(row)
    for component, value in zip(components(variable), strategy.experimental_local_results(values), strict=True):
        component.assign(value)


def _strategy(variable: tf.Variable) -> tf.distribute.Strategy:
    """Returns the strategy whose replicas hold it; a plain variable, of one replica, is held by any."""
    distributed = isinstance(variable, tf.distribute.DistributedValues)
    return variable.distribute_strategy if distributed else tf.distribute.get_strategy()


def components(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns what the replicas in this process hold of any variable, in their order; a plain one is its only one."""
    return _strategy(variable).experimental_local_results(variable)
