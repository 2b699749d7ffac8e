"""PowerSGD: gradients travel as two thin matrices, and what is lost that way is added to the next gradients.

Replica code, but for `build`. Vogels, Karimireddy, Jaggi 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..internals.variables import assign_local, key_of, tf_variable
from ..mesh.mesh import Axis
from ..step.context import step_context
from ..step.gradients import Gradients
from . import per_replica
from .aggregation import Aggregated, assign
from .all_reduce import Item, Reduction, items_of, of_examples


class PowerSgd(Reduction):
    """A `Reduction` that compresses the gradients of matrices to a rank, with error feedback.

    A gradient [..., columns] is a matrix M [rows, columns], and travels as P = M Q [rows, rank] and, once P has been
    summed and its columns made orthonormal, P^T M [rank, columns]; their product is what is applied. It is M where
    M has no higher rank, and the best known approximation where P comes near to M's first singular vectors, which it
    does from step to step, since each step begins from the last one's Q. A gradient that this makes no smaller
    (vectors, small matrices) travels as it is, and so do slices.

    *The memory.* What a replica's share of M lost is kept on the replica, float32, and added to its next gradient. Not
    as a part of the *sum* of the gradients but of their *mean* over the global batch, unscaled: what is applied is the
    mean. A sum over 64 examples that lost something would else give it back, in an epoch's last batch of 2, with 32
    times its weight; and a loss scale that moved would too. So the means that are applied, and the mean of the
    replicas' memories, add up to the true means, whatever the batches' sizes. This is why the count is summed first, by
    itself: a few bytes that travel while the backward pass is still at work. A replica without examples has a gradient
    of zero, and goes on giving back what it kept.

    A step whose sums are not finite, which is left out, and one without any example leave memory and Q as they are.

    It is the same with one replica, where nothing travels: how a run learns does not depend on how many there are.

    Args:
      rank: columns of P; 1, 2 and 4 are the paper's.
      reduce_dtype, bucket_bytes: as `Reduction`'s. P and Q travel in this dtype too; what Q loses to it is in the
      memory.

    Variables, made by `build`, by the variable's index and name:
      memory: [rows, columns] float32, differing by replica.
      q: [rank, columns] float32, Q transposed: so products with it read M along its rows.
    """

    def __init__(self, rank: int, reduce_dtype: str = "float32", bucket_bytes: int = 4 << 20):
        super().__init__(reduce_dtype, bucket_bytes)
        self.rank = rank
        self.memory: dict[str, tf.Variable] = {}
        self.q: dict[str, tf.Variable] = {}
        self._key_of: Callable = {}.get

    @property
    def changed(self) -> dict[str, Any]:
        return {**super().changed, "powersgd_rank": self.rank}

    def build(self, variables: Sequence, state: Sequence[Aggregated] = ()) -> None:
        super().build(variables, state)
        memory, q, keys = {}, {}, {}
        for index, variable in enumerate(variables):
            rows, columns = _matrix_shape(variable.shape)
            if self.rank * (rows + columns) >= rows * columns:
                continue
            keys[id(tf_variable(variable))] = key = key_of(variable, index)
            memory[key] = per_replica.variable(tf.zeros([rows, columns]), f"power_sgd/{key}/memory")
            # Any start will do that is the same on all replicas and has no zeros.
            start = tf.random.stateless_normal([self.rank, columns], seed=[0, index])
            q[key] = tf.Variable(start, trainable=False, name=f"power_sgd/{key}/q")
        self.memory, self.q = memory, q
        self._key_of = keys.get  # behind a function: a dictionary would be tracked for checkpoints

    def sum(
        self,
        gradients: Sequence,
        count: tf.Tensor,
        averages: Sequence[tf.Variable] | None = None,
        variables: Sequence = (),
    ) -> tuple[Gradients, tf.Tensor]:
        if variables:  # even if those whose gradients it compresses are frozen as yet
            step_context().applied.mark(*self.changed)
        keys = self._keys_of(gradients, variables)
        if not keys:
            return super().sum(gradients, count, averages)
        axis = step_context().mesh.data
        replicas = axis.size
        own_count = self._counted(count)
        if replicas > 1:
            gradients = [of_examples(g, own_count) if isinstance(g, tf.Tensor) else g for g in gradients]
            self._watch_norm(gradients, own_count)
            meanwhile = [g for g in gradients if isinstance(g, tf.Tensor)]
            (count,) = self._sum_in_buckets(axis, [Item(own_count, exact=True)], meanwhile)
            state = self._state_of(averages)
        else:
            state = ()
        local = Gradients(gradients)
        share = local.over(count).unscaled()  # gradients of the true loss, from sums of the scaled ones
        share = share.times(tf.constant(float(replicas))) if replicas > 1 else share
        matrices = {
            index: tf.reshape(share[index], self.memory[key].shape) + self.memory[key] for index, key in keys.items()
        }
        rest = [index for index, g in enumerate(local.values) if isinstance(g, tf.Tensor) and index not in keys]
        others = [Item(local.values[index], exact=False) for index in rest]
        others += items_of(state, own_count)
        products, others = self._sum_products(axis, matrices, keys, others)

        summed = [self._gather_slices(g, own_count) for g in local.values]
        for index, total in zip(rest, others, strict=False):
            summed[index] = total
        assign(state, others[len(rest) :], count, step_context().readings.summed)
        return self._finish(matrices, keys, products, local.with_values(summed), count), count

    def _sum_products(self, axis: Axis, matrices: dict, keys: dict, others: list[Item]):
        """Runs algorithm 1. Returns ({index: products}, the sums of `others`, which travel with the first of them)."""
        p = [Item(tf.matmul(m, self.q[keys[index]], transpose_b=True), exact=False) for index, m in matrices.items()]
        sums = self._sum_in_buckets(axis, p + others)
        # Householder's: orthonormal even where P has a lower rank (a batch of few examples), as Gram-Schmidt is not.
        bases = [tf.linalg.qr(total).q for total in sums[: len(p)]]
        own = [
            self._rounded_to_wire(tf.matmul(basis, m, transpose_a=True))
            for basis, m in zip(bases, matrices.values(), strict=True)
        ]
        q = self._sum_in_buckets(axis, [Item(value, exact=False) for value in own])
        means = [total / axis.size for total in q] if axis.size > 1 else q
        return dict(zip(matrices, map(_Products, bases, own, means), strict=True)), sums[len(p) :]

    def _finish(self, matrices: dict, keys: dict, products: dict, summed: Gradients, count: tf.Tensor) -> Gradients:
        """Puts the gradients together; keeps what each replica's lost, unless the step is one that is not applied.

        `summed` has the sums of those that were not compressed.
        """
        scale, mean = step_context().readings.loss_scale, summed.over(count).unscaled()
        values = [None if index in products else mean[index] for index in range(len(mean))]
        rest = [g.values if isinstance(g, tf.IndexedSlices) else g for g in values if g is not None]
        for index, (basis, _, q) in products.items():
            product = tf.matmul(basis, tf.where(count > 0, q, 0.0))
            values[index] = tf.reshape(product, summed.values[index].shape)
        applied = tf.math.is_finite(tf.linalg.global_norm([q for _, _, q in products.values()] + rest)) & (count > 0)

        def keep():
            for index, (basis, own_q, q) in products.items():
                key = keys[index]
                assign_local(self.memory[key], matrices[index] - tf.matmul(basis, own_q))
                # A row of zeros would stay one for ever: where nothing was found, the old direction is looked at again.
                nonzero = tf.reduce_any(q != 0, axis=1, keepdims=True)
                assign_local(self.q[key], tf.where(nonzero, q, self.q[key]))

        tf.cond(applied, keep, lambda: None)
        return Gradients(values, () if scale is None else (scale,), divided_by=count)

    def _rounded_to_wire(self, value: tf.Tensor) -> tf.Tensor:
        """Rounds a value as it is on the wire, so that the memory holds what that lost too."""
        return tf.cast(tf.cast(value, self.reduce_dtype), tf.float32)

    def _keys_of(self, gradients: Sequence, variables: Sequence) -> dict[int, str]:
        """Returns {index in the list: key of its memory} of the gradients that are compressed."""
        if not variables:
            return {}
        return {
            index: key
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if isinstance(gradient, tf.Tensor) and (key := self._key_of(id(tf_variable(variable))))
        }


class _Products(NamedTuple):
    """Of one matrix: P orthonormal, this replica's P^T M as it travels, and the replicas' mean of that."""

    basis: tf.Tensor
    own_q: tf.Tensor
    q: tf.Tensor


def _matrix_shape(shape: tf.TensorShape) -> tuple[int, int]:
    """Returns (rows, columns) of a tensor as a matrix: its last axis is the columns. A vector is one row."""
    columns = shape[-1] if shape.rank else 1
    return shape.num_elements() // max(1, columns), columns
