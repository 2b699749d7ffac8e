"""Contexts in which Keras's layers compute with given values, samples and losses, as replica code needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope

from ..errors import UsageError
from . import graphs
from .keras import all_layers_in, carried_states
from .variables import read_local, update_alone

# TensorFlow's own lists of an object's attributes.
_TRACKED = ("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names")


class _Seeds:
    """Takes the place of Keras's global `SeedGenerator`, of the seeds of `keras.random` without one."""

    def __init__(self, next_seed: Callable[[], tf.Tensor]):
        self._next_seed = next_seed

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self._next_seed()


@contextlib.contextmanager
def unseeded_samples(next_seed: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Makes `keras.random` without a seed, called within, sample by `next_seed()`, [2] int64.

    Otherwise each thread has a generator of its own, with a variable that no checkpoint has.
    """
    with with_attributes(global_state.GLOBAL_STATE_TRACKER, {"global_seed_generator": _Seeds(next_seed)}):
        yield


def added_losses(layer: tf.keras.layers.Layer) -> list[tf.Tensor]:
    """Returns a layer's own additions to the loss in the last traced forward pass."""
    return list(layer._get_own_losses())


def values(variables: Iterable[tf.keras.Variable]) -> list[tf.Tensor]:
    """Reads Keras variables in their own dtypes, even within a layer that computes in 16 bits."""
    with AutocastScope(None):
        return [tf.convert_to_tensor(variable.value) for variable in variables]


@contextlib.contextmanager
def computing_with(values: Sequence[tuple], variables: Sequence = (), tape: tf.GradientTape | None = None):
    """Makes layers compute with these values of variables in this context. Their assignments are made at its end.

    A multiple of a variable's value plus something is computed again from its present value, since others may have
    changed it meanwhile; anything else replaces it.

    Yields:
      The sources for `tape`'s gradients: for each of `variables` its value here, or itself.
    """
    if not values:
        yield variables
        return
    with Scope(values, tf.compat.v1.get_default_graph()) as scope:
        by_id = {id(variable): value for variable, value in values}
        sources = [by_id.get(id(variable), variable) for variable in variables]
        if tape is not None:
            tape.watch([source for source in sources if isinstance(source, tf.Tensor)])
        yield sources
    for variable, value in scope.assigned.values():
        if variable.dtype != "uint32":  # a generator's state, set by each step
            _assign(variable, value, by_id.get(id(variable)))


def _assign(variable: tf.keras.Variable, value: tf.Tensor, before: tf.Tensor | None) -> None:
    kind = graphs.FREE if before is None else graphs.dependence(value, [before])
    target = variable.value  # a tensor within another scope
    if kind not in (graphs.ADDS, graphs.AFFINE) or not isinstance(target, tf.Variable):
        variable.assign(value)
        return
    terms, compute = graphs.to_function(value, before)

    def update(*terms):
        now = read_local(target)
        return tf.raw_ops.AssignAddVariableOp(resource=target.handle, value=compute(now, *terms) - now)

    with tf.name_scope(graphs.ENGINE_SCOPE):
        update_alone(target, terms, update)


def with_states_of_zero(layers: Iterable[tf.keras.layers.Layer]) -> contextlib.AbstractContextManager:
    """Returns a context in which stateful layers begin with zeros, and leave their states as they were."""
    states = carried_states(layers)
    if not states:
        return contextlib.nullcontext()
    return Scope([(state, tf.zeros(state.shape, state.dtype)) for state in states])


def without_assignments() -> contextlib.AbstractContextManager:
    """Returns a context in which layers and metrics compute, and assign no variable."""
    return Scope(())


class Scope(tf.keras.StatelessScope):
    """Keras's scope for computing with given values, which records assignments.

    Gradients pass an assigned value as they pass a variable that was assigned one: to the variable's given value, and
    not to what the assigned one was computed from.

    Args:
      graph: the only one in which assignments are made: in a branch of it they would become unconditional.
    """

    def __init__(self, pairs, graph: tf.Graph | None = None):
        super().__init__(pairs, collect_losses=True, initialize_variables=False)
        self._graph = graph
        self._given = {id(variable): value for variable, value in pairs}
        self.assigned: dict[int, tuple] = {}

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return variable._value if value is None else value  # Keras has none for a regularizer

    def add_update(self, update):
        variable, value = update
        if self._graph not in (None, tf.compat.v1.get_default_graph()):
            raise UsageError(
                f"{variable.path} is assigned within tf.cond, a loop or a tf.function, and with parameter servers at "
                "the step's end alone; assign it outside of these, by tf.where(condition, new, old)"
            )
        self.assigned[id(variable)] = update
        value, given = tf.stop_gradient(value), self._given.get(id(variable))
        if given is not None and given.dtype.is_floating:
            value = tf.custom_gradient(lambda _: (tf.identity(value), lambda upstream: upstream))(given)
        super().add_update((variable, value))


def own_losses(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Tensor]:
    """Returns the scalars that layers added to the loss in the last traced forward pass, e.g. by `add_loss`."""
    return list({id(loss): loss for layer in all_layers_in(layers) for loss in added_losses(layer)}.values())


@contextlib.contextmanager
def eager_variables() -> Iterator[None]:
    """Creates variables immediately in this context, where Keras, tracing shapes, would defer them."""
    with with_attributes(global_state.GLOBAL_STATE_TRACKER, {"stateless_scope": None}), tf.init_scope():
        yield


@contextlib.contextmanager
def with_attributes(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Gives an object of Keras's other attributes in this context, methods among them, which Keras does not track."""
    instance_attributes = vars(owner)
    before = {name: instance_attributes[name] for name in attributes if name in instance_attributes}
    instance_attributes.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            instance_attributes.pop(name, None)
        instance_attributes.update(before)
