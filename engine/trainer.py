"""What a user subclasses: a model, a loss and one step of training, written for one device.

The methods up to `build` are host code, run once in the strategy's scope; the steps are replica code, compiled.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import tensorflow as tf

from crankshaft.engine import optimizers
from crankshaft.engine.internals.variables import assign_local, path_of
from crankshaft.engine.layers import layer_state
from crankshaft.engine.metrics.means import Mean, as_loss, checked
from crankshaft.engine.optimizers import schedules
from crankshaft.engine.optimizers.averaging import WeightAverage
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.step import batches, example_counts, randomness
from crankshaft.engine.step.accumulation import accumulate, side_by_side
from crankshaft.engine.step.context import step_context
from crankshaft.engine.step.gradients import Gradients, Norm, check_reached
from crankshaft.engine.step.holdings import Holdings
from crankshaft.engine.step.options import StepOptions

_HALVES = (tf.bfloat16, tf.float16)


class Trainer(Holdings):
    """A model, its loss, its optimizer and one step of training.

    Override `build_model` and `loss`; the rest as needed. Attributes that hold models, optimizers, variables or
    `tf.Module`s are found by `tf.train.Checkpoint` and saved.

    Attributes that the engine sets before `build`:
      options: `StepOptions`.
      reduction: `Reduction`, the sums over replicas.
      num_classes: of the input's labels, or None.
      vocabulary: how many ids each feature that is one has, by the feature's name; None if no feature is.
      num_servers: that variables live on, when the run began; tables are cut into as many shards.
      example: a batch of one example, zeros: shapes and dtypes, in the form of the data (`engine.step.batches`).
    """

    options = StepOptions()
    reduction = Reduction()
    num_classes: int | None = None
    vocabulary: dict[str, int] | None = None
    num_servers = 1
    example = None
    _counts_checked = False

    # -- to override --------------------------------------------------------------------------------------------------

    def build_model(self) -> tf.keras.Model:
        """Returns the Keras model. Host code, once, in scope; the seed is set."""
        raise NotImplementedError(f"{type(self).__name__} has no build_model(self); return a Keras model from it")

    def build_optimizer(self) -> optimizers.Optimizer:
        """Returns an engine optimizer, or a Keras one (which goes through the adapter). Default: by `options`."""
        o = self.options
        rate = schedules.build(
            o.schedule, o.learning_rate, o.total_steps, warmup_steps=o.warmup_steps, **o.schedule_args
        )
        decay = {} if o.weight_decay is None else {"weight_decay": o.weight_decay}
        return optimizers.build(
            o.optimizer, rate, weight_decay_exclude=o.weight_decay_exclude, **decay, **o.optimizer_args
        )

    def learning_rate_multiplier(self, variable) -> float:
        """Returns what a variable's learning rate, and its weight decay with it, is multiplied by. Host code.

        As in PyTorch's parameter groups; 0 freezes it: no gradient, update, or slots. `variable.path` names a layer's.

        Batch normalisation's moving statistics are frozen by `layer.trainable = False` in `build_model`, as in Keras.
        """
        return 1.0

    def forward(self, features, training: bool):
        """Returns the model's outputs for a batch of features. Override it to look up embeddings first."""
        return self.model(features, training=training)

    def loss(self, outputs, batch) -> Mean:
        """Returns (total, count) over this replica's examples: `crankshaft.mean(losses)`, losses one an example.

        Here and in `metrics`, `batch` is (features, labels), or features alone where the data has no labels. Where it
        has weights, they are not in it: what `mean` makes is weighed by them afterwards. Outputs of 16 bits come as
        float32.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss(self, outputs, batch); return crankshaft.mean(losses)"
        )

    def metrics(self, outputs, batch) -> dict[str, Mean]:
        """Returns further pairs as `loss` does, by names that are not the engine's: loss, gradient_norm, skipped."""
        return {}

    def training_loss(self, outputs, batch) -> Mean:
        """Returns what training minimizes, and shows as its `loss`; evaluation has `loss` itself."""
        return self.loss(outputs, batch)

    @classmethod
    def splits_batch(cls, **arguments) -> bool:
        """Returns whether each of a CPU's cores may take a part of a batch, for a trainer made with these arguments.

        Return True if no example's outputs or loss depend on another's (as batch normalisation makes them), and the
        layers are faster so: convolutions and embeddings are; large dense ones are bound by memory, small ones are
        faster with XLA, which computes a batch whole.
        """
        return False

    def build(self) -> None:
        """Makes the model, the optimizer and their variables. Override it to make several of each."""
        self.model = self.build_model()
        self.build_layers(self.model, batches.features(self.example))
        self.build_embeddings()
        self.optimizer = self.make_optimizer(self.build_optimizer(), self.trainable_variables)

    def train_step(self, batch) -> dict[str, Mean]:
        """Makes one update from one batch, in the form of the data, this replica's part of it. Replica code."""
        variables = self.trainable_variables
        gradients, metrics = self.summed_gradients(batch)
        gradients, count = self.reduction.sum(gradients, metrics["loss"].count, self.moving_statistics, variables)
        gradients = self.divide(gradients, count)
        gradients = self.loss_scale.unscale(gradients)
        norm = self.global_norm(gradients)
        finite = self.check_finite(norm)
        gradients = self.clip(gradients, variables, norm)
        self.apply_gradients(self.optimizer, gradients, variables, finite)
        self.end_update(finite)
        return self.step_metrics(metrics, norm, finite)

    def eval_step(self, batch) -> dict[str, Mean]:
        """Returns the metrics of one batch, this replica's part of it. Replica code."""
        return side_by_side(self.compute_metrics, batch, self.options.batch_parts)

    # -- the pieces of a step, for those who write their own ----------------------------------------------------------

    def make_optimizer(self, optimizer, variables) -> optimizers.Optimizer:
        """Adapts a Keras optimizer if it is one, makes the slots, and starts the weights' average."""
        if not isinstance(optimizer, optimizers.Optimizer):
            optimizer = optimizers.KerasOptimizer(optimizer)
        with self.reduction.slot_scope():
            optimizer.build(variables, [self._multiplier(variable) for variable in variables])
        if self.options.ema_decay:
            optimizer.weight_average = WeightAverage(self.options.ema_decay)
            optimizer.weight_average.build(self._averaged(variables))
        return optimizer

    def build_layers(self, model: tf.keras.Model, features) -> None:
        """Makes a model's variables for features of the shapes and dtypes of `features`, for batches of any size."""
        batches.build(model, features, self)

    def build_embeddings(self) -> None:
        """Makes the shards of the embeddings among this object's attributes."""
        for table in self.embedding_tables.values():
            table.check_accumulation(self.options.accumulate_steps)
            table.build(self.options.seed, self.num_servers)

    def compute_metrics(self, batch) -> dict[str, Mean]:
        """Returns the loss and the metrics of one batch, as in evaluation."""
        outputs = self._outputs(batches.features(batch), training=False)
        return self._with_metrics(self.checked_loss(outputs, batch), outputs, batch)

    def summed_gradients(self, batch):
        """Runs `compute_gradients` on this replica's whole batch, in the micro-batches and parts of `options`."""
        return accumulate(self.compute_gradients, batch, self.options.accumulate_steps, self.options.batch_parts)

    def compute_gradients(self, batch):
        """Computes gradients of the *sum* of this replica's (scaled) losses, and the batch's metrics.

        What layers add to the loss (Keras's regularizers and `add_loss`; not of layers that another step trains) is
        added to the mean over the global batch, once: here times this replica's count, which the division by the global
        count undoes. The metric `loss` is that of `loss` alone, so that training and evaluation compare.
        """
        # Where there is nobody to sum with, dividing the loss by its count beforehand is free, and dividing all the
        # gradients by it afterwards is not.
        alone = self.reduction.alone()
        with tf.GradientTape() as tape, step_context().values.in_use(self.trainable_variables, tape) as sources:
            outputs = self._outputs(batches.features(batch), training=True)
            loss = self.checked_loss(outputs, batch, training=True)
            total = loss.total
            if added := self._added_losses():
                total += loss.count * tf.add_n([tf.cast(x, tf.float32) for x in added])
            total = self.loss_scale.scale(total)
            total = tf.math.divide_no_nan(total, tf.cast(loss.count, total.dtype)) if alone else total
        gradients = tape.gradient(total, sources)
        check_reached(gradients, type(self).__name__)
        gradients = Gradients(gradients, divided_by=loss.count if alone else None)
        return gradients, self._with_metrics(loss, outputs, batch)

    def _outputs(self, features, training: bool):
        """In float32 what layers compute in 16 bits: a loss would lose too much, small probabilities for one."""
        outputs = self.forward(features, training)
        batches.check_looked_up(features, self)
        return tf.nest.map_structure(
            lambda x: tf.cast(x, tf.float32) if getattr(x, "dtype", None) in _HALVES else x, outputs
        )

    def _added_losses(self) -> list[tf.Tensor]:
        layers = layer_state.concerned(self.held_layers.values(), self.trainable_variables)
        # What layers add is theirs, not their replica's: where replicas take turns, it would be of the wrong one.
        if (added := layer_state.own_losses(layers)) and step_context().summed_midway:
            raise ValueError(
                f"{type(self).__name__}: its layers add to the loss (add_loss, activity_regularizer) and sum up "
                "statistics over replicas of one process; leave one of them out, or use a process for each replica "
                "(`strategy`=multi_worker)"
            )
        return [*added, *layer_state.regularization(layers)]

    def checked_loss(self, outputs, batch, training: bool = False) -> Mean:
        """Returns `loss`, or in training `training_loss`, weighed by the examples' weights if the batch has them.

        It has to be a (total, count) pair, not over pairs of examples; its values are checked where `options.debug`
        asks for it.
        """
        if not self._counts_checked:
            self._counts_checked = True
            example_counts.check(self, outputs, batch)
        with batches.labels_as_numbers(batch, self):
            loss = (self.training_loss if training else self.loss)(outputs, batches.without_weights(batch))
        weights = batches.parts(batch).weights
        return as_loss(loss, f"{type(self).__name__}.loss", weights, check_values=self.options.debug)

    def _with_metrics(self, loss: Mean, outputs, batch) -> dict[str, Any]:
        found = self.metrics(outputs, batches.without_weights(batch))
        return {"loss": loss, **checked(found, f"{type(self).__name__}.metrics", batches.parts(batch).weights)}

    def divide(self, gradients, count: tf.Tensor) -> Gradients:
        """Divides gradients of the sum by `count` examples: those of the mean; zeros where nothing was counted."""
        return Gradients(gradients).over(count)

    def global_norm(self, gradients) -> Norm:
        """Returns sqrt(sum of squares) over all gradients, computed where `options` need it or somebody looks at it."""
        gradients = Gradients(gradients)
        if self.options.needs_norm:
            return Norm(gradients.norm(), tf.constant(1.0))
        observed = step_context().observed  # it is one more pass over all gradients
        return Norm(tf.cond(observed, gradients.norm, lambda: 0.0), tf.cast(observed, tf.float32))

    def check_finite(self, norm: Norm) -> tf.Tensor | None:
        """Returns whether every gradient is finite, the same on all replicas; None where a step is always applied."""
        return tf.math.is_finite(norm.value) if self.options.may_skip else None

    def clip(self, gradients, variables, norm: Norm) -> Gradients:
        """Clips gradients of the mean over all replicas, whose global norm is `norm`, as `options` say.

        By that norm (Pascanu et al. 2013), by each variable's norm, or each value. A table in shards is one variable.
        """
        limit = self.options.clip_norm
        if limit:
            return Gradients(gradients).times(limit / tf.maximum(norm.value, limit))
        if self.options.clip_value:
            return Gradients(gradients).clipped_by_value(self.options.clip_value)
        if self.options.clip_variable_norm:
            whole = {id(shard): table for table in self.embedding_tables.values() for shard in table.shards}
            wholes = [id(whole.get(id(variable), variable)) for variable in variables]
            return Gradients(gradients).clipped_by_norms(self.options.clip_variable_norm, wholes)
        return Gradients(gradients)

    def apply_gradients(self, optimizer, gradients, variables, finite: tf.Tensor | None = None) -> None:
        """Updates the variables, and their average; nothing where `finite` is false."""

        def update():
            optimizer.apply(gradients, variables)
            if self.options.ema_decay:
                updates = tf.convert_to_tensor(optimizer.iterations)
                optimizer.weight_average.update(self._averaged(variables), updates)

        if finite is None:
            update()
        else:
            tf.cond(finite, update, lambda: None)

    def end_update(self, finite: tf.Tensor | None) -> None:
        """Ends a step's updates: the loss scale learns, and a step left out gives back moving statistics."""
        if finite is None:
            return
        self.loss_scale.update(finite)
        statistics_before = step_context().before

        def restore():  # the forward pass has put what was not finite into them
            for variable, before in statistics_before:
                assign_local(variable, before)

        tf.cond(finite, lambda: None, restore)

    def step_metrics(self, metrics: dict[str, Mean], norm: Norm, finite: tf.Tensor | None) -> dict[str, Mean]:
        """Returns the step's metrics with `gradient_norm` and, where steps may be left out, their share, `skipped`.

        The norm counts at the steps that computed it. A step left out counts in no other metric.
        """
        metrics = {**metrics, "gradient_norm": Mean(norm.value, norm.computed)}
        if finite is None:
            return metrics
        applied = tf.nest.map_structure(lambda x: tf.where(finite, x, 0.0), metrics)
        return {**applied, "skipped": Mean(1.0 - tf.cast(finite, tf.float32), tf.constant(1.0))}

    def stateless_seed(self, salt: int = 0) -> tf.Tensor:
        """Returns a [2] int64 seed for `tf.random.stateless_*` that differs by seed, step, replica and salt.

        In evaluation it differs by batch in place of step: each evaluation draws the same, and none what training does.
        """
        return randomness.users_seed(self.options.seed, step_context(), salt)

    @property
    def step(self) -> tf.Tensor | None:
        """Scalar int64, steps of training done before this one, in training and in evaluation; None outside of them."""
        return step_context().step

    @property
    def replica(self) -> tf.Tensor | None:
        """Scalar int32, this replica's id, in training and in evaluation; None outside of them."""
        return step_context().replica

    @property
    def trainable_variables(self) -> list:
        """What the default step trains: `model`'s variables, then the embeddings' shards, but for frozen ones."""
        variables = [*(self.model.trainable_variables if hasattr(self, "model") else ()), *self._shards]
        return [variable for variable in variables if self._multiplier(variable)]

    def _multiplier(self, variable) -> float:
        multiplier = self.learning_rate_multiplier(variable)
        if isinstance(multiplier, numbers.Real) and 0 <= multiplier < math.inf:
            return float(multiplier)
        raise ValueError(
            f"{type(self).__name__}.learning_rate_multiplier gives {multiplier!r} for {path_of(variable)}; return a "
            "number, 0 or more"
        )
