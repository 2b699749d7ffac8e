"""Variables of which each replica of a mesh holds a part: which part, how it is filled, how a checkpoint names it.

Such a variable is made in a strategy's scope with the shape of a part, and each replica assigns its part its own
values. The variable carries its `Cut`; its slots and its average carry the same one, or one that is cut further.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ..internals.errors import UsageError
from ..internals.variables import path_of, tf_variable
from .mesh import DATA, MODEL, Mesh, local_replicas

_PIECE_BYTES = 16 << 20  # of a part that is filled: drawn at once


class Box(NamedTuple):
    """A part of an array: where it begins, and its size, along each axis."""

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
class Cut:
    """How an array is cut over a mesh.

    Each pair in `axes` cuts one axis of the array into equal pieces over one axis of the mesh; the last piece is
    *padded* where the sizes do not divide. Two pairs that name the same axis of the array cut its pieces once more.

    Attributes:
      shape: of the whole array.
      axes: (axis of the array, name of the mesh's axis), in the order of cutting.
      mesh_shape: (name, size) of each axis of the mesh.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[int, str], ...]
    mesh_shape: tuple[tuple[str, int], ...]

    @classmethod
    def over(cls, mesh: Mesh, shape, axes) -> Cut:
        """Makes the cut of an array of `shape` over a mesh; `axes` maps an axis of it to one of the mesh."""
        return cls(tuple(shape), tuple(axes.items()), tuple(mesh.shape.items()))

    def further(self, axis: int, name: str) -> Cut:
        """Returns this cut with each part cut once more."""
        return dataclasses.replace(self, axes=(*self.axes, (axis, name)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that each replica holds, padding included."""
        shape, sizes = list(self.shape), dict(self.mesh_shape)
        for axis, name in self.axes:
            shape[axis] = -(-shape[axis] // sizes[name])
        return tuple(shape)

    @property
    def replicas(self) -> range:
        """The ids of all replicas of the mesh."""
        return range(math.prod(size for _, size in self.mesh_shape))

    def box(self, replica: int) -> Box:
        """Returns the part of the whole that a replica holds, without padding; its size may be 0 along an axis."""
        sizes, coordinates = dict(self.mesh_shape), self._coordinates(replica)
        begin, end, length = [0] * len(self.shape), list(self.shape), list(self.shape)
        for axis, name in self.axes:
            length[axis] = -(-length[axis] // sizes[name])
            begin[axis] = min(begin[axis] + coordinates[name] * length[axis], end[axis])
            end[axis] = min(begin[axis] + length[axis], end[axis])
        size = [e - b for b, e in zip(begin, end, strict=True)]
        return Box(tuple(begin), tuple(size))

    def is_first_holder(self, replica: int) -> bool:
        """Returns whether a replica is the first of those that hold its part: the one that writes it to checkpoints."""
        cut_by = {name for _, name in self.axes}
        return all(number == 0 for name, number in self._coordinates(replica).items() if name not in cut_by)

    def _coordinates(self, replica: int) -> dict[str, int]:
        """Returns a replica's place along each axis of the mesh, by the axis's name."""
        model = dict(self.mesh_shape)[MODEL]
        return {DATA: replica // model, MODEL: replica % model}


def cut_of(variable) -> Cut | None:
    """Returns how a variable, Keras's or TensorFlow's, is cut; None if each replica has a copy of all of it."""
    return getattr(tf_variable(variable), "mesh_cut", None)


def mark(variable, cut: Cut | None, padding: float = 0.0) -> None:
    """Records on a variable how it is cut, and what its padding is filled with. Host code."""
    if cut is not None:
        tf_variable(variable).mesh_cut = cut
        tf_variable(variable).mesh_padding = padding


def padding_of(variable) -> float:
    """Returns what a cut variable's padding is filled with: a slot's initial value, so that 1/slot stays finite."""
    return tf_variable(variable).mesh_padding


def parts(variable) -> Iterator[tuple[int, tf.Variable]]:
    """Yields (replica's id, its part) for each replica in this process; a plain variable is replica 0's."""
    variable = tf_variable(variable)
    if not isinstance(variable, tf.distribute.DistributedValues):
        yield 0, variable
        return
    strategy = variable.distribute_strategy
    yield from zip(local_replicas(strategy), strategy.experimental_local_results(variable), strict=True)


def size(variable) -> int:
    """Returns the number of values of the whole of any variable."""
    cut = cut_of(variable)
    return math.prod(cut.shape if cut else tf_variable(variable).shape)


def whole(variable) -> np.ndarray:
    """Returns the whole value of a variable, cut or not, all of whose parts are in this process. Host code.

    Raises:
      UsageError: other processes hold parts of it.
    """
    cut = cut_of(variable)
    if cut is None:
        return tf_variable(variable).numpy()
    array, left = np.empty(cut.shape, tf_variable(variable).dtype.as_numpy_dtype), set(map(cut.box, cut.replicas))
    for replica, part in parts(variable):
        box = cut.box(replica)
        array[box.slices] = part.numpy()[tuple(slice(0, n) for n in box.size)]
        left.discard(box)
    if left:
        raise UsageError(f"other processes have parts of {path_of(variable)}")
    return array


def fill(variable, draw: Callable[[Box], tf.Tensor]) -> None:
    """Assigns each replica's part of a cut variable its own values, piece by piece; padding is 0. Host code.

    Args:
      variable: carries its cut.
      draw: returns the values of any box of the whole: a function of the position alone, so that a model's weights do
        not depend on the mesh.
    """
    cut = cut_of(variable)
    for replica, part in parts(variable):
        begin, size = cut.box(replica)
        row_bytes = max(1, part.dtype.size * math.prod(size[1:]))
        rows = max(1, _PIECE_BYTES // row_bytes)
        with tf.device(part.device):
            # Not by scattering into the variable: after that, each read of it would make a copy.
            values = tf.raw_ops.Empty(shape=cut.local_shape, dtype=part.dtype, init=True)
            for first in range(0, size[0], rows):
                count = min(rows, size[0] - first)
                drawn = draw(Box((begin[0] + first, *begin[1:]), (count, *size[1:])))
                padding = [[0, n - s] for n, s in zip(cut.local_shape[1:], size[1:], strict=True)]
                values = tf.raw_ops.InplaceUpdate(
                    x=values, i=tf.range(first, first + count), v=tf.pad(drawn, [[0, 0], *padding])
                )
            part.assign(values)
