"""Finds what Keras layers hold beside the weights that a step trains, and what they add to its loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from crankshaft.engine.internals import keras


def moving_statistics(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Variable]:
    """Returns float variables that layers change in the forward pass, such as batch normalisation's mean and variance.

    Those that a layer made as non-trainable. Frozen weights are not among them, nor is what a frozen
    `BatchNormalization` or an adapted `Normalization` holds: a mean over replicas would round constants.
    """
    found = {}
    for layer in _parts(layers):
        constant = isinstance(layer, tf.keras.layers.Normalization)
        constant |= isinstance(layer, tf.keras.layers.BatchNormalization) and not layer.trainable
        for variable in () if constant else keras.own_untrained(layer):
            if variable.value.dtype.is_floating:
                found[id(variable.value)] = variable.value
    return list(found.values())


def steady_variables(layers: Sequence[tf.keras.layers.Layer]) -> list[tf.keras.Variable]:
    """Returns the layers' float variables that a forward pass leaves unchanged: all but moving statistics."""
    moving = {id(variable) for variable in moving_statistics(layers)}
    found = {id(v.value): v for layer in layers for v in layer.variables if v.value.dtype.is_floating}
    return [variable for place, variable in found.items() if place not in moving]


def concerned(layers: Iterable[tf.keras.layers.Layer], trained: Sequence) -> list[tf.keras.layers.Layer]:
    """Returns the layers that an update of `trained` concerns: all but those whose weights are all others."""
    theirs = {id(variable) for variable in trained}
    return [
        layer
        for layer in layers
        if not layer.trainable_weights or any(id(weight) in theirs for weight in layer.trainable_weights)
    ]


def own_losses(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Tensor]:
    """Returns scalars that layers added in the last traced forward pass: `add_loss`, activity regularizers."""
    return list({id(loss): loss for layer in _parts(layers) for loss in keras.added_losses(layer)}.values())


def regularization(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Tensor]:
    """Returns the regularizers' values of the layers' trainable weights, each weight once. Scalars."""
    weights = {id(weight): weight for layer in layers for weight in layer.trainable_weights}
    return [weight.regularizer(weight) for weight in weights.values() if weight.regularizer is not None]


def _parts(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.layers.Layer]:
    return [part for layer in layers for part in keras.parts(layer)]
