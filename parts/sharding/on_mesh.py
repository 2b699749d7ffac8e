"""Sums gradients of shards: of a model that is sharded over a mesh, or of sharded updates. Replica code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine.errors import UsageError
from ...engine.mesh import collectives
from ...engine.mesh.layout import Mesh
from ...engine.mesh.sharded import Sharding, variable_sharding
from ...engine.reduction.all_reduce import Reduction, zero_without_examples
from ...engine.reduction.wire import from_halves, move_as_int32, to_halves
from ...engine.step.context import step_context
from ...engine.step.gradients import Gradients, sum_duplicate_rows
from .shards import UpdateShard, plan_update_shard


class OnMesh(Reduction):
    """A `Reduction` over a mesh that shards the model or the optimizer (`parts.sharding.shards`).

    Gradients of a variable sharded over `model` are summed along `data`. If updates are sharded, each replica is sent
    only its own shards, in any dtype, and adds them up: `sum` returns the shard that this replica updates. Slices of
    such variables, and all if the optimizer is sharded, are made dense. The rest is summed as by `Reduction`.
    """

    def sum(
        self,
        gradients: Sequence,
        count: tf.Tensor,
        averages: Sequence[tf.Variable] | None = None,
        variables: Sequence = (),
    ) -> tuple[Gradients, tf.Tensor]:
        mesh = step_context().mesh
        if mesh.all_replicas.size == 1:
            return super().sum(gradients, count, averages, variables)
        if mesh.is_sharded and len(variables) != len(gradients):
            raise UsageError(
                "reduction.sum has to know which variables are sharded over the mesh; pass variables=..., one "
                "for each gradient"
            )
        # Replicas along `model` have the same examples: one of them counts them, and adds the gradients of copies.
        given, count = list(gradients), self._example_count(count)
        count_once = mesh.zero_except_first_model_rank(count)
        pieces = [plan_update_shard(v, mesh) for v in variables] or [None] * len(given)
        shardings = [variable_sharding(v) for v in variables] or [None] * len(given)
        rest: list[Any] = [
            tf.convert_to_tensor(x) if isinstance(x, tf.IndexedSlices) and (sharding or mesh.shard_optimizer) else x
            for x, sharding in zip(given, shardings, strict=True)
        ]
        rest = [x if sharding else _counted_once(x, mesh) for x, sharding in zip(rest, shardings, strict=True)]
        kinds = [(bool(piece), bool(sharding)) for piece, sharding in zip(pieces, shardings, strict=True)]
        summed: dict[int, tf.Tensor] = {}
        # Each kind goes over another axis, so each has buckets of its own.
        for kind in ((True, True), (True, False), (False, True)):
            axis = mesh.data if kind[1] else mesh.all_replicas
            indices = [i for i, x in enumerate(rest) if x is not None and kinds[i] == kind]
            values = [tf.ensure_shape(zero_without_examples(rest[i]), variables[i].shape) for i in indices]
            items: list[Any] = [_ShardItem(x, False, pieces[i]) for i, x in zip(indices, values, strict=True)]
            sums = self._sum_in_buckets(axis, items, self._sum_pieces if kind[0] else None)
            summed |= zip(indices, sums, strict=True)
        if given and "gradient_norm" in self.watched:
            super()._watch_norm(given, count)
        rest = [None if i in summed else x for i, x in enumerate(rest)]
        copies, total = super().sum(rest, count_once, averages, variables)
        shardings = [p.sharding if p else sharding for p, sharding in zip(pieces, shardings, strict=True)]
        return ShardedGradients([summed.get(i, x) for i, x in enumerate(copies)], shardings=shardings), total

    def _watch_norm(self, gradients: Sequence, count: tf.Tensor) -> None:
        """Does nothing: `sum` watches the norm of all gradients, not of the copies' alone."""

    def _sum_pieces(self, axis: Any, bucket: list[Any]) -> list[tf.Tensor]:
        """Sums each item's piece on its replica; 16-bit values in float32, in the order of the replicas."""
        split = [item.piece.pieces(tf.cast(item.value, tf.float32)) for item in bucket]
        if self.reduce_dtype == tf.float32:
            sums = collectives.as_one(split, lambda joined: axis.reduce_scatter(joined)[0])
        else:
            halves = [tf.reshape(to_halves(pieces, self.reduce_dtype), pieces.shape) for pieces in split]
            lanes = collectives.as_one(halves, lambda joined: move_as_int32(joined, axis.all_to_all))
            sums = [tf.reduce_sum(from_halves(lane, self.reduce_dtype), 0) for lane in lanes]
        return [tf.reshape(total, item.piece.sharding.local_shape) for total, item in zip(sums, bucket, strict=True)]


def _counted_once(gradient: Any, mesh: Mesh) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = mesh.zero_except_first_model_rank(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else mesh.zero_except_first_model_rank(gradient)


class _ShardItem(NamedTuple):
    """An `Item` of a variable that is sharded, or of whose sum each replica gets only its own `piece`."""

    value: tf.Tensor
    exact: bool
    piece: UpdateShard | None


class ShardedGradients(Gradients):
    """Gradients of shards.

    Args:
      shardings: how each gradient is sharded over the step's mesh; None for copies on each replica.
    """

    exchanges_norm = True

    def __init__(self, values: Sequence, factors: tuple[tf.Tensor, ...] = (), *, shardings: Sequence[Sharding | None]):
        super().__init__(values, factors)
        self.shardings = shardings

    def with_values(self, values: Sequence, factors: tuple[tf.Tensor, ...] | None = None) -> Gradients:
        return ShardedGradients(values, self.factors if factors is None else factors, shardings=self.shardings)

    def joined(self, others: Sequence[Any]) -> Gradients:
        shardings = itertools.chain.from_iterable(gradients.shardings for gradients in (self, *others))
        return ShardedGradients(super().joined(others).values, shardings=[*shardings])

    def norm(self) -> tf.Tensor:
        return self.norms([range(len(self))])[0]

    def norms(self, groups: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        """Returns the norms by one exchange, the same bits on all replicas.

        If several replicas have the same shard or copy, only the first of them counts its squares.
        """
        replicas = step_context().mesh.all_replicas
        rank = replicas.rank

        def squares(position: int) -> tf.Tensor | None:
            gradient, sharding = self.values[position], self.shardings[position]
            if gradient is None or not (sharding.is_first_holder(rank) if sharding else rank == 0):
                return None
            gradient = sum_duplicate_rows(gradient)
            return 2.0 * tf.nn.l2_loss(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)

        def total(group: Sequence[int]) -> tf.Tensor:
            held = [x for position in group if (x := squares(position)) is not None]
            return tf.add_n(held) if held else tf.constant(0.0)

        norms = tf.sqrt(replicas.all_reduce(tf.stack([total(group) for group in groups])))
        return [self._product(norm) for norm in tf.unstack(norms)]
