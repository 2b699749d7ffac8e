"""Shards of variables over a mesh (`sharded`): how their updates are sharded.

Such a variable's slots and its average carry the same `Sharding`, or one split further.

Updates are sharded, too (`UpdateShard`): of the replicas that have the same values, each updates one piece.
ZeRO, stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): a replica receives only its piece of the
summed gradient, keeps the optimizer's slots of that piece, updates it, and then all replicas gather the weights. The
replicas with the same values are those along `data` for a variable sharded over `model`, and all for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine.internals.variables import tf_variable
from ...engine.mesh import collectives
from ...engine.mesh.layout import AXES, DATA, Axis, Mesh
from ...engine.mesh.sharded import Sharding, variable_sharding

LEAST_VALUES = 1024  # a smaller variable's update is not sharded: the operations would cost more than its slots
_GATHERED_BYTES = 4 << 20  # gathered at once, approximately


class UpdateShard(NamedTuple):
    """How a variable's update is sharded over replicas.

    Attributes:
      sharding: the sharding of the update; the variable's slots carry the same.
      axis: the array's axis that is split into equal pieces, one for each holder.
      holders: the replicas that hold the same values, as an axis of the mesh.
      shape: the shape of the values of each holder.
    """

    sharding: Sharding
    axis: int
    holders: Axis
    shape: tuple[int, ...]

    def pieces(self, value: tf.Tensor) -> tf.Tensor:
        """Splits a value of `shape` into its pieces, [holders, values of a piece]."""
        split = tf.reshape(value, self._split_shape)
        return tf.reshape(tf.transpose(split, self._order) if self.axis else split, [self.holders.size, -1])

    def whole(self, pieces: tf.Tensor) -> tf.Tensor:
        """Joins pieces, as `pieces` returns them, into the value."""
        if self.axis:
            split_shape, order = self._split_shape, self._order
            pieces = tf.reshape(pieces, [split_shape[index] for index in order])
            pieces = tf.transpose(pieces, [order.index(index) for index in range(len(split_shape))])
        return tf.reshape(pieces, self.shape)

    def own(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's piece of a value of `shape`. Replica code."""
        begin, size = [0] * len(self.shape), self.sharding.local_shape
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


def plan_update_shard(variable: Any, mesh: Mesh) -> UpdateShard | None:
    """Returns how a variable's update is sharded over a mesh; None if every holder updates all of it.

    It is None if the mesh shards no optimizer, for a small variable, and if no axis divides by the holders' number.
    """
    if not mesh.shard_optimizer:
        return None
    sharding, shape = variable_sharding(variable), tuple(tf_variable(variable).shape)
    holders = mesh.data if sharding else mesh.all_replicas
    axis = next((axis for axis, length in enumerate(shape) if length % holders.size == 0), None)
    if holders.size == 1 or axis is None or math.prod(shape) < LEAST_VALUES:
        return None
    further = sharding or Sharding.over(mesh, shape, {})
    for name in (DATA,) if sharding else AXES:
        further = further.further(axis, name)
    return UpdateShard(further, axis, holders, shape)


def gather(pieces: Iterable[tuple[UpdateShard, tf.Tensor]]) -> list[tf.Tensor]:
    """Gathers whole values from the replicas' pieces. Replica code.

    Args:
      pieces: (how a value is sharded, this replica's piece), all of one dtype, in the same order on all replicas.
    """
    pieces = list(pieces)
    wholes: list = [None] * len(pieces)
    for axis in {id(piece.holders): piece.holders for piece, _ in pieces}.values():
        held = [index for index, (piece, _) in enumerate(pieces) if piece.holders is axis]
        owns = [tf.reshape(pieces[index][1], [-1]) for index in held]
        for bucket in collectives.buckets([shard.shape[0] * shard.dtype.size for shard in owns], _GATHERED_BYTES):
            gathered = collectives.as_one([owns[position] for position in bucket], axis.all_gather)
            for position, values in zip(bucket, gathered, strict=True):
                wholes[held[position]] = pieces[held[position]][0].whole(values)
    return wholes
