"""The class that users subclass. Built on the host; a model, a loss and a step for one device are replica code.

The methods up to `build` run once on the host, in the strategy's scope; the steps are compiled replica code.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from . import optimizers
from .build import build_embeddings, build_layers, make_optimizer
from .data import form
from .errors import UsageError
from .internals import graphs, keras, keras_calls, keras_scopes
from .inventory import Inventory
from .metrics.means import as_losses, checked
from .metrics.pairs import Mean, SumOfMeans
from .metrics.predictions import Predictions
from .reduction import Reduction
from .step import batches, diagnosis
from .step.context import TracedLoss, step_context
from .step.gradients import BatchLosses, Gradients, Update, differentiate
from .step.options import RunContext
from .traits import Traits


class Trainer(Traits, tf.Module):
    """A model, its loss, its optimizer and one training step.

    Override `build_model` and `loss`; the rest as needed. Models, layers, optimizers and variables in its attributes,
    at any depth of lists, dictionaries and `tf.Module`s, are found (`engine.inventory`) and saved.

    Attributes, which the engine sets before `build`:
      run_context: the run's options, the number of classes, and a batch of one example.
      reduction: the sums across replicas, of `build_reduction`.

    A class may set `predictions_memory_mb`: MiB of predictions kept in memory for `compute_metrics`; more are in
    temporary files.

    What a run asks besides, such as whether data must have labels, is `Traits`, as is `inventory`, which is set after
    `build`.
    """

    run_context = RunContext()
    reduction = Reduction()
    predictions_memory_mb = 1024

    def __init__(self) -> None:  # without tf.Module's `name`: a constructor's arguments are what `model_arg` sets
        super().__init__()

    # -- to override --------------------------------------------------------------------------------------------------

    def build_model(self) -> tf.keras.Model:
        """Returns the Keras model. Called once, in the strategy's scope, after the seed is set."""
        raise UsageError(f"{type(self).__name__} has no build_model(self); return a Keras model from it")

    def build_optimizer(self) -> optimizers.Optimizer:
        """Returns an engine optimizer, or a Keras one, which is adapted. Default: by `run_context.options`."""
        return optimizers.make_from_options(self.run_context.options)

    def build_reduction(self, reduction: Reduction) -> Reduction:
        """Returns what sums gradients across replicas: the run's `reduction`, or one of your own with its settings."""
        return reduction

    def learning_rate_multiplier(self, variable: Any) -> float:
        """Returns the factor of a variable's learning rate and weight decay.

        As in PyTorch's parameter groups. 0 freezes the variable: no gradient, no update, no slots. A layer's
        variables are recognized by `variable.path`.

        To freeze batch normalization's moving statistics, set `layer.trainable = False` in `build_model`, as in Keras.
        """
        return 1.0

    def forward(self, features: Any, training: bool) -> Any:
        """Returns the model's outputs for a batch of features. Override it to look up embeddings first.

        As in Keras's `fit`, a model whose `call` has no argument `training` computes as in inference. Of features of
        varying length (`crankshaft.Padded`) the model gets the values, with their mask for its layers.
        """
        if not hasattr(self, "model"):
            raise UsageError(f"{type(self).__name__}.build sets no self.model, which forward calls; set it there")
        features = keras_calls.with_optional(self.model, form.map_padded(self._unwrap_padded, features))
        return keras_calls.call(self.model, features, training=training)

    def _unwrap_padded(self, padded: form.Padded) -> tf.Tensor:
        """Converts an array of varying length to what the model takes."""
        return keras_calls.with_mask(padded.values, padded.mask) if padded.unknown == 1 else padded.values

    def loss(self, outputs: Any, batch: Any) -> Mean | dict[str, Mean]:
        """Returns (total, count) over this replica's examples: `crankshaft.mean(losses)`, with one loss per example.

        Or a dictionary of such means, each over its own count in the global batch, such as the labels that are not
        missing: the loss is their sum, a mean of nothing adds 0, and each is a metric under its name. A mean may be
        multiplied by a weight, constant or trainable: `{"a": mean(a), "b": 0.3 * mean(b, weights=known)}`.

        Here and in `metrics`, `batch` is (features, labels), or features alone if the data has no labels. It has no
        sample weights: the result of `mean` is weighted by them afterwards. 16-bit outputs are converted to float32.
        """
        raise UsageError(f"{type(self).__name__} has no loss(self, outputs, batch); return crankshaft.mean(losses)")

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Mean]:
        """Returns further metrics by name, as pairs like `loss`. The engine adds loss, gradient_norm and skipped."""
        return {}

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Returns the values of each example that `compute_metrics` gets, by name. Replica code.

        Keep what the metrics need, and no more, such as the likeliest tokens instead of logits: all examples' values
        are kept until the evaluation ends. `batch` is as in `loss`. With a model sharded over a mesh, override it and
        return whole values, not shards.

        Returns:
          Nests of tensors [examples, ...] by name. By default "outputs", and "labels" if the data has them.
        """
        labels = form.fields(batch).labels if isinstance(batch, tuple) else None
        return {"outputs": outputs} if labels is None else {"outputs": outputs, "labels": labels}

    def compute_metrics(self, predictions: Predictions) -> dict[str, Any]:
        """Computes metrics of a whole evaluation, such as mAP, BLEU, or NDCG per user. Runs at the chief.

        Override it for metrics that are no means over examples. It is called once per evaluation; all workers get its
        metrics, which are shown, recorded and monitored (`max:eval_NAME`) like those of `metrics`.

        Args:
          predictions: the values that `predictions` has returned of each example, once, in the data's order.

        Returns:
          By name: numbers, which are metrics; and for TensorBoard text (Markdown) and images, arrays [height, width,
          channels] or [n, height, width, channels] of 1, 3 or 4 channels, uint8 or numbers in [0, 1], to which others
          are clipped.

        Example:
          >>> def compute_metrics(self, predictions):  # of a Trainer whose outputs and labels are [examples, 1]
          ...     error = np.abs(predictions["outputs"] - predictions["labels"])
          ...     return {"median_error": np.median(error)}
        """
        return {}

    def training_loss(self, outputs: Any, batch: Any) -> Mean | dict[str, Mean]:
        """Returns the loss that training minimizes and reports; evaluation reports `loss` itself."""
        return self.loss(outputs, batch)

    @classmethod
    def splits_batch(cls, **arguments: Any) -> bool:
        """Returns whether a CPU's cores may each compute a micro-batch, for a trainer made with these arguments.

        Return True if no example's outputs or loss depend on another's (with batch normalization they do), and the
        model is faster that way: convolutions and embeddings are; large dense layers are bound by memory, and small
        ones are faster with XLA, which computes a batch as a whole.
        """
        return False

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that the default step trains: the model's, then the embeddings' shards, without frozen ones."""
        inventory = getattr(self, "inventory", None) or Inventory(self)  # none yet in build
        variables = [*(self.model.trainable_variables if hasattr(self, "model") else ()), *inventory.shards]
        return [variable for variable in variables if self.learning_rate_multiplier(variable) != 0]

    def build(self) -> None:
        """Makes the model, the optimizer and their variables. Override it to make several of each."""
        self.model = self.build_model()
        build_layers(self, self.model)
        build_embeddings(self)
        self.optimizer = make_optimizer(self, self.trainable_variables)

    def train_step(self, batch: Any) -> dict[str, Mean]:
        """Makes one update from this replica's local batch, which has the form of the data. Replica code."""
        variables = self.trainable_variables
        gradients, metrics = self.compute_gradients(batch)
        gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)
        update = Update(self, gradients.over(count).unscaled(), variables)
        update.apply(self.optimizer, variables)
        return update.end(metrics)

    def eval_step(self, batch: Any) -> dict[str, Mean] | tuple[dict[str, Mean], dict[str, Any]]:
        """Returns the metrics of this replica's local batch; with `compute_metrics` also its predictions.

        Replica code. A step of your own then returns (metrics, predictions) too.
        """
        parallel = self.run_context.options.parallel_micro_batches
        metrics, slices = batches.sum_micro_batches(self._evaluate, batch, parallel)
        return (metrics, batches.from_slices(slices)) if computes_metrics(self) else metrics

    # -- to call in a custom step -------------------------------------------------------------------------------------

    def compute_gradients(self, batch: Any) -> tuple[Gradients, dict[str, Any]]:
        """Computes gradients of the *sum* of this replica's (scaled) losses, and the batch's metrics. Replica code.

        Computes them in the micro-batches that `run_context.options` set. The totals of several means are divided by
        their counts in the global batch, and multiplied by the sum of these, which the step then divides by. Replicas
        sum the counts before the backward pass, or after all micro-batches, which have a backward pass for each mean.

        What layers add to the loss (Keras's regularizers and `add_loss`; not of layers that another step trains) is
        added once to the mean over the global batch: here times this replica's count, which the division by the global
        count undoes. The metric `loss` is `loss` alone; if layers add something, `loss_with_penalties` includes it, as
        Keras's loss does.
        """
        losses = functools.partial(self._forward_losses, training=True)
        (gradients,), metrics = differentiate(self, batch, losses, [self.trainable_variables])
        return gradients, metrics

    # -- the engine's own ---------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Any) -> tuple[dict[str, Any], Any]:
        """Computes metrics, and `batches.to_slices` of the predictions if `compute_metrics` needs them."""
        with keras_scopes.computing_with(step_context().values):
            with diagnosis.numbers_out_of_range() as outside:
                _, compute_metrics, outputs = self._forward_losses(batch, training=False)
            metrics = {**compute_metrics(), **outside}
            if not computes_metrics(self):
                return metrics, {}
            predictions = self.predictions(outputs, batches.unpack(batch).unweighted)
            return metrics, batches.to_slices(predictions, f"{type(self).__name__}.predictions")

    def _forward_losses(self, batch: Any, training: bool) -> BatchLosses:
        """Computes the outputs and the losses, weighted by examples' weights.

        By name the losses are `loss`, its means if it is several, and `loss_with_penalties` if layers add to it: that,
        or else `loss`, is minimized.
        """
        unpacked = batches.unpack(batch)
        outputs = self.forward(unpacked.features, training)
        outputs = tf.nest.map_structure(keras_calls.in_float32, outputs)  # so that a loss keeps small probabilities
        owner = f"{type(self).__name__}.loss"
        if is_written := (losses := self._model_losses(outputs, batch)) is None:
            with diagnosis.labels_as_numbers(unpacked.labels, self):
                loss = (self.training_loss if training else self.loss)(outputs, unpacked.counted)
            step_context().losses.append(TracedLoss(owner, outputs, unpacked.counted, loss))
            options = self.run_context.options
            losses = as_losses(loss, owner, unpacked.weights, options.debug)
            if training:
                diagnosis.warn_of_sums(owner, losses.values(), batch, options.micro_batches)
        if (penalized := self._with_penalties(losses["loss"], batch)) is not None:
            if is_written and training:
                added = keras_scopes.own_losses(self.inventory.layers_without_averages)
                diagnosis.warn_of_penalties_twice(owner, losses["loss"].total, added)
            losses = {**losses, "loss_with_penalties": penalized}
        minimized = losses.get("loss_with_penalties", losses["loss"])
        return BatchLosses([minimized], lambda: self._with_metrics(losses, outputs, unpacked), outputs)

    def _model_losses(self, outputs: Any, batch: Any) -> dict[str, Mean | SumOfMeans] | None:
        """Computes the losses by name if the model has a way of its own to; None if `loss` computes them."""
        return None

    def _with_penalties(self, loss: Mean | SumOfMeans, batch: Any) -> Mean | SumOfMeans | None:
        """Returns the loss with what layers add to it; None if they add nothing.

        A number is added to the mean over the global batch; one that depends on the batch is a mean over its examples.
        As in Keras, arrays are summed: over the examples of all replicas, if they depend on the batch.
        """
        layers = keras.affected_layers(self.inventory.layers_without_averages, self.trainable_variables)
        added = keras_scopes.own_losses(layers)
        weights = {id(weight): weight for layer in layers for weight in layer.trainable_weights}
        regularized = [weight for weight in weights.values() if weight.regularizer is not None]
        if not (added or regularized):
            return None
        inputs = tf.nest.flatten(batch, expand_composites=True)
        numbers, means, sums = list[tf.Tensor](), list[tf.Tensor](), list[tf.Tensor]()
        for x in added:
            is_part = graphs.dependence(x, inputs) != graphs.FREE
            kind = numbers if not is_part else means if x.shape.rank == 0 else sums
            kind.append(tf.reduce_sum(tf.cast(x, tf.float32)))
        numbers += [tf.reduce_sum(tf.cast(weight.regularizer(weight), tf.float32)) for weight in regularized]
        totals = [loss.count * tf.add_n(numbers)] if numbers else []
        if sums:
            self._check_sums()
            totals.append(self.reduction.sum_counts(loss.count) * tf.add_n(sums))
        whole = loss.plus(tf.add_n(totals), loss.count) if totals else loss
        if means:  # of examples, which need not be what the loss counts
            count = batches.num_examples(batch)
            whole = whole.plus(count * tf.add_n(means), count)
        return whole

    def _check_sums(self) -> None:
        """Raises UsageError if what layers add to the loss may not be a sum over examples."""
        if self.run_context.options.micro_batches > 1:
            raise UsageError(
                f"{type(self).__name__}: a layer adds an array to the loss (add_loss), which Keras sums over a "
                "batch, and micro-batches are computed apart; add its mean, or use no accumulate_steps or splits_batch"
            )

    def _with_metrics(self, losses: dict, outputs: Any, batch: batches.Unpacked) -> dict[str, Any]:
        owner = f"{type(self).__name__}.metrics"
        pairs = self.metrics(outputs, batch.unweighted)
        step_context().losses.append(TracedLoss(owner, outputs, batch.unweighted, pairs))
        metrics = checked(pairs, owner, batch.weights)
        if both := sorted(losses.keys() & metrics):
            raise UsageError(f"{owner}: {both[0]!r} is a mean of the loss; use another name, or leave it out")
        return {**losses, **metrics}


def computes_metrics(trainer: Trainer) -> bool:
    """Returns whether evaluations keep predictions, for `compute_metrics`."""
    return type(trainer).compute_metrics is not Trainer.compute_metrics
