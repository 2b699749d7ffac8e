"""Updates that are shared out: of replicas that hold the same values of a variable, each updates a piece of them.

ZeRO, stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): a replica is sent the sum of its piece's
gradient alone, keeps the optimizer's slots of that piece, and then all gather the weights. Those that hold the same
values are, of a variable that is cut over `model`, the replicas along `data`, and of a copy all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from crankshaft.engine.internals.variables import tf_variable
from crankshaft.engine.parallel.cuts import Cut, cut_of
from crankshaft.engine.parallel.mesh import AXES, DATA, Axis, Mesh

LEAST_VALUES = 1024  # of a variable: the slots of a smaller one are not worth the operations
_GATHERED_BYTES = 4 << 20  # that travel at once, about


class Piece(NamedTuple):
    """How replicas share out a variable's update.

    Attributes:
      cut: of what each updates; its slots carry it.
      axis: of the array, that is cut into as many equal pieces as there are holders.
      holders: the replicas that hold the same values, as an axis of the mesh.
      shape: of the values that they hold.
    """

    cut: Cut
    axis: int
    holders: Axis
    shape: tuple[int, ...]

    def rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns all pieces of a value of `shape`, [holders, values of a piece]."""
        pieces = tf.reshape(value, self._split_shape)
        return tf.reshape(tf.transpose(pieces, self._order) if self.axis else pieces, [self.holders.size, -1])

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the value that `rows` has made these pieces of."""
        if self.axis:
            own, order = self._split_shape, self._order
            rows = tf.reshape(rows, [own[place] for place in order])
            rows = tf.transpose(rows, [order.index(place) for place in range(len(own))])
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
        rest = [place for place in range(len(self.shape) + 1) if place != self.axis]
        return [self.axis, *rest]


def piece_of(variable, mesh: Mesh) -> Piece | None:
    """Returns how a variable's update is shared out over a mesh; None where each that holds it makes all of it.

    That is where the mesh does not shard the optimizer, and of a small variable, or one none of whose axes divides by
    the number of its holders.
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
    """Gathers whole values of what each replica has its own piece of. Replica code.

    Args:
      pieces: how each is shared out, and this replica's, of one dtype; the same on all replicas, in the same order.
    """
    pieces = list(pieces)
    wholes: list = [None] * len(pieces)
    for axis in {id(piece.holders): piece.holders for piece, _ in pieces}.values():
        held = [place for place, (piece, _) in enumerate(pieces) if piece.holders is axis]
        for pack in _packs(held, [own.shape.num_elements() * own.dtype.size for _, own in pieces]):
            owns = [tf.reshape(pieces[place][1], [-1]) for place in pack]
            rows = axis.all_gather(tf.concat(owns, 0) if len(owns) > 1 else owns[0])
            parts = tf.split(rows, [own.shape[0] for own in owns], axis=1)
            for place, part in zip(pack, parts, strict=True):
                wholes[place] = pieces[place][0].whole(part)
    return wholes


def _packs(places: list[int], sizes: list[int]) -> list[list[int]]:
    packs: list[list[int]] = []
    room = 0
    for place in places:
        if room < sizes[place] or not packs:
            packs.append([])
            room = _GATHERED_BYTES
        packs[-1].append(place)
        room -= sizes[place]
    return packs
