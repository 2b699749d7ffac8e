"""Variables whose value differs by replica: made in a strategy's scope, changed in replica code by raw ops on `handle`,
saved as one array with a row for each replica. Host code.

They are TensorFlow's variables that synchronise on read, of the first replica's value. Nothing else in the engine is.
"""

from __future__ import annotations

import tensorflow as tf

# A variable's key among those of its trackable: `VARIABLE_VALUE_KEY` of TensorFlow's checkpoints.
_VALUE = "VARIABLE_VALUE"


def variable(initial_value, name: str) -> tf.Variable:
    """Makes one, float, equal on all replicas at first. In the strategy's scope."""
    return tf.Variable(
        initial_value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def differs(variable) -> bool:
    """Whether a variable is one of these."""
    return (
        isinstance(variable, tf.Variable)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    )


def gather(variable: tf.Variable) -> tf.Tensor:
    """[replicas, ...]: each replica's value, in the order of the replicas.

    A collective where replicas live in several processes: all of them have to call it, for the same variables in the
    same order.
    """
    strategy = _strategy(variable)
    return strategy.gather(strategy.run(lambda: _local(variable)[tf.newaxis]), axis=0)


class Rows(tf.__internal__.tracking.AutoTrackable):
    """Stands for such a variable where a checkpoint is read: each replica takes its own row of the array.

    If the array has another number of rows than there are replicas, each replica takes the mean of all. What replicas
    keep for themselves is of a kind whose mean counts (what a gradient's mean is owed, a moment of the gradients), and
    the mean is then what it was.
    """

    def __init__(self, variable: tf.Variable):
        self._setattr_tracking = False  # the variable itself would be read as one value
        self._variable = variable

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: tf.zeros([0], self._variable.dtype)}  # only its name and dtype count, since nothing is saved

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        rows, strategy = restored[_VALUE], _strategy(self._variable)
        same = rows.shape[0] == strategy.num_replicas_in_sync

        def take(rows):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            value = rows[replica] if same else tf.reduce_mean(rows, 0)
            tf.raw_ops.AssignVariableOp(resource=self._variable.handle, value=value)

        strategy.run(take, args=(rows,))


def _strategy(variable: tf.Variable) -> tf.distribute.Strategy:
    """The strategy whose replicas hold it; where there is one replica it is a plain variable, and any will do."""
    distributed = isinstance(variable, tf.distribute.DistributedValues)
    return variable.distribute_strategy if distributed else tf.distribute.get_strategy()


def _local(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
