"""The context of one step on a replica: what the step knows about itself. Replica code.

Like `tf.distribute.get_replica_context()` it can be asked for anywhere while the step is traced, and only then. Each
replica is traced in a thread of its own, and a thread sees its own context.
"""

from __future__ import annotations

import contextvars
import dataclasses

import tensorflow as tf

from .. import randomness
from ..mesh.mesh import Mesh

_entered: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("step", default=None)


def step_context() -> StepContext:
    """Returns the context of the step that is being traced in this thread; an empty one outside of steps.

    Example:
      >>> def noisy(features):  # in a step: other noise at each step and replica, the same when a run is resumed
      ...     return features + tf.random.stateless_normal(tf.shape(features), step_context().seed(salt=1))
    """
    return _entered.get() or StepContext()


@dataclasses.dataclass(eq=False)
class StepContext:
    """What differs from step to step or from replica to replica, so that no argument can bring it. Entered by `with`.

    Attributes:
      step: scalar int64, steps of training done before this one.
      replica: scalar int32, by which this replica draws: its id in the whole strategy; on a mesh its data coordinate.
      present: scalar bool, whether this replica has examples; None if it always has.
      observed: scalar bool, whether this step's costly figures (the gradients' norm) will be looked at; None is never.
      batch_number: scalar int64, from 0 in each evaluation; None in training.
      run_seed: the run's seed, see `seed`.
      mesh: how the strategy's replicas are laid out.
      loss_scale: scalar float32, what this step's losses are multiplied by, as it was when the step began; None is 1.
    """

    step: tf.Tensor | None = None
    replica: tf.Tensor | None = None
    present: tf.Tensor | None = None
    observed: tf.Tensor | None = None
    batch_number: tf.Tensor | None = None
    run_seed: int = 0
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    loss_scale: tf.Tensor | None = None

    def __enter__(self) -> StepContext:
        self._token = _entered.set(self)
        return self

    def __exit__(self, *_) -> None:
        _entered.reset(self._token)

    @property
    def is_training(self) -> bool:
        """Whether a step of training is being traced."""
        return self.step is not None and self.batch_number is None

    def seed(self, salt: int = 0) -> tf.Tensor:
        """Returns a [2] int64 seed for `tf.random.stateless_*` that differs by seed, step, replica and salt.

        In evaluation it differs by batch in place of step: each evaluation draws the same, and none what training does.

        Raises:
          ValueError: there is no step, so the draw would be the same in each.
        """
        if self.step is None or self.replica is None:
            raise ValueError("step_context().seed() is for train_step, eval_step and what they call; no step is on")
        return randomness.users_seed(self.run_seed, self.step, self.replica, salt, self.batch_number)

    def scaled(self, total: tf.Tensor) -> tf.Tensor:
        """Multiplies a loss by `loss_scale`, for a backward pass in float16; `Gradients.unscaled` undoes it."""
        return total if self.loss_scale is None else total * tf.cast(self.loss_scale, total.dtype)
