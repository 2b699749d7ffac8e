"""Keras's private functions, each behind a name that says what it is for; no other file calls one.

They find what layers hold besides the weights that a step trains, and what they add to its loss.

`tests/engine/internals/test_private_names.py` names those that a new Keras lacks.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.losses import loss as loss_module

from . import graphs
from .variables import assign_local, own_copy, read_local, tf_variable

# A layer's attributes that are lists: all its layers and variables, in the order in which they were added.
KEPT_IN_LISTS = ("_layers", "_trainable_variables", "_non_trainable_variables")
# An optimizer's attribute that has what it updates, which is a model's.
UPDATED = "_trainable_variables"

_divided_by_replicas = loss_module.scale_loss_for_distribution
_undivided: contextvars.ContextVar[bool] = contextvars.ContextVar("undivided", default=False)


def _divided(value):
    """Stands for Keras's function by which each loss object divides its mean by the number of replicas."""
    return value if _undivided.get() else _divided_by_replicas(value)


loss_module.scale_loss_for_distribution = _divided


@contextlib.contextmanager
def undivided_losses() -> Iterator[None]:
    """Has Keras's loss objects that are called within return means over examples, on replicas too.

    Keras divides them by the number of replicas, since its optimizers sum over replicas; the engine divides by counts.
    """
    token = _undivided.set(True)
    try:
        yield
    finally:
        _undivided.reset(token)


def layers_in(layer: tf.keras.layers.Layer, itself: bool = True) -> list[tf.keras.layers.Layer]:
    """Returns a layer, if asked for, and all layers in it, at any depth."""
    return list(layer._flatten_layers(include_self=itself))


def inputs_of(model: tf.keras.layers.Layer) -> Any:
    """Returns the symbolic inputs that a model was made for, in its own form; None where it does not say."""
    own = model.inputs if isinstance(model, tf.keras.Sequential) and model.built else [getattr(model, "input", None)]
    return tf.keras.tree.lists_to_tuples(own[0] if len(own) == 1 else own)


def own_generators(layer: tf.keras.layers.Layer) -> list[tf.keras.random.SeedGenerator]:
    """Returns the seed generators that a layer holds itself, not those of layers in it."""
    return list(getattr(layer, "_seed_generators", ()))


def own_untrained(layer: tf.keras.layers.Layer) -> list[tf.keras.Variable]:
    """Returns the variables that a layer itself has made as non-trainable; frozen ones are not among them."""
    return list(layer._non_trainable_variables)


def added_losses(layer: tf.keras.layers.Layer) -> list[tf.Tensor]:
    """Returns what a layer itself has added to the loss in the forward pass that was traced last."""
    return list(layer._get_own_losses())


def seed_generators(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.random.SeedGenerator]:
    """Returns the seed generators of layers and their parts, in the order of the layers, each once."""
    generators = {id(each): each for inner in all_layers_in(layers) for each in own_generators(inner)}
    return list(generators.values())


def moving_statistics(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Variable]:
    """Returns float variables that layers change in the forward pass, such as batch normalisation's mean and variance.

    Those that a layer made as non-trainable. Frozen weights are not among them, nor is what a frozen
    `BatchNormalization` or an adapted `Normalization` holds: a mean over replicas would round constants.
    """
    moved = {id(each.value): each.value for each in moved_variables(layers)}
    return [variable for variable in moved.values() if variable.dtype.is_floating]


def moved_variables(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the variables, of any type, of which `moving_statistics` are the float ones."""
    variables: list[tf.keras.Variable] = []
    for layer in all_layers_in(layers):
        constant = isinstance(layer, tf.keras.layers.Normalization)
        constant |= isinstance(layer, tf.keras.layers.BatchNormalization) and not layer.trainable
        variables += () if constant else own_untrained(layer)
    return variables


def keeps_means(layer: tf.keras.layers.Layer) -> bool:
    """Returns whether all that a layer assigns is known to be means: it computes by Keras's or the package's code."""
    ours = __package__.split(".")[0]
    module = type(layer).call.__module__
    return module.split(".")[0] in ("keras", ours) or isinstance(layer, tf.keras.layers.BatchNormalization)


def states_of(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns what stateful layers end a batch with and begin the next one with."""
    stateful = [layer for layer in all_layers_in(layers) if getattr(layer, "stateful", False)]
    states = [each for layer in stateful for each in tf.nest.flatten(getattr(layer, "states", None))]
    return [each for each in states if isinstance(each, tf.keras.Variable)]


def values(variables: Iterable[tf.keras.Variable]) -> list[tf.Tensor]:
    """Reads Keras variables, within a layer that computes in 16 bits too, in their own dtypes."""
    with AutocastScope(None):
        return [tf.convert_to_tensor(variable.value) for variable in variables]


@contextlib.contextmanager
def computing_with(values: Sequence[tuple], variables: Sequence = (), tape: tf.GradientTape | None = None):
    """Makes layers compute with values of variables, within. What they assign is assigned in the end.

    Others may have changed a variable meanwhile: a multiple of its value plus something is added to what it is then, as
    a difference. Anything else replaces it.

    Yields:
      What `tape` is to be asked for gradients of: for each of `variables` its value here, or itself.
    """
    if not values:
        yield variables
        return
    with _Scope(values) as scope:
        by_id = {id(variable): value for variable, value in values}
        sources = [by_id.get(id(variable), variable) for variable in variables]
        if tape is not None:
            tape.watch([source for source in sources if isinstance(source, tf.Tensor)])
        yield sources
    for variable, value in scope.assigned.values():
        if variable.dtype != "uint32":  # a generator's state, which each step sets
            _assign(variable, value, by_id.get(id(variable)))


def _assign(variable: tf.keras.Variable, value: tf.Tensor, before: tf.Tensor | None) -> None:
    kind = graphs.FREE if before is None else graphs.dependence(value, [before])
    own = variable.value  # a tensor, where this is within another scope
    if kind in (graphs.ADDS, graphs.AFFINE) and isinstance(own, tf.Variable):
        own.assign_add(value - before, read_value=False)
    else:
        variable.assign(value)


class _Scope(tf.keras.StatelessScope):
    """Keras's way to compute with given values, which keeps what is assigned meanwhile to itself."""

    def __init__(self, pairs):
        super().__init__(pairs, collect_losses=True, initialize_variables=False)
        self.assigned = {}

    def add_update(self, update):
        super().add_update(update)
        self.assigned[id(update[0])] = update


def steady_variables(layers: Sequence[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the layers' float variables that a forward pass leaves unchanged: all but moving statistics."""
    moving = {id(variable) for variable in moving_statistics(layers)}
    floating = {id(v.value): v for layer in layers for v in layer.variables if v.value.dtype.is_floating}
    return [variable for key, variable in floating.items() if key not in moving]


def layers_of(layers: Iterable[tf.keras.layers.Layer], trained: Sequence) -> list[tf.keras.layers.Layer]:
    """Returns the layers that an update of `trained` concerns: all but those whose weights are all others."""
    theirs = {id(variable) for variable in trained}
    return [
        layer
        for layer in layers
        if not layer.trainable_weights or any(id(weight) in theirs for weight in layer.trainable_weights)
    ]


def own_losses(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Tensor]:
    """Returns scalars that layers added in the last traced forward pass: `add_loss`, activity regularizers."""
    return list({id(loss): loss for layer in all_layers_in(layers) for loss in added_losses(layer)}.values())


def regularization(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Tensor]:
    """Returns the regularizers' values of the layers' trainable weights, each weight once. Scalars."""
    weights = {id(weight): weight for layer in layers for weight in layer.trainable_weights}
    return [weight.regularizer(weight) for weight in weights.values() if weight.regularizer is not None]


def in_float32(outputs: tf.Tensor) -> tf.Tensor:
    """Returns a layer's outputs in float32, with the mask that Keras has put to them."""
    converted = tf.cast(outputs, tf.float32)
    if (mask := backend.get_keras_mask(outputs)) is not None:
        backend.set_keras_mask(converted, mask)
    return converted


def all_layers_in(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.layers.Layer]:
    """Returns layers and all layers in them, at any depth."""
    return [inner for layer in layers for inner in layers_in(layer)]


def new_state() -> dict[str, Any]:
    """Gives Keras its state in this thread as a new process has it (names, policy, seed), and returns what it had."""
    return exchange_state({})


def exchange_state(state: dict[str, Any]) -> dict[str, Any]:
    """Gives Keras in this thread a state that `new_state` or this has returned, and returns what it had."""
    own = vars(global_state.GLOBAL_STATE_TRACKER)  # a threading.local
    before = dict(own)
    own.clear()
    own.update(state)
    return before


@contextlib.contextmanager
def eager_variables() -> Iterator[None]:
    """Makes variables at once that are created in this context, where Keras only traces shapes and would defer them."""
    before = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with tf.init_scope():
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", before)


def belongs_to_current_strategy(optimizer: tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer was made in the scope of the strategy that is current now."""
    return optimizer._distribution_strategy is tf.distribute.get_strategy()


def computing_alone(model: tf.keras.Model) -> Callable[..., Any]:
    """Returns a function that calls a method of a model, such as `predict`, so that it computes in this process alone.

    Keras's own divides the work among the replicas of the model's strategy, and waits for those of other processes.
    Within, each variable is this process's first copy, and there is no strategy.
    """
    own: dict[str, Any] = {"_distribute_strategy": None, "predict_function": None, "test_function": None}

    def call(method: str, *arguments, **keywords):
        variables = {id(each): each for each in [*model.variables, *model.metrics_variables]}.values()
        shared = [(model, {name: vars(model)[name] for name in own})]
        shared += [(each, {"_value": each._value}) for each in variables]
        vars(model).update(own)
        for each in variables:
            each._value = own_copy(each._value)
        try:
            return getattr(model, method)(*arguments, **keywords)
        finally:
            own.update((name, vars(model)[name]) for name in own)  # compiled once
            for each, values in shared:
                vars(each).update(values)

    return call


def own_rate(optimizer: tf.keras.optimizers.Optimizer) -> Any:
    """Returns what an optimizer takes its learning rate from: a variable, a schedule or another callable."""
    return optimizer._learning_rate


def decays(optimizer: tf.keras.optimizers.Optimizer, variable: Any) -> bool:
    """Returns whether an optimizer's weight decay applies to a variable (`exclude_from_weight_decay`)."""
    return optimizer._use_weight_decay(variable)


def learning_rate(optimizer: tf.keras.optimizers.Optimizer, updates_ago: int) -> Any:
    """Returns an optimizer's own rate; a schedule's, that of so many updates ago."""
    schedule = own_rate(optimizer)
    if updates_ago and isinstance(schedule, tf.keras.optimizers.schedules.LearningRateSchedule):
        return schedule(tf.maximum(optimizer.iterations - updates_ago, 0))
    return optimizer.learning_rate


def rate_of(optimizer: tf.keras.optimizers.Optimizer) -> Any:
    """Returns an optimizer's schedule, or what else it was given in its place, or a number."""
    rate = optimizer._learning_rate
    return rate if callable(rate) else float(optimizer.learning_rate.numpy())


def update_here(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Makes an optimizer update only this replica's variables, by `update`: Keras's own step would reduce first."""
    if not isinstance(optimizer, _LocalUpdates):
        optimizer.__class__ = type(type(optimizer).__name__, (type(optimizer), _LocalUpdates), {})


def update(
    optimizer: tf.keras.optimizers.Optimizer, gradients: list, variables: list, rates: list, counts: list[tf.Tensor]
) -> None:
    """Applies an optimizer's rule, and counts the step. Replica code.

    Args:
      optimizer: prepared by `update_here`.
      gradients: of the variables.
      variables: of this replica, some of those that the optimizer was built for.
      rates: for each variable its rate, and how many updates it has had, int64 scalars.
      counts: the updates of each variable for which the optimizer was built.
    """
    optimizer.most_updates = tf.reduce_max(tf.stack(counts))
    optimizer._backend_update_step(gradients, variables, rates)
    if optimizer.use_ema:
        _average(optimizer, counts)
    tf.raw_ops.AssignAddVariableOp(resource=optimizer._iterations.value.handle, value=tf.ones([], tf.int64))


def averages(optimizer: tf.keras.optimizers.Optimizer) -> list[tuple[tf.Variable, tf.Variable]]:
    """Returns the variables that an optimizer with `use_ema` updates, each with its average."""
    shadows = [tf_variable(shadow) for shadow in optimizer._model_variables_moving_average]
    return list(zip(map(tf_variable, optimizer._trainable_variables), shadows, strict=True))


def _average(optimizer: tf.keras.optimizers.Optimizer, counts: list[tf.Tensor]) -> None:
    """Moves the averages of the weights, and puts them into the weights where that is due, as Keras does. Replica code.

    Their first values are the weights' after the first update.
    """
    every = optimizer.ema_overwrite_frequency
    is_due = every and (read_local(optimizer._iterations.value) + 1) % every == 0
    for (variable, shadow), done in zip(averages(optimizer), counts, strict=True):
        momentum = tf.where(done > 0, optimizer.ema_momentum, 0.0)
        value, share = read_local(variable), tf.cast(momentum, variable.dtype)
        average = share * read_local(shadow) + (1 - share) * value
        assign_local(shadow, average)
        if every:
            assign_local(variable, tf.where(is_due, average, value))


class _LocalUpdates(tf.keras.optimizers.Optimizer):
    """Stands between a Keras optimizer's class and Keras's base class, where the all-reduce is.

    What some rules do once a step (Nadam's product of momenta) is in their `_backend_update_step`,
    which ends in a call of its super's: here it arrives at the bare rule.
    """

    most_updates = None  # while it updates: how many updates the variable has had that was updated most often
    own_updates = None  # while a variable is updated: how many updates it has had

    @property
    def iterations(self):
        counts = (each for each in (self.own_updates, self.most_updates) if each is not None)
        return next(counts, super().iterations)

    def _backend_update_step(self, gradients, variables, learning_rates):
        try:
            for gradient, variable, (rate, self.own_updates) in zip(gradients, variables, learning_rates, strict=True):
                self.update_step(gradient, variable, rate)
        finally:
            self.own_updates = self.most_updates = None
