"""Variables that a checkpoint writes in slices: parts of what is cut over a mesh, rows of large tables. Host code.

Slices of one key may be in several files, written by several processes. `MergeV2Checkpoints` joins the files, and the
key is then one entry of the whole's shape, from which any other slice can be read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from ..internals.tensorflow import TrackableNode
from ..internals.variables import tf_variable
from ..mesh import cuts
from ..mesh.cuts import Box

# Bytes of a slice. What can't be written from the variable's own memory is copied slice by slice; so is what is read.
SLICE_BYTES = 32 << 20
_ALIGNMENT_BYTES = 64  # of tensors: rows that begin at another address have to be copied


@dataclasses.dataclass(frozen=True)
class Slice:
    """One slice of a variable.

    Attributes:
      spec: which slice it is, in the form that SaveV2 takes.
      device: the CPU that writes it.
      read: returns its values.
      copied_bytes: memory that reading it takes; 0 where it shares the variable's.
    """

    spec: str
    device: str
    read: Callable[[], tf.Tensor]
    copied_bytes: int


@dataclasses.dataclass(frozen=True)
class SlicedVariable:
    """A variable at the moment of a snapshot, in the slices that this process writes.

    Attributes:
      key: in the checkpoint.
      slices: the first is of a few rows only: it is written with the state's graph, by the process that writes that.
      is_live: whether slices are read from the variable itself, so they have to be written before it changes.
      writers: numbers of the processes that write slices of it.
    """

    key: str
    slices: Sequence[Slice]
    is_live: bool
    writers: frozenset[int] = frozenset({0})

    @property
    def stand_in(self) -> TrackableNode:
        """What stands for the variable in the graph of a checkpoint that is written: it holds the first slice."""
        return _FirstSlice(self.slices[0])


class _FirstSlice(TrackableNode):
    def __init__(self, slice_: Slice):
        # What TensorFlow makes for a save lives until garbage is collected, and a slice that shares memory would keep
        # all of the part until then.
        self._values = {slice_.spec: tf.raw_ops.DeepCopy(x=slice_.read())}

    def _serialize_to_tensors(self):
        return {"VARIABLE_VALUE": self._values}

    def _restore_from_tensors(self, restored_tensors):
        raise NotImplementedError("what is written is not read into")


def of_table(variable: tf.Variable, key: str) -> SlicedVariable:
    """Slices a large table, or a slot of one. It is read some rows at a time, since reading all of it would copy it."""
    whole = Box((0,) * len(variable.shape), tuple(variable.shape))
    return SlicedVariable(
        key, list(_slices_of(variable.shape, whole, _rows_of(variable), variable, is_copied=True)), is_live=True
    )


def of_parts(variable, key: str, is_live: bool) -> SlicedVariable:
    """Slices what this process writes of a variable that is cut over a mesh: the parts whose first holder it has.

    Args:
      variable: Keras's or TensorFlow's.
      key: in the checkpoint.
      is_live: whether the variable is read slice by slice while it is written, and not now: see `copies_when_read`.
    """
    cut, held = cuts.cut_of(variable), list(cuts.parts(variable))
    slices: list[Slice] = []
    for replica, part in held:
        if cut.is_first_holder(replica):
            read = _rows_of(part) if is_live else _rows_in(_read(part))
            box = cut.box(replica)
            is_copied = is_live or box.size[1:] != cut.local_shape[1:]
            slices += _slices_of(cut.shape, box, read, part, is_copied)
    return SlicedVariable(key, slices, is_live, frozenset(_writers(cut, len(held))))


def _writers(cut: cuts.Cut, replicas_a_process: int) -> Iterator[int]:
    for replica in cut.replicas:
        if cut.is_first_holder(replica) and all(cut.box(replica).size):
            yield replica // replicas_a_process


def _slices_of(shape, box: Box, read: Callable[[Box], tf.Tensor], variable: tf.Variable, is_copied: bool):
    """Yields the slices of a box; `read` takes a slice's box within what this process holds."""
    if not all(box.size):
        return
    row_bytes = variable.dtype.size * math.prod(box.size[1:])
    unit = 1 if is_copied else _ALIGNMENT_BYTES // math.gcd(_ALIGNMENT_BYTES, row_bytes)
    rows_at_once = max(1, SLICE_BYTES // row_bytes // unit) * unit
    first = 0
    while first < box.size[0]:
        stop = min(first + (rows_at_once if first else unit), box.size[0])
        size = (stop - first, *box.size[1:])
        inside = Box((first, *(0 for _ in size[1:])), size)
        spec = Box((box.begin[0] + first, *box.begin[1:]), size).spec(shape)
        size_bytes = row_bytes * size[0]
        copied_bytes = size_bytes if is_copied or size_bytes % _ALIGNMENT_BYTES else 0
        yield Slice(spec, host_of(variable.device), functools.partial(read, inside), copied_bytes)
        first = stop


def _rows_of(variable: tf.Variable) -> Callable[[Box], tf.Tensor]:
    def read(box: Box) -> tf.Tensor:
        rows = variable.sparse_read(tf.range(box.begin[0], box.begin[0] + box.size[0]))
        return tf.slice(rows, [0] * len(box.size), box.size)

    return read


def _rows_in(value: tf.Tensor) -> Callable[[Box], tf.Tensor]:
    def read(box: Box) -> tf.Tensor:
        if box.size[1:] != tuple(value.shape[1:]):
            return tf.slice(value, *box)
        # A slice of a vector shares its memory, where it begins and ends on TensorFlow's alignment.
        row = math.prod(box.size[1:])
        flat = tf.slice(tf.reshape(value, [-1]), [box.begin[0] * row], [box.size[0] * row])
        return tf.reshape(flat, box.size)

    return read


def _read(variable: tf.Variable) -> tf.Tensor:
    with tf.device(host_of(variable.device)):
        return tf.identity(variable.read_value())


def copies_when_read(variable: tf.Variable) -> bool:
    """Returns whether reading a variable of this process copies it.

    On a CPU a read shares the variable's memory, unless single rows of it were ever changed by a scatter.
    """
    if tf.DeviceSpec.from_string(variable.device).device_type != "CPU":
        return False  # it is copied to the host, not in the device's memory
    reads = [variable.read_value() for _ in range(2)]
    first, second = (np.asarray(read).__array_interface__["data"] for read in reads)
    return first != second


def write(found: Iterable[tuple[Slice, str]], prefix: str) -> list[str]:
    """Writes (slice, its key) to checkpoint files; returns their prefixes: `prefix` and a number each."""
    names = []
    for number, batch in enumerate(_batches(found)):
        names.append(f"{prefix}-{number}")
        with tf.device(batch[0][0].device):
            tf.raw_ops.SaveV2(
                prefix=names[-1],
                tensor_names=[key for _, key in batch],
                shape_and_slices=[slice_.spec for slice_, _ in batch],
                tensors=[slice_.read() for slice_, _ in batch],
            )
    return names


def _batches(found: Iterable[tuple[Slice, str]]) -> Iterator[list[tuple[Slice, str]]]:
    """Yields what is written to one file: slices on one host, of which no more than SLICE_BYTES have to be copied."""
    batch: list[tuple[Slice, str]] = []
    copied = 0
    for slice_, key in found:
        if batch and (slice_.device != batch[0][0].device or copied + slice_.copied_bytes > SLICE_BYTES):
            yield batch
            batch, copied = [], 0
        batch.append((slice_, key))
        copied += slice_.copied_bytes
    if batch:
        yield batch


def read_parts(prefix: str, key: str, variable) -> None:
    """Reads each local replica's part of a cut variable from a checkpoint, whatever mesh that was written on."""
    cut, variable = cuts.cut_of(variable), tf_variable(variable)
    read: dict[Box, tf.Tensor] = {}
    for replica, part in cuts.parts(variable):
        box = cut.box(replica)
        if box not in read:
            read[box] = _restored(prefix, key, cut, box, part, cuts.padding_of(variable))
        part.assign(read[box])


def _restored(prefix: str, key: str, cut: cuts.Cut, box: Box, part: tf.Variable, filling: float) -> tf.Tensor:
    with tf.device(host_of(part.device)):
        if not all(box.size):
            return tf.fill(cut.local_shape, tf.cast(filling, part.dtype))
        (value,) = tf.raw_ops.RestoreV2(
            prefix=os.fspath(prefix), tensor_names=[key], shape_and_slices=[box.spec(cut.shape)], dtypes=[part.dtype]
        )
        padding = [[0, n - s] for n, s in zip(cut.local_shape, box.size, strict=True)]
        return tf.pad(value, padding, constant_values=tf.cast(filling, part.dtype)) if np.any(padding) else value


def host_of(device: str) -> str:
    """Returns the CPU of the process that a device is in."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
