"""Takes snapshots of a state: its variables as the entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from ..internals.variables import tf_variable
from ..mesh.sharded import variable_sharding
from ..reduction import per_replica
from . import objects, slices
from .slices import RowTable, SlicedVariable

# Some variables are copied when they are read: tables, some shards, and their slots. At most this many bytes of them
# are copied for the writer; the rest is written slice by slice before training continues. With the slices being copied
# that is 256 MiB at most.
COPIED_BYTES = 128 << 20


class Snapshot(NamedTuple):
    """A state at one moment.

    Attributes:
      entries: the entries of its variables, and of TensorFlow's graph of the objects that have them.
      variables: {checkpoint key: [shape, dtype name]}.
    """

    entries: list[SlicedVariable]
    variables: dict[str, list]


def take(state, read: Callable[[list[tf.Variable]], list[tf.Tensor]] = slices.read_on_host) -> Snapshot:
    """Reads every variable under `state`, except large tables' rows, which have to be written before they change.

    A variable on another host's CPU, such as a parameter server's, is copied there and written by that host. On a CPU
    nothing is copied here: a read shares the variable's buffer, and the next update, finding it shared, writes to a
    new one (dense, sparse and XLA's alike). From an accelerator the values are copied to the host, and the call waits
    for that. A mirrored variable gives its first replica's value; a sharded one, the shards whose first holder is in
    this process; one that differs by replica, a value per replica: a collective if replicas are in several processes.
    """
    walked = [*objects.walk(state)]
    by_key = {objects.checkpoint_key(path): node for path, node in walked if objects.is_variable(node)}
    differing = [node for node in by_key.values() if per_replica.differs(node)]
    gathered = {id(node): values for node, values in zip(differing, per_replica.gather(differing), strict=True)}
    live = _too_large_to_copy([node for _, node in walked])
    with tf.device("CPU:0"):
        graph_values = {
            objects.KEY: tf.constant(objects.serialized(walked)),
            objects.COUNTER_KEY: tf.constant(1, tf.int64),
        }
    entries, variables = [slices.value_entry(value, key) for key, value in graph_values.items()], {}
    whole = [
        node for node in by_key.values() if not (variable_sharding(node) or id(node) in live or id(node) in gathered)
    ]
    values = gathered | dict(zip(map(id, whole), read([*map(tf_variable, whole)]), strict=True))
    for key, node in by_key.items():
        shape = objects.whole_shape(node)
        if sharding := variable_sharding(node):
            entries.append(slices.slice_shards(node, key, sharding, id(node) in live))
        elif id(node) in live:
            entries.append(slices.table_entry(per_replica.components(node)[0], key))
        else:
            value = values[id(node)]
            entries.append(slices.value_entry(value, key))
            shape = value.shape.as_list()
        variables[key] = [shape, tf.as_dtype(node.dtype).name]
    return Snapshot(entries, variables)


def _too_large_to_copy(held: list) -> set[int]:
    """Returns ids of the variables that are copied when they are read and exceed the limit on copies.

    They are tables and their slots, found by a table's shape, and shards.
    """
    nodes = [node for node in held if objects.is_variable(node)]
    shapes = {tuple(shard.shape) for table in held if isinstance(table, RowTable) for shard in table.shards}
    copied = [node for node in nodes if isinstance(node, tf.Variable) and tuple(node.shape) in shapes]
    copied = [node for node in copied if not per_replica.differs(node) and not variable_sharding(node)]
    copied += [
        node
        for node in nodes
        if variable_sharding(node) and slices.copies_when_read(per_replica.components(tf_variable(node))[0])
    ]
    large, total = set(), 0
    # The smallest first, so that few variables, and those large, are written before training continues.
    for node in sorted(copied, key=lambda node: node.shape.num_elements()):
        total += node.shape.num_elements() * tf.as_dtype(node.dtype).size
        if total > COPIED_BYTES:
            large.add(id(node))
    return large
