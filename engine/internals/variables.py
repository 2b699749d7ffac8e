"""Finds a variable's own copy: under Keras's, on this replica, on its parameter server; and its name.

Also finds what an object holds of a kind, such as variables.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from .tensorflow import replica_id


def path_of(variable) -> str:
    """Returns what people call a variable: a Keras variable's path, a tf.Variable's name."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def key_of(variable, position: int) -> str:
    """Returns the key in checkpoints of what is kept for a variable that stands at a position among others.

    Keras numbers layers and unnamed variables through the life of a process ("dense_7/kernel", "variable_12"): only the
    last part without its number is the same in the process that restores.
    """
    leaf = re.sub(r"(:\d+|_\d+)+$", "", path_of(variable).split("/")[-1])
    return f"{position:04d}_{leaf}"


def own_copy(variable: tf.Variable) -> tf.Variable:
    """Returns this replica's copy of a mirrored variable, the first one's outside of replicas; any other as it is."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return variable
    copies = variable.distribute_strategy.experimental_local_results(variable)
    return copies[int(tf.get_static_value(replica_id()) or 0) % len(copies)]


def server_of(variable: tf.Variable) -> str | None:
    """Returns the device of a variable that a parameter server has; None for any other."""
    device = variable.device or ""
    return device if "/job:ps" in device else None


def on_server(variable: tf.Variable):
    """Returns the device context of a variable's server; an empty context where it is not a server's."""
    server = server_of(variable)
    return tf.device(server) if server else contextlib.nullcontext()


def mark_shard(variable: tf.Variable, owner: Any) -> None:
    """Records that a variable is a part of what `owner` has of several, which count as one."""
    variable.shard_of = id(owner)


def is_shard(variable) -> bool:
    """Returns whether a variable is a shard of a table, of which a step updates only the rows that it uses."""
    return hasattr(variable, "shard_of")


def whole_of(variable) -> int:
    """Returns the same number for all shards of a table, and one of its own for any other variable."""
    return getattr(variable, "shard_of", id(variable))


def tf_variable(variable):
    """Returns the tf.Variable under a Keras variable; a tf.Variable as it is."""
    return variable.value if isinstance(variable, tf.keras.Variable) else variable


def read_local(variable: tf.Variable) -> tf.Tensor:
    """Reads this replica's value. Replica code."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def assign_local(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns this replica's copy. Replica code; for values equal on all replicas, or meant to differ."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(value, variable.dtype))


def not_implemented(error: NotImplementedError) -> tuple[tf.Variable, str] | None:
    """Returns the variable, and its method, that raised an error since its kind does not have the method."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    variable = trace.tb_frame.f_locals.get("self") if trace else None
    return (variable, trace.tb_frame.f_code.co_name) if trace and isinstance(variable, tf.Variable) else None


def tracked(owner: tf.Module, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Finds the objects of a kind among a module's attributes, at any depth.

    Looks into lists, tuples, dictionaries and modules, except those of the engine's own, such as an optimizer.

    Returns:
      Each object once, by its path ("towers.left.0"), attributes in the order of their names.
    """
    by_path: dict[str, Any] = {}
    seen = {id(owner)}

    def look(path: str, value) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kind):
            by_path[path] = value
            return
        for name, each in _items(value):
            look(f"{path}.{name}", each)

    for name, value in _attributes(owner):
        look(name, value)
    return by_path


def _items(value) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return _attributes(value) if isinstance(value, tf.Module) and not _is_ours(value) else ()


def _attributes(module: tf.Module) -> list[tuple[str, Any]]:
    # TensorFlow keeps what it tracks under names that begin so.
    return [(name, value) for name, value in sorted(vars(module).items()) if not name.startswith("_self_")]


def _is_ours(module: tf.Module) -> bool:
    engine = __package__.rpartition(".")[0]
    return any(each.__module__.startswith(engine) for each in type(module).__mro__)
