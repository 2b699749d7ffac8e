"""Finds a variable's own copy: Keras's underlying one, this replica's, its parameter server's; and its name.

Also finds an object's parts of a kind, such as variables.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ..own_code import COMPUTING_MODULES
from .tensorflow import replica_id

VARIABLES = (tf.Variable, tf.keras.Variable)
# Keras's objects that may have variables of their own, and that neither Keras nor TensorFlow searches.
_KERAS_OBJECTS = (tf.keras.constraints.Constraint, tf.keras.losses.Loss, tf.keras.regularizers.Regularizer)
# Prefix of the names under which TensorFlow tracks objects; and what `compile` sets, which is no part of a model.
_NOT_ATTRIBUTES = re.compile("_self_|_compile_(config|loss|metrics)$")


def variable_path(variable) -> str:
    """Returns a variable's name for people: a Keras variable's path, a tf.Variable's name."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def state_key(variable, position: int) -> str:
    """Returns the key in checkpoints for a variable's state, by its position among others.

    Keras numbers layers and unnamed variables within a process ("dense_7/kernel", "variable_12"): only the last part
    without its number is the same in the restoring process.
    """
    leaf = re.sub(r"(:\d+|_\d+)+$", "", variable_path(variable).split("/")[-1])
    return f"{position:04d}_{leaf}"


def compiled_once(function: Callable[[], Any]) -> Callable[[], Any]:
    """Makes a function without arguments one that is traced at its first call, without AutoGraph.

    A `tf.function` that each run makes again would bring a warning of TensorFlow's, which counts their traces.
    """
    concrete = functools.cache(lambda: tf.function(function, autograph=False).get_concrete_function())
    return lambda: concrete()()


class CompiledReader:
    """A function of variables, compiled for those of the last call. Called op by op, 0.1 ms a variable add up.

    Args:
      function: maps a list of variables to tensors; traced without AutoGraph.
      at_second_call: whether the first call for the same variables is op by op, as a trace would delay a short run.
    """

    _compiled: Callable[[], Any]  # which keeps the variables

    def __init__(self, function: Callable[[list], Any], at_second_call: bool = False):
        self._function, self._at_second_call = function, at_second_call
        self._ids: list[int] | None = None

    def __call__(self, variables: Iterable) -> Any:
        of = [*variables]
        if (ids := [*map(id, of)]) != self._ids:
            self._ids, self._compiled = ids, compiled_once(lambda: self._function(of))
            if self._at_second_call:
                return self._function(of)
        return self._compiled()


def own_copy(variable: tf.Variable) -> tf.Variable:
    """Returns this replica's copy of a mirrored variable (the first outside replicas); others unchanged."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return variable
    copies = variable.distribute_strategy.experimental_local_results(variable)
    return copies[int(tf.get_static_value(replica_id()) or 0) % len(copies)]


def server_device(variable: tf.Variable) -> str | None:
    """Returns the device of a variable on a parameter server; None for others."""
    device = variable.device or ""
    return device if "/job:ps" in device else None


def on_server(variable: tf.Variable):
    """Returns the device context of a variable's server; an empty context for others."""
    server = server_device(variable)
    return tf.device(server) if server else contextlib.nullcontext()


def update_alone(variable: tf.Variable, terms: Sequence[tf.Tensor], update: Callable[..., tf.Operation | None]) -> None:
    """Calls a function that reads a variable and assigns it a value computed from that. Replica code.

    On a parameter server no other worker does so between the two: a worker takes a lock there once its terms have
    arrived, and nothing that it does in its turn waits for another host.

    Args:
      terms: what its value is computed from, besides its own present value.
      update: `update(*terms)` returns the op that assigns it.
    """
    with on_server(variable):
        # A constant is made here again: as an input it would be one more message from the worker.
        constants = map(tf.get_static_value, terms)
        here = [tf.identity(x) if c is None else tf.constant(c, x.dtype) for x, c in zip(terms, constants, strict=True)]
        with tf.control_dependencies(here):
            if server_device(variable):
                _lock(variable).execute(lambda: update(*here))
            else:
                update(*here)


def _lock(variable: tf.Variable) -> tf.CriticalSection:
    """Returns the lock of a variable on its server: one object per graph, or a step's second update is refused."""
    locks = tf.compat.v1.get_default_graph().get_collection_ref("crankshaft/locks")
    for locked, lock in locks:
        if locked is variable:
            return lock
    locks.append((variable, tf.CriticalSection(shared_name=f"{variable.name}/update")))
    return locks[-1][1]


def mark_shard(variable: tf.Variable, owner: Any) -> None:
    """Records that a variable is one of several of `owner` that count as one."""
    variable.shard_of = id(owner)


def is_shard(variable) -> bool:
    """Returns whether a variable is a table's shard, of which a step updates only the rows in use."""
    return hasattr(variable, "shard_of")


def table_identity(variable) -> int:
    """Returns one number for all shards of a table, and a unique number for any other variable."""
    return getattr(variable, "shard_of", id(variable))


def tf_variable(variable):
    """Returns the tf.Variable of a Keras variable, also where layers compute with other values; others unchanged."""
    if not isinstance(variable, tf.keras.Variable):
        return variable
    return variable.value if variable._value is None else variable._value


def read_local(variable: tf.Variable) -> tf.Tensor:
    """Reads this replica's value. Replica code."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def assign_local(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns this replica's copy. Replica code; for values that are equal on all replicas, or differ on purpose."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(value, variable.dtype))


def not_implemented(error: NotImplementedError) -> tuple[tf.Variable, str] | None:
    """Returns the variable and method of an error about a method that the variable's kind lacks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    variable = trace.tb_frame.f_locals.get("self") if trace else None
    return (variable, trace.tb_frame.f_code.co_name) if trace and isinstance(variable, tf.Variable) else None


def tracked(owner: Any, kind: type | tuple[type, ...], also_in: tuple[type, ...] = ()) -> dict[str, Any]:
    """Finds the objects of a kind among an object's attributes, at any depth.

    Searches lists, tuples, dictionaries, Keras's metrics, modules, except the engine's own, such as optimizers, and
    objects of the classes `also_in`, with the variables of layers in these.

    Returns:
      Each object once, by its path ("towers.left.0"), with attributes in the order of their names.
    """
    by_path: dict[str, Any] = {}
    seen = {id(owner)}

    def visit(path: str, value, is_within: bool = False) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kind):
            by_path[path] = value
            return
        inner = _attributes(value) if isinstance(value, also_in) else items(value)
        if is_within and isinstance(value, tf.keras.layers.Layer):
            inner = enumerate(value.variables)
        for name, item in inner:
            visit(f"{path}.{name}", item, is_within or isinstance(value, also_in))

    for name, value in _attributes(owner):
        visit(name, value)
    return by_path


def tracked_variables(owner: Any) -> dict[str, Any]:
    """Finds the variables among an object's attributes, also in Keras's losses, constraints and regularizers.

    Of layers only those in such objects: Keras lists the others.
    As `tracked`, but for variables of metrics.
    """
    found = tracked(owner, (*VARIABLES, tf.keras.metrics.Metric), _KERAS_OBJECTS)
    return {path: value for path, value in found.items() if isinstance(value, VARIABLES)}


@contextlib.contextmanager
def keeping_tensors(owners: Iterable[Any]) -> Iterator[None]:
    """Keeps tensors that a trace has left in objects, while others that have the same objects are traced within.

    They are attributes of the owners, and of modules, lists and dictionaries in these; of lists, those traced within
    find none.
    """
    kept: dict[int, tuple[Any, Any]] = {}

    def is_traced(value: Any) -> bool:
        """Whether it is a tensor of a trace, or has some, which are noted."""
        if isinstance(value, tf.Module):
            return bool(items(value)) and is_traced(vars(value))
        if not isinstance(value, (dict, list, tuple)):
            return tf.is_tensor(value) and not isinstance(value, tf.Variable) and tf.is_symbolic_tensor(value)
        if id(value) not in kept:
            kept[id(value)] = value, {}  # ends a circle
            traced = {name: x for name, x in items(value) if is_traced(x)}
            kept[id(value)] = value, [*value] if traced and isinstance(value, list) else traced
        return bool(kept[id(value)][1])

    for owner in owners:
        is_traced(vars(owner))
    lists = [(place, values) for place, values in kept.values() if isinstance(values, list)]

    def fill(place: list, values: Sequence[Any]) -> None:
        del place[:]  # an assignment would have TensorFlow's wrapper of a list compare the tensors
        place.extend(values)

    for place, values in lists:
        fill(place, [x for x in values if not is_traced(x)])
    try:
        yield
    finally:
        for place, values in lists:
            fill(place, values)
        for place, values in kept.values():
            if values and isinstance(place, dict):
                place.update(values)


def items(value) -> Iterable[tuple[Any, Any]]:
    """Returns (name, object) of what `tracked` searches in an object; nothing for others."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, tf.keras.metrics.Metric):
        return enumerate(value.variables)
    if not isinstance(value, tf.Module):
        return ()
    is_own = any(base.__module__.startswith(COMPUTING_MODULES) for base in type(value).__mro__)
    return () if is_own else _attributes(value)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in sorted(vars(owner).items()) if not _NOT_ATTRIBUTES.match(name)]
