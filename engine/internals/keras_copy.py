"""Copies a compiled Keras model: clones it from its configuration, and copies the rest."""

from __future__ import annotations

import functools
import tempfile
import types
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.saving.serialization_lib import SafeModeScope

from .keras import layers_in
from .keras_scopes import with_attributes
from .keras_state import in_new_state

# Attributes of layers and variables that configurations may omit, and that are copied unchanged.
_LAYER_ATTRIBUTES = ("name", "_path", "_dtype_policy", "activity_regularizer", "autocast")
_VARIABLE_ATTRIBUTES = ("_name", "_path", "trainable", "regularizer", "constraint")
_COMPARED_BY_PARTS = (tf.keras.layers.Layer, tf.keras.Variable, tf.keras.metrics.Metric, tf.keras.optimizers.Optimizer)
_OTHER_IN_A_COPY = (tf.keras.KerasTensor, tf.keras.random.SeedGenerator)
_VALUES = (bool, int, float, str, bytes, type(None), np.generic, np.ndarray, tf.Tensor, tf.DType, tf.TensorShape)


def copied(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a new, uncompiled model with the same layers and new weights.

    Keras's errors, e.g. for a class without a configuration, are passed on.
    """
    compiled, model.compiled = model.compiled, False  # else Keras would also create the optimizer's variables
    try:
        with SafeModeScope(False):  # the objects exist here, and are not read from a file
            # Functional models, which may be of a class of the user's, have this method.
            if isinstance(model, tf.keras.Sequential) or hasattr(model, "_run_through_graph"):
                return tf.keras.models.clone_model(model, clone_function=_copied_layer, recursive=True)
            return _made_again(model)
    finally:
        model.compiled = compiled


def _copied_layer(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    return layer if isinstance(layer, tf.keras.layers.Lambda) else _made_again(layer)  # a function loses its globals


def _made_again(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    return type(layer).from_config(layer.get_config())


def complete(source: tf.keras.Model, copy: tf.keras.Model) -> None:
    """Copies everything that the configuration omits, so that the copy computes and trains like its source.

    For each layer: `trainable`, dtype policy, name, attributes that are plain values or arrays, and its variables'
    regularizers, constraints and paths. Both models are built, or neither.

    Raises:
      ValueError: names a difference that can't be copied.
    """
    theirs, mine = layers_in(source), layers_in(copy)
    if [*map(type, theirs)] != [*map(type, mine)]:
        raise ValueError(f"{len(theirs)} layers become {len(mine)}, or others")
    for pair in zip(theirs, mine, strict=True):
        if pair[0] is not pair[1] and not isinstance(pair[0], tf.keras.layers.InputLayer):
            _complete_layer(*pair)


def _complete_layer(theirs: tf.keras.layers.Layer, mine: tf.keras.layers.Layer) -> None:
    layer_name = f"{type(theirs).__name__} {theirs.path or theirs.name}"
    mine.trainable = theirs.trainable  # also sets its sublayers, which come later and are set again
    vars(mine).update((name, vars(theirs)[name]) for name in _LAYER_ATTRIBUTES)
    ours, others = ([*layer._trainable_variables, *layer._non_trainable_variables] for layer in (theirs, mine))
    if len(ours) != len(others):
        raise ValueError(
            f"{layer_name} has {len(ours)} variables, and its copy has {len(others)}, as after enable_lora"
        )
    for variable, other in zip(ours, others, strict=True):
        if (described := _shape_and_dtype(variable)) != _shape_and_dtype(other):
            raise ValueError(f"{variable.path} is {described}, and in the copy {_shape_and_dtype(other)}")
        for name in _VARIABLE_ATTRIBUTES:
            setattr(other, name, getattr(variable, name))
    for name, value in _differing(theirs, mine, _keras_attributes()):
        if _is_plain(value):
            vars(mine)[name] = value
        elif name in vars(mine):
            raise ValueError(f"{layer_name} has another {name}, which its get_config does not return")


def _shape_and_dtype(variable: tf.keras.Variable) -> str:
    return f"{variable.dtype}{[*variable.shape]}"


@functools.cache
def _keras_attributes() -> frozenset[str]:
    """Returns the attributes of layers and models that are Keras's own."""
    with in_new_state():
        inputs = tf.keras.Input([1])
        blank = tf.keras.Model(inputs, tf.keras.layers.Identity()(inputs))
        blank.compile(optimizer=None)
        return frozenset(vars(blank))


def _differing(theirs: Any, mine: Any, but: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yields an object's attributes, by name, that its copy lacks or has with another value."""
    for name, value in [*vars(theirs).items()]:
        if name not in but and not (name in vars(mine) and _equal(value, vars(mine)[name])):
            yield name, value


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two attributes are equal, if that can be decided; layers and the like are compared elsewhere."""
    if one is other or isinstance(one, (*_COMPARED_BY_PARTS, *_OTHER_IN_A_COPY)):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, types.MethodType):
        return isinstance(other, types.MethodType) and one.__func__ is other.__func__
    if isinstance(one, types.FunctionType):
        return isinstance(other, types.FunctionType) and one.__code__ is other.__code__
    if isinstance(one, (np.ndarray, tf.Tensor)):
        return isinstance(other, (np.ndarray, tf.Tensor)) and np.array_equal(one, other)
    if hasattr(one, "get_config") and type(one) is type(other):
        try:
            return _equal(one.get_config(), other.get_config())
        except NotImplementedError:
            return True
    if type(one).__eq__ is object.__eq__ and type(one) is type(other):
        return True
    return bool(one == other)


def _is_plain(value: Any) -> bool:
    """Returns whether a copy may share an object: a value, or a collection of values."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    is_free = isinstance(value, types.FunctionType) and value.__closure__ is None
    return is_free or isinstance(value, (*_VALUES, types.BuiltinFunctionType, type))


def copy_state(source: tf.keras.Model, copy: tf.keras.Model) -> None:
    """Copies the weights and lookup tables of a model to the layers of its copy by `copied`."""
    for theirs, mine in zip(layers_in(source), layers_in(copy), strict=True):
        store: dict[str, Any] = {}
        theirs.save_own_variables(store)
        if store:
            mine.load_own_variables(store)
        if hasattr(theirs, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                theirs.save_assets(folder)
                mine.load_assets(folder)


def optimizer_config(optimizer: tf.keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's configuration, in which a schedule is the object itself: it need not have `get_config`."""
    rate = optimizer._learning_rate
    if not callable(rate):
        return optimizer.get_config()
    with with_attributes(optimizer, {"_learning_rate": None}):
        return {**optimizer.get_config(), "learning_rate": rate}


def copied_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
    """Returns a new optimizer of the same class, rate, settings and exclusions, without updates."""
    copy = type(optimizer).from_config(optimizer_config(optimizer))
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(copy, name, getattr(optimizer, name))
    for name, value in _differing(optimizer, copy, {"built"}):
        if name[0].isalpha() and _is_plain(value):
            vars(copy)[name] = value
    return copy


def scaled_as(source: tf.keras.optimizers.Optimizer, optimizer: tf.keras.optimizers.Optimizer):
    """Returns an optimizer within a `LossScaleOptimizer`, if `source` is one, with its settings."""
    if not hasattr(source, "inner_optimizer"):
        return optimizer
    return type(source)(optimizer, source.initial_scale, source.dynamic_growth_steps, name=source.name)


def updated_by(optimizer: tf.keras.optimizers.Optimizer) -> list[tf.keras.Variable]:
    """Returns the variables that an optimizer was built for, in their order."""
    return list(optimizer._trainable_variables)
