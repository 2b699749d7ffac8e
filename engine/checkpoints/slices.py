"""A checkpoint's entries, written and read: whole, or in slices of sharded variables and large tables.

Slices of one key may be in several files, written by several processes. `MergeV2Checkpoints` joins the
files, and the key is then one entry of the whole's shape, from which any other slice can be read.
"""

from __future__ import annotations

import errno
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from ..internals.variables import tf_variable
from ..mesh import sharded
from ..mesh.sharded import Box, Sharding
from ..reduction import per_replica

# Bytes per slice. What can't be written from the variable's own memory is copied slice by slice, as is all reading.
SLICE_BYTES = 32 << 20
_BESIDE_BYTES = 1 << 20  # of the index, the manifest and the run's record, on the same disk
T = TypeVar("T")
_ALIGNMENT_BYTES = 64  # of tensors: rows at other addresses have to be copied


class Slice(NamedTuple):
    """One slice of a variable.

    Attributes:
      spec: the slice, in SaveV2's form; "" is all.
      device: the CPU that writes it.
      copied_bytes: memory that reading it takes; 0 if it shares the variable's.
    """

    spec: str
    device: str
    read: Callable[[], tf.Tensor]
    copied_bytes: int = 0


class SlicedVariable(NamedTuple):
    """A variable in a snapshot, in the slices that this process writes.

    Attributes:
      is_live: whether slices are read from the variable itself, so that they have to be written before it changes.
      writers: numbers of the processes that write slices of it.
      is_sharded: whether a process has only its own slices, so that no other can write them.
    """

    key: str
    slices: Sequence[Slice]
    is_live: bool = False
    writers: frozenset[int] = frozenset({0})
    is_sharded: bool = False


class RowTable(tf.Module):
    """The base of tables that checkpoints may have in another number of shards, or with other rows for the same ids.

    Attributes:
      shards: the variables; [] before the table is built.
      admissions: for each shard, a module whose variable `keys` has the ids of its rows; [] if rows have no ids.
    """

    shards: list[tf.Variable]
    admissions: list[Any]

    def saved_in(self, checkpoint: Any, key_of: Callable[[tf.Variable], str], may_grow: bool) -> Any:
        """Returns where a checkpoint has the table (`parts.tables.saved_rows.SavedTable`); None if it lacks it.

        Args:
          checkpoint: the checkpoint's entries.
          key_of: returns a variable's key in the checkpoint; "" if it has none.
          may_grow: whether the table may have more rows here, if ids are their rows.
        """
        raise NotImplementedError

    @staticmethod
    def write_rows(export: str, tables: Mapping[str, Any], since: str | None) -> None:
        """Writes the rows of tables with ids beside an exported model, and what has changed since an earlier export.

        Args:
          export: the folder of the export.
          tables: the tables, by the names of their files.
          since: the folder of the earlier export, or None.
        """
        raise NotImplementedError


class ShardRows(NamedTuple):
    """Where a checkpoint has the rows of a table's shard, or of its slot, saved in another number of shards.

    Row r of the table is row r // n of shard r % n.

    Attributes:
      keys: the keys of the checkpoint's shards, in order.
      sizes: the number of rows of each.
      shard: the number of the variable among those here.
      number: how many shards there are here.
      place: returns for each row of the checkpoint's table its row here, or -1, if not the same.
    """

    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    shard: int
    number: int
    place: Callable[[], np.ndarray] | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows that this shard gets of the checkpoint's table, if each stays at its number."""
        return len(range(self.shard, sum(self.sizes), self.number))


def value_entry(value: tf.Tensor, key: str) -> SlicedVariable:
    """Returns the entry of a value that was read."""
    return SlicedVariable(key, [Slice("", host_device(value.device), lambda: value)])


def table_entry(variable: tf.Variable, key: str) -> SlicedVariable:
    """Slices a large table or a slot of one. It is read some rows at a time, since reading all of it would copy it."""
    whole = Box((0,) * len(variable.shape), tuple(variable.shape))
    return SlicedVariable(
        key, list(_slice_box(variable.shape, whole, _row_reader(variable), variable, is_copied=True)), True
    )


def slice_shards(variable, key: str, sharding: Sharding, is_live: bool) -> SlicedVariable:
    """Slices what this process writes of a sharded variable: the shards of which it has the first holder.

    Args:
      variable: Keras's or TensorFlow's.
      is_live: whether the variable is read slice by slice as it is written, not now: see `copies_when_read`.
    """
    held = list(sharded.local_shards(variable))
    slices: list[Slice] = []
    for replica, shard in held:
        if sharding.is_first_holder(replica):
            read = _row_reader(shard) if is_live else _rows_in(read_on_host([shard])[0])
            box = sharding.box(replica)
            is_copied = is_live or box.size[1:] != sharding.local_shape[1:]
            slices += _slice_box(sharding.shape, box, read, shard, is_copied)
    writers = frozenset(
        replica // len(held)
        for replica in sharding.replicas
        if sharding.is_first_holder(replica) and all(sharding.box(replica).size)
    )
    return SlicedVariable(key, slices, is_live, writers, is_sharded=True)


def _slice_box(shape, box: Box, read: Callable[[Box], tf.Tensor], variable: tf.Variable, is_copied: bool):
    """Yields the slices of a box; `read` takes a slice's box within this process's values."""
    if not all(box.size):
        return
    row_bytes = variable.dtype.size * math.prod(box.size[1:])
    # A slice that shares the variable's memory has to begin at TensorFlow's alignment, or it is copied after all.
    unit = 1 if is_copied else _ALIGNMENT_BYTES // math.gcd(_ALIGNMENT_BYTES, row_bytes)
    rows_at_once = max(1, SLICE_BYTES // row_bytes // unit) * unit
    first = 0
    while first < box.size[0]:
        stop = min(first + rows_at_once, box.size[0])
        size = (stop - first, *box.size[1:])
        inside = Box((first, *(0 for _ in size[1:])), size)
        spec = Box((box.begin[0] + first, *box.begin[1:]), size).spec(shape)
        size_bytes = row_bytes * size[0]
        copied_bytes = size_bytes if is_copied or size_bytes % _ALIGNMENT_BYTES else 0
        yield Slice(spec, host_device(variable.device), functools.partial(read, inside), copied_bytes)
        first = stop


def _row_reader(variable: tf.Variable) -> Callable[[Box], tf.Tensor]:
    def read(box: Box) -> tf.Tensor:
        rows = variable.sparse_read(tf.range(box.begin[0], box.begin[0] + box.size[0]))
        return tf.slice(rows, [0] * len(box.size), box.size)

    return read


def _rows_in(value: tf.Tensor) -> Callable[[Box], tf.Tensor]:
    def read(box: Box) -> tf.Tensor:
        if box.size[1:] != tuple(value.shape[1:]):
            return tf.slice(value, *box)
        # A slice of a vector shares its memory if it begins and ends on TensorFlow's alignment.
        row = math.prod(box.size[1:])
        flat = tf.slice(tf.reshape(value, [-1]), [box.begin[0] * row], [box.size[0] * row])
        return tf.reshape(flat, box.size)

    return read


def read_on_host(variables: list[tf.Variable]) -> list[tf.Tensor]:
    """Reads each variable on the CPU of the process that has it."""
    values = []
    for variable in variables:
        with tf.device(host_device(variable.device)):
            values.append(tf.identity(variable.read_value()))
    return values


def copies_when_read(variable: tf.Variable) -> bool:
    """Returns whether reading a variable of this process copies it.

    On a CPU a read shares the variable's memory, unless a scatter ever changed single rows of it.
    """
    if tf.DeviceSpec.from_string(variable.device).device_type != "CPU":
        return False  # it is copied to the host, not within the device's memory
    # Both are held, or the second could be given the memory that the first has freed.
    reads = [variable.read_value() for _ in range(2)]
    first, second = (np.asarray(read).__array_interface__["data"] for read in reads)
    return first != second


def write(entries: Iterable[SlicedVariable], prefix: str) -> list[str]:
    """Writes the slices of entries to checkpoint files; returns their prefixes: `prefix` and a number each.

    Raises OSError where the disk has no room for them: TensorFlow would log that first, several times.
    """
    names = []
    # Slices on one host are written to one file, as long as no more than SLICE_BYTES of them have to be copied.
    pairs = [(piece, entry.key) for entry in entries for piece in entry.slices]
    for number, batch in enumerate(_batches(pairs, lambda pair: (pair[0].device, pair[0].copied_bytes))):
        names.append(f"{prefix}-{number}")
        with tf.device(batch[0][0].device):
            values = [piece.read() for piece, _ in batch]
            disk = os.statvfs(os.path.dirname(prefix))
            needed = sum(value.dtype.size * value.shape.num_elements() for value in values)
            if disk.f_blocks > 0 and disk.f_bfree * disk.f_frsize < needed + _BESIDE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            tf.raw_ops.SaveV2(
                prefix=names[-1],
                tensor_names=[key for _, key in batch],
                shape_and_slices=[piece.spec for piece, _ in batch],
                tensors=values,
            )
            del values  # before the next batch is read
    return names


def packed(entries: Iterable[SlicedVariable]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields, of each slice of entries, its description, plain JSON, and its bytes, which a CPU's tensor shares."""
    for entry in entries:
        for piece in entry.slices:
            value = piece.read()
            described = {
                "key": entry.key,
                "spec": piece.spec,
                "dtype": value.dtype.name,
                "shape": value.shape.as_list(),
                "is_sharded": entry.is_sharded,
            }
            if value.dtype == tf.string:
                data = tf.io.serialize_tensor(value).numpy()
            else:
                data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            yield described, data


def unpacked(described: Mapping[str, Any], read: Callable[[], Any]) -> SlicedVariable:
    """Returns an entry of one slice, which `packed` has described; `read` returns its bytes."""
    dtype = tf.as_dtype(described["dtype"])

    def value() -> tf.Tensor:
        if dtype == tf.string:
            return tf.io.parse_tensor(bytes(read()), dtype)
        return tf.constant(np.frombuffer(read(), dtype.as_numpy_dtype).reshape(described["shape"]))

    return SlicedVariable(described["key"], [Slice(described["spec"], "CPU:0", value, described["bytes"])])


def _batches(items: Iterable[T], cost: Callable[[T], tuple[str, int]]) -> Iterator[list[T]]:
    """Yields batches of items on one device and of SLICE_BYTES at most; `cost` returns an item's device and bytes."""
    batch: list[T] = []
    before, total = "", 0
    for item in items:
        device, num_bytes = cost(item)
        if batch and (device != before or total + num_bytes > SLICE_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        before, total = device, total + num_bytes
    if batch:
        yield batch


def read(prefix: str, pairs: Iterable[tuple[Any, str | ShardRows | Callable[[], np.ndarray]]]) -> None:
    """Reads a checkpoint into variables, Keras's or TensorFlow's, given as (variable, key) of fitting shapes.

    A variable that differs by replica takes values of an array; one sharded over a mesh, each replica's shard, on
    whatever mesh it was saved; one that is summed on read, a share of its sum.
    """
    plain = []
    for variable, key in pairs:
        if isinstance(key, ShardRows):
            _read_rows(prefix, key, variable)
        elif callable(key):
            _assign(tf_variable(variable), tf.constant(key()))
        elif sharding := sharded.variable_sharding(variable):
            _read_shards(prefix, key, variable, sharding)
        else:
            plain.append((tf_variable(variable), key))

    def cost(pair: tuple[tf.Variable, str]) -> tuple[str, int]:
        variable, _ = pair
        return host_device(variable.device), variable.dtype.size * (variable.shape.num_elements() or 0)

    for batch in _batches(plain, cost):
        with tf.device(host_device(batch[0][0].device)):
            values = tf.raw_ops.RestoreV2(
                prefix=os.fspath(prefix),
                tensor_names=[key for _, key in batch],
                shape_and_slices=[""] * len(batch),
                dtypes=[variable.dtype for variable, _ in batch],
            )
        for (variable, _), value in zip(batch, values, strict=True):
            _assign(variable, value)


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    if per_replica.differs(variable):
        per_replica.assign_values(variable, value)
        return
    for component in per_replica.components(variable):
        component.assign(value)


def _read_shards(prefix: str, key: str, variable, sharding: Sharding) -> None:
    """Reads each local replica's shard of a sharded variable."""
    variable = tf_variable(variable)
    values: dict[Box, tf.Tensor] = {}  # replicas with copies of one shard read it once
    for replica, shard in sharded.local_shards(variable):
        box = sharding.box(replica)
        if box not in values:
            with tf.device(host_device(shard.device)):
                filling = tf.cast(sharded.padding_value(variable), shard.dtype)
                if all(box.size):
                    value = _read_box(prefix, key, box, sharding.shape, shard.dtype)
                    padding = [[0, n - s] for n, s in zip(sharding.local_shape, box.size, strict=True)]
                    values[box] = tf.pad(value, padding, constant_values=filling)
                else:  # the whole is so small that this replica has nothing but padding
                    values[box] = tf.fill(sharding.local_shape, filling)
        shard.assign(values[box])


def _read_box(prefix: str, key: str, box: Box, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Reads a range of a checkpoint's value, whose whole has this shape."""
    (value,) = tf.raw_ops.RestoreV2(
        prefix=os.fspath(prefix), tensor_names=[key], shape_and_slices=[box.spec(shape)], dtypes=[dtype]
    )
    return value


def _read_rows(prefix: str, rows: ShardRows, variable: tf.Variable) -> None:
    """Reads rows of a table from a checkpoint's shards, some at a time; rows that it lacks stay as they are."""
    width, stored = tuple(variable.shape[1:]), len(rows.keys)
    at_once = max(1, SLICE_BYTES // max(1, variable.dtype.size * math.prod(width)))
    pieces = [
        (there, range(first, min(first + at_once, size)))
        for there, size in enumerate(rows.sizes)
        for first in range(0, size, at_once)
    ]
    for component in per_replica.components(variable):
        for there, piece in pieces:
            table_rows = np.arange(piece.start, piece.stop) * stored + there
            if rows.place is not None:
                table_rows = rows.place()[table_rows]
            mine = np.flatnonzero((table_rows >= 0) & (table_rows % rows.number == rows.shard))
            if not len(mine):
                continue
            box = Box((piece.start, *(0 for _ in width)), (len(piece), *width))
            with tf.device(host_device(component.device)):
                values = _read_box(prefix, rows.keys[there], box, (rows.sizes[there], *width), variable.dtype)
                values = tf.gather(values, mine)
            with tf.device(component.device):
                here = table_rows[mine] // rows.number
                tf.raw_ops.ResourceScatterUpdate(resource=component.handle, indices=here, updates=values)


def host_device(device: str) -> str:
    """Returns the CPU of the process that a device is in."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
