"""Keras's layers and their variables: which there are, and which are trained, moved or carried from step to step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank

from . import graphs
from .keras_calls import Trainable, overrides
from .keras_state import in_new_state

# A layer's lists of all its layers, variables and metrics, in the order of creation.
KEPT_IN_LISTS = ("_layers", "_trainable_variables", "_non_trainable_variables", "_metrics")
# An optimizer's attribute with the variables that it updates, which belong to a model.
UPDATED = "_trainable_variables"


def layers_in(layer: tf.keras.layers.Layer, itself: bool = True) -> list[tf.keras.layers.Layer]:
    """Returns all layers in a layer, at any depth, with `itself` including the layer."""
    return list(layer._flatten_layers(include_self=itself))


def own_untrained(layer: tf.keras.layers.Layer) -> list[tf.keras.Variable]:
    """Returns the variables that a layer itself created as non-trainable; no frozen ones."""
    return list(layer._non_trainable_variables)


def frozen_weights(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the variables that layers created as trainable and that are not trained, such as a target network's."""
    return [v for layer in all_layers_in(layers) for v in layer._trainable_variables if not v.trainable]


def trainable_flags(layers: Iterable[tf.keras.layers.Layer]) -> list[list]:
    """Returns [class, whether it is trainable] of all layers, each before those in it, and [name, ...] of weights."""
    owners = _with_flags(layers)  # a layer's name has a number, which is another in the next process
    return [[x.name if isinstance(x, tf.keras.Variable) else type(x).__name__, x.trainable] for x in owners]


def set_trainable(layers: Iterable[tf.keras.layers.Layer], flags: list[list]) -> None:
    """Sets what `trainable_flags` returned; a layer's also sets those in it, which come later."""
    for owner, (_, is_trainable) in zip(_with_flags(layers), flags, strict=True):
        if owner.trainable != is_trainable:
            owner.trainable = is_trainable


def _with_flags(layers: Iterable[tf.keras.layers.Layer]) -> list[Any]:
    found = all_layers_in(layers)
    return [*found, *(variable for layer in found for variable in layer._trainable_variables)]


def metric_variables(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the totals and counts of the metrics that layers have."""
    return [v for layer in all_layers_in(layers) for metric in layer._metrics for v in metric.variables]


def seed_generators(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.random.SeedGenerator]:
    """Returns the seed generators of layers and their sublayers, in order, each once."""
    found = {id(one): one for layer in all_layers_in(layers) for one in getattr(layer, "_seed_generators", ())}
    return list(found.values())


def moving_statistics(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Variable]:
    """Returns float variables that layers change in the forward pass, such as batch normalization's mean and variance.

    Only variables created as non-trainable; no frozen weights, and none of a frozen `BatchNormalization` or an adapted
    `Normalization`: a mean across replicas would round constants.
    """
    moved = {id(variable.value): variable.value for variable in moved_variables(layers)}
    return [variable for variable in moved.values() if variable.dtype.is_floating]


def moved_variables(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the variables of any dtype whose float ones are `moving_statistics`."""
    variables: list[tf.keras.Variable] = []
    for layer in all_layers_in(layers):
        constant = isinstance(layer, tf.keras.layers.Normalization)
        constant |= isinstance(layer, tf.keras.layers.BatchNormalization) and not layer.trainable
        variables += () if constant else own_untrained(layer)
    return variables


def keeps_means(layer: tf.keras.layers.Layer) -> bool:
    """Returns whether a layer is known to assign only means, since it runs Keras's or the package's code."""
    if isinstance(layer, Trainable) and overrides(layer, "train_step"):
        return False  # a step of its own assigns whatever it likes
    ours = __package__.split(".")[0]
    module = type(layer).call.__module__
    return module.split(".")[0] in ("keras", ours) or isinstance(layer, tf.keras.layers.BatchNormalization)


def carried_states(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the states that stateful layers carry from batch to batch."""
    stateful = [layer for layer in all_layers_in(layers) if getattr(layer, "stateful", False)]
    states = [state for layer in stateful for state in tf.nest.flatten(getattr(layer, "states", None))]
    return [state for state in states if isinstance(state, tf.keras.Variable)]


def steady_variables(layers: Sequence[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the layers' float variables that a forward pass does not change: all but moving statistics."""
    moving = {id(variable) for variable in moving_statistics(layers)}
    floating = {id(v.value): v for layer in layers for v in layer.variables if v.value.dtype.is_floating}
    return [variable for key, variable in floating.items() if key not in moving]


def affected_layers(layers: Iterable[tf.keras.layers.Layer], trained: Sequence) -> list[tf.keras.layers.Layer]:
    """Returns the layers that training `trained` affects: all except those with only other weights."""
    theirs = {id(variable) for variable in trained}
    return [
        layer
        for layer in layers
        if not layer.trainable_weights or any(id(weight) in theirs for weight in layer.trainable_weights)
    ]


def reads_losses(total: tf.Tensor, added: Sequence[tf.Tensor] = ()) -> bool:
    """Returns whether a tensor is computed from a layer's `losses`.

    These are what it `added`, and its regularizers', which are new tensors at each read.
    """
    is_read = graphs.computed_in(total, "losses", inspect.getfile(tf.keras.layers.Layer))
    return is_read or graphs.dependence(total, added) != graphs.FREE


def all_layers_in(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.layers.Layer]:
    """Returns layers and all layers in them, at any depth."""
    return [inner for layer in layers for inner in layers_in(layer)]


@functools.cache
def attributes() -> frozenset[str]:
    """Returns the names of all attributes, methods among them, that Keras gives every layer and model."""
    with in_new_state():
        return frozenset({"optimizer", "stop_training", *dir(tf.keras.Model())})


def without_missing(labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Replaces labels [batch, ...] that are not finite by 0 where their weights, [batch] or [batch, ...], are 0.

    A missing label may be NaN. Its loss times 0 would be NaN, and so would its gradient.
    """
    if not labels.dtype.is_floating:
        return labels
    weights = squeeze_or_expand_to_same_rank(labels, expand_to_rank(weights, labels.shape.rank))[1]
    return tf.where((weights == 0) & ~tf.math.is_finite(labels), tf.zeros_like(labels), labels)


def expand_to_rank(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """Adds axes of size 1 to weights, up to a rank."""
    return tf.reshape(weights, [*tf.unstack(tf.shape(weights)), *[1] * (rank - weights.shape.rank)])
