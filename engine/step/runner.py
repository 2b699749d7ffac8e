"""How a strategy runs a trainer's steps: within a context that says all that a step has to know. Replica code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from crankshaft.engine.step import randomness
from crankshaft.engine.step.context import StepContext


class StepRunner:
    """Makes the contexts of a trainer's steps, for the strategy that runs them.

    Args:
      trainer: a `Trainer`, prepared.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self._generators = randomness.seed_generators(trainer.held_layers.values())

    @contextlib.contextmanager
    def training(self, step: tf.Tensor, observed: tf.Tensor, present=None, **known) -> Iterator[StepContext]:
        """Sets what `train_step` needs while it is traced within: layers draw by this step, on this replica.

        Args:
          step: see `StepContext`.
          observed: see `StepContext`.
          present: see `StepContext`.
          **known: more of its attributes.
        """
        trainer, replica = self.trainer, this_replica()
        scale = trainer.loss_scale.read()
        with StepContext(step, replica, present, observed, loss_scale=scale, **known) as context:
            randomness.reseed(self._generators, trainer.options.seed, step, replica)
            if trainer.may_skip or (present is not None and trainer.reduction.restores_statistics):
                context.remember(trainer.moving_statistics)
            yield context

    @contextlib.contextmanager
    def evaluation(
        self, batch_number: tf.Tensor, step: tf.Tensor, observed: tf.Tensor, present=None, **known
    ) -> Iterator[StepContext]:
        """Sets what `eval_step` needs while it is traced within. See `StepContext`."""
        context = StepContext(step, this_replica(), present, observed, batch_number, **known)
        with context, context.values.in_use():
            yield context


def this_replica() -> tf.Tensor:
    """Returns this replica's id in the whole strategy, scalar int32."""
    return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
