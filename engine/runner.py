"""Runs a trainer's steps, each in the context that says what the step knows. Replica code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from . import randomness
from .holdings import Holdings
from .internals import graphs
from .internals.variables import assign_local
from .mesh.mesh import Mesh
from .step.batches import check_weighed, only_if, with_stand_in
from .step.context import StepContext

_STAND_IN = (
    "the step prints or calls Python (%s): a replica without examples, as in an epoch's smaller last batch, shows it "
    "one example of zeros, which counts in nothing; leave it out there by its values"
)


class StepRunner:
    """Runs a trainer's steps for a strategy, and makes their contexts.

    Args:
      holdings: of a `Trainer`, which is prepared.
      mesh: how the strategy's replicas are laid out.
    """

    def __init__(self, holdings: Holdings, mesh: Mesh | None = None):
        self._trainer = holdings.trainer
        self._holdings = holdings
        self._mesh = mesh or Mesh()
        self._generators = holdings.seed_generators

    def train_step(self, batch, step: tf.Tensor, observed: tf.Tensor, **known) -> tuple[dict, StepContext]:
        """Runs `Trainer.train_step` on this replica's part of a batch, which may have no example.

        Args:
          batch: nest of tensors whose first axis is examples.
          step: see `StepContext`.
          observed: see `StepContext`.
          **known: more of its attributes.

        Returns:
          The metrics, zeros where there was no example, and the context with what the step has found.
        """
        batch, present = with_stand_in(batch)
        with self.training(step, observed, present, **known) as context:
            metrics = check_weighed(self._trainer.train_step(batch), batch, self._trainer)
            if context.options.recompute and not context.recomputes:
                raise ValueError(
                    f"`recompute`: {type(self._trainer).__name__} calls no layer by "
                    "crankshaft.engine.layers.recomputed, so nothing would be computed again; call its blocks by that, "
                    "or leave it out"
                )
            if present is not None and (python := graphs.PYTHON & graphs.kinds(metrics["loss"].total.graph).keys()):
                logging.log_first_n(logging.WARNING, _STAND_IN, 1, ", ".join(sorted(python)))
            return only_if(self._counted(present), metrics), context

    def eval_step(self, batch, batch_number: tf.Tensor, step: tf.Tensor, observed: tf.Tensor, **known) -> dict:
        """Runs `Trainer.eval_step` as `train_step` runs its own, and returns the metrics."""
        batch, present = with_stand_in(batch)
        with self.evaluation(batch_number, step, observed, present, **known):
            metrics = check_weighed(self._trainer.eval_step(batch), batch, self._trainer)
            return only_if(self._counted(present), metrics)

    def _counted(self, present: tf.Tensor | None) -> tf.Tensor | None:
        """Returns whether this replica's metrics count: where replicas see the same examples, the first one's do."""
        return tf.constant(False) if self._mesh.is_cut and self._mesh.model.rank else present

    @contextlib.contextmanager
    def training(self, step: tf.Tensor, observed: tf.Tensor, present=None, **known) -> Iterator[StepContext]:
        """Sets what `train_step` needs while it is traced within: layers draw by this step, on this replica.

        Args:
          step: see `StepContext`.
          observed: see `StepContext`.
          present: see `StepContext`.
          **known: more of its attributes.
        """
        options, replica, scale = self._trainer.given.options, self._draws_by(), self._holdings.loss_scale
        known |= {"options": options, "mesh": self._mesh, "holdings": self._holdings}
        known["loss_scale"] = scale and scale.read()
        with StepContext(step, replica, present, observed, **known) as context:
            # Keras's layers draw by generators of their own, which differ by their place in the list.
            for salt, generator in enumerate(self._generators, start=1):
                own = this_replica() if getattr(generator, "within_shard", False) else replica
                drawn = randomness.step_seed(options.seed, step, own, salt)
                assign_local(generator.state.value, drawn)
            if options.may_skip or (present is not None and self._trainer.reduction.restores_statistics):
                context.remember(self._holdings.moving_statistics)
            yield context

    @contextlib.contextmanager
    def evaluation(
        self, batch_number: tf.Tensor, step: tf.Tensor, observed: tf.Tensor, present=None, **known
    ) -> Iterator[StepContext]:
        """Sets what `eval_step` needs while it is traced within. See `StepContext`."""
        known |= {"options": self._trainer.given.options, "mesh": self._mesh, "holdings": self._holdings}
        context = StepContext(step, self._draws_by(), present, observed, batch_number, **known)
        with context, context.values.in_use():
            yield context

    def _draws_by(self) -> tf.Tensor:
        """Returns what this replica draws by: those that see the same examples draw the same."""
        return tf.convert_to_tensor(self._mesh.data.rank, tf.int32)


def this_replica() -> tf.Tensor:
    """Returns this replica's id in the whole strategy, scalar int32."""
    return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
