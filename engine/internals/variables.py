"""Finds a variable's own copy: under Keras's, on this replica, on its parameter server; and its name.

Also finds what an object holds of a kind, such as variables.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import tensorflow as tf


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
    context = tf.distribute.get_replica_context()
    replica = context and tf.get_static_value(context.replica_id_in_sync_group)
    return copies[int(replica or 0) % len(copies)]


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


def held(owner, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Finds an object's attributes of a kind, also in its lists and dictionaries, by path, in order."""
    by_path: dict[str, Any] = {}
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_self_"):  # where TensorFlow keeps what it tracks
            continue
        inside = value.items() if isinstance(value, dict) else enumerate(value) if _is_list(value) else ()
        for path, each in [(name, value), *((f"{name}.{key}", each) for key, each in inside)]:
            if isinstance(each, kind) and not any(each is other for other in by_path.values()):
                by_path[path] = each
    return by_path


def _is_list(value) -> bool:
    return isinstance(value, (list, tuple))
