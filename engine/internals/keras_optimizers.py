"""Applies Keras's optimizers to a replica's own variables, without Keras's sum across replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .keras_scopes import with_attributes
from .variables import assign_local, read_local, tf_variable


def scope_strategy(owner: tf.keras.Model | tf.keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a model or an optimizer was created; TensorFlow's default without one."""
    is_optimizer = isinstance(owner, tf.keras.optimizers.Optimizer)
    return owner._distribution_strategy if is_optimizer else owner.distribute_strategy


def belongs_to_current_strategy(owner: tf.keras.Model | tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether a model or an optimizer was created in the current strategy's scope, or without one."""
    return scope_strategy(owner) is tf.distribute.get_strategy()


def build_with_slots(
    optimizer: tf.keras.optimizers.Optimizer, variables: Sequence
) -> dict[int, list[tuple[tf.Variable, Callable]]]:
    """Builds an optimizer, and returns the slots of the shape of a variable, with their initializers, by its `id`."""
    slots: dict[int, list[tuple[tf.Variable, Callable]]] = {}
    add = optimizer.add_variable_from_reference

    def record(reference_variable, name=None, initializer="zeros"):
        slot = add(reference_variable, name=name, initializer=initializer)
        entries = slots.setdefault(id(tf_variable(reference_variable)), [])
        entries.append((tf_variable(slot), tf.keras.initializers.get(initializer)))
        return slot

    with with_attributes(optimizer, {"add_variable_from_reference": record}):
        optimizer.build(variables)
    return slots


def own_rate(optimizer: tf.keras.optimizers.Optimizer) -> Any:
    """Returns the source of an optimizer's learning rate: a variable, a schedule or another callable."""
    return optimizer._learning_rate


def decays(optimizer: tf.keras.optimizers.Optimizer, variable: Any) -> bool:
    """Returns whether an optimizer's weight decay applies to a variable (`exclude_from_weight_decay`)."""
    return optimizer._use_weight_decay(variable)


def learning_rate(optimizer: tf.keras.optimizers.Optimizer, updates_ago: int) -> Any:
    """Returns an optimizer's rate; for a schedule, its rate the given number of updates ago."""
    schedule = own_rate(optimizer)
    if updates_ago and isinstance(schedule, tf.keras.optimizers.schedules.LearningRateSchedule):
        return schedule(tf.maximum(optimizer.iterations - updates_ago, 0))
    return optimizer.learning_rate


def schedule_or_rate(optimizer: tf.keras.optimizers.Optimizer) -> Any:
    """Returns an optimizer's schedule, another callable, or a number."""
    rate = optimizer._learning_rate
    return rate if callable(rate) else float(optimizer.learning_rate.numpy())


def update(
    optimizer: tf.keras.optimizers.Optimizer, gradients: list, variables: list, rates: list, counts: list[tf.Tensor]
) -> None:
    """Applies an optimizer's rule to this replica's variables alone, and counts the step. Replica code.

    Args:
      variables: variables of this replica, some of those that the optimizer was built for.
      rates: for each variable, its learning rate and its number of updates, an int64 scalar.
      counts: numbers of updates of all variables for which the optimizer was built.
    """
    kind = type(optimizer)
    # Its class is another one only here: callbacks, and a later `fit` of Keras's, find its own class.
    optimizer.__class__ = type(kind.__name__, (kind, _LocalUpdates), {})
    try:
        optimizer.most_updates = tf.reduce_max(tf.stack(counts))
        optimizer._backend_update_step(gradients, variables, rates)
    finally:
        optimizer.__class__ = kind
    if optimizer.use_ema:
        _average(optimizer, counts)
    tf.raw_ops.AssignAddVariableOp(resource=optimizer._iterations.value.handle, value=tf.ones([], tf.int64))


def averages(optimizer: tf.keras.optimizers.Optimizer) -> list[tuple[tf.Variable, tf.Variable]]:
    """Returns the variables that an optimizer with `use_ema` updates, each with its average."""
    shadows = [tf_variable(shadow) for shadow in optimizer._model_variables_moving_average]
    return list(zip(map(tf_variable, optimizer._trainable_variables), shadows, strict=True))


def _average(optimizer: tf.keras.optimizers.Optimizer, counts: list[tf.Tensor]) -> None:
    """Updates the averages of the weights, and writes them to the weights if due, as Keras does. Replica code.

    Their first values are the weights' after the first update.
    """
    every = optimizer.ema_overwrite_frequency
    is_due = every and (read_local(optimizer._iterations.value) + 1) % every == 0
    for (variable, shadow), done in zip(averages(optimizer), counts, strict=True):
        momentum = tf.where(done > 0, optimizer.ema_momentum, 0.0)
        value, fraction = read_local(variable), tf.cast(momentum, variable.dtype)
        average = fraction * read_local(shadow) + (1 - fraction) * value
        assign_local(shadow, average)
        if every:
            assign_local(variable, tf.where(is_due, average, value))


def is_multi_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer consists of optimizers for parts of a model (Keras 3.15 and later)."""
    return isinstance(optimizer, getattr(tf.keras.optimizers, "MultiOptimizer", ()))


def override_beside_rule(optimizer: tf.keras.optimizers.Optimizer) -> str | None:
    """Returns the name of a method that an optimizer's class overrides and `update` does not call, or None.

    These are the parts of Keras's `apply` other than the rule: the engine sums, clips, decays and averages itself.
    Muon's decay, which is Keras's own, has a check of its own (`engine.optimizers.keras_adapter`).
    """
    for method in _BESIDE_RULE:
        defining_class = next(kind for kind in type(optimizer).__mro__ if method in vars(kind))
        checked_elsewhere = method == "_apply_weight_decay" and defining_class is tf.keras.optimizers.Muon
        if not issubclass(tf.keras.optimizers.Optimizer, defining_class) and not checked_elsewhere:
            return method
    return None


_BESIDE_RULE = (
    "apply",
    "apply_gradients",
    "_apply_weight_decay",
    "_all_reduce_sum_gradients",
    "_backend_apply_gradients",
    "_backend_increment_gradient_accumulators",
    "_backend_reset_gradient_accumulators",
    "_clip_by_norm",
    "_clip_gradients",
    "_distributed_tf_update_step",
    "_filter_empty_gradients",
    "_overwrite_model_variables_with_average_value",
    "_overwrite_variable_with_gradient",
    "_overwrite_variables_directly_with_gradients",
    "_update_model_variables_moving_average",
    "finalize_variable_values",
    "scale_loss",
)


def acts_once_per_step(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether a rule does more in a step than to update each variable, see `_LocalUpdates`."""
    return type(optimizer)._backend_update_step is not tf.keras.optimizers.Optimizer._backend_update_step


class _LocalUpdates(tf.keras.optimizers.Optimizer):
    """Is inserted between a Keras optimizer's class and Keras's base class, which has the all-reduce.

    Some rules do something once per step (Nadam's product of momenta) in `_backend_update_step`, which ends in a call
    of its super's: here, the bare rule.
    """

    most_updates = None  # during an update: the largest number of updates of a variable
    own_updates = None  # during a variable's update: its number of updates

    @property
    def iterations(self):
        counts = (count for count in (self.own_updates, self.most_updates) if count is not None)
        return next(counts, super().iterations)

    def _backend_update_step(self, gradients, variables, learning_rates):
        try:
            for gradient, variable, (rate, self.own_updates) in zip(gradients, variables, learning_rates, strict=True):
                self.update_step(gradient, variable, rate)
        finally:
            for name in ("own_updates", "most_updates"):
                self.__dict__.pop(name, None)
