"""Runs a trainer's steps for a strategy, and makes their contexts. Replica code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ..data import form
from ..errors import UsageError
from ..internals import graphs, keras, keras_scopes
from ..internals.patches import undivided_losses
from ..internals.tensorflow import (
    TemporaryVariable,
    around_exchanges,
    is_only_replica,
    replica_id,
    temporary_variable,
)
from ..internals.variables import assign_local, keeping_tensors, read_local, server_device
from ..mesh.layout import Mesh
from ..metrics.sums import without_details
from .batches import check_weighed, dense, num_examples, pad_empty_batch, zero_unless
from .context import StartValues, StepContext, step_context
from .options import Applied


class StepRunner:
    """Runs a trainer's steps for a strategy, and makes their contexts."""

    def __init__(self, trainer: Any, mesh: Mesh | None = None, counts_ids: bool = False):
        self._trainer = trainer
        self._counts_ids = counts_ids
        self._inventory = trainer.inventory
        # Found here, before a step is traced, so that a trace has a step's own calls alone.
        self._generators = self._inventory.seed_generators
        self._per_replica_variables = self._inventory.per_replica_variables
        self._mesh = mesh or Mesh()
        self.applied = Applied()
        self._contexts: list[StepContext] = []

    def pop_contexts(self) -> list[StepContext]:
        """Returns the contexts of the steps that were traced since it was called last, one for each replica."""
        contexts, self._contexts = self._contexts, []
        return contexts

    def train_batch(
        self,
        batch: Any,
        step: tf.Tensor,
        collect_norm: tf.Tensor,
        start_values: StartValues | None = None,
        jit: bool = False,
        batch_size: int | None = None,
    ) -> dict:
        """Runs `Trainer.train_step` on this replica's local batch, which may have no examples.

        Args:
          batch: nest of tensors whose first axis is examples.
          start_values: the values read for the step; it reads the rest.
          jit: whether XLA compiles the step; its kernels do not raise for ids out of range, so they are counted.
          batch_size: the number of examples of every global batch; None if it may differ.

        Returns:
          The metrics, zeros without examples.

        Raises:
          UsageError: there is no loss among them.
        """
        padded, has_examples = pad_empty_batch(batch)
        with self.training(step, collect_norm, has_examples, start_values) as context:
            context.batch, context.batch_size, batch = batch, batch_size, padded
            # TensorFlow's CPU kernels raise for an id out of range; XLA's take another row, so it is counted as a
            # metric that ends the run.
            context.counts_ids |= jit
            if (probe := self._inventory.probe) is not None:
                probe.note_examples(batch, collect_norm)
            restore = self._state_restorer(has_examples)
            # Confusion matrices and scores are an evaluation's: adding them up in each step would cost more than small
            # steps.
            metrics = without_details(check_weighed(self._trainer.train_step(batch), batch, self._trainer))
            if "loss" not in metrics and self._trainer.run_context.reports_loss:
                raise UsageError(
                    f"{type(self._trainer).__name__}.train_step returned {', '.join(metrics) or 'no metrics'}, without "
                    "'loss', which a run shows and checks; name one of the losses so"
                )
            count = metrics["loss"].count if self._trainer.run_context.reports_loss else num_examples(batch)
            self._trainer.reduction.aggregate_again(batch, count, self._per_replica_variables)
            # After the sums, whose mean of moving statistics a skipped step must not keep either.
            restore(metrics)
            for averaged in self._inventory.averaged.values():
                # Last, so that an average follows the weights as this step leaves them.
                averaged.follow(step, metrics["skipped"].total if "skipped" in metrics else None)
            counted = self._counts(has_examples)
            return metrics if counted is None else zero_unless(counted, metrics)

    def evaluate_batch(
        self,
        batch: Any,
        batch_number: tf.Tensor,
        state: Any,
        compute: Callable | None,
        predicts: bool,
        start_values: StartValues | None = None,
        batch_size: int | None = None,
    ) -> dict | tuple[dict, Any]:
        """Runs `Trainer.eval_step`, or `compute`, on this replica's local batch, which may have no examples.

        Returns:
          The metrics; with `predicts` (metrics, each example's outputs): the predictions for `compute_metrics`, or
            `compute(features)`. Of replicas with the same examples, only the first returns some.

        Raises:
          UsageError: the step returns no predictions, and they are asked for.
        """
        step, owner = tf.identity(state.step_variable), type(self._trainer).__name__
        batch, has_examples = pad_empty_batch(batch)
        with self._context(step, has_examples, None, batch_number, start_values) as context:
            context.batch, context.batch_size = batch, batch_size
            context.seed_layers(assigns=not context.start_values.replaces_variables)
            with keras_scopes.computing_with(context.values):
                result = ({}, compute(form.features(batch))) if compute else self._trainer.eval_step(batch)
                metrics, predictions = result if type(result) is tuple and len(result) == 2 else (result, None)
                counted = self._counts(has_examples)
                metrics = check_weighed(metrics, batch, self._trainer)
                metrics = metrics if counted is None else zero_unless(counted, metrics)
                if predicts and not compute and (not isinstance(predictions, dict) or not predictions):
                    raise UsageError(
                        f"{owner}.compute_metrics: {owner}.eval_step returns no predictions for it; return (metrics, "
                        "predictions), the latter tensors [examples, ...] by name"
                    )
                if predicts:
                    title = "predict" if compute else f"{owner}.predictions"
                    predictions = _checked_predictions(predictions, batch, counted, title)
        return (metrics, predictions) if predicts else metrics

    def _state_restorer(self, has_examples: tf.Tensor | None) -> Callable[[dict], None]:
        """Reads the state that layers assign; returns a function of a step's metrics that restores it if needed.

        The forward pass has assigned it, and admitted ids, even if the step is skipped, as its metrics show, or if the
        replica has no examples, or those of all. State shared by replicas is restored only if their sum does not
        replace it.
        """
        inventory, reduction = self._inventory, self._trainer.reduction
        may_skip = self._trainer.run_context.options.may_skip
        state = [aggregated.variable for aggregated in inventory.aggregated]
        local = [*self._per_replica_variables, *(state if reduction.restores_statistics else ())]
        # What such a batch adds must be added once, though each replica has computed it.
        if is_only_replica():  # each computes the same examples, which sums of all replicas' values have once
            first = tf.equal(self._mesh.data.rank, 0)
            sums = [v for v in self._per_replica_variables if v.aggregation == tf.VariableAggregation.SUM]
            computes = {id(v): first for v in sums}
        else:
            computes = {} if has_examples is None else {id(v): has_examples for v in local}
        variables = {id(v): v for v in [*state, *local] if may_skip or id(v) in computes}
        before = [(variable, read_local(variable)) for variable in variables.values()]
        tables = inventory.tables.values() if may_skip else ()
        # Of a table only the rows that the step writes are copied: all of them may take gigabytes.
        written = [v for table in tables for admission in table.admissions for v in admission.undoable]
        log = _UndoLog(written, step_context().step) if written else None
        if log is not None:
            step_context().note_write = log.add

        def restore(metrics: dict) -> None:
            if log is not None and "skipped" in metrics:
                tf.cond(metrics["skipped"].total > 0.0, log.undo, lambda: None)
            for variable, value in before:
                counts = [computes[id(variable)]] if id(variable) in computes else []
                counts += [metrics["skipped"].total == 0.0] if "skipped" in metrics else []
                _restore_unless(variable, value, counts)

        return restore

    def _counts(self, has_examples: tf.Tensor | None) -> tf.Tensor | None:
        """Returns whether this replica's metrics count: of replicas with the same examples, only the first one's do."""
        if self._mesh.is_sharded and self._mesh.model.rank:
            return tf.constant(False)
        return tf.equal(self._mesh.data.rank, 0) if is_only_replica() else has_examples

    @contextlib.contextmanager
    def training(
        self,
        step: tf.Tensor,
        collect_norm: tf.Tensor,
        has_examples: tf.Tensor | None = None,
        start_values: StartValues | None = None,
    ) -> Iterator[StepContext]:
        """Enters the context in which `train_step` is traced: layers sample by this step and replica."""
        scale = self._inventory.loss_scale
        start_values = dataclasses.replace(start_values or StartValues(), loss_scale=scale and scale.read())
        with self._context(step, has_examples, collect_norm, start_values=start_values) as context:
            context.seed_layers()
            start_values.accumulators.update(self._trainer.reduction.values_at_start())
            yield context

    @contextlib.contextmanager
    def _context(self, step, has_examples, collect_norm, batch_number=None, start_values=None) -> Iterator[StepContext]:
        """Enters a step's context. Replicas with the same examples sample the same, by their data coordinate."""
        is_alone = is_only_replica()
        with tf.name_scope(graphs.REPLICA_SCOPE):
            replica = tf.convert_to_tensor(0 if is_alone else self._mesh.data.rank, tf.int32)
            shard = tf.convert_to_tensor(self._mesh.model.rank if is_alone else replica_id(), tf.int32)
        context = StepContext(
            graph=tf.compat.v1.get_default_graph(),
            step=step,
            replica=replica,
            shard=shard,
            has_examples=has_examples,
            collect_norm=collect_norm,
            batch_number=batch_number,
            run_seed=self._trainer.run_context.options.seed,
            updates_before=self._trainer.run_context.updates_before,
            mesh=self._mesh,
            start_values=start_values or StartValues(),
            generators=self._generators,
            frozen=self._inventory.freezing.frozen,
            applied=self.applied,
            counts_ids=self._counts_ids,
        )
        seeds = keras_scopes.unseeded_samples(lambda: step_context().keras_seed())
        # What the step keeps in attributes until replicas have exchanged values is this replica's afterwards, too.
        owners = [self._trainer, *keras.all_layers_in(self._inventory.layers.values())]
        exchanges = around_exchanges(lambda: keeping_tensors(owners))
        with context, undivided_losses(), seeds, exchanges:
            if not tf.executing_eagerly():  # only traces are checked
                self._contexts.append(context)
            yield context


def _checked_predictions(outputs: Any, batch: Any, counted: tf.Tensor | None, owner: str) -> Any:
    """Returns outputs of a batch, checked to have an entry for each example; none if they don't count."""
    examples = tf.shape(tf.nest.flatten(batch)[0])[0]

    def checked(path, x):
        name = " ".join(["output", *([".".join(map(str, path))] if path else [])])
        x = dense(x, f"{owner}: {name}")
        if x.shape.rank == 0:
            raise UsageError(
                f"{owner}: {name} is one number, of no example; leave it out, or give each example one, tf.fill"
            )
        check = tf.debugging.assert_equal(tf.shape(x)[0], examples, f"{owner}: {name} has not one entry per example")
        with tf.control_dependencies([check]):
            return tf.identity(x) if counted is None else x[: tf.where(counted, examples, 0)]

    named = tf.keras.tree.flatten_with_path(outputs)
    return tf.keras.tree.pack_sequence_as(outputs, [checked(path, x) for path, x in named])


def _restore_unless(variable: tf.Variable, value: tf.Tensor, counts: Sequence[tf.Tensor]) -> None:
    """Assigns a variable its previous value, unless all `counts` are true."""

    def assign(value: Any) -> None:
        with tf.name_scope(graphs.ENGINE_SCOPE):
            assign_local(variable, value)

    # Other workers write it meanwhile: assigning the old value again, even the same, would undo what they wrote.
    if server_device(variable):
        for does_count in counts:
            tf.cond(does_count, lambda: None, lambda: assign(value))
        return
    moved = read_local(variable)  # chosen by value: a condition would make the host wait for a GPU
    for does_count in counts:
        moved = tf.where(does_count, moved, value)
    assign(moved)


class _UndoLog:
    """The rows of variables before a step's writes.

    It is in temporary variables, since the writes may be in conditions and loops, and costs what they do.

    Args:
      variables: this replica's variables, in a host's memory.
    """

    def __init__(self, variables: Iterable[tf.Variable], step: tf.Tensor):
        # No rows, which TensorFlow's optimization of the graph must not know: it takes the first shape for all.
        none = tf.reshape(tf.where([step < 0]), [-1])
        self._rows: dict[int, tuple[tf.Variable, TemporaryVariable, TemporaryVariable]] = {}
        for variable in variables:
            values = temporary_variable(_gather(variable, none), [None, *variable.shape[1:]])
            self._rows[id(variable)] = variable, temporary_variable(none, [None]), values

    def add(self, variable: tf.Variable, indices: tf.Tensor) -> None:
        """Notes rows that are written next, by their indices [n], int64; does nothing for other variables."""
        if id(variable) not in self._rows:
            return
        _, *notes = self._rows[id(variable)]
        for note, more in zip(notes, (indices, _gather(variable, indices)), strict=True):
            value = tf.concat([_read(note), more], 0)
            tf.raw_ops.AssignVariableOp(resource=note.handle, value=value)

    def undo(self) -> None:
        """Restores the rows."""
        for variable, *notes in self._rows.values():
            indices, values = map(_read, notes)
            # A row may have been written several times: what was noted first is its value before the step.
            unique, positions = tf.unique(indices)
            first = tf.math.unsorted_segment_min(tf.range(tf.size(indices)), positions, tf.size(unique))
            tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=unique, updates=tf.gather(values, first))


def _gather(variable: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=indices, dtype=variable.dtype)


def _read(variable: TemporaryVariable) -> tf.Tensor:
    return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype), variable.shape)
