"""How the values that replicas give a variable in a step become one: by its declared `tf.VariableAggregation`.

Layers compute state from their replica's examples: batch normalisation its moving statistics, a codebook its counts.
TensorFlow would aggregate at each assignment, by a sum that may not stand in a loop and in which a stand-in for missing
examples would count. Here each replica assigns its own copy, and the copies become one in the sum of the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from ..errors import UsageError
from ..internals.graphs import ENGINES_OWN, Assignments
from ..internals.tensorflow import is_only_replica
from ..internals.variables import assign_local, not_implemented, path_of, read_local, tf_variable
from ..step.context import step_context
from . import per_replica

MEAN, SUM = tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM
_LOW = 1 << 12  # integers travel as two float32, of which sums over thousands of replicas are exact
_OF_RNN = "rnn_state"  # Keras's name for what a stateful layer ends a batch with


class Aggregated(NamedTuple):
    """A variable that each replica assigns by itself in a step, and how the values then become one.

    `by` is MEAN, weighted by examples; SUM, the old value plus what all replicas have added to it; or
    ONLY_FIRST_REPLICA.
    """

    variable: tf.Variable
    by: tf.VariableAggregation = MEAN


@contextlib.contextmanager
def declared() -> Iterator[dict[int, Aggregated]]:
    """Makes untrained variables, within, ones that each replica assigns by itself. Host code, in the strategy's scope.

    Yields:
      Those with a declared aggregation, by the `id` of the tf.Variable. Those that synchronize on read, and the state
      of Keras's stateful layers, stay each replica's own (`per_replica`), and are not among them.
    """
    declared: dict[int, Aggregated] = {}

    def create(next_creator, **keywords):
        if keywords.get("name") == _OF_RNN:
            return per_replica.create_own(next_creator, **keywords)
        by = keywords.get("aggregation") or tf.VariableAggregation.NONE
        on_read = keywords.get("synchronization") == tf.VariableSynchronization.ON_READ
        if by == tf.VariableAggregation.NONE or on_read or keywords.get("trainable") is not False:
            return next_creator(**keywords)
        variable = next_creator(**{**keywords, "aggregation": tf.VariableAggregation.NONE})
        declared[id(variable)] = Aggregated(variable, by)
        return variable

    with tf.variable_creator_scope(create):
        yield declared


def summed(state: Sequence[Aggregated]) -> dict[int, tf.Tensor]:
    """Reads the variables to which replicas add, by their `id`: what `shares` needs of a step's beginning."""
    return {id(variable): read_local(variable) for variable, by in state if by == SUM}


def shares(state: Sequence[Aggregated], count: tf.Tensor, before: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
    """Returns what this replica brings to the sums that `assign` takes, float32. Replica code.

    Args:
      state: what the step has assigned.
      count: scalar float32, this replica's examples, by which it weighs in means.
      before: what `summed` read as the step began.
    """
    step = step_context()
    counts = tf.constant(True) if step.present is None else step.present
    if step.mesh.is_sharded:
        counts &= tf.equal(step.mesh.model.rank, 0)
    if is_only_replica():  # each computes the same examples
        counts &= tf.equal(step.mesh.data.rank, 0)
    is_first = tf.equal(step.mesh.everyone.rank, 0)

    def share(variable, by) -> tf.Tensor:
        value = read_local(tf_variable(variable))
        if by == MEAN:
            return tf.where(count > 0, tf.cast(value, tf.float32) * count, 0.0)
        if by == SUM:
            value = _exact_float32(value - before.get(id(variable), value))
            return tf.where(counts, value, tf.zeros_like(value))
        value = _exact_float32(value)
        return tf.where(is_first, value, tf.zeros_like(value))

    return [share(*each) for each in state]


def assign(
    state: Sequence[Aggregated], totals: Sequence[tf.Tensor], count: tf.Tensor, before: Mapping[int, tf.Tensor]
) -> None:
    """Gives each variable its value on all replicas, by the sums of what `shares` returned and of the counts."""
    for (variable, by), total in zip(state, totals, strict=True):
        variable = tf_variable(variable)
        value = tf.math.divide_no_nan(total, count) if by == MEAN else _value(total, variable.dtype)
        if by == SUM:
            value += before[id(variable)] if id(variable) in before else read_local(variable)
        with tf.name_scope(ENGINES_OWN):
            assign_local(variable, value)


@contextlib.contextmanager
def updates_explained(replicas: int) -> Iterator[None]:
    """Raises UsageError where a step updates a variable by a method that variables on replicas do not have."""
    try:
        yield
    except NotImplementedError as error:
        if not (refused := not_implemented(error)):
            raise
        variable, method = refused
        raise UsageError(
            f"{path_of(variable)} {variable.shape.as_list()}: {method} is of one device, and there are {replicas} "
            "replicas; assign the whole value, by assign(tf.tensor_scatter_nd_update(variable, indices, updates)) or "
            "such, and make the variable with synchronization=tf.VariableSynchronization.ON_READ, aggregation="
            "tf.VariableAggregation.ONLY_FIRST_REPLICA if each replica is to keep its own, as a buffer of examples"
        ) from error


def _exact_float32(value: tf.Tensor) -> tf.Tensor:
    """Returns a value as float32 whose sums over replicas are exact: of integers their high and low digits."""
    if value.dtype.is_floating:
        return tf.cast(value, tf.float32)
    value = tf.cast(value, tf.int64)
    return tf.cast(tf.stack([value // _LOW, value % _LOW]), tf.float32)


def _value(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `_exact_float32`."""
    if dtype.is_floating:
        return tf.cast(total, dtype)
    high, low = tf.unstack(tf.cast(total, tf.int64))
    return tf.cast(high * _LOW + low, dtype)


def check(
    graph: tf.Graph,
    batch,
    replicas: int,
    state: Sequence[Aggregated],
    undeclared: Sequence[tf.Variable],
    own: Sequence[tf.Variable],
) -> None:
    """Checks that each variable that a step assigns from its replica's examples has one value afterwards.

    Args:
      graph: in which the step was traced.
      batch: a replica's, as the step takes it.
      replicas: how many there are.
      state: what the reduction makes one.
      undeclared: untrained variables that declare no aggregation.
      own: those that each replica keeps for itself.

    Raises:
      UsageError: nothing says how the replicas' values become one, or they can't.
    """
    known = Assignments(graph, batch, [each.handle for v in own for each in per_replica.components(v)])
    for variable in undeclared:
        if any(known.depend_on_batch(each.handle) for each in per_replica.components(variable)):
            raise UsageError(
                f"{path_of(variable)} {variable.shape.as_list()}: each of {replicas} replicas assigns it by its own "
                "examples, and nothing says how these values become one; make it with aggregation='sum' where the "
                "replicas' additions add up, 'mean', or 'only_first_replica', or assign what "
                "tf.distribute.get_replica_context().all_reduce('sum', ...) makes of the batch (what each replica is "
                "to keep for itself is a tf.Variable with synchronization=tf.VariableSynchronization.ON_READ)"
            )
    for variable, by in state:
        if by == MEAN and not variable.dtype.is_floating:
            raise UsageError(
                f"{path_of(variable)}: its aggregation is the mean, and it holds {variable.dtype.name}; use 'sum' or "
                "'only_first_replica', or make it float32"
            )
        if by == SUM and not all(known.only_add(each.handle) for each in per_replica.components(variable)):
            raise UsageError(
                f"{path_of(variable)} {variable.shape.as_list()}: its aggregation is the sum, by which what replicas "
                "add is added up, and the step assigns it something else than itself plus something; use assign_add, "
                "or sum the batch's share by tf.distribute.get_replica_context().all_reduce('sum', ...) and leave the "
                "aggregation out"
            )
