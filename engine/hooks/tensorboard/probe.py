"""Observes a step's computation for TensorBoard, without changing the run. Called on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import tensorflow as tf

from ...data import form
from ...data.feed import Feed
from ...internals.tensorflow import single_replica_context
from ...internals.variables import assign_local, read_local, tf_variable, variable_path
from ...layers.embeddings import Embedding
from ...step import batches
from ...step.runner import StepRunner
from ...strategies.base import Program
from .event_values import Histogram, histogram


class Probe:
    """Computes the next step's gradients, and shows its batch, without doing the step.

    Nothing is read for it. Of a user's dataset, whose iterator is training's, and of external data, it takes the batch
    that a step was trained on before the first call, and keeps it for all later calls.

    Args:
      strategy: the run's, of this package, bound to its data.
    """

    def __init__(self, strategy, trainer):
        self._strategy = strategy
        self._distribution = strategy.distribution
        self._kept: Feed | None = None
        strategy.training.feed.retain_last_batch()
        self._trainer = trainer
        self._inventory = trainer.inventory
        self._runner = StepRunner(trainer, strategy.mesh)
        self._gradients = tf.function(self._replicated_gradients, autograph=False)
        self._batch = tf.function(self._replicated_batch, autograph=False)

    def gradients(self, program: Program, step: int) -> dict[str, Histogram]:
        """Returns histograms of the loss's gradients over the global batch of a step, by the variable's path.

        Before clipping, after the sum over replicas. {} if the trainer leaves `compute_gradients` nothing to train,
        and if no batch of a dataset can be kept.
        """
        feed = self._probe_feed(program, step)
        if not self._trainer.trainable_variables or feed is None:
            return {}
        operands, offset, _ = feed.peek(step)
        with _without_admission(self._inventory.tables.values()):
            numbers = tf.constant(offset, tf.int64), tf.constant(step, tf.int64)
            shares = self._strategy.mesh.batch_share(0, self._strategy.num_replicas)[1]
            replicates_batch = feed.order.replicates_batch(step, shares)
            gradients = self._gradients(feed, operands, *numbers, self._inventory.freezing.frozen, replicates_batch)
        paths = [variable_path(v) for v in self._trainer.trainable_variables]
        return {path: gradients[path] for path in paths if path in gradients}

    @property
    def example_features(self):
        """Features of one example, zeros: their shapes and dtypes."""
        return form.features(self._trainer.run_context.example)

    def features(self, program: Program, step: int):
        """Returns the features of one replica's share of a step's batch, as tensors; None if unknown."""
        if (feed := self._probe_feed(program, step)) is None:
            return None
        operands, offset, _ = feed.peek(step)
        return self._batch(feed, operands, tf.constant(offset, tf.int64))

    def _probe_feed(self, program: Program, step: int) -> Feed | None:
        feed = program.feed
        if feed.random_access:  # training takes the same step next
            return feed
        if self._kept is None and feed.peek(step) is not None:
            self._kept = self._strategy.repeated_batch(feed)
        return self._kept

    def _replicated_batch(self, feed: Feed, operands, offset):
        batch = feed.next_operands(operands, offset)
        features = self._distribution.run(lambda *b: form.features(feed.batch(*b)), args=batch)
        return self._first_replicas(features)

    def _replicated_gradients(self, feed: Feed, operands, offset, step, form, replicates_batch: bool):
        def on_replica(*operands):
            batch = feed.batch(*operands)
            with single_replica_context() if replicates_batch else contextlib.nullcontext():
                return self._replica_gradients(batch, step)

        histograms = self._distribution.run(on_replica, args=feed.next_operands(operands, offset))
        return self._first_replicas(histograms)

    def _first_replicas(self, values):
        return tf.nest.map_structure(lambda x: self._distribution.experimental_local_results(x)[0], values)

    def _replica_gradients(self, batch, step):
        """Computes one replica's gradients; restores state that a training forward pass changes (statistics, seeds)."""
        trainer = self._trainer
        moved = [tf_variable(v) for layer in self._inventory.layers.values() for v in layer.non_trainable_variables]
        before = [read_local(v) for v in moved]
        batch, has_examples = batches.pad_empty_batch(batch)
        with self._runner.training(step, tf.constant(True), has_examples):
            gradients, metrics = trainer.compute_gradients(batch)
            variables = trainer.trainable_variables
            gradients, count = trainer.reduction.sum_exactly(gradients, metrics["loss"].count, variables)
            gradients = gradients.over(count).unscaled()
        for variable, value in zip(moved, before, strict=True):
            assign_local(variable, value)
        paths = [variable_path(v) for v in trainer.trainable_variables]
        return {
            path: histogram(g.values if isinstance(g, tf.IndexedSlices) else g)
            for path, g in zip(paths, gradients, strict=True)
            if g is not None
        }


@contextlib.contextmanager
def _without_admission(tables: Iterable[Embedding]) -> Iterator[None]:
    """Stops tables from assigning rows to new ids in code traced in this context."""
    for table in tables:
        table.admits = False
    try:
        yield
    finally:
        for table in tables:
            table.admits = True
