"""Prepares a trainer once, in strategy scope, with the functions that a custom `build` calls. Runs on the host."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from . import optimizers
from .data import form
from .errors import UsageError, reason
from .internals import keras, keras_calls
from .internals.variables import tf_variable, variable_path
from .inventory import Freezing, Inventory
from .machine.threads import PROCESS
from .mesh.layout import current_mesh
from .optimizers.averaging import WeightAverage
from .optimizers.loss_scale import DynamicLossScale
from .reduction import Reduction
from .reduction.aggregation import declared
from .step.options import RunContext

T = TypeVar("T", bound=Any)  # a `Trainer`


def prepare(trainer: T, context: RunContext, reduction: Reduction | None = None) -> T:
    """Builds a trainer with initial weights, sets the attributes that `Trainer` documents, and returns it.

    Every model of a run is built here: the one that trains, its copies, and those of a run on disk.

    Args:
      reduction: sums its gradients; None for a trainer that predicts on one device.
    """
    options, default = context.options, current_mesh().reduction(reduction or Reduction())
    ours = (("run_context", (RunContext,)), ("reduction", (Reduction,)), ("inventory", (Inventory, type(None))))
    for name, kinds in ours:
        if not isinstance(value := getattr(trainer, name, None), kinds):
            raise UsageError(
                f"{type(trainer).__name__}.{name} is of {type(value).__name__}, and the engine sets this attribute; "
                "give yours another name"
            )
    trainer.run_context = context
    reduction = trainer.build_reduction(default)
    if not isinstance(reduction, type(default)):
        raise UsageError(
            f"{type(trainer).__name__}.build_reduction returns a {type(reduction).__name__}, and this run sums by "
            f"{type(default).__name__}; return a subclass of type(reduction), or leave out sync_every_steps, a mesh's "
            "model axis, shard_optimizer and parameter servers"
        )
    trainer.reduction, trainer.inventory = reduction, None
    if options.precision == "float16":
        trainer.loss_scale = DynamicLossScale()  # an attribute, so that checkpoints have it
        trainer.loss_scale.build()
    # Keras samples an initializer's seed when a layer is constructed, so the seed is set before the model. The run
    # restores the generators' states when it ends.
    with PROCESS, _layer_precision(trainer), declared() as aggregated:
        if not context.builds_passed:
            tf.keras.utils.set_random_seed(context.host_seed)
        trainer.build()
    if trainer.reduction is not reduction:
        raise UsageError(f"{type(trainer).__name__}.build sets self.reduction; return yours from build_reduction")
    trainer.inventory = inventory = Inventory(trainer, aggregated)
    inventory.captured.note(is_traced=False)
    inventory.built_flags = inventory.trainable_flags
    if inventory.averaged and reduction.sync_every_steps:
        raise UsageError(
            f"Averaged: sync_every_steps={reduction.sync_every_steps} has replicas differ between syncs, and the "
            "average is equal on all; leave one of them out"
        )
    evicting = [table for table in inventory.tables.values() if table.evict_after]
    if evicting and reduction.sync_every_steps:
        raise UsageError(
            f"embedding {evicting[0].name}: evict_after={evicting[0].evict_after} frees rows of all replicas, and "
            f"sync_every_steps={reduction.sync_every_steps} has them differ between syncs; leave one of them out"
        )
    inventory.freezing = Freezing(options.freeze, inventory.optimizers.values())
    for applied in inventory.keras_optimizers:
        if not applied.built:  # for all variables, since it is unknown which of them a step will update by it
            applied.build([*inventory.all_weights, *inventory.trainable_variables])
    for optimizer in (*inventory.optimizers.values(), *inventory.keras_optimizers):
        inventory.applied_options[id(optimizer)] = optimizers.applied_options(optimizer, trainer.run_context.options)
    updated = [v for optimizer in inventory.optimizers.values() for v in optimizer.updated_variables]
    if options.ema_decay:
        updates = Counter(
            (id(tf_variable(v)), variable_path(v)) for x in inventory.optimizers.values() for v in x.trainable
        )
        if shared := [path for (_, path), times in updates.items() if times > 1]:
            raise UsageError(
                f"ema_decay: several optimizers update {shared[0]}, and each would average it by itself; have one of "
                "them update it, or leave ema_decay out"
            )
    Reduction.build(reduction, updated, inventory.aggregated)  # whether or not its own `build` calls it
    reduction.build(updated, inventory.aggregated)
    return trainer


@contextlib.contextmanager
def _layer_precision(trainer: Any) -> Iterator[None]:
    """Sets the precision of Keras layers made in this context, and restores Keras's policy afterwards."""
    before, precision = tf.keras.config.dtype_policy(), trainer.run_context.options.precision
    if precision != "float32":
        tf.keras.config.set_dtype_policy(f"mixed_{precision}")
    elif trainer.default_policy is None:  # a compiled model has the program's
        tf.keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        tf.keras.config.set_dtype_policy(before)


def build_layers(trainer: Any, model: tf.keras.Model, features: Any = None) -> None:
    """Makes a model's variables, if they don't exist, for batches of any size; loads those of `init_from`.

    An attribute of the trainer has its weights from then on: `build` may copy them, as an anchor or a teacher.

    Args:
      trainer: the trainer that calls it in its `build`.
      model: made by its `build`.
      features: arrays or tensors with the shapes and dtypes of the model's inputs; None takes the data's.

    Raises:
      UsageError: it is not a Keras model.
      UsageError: it does not take such features.

    Example:
      >>> def build(self):  # in a Trainer with a second model
      ...     self.critic = tf.keras.Sequential([tf.keras.layers.Dense(1)])
      ...     build_layers(self, self.critic, features=tf.zeros([1, 8]))
    """
    features = form.features(trainer.run_context.example) if features is None else features
    make_variables(type(trainer).__name__, model, features)
    for path in [path for path, layer in Inventory(trainer).layers.items() if layer is model]:
        trainer.run_context.load_initial(path, model)


def make_variables(owner: str, model: tf.keras.Model, features: Any) -> None:
    """Makes a model's variables, if they don't exist, for features as these; `owner` names the trainer in errors."""
    keras_calls.refuse_keras_2(model)
    if not isinstance(model, tf.keras.layers.Layer):
        raise UsageError(f"{owner}.build_model returned a {type(model).__name__}; return a Keras model")
    if model.built:
        return
    specs = form.values(form.element_spec(features))
    batch = tf.nest.map_structure(form.batch_spec, specs)
    try:
        keras_calls.build(model, batch)
        if not all(layer.built for layer in keras.layers_in(model)):
            keras_calls.build(model, batch, training=True)  # which may call more, such as an auxiliary head
    except (TypeError, ValueError) as error:  # from the model's first layer
        if isinstance(model, tf.keras.Sequential) and isinstance(specs, (dict, tuple)):
            names = ", ".join(name for name, _ in form.fields((features,)).named())
            raise UsageError(
                f"{owner}'s model is a tf.keras.Sequential, which takes one array, and features are several: {names}; "
                "return a tf.keras.Model with an input for each, or pass (features, labels) if labels are among them"
            ) from error
        named = form.fields((specs,)).named()
        if varying := [(name, [*spec.shape]) for name, spec in named if None in spec.shape]:
            name, shape = varying[0]
            raise UsageError(
                f"{owner}'s model does not take {name} of shape {shape}, in which examples differ: {reason(error)}; "
                "make all of one shape, as by np.pad, or use layers for any length; if they are, and a dataset does "
                "not know it: dataset.map(lambda x, y: (tf.ensure_shape(x, [None, steps, features]), y))"
            ) from error
        raise


def build_embeddings(trainer: Any) -> None:
    """Makes the shards of the embeddings among a trainer's attributes.

    Args:
      trainer: the trainer whose `build` calls this; the default one does.

    Raises:
      UsageError: a table can't be combined with micro-batches, as `admit_after` counts a step's ids once.

    Example:
      >>> def build(self):  # in a Trainer that builds nothing else
      ...     build_embeddings(self)
    """
    context = trainer.run_context
    for table in Inventory(trainer).tables.values():
        table.check_accumulation(context.options.accumulate_steps)
        table.build(context.options.seed, context.num_servers)


def make_optimizer(trainer: Any, variables: Sequence[Any], optimizer: Any = None) -> optimizers.Optimizer:
    """Makes an optimizer for variables: its slots, each variable's learning rate, and the weights' average.

    Args:
      trainer: the trainer whose `build` calls this; its `learning_rate_multiplier` is called for each variable.
      variables: all variables that the optimizer updates.
      optimizer: the engine's, or Keras's, which is adapted; None calls the trainer's `build_optimizer`.

    Raises:
      UsageError: it is not an optimizer.
      UsageError: a Keras optimizer would clip, average or accumulate, which are options of the engine.

    Example:
      >>> def build(self):  # in a Trainer with a second model and an optimizer for each
      ...     super().build()
      ...     self.critic_optimizer = make_optimizer(self, self.critic.trainable_variables)
    """
    optimizer = trainer.build_optimizer() if optimizer is None else optimizer
    if not isinstance(optimizer, optimizers.Optimizer):
        optimizer = optimizers.KerasOptimizer(optimizer)
    multipliers: list[float] = [trainer.learning_rate_multiplier(variable) for variable in variables]
    for variable, multiplier in zip(variables, multipliers, strict=True):
        if not (isinstance(multiplier, numbers.Real) and 0 <= multiplier < math.inf):
            raise UsageError(
                f"{type(trainer).__name__}.learning_rate_multiplier returns {multiplier!r} for "
                f"{variable_path(variable)}; return a number, 0 or more"
            )
    if place := current_mesh().place():
        optimizer.place = place
    with trainer.reduction.slot_scope():
        optimizer.build(variables, list(map(float, multipliers)))
    options = trainer.run_context.options
    if options.ema_decay:
        # Not for tables: each step would read and write all of their rows.
        shards = {id(shard) for shard in Inventory(trainer).shards}
        optimizer.weight_average = WeightAverage(options.ema_decay, options.ema_warmup)
        optimizer.weight_average.build([variable for variable in variables if id(variable) not in shards])
    return optimizer


def learning_rate(trainer: Any) -> float | tf.keras.optimizers.schedules.LearningRateSchedule:
    """Returns the run's learning rate, a number or a schedule, for an optimizer that a trainer makes itself.

    It applies `learning_rate`, `learning_rate_schedule` and `warmup_steps`, which otherwise would be an error.

    Args:
      trainer: the trainer whose `build` or `build_optimizer` calls this.

    Example:
      >>> def build_optimizer(self):  # in a Trainer
      ...     return tf.keras.optimizers.Nadam(learning_rate(self), beta_2=0.99)
    """
    return optimizers.schedule_from_options(trainer.run_context.options)
