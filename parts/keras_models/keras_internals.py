"""What only compiled models need of Keras's names that are not documented. Runs on the host while a step is traced."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.utils import rng_utils

from ...engine.internals.keras import KEPT_IN_LISTS, layers_in
from ...engine.internals.keras_optimizers import scope_strategy
from ...engine.internals.keras_scopes import _TRACKED
from ...engine.internals.tensorflow import default_strategy, restore_random_state
from ...engine.internals.variables import own_copy


def unnumbered(name: str, parts: Iterable[Any]) -> str:
    """Returns a name without the numbers in a process that Keras has given to some of its parts, layers or metrics."""
    for part in parts:
        alone = re.sub(r"_\d+$", "", part.name)
        if alone != part.name and re.sub("[_]", "", alone) == type(part).__name__.lower():
            name = re.sub(rf"(?<![^_]){re.escape(part.name)}(?![^_])", alone, name)
    return name


def fit_module() -> str:
    """Returns the name of the module of `keras.Model.fit`, which may be a library's that logs what passes."""
    fit = tf.keras.Model.fit  # its attribute `__module__` is Keras's also of a wrapper
    return getattr(fit, "__globals__", {"__name__": type(fit).__module__})["__name__"]


def is_unreset(metric: tf.keras.metrics.Metric) -> bool:
    """Returns whether a metric's own `reset_state` leaves its state unchanged."""
    keras_resets = (tf.keras.metrics.Metric.reset_state, tf.keras.metrics.Mean.reset_state)
    if type(metric).reset_state in keras_resets or not metric.variables:
        return False
    before = [variable.numpy() for variable in metric.variables]
    for variable in metric.variables:
        variable.assign(variable + 1)
    metric.reset_state()
    is_kept = all((x.numpy() == value + 1).all() for x, value in zip(metric.variables, before, strict=True))
    for variable, value in zip(metric.variables, before, strict=True):
        variable.assign(value)
    return is_kept


def seed_again(seed: int) -> None:
    """Seeds generators as `tf.keras.utils.set_random_seed`, which also has TensorFlow optimize all functions again."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    restore_random_state({"_seed": seed, "_rng": random.Random(seed)})
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)


def has_strategy(owner: tf.keras.Model | tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether a model or an optimizer was created in the scope of a strategy."""
    return scope_strategy(owner) is not default_strategy()


class TakenOver:
    """A context in which methods of some Keras objects are others.

    Replicas are traced in turns, each in a thread of its own: the objects have their own methods again after the last
    thread has left the context.

    Args:
      methods: functions of an object and the method's arguments, by the method's name.
    """

    def __init__(self, methods: Mapping[str, Callable]):
        self._methods, self._depth = methods, 0
        self._objects: list[Any] = []

    def add(self, taken: Any) -> None:
        """Adds an object, in the context or before it."""
        self._objects.append(taken)
        if self._depth:
            self._take(taken)

    def _take(self, taken: Any) -> None:
        # Not by setattr, by which Keras would track them.
        vars(taken).update((name, functools.partial(call, taken)) for name, call in self._methods.items())

    def __enter__(self) -> None:
        self._depth += 1
        for taken in self._objects:
            self._take(taken)

    def __exit__(self, *_) -> None:
        self._depth -= 1
        for taken in () if self._depth else self._objects:
            for name in self._methods:
                vars(taken).pop(name, None)


def optimizers_in(model: tf.keras.Model) -> dict[str, tf.keras.optimizers.Optimizer]:
    """Finds the optimizers in the attributes of a model and its layers, also in lists and dictionaries, by path."""
    found: dict[int, tuple[str, tf.keras.optimizers.Optimizer]] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, tf.keras.optimizers.Optimizer):
            found.setdefault(id(value), (path, value))
        elif isinstance(value, (dict, list, tuple)):
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                visit(f"{path}.{name}", item)

    for layer in layers_in(model):
        for name, value in [*vars(layer).items()]:
            if name not in (*KEPT_IN_LISTS, *_TRACKED):
                visit(name if layer is model else f"{layer.name}.{name}", value)
    return dict(found.values())


def computing_alone(model: tf.keras.Model) -> Callable[..., Any]:
    """Returns a function that calls a method of a model, such as `predict`, so that it computes in this process alone.

    Keras's method divides the work among the replicas of the model's strategy, and waits for those of other processes.
    In the call each variable is this process's first copy, and the model has no strategy.
    """
    exchanged: dict[str, Any] = {"_distribute_strategy": None, "predict_function": None, "test_function": None}

    def call(method: str, *arguments, **keywords):
        variables = {id(weight): weight for weight in [*model.variables, *model.metrics_variables]}.values()
        shared = [(model, {name: vars(model)[name] for name in exchanged})]
        shared += [(variable, {"_value": variable._value}) for variable in variables]
        vars(model).update(exchanged)
        for variable in variables:
            variable._value = own_copy(variable._value)
        try:
            return getattr(type(model), method)(model, *arguments, **keywords)
        finally:
            exchanged.update((name, vars(model)[name]) for name in exchanged)  # compiled once
            for target, values in shared:
                vars(target).update(values)

    return call


def profiles_batches(callback: tf.keras.callbacks.TensorBoard) -> bool:
    """Returns whether a callback traces the batches that its `profile_batch` names."""
    return callback._should_trace
