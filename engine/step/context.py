"""What one replica's step knows of itself: one value, made by the strategy and entered around the step. Replica code.

As TensorFlow's `tf.distribute.get_replica_context()` is, it is there for whoever asks while the step is traced, and for
nobody else: replicas are traced in a thread each, and a thread sees its own.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from crankshaft.engine.step.values import Values

_entered: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("step", default=None)


def step_context() -> StepContext:
    """Returns the context of the step that is being traced in this thread; outside of steps an empty one."""
    return _entered.get() or StepContext()


@dataclasses.dataclass(eq=False)
class StepContext:
    """What a step has to know, and what is found out in its course. Entered by `with`, once.

    Attributes:
      step: scalar int64, steps of training done before this one.
      replica: scalar int32, this replica's id in the whole strategy.
      present: scalar bool, whether this replica has examples; None if it always has.
      observed: scalar bool, whether this step's costly figures (the gradients' norm) will be looked at; None is never.
      batch_number: scalar int64, from 0 in each evaluation; None in training.
      values: what to compute with in place of reading variables.
      wire_dtype: what rows of tables travel as from other hosts.
      admits: whether tables may give rows to ids that they see for the first time.
      loss_scale: scalar float32, what this step's losses are multiplied by, as it was when the step began; None is 1.
      watched: names of the replica's own figures that are to be found, among `found`.
      found: scalars, float32, by name:
        reduce_seconds: from when this replica's own values were all there until their sums were, by the host's clock;
          what travels while the backward pass goes on is not waited for.
        gradient_norm: of the mean over this replica's examples alone, before the sum; 0 at a step not observed.
      summed_midway: whether the forward pass has summed statistics over replicas that are traced in threads of one
        process: from there on layers may hold what another replica has put into them.
      before: variables that `remember` was given, with what this replica had of them.
    """

    step: tf.Tensor | None = None
    replica: tf.Tensor | None = None
    present: tf.Tensor | None = None
    observed: tf.Tensor | None = None
    batch_number: tf.Tensor | None = None
    values: Values = dataclasses.field(default_factory=Values)
    wire_dtype: tf.DType = tf.float32
    admits: bool = True
    loss_scale: tf.Tensor | None = None
    watched: tuple[str, ...] = ()
    found: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    summed_midway: bool = False
    before: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)

    def __enter__(self) -> StepContext:
        self._token = _entered.set(self)
        return self

    def __exit__(self, *_) -> None:
        _entered.reset(self._token)

    def remember(self, variables: Iterable[tf.Variable]) -> None:
        """Reads variables that the step is about to move, so that it can put them back."""
        self.before = [(variable, tf.identity(variable)) for variable in variables]

    def figures(self) -> dict[str, tf.Tensor]:
        """Returns what was `found` of what is `watched`; 0 of what the step had no cause to find."""
        return {name: tf.cast(self.found.get(name, 0.0), tf.float32) for name in self.watched}
