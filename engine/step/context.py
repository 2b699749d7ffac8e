"""The context of one step on a replica, what the step knows about itself, and who runs steps in it. Replica code.

Like `tf.distribute.get_replica_context()` it can be asked for anywhere while the step is traced, and only then. Each
replica is traced in a thread of its own, and a thread sees its own context.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from absl import logging

from .. import randomness
from ..internals import graphs, keras
from ..internals.variables import assign_local
from ..mesh.mesh import Mesh
from ..metrics.means import folded
from .batches import check_weighed, only_if, with_stand_in

_STAND_IN = (
    "the step prints or calls Python (%s): a replica without examples, as in an epoch's smaller last batch, shows it "
    "one example of zeros, which counts in nothing; leave it out there by its values"
)

_entered: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("step", default=None)


def step_context() -> StepContext:
    """Returns the context of the step that is being traced in this thread; an empty one outside of steps.

    Example:
      >>> def noisy(features):  # in a step: other noise at each step and replica, the same when a run is resumed
      ...     return features + tf.random.stateless_normal(tf.shape(features), step_context().seed(salt=1))
    """
    return _entered.get() or StepContext()


@dataclasses.dataclass(eq=False)
class Readings:
    """What a step reads once, as it begins, and computes with, whoever changes the variables meanwhile.

    Attributes:
      loss_scale: scalar float32, what the step's losses are multiplied by; None is 1.
      variables: Keras variables with their values, where reading each would take a message to a server.
      progress: by the `id` of an optimizer what its `read_progress` gave, float64 [2]: its next update takes it.
    """

    loss_scale: tf.Tensor | None = None
    variables: Sequence[tuple[tf.keras.Variable, tf.Tensor]] = ()
    progress: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)


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
      readings: what the step read as it began.
    """

    step: tf.Tensor | None = None
    replica: tf.Tensor | None = None
    present: tf.Tensor | None = None
    observed: tf.Tensor | None = None
    batch_number: tf.Tensor | None = None
    run_seed: int = 0
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    readings: Readings = dataclasses.field(default_factory=Readings)

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
        """Multiplies a loss by the loss scale, for a backward pass in float16; `Gradients.unscaled` undoes it."""
        scale = self.readings.loss_scale
        return total if scale is None else total * tf.cast(scale, total.dtype)


class StepRunner:
    """Runs a trainer's steps for a strategy, and makes their contexts.

    Args:
      trainer: a `Trainer` that is prepared.
      mesh: how the strategy's replicas are laid out.
    """

    def __init__(self, trainer, mesh: Mesh | None = None):
        self._trainer = trainer
        self._holdings = trainer.holdings
        self._mesh = mesh or Mesh()

    def train_step(self, batch, step: tf.Tensor, observed: tf.Tensor, readings: Readings | None = None) -> dict:
        """Runs `Trainer.train_step` on this replica's part of a batch, which may have no example.

        Args:
          batch: nest of tensors whose first axis is examples.
          step: see `StepContext`.
          observed: see `StepContext`.
          readings: what was read for the step; it reads the rest.

        Returns:
          The metrics, zeros where there was no example.
        """
        batch, present = with_stand_in(batch)
        with self.training(step, observed, present, readings):
            put_back = self._statistics_put_back(present)
            metrics = folded(check_weighed(self._trainer.train_step(batch), batch, self._trainer))
            put_back(metrics)
            self._check_recomputed()
            if present is not None and (python := graphs.PYTHON & graphs.kinds(metrics["loss"].total.graph).keys()):
                logging.log_first_n(logging.WARNING, _STAND_IN, 1, ", ".join(sorted(python)))
            return only_if(self._counted(present), metrics)

    def eval_step(self, batch, batch_number: tf.Tensor, step: tf.Tensor, observed: tf.Tensor) -> dict:
        """Runs `Trainer.eval_step` as `train_step` runs its own, and returns the metrics."""
        batch, present = with_stand_in(batch)
        with self._context(step, present, observed, batch_number):
            metrics = check_weighed(self._trainer.eval_step(batch), batch, self._trainer)
            return only_if(self._counted(present), metrics)

    def outputs(self, compute: Callable, features, step: tf.Tensor):
        """Returns what `compute` makes of this replica's features, which may be of no example, in an evaluation."""
        count = tf.shape(tf.nest.flatten(features)[0])[0]
        features, present = with_stand_in(features)
        with self._context(tf.identity(step), present, None, tf.constant(0, tf.int64)):
            outputs = compute(features)
        return outputs if present is None else tf.nest.map_structure(lambda x: x[:count], outputs)

    def _statistics_put_back(self, present: tf.Tensor | None) -> Callable[[dict], None]:
        """Reads the moving statistics; returns a function of a step's metrics that restores them where it counts not.

        The forward pass has moved them where the step is skipped, which its metrics say, and where the replica has no
        examples.
        """
        options, reduction = self._trainer.given.options, self._trainer.reduction
        if not (options.may_skip or (present is not None and reduction.restores_statistics)):
            return lambda metrics: None
        before = [(variable, tf.identity(variable)) for variable in self._holdings.moving_statistics]

        def put_back(metrics: dict) -> None:
            counts = [present] if present is not None and reduction.restores_statistics else []
            counts += [metrics["skipped"].total == 0.0] if "skipped" in metrics else []
            for variable, value in before:  # chosen by value: a condition would have the host wait for a GPU
                moved = tf.identity(variable)
                for each in counts:
                    moved = tf.where(each, moved, value)
                assign_local(variable, moved)

        return put_back

    def _check_recomputed(self) -> None:
        if not self._trainer.given.options.recompute:
            return
        if not any(hasattr(layer, "is_recomputed") for layer in keras.all_layers_in(self._holdings.layers.values())):
            raise ValueError(
                f"`recompute`: {type(self._trainer).__name__} calls no layer by crankshaft.engine.layers.recomputed, "
                "so nothing would be computed again; call its blocks by that, or leave it out"
            )

    def _counted(self, present: tf.Tensor | None) -> tf.Tensor | None:
        """Returns whether this replica's metrics count: where replicas see the same examples, the first one's do."""
        return tf.constant(False) if self._mesh.is_cut and self._mesh.model.rank else present

    @contextlib.contextmanager
    def training(
        self, step: tf.Tensor, observed: tf.Tensor, present: tf.Tensor | None = None, readings: Readings | None = None
    ) -> Iterator[None]:
        """Sets what `train_step` needs while it is traced within: layers draw by this step, on this replica.

        Args:
          step: see `StepContext`.
          observed: see `StepContext`.
          present: see `StepContext`.
          readings: what was read for the step.
        """
        scale = self._holdings.loss_scale
        readings = dataclasses.replace(readings or Readings(), loss_scale=scale and scale.read())
        with self._context(step, present, observed, readings=readings) as context:
            # Keras's layers draw by generators of their own, which differ by their place in the list.
            for salt, generator in enumerate(self._holdings.seed_generators, start=1):
                own = _this_replica() if getattr(generator, "within_shard", False) else context.replica
                drawn = randomness.step_seed(context.run_seed, step, own, salt)
                assign_local(generator.state.value, drawn)
            yield

    def _context(self, step, present, observed, batch_number=None, readings=None) -> StepContext:
        """Makes a step's context. Replicas with the same examples draw the same: by their data coordinate."""
        replica = tf.convert_to_tensor(self._mesh.data.rank, tf.int32)
        seed = self._trainer.given.options.seed
        return StepContext(step, replica, present, observed, batch_number, seed, self._mesh, readings or Readings())


def _this_replica() -> tf.Tensor:
    """Returns this replica's id in the whole strategy, scalar int32."""
    return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
