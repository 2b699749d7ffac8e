"""Sums gradients across replicas, with all else that a training step shares. Replica code.

All of it (gradients, the number of examples, moving statistics) is sent in one set of buckets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..errors import UsageError
from ..internals.tensorflow import is_only_replica, timestamp
from ..internals.variables import read_local, tf_variable
from ..mesh import collectives
from ..mesh.layout import Axis
from ..step.context import step_context
from ..step.gradients import Gradients
from .aggregation import SUM, Aggregated, assign, assigned_since_sum, terms
from .wire import from_halves, move_as_int32, to_halves

# 16-bit values are gathered: a replica keeps what all have sent until it has summed them. At most this many bytes at
# once; as float32, for the sum, they take twice as many.
GATHERED_BYTES = 64 << 20


class Reduction(tf.Module):
    """Sums gradients over the replicas of the current `tf.distribute` strategy.

    A subclass reduces in another way (`Trainer.build_reduction`). It overrides `sum`, and calls that of its base with
    what replicas are to add up, which also aggregates moving statistics. It makes state that it keeps between steps in
    `build`: variables in its attributes, at any depth, which are in the trainer's checkpoints. Those with
    `synchronization=ON_READ` and `aggregation=MEAN` have a value for each replica: they are resumed to the bit, on
    another number of replicas by their mean. It overrides `alone` if each replica is updated by its own gradients; and,
    if replicas differ for some steps, `sync_every_steps`, `begin_period` and `sync`. With `sync_every_steps`, a mesh or
    servers it must subclass the run's own.

    With float32 on the wire a bucket is summed by `Axis.all_reduce`. With a 16-bit dtype it is all-gathered
    and summed in float32 by every replica, in the order of the replicas: values are rounded only before sending, and
    all replicas get the same bits. Values that must not be rounded (counts, moving statistics) are in the same bucket,
    as two 16-bit halves. An all-gather moves (n-1) x 2 bytes per value, a float32 ring 8 (n-1)/n: the gather moves
    fewer up to n = 3 replicas.

    Args:
      reduce_dtype: the dtype in which gradients are sent: "float32", "bfloat16" or "float16".
      bucket_bytes: a bucket is complete when it has this many bytes; 0 makes one bucket.

    Example:
      >>> class Doubled(Reduction):
      ...     def sum(self, gradients, count, averages=None, variables=()):
      ...         return super().sum([gradient * 2 for gradient in gradients], count, averages, variables)
    """

    # A run may begin or cease to keep such state: a checkpoint with or without it is of the same model.
    optional_in_checkpoint = ("",)
    # The number of steps after which differing replicas are synced; None if they never differ.
    sync_every_steps: int | None = None
    # Whether moving statistics are restored on a replica without examples, since `sum` does not average them.
    restores_statistics = False
    # The figures that `pop_figures` returns.
    watched: tuple[str, ...] = ()

    def __init__(self, reduce_dtype: str = "float32", bucket_bytes: int = 4 << 20):
        super().__init__(name="reduction")
        self.reduce_dtype = tf.as_dtype(reduce_dtype)
        self.bucket_bytes = bucket_bytes
        self._figures = threading.local()  # each replica is traced in a thread of its own
        self._state: Callable[[], Sequence[Aggregated]] = tuple
        self.averaged = set[int]()  # the `id`s of variables that steps have averaged themselves

    @property
    def changed(self) -> dict[str, Any]:
        """The run's options that a step has to apply for this reduction, by name, if not their defaults."""
        return {} if self.reduce_dtype == tf.float32 else {"reduce_dtype": self.reduce_dtype.name}

    def slot_scope(self):
        """Returns the context in which an optimizer's variables are made, on the host, in the strategy's scope."""
        return contextlib.nullcontext()

    def build(self, variables: Sequence, state: Sequence[Aggregated] = ()) -> None:
        """Makes the state that is kept between steps, if any. Call it once, on the host, in the strategy's scope.

        Args:
          variables: all variables whose gradients may be summed, Keras's or TensorFlow's.
          state: the variables that `sum` aggregates: those that layers assign, such as moving statistics.
        """
        self._state = lambda: state  # behind a function, so that a checkpoint finds them in the model alone

    def values_at_start(self) -> dict[int, tf.Tensor]:
        """Reads, as a step begins, the variables to which replicas add, by `id`, for `sum`. Replica code."""
        if self.alone():
            return {}
        return {id(variable): read_local(variable) for variable, by in self._state() if by == SUM}

    def begin_period(self) -> None:
        """Records the weights at the start of a period of `sync_every_steps`.

        Called on each replica before a process's first step; never if replicas are always in sync.
        """

    def sync(self) -> None:
        """Ends a period: syncs the replicas. Called on each replica, outside of loops and conditions."""

    def alone(self) -> bool:
        """Returns whether a replica is updated by its own gradients. Replica code."""
        return step_context().mesh.all_replicas.size == 1

    def sum(
        self,
        gradients: Sequence[Any],
        count: tf.Tensor,
        averages: Sequence[tf.Variable] | None = None,
        variables: Sequence[Any] = (),
    ) -> tuple[Gradients, tf.Tensor]:
        """Sums across all replicas, and aggregates state that each replica assigned by itself.

        Args:
          gradients: list of float32 tensors, `tf.IndexedSlices` or None, of this replica's *sum* of losses.
          count: scalar float32, the number of examples in that sum.
          averages: float variables that each replica updated by itself; each is set to its mean across replicas,
            weighted by `count`. None is the state of `build`, each variable by its own aggregation.
          variables: the gradients', needed if the model is sharded over a mesh (`OnMesh`); else they may be omitted.

        Returns:
          (gradients, count), summed. A gradient keeps its kind: slices come back as the concatenation of all
          replicas' slices, ids repeated if replicas share them.
        """
        context = step_context()
        context.applied.mark("Reduction.sum")
        state = self._state() if averages is None else [Aggregated(variable) for variable in averages]
        self.averaged.update(id(tf_variable(variable)) for variable in averages or ())
        replicas, before = context.mesh.all_replicas, context.start_values.accumulators
        if replicas.size == 1:
            return Gradients(gradients), count
        # A padded empty batch has one made-up example: its count is 0, and all that it gives is set to zero below.
        gradients, count = list(gradients), self._example_count(count)
        for gradient, variable in zip(gradients, variables, strict=False):
            if isinstance(gradient, tf.Tensor):  # of batches of any length, its shape may be unknown
                gradient.set_shape(variable.shape)
        if gradients and "gradient_norm" in self.watched:
            self._watch_norm(gradients, count)
        # Rows of tables are gathered, not made dense: a table may have millions of rows that no replica has touched.
        slices = {i: x for i, x in enumerate(gradients) if isinstance(x, tf.IndexedSlices)}
        dense = {i: x for i, x in enumerate(gradients) if x is not None and i not in slices}
        values = [tf.convert_to_tensor(x) for x in dense.values()]
        if context.has_examples is not None:
            values = [zero_without_examples(x) for x in values]
        items = [Item(x, exact=False) for x in values]
        items += [Item(x, exact=True) for x in (*(terms(state, count, before) if state else ()), count)]
        sums = self._sum_in_buckets(replicas, items)
        summed: dict[int, Any] = dict(zip(dense, sums, strict=False))  # the exact ones follow
        summed |= {i: self._gather_slices(x) for i, x in slices.items()}
        if state:
            assign(state, sums[len(dense) : -1], sums[-1], before)
        return Gradients([summed.get(i) for i in range(len(gradients))]), sums[-1]

    def aggregate_again(self, batch: Any, count: tf.Tensor, per_replica_variables: Sequence[tf.Variable]) -> None:
        """Aggregates what the step has assigned from this replica's batch since it last summed.

        Args:
          count: scalar float32, the batch's examples.
        """
        if self.alone() or not (state := self._state()):
            return
        if late := assigned_since_sum(state, batch, per_replica_variables):
            mesh = step_context().mesh
            count = mesh.zero_except_first_model_rank(self._example_count(count))
            before = step_context().start_values.accumulators
            items = [Item(term, exact=True) for term in (*terms(late, count, before), count)]
            *totals, total = self._sum_in_buckets(mesh.all_replicas, items)
            assign(late, totals, total, before)

    def sum_statistics(self, values: tf.Tensor) -> tf.Tensor:
        """Sums a layer's statistics of its examples across the replicas that make an update together.

        For use in a forward pass, e.g. for batch normalization's moments over the global batch. The gradient is summed
        too, since the loss is the sum of all replicas'. A replica without examples adds nothing in either pass. If
        replicas are updated by themselves, the sum is this replica's alone. A sum across replicas may not be in a loop
        of the replica's own, so this can't be combined with `accumulate_steps`.

        Args:
          values: float32.
        """
        if self._counts_alone():
            return values
        return tf.custom_gradient(lambda x: (self.sum_counts(x), self.sum_counts))(values)

    def sum_counts(self, counts: tf.Tensor) -> tf.Tensor:
        """Sums float32 counts like `sum_statistics`, after the forward pass, and without a gradient."""
        return counts if self._counts_alone() else step_context().mesh.data.all_reduce(self._example_count(counts))

    def _counts_alone(self) -> bool:
        return self.alone() or step_context().mesh.data.size == 1 or is_only_replica()

    def pop_figures(self) -> dict[str, tf.Tensor]:
        """Returns the `watched` figures of this replica's step, scalar float32; 0 for what it did not measure.

        reduce_seconds: from the time when all of this replica's values were computed until their sums were, by the
          host's clock; excludes what is sent during the backward pass.
        gradient_norm: the norm of this replica's mean gradient, before the sum; 0 at a step that collects no norm.
        """
        figures = vars(self._figures)
        return {name: tf.cast(figures.pop(name, 0.0), tf.float32) for name in self.watched}

    def _watch_norm(self, gradients: Sequence, count: tf.Tensor) -> None:
        collect_norm = step_context().collect_norm
        if collect_norm is not None:
            self._figures.gradient_norm = tf.cond(
                collect_norm, lambda: Gradients(gradients).over(count).unscaled().norm(), lambda: 0.0
            )

    def _example_count(self, count: tf.Tensor) -> tf.Tensor:
        """Returns the number of examples that count on this replica: 0 if its batch is a padded empty one."""
        has_examples = step_context().has_examples
        return count if has_examples is None else tf.where(has_examples, count, 0.0)

    def _sum_in_buckets(
        self, axis: Axis, items: list[Item], sum_bucket: Callable[[Axis, list], list[tf.Tensor]] | None = None
    ) -> list[tf.Tensor]:
        """Returns the items' sums over an axis, in the items' order: one collective per bucket, or by `sum_bucket`."""
        if axis.size == 1 or not items:
            return [item.value for item in items]
        if step_context().graph not in (None, tf.compat.v1.get_default_graph()):
            raise UsageError(
                "a step sums gradients over replicas within tf.cond, a loop or a tf.function, where they can't meet; "
                "leave @tf.function out, since a run compiles its steps; to update at some steps only, sum the "
                "gradients at each, and call Update.apply within the condition ('Train a part every k steps' in the "
                "cookbook)"
            )
        # Order matters to speed alone; the sums are returned in the order in which they came.
        items = items[::-1]  # the backward pass ends with the first layer: the last one's bucket is sent meanwhile
        times_it = "reduce_seconds" in self.watched
        started = _time_after([item.value for item in items]) if times_it else None
        bucket_size = -(-self.bucket_bytes // self.reduce_dtype.size)
        if self.reduce_dtype != tf.float32:
            most, sum_bucket = _most_gathered(axis), sum_bucket or self._sum_bucket_gathered
            bucket_size = min(bucket_size or most, most)
        sums: list[Any] = [None] * len(items)
        for indices in collectives.buckets([item.value.shape.num_elements() for item in items], bucket_size):
            bucket = [items[index] for index in indices]
            if sum_bucket is not None:
                totals = sum_bucket(axis, bucket)
            else:
                flat = [tf.reshape(tf.cast(item.value, tf.float32), [-1]) for item in bucket]
                totals = collectives.as_one(flat, axis.all_reduce)
                totals = [tf.reshape(total, item.value.shape) for total, item in zip(totals, bucket, strict=True)]
            for index, total in zip(indices, totals, strict=True):
                sums[index] = total
        if times_it:
            waited, before = tf.maximum(_time_after(sums) - started, 0.0), vars(self._figures).get("reduce_seconds")
            self._figures.reduce_seconds = waited if before is None else before + waited
        return sums[::-1]

    def _sum_bucket_gathered(self, axis: Axis, bucket: list[Item]) -> list[tf.Tensor]:
        most = _most_gathered(axis)
        if len(bucket) == 1 and bucket[0].value.shape.num_elements() > most:
            return [self._sum_item_in_pieces(axis, bucket[0], most)]
        dtypes = [tf.float32 if item.exact else self.reduce_dtype for item in bucket]
        halves = [to_halves(item.value, dtype) for item, dtype in zip(bucket, dtypes, strict=True)]
        lanes = collectives.as_one(halves, lambda joined: move_as_int32(joined, axis.all_gather))
        sums = [tf.reduce_sum(from_halves(lane, dtype), 0) for lane, dtype in zip(lanes, dtypes, strict=True)]
        return [tf.reshape(total, item.value.shape) for total, item in zip(sums, bucket, strict=True)]

    def _sum_item_in_pieces(self, axis: Axis, item: Item, most: int) -> tf.Tensor:
        """Sums one large item, gathering `most` values at once: each piece is summed before the next is sent."""
        size = item.value.shape.num_elements()
        sums: list[tf.Tensor] = []
        flat = tf.reshape(item.value, [-1])
        for first in range(0, size, most):
            with tf.control_dependencies(sums[-1:]):
                piece = Item(tf.identity(flat[first : first + most]), item.exact)
            sums += self._sum_bucket_gathered(axis, [piece])
        return tf.reshape(tf.concat(sums, 0), item.value.shape)

    def _gather_slices(self, gradient):
        values, indices, has_examples = gradient.values, gradient.indices, step_context().has_examples
        if has_examples is not None:
            # Rows of padded examples are removed: optimizers update each row that is listed.
            count = tf.where(has_examples, tf.shape(indices)[0], 0)
            values, indices = values[:count], indices[:count]
        # Rounded as on the wire, though the kernels send float32 rows.
        values = tf.cast(tf.cast(values, self.reduce_dtype), tf.float32)
        values, indices = step_context().mesh.all_replicas.concatenate([values, indices])
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _most_gathered(axis: Axis) -> int:
    """Returns the number of 16-bit values that a replica may send at once."""
    return max(1, GATHERED_BYTES // (2 * axis.size))


def _time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the host's clock, in seconds, after all of these are computed."""
    with tf.control_dependencies(tensors):
        return timestamp()


def zero_without_examples(gradient: tf.Tensor) -> tf.Tensor:
    """Returns the gradient, or zeros if this replica has no examples, since its batch normalization gives NaN."""
    has_examples = step_context().has_examples
    return gradient if has_examples is None else tf.where(has_examples, gradient, tf.zeros([], gradient.dtype))


class Item(NamedTuple):
    """A tensor to sum, of static shape; `exact` ones are never rounded to the wire's dtype."""

    value: tf.Tensor
    exact: bool
