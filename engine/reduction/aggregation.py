"""Aggregates the values that replicas assign to a variable in a step, by its declared `tf.VariableAggregation`.

Layers compute state from their replica's examples, such as batch normalization's moving statistics or a codebook's
counts. TensorFlow would aggregate at each assignment, by a sum that may not be in a loop and would count padded
examples. Here each replica assigns its own copy, and the copies are aggregated with the sum of the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..internals.graphs import ENGINE_SCOPE, Assignments, writes
from ..internals.tensorflow import is_only_replica
from ..internals.variables import assign_local, read_local, tf_variable, variable_path
from ..step.context import step_context
from . import per_replica

MEAN, SUM = tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM
_LOW = 1 << 12  # integers are sent as two float32, whose sums over thousands of replicas are exact
_RNN_STATE = "rnn_state"  # Keras's name for a stateful layer's state


class Aggregated(NamedTuple):
    """A variable that each replica assigns by itself in a step, and how the values are aggregated.

    `by` is MEAN, weighted by examples; SUM, the old value plus all replicas' additions; or ONLY_FIRST_REPLICA.
    """

    variable: tf.Variable
    by: tf.VariableAggregation = MEAN


@contextlib.contextmanager
def declared() -> Iterator[dict[int, Aggregated]]:
    """Makes each replica assign the untrained variables created in this context by itself.

    Enter it on the host, in the strategy's scope.

    Yields:
      Those with a declared aggregation, by the `id` of the tf.Variable. Excluded are those that synchronize on read,
      and the state of Keras's stateful layers, which is separate on each replica (`per_replica`).
    """
    by_id: dict[int, Aggregated] = {}

    def create(next_creator, **keywords):
        if keywords.get("name") == _RNN_STATE:
            return per_replica.create_own(next_creator, **keywords)
        by = keywords.get("aggregation") or tf.VariableAggregation.NONE
        on_read = keywords.get("synchronization") == tf.VariableSynchronization.ON_READ
        if by == tf.VariableAggregation.NONE or on_read or keywords.get("trainable") is not False:
            return next_creator(**keywords)
        # With the declared one TensorFlow would aggregate at each assignment, by a sum that may not be in a loop.
        variable = next_creator(**{**keywords, "aggregation": tf.VariableAggregation.NONE})
        by_id[id(variable)] = Aggregated(variable, by)
        return variable

    with tf.variable_creator_scope(create):
        yield by_id


def terms(state: Sequence[Aggregated], count: tf.Tensor, before: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
    """Returns this replica's terms of the sums for `assign`, float32. Replica code.

    Args:
      state: the variables that the step has assigned.
      count: scalar float32, this replica's number of examples, its weight in means.
      before: the values of `Reduction.values_at_start`, read as the step began.
    """
    step = step_context()
    counts = tf.constant(True) if step.has_examples is None else step.has_examples
    if step.mesh.is_sharded:
        counts &= tf.equal(step.mesh.model.rank, 0)
    if is_only_replica():  # each computes the same examples
        counts &= tf.equal(step.mesh.data.rank, 0)
    is_first = tf.equal(step.mesh.all_replicas.rank, 0)

    def term(variable: Any, by: tf.Tensor) -> tf.Tensor:
        value = read_local(tf_variable(variable))
        if by == MEAN:
            # Chosen, not multiplied by 0: the statistics of a padded empty batch may be NaN.
            return tf.where(count > 0, tf.cast(value, tf.float32) * count, 0.0)
        if by == SUM:
            value = _exact_float32(value - before.get(id(variable), value))
            return tf.where(counts, value, tf.zeros_like(value))
        value = _exact_float32(value)
        return tf.where(is_first, value, tf.zeros_like(value))

    return [term(variable, by) for variable, by in state]


def assign(
    state: Sequence[Aggregated], totals: Sequence[tf.Tensor], count: tf.Tensor, before: dict[int, tf.Tensor]
) -> None:
    """Assigns each variable its aggregated value on all replicas, from the sums of `terms` and of the counts.

    The values of those to which replicas add are then the ones in `before`. The step's start values note which ops have
    written the variables so far, for `assigned_since_sum`.
    """
    for (variable, by), total in zip(state, totals, strict=True):
        variable = tf_variable(variable)
        if by == MEAN:
            value = tf.math.divide_no_nan(total, count)
        elif variable.dtype.is_floating:
            value = tf.cast(total, variable.dtype)
        else:  # as `_exact_float32` divides them
            high, low = tf.unstack(tf.cast(total, tf.int64))
            value = tf.cast(high * _LOW + low, variable.dtype)
        if by == SUM:
            value += before[id(variable)] if id(variable) in before else read_local(variable)
            before[id(variable)] = value
        with tf.name_scope(ENGINE_SCOPE):
            assign_local(variable, value)
    counts, noted = writes(), step_context().start_values.aggregated
    noted.update((id(variable), counts[id(tf_variable(variable).handle)]) for variable, _ in state)


def assigned_since_sum(
    state: Sequence[Aggregated], batch: Any, per_replica_variables: Sequence[tf.Variable]
) -> list[Aggregated]:
    """Finds the variables whose values may differ by replica: a step assigned them after it last aggregated them.

    Replica code; the same on all replicas. What replicas add always counts, the mean of equal values does not.

    Args:
      per_replica_variables: the variables of which each replica keeps its own value.
    """
    counts, before = writes(), step_context().start_values.aggregated

    def handle(variable: Any) -> tf.Tensor:
        return tf_variable(variable).handle

    late = [one for one in state if counts[id(handle(one.variable))] > before.get(id(one.variable), 0)]
    if not late:
        return []
    copies = [handle(variable) for variable in per_replica_variables]
    assignments = Assignments(tf.compat.v1.get_default_graph(), batch, copies, since_sum=True)
    return [one for one in late if one.by != MEAN or assignments.depend_on_batch(handle(one.variable))]


def _exact_float32(value: tf.Tensor) -> tf.Tensor:
    """Returns a value as float32 whose sums across replicas are exact: for integers, their high and low digits."""
    if value.dtype.is_floating:
        return tf.cast(value, tf.float32)
    value = tf.cast(value, tf.int64)
    return tf.cast(tf.stack([value // _LOW, value % _LOW]), tf.float32)


def described(variable: tf.Variable) -> str:
    """Returns a variable's path and shape, for messages."""
    return f"{variable_path(variable)} {variable.shape.as_list()}"
