"""Makes a trainer ready for a run, on the host, and enters a context around each of its steps, in replica code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from crankshaft.engine.optimizers.loss_scale import DynamicLossScale, NoLossScale
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.step import randomness
from crankshaft.engine.step.batches import check_weighed, only_if, with_stand_in
from crankshaft.engine.step.context import StepContext
from crankshaft.engine.step.options import StepOptions


def prepare(
    trainer,
    options: StepOptions,
    reduction: Reduction,
    example,
    num_classes: int | None = None,
    vocabulary: dict[str, int] | None = None,
) -> None:
    """Gives a trainer the attributes that its class names, and builds it. Host code, in the strategy's scope, once."""
    trainer.options = options
    trainer.reduction = reduction
    trainer.example = example
    trainer.num_classes = num_classes
    trainer.vocabulary = vocabulary
    trainer.loss_scale = DynamicLossScale() if options.precision == "float16" else NoLossScale()
    trainer.loss_scale.build()
    # Keras draws an initialiser's seed when a layer is constructed, so the seed comes before the model. It stays for
    # the run, which puts back what there was.
    tf.keras.utils.set_random_seed(options.seed)
    with _layers_of(options.precision):
        trainer.build()
    updated = [v for each in trainer.optimizers.values() for v in each.updated_variables]
    reduction.build(updated, trainer.moving_statistics)


@contextlib.contextmanager
def _layers_of(precision: str) -> Iterator[None]:
    """Has Keras's layers that are made within compute in a precision, and puts Keras's own policy back."""
    before = tf.keras.config.dtype_policy()
    tf.keras.config.set_dtype_policy("float32" if precision == "float32" else f"mixed_{precision}")
    try:
        yield
    finally:
        tf.keras.config.set_dtype_policy(before)


class StepRunner:
    """Runs a trainer's steps for a strategy, and makes their contexts.

    Args:
      trainer: a `Trainer`, prepared.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self._generators = randomness.seed_generators(trainer.held_layers.values())

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
            return only_if(present, check_weighed(self.trainer.train_step(batch), batch, self.trainer)), context

    def eval_step(self, batch, batch_number: tf.Tensor, step: tf.Tensor, observed: tf.Tensor, **known) -> dict:
        """Runs `Trainer.eval_step` as `train_step` runs its own, and returns the metrics."""
        batch, present = with_stand_in(batch)
        with self.evaluation(batch_number, step, observed, present, **known):
            return only_if(present, check_weighed(self.trainer.eval_step(batch), batch, self.trainer))

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
            if trainer.options.may_skip or (present is not None and trainer.reduction.restores_statistics):
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
