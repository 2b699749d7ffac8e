"""The context of one step on a replica: what the step knows about itself. Replica code.

Like `tf.distribute.get_replica_context()` it can be asked for anywhere while the step is traced, and only then. Each
replica is traced in a thread of its own, and a thread sees its own context.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from .. import randomness
from ..mesh.mesh import Mesh
from .options import StepOptions

_entered: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("step", default=None)


def step_context() -> StepContext:
    """Returns the context of the step that is being traced in this thread; an empty one outside of steps.

    Example:
      >>> def noisy(features):  # in a step: other noise at each step and replica, the same when a run is resumed
      ...     return features + tf.random.stateless_normal(tf.shape(features), step_context().seed(salt=1))
    """
    return _entered.get() or StepContext()


class Values:
    """Values of Keras variables, and optimizers' progress, where reading each would take a message; none by default.

    A class of its own, because a list on a `tf.Module` would put the variables into the checkpoint.

    Args:
      pairs: Keras variables with their values.
      progress: by an optimizer's id what its `read_progress` gave.
    """

    def __init__(self, pairs: Sequence[tuple[tf.keras.Variable, tf.Tensor]] = (), progress: dict | None = None):
        self._pairs = pairs
        self._progress = dict(progress or {})

    def take_progress(self, optimizer) -> tf.Tensor | None:
        """Returns an optimizer's progress, if it is here: once, since its first update changes it."""
        return self._progress.pop(id(optimizer), None)

    @contextlib.contextmanager
    def in_use(self, variables: Sequence = (), tape: tf.GradientTape | None = None):
        """Makes Keras layers compute with the values, within. What they assign is assigned in the end.

        Yields:
          What `tape` is to be asked for gradients of: for each of `variables` its value here, or itself.
        """
        if not self._pairs:
            yield variables
            return
        with _Scope(self._pairs) as scope:
            found = {id(variable): value for variable, value in self._pairs}
            sources = [found.get(id(variable), variable) for variable in variables]
            if tape is not None:
                tape.watch([source for source in sources if isinstance(source, tf.Tensor)])
            yield sources
        for variable, value in scope.assigned.values():
            variable.assign(value)


class _Scope(tf.keras.StatelessScope):
    """Keras's way to compute with given values, which keeps what is assigned meanwhile to itself."""

    def __init__(self, pairs):
        super().__init__(pairs, collect_losses=True, initialize_variables=False)
        self.assigned = {}

    def add_update(self, update):
        super().add_update(update)
        self.assigned[id(update[0])] = update


@dataclasses.dataclass(eq=False)
class StepContext:
    """What a step has to know, and what it finds out while it is traced. Entered by `with`, once.

    Attributes:
      step: scalar int64, steps of training done before this one.
      replica: scalar int32, by which this replica draws: its id in the whole strategy; on a mesh its data coordinate.
      present: scalar bool, whether this replica has examples; None if it always has.
      observed: scalar bool, whether this step's costly figures (the gradients' norm) will be looked at; None is never.
      batch_number: scalar int64, from 0 in each evaluation; None in training.
      options: what the run asks of a step.
      mesh: how the strategy's replicas are laid out.
      holdings: what the trainer holds, an `engine.holdings.Holdings`; None where the step is not a trainer's.
      values: what to compute with in place of reading variables.
      reduce_dtype: the dtype in which rows of tables travel from other hosts.
      admits: whether tables may give rows to new ids.
      loss_scale: scalar float32, what this step's losses are multiplied by, as it was when the step began; None is 1.
      watched: the names in `found` that are wanted.
      found: scalars, float32, by name:
        reduce_seconds: from when this replica's own values were all there until their sums were, by the host's clock;
          what travels while the backward pass goes on is not waited for.
        gradient_norm: of the mean over this replica's examples alone, before the sum; 0 at a step not observed.
      summed_midway: whether the forward pass has summed statistics over replicas that are traced in threads of one
        process: from there on layers may hold what another replica has put into them.
      recomputes: whether a block has been called that the backward pass computes again.
      before: variables that `remember` was given, with what this replica had of them.
    """

    step: tf.Tensor | None = None
    replica: tf.Tensor | None = None
    present: tf.Tensor | None = None
    observed: tf.Tensor | None = None
    batch_number: tf.Tensor | None = None
    options: StepOptions = StepOptions()  # noqa: RUF009 - it is frozen
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    holdings: Any = None
    values: Values = dataclasses.field(default_factory=Values)
    reduce_dtype: tf.DType = tf.float32
    admits: bool = True
    loss_scale: tf.Tensor | None = None
    watched: tuple[str, ...] = ()
    found: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    summed_midway: bool = False
    recomputes: bool = False
    before: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)

    def __enter__(self) -> StepContext:
        self._token = _entered.set(self)
        return self

    def __exit__(self, *_) -> None:
        _entered.reset(self._token)

    def seed(self, salt: int = 0) -> tf.Tensor:
        """Returns a [2] int64 seed for `tf.random.stateless_*` that differs by seed, step, replica and salt.

        In evaluation it differs by batch in place of step: each evaluation draws the same, and none what training does.

        Raises:
          ValueError: there is no step, so the draw would be the same in each.
        """
        if self.step is None or self.replica is None:
            raise ValueError("step_context().seed() is for train_step, eval_step and what they call; no step is on")
        return randomness.users_seed(self.options.seed, self.step, self.replica, salt, self.batch_number)

    def scaled(self, total: tf.Tensor) -> tf.Tensor:
        """Multiplies a loss by `loss_scale`, for a backward pass in float16; `Gradients.unscaled` undoes it."""
        return total if self.loss_scale is None else total * tf.cast(self.loss_scale, total.dtype)

    def remember(self, variables: Iterable[tf.Variable]) -> None:
        """Reads variables that the step is about to move, so that it can put them back."""
        self.before = [(variable, tf.identity(variable)) for variable in variables]

    def figures(self) -> dict[str, tf.Tensor]:
        """Returns what was `found` of what is `watched`; 0 for what this step did not compute."""
        return {name: tf.cast(self.found.get(name, 0.0), tf.float32) for name in self.watched}
