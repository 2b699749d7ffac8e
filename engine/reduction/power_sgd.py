"""PowerSGD: gradients are sent as two thin matrices, and the error is added to the next gradients.

Replica code, except `build`. Vogels, Karimireddy, Jaggi 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..internals.variables import assign_local, state_key, tf_variable
from ..mesh.mesh import Axis
from ..step.context import step_context
from ..step.gradients import Gradients
from . import per_replica
from .aggregation import Aggregated
from .reduction import Item, Reduction, aggregation_items, assign_aggregated, zero_without_examples


class PowerSgd(Reduction):
    """A `Reduction` that compresses the gradients of matrices to a rank, with error feedback.

    A gradient [..., columns] is a matrix M [rows, columns]. It is sent as P = M Q [rows, rank] and, after P is summed
    and its columns made orthonormal, P^T M [rank, columns]; their product is applied. It equals M if M has no higher
    rank, and approaches the best approximation as P approaches M's first singular vectors, from step to step, since
    each step begins with the last one's Q. Gradients that this makes no smaller (vectors, small matrices), and slices,
    are sent unchanged.

    *The memory.* The error of a replica's share of M is kept on the replica, float32, and added to its next gradient:
    not to the *sum* of gradients but to their *mean* over the global batch, unscaled, which is what is applied.
    Otherwise an error of a sum over 64 examples would be added, in an epoch's last batch of 2, with 32 times its
    weight, and likewise after a change of the loss scale. So the applied means, and the mean of the replicas' memories,
    add up to the true means, whatever the batches' sizes. This is why the count is summed first, by itself: a few bytes
    that are sent during the backward pass. A replica without examples has a gradient of zero, and still adds its
    memory.

    A skipped step, whose sums are not finite, and one without examples leave memory and Q unchanged.

    One replica computes the same, without sending: how a run learns does not depend on the number of replicas.

    Args:
      rank: columns of P; 1, 2 and 4 are the paper's.
      reduce_dtype, bucket_bytes: as `Reduction`'s. P and Q are sent in this dtype too; Q's rounding error is in the
        memory.

    Variables, made by `build`, by the variable's index and name:
      memory: [rows, columns] float32, differing by replica.
      q: [rank, columns] float32, Q transposed, so that products with it read M along its rows.
    """

    def __init__(self, rank: int, reduce_dtype: str = "float32", bucket_bytes: int = 4 << 20):
        super().__init__(reduce_dtype, bucket_bytes)
        self.rank = rank
        self.memory: dict[str, tf.Variable] = {}
        self.q: dict[str, tf.Variable] = {}
        self._memory_key: Callable = {}.get

    @property
    def changed(self) -> dict[str, Any]:
        return {**super().changed, "powersgd_rank": self.rank}

    def build(self, variables: Sequence, state: Sequence[Aggregated] = ()) -> None:
        super().build(variables, state)
        memory, q, keys = {}, {}, {}
        for index, variable in enumerate(variables):
            columns = variable.shape[-1] if variable.shape.rank else 1  # a vector is one row
            rows = variable.shape.num_elements() // max(1, columns)
            if self.rank * (rows + columns) >= rows * columns:
                continue
            keys[id(tf_variable(variable))] = key = state_key(variable, index)
            memory[key] = per_replica.variable(tf.zeros([rows, columns]), f"power_sgd/{key}/memory")
            # Any start that is the same on all replicas and has no zeros.
            start = tf.random.stateless_normal([self.rank, columns], seed=[0, index])
            q[key] = tf.Variable(start, trainable=False, name=f"power_sgd/{key}/q")
        self.memory, self.q = memory, q
        self._memory_key = keys.get  # behind a function: a dictionary would be tracked for checkpoints

    def sum(
        self,
        gradients: Sequence,
        count: tf.Tensor,
        averages: Sequence[tf.Variable] | None = None,
        variables: Sequence = (),
    ) -> tuple[Gradients, tf.Tensor]:
        keys: dict[int, str] = {}  # of the compressed gradients' memory, by index in the list
        if variables:
            step_context().applied.mark(*self.changed)  # even if the compressed ones are still frozen
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if isinstance(gradient, tf.Tensor) and (key := self._memory_key(id(tf_variable(variable)))):
                    keys[index] = key
        if not keys:
            return super().sum(gradients, count, averages)
        axis = step_context().mesh.data
        replicas = axis.size
        local_count = self._example_count(count)
        if replicas > 1:
            gradients = [zero_without_examples(g, local_count) if isinstance(g, tf.Tensor) else g for g in gradients]
            self._watch_norm(gradients, local_count)
            meanwhile = [g for g in gradients if isinstance(g, tf.Tensor)]
            (count,) = self._sum_in_buckets(axis, [Item(local_count, exact=True)], meanwhile)
            state = self._aggregated_state(averages)
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
        others += aggregation_items(state, local_count)
        products, others = self._sum_products(axis, matrices, keys, others)

        summed = [self._gather_slices(g, local_count) for g in local.values]
        for index, total in zip(rest, others, strict=False):
            summed[index] = total
        assign_aggregated(state, others[len(rest) :], count)
        return self._finish(matrices, keys, products, local.with_values(summed), count), count

    def _sum_products(self, axis: Axis, matrices: dict, keys: dict, others: list[Item]):
        """Runs algorithm 1. Returns ({index: products}, the sums of `others`, which are sent with P)."""
        p = [Item(tf.matmul(m, self.q[keys[index]], transpose_b=True), exact=False) for index, m in matrices.items()]
        sums = self._sum_in_buckets(axis, p + others)
        # Householder's: orthonormal even if P has a lower rank (a batch of few examples), unlike Gram-Schmidt.
        bases = [tf.linalg.qr(total).q for total in sums[: len(p)]]
        # Rounded as on the wire, so that the memory includes the rounding error.
        local_q = [
            tf.cast(tf.cast(tf.matmul(basis, m, transpose_a=True), self.reduce_dtype), tf.float32)
            for basis, m in zip(bases, matrices.values(), strict=True)
        ]
        q = self._sum_in_buckets(axis, [Item(value, exact=False) for value in local_q])
        means = [total / axis.size for total in q] if axis.size > 1 else q
        return dict(zip(matrices, map(_Products, bases, local_q, means), strict=True)), sums[len(p) :]

    def _finish(self, matrices: dict, keys: dict, products: dict, summed: Gradients, count: tf.Tensor) -> Gradients:
        """Decompresses the gradients; keeps each replica's error, unless the step is skipped.

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
            for index, (basis, local_q, q) in products.items():
                key = keys[index]
                assign_local(self.memory[key], matrices[index] - tf.matmul(basis, local_q))
                # A row of zeros would stay zero for ever: such a row keeps its old direction.
                nonzero = tf.reduce_any(q != 0, axis=1, keepdims=True)
                assign_local(self.q[key], tf.where(nonzero, q, self.q[key]))

        tf.cond(applied, keep, lambda: None)
        return Gradients(values, (count,) if scale is None else (count, scale))


class _Products(NamedTuple):
    """One matrix's orthonormal P, this replica's P^T M as sent, and its mean across replicas."""

    basis: tf.Tensor
    local_q: tf.Tensor
    q: tf.Tensor
