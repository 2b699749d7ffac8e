"""Runs a trainer's steps, each in the context that says what the step knows. Replica code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from absl import logging

from . import randomness
from .holdings import Holdings
from .internals import graphs, keras
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

    def train_step(self, batch, step: tf.Tensor, observed: tf.Tensor) -> dict:
        """Runs `Trainer.train_step` on this replica's part of a batch, which may have no example.

        Args:
          batch: nest of tensors whose first axis is examples.
          step: see `StepContext`.
          observed: see `StepContext`.

        Returns:
          The metrics, zeros where there was no example.
        """
        batch, present = with_stand_in(batch)
        with self.training(step, observed, present):
            put_back = self._statistics_put_back(present)
            metrics = check_weighed(self._trainer.train_step(batch), batch, self._trainer)
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
            if present is not None and reduction.restores_statistics:
                for variable, value in before:
                    assign_local(variable, tf.where(present, tf.identity(variable), value))
            if "skipped" in metrics:
                tf.cond(metrics["skipped"].total > 0, restore, lambda: None)

        def restore() -> None:
            for variable, value in before:
                assign_local(variable, value)

        return put_back

    def _check_recomputed(self) -> None:
        layers = keras.all_layers_in(self._holdings.layers.values())
        if self._trainer.given.options.recompute and not any(hasattr(layer, "is_recomputed") for layer in layers):
            raise ValueError(
                f"`recompute`: {type(self._trainer).__name__} calls no layer by crankshaft.engine.layers.recomputed, "
                "so nothing would be computed again; call its blocks by that, or leave it out"
            )

    def _counted(self, present: tf.Tensor | None) -> tf.Tensor | None:
        """Returns whether this replica's metrics count: where replicas see the same examples, the first one's do."""
        return tf.constant(False) if self._mesh.is_cut and self._mesh.model.rank else present

    @contextlib.contextmanager
    def training(self, step: tf.Tensor, observed: tf.Tensor, present: tf.Tensor | None = None) -> Iterator[None]:
        """Sets what `train_step` needs while it is traced within: layers draw by this step, on this replica.

        Args:
          step: see `StepContext`.
          observed: see `StepContext`.
          present: see `StepContext`.
        """
        scale = self._holdings.loss_scale
        with self._context(step, present, observed, loss_scale=scale and scale.read()) as context:
            # Keras's layers draw by generators of their own, which differ by their place in the list.
            for salt, generator in enumerate(self._holdings.seed_generators, start=1):
                own = _this_replica() if getattr(generator, "within_shard", False) else context.replica
                drawn = randomness.step_seed(context.run_seed, step, own, salt)
                assign_local(generator.state.value, drawn)
            yield

    def _context(self, step, present, observed, batch_number=None, loss_scale=None) -> StepContext:
        """Makes a step's context. Replicas with the same examples draw the same: by their data coordinate."""
        replica = tf.convert_to_tensor(self._mesh.data.rank, tf.int32)
        seed = self._trainer.given.options.seed
        return StepContext(step, replica, present, observed, batch_number, seed, self._mesh, loss_scale)


def _this_replica() -> tf.Tensor:
    """Returns this replica's id in the whole strategy, scalar int32."""
    return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
