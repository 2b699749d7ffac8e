"""Variables sharded over a mesh: which range of the whole a replica holds, as the variable itself says.

Such a variable has the shape of a shard, and carries its `Sharding`. `shards` shards its updates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from ..internals.variables import tf_variable, variable_path
from .layout import DATA, MODEL, Mesh, local_replicas

_PIECE_BYTES = 16 << 20  # piece of a shard whose values are set at once


class Box(NamedTuple):
    """A range of an array: where it begins, and its size, along each axis."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + s) for b, s in zip(self.begin, self.size, strict=True))

    def spec(self, shape: Sequence[int]) -> str:
        """Formats the box, within an array of `shape`, for TensorFlow's SaveV2 and RestoreV2: "8 12 0,8:6,6"."""
        whole = " ".join(map(str, shape))
        return f"{whole} " + ":".join(f"{b},{s}" for b, s in zip(self.begin, self.size, strict=True))


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How an array is sharded over a mesh.

    Each pair in `axes` splits one axis of the array into equal pieces over one axis of the mesh; the last piece is
    *padded* where the sizes do not divide. Two pairs that name the same axis of the array split its pieces once more.

    Attributes:
      shape: the shape of the whole array.
      axes: (axis of the array, name of the mesh's axis), in the order of splitting.
      mesh_shape: (name, size) of each axis of the mesh.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[int, str], ...]
    mesh_shape: tuple[tuple[str, int], ...]

    @classmethod
    def over(cls, mesh: Mesh, shape: Any, axes: Any) -> Sharding:
        """Shards an array of `shape` over a mesh; `axes` maps an axis of it to one of the mesh."""
        return cls(tuple(shape), tuple(axes.items()), tuple(mesh.shape.items()))

    def further(self, axis: int, name: str) -> Sharding:
        """Returns this sharding with each shard split once more."""
        return dataclasses.replace(self, axes=(*self.axes, (axis, name)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on each replica, including padding."""
        shape, sizes = list(self.shape), dict(self.mesh_shape)
        for axis, name in self.axes:
            shape[axis] = -(-shape[axis] // sizes[name])
        return tuple(shape)

    @property
    def replicas(self) -> range:
        """The ids of all replicas of the mesh."""
        return range(math.prod(size for _, size in self.mesh_shape))

    def box(self, replica: int) -> Box:
        """Returns a replica's range of the whole, without padding; its size may be 0 along an axis."""
        sizes, coordinates = dict(self.mesh_shape), self._coordinates(replica)
        begin, end, length = [0] * len(self.shape), list(self.shape), list(self.shape)
        for axis, name in self.axes:
            length[axis] = -(-length[axis] // sizes[name])
            begin[axis] = min(begin[axis] + coordinates[name] * length[axis], end[axis])
            end[axis] = min(begin[axis] + length[axis], end[axis])
        size = [e - b for b, e in zip(begin, end, strict=True)]
        return Box(tuple(begin), tuple(size))

    def is_first_holder(self, replica: int) -> bool:
        """Returns whether a replica is the first with its shard: the one that writes it to checkpoints."""
        sharded_over = {name for _, name in self.axes}
        return all(number == 0 for name, number in self._coordinates(replica).items() if name not in sharded_over)

    def _coordinates(self, replica: int) -> dict[str, int]:
        """Returns a replica's position along each axis of the mesh, by the axis's name."""
        model = dict(self.mesh_shape)[MODEL]
        return {DATA: replica // model, MODEL: replica % model}


def variable_sharding(variable: Any) -> Sharding | None:
    """Returns how a variable, Keras's or TensorFlow's, is sharded; None if each replica has a copy of all of it."""
    return getattr(tf_variable(variable), "mesh_sharding", None)


def mark(variable: Any, sharding: Sharding | None, padding: float = 0.0) -> None:
    """Records on a variable how it is sharded, and the value of its padding."""
    if sharding is not None:
        tf_variable(variable).mesh_sharding = sharding
        tf_variable(variable).mesh_padding = padding


def padding_value(variable: Any) -> float:
    """Returns the value of a sharded variable's padding: a slot's initial value, so that 1/slot stays finite."""
    return tf_variable(variable).mesh_padding


def local_shards(variable: Any) -> Iterator[tuple[int, tf.Variable]]:
    """Yields (replica's id, its shard) for each replica in this process; a plain variable is replica 0's."""
    variable = tf_variable(variable)
    if not isinstance(variable, tf.distribute.DistributedValues):
        yield 0, variable
        return
    strategy = variable.distribute_strategy
    yield from zip(local_replicas(strategy), strategy.experimental_local_results(variable), strict=True)


def fill(variable: Any, sample: Callable[[Box], tf.Tensor]) -> None:
    """Fills each replica's shard of a sharded variable, piece by piece; padding is 0.

    Args:
      variable: carries its sharding.
      sample: returns the values of any box of the whole, by position alone, so that weights don't depend on the mesh.
    """
    sharding = variable_sharding(variable)
    assert sharding
    for replica, shard in local_shards(variable):
        begin, size = sharding.box(replica)
        row_bytes = max(1, shard.dtype.size * math.prod(size[1:]))
        rows = max(1, _PIECE_BYTES // row_bytes)
        with tf.device(shard.device):
            # Not by a scatter into the variable: after that, each read would copy it.
            values = tf.raw_ops.Empty(shape=sharding.local_shape, dtype=shard.dtype, init=True)
            for first in range(0, size[0], rows):
                count = min(rows, size[0] - first)
                sampled = sample(Box((begin[0] + first, *begin[1:]), (count, *size[1:])))
                padding = [[0, n - s] for n, s in zip(sharding.local_shape[1:], size[1:], strict=True)]
                values = tf.raw_ops.InplaceUpdate(
                    x=values, i=tf.range(first, first + count), v=tf.pad(sampled, [[0, 0], *padding])
                )
            shard.assign(values)


def size(variable: Any) -> int:
    """Returns the number of values of the whole of any variable."""
    sharding = variable_sharding(variable)
    return math.prod(sharding.shape if sharding else tf_variable(variable).shape)


def whole(variable: Any) -> np.ndarray:
    """Returns the whole value of a variable, all of whose shards are in this process.

    Raises:
      UsageError: other processes hold shards of it.
    """
    sharding = variable_sharding(variable)
    if sharding is None:
        return tf_variable(variable).numpy()
    array = np.empty(sharding.shape, tf_variable(variable).dtype.as_numpy_dtype)
    left = set(map(sharding.box, sharding.replicas))
    for replica, shard in local_shards(variable):
        box = sharding.box(replica)
        array[box.slices] = shard.numpy()[tuple(slice(0, n) for n in box.size)]
        left.discard(box)
    if left:
        raise UsageError(f"other processes have shards of {variable_path(variable)}")
    return array
