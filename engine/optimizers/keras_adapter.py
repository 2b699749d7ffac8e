"""Adapts Keras optimizers: their update rule without their all-reduce. Built on the host, applied in replica code."""

from collections.abc import Callable

import tensorflow as tf

from ..errors import UsageError
from ..internals import keras_optimizers
from ..internals.variables import read_local, tf_variable
from ..step.gradients import sum_duplicate_rows
from .averaging import Shadows
from .base import Optimizer, plain_settings

_KINDS = "use one of engine.optimizers or tf.keras.optimizers, or a function that makes one of Keras's"
_ENGINE_OPTIONS = {
    "clipnorm": "use the engine's clip_variable_norm",
    "clipvalue": "use the engine's clip_value",
    "global_clipnorm": "use the engine's clip_norm",
    "use_ema": "use the engine's ema_decay",
    "gradient_accumulation_steps": "use the engine's accumulate_steps, with the batch size of a whole update",
    "loss_scale_factor": "use the engine's precision",
}
_COMPILE_OPTIONS = ("clipnorm", "clipvalue", "global_clipnorm", "use_ema")


class KerasOptimizer(Optimizer):
    """Applies a Keras optimizer's `update_step` to each variable, without communication.

    The optimizer's own `apply`, which always sums gradients across replicas, is never called.

    Args:
      optimizer: a Keras optimizer made in the scope of the strategy that runs it, or a function
        without arguments that makes one, which `build` calls.
      learning_rate: None keeps the optimizer's rate or schedule.
      weight_decay: None keeps the optimizer's decay and exclusions.
      as_compiled: whether the trainer applies its clipping as the engine's, and its average of the weights is used as
        in Keras's `fit`: not in evaluations; and a variable's number of updates is the optimizer's, as in Keras, also
        if some of them were of other variables.
    """

    def __init__(self, optimizer, learning_rate=None, *, weight_decay=None, as_compiled=False, **arguments):
        self.keras_optimizer: tf.keras.optimizers.Optimizer = None  # made by `build`
        self._counts_alike = as_compiled
        super().__init__(learning_rate, weight_decay=weight_decay, **arguments)
        self._slots_by_id: Callable = {}.get  # of an optimizer that the program has built, none are known
        self._refused = _ENGINE_OPTIONS.keys() - (_COMPILE_OPTIONS if as_compiled else ())
        is_optimizer = isinstance(optimizer, tf.keras.optimizers.Optimizer)
        if not is_optimizer and not callable(optimizer):
            raise UsageError(f"{optimizer!r} is not an optimizer; {_KINDS}")
        # Behind a function, so that a checkpoint finds the optimizer only once.
        self._make = (lambda: optimizer) if is_optimizer else optimizer

    def _rate_at(self, iterations, scale, updates_ago=0):
        if self._learning_rate is not None:
            return super()._rate_at(iterations, scale, updates_ago)
        rate = keras_optimizers.learning_rate(self.keras_optimizer, updates_ago)
        return tf.cast(tf.convert_to_tensor(rate), tf.float32) * scale

    def set_learning_rate(self, value):
        if self._learning_rate is not None or callable(keras_optimizers.schedule_or_rate(self.keras_optimizer)):
            super().set_learning_rate(value)
        else:
            self.keras_optimizer.learning_rate = value

    def move_to(self, place):
        if place.use_locking and keras_optimizers.acts_once_per_step(self.keras_optimizer):
            name = type(self.keras_optimizer).__name__
            raise UsageError(
                f"optimizer {name} has a value of its own that each step multiplies, and workers that share it would "
                "lose each other's factors; use adam, or another strategy"
            )
        super().move_to(place)

    def final_average(self):
        if not self.keras_optimizer.use_ema or not self.keras_optimizer.iterations.numpy():
            return None
        return Shadows(keras_optimizers.averages(self.keras_optimizer))

    @property
    def as_keras(self):
        """The Keras optimizer, if the learning rate is its own; None if it is the engine's."""
        return self.keras_optimizer if self._learning_rate is None else None

    @property
    def weight_decay(self):
        if self._weight_decay is not None or self.keras_optimizer is None:
            return self._weight_decay
        return self.keras_optimizer.weight_decay or 0.0

    @weight_decay.setter
    def weight_decay(self, value):
        self._weight_decay = value

    @property
    def settings(self):
        """The settings of the Keras optimizer.

        Raises:
          UsageError: one that the engine applies has changed since the optimizer was built.
        """
        optimizer, built = self.keras_optimizer, self.built_settings
        settings = {**plain_settings(optimizer), "weight_decay": self.weight_decay}
        changed = [name for name in _ENGINE_OPTIONS if built and settings[name] != built[name]]
        if changed or (built and id(keras_optimizers.own_rate(optimizer)) != self._rate_built):
            name = (changed or ["learning_rate, by a schedule,"])[0]
            raise UsageError(f"{name} of Keras optimizer {optimizer.name} can't be set in a run; set it before")
        return settings

    def restore_settings(self, values):
        now = {**plain_settings(self.keras_optimizer), "weight_decay": self.weight_decay}
        for name in [name for name in values.keys() & self.built_settings.keys() if values[name] != now[name]]:
            is_engines = name == "weight_decay" and self._weight_decay is not None
            setattr(self if is_engines else self.keras_optimizer, name, values[name])

    def _build_slots(self, targets):
        optimizer = self._make()
        if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
            raise UsageError(f"{optimizer!r} is not an optimizer; {_KINDS}")
        for option, fix in _ENGINE_OPTIONS.items():
            value = getattr(optimizer, option, None)
            if value and option in self._refused:
                raise UsageError(
                    f"Keras optimizer {optimizer.name} has {option}={value}, which the engine "
                    f"does; leave it out and {fix}"
                )
        if keras_optimizers.is_multi_optimizer(optimizer):
            raise UsageError(
                f"Keras optimizer {optimizer.name} is a MultiOptimizer, which can't be trained; use one optimizer, and "
                "Trainer.learning_rate_multiplier for the weights whose rate differs, or a Trainer with two optimizers"
            )
        if isinstance(optimizer, tf.keras.optimizers.LossScaleOptimizer):
            raise UsageError(
                f"Keras optimizer {optimizer.name} scales the loss for float16, which the engine does with "
                "precision=float16; set that, and give the inner optimizer alone"
            )
        if method := keras_optimizers.override_beside_rule(optimizer):
            raise UsageError(
                f"Keras optimizer {optimizer.name} overrides {method}, which is never called: the engine itself sums "
                "gradients across replicas, clips them, decays and averages weights; override update_step"
            )
        if not keras_optimizers.belongs_to_current_strategy(optimizer):
            raise UsageError(
                f"Keras optimizer {optimizer.name} was made outside the strategy's scope; "
                "make it in build_optimizer, or pass a function that makes it"
            )
        if not optimizer.built:
            slots = keras_optimizers.build_with_slots(optimizer, [target.original for target in targets])
            self._slots_by_id = slots.get  # not a dictionary, which checkpoints would track
        self.keras_optimizer, self._rate_built = optimizer, id(keras_optimizers.own_rate(optimizer))

    def read_counts(self):
        # Keras has one count for all variables, which a callback may assign, as it resets or restores their slots.
        count = read_local(tf_variable(self.keras_optimizer.iterations))
        if self._counts_alike:
            return tf.fill(self.update_counts.shape, count)
        return tf.where(tf.equal(count, read_local(self.iterations)), super().read_counts(), count)

    def _row_slots(self, target):
        optimizer = self.keras_optimizer
        slots = {id(slot) for other in self._targets for slot, _ in self._slots_by_id(id(other.variable), ())}
        others = [v.path for v in optimizer.variables if v.shape.rank and id(tf_variable(v)) not in slots]
        if others or self.place.use_locking:
            problem = f"{others[0]} is not by row" if others else "servers can't refuse a late update by it"
            raise UsageError(
                f"evict_after: rows of {target.path} can't begin again with Keras optimizer {optimizer.name}: "
                f"{problem}; use adagrad, adam or another of the engine's"
            )
        return self._slots_by_id(id(target.variable), ())

    def _decays(self, target):
        return super()._decays(target) and keras_optimizers.decays(self.keras_optimizer, target.original)

    def _update(self, pairs, learning_rate, counts):
        optimizer = self.keras_optimizer
        is_muon = self._weight_decay is None and isinstance(optimizer, tf.keras.optimizers.Muon)
        if is_muon and (optimizer.adam_weight_decay or 0) != (optimizer.weight_decay or 0):
            raise UsageError(
                f"Keras optimizer {optimizer.name} has adam_weight_decay={optimizer.adam_weight_decay} and "
                f"weight_decay={optimizer.weight_decay}; the engine decays all weights alike: set both to one value"
            )
        # Keras squares the values of slices one by one: a repeated row would get a sum of squares.
        gradients = [sum_duplicate_rows(gradient) for gradient, _ in pairs]
        dtypes = [target.variable.dtype for _, target in pairs]
        gradients = [g if g.dtype == dtype else tf.cast(g, dtype) for g, dtype in zip(gradients, dtypes, strict=True)]
        # A replica's own copies: assigning to a mirrored variable could average it across replicas, by its aggregation.
        copies = tf.distribute.get_strategy().experimental_local_results
        variables = [
            next((copy for copy in copies(target.variable) if copy.handle is target.variable.handle), target.variable)
            for _, target in pairs
        ]
        updates = tf.unstack(counts)
        rates = [(target.multiplied(learning_rate), updates[target.position]) for _, target in pairs]
        try:
            keras_optimizers.update(
                optimizer, gradients, variables, rates, [updates[t.position] for t in self._targets]
            )
        except (AttributeError, IndexError, KeyError) as error:  # a slot that was not made
            if not (changed := self.changed_settings):
                raise
            raise UsageError(
                f"{', '.join(changed)} of Keras optimizer {optimizer.name}, as set in the run, needs "
                "optimizer state that was not made; make the optimizer with a value other than 0"
            ) from error
