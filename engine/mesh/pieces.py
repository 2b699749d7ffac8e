"""Updates that are shared out: of the replicas that hold the same values of a variable, each updates one piece.

ZeRO, stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): a replica receives only its piece of the
summed gradient, keeps the optimizer's slots of that piece, updates it, and then all replicas gather the weights. The
replicas that hold the same values are those along `data` for a variable that is cut over `model`, and all for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from ..internals.variables import tf_variable
from . import collectives
from .cuts import Cut, cut_of
from .mesh import AXES, DATA, Axis, Mesh

LEAST_VALUES = 1024  # of a variable that is shared out: a smaller one's slots are not worth the operations
_GATHERED_BYTES = 4 << 20  # gathered at once, about


class Piece(NamedTuple):
    """How replicas share out a variable's update.

    Attributes:
      cut: how the variable is cut into what each replica updates; its slots carry the same cut.
      axis: the array's axis that is cut into equal pieces, one for each holder.
      holders: the replicas that hold the same values, as an axis of the mesh.
      shape: of the values that each of them holds.
    """

    cut: Cut
    axis: int
    holders: Axis
    shape: tuple[int, ...]

    def rows(self, value: tf.Tensor) -> tf.Tensor:
        """Splits a value of `shape` into its pieces, [holders, values of a piece]."""
        pieces = tf.reshape(value, self._split_shape)
        return tf.reshape(tf.transpose(pieces, self._order) if self.axis else pieces, [self.holders.size, -1])

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """Joins pieces, as `rows` returns them, into the value."""
        if self.axis:
            own, order = self._split_shape, self._order
            rows = tf.reshape(rows, [own[index] for index in order])
            rows = tf.transpose(rows, [order.index(index) for index in range(len(own))])
        return tf.reshape(rows, self.shape)

    def own(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's piece of a value of `shape`. Replica code."""
        begin, size = [0] * len(self.shape), self.cut.local_shape
        begin[self.axis] = self.holders.rank * size[self.axis]
        return tf.slice(value, begin, size)

    @property
    def _split_shape(self) -> list[int]:
        before, length, after = self.shape[: self.axis], self.shape[self.axis], self.shape[self.axis + 1 :]
        return [*before, self.holders.size, length // self.holders.size, *after]

    @property
    def _order(self) -> list[int]:
        rest = [index for index in range(len(self.shape) + 1) if index != self.axis]
        return [self.axis, *rest]


def piece_of(variable, mesh: Mesh) -> Piece | None:
    """Returns how a variable's update is shared out over a mesh; None if every holder updates all of it.

    None where the mesh does not shard the optimizer, for a small variable, and for one with no axis that divides by the
    number of its holders.
    """
    if not mesh.shard_optimizer:
        return None
    cut, shape = cut_of(variable), tuple(tf_variable(variable).shape)
    holders = mesh.data if cut else mesh.everyone
    axis = next((axis for axis, length in enumerate(shape) if length % holders.size == 0), None)
    if holders.size == 1 or axis is None or math.prod(shape) < LEAST_VALUES:
        return None
    further = cut or Cut.over(mesh, shape, {})
    for name in (DATA,) if cut else AXES:
        further = further.further(axis, name)
    return Piece(further, axis, holders, shape)


def gather(pieces: Iterable[tuple[Piece, tf.Tensor]]) -> list[tf.Tensor]:
    """Gathers whole values from the pieces that each replica has. Replica code.

    Args:
      pieces: (how a value is shared out, this replica's piece of it), all of one dtype; in the same order on all
        replicas.
    """
    pieces = list(pieces)
    wholes: list = [None] * len(pieces)
    for axis in {id(piece.holders): piece.holders for piece, _ in pieces}.values():
        held = [index for index, (piece, _) in enumerate(pieces) if piece.holders is axis]
        owns = [tf.reshape(pieces[index][1], [-1]) for index in held]
        for pack in collectives.packs([own.shape[0] * own.dtype.size for own in owns], _GATHERED_BYTES):
            rows = collectives.as_one([owns[place] for place in pack], axis.all_gather)
            for place, row in zip(pack, rows, strict=True):
                wholes[held[place]] = pieces[held[place]][0].whole(row)
    return wholes
