"""Local SGD: replicas train by themselves for some steps, then are synced. Replica code, except `build`.

McMahan et al. 2017, https://arxiv.org/abs/1602.05629, and DiLoCo, Douillard et al. 2023,
https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..internals.variables import assign_local, read_local, tf_variable, variable_path
from ..step.context import step_context
from ..step.gradients import Gradients
from . import per_replica
from .aggregation import SUM, Aggregated, assign, terms
from .all_reduce import Item, Reduction


class LocalSgd(Reduction):
    """A `Reduction` that sums nothing in a step: each replica applies its own gradients, so that replicas differ.

    After each *sync period* of `sync_every_steps` steps the inner loop calls `sync`: the difference between the
    weights that the period began with and those of each replica, averaged over the replicas, is a gradient for an
    outer optimizer, which makes the weights that all replicas begin the next period with. A replica weighs by the
    examples that it saw in the period. With an outer learning rate of 1 and no momentum the weights are averaged;
    with that, plain SGD and periods of one step it is synchronous training.

    Each replica keeps its own optimizer state (slots, count of updates); what layers assign, such as moving statistics,
    is aggregated at the end of a period. Within a period, it and the weights differ by replica and must not be read.

    Args:
      outer: the outer optimizer, such as `optimizers.outer()`.
      reduce_dtype: as `Reduction`'s, for the values sent at the end of a period.
    """

    restores_statistics = True

    def __init__(self, sync_every_steps: int, outer: Any, reduce_dtype: str = "float32"):
        super().__init__(reduce_dtype)
        self.sync_every_steps = sync_every_steps
        self.outer = outer

    @property
    def changed(self) -> dict[str, Any]:
        return {**super().changed, "sync_every_steps": self.sync_every_steps}

    def slot_scope(self):
        return tf.variable_creator_scope(per_replica.create)

    def build(self, variables: Sequence, state: Sequence[Aggregated] = ()) -> None:
        super().build(variables, state)
        self._period = _Period(variables, state)
        self.outer.build(self._period.starts)

    def alone(self) -> bool:
        return True

    def sum(
        self,
        gradients: Sequence,
        count: tf.Tensor,
        averages: Sequence[tf.Variable] | None = None,
        variables: Sequence = (),
    ) -> tuple[Gradients, tf.Tensor]:
        """Returns this replica's own (gradients, count); zeros if it has no examples."""
        step_context().applied.mark("Reduction.sum")
        local, has_examples = Gradients(gradients), step_context().has_examples
        if "gradient_norm" in self.watched:
            self._watch_norm(gradients, count)
        tf.raw_ops.AssignAddVariableOp(resource=self._period.examples.handle, value=self._example_count(count))
        return local if has_examples is None else local.with_values(_zero_unless(has_examples, local.values)), count

    def begin_period(self) -> None:
        self._period.begin()

    def sync(self) -> None:
        period = self._period
        weight = tf.convert_to_tensor(period.examples)
        moved = [Item((start - read_local(variable)) * weight, exact=False) for start, variable in period.pairs()]
        before = {key: tf.identity(start) for key, start in period.summed.items()}
        exact = [Item(term, exact=True) for term in (*terms(period.state, weight, before), weight)]
        sums = self._sum_in_buckets(step_context().mesh.data, moved + exact)
        self.outer.apply(Gradients(sums[: len(moved)]).over(sums[-1]), period.starts)
        assign(period.state, sums[len(moved) : -1], sums[-1], before)
        period.begin_next()


class _Period:
    """A period's values on each replica: the weights at its start, and the number of examples since.

    And the values at its start of variables to which replicas add. A class of its own, so that no checkpoint has it: at
    a period's end the first are the weights, the second is 0.
    """

    def __init__(self, variables: Sequence, state: Sequence[Aggregated]):
        self.state = list(state)
        self._variables = list(map(tf_variable, variables))
        self.starts = [_make_copy(variable) for variable in variables]
        added_to = [variable for variable, by in state if by == SUM]
        self._sum = [(variable, _make_copy(variable)) for variable in added_to]
        self.summed = {id(variable): start for variable, start in self._sum}
        self.examples = per_replica.variable(0.0, "round_examples")

    def pairs(self):
        """Returns (value at the start of the period, variable) pairs."""
        return zip(self.starts, self._variables, strict=True)

    def begin(self) -> None:
        """Begins the first period with the current weights."""
        for start, variable in self.pairs():
            assign_local(start, read_local(variable))
        self._begin_sums()

    def begin_next(self) -> None:
        """Begins the next period with the current weights."""
        for start, variable in self.pairs():
            assign_local(variable, tf.identity(start))
        self._begin_sums()

    def _begin_sums(self) -> None:
        for variable, start in self._sum:
            assign_local(start, read_local(variable))
        assign_local(self.examples, tf.constant(0.0))


def _make_copy(variable: Any) -> tf.Variable:
    return tf.Variable(tf_variable(variable), trainable=False, name=variable_path(variable))


def _zero_unless(has_examples: tf.Tensor, gradients: Sequence) -> list:
    """Returns the gradients, or zeros, by a condition: a choice by value would read them all."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    tensors = [value for value in values if value is not None]
    chosen = iter(tf.cond(has_examples, lambda: tensors, lambda: [tf.zeros_like(value) for value in tensors]))

    def restored(gradient):
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(next(chosen), gradient.indices, gradient.dense_shape)
        return None if gradient is None else next(chosen)

    return [restored(gradient) for gradient in gradients]
