"""Variables that each replica of a mesh holds a part of: which part, how it is filled, how a checkpoint names it.

Such a variable is made in a strategy's scope, of its part's shape, and each replica's part is assigned its own values.
It carries its `Cut`; a slot or an average of it carries the same, or one that is cut further.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from crankshaft.engine.internals.variables import path_of, tf_variable
from crankshaft.engine.parallel.mesh import Mesh, local_replicas

_PIECE_BYTES = 16 << 20  # of a part, that are drawn at once


class Box(NamedTuple):
    """A part of an array: where it begins, and its size, along each axis."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + s) for b, s in zip(self.begin, self.size, strict=True))

    def spec(self, shape: Sequence[int]) -> str:
        """Returns it, of an array of `shape`, in the form of TensorFlow's SaveV2 and RestoreV2: "8 12 0,8:6,6"."""
        whole = " ".join(map(str, shape))
        return f"{whole} " + ":".join(f"{b},{s}" for b, s in zip(self.begin, self.size, strict=True))


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an array is cut over a mesh.

    Each axis of the mesh that is named cuts an axis of the array into equal pieces, the last of which may lack some
    rows of the array (it is *padded*); where several cut the same one, the later cut the pieces of the earlier.

    Attributes:
      shape: of the whole.
      axes: (axis of the array, name of the mesh's axis), in the order of cutting.
      mesh_shape: by the name of an axis of the mesh, its size.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[int, str], ...]
    mesh_shape: tuple[tuple[str, int], ...]

    @classmethod
    def over(cls, mesh: Mesh, shape, axes) -> Cut:
        """Makes the cut of an array of `shape` over a mesh; `axes` maps an axis of it to one of the mesh."""
        return cls(tuple(shape), tuple(axes.items()), (("data", mesh.data.size), ("model", mesh.model.size)))

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
        """Returns which part of the whole a replica holds, without padding; its size may be 0 along an axis."""
        sizes = dict(self.mesh_shape)
        place = {"data": replica // sizes["model"], "model": replica % sizes["model"]}
        begin, end, length = [0] * len(self.shape), list(self.shape), list(self.shape)
        for axis, name in self.axes:
            length[axis] = -(-length[axis] // sizes[name])
            begin[axis] = min(begin[axis] + place[name] * length[axis], end[axis])
            end[axis] = min(begin[axis] + length[axis], end[axis])
        size = [e - b for b, e in zip(begin, end, strict=True)]
        return Box(tuple(begin), tuple(size))

    def is_first_holder(self, replica: int) -> bool:
        """Returns whether no replica of a lower id holds the same part: it writes the part into checkpoints."""
        cut_by, sizes = {name for _, name in self.axes}, dict(self.mesh_shape)
        place = {"data": replica // sizes["model"], "model": replica % sizes["model"]}
        return all(place[name] == 0 for name in place if name not in cut_by)


def cut_of(variable) -> Cut | None:
    """Returns how a variable, Keras's or TensorFlow's, is cut; None of one that each replica has a copy of."""
    return getattr(tf_variable(variable), "mesh_cut", None)


def mark(variable, cut: Cut | None, padding: float = 0.0) -> None:
    """Says how a variable is cut, once it is made, and what its padding is filled with. Host code."""
    if cut is not None:
        tf_variable(variable).mesh_cut = cut
        tf_variable(variable).mesh_padding = padding


def padding_of(variable) -> float:
    """Returns what the padding of a cut variable is filled with: of a slot what it begins with, as 1/0 is no number."""
    return tf_variable(variable).mesh_padding


def parts(variable) -> Iterator[tuple[int, tf.Variable]]:
    """Yields (replica's id, its part) of each of this process's replicas; a plain variable is replica 0's."""
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
    """Returns the whole of any variable, cut or not, of which this process has all parts. Host code.

    Raises:
      ValueError: other processes have parts of it.
    """
    cut = cut_of(variable)
    if cut is None:
        return tf_variable(variable).numpy()
    found, left = np.empty(cut.shape, tf_variable(variable).dtype.as_numpy_dtype), set(map(cut.box, cut.replicas))
    for replica, part in parts(variable):
        box = cut.box(replica)
        found[box.slices] = part.numpy()[tuple(slice(0, n) for n in box.size)]
        left.discard(box)
    if left:
        raise ValueError(f"other processes have parts of {path_of(variable)}")
    return found


def fill(variable, draw: Callable[[Box], tf.Tensor]) -> None:
    """Assigns each replica's part of a cut variable its own values, piece by piece; padding is 0. Host code.

    Args:
      variable: that carries its cut.
      draw: returns the values of any box of the whole: a function of the position alone, so that a model does not
        depend on the mesh.
    """
    cut = cut_of(variable)
    for replica, part in parts(variable):
        begin, size = cut.box(replica)
        row_bytes = max(1, part.dtype.size * math.prod(size[1:]))
        rows = max(1, _PIECE_BYTES // row_bytes)
        with tf.device(part.device):
            # Not by scattering into the variable: from then on each read of it would copy it.
            values = tf.raw_ops.Empty(shape=cut.local_shape, dtype=part.dtype, init=True)
            for first in range(0, size[0], rows):
                count = min(rows, size[0] - first)
                drawn = draw(Box((begin[0] + first, *begin[1:]), (count, *size[1:])))
                padding = [[0, n - s] for n, s in zip(cut.local_shape[1:], size[1:], strict=True)]
                values = tf.raw_ops.InplaceUpdate(
                    x=values, i=tf.range(first, first + count), v=tf.pad(drawn, [[0, 0], *padding])
                )
            part.assign(values)
