"""Updates by an optimizer that a mesh shards: each replica updates pieces, and all gather the weights. Replica code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import tensorflow as tf

from ...engine.internals.tensorflow import temporary_variable
from ...engine.internals.variables import assign_local
from ...engine.mesh.layout import Mesh
from ...engine.optimizers.base import Pairs, Place, Target
from .shards import UpdateShard, gather, plan_update_shard


class InShards(Place):
    """Pieces of the variables, one on each replica (`shards.UpdateShard`), which has the slots of it."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def piece(self, variable: tf.Variable) -> UpdateShard | None:
        return plan_update_shard(variable, self._mesh)

    @contextlib.contextmanager
    def opened(self, pairs: Pairs) -> Iterator[Pairs]:
        opened, wholes = list[tuple](), list[Target]()
        for gradient, target in pairs:
            if target.piece:
                gradient = tf.convert_to_tensor(gradient)
                if gradient.shape == target.variable.shape:  # of a whole gradient, its shard
                    gradient = target.piece.own(gradient)
                wholes.append(target)
                target = copy.copy(target)
                target.variable = temporary_variable(target.piece.own(target.read()))
            opened.append((gradient, target))
        yield opened
        pieces = [target for _, target in opened if target.piece]
        values = gather((target.piece, target.read()) for target in pieces) if pieces else []
        for target, value in zip(wholes, values, strict=True):
            assign_local(target.variable, value)
