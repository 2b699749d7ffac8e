"""Keras's private functions, each behind a name that says its purpose.

They find layers' state other than trained weights, and their additions to the loss.

`tests/engine/internals/test_private_names.py` lists those that a new Keras lacks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.utils import rng_utils

from ..errors import UsageError
from . import graphs
from .tensorflow import default_strategy, restore_random_state
from .variables import assign_local, own_copy, read_local, tf_variable, update_alone

# The class of `compile` and `fit`: models inherit it, and layers may.
Trainable = TensorFlowTrainer
# A layer's lists of all its layers, variables and metrics, in the order of creation.
KEPT_IN_LISTS = ("_layers", "_trainable_variables", "_non_trainable_variables", "_metrics")
# Whether the code in this context predicts.
_predicts: contextvars.ContextVar[bool] = contextvars.ContextVar("predicts", default=False)
# TensorFlow's own lists of an object's attributes.
_TRACKED = ("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names")
# An optimizer's attribute with the variables that it updates, which belong to a model.
UPDATED = "_trainable_variables"

_CAN_BE: dict[str, Callable[[Any], bool]] = {
    "floatx": lambda value: value in ("bfloat16", "float16", "float32", "float64"),
    "epsilon": lambda value: isinstance(value, (int, float)) and value >= 0,
    "image_data_format": lambda value: value in ("channels_first", "channels_last"),
    "dtype_policy": lambda name: isinstance(name, str) and tf.keras.dtype_policies.get(name) is not None,
}
_DEFAULTS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "floatx": (tf.keras.config.floatx, tf.keras.config.set_floatx),
    "epsilon": (tf.keras.config.epsilon, tf.keras.config.set_epsilon),
    "image_data_format": (tf.keras.config.image_data_format, tf.keras.config.set_image_data_format),
}


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


def layers_in(layer: tf.keras.layers.Layer, itself: bool = True) -> list[tf.keras.layers.Layer]:
    """Returns all layers in a layer, at any depth, with `itself` including the layer."""
    return list(layer._flatten_layers(include_self=itself))


def unnumbered(name: str, parts: Iterable[Any]) -> str:
    """Returns a name without the numbers in a process that Keras has given to some of its parts, layers or metrics."""
    for part in parts:
        alone = re.sub(r"_\d+$", "", part.name)
        if alone != part.name and re.sub("[_]", "", alone) == type(part).__name__.lower():
            name = re.sub(rf"(?<![^_]){re.escape(part.name)}(?![^_])", alone, name)
    return name


def symbolic_inputs(model: tf.keras.layers.Layer) -> Any:
    """Returns a model's symbolic inputs, in its own structure; None if unknown."""
    inputs = model.inputs if isinstance(model, tf.keras.Sequential) and model.built else [getattr(model, "input", None)]
    return tf.keras.tree.lists_to_tuples(inputs[0] if len(inputs) == 1 else inputs)


def symbol(spec: Any) -> tf.keras.KerasTensor:
    """Returns the symbol of a tensor, ragged or not, or of its specification."""
    is_ragged = isinstance(spec, (tf.RaggedTensor, tf.RaggedTensorSpec))
    return tf.keras.KerasTensor(spec.shape, spec.dtype.name, ragged=is_ragged)


def with_optional(model: tf.keras.layers.Layer, features: Any) -> Any:
    """Returns features with None for inputs of a functional model, by name, that they lack; Keras checks these."""
    names = getattr(model, "_inputs_struct", None)
    return {**dict.fromkeys(names), **features} if isinstance(names, dict) and isinstance(features, dict) else features


def call(model: tf.keras.layers.Layer, inputs: Any, **training: bool) -> Any:
    """Calls a model as Keras's `fit` does: one whose `call` has no `training` computes as in inference.

    Within `predicting` as its `predict` does, which calls a `predict_step` of the model's own.
    """
    if _predicts.get() and isinstance(model, Trainable):
        if overrides(model, "predict_step"):
            return model.predict_step(tf.keras.utils.pack_x_y_sample_weight(inputs))
        if not has_call(model):
            raise UsageError(
                f"{type(model).__name__} has no call, so it has no predictions; define call or predict_step, or call "
                "predict of one of its parts"
            )
    return model(inputs, **(training if takes_training(model) else {}))


@contextlib.contextmanager
def predicting() -> Iterator[None]:
    """Makes `call` compute predictions in this context."""
    token = _predicts.set(True)
    try:
        yield
    finally:
        _predicts.reset(token)


def traced_for_some_size(trace: Callable[[int | None], Any]) -> Any:
    """Traces for batches of any size, or if that fails of 2: a step's may be known, and `squeeze` then has a rank.

    Args:
      trace: traces for a size, or for any with None.
    """
    try:
        return trace(None)
    except Exception:  # of any class
        with contextlib.suppress(Exception):
            return trace(2)
        raise


def has_call(model: tf.keras.layers.Layer) -> bool:
    """Returns whether a model defines `call`, which one that only its own `train_step` computes with may lack."""
    return type(model).call is not tf.keras.Model.call


def takes_training(model: tf.keras.layers.Layer) -> bool:
    """Returns whether a model's `call` has the argument `training`."""
    return model._call_has_training_arg


def build(model: tf.keras.layers.Layer, specs: Any, **training: bool) -> None:
    """Makes a model's variables by a call with symbols or, if that fails, as in Keras's `fit` by tracing one.

    Args:
      specs: nest of specifications of a batch's features.
    """

    def trace() -> None:
        tf.function(lambda inputs: call(model, inputs, **training), autograph=False).get_concrete_function(specs)

    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(specs)):
        trace()  # symbols are dense
        return
    inputs = tf.nest.map_structure(lambda spec: tf.keras.Input(tuple(spec.shape[1:]), dtype=spec.dtype), specs)
    try:
        call(model, inputs, **training)
    except Exception as error:  # of any class: methods that only symbols call may be wrong
        if "returned a non-tensor" in str(error):  # Keras has called it, and only has no node for such outputs
            return
        with contextlib.suppress(Exception):
            trace()
            return
        raise


def refuse_keras_2(model: Any) -> None:
    """Raises `UsageError` for a model or a layer of Keras 2, which is neither of Keras 3 nor a function."""
    if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(model).__mro__):
        raise UsageError(
            f"a {type(model).__name__} of tf_keras is of Keras 2, and models here are of Keras 3; make it by `import "
            "keras`, or have it, with its variables, in an attribute of a crankshaft.Trainer that overrides forward"
        )


def overrides(model: tf.keras.layers.Layer, method: str) -> bool:
    """Returns whether a model overrides a method of Keras's trainer."""
    bound = getattr(model, method)
    return getattr(bound, "__func__", bound) not in (getattr(tf.keras.Model, method), getattr(Trainable, method))


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


def added_losses(layer: tf.keras.layers.Layer) -> list[tf.Tensor]:
    """Returns a layer's own additions to the loss in the last traced forward pass."""
    return list(layer._get_own_losses())


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


def own_losses(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.Tensor]:
    """Returns the scalars that layers added to the loss in the last traced forward pass, e.g. by `add_loss`."""
    return list({id(loss): loss for layer in all_layers_in(layers) for loss in added_losses(layer)}.values())


def in_float32(output):
    """Returns an output of a layer, as float32 if it is of 16 bits, with Keras's mask."""
    if getattr(output, "dtype", None) not in (tf.bfloat16, tf.float16):
        return output
    wide = tf.cast(output, tf.float32)
    if (mask := backend.get_keras_mask(output)) is not None:
        backend.set_keras_mask(wide, mask)
    return wide


def with_mask(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns values with Keras's mask, bool [batch, length], as Keras's `Masking` and `Embedding` set it."""
    values = tf.identity(values)
    backend.set_keras_mask(values, mask)
    return values


def all_layers_in(layers: Iterable[tf.keras.layers.Layer]) -> list[tf.keras.layers.Layer]:
    """Returns layers and all layers in them, at any depth."""
    return [inner for layer in layers for inner in layers_in(layer)]


def defaults() -> dict[str, Any]:
    """Returns the defaults of Keras that are the process's, by name."""
    return {name: read() for name, (read, _) in _DEFAULTS.items()}


def is_default(name: str, value: Any) -> bool:
    """Returns whether a default of Keras's, the dtype policy among them, can have a value that was read from a file."""
    try:
        return name in _CAN_BE and _CAN_BE[name](value)
    except ValueError:  # Keras's form of a policy
        return False


def set_defaults(values: Mapping[str, Any]) -> None:
    """Sets the defaults of Keras that are the process's."""
    for name, value in values.items():
        _DEFAULTS[name][1](value)


def default_policy() -> tf.keras.DTypePolicy:
    """Returns this thread's default dtype policy; unlike Keras's function, which sets it, it leaves it to floatx."""
    policy = global_state.get_global_attribute("dtype_policy")
    return tf.keras.DTypePolicy(tf.keras.config.floatx()) if policy is None else policy


def initial_state(policy: str | None) -> dict[str, Any]:
    """Returns a new process's state for `exchange_state`, with this program's setting of how Keras prints.

    Args:
      policy: the name of the default dtype policy; the program's, if it has this name, may be of a class of its own.
    """
    attributes = vars(global_state.GLOBAL_STATE_TRACKER)
    state = {name: attributes[name] for name in ("interactive_logging",) if name in attributes}
    if policy is not None:
        programs = default_policy()
        state["dtype_policy"] = programs if programs.name == policy else tf.keras.dtype_policies.get(policy)
    return state


@contextlib.contextmanager
def in_new_state() -> Iterator[None]:
    """Gives this thread a new process's state of Keras (names, policy, seed), so that users' layers are numbered on."""
    before = exchange_state({})
    try:
        yield
    finally:
        exchange_state(before)


@functools.cache
def attributes() -> frozenset[str]:
    """Returns the names of all attributes, methods among them, that Keras gives every layer and model."""
    with in_new_state():
        return frozenset({"optimizer", "stop_training", *dir(tf.keras.Model())})


def exchange_state(state: dict[str, Any]) -> dict[str, Any]:
    """Sets Keras's state in this thread to one that this returned, {} for a new process's; returns the former one."""
    attributes = vars(global_state.GLOBAL_STATE_TRACKER)  # a threading.local
    before = dict(attributes)
    attributes.clear()
    attributes.update(state)
    return before


def seed_again(seed: int) -> None:
    """Seeds generators as `tf.keras.utils.set_random_seed`, which also has TensorFlow optimize all functions again."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    restore_random_state({"_seed": seed, "_rng": random.Random(seed)})
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)


def initial_shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of a variable's initial value, an array, or one that Keras makes; None if unknown."""
    if not callable(value):
        shape = getattr(value, "shape", None)
        return None if shape is None else tuple(shape)
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            if isinstance(cell.cell_contents, backend.Variable):
                return tuple(cell.cell_contents.shape)
    return None


@contextlib.contextmanager
def eager_variables() -> Iterator[None]:
    """Creates variables immediately in this context, where Keras, tracing shapes, would defer them."""
    with with_attributes(global_state.GLOBAL_STATE_TRACKER, {"stateless_scope": None}), tf.init_scope():
        yield


def scope_strategy(owner: tf.keras.Model | tf.keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a model or an optimizer was created; TensorFlow's default without one."""
    is_optimizer = isinstance(owner, tf.keras.optimizers.Optimizer)
    return owner._distribution_strategy if is_optimizer else owner.distribute_strategy


def has_strategy(owner: tf.keras.Model | tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether a model or an optimizer was created in the scope of a strategy."""
    return scope_strategy(owner) is not default_strategy()


def belongs_to_current_strategy(owner: tf.keras.Model | tf.keras.optimizers.Optimizer) -> bool:
    """Returns whether a model or an optimizer was created in the current strategy's scope, or without one."""
    return scope_strategy(owner) is tf.distribute.get_strategy()


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


def profiles_batches(callback: tf.keras.callbacks.TensorBoard) -> bool:
    """Returns whether a callback traces the batches that its `profile_batch` names."""
    return callback._should_trace


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
