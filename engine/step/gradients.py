"""Gradients from the tape to the update: their factors, and the update. Replica code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..errors import UsageError
from ..internals import keras_scopes
from ..internals.variables import assign_local, table_identity, tf_variable, variable_path
from ..metrics.means import as_losses, as_pair, is_loss
from ..metrics.pairs import Mean, SumOfMeans
from ..metrics.sums import without_details
from . import batches, diagnosis
from .batches import zero_unless
from .context import step_context
from .options import StepOptions

_HALVES = (tf.bfloat16, tf.float16)
_UNIQUE = "crankshaft_rows_each_once"  # a graph's collection


class Gradients(Sequence[Any]):
    """A list of gradients (tensors, `tf.IndexedSlices`, None), and the factors by which they are yet to be multiplied.

    Dividing by the count, unscaling and clipping are a factor each. Multiplying is a pass over all gradients, up to a
    tenth of a wide model's step on a CPU, so it is done once, when a gradient is read; the norm needs no pass.

    On one replica a loss is divided by its count before the backward pass, which is free. Its gradients are those of
    the mean, and the count is a factor, which dividing by the same count (`over`) removes.

    Args:
      values: the gradients before the factors; those of a `Gradients` are taken over with its factors.
      factors: positive scalar float32 tensors.
    """

    # Whether the norm is a sum across replicas, which may not be in a condition.
    exchanges_norm = False

    def __init__(self, values: Sequence, factors: tuple[tf.Tensor, ...] = ()):
        self.values, self.factors = values, factors
        if isinstance(values, Gradients):
            self.values, self.factors = values.values, (*values.factors, *factors)
        # Those of variables in 16 bits are float32 up to the update: factors, norms and sums are of all together.
        self.values = [x if x is None or x.dtype not in _HALVES else tf.cast(x, tf.float32) for x in self.values]

    def with_values(self, values: Sequence, factors: tuple[tf.Tensor, ...] | None = None) -> Gradients:
        """Returns gradients of the same variables, by default with the same factors."""
        return Gradients(values, self.factors if factors is None else factors)

    def joined(self, others: Sequence[Gradients]) -> Gradients:
        """Returns these gradients and then the others, multiplied by their factors."""
        return Gradients([value for gradients in (self, *others) for value in gradients])

    def times(self, factor: tf.Tensor) -> Gradients:
        return self.with_values(self.values, (*self.factors, factor))

    def over(self, count: tf.Tensor) -> Gradients:
        """Divides by a count; zeros if it is 0.

        A count that is a factor already is recognized by identity: pass the same tensor, not another of its value.
        """
        if any(factor is count for factor in self.factors):
            return self.with_values(self.values, tuple(x for x in self.factors if x is not count))
        return self.times(tf.math.divide_no_nan(1.0, count))

    def unscaled(self) -> Gradients:
        """Divides by the step's loss scale, if it has one; overflows stay inf or nan."""
        scale = step_context().start_values.loss_scale
        step_context().applied.mark("Gradients.unscaled")
        return self if scale is None else self.times(1.0 / scale)

    def without_factors(self) -> tuple[Gradients, tf.Tensor]:
        """Returns (the gradients before the factors, the factors' product)."""
        return self.with_values(self.values, ()), self._product(tf.constant(1.0))

    def norm(self) -> tf.Tensor:
        """Returns sqrt(sum of squares) over all gradients, scalar float32. Repeated rows are summed first."""
        return self._product(tf.linalg.global_norm([sum_duplicate_rows(gradient) for gradient in self.values]))

    def clipped_by_value(self, limit: float) -> Gradients:
        """Clips each value to [-limit, limit]. Repeated rows are summed first."""
        return self._map_values(lambda values, _: tf.clip_by_value(values, -limit, limit))

    def clipped_by_norms(self, limit: float, wholes: Sequence[int]) -> Gradients:
        """Clips each variable's gradient to a norm of `limit` at most.

        Args:
          limit: above 0.
          wholes: for each gradient the identifier of its whole variable: a variable's shards share one norm.
        """
        by_variable: dict[int, list[int]] = {}
        for position, whole in enumerate(wholes):
            by_variable.setdefault(whole, []).append(position)
        summed = self.with_values([sum_duplicate_rows(gradient) for gradient in self.values])
        norms = dict(zip(by_variable, summed.norms([*by_variable.values()]), strict=True))
        return summed._map_values(lambda values, i: values * (limit / tf.maximum(norms[wholes[i]], limit)))

    def norms(self, groups: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        """Returns the `norm` of each group of gradients, given by their positions."""
        return [Gradients([self.values[position] for position in group], self.factors).norm() for group in groups]

    def _map_values(self, change: Callable) -> Gradients:
        """Applies the factors, then `change(values, index)`. Repeated rows are summed first."""

        def changed(gradient, i):
            if isinstance(gradient, tf.IndexedSlices):
                return UniqueSlices(change(gradient.values, i), gradient.indices, gradient.dense_shape)
            return None if gradient is None else change(gradient, i)

        summed = self.with_values([sum_duplicate_rows(gradient) for gradient in self.values])
        return self.with_values([changed(gradient, i) for i, gradient in enumerate(summed)], ())

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.with_values(self.values[index])
        gradient = self.values[index]
        if gradient is None or not self.factors:
            return gradient
        _, factor = self.without_factors()
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        return gradient * factor

    def _product(self, scalar: tf.Tensor) -> tf.Tensor:
        for factor in self.factors:
            scalar *= factor
        return scalar


class Update:
    """One update of a step, by one optimizer or several. All of it is applied, or none if the step is skipped.

    If the options allow it, a step with a gradient that is not finite is skipped on all replicas.

    Args:
      trainer: the step's trainer. Its options say how gradients are clipped and whether a step may be skipped.
      gradients: all gradients of the update, of the mean across replicas, unscaled. Those of frozen variables are left
        out.
      variables: the gradients' variables. One that several optimizers update is listed once for each, with the gradient
        of its loss, in the order in which they are applied.
      options: the options by which to clip and skip, if an optimizer has its own; None takes the trainer's.
      loss_scale: an `optimizers.loss_scale.DynamicLossScale` that adapts to the gradients; None takes the trainer's.

    Attributes:
      gradients: clipped by their global norm (Pascanu et al. 2013), by each variable's, or by value.
      norm: sqrt(sum of squares) over all gradients, before clipping, scalar float32; 0 at a step that neither
        clips nor reports it.
      finite: scalar bool, whether every gradient is; None if a step is always applied.

    Example:
      >>> def train_step(self, batch):  # in a Trainer: the default
      ...     variables = self.trainable_variables
      ...     gradients, metrics = self.compute_gradients(batch)
      ...     gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)
      ...     update = Update(self, gradients.over(count).unscaled(), variables)
      ...     update.apply(self.optimizer, variables)
      ...     return update.end(metrics)
    """

    def __init__(
        self,
        trainer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        options: StepOptions | None = None,
        loss_scale: Any = None,
    ):
        options, collect_norm = options or trainer.run_context.options, step_context().collect_norm
        self._owner = f"{type(trainer).__name__}.train_step"
        self._positions: dict[int, list[int]] = {}  # of each variable's gradients: one for each time that it is listed
        for position, variable in enumerate(variables):
            self._positions.setdefault(id(tf_variable(variable)), []).append(position)
        clips = options.clip_norm or options.clip_variable_norm
        if clips and (shared := [places[1] for places in self._positions.values() if len(places) > 1]):
            raise UsageError(
                f"{'clip_norm' if options.clip_norm else 'clip_variable_norm'}: {type(trainer).__name__} updates "
                f"{variable_path(variables[shared[0]])} by several optimizers in one update, whose gradients would be "
                "clipped by a common norm; make an update for each, such as a call of minimize, or leave it out"
            )
        gradients = gradients if isinstance(gradients, Gradients) else Gradients(gradients)
        frozen = step_context().frozen
        # What is not updated must not count in the norm either, or freezing a layer would change how others are
        # clipped.
        pairs = zip(gradients.values, variables, strict=True)
        gradients = gradients.with_values([None if id(tf_variable(v)) in frozen else x for x, v in pairs])
        is_unconditional = gradients.exchanges_norm and collect_norm is not None
        if options.may_skip or options.clip_norm or is_unconditional:
            self.norm, self._has_norm = gradients.norm(), tf.constant(1.0)
        elif collect_norm is None:
            self.norm, self._has_norm = tf.constant(0.0), tf.constant(0.0)
        else:  # it is one more pass over all gradients
            # The reported norm is of the steps at which metrics are read; all other steps are spared the pass.
            self.norm = tf.cond(collect_norm, gradients.norm, lambda: 0.0)
            self._has_norm = tf.cast(collect_norm, tf.float32)
        if (probe := trainer.inventory.probe) is not None and collect_norm is not None:
            probe.note_gradients(gradients, variables, collect_norm)
        self.finite = tf.math.is_finite(self.norm) if options.may_skip else None
        step_context().applied.mark("Update")
        if options.clip_norm:
            # Clipping by the global norm is one more factor, multiplied where the update reads a gradient: no pass of
            # its own.
            gradients = gradients.times(options.clip_norm / tf.maximum(self.norm, options.clip_norm))
        elif options.clip_value:
            gradients = gradients.clipped_by_value(options.clip_value)
        elif options.clip_variable_norm:
            gradients = gradients.clipped_by_norms(options.clip_variable_norm, list(map(table_identity, variables)))
        self.gradients = gradients
        self._loss_scale = loss_scale or getattr(trainer, "loss_scale", None)  # float16's

    def apply(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Updates some of the variables, and their average, by an optimizer; does nothing in a skipped step."""
        if others := [variable_path(v) for v in variables if id(tf_variable(v)) not in self._positions]:
            raise UsageError(f"Update has no gradient of {others[0]}; pass it all gradients of the update")
        if isinstance(optimizer, tf.keras.optimizers.Optimizer):  # without rates, frozen variables, replicas' slots
            raise _bare(self._owner, optimizer)
        step_context().applied.mark("Update.apply")
        places = [self._positions[id(tf_variable(variable))] for variable in variables]
        values = [self.gradients.values[place.pop(0) if len(place) > 1 else place[0]] for place in places]
        gradients = self.gradients.with_values(values)
        if self.finite is None:
            optimizer.apply(gradients, variables)
        else:
            # In a condition, not by a choice of values: an update writes slots in place, and NaN times 0 is NaN.
            tf.cond(self.finite, lambda: optimizer.apply(gradients, variables), lambda: None)

    def end(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Ends the update: adjusts the loss scale, and completes the step's metrics.

        Returns:
          The metrics with `gradient_norm`, over the steps that computed it, and, if steps may be skipped, `skipped`,
          their fraction. A skipped step leaves moving statistics unchanged, and counts in no other metric, unless only
          the loss scale was too high: its losses are finite.
        """
        step_context().applied.mark("Update.end")
        norm = {"gradient_norm": Mean(self.norm, self._has_norm)}
        if self.finite is None:
            return {**metrics, **norm}
        counts = self.finite
        if self._loss_scale is not None:
            self._loss_scale.update(self.finite)
            losses = [tf.reduce_all(tf.math.is_finite(metrics[name].total)) for name in metrics if is_loss(name)]
            # Too high a loss scale makes gradients infinite and leaves the loss finite: those examples were computed,
            # and count.
            counts |= tf.reduce_all(losses)
        skipped = Mean(1.0 - tf.cast(self.finite, tf.float32), tf.constant(1.0))
        return {**zero_unless(counts, metrics), **zero_unless(self.finite, norm), "skipped": skipped}


def _bare(owner: str, optimizer: Any) -> UsageError:
    """Makes the error of an optimizer that `make_optimizer` has not made."""
    return UsageError(
        f"{owner} updates by a bare {type(optimizer).__name__}; in build, make it by "
        "crankshaft.make_optimizer(self, variables, optimizer)"
    )


def minimize(
    trainer: Any, batch: Any, losses: Callable[[Any], dict[str, Mean]], optimizers: Mapping[str, Any]
) -> dict[str, Mean]:
    """Makes one update of a step: each optimizer minimizes one of the losses over its variables. Replica code.

    Applies all of the run's options: micro-batches, float16's loss scale, the sum across replicas, frozen variables,
    clipping (by the norm of all gradients together), and skipping a step that is not finite. What layers add to a loss
    (regularizers, `add_loss`) is minimized only if `losses` adds it.

    Args:
      trainer: the step's trainer.
      batch: this replica's local batch, in the form of the data; its first axis is examples.
      losses: computes the metrics of a batch or micro-batch: (total, count) pairs by name, as `crankshaft.mean` returns
        for one value per example. A loss may be a dictionary of means, as that of `Trainer.loss`: the loss is their
        sum, and each is a metric by its name.
      optimizers: made by `make_optimizer`, by the name of the loss that each minimizes. All gradients are taken before
        the first update; a variable that several optimizers share gets an update by each, in the dictionary's order.

    Returns:
      The metrics, with those of `Update.end`.

    Raises:
      UsageError: a loss is missing, or depends on none of its optimizer's variables; or an optimizer is bare; or
        optimizers share a variable, and gradients are clipped by norms.

    Example:
      >>> def train_step(self, batch):  # in a Trainer with two models
      ...     return minimize(self, batch, self.losses, {"loss": self.optimizer, "critic_loss": self.critic_optimizer})
    """
    owner, micro_batches = f"{type(trainer).__name__}.train_step", trainer.run_context.options.micro_batches
    for optimizer in optimizers.values():
        if not hasattr(optimizer, "trainable"):
            raise _bare(owner, optimizer)

    def compute(micro_batch):
        pairs: dict[str, Any] = {}
        for name, loss in losses(micro_batch).items():
            means = as_losses(loss, f"{owner}: {name!r}") if isinstance(loss, dict) else {"loss": loss}
            for metric, pair in ((name, means.pop("loss")), *means.items()):
                if metric in pairs:
                    raise UsageError(f"{owner}: two metrics have the name {metric!r}; give each its own")
                pairs[metric] = as_pair(pair, f"{owner}: {metric!r}")
                if name in optimizers:
                    diagnosis.warn_of_sums(f"{owner}: {metric!r}", [pairs[metric]], micro_batch, micro_batches)
        if missing := [name for name in optimizers if name not in pairs]:
            raise UsageError(
                f"{owner} minimizes {missing[0]!r}, and its losses are {', '.join(pairs)}; use one of them"
            )
        for name, optimizer in optimizers.items():
            left_out = pairs[name].total, optimizer.trainable, micro_batch
            diagnosis.warn_of_penalties_left_out(f"{owner}: {name!r}", *left_out)
        return BatchLosses([pairs[name] for name in optimizers], lambda: pairs)

    variables = [optimizer.trainable for optimizer in optimizers.values()]
    gradients, metrics = differentiate(trainer, batch, compute, variables)
    # One sum per optimizer, since each loss has a count of its own.
    means, averages = [], None  # moving statistics are averaged with the first sum
    for name, local, group in zip(optimizers, gradients, variables, strict=True):
        summed, count = trainer.reduction.sum(local, metrics[name].count, averages, group)
        means.append(summed.over(count).unscaled())
        averages = ()
    whole = means[0].joined(means[1:]) if len(means) > 1 else means[0]
    update = Update(trainer, whole, [variable for group in variables for variable in group])
    for optimizer, group in zip(optimizers.values(), variables, strict=True):
        update.apply(optimizer, group)
    return update.end(metrics)


class BatchLosses(NamedTuple):
    """The losses of a batch or micro-batch.

    Attributes:
      minimized: the pairs to differentiate.
      metrics: computes all metrics, which need no tape.
      outputs: the model's outputs, if they are asked for.
    """

    minimized: list[Mean | SumOfMeans]
    metrics: Callable[[], dict[str, Any]]
    outputs: Any = None


def differentiate(
    trainer: Any, batch: Any, losses: Callable[[Any], BatchLosses], variables: Sequence[Sequence]
) -> tuple[list[Gradients], dict]:
    """Computes gradients of *sums* of this replica's (scaled) losses, and the batch's metrics. Replica code.

    Computes them in the micro-batches that the trainer's options set.

    Args:
      losses: computes those of a micro-batch; each of `minimized` is differentiated.
      variables: for each of these, the variables to differentiate by.

    Returns:
      (each loss's gradients, metrics). Gradients of frozen variables are None, and those of variables that they
      replace, see `_assign_next_values`.
    """
    options, reduction, frozen = trainer.run_context.options, trainer.reduction, step_context().frozen
    is_whole, alone = options.micro_batches == 1, reduction.alone()
    updated = [[variable for variable in group if id(tf_variable(variable)) not in frozen] for group in variables]
    has_frozen = sum(map(len, updated)) < sum(map(len, variables))

    def compute(batch):
        """Computes the losses of a batch or micro-batch, their gradients and the metrics."""
        context = step_context().up_to_date()
        with (
            tf.GradientTape(
                # A tape that is not persistent frees each intermediate value as soon as its gradient is computed.
                persistent=not is_whole or len(variables) > 1,
                watch_accessed_variables=not has_frozen,
            ) as tape,
            keras_scopes.computing_with(context.values, [v for group in updated for v in group], tape) as sources,
        ):
            if has_frozen:  # so that frozen first layers are not recorded
                tape.watch(list(map(tf_variable, sources)))
            with diagnosis.numbers_out_of_range() as outside:
                pairs, metrics, _ = losses(batch)
            # The scalars whose gradients each loss needs, scaled within the tape, and what their gradients lack.
            totals: list[list[tuple[tf.Tensor, tuple]]] = []
            for number, pair in enumerate(pairs):
                if isinstance(pair, SumOfMeans) and is_whole:
                    # The counts of the global batch are known before the backward pass: one mean, of the same gradient.
                    ratios = _count_ratios(_counts(pair), reduction)
                    pairs[number] = pair = Mean(tf.reduce_sum(pair.total[:, 0] * ratios), pair.count)
                is_mean = alone and not isinstance(pair, SumOfMeans)
                terms = [pair] if isinstance(pair, Mean) else [Mean(*tf.unstack(x)) for x in tf.unstack(pair.total)]
                totals.append(
                    [_in_range(total, count, batch, is_mean, options.micro_batches) for total, count in terms]
                )
        gradients: list = []
        rest = iter(sources)
        for pair, pair_totals, group in zip(pairs, totals, variables, strict=True):
            given = [None if id(tf_variable(variable)) in frozen else next(rest) for variable in group]
            watched = [source for source in given if source is not None]
            diagnosis.check_gradients_pass([total for total, _ in pair_totals], group, given)
            columns = []
            for total, factors in pair_totals:
                found = tape.gradient(total, watched)
                for gradient, source in zip(found, watched, strict=True):
                    if isinstance(gradient, tf.Tensor):  # of batches of any length, its shape may be unknown
                        gradient.set_shape(source.shape)
                ordered = iter(found)
                columns.append(Gradients([None if source is None else next(ordered) for source in given], factors))
            check_reached([gradient for column in columns for gradient in column.values], type(trainer).__name__)
            if isinstance(pair, SumOfMeans):
                gradients.append(_MeansLoss([list(column) for column in columns], _counts(pair)))
            else:
                gradients.append(columns[0] if is_whole else list(columns[0]))
        return gradients, {**without_details(metrics()), **outside}

    step_context().applied.mark("compute_gradients")
    # Within a loop one trace serves all micro-batches, so what it reads may be written by a later one: all is read
    # again.
    with step_context().up_to_date(is_once=False):
        if is_whole:
            gradients, metrics = compute(batch)
        else:
            gradients, metrics = batches.accumulate(
                compute,
                batch,
                options.accumulate_steps,
                options.parallel_micro_batches,
                loops=not step_context().mesh.is_sharded,  # sharded layers sum over replicas, which hangs in a loop
            )
    summed = [pair.summed(reduction) if isinstance(pair, _MeansLoss) else Gradients(pair) for pair in gradients]
    if any(getattr(variable, "overwrite_with_gradient", False) for group in variables for variable in group):
        summed = [_assign_next_values(group, total, is_whole) for group, total in zip(variables, summed, strict=True)]
    return summed, metrics


def _in_range(
    total: tf.Tensor, count: tf.Tensor, batch: Any, is_mean: bool, micro_batches: int
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
    """Scales a loss's total for the backward pass; returns it, and the factors that its gradients then lack.

    With a loss scale, which replicas have for a mean over the global batch's examples, each example's values on the way
    are as in the backward pass of the mean over all that the global batch counts, so that float16 represents them alike
    on any number of replicas and in micro-batches. What is divided by for it is a power of two, which loses no bit.

    Args:
      count: what the loss counts in this micro-batch, such as tokens.
      is_mean: whether to take the mean here, where it is one division (`Gradients`): nothing is summed across replicas.
      micro_batches: the number of this replica's.
    """
    factors, scale = [count] if is_mean else [], step_context().start_values.loss_scale
    scaled = total if scale is None else step_context().scaled(total)
    if is_mean:
        scaled = tf.math.divide_no_nan(scaled, tf.cast(count, scaled.dtype))
    if scale is not None:
        rest = (
            tf.constant(float(micro_batches)) if is_mean else tf.cast(count, tf.float32) / batches.num_examples(batch)
        )
        # Of a number that is sqrt(2) times as large, without the fraction of the mantissa; 1 for nothing.
        exponent = tf.bitwise.bitwise_and(tf.bitcast(rest * 2**0.5, tf.int32), 0x7F800000)
        power = tf.where(rest > 0, tf.bitcast(exponent, tf.float32), 1.0)
        factors, scaled = [*factors, power], scaled / tf.cast(power, scaled.dtype)
    return scaled, tuple(factors)


def _assign_next_values(variables: Sequence, gradients: Gradients, is_whole: bool) -> Gradients:
    """Assigns Keras variables whose "gradient" is their next value, as the scales of float8 layers.

    Returns the gradients, of these variables None.
    """
    replaced = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
    if not any(replaced):
        return gradients
    if not is_whole or tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UsageError(
            f"{variable_path(variables[replaced.index(True)])} is a scale of float8, or its like, which is of a batch "
            "as a whole; train on one device, with accumulate_steps=1"
        )
    for variable, value, is_next in zip(variables, gradients.values, replaced, strict=True):
        if is_next and value is not None:
            assign_local(tf_variable(variable), value)
    return gradients.with_values(
        [None if is_next else value for is_next, value in zip(replaced, gradients.values, strict=True)]
    )


class _MeansLoss(NamedTuple):
    """The gradients of a loss that is several means (`SumOfMeans`), which add up over micro-batches.

    Their counts in the global batch, by which each is divided, are known after the last micro-batch.

    Attributes:
      gradients: the gradients of each mean's total, a list by variable.
      counts: float32 [means + 1], see `_count_ratios`.
    """

    gradients: list[list]
    counts: tf.Tensor

    def summed(self, reduction: Any) -> Gradients:
        """Returns the gradients of this replica's part of the sum of means, times N (see `_count_ratios`)."""
        factors = tf.unstack(_count_ratios(self.counts, reduction))

        def total(values):
            parts = [Gradients([x], (factor,))[0] for x, factor in zip(values, factors, strict=True) if x is not None]
            is_sparse = all(isinstance(x, tf.IndexedSlices) for x in parts)
            return batches.add(parts if is_sparse else [tf.convert_to_tensor(x) for x in parts]) if parts else None

        return Gradients([total(values) for values in zip(*self.gradients, strict=True)])


def _counts(pair: SumOfMeans) -> tf.Tensor:
    return tf.concat([pair.total[:, 1], [pair.count]], 0)


def _count_ratios(counts: tf.Tensor, reduction: Any) -> tf.Tensor:
    """Returns N / (each mean's count), float32 [means], with which all totals are divided by N in the end; 0 for none.

    Args:
      counts: this replica's counts, float32 [means + 1]: that of each mean, and the one that adds up to N.
    """
    # A mean over known labels only is divided by their number on all replicas: a mean of the replicas' means would
    # weigh a label by how many others its replica has.
    counts = reduction.sum_counts(tf.stop_gradient(counts))
    return tf.math.divide_no_nan(counts[-1], counts[:-1])


# The index of padding: zero gradients that update no row, since as many rows are exchanged as there are ids.
NO_ROW = -1


class UniqueSlices(tf.IndexedSlices):
    """tf.IndexedSlices in which no row occurs twice."""


def check_reached(gradients: Sequence, owner: str) -> None:
    """Raises UsageError if there is no variable to train, or none that the loss depends on."""
    if not gradients:
        raise UsageError(
            f"{owner} has no variable to train; call its model self.model, override trainable_variables, or leave some "
            "layer trainable"
        )
    if all(gradient is None for gradient in gradients):
        raise UsageError(
            f"{owner}.loss depends on none of the {len(gradients)} variables to train; compute it from "
            "the outputs of forward, without stop_gradient or numpy() on the way"
        )


def sum_duplicate_rows(slices):
    """Returns UniqueSlices equal to `slices`, or a dense gradient itself.

    Indices are in the order of their first occurrence, without `NO_ROW`.
    """
    if isinstance(slices, UniqueSlices) or not isinstance(slices, tf.IndexedSlices):
        return slices
    if _is_marked_unique(slices.indices):
        return UniqueSlices(slices.values, slices.indices, slices.dense_shape)
    rows, values = tf.convert_to_tensor(slices.indices), tf.convert_to_tensor(slices.values)
    # Adds zeros to an existing row, which copies nothing; without any row the result is empty.
    last = tf.reduce_max(rows)
    number = tf.where(last < 0, 0, tf.size(rows))
    indices, positions = tf.unique(tf.where(rows < 0, last, rows)[:number])
    values = tf.math.unsorted_segment_sum(values[:number], positions, tf.size(indices))
    return UniqueSlices(values, indices, slices.dense_shape)


def mark_unique(rows: tf.Tensor) -> tf.Tensor:
    """Marks row numbers [n] as unique, and returns them, to be gathered.

    The gradient of that gather needs no search for duplicates; that of several does, since a tape joins their rows.
    """
    if tf.is_symbolic_tensor(rows):
        rows.graph.add_to_collection(_UNIQUE, rows)
    return rows


def _is_marked_unique(indices: tf.Tensor) -> bool:
    """Returns whether `indices`, apart from their shape, were marked by `mark_unique` in this graph."""
    if not tf.is_symbolic_tensor(indices):
        return False
    noted = indices.graph.get_collection(_UNIQUE)
    while indices.op.type in ("Reshape", "Identity"):  # a gather's gradient has its rows reshaped
        indices = indices.op.inputs[0]
    return any(indices is rows for rows in noted)
