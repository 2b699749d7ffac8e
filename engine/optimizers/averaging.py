"""Exponential moving averages of weights: updated in replica code.

`WeightAverage` is an optimizer's, swapped in by the host for evaluation; `Averaged` is a model that a step calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import tensorflow as tf

from ..errors import UsageError, reason
from ..internals import keras_calls, keras_copy
from ..internals.graphs import ENGINE_SCOPE
from ..internals.variables import assign_local, on_server, tf_variable, update_alone, variable_path
from ..mesh import sharded
from ..reduction import per_replica


class Shadows:
    """Variables and their shadows, which are their averages.

    Args:
      pairs: (variable, shadow).

    Raises:
      UsageError: a trainable variable has 16 bits, in which small changes to an average would be lost.
    """

    def __init__(self, pairs: Sequence[tuple[tf.Variable, tf.Variable]]):
        for variable, _ in pairs:
            if variable.trainable and variable.dtype in (tf.bfloat16, tf.float16):
                raise UsageError(
                    f"{variable_path(variable)} is {variable.dtype.name}, in which an average loses small changes; "
                    "keep variables in float32, and compute in 16 bits (mixed precision)"
                )
        # Behind a function: a list or dictionary would put the model's variables into the checkpoint a second time.
        self._pairs = lambda: pairs

    @contextlib.contextmanager
    def averages_in_place(self):
        """Assigns the variables their averages within this context, then restores their exact values."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def hand_over(self) -> None:
        """Assigns each variable its average permanently."""
        for variable, shadow in self._components():
            variable.assign(tf.identity(shadow))

    def reset(self, positions: Collection[int] | None = None) -> None:
        """Restarts averages from the variables' current values. Called after weights were loaded.

        Args:
          positions: the positions of the pairs to restart, in order; None is all.
        """
        for position, pair in enumerate(self._pairs()):
            for variable, shadow in zip(*map(per_replica.components, pair), strict=True):
                if positions is None or position in positions:
                    shadow.assign(tf.identity(variable))

    def move(self, pairs: Sequence[tuple[tf.Variable, tf.Variable]], rate: tf.Tensor) -> None:
        """Updates shadows: shadow += rate x (variable - shadow); those of integers become the variable. Replica code.

        Args:
          rate: scalar float32.
        """
        for variable, shadow in pairs:
            with on_server(shadow), tf.name_scope(ENGINE_SCOPE):
                value = tf.convert_to_tensor(variable)
                if not shadow.dtype.is_floating:
                    assign_local(shadow, value)
                    continue

                def move(value, rate, shadow=shadow):
                    change = rate * (value - shadow)
                    return tf.raw_ops.AssignAddVariableOp(resource=shadow.handle, value=change)

                update_alone(shadow, [value, tf.cast(rate, shadow.dtype)], move)

    def _swap(self) -> None:
        for variable, shadow in self._components():
            value = tf.identity(variable)
            variable.assign(tf.identity(shadow))
            shadow.assign(value)

    def _components(self) -> Iterator[tuple[tf.Variable, tf.Variable]]:
        """Yields each variable and its shadow on each replica of this process."""
        for pair in self._pairs():
            yield from zip(*map(per_replica.components, pair), strict=True)


class WeightAverage(tf.Module, Shadows):
    """Shadows of trainable variables: shadow += (1 - decay) x (variable - shadow) after each update.

    Polyak and Juditsky 1992; the decay is warmed up as min(decay, (1 + t) / (10 + t)) over t updates, the rule of
    `tf.train.ExponentialMovingAverage`, so that a short run is not an average of its initial values.

    Args:
      decay: 0 or more, below 1.
    """

    def __init__(self, decay: float, warmup: bool = True):
        tf.Module.__init__(self, name="weight_average")
        self.decay, self.warmup = decay, warmup

    def build(self, variables: Sequence) -> None:
        """Makes a shadow for each variable, equal to it. Call it in the strategy's scope."""
        strategy, shadows = tf.distribute.get_strategy(), []
        for i, variable in enumerate(map(tf_variable, variables)):
            # On the same server, so that an update of an average sends no weights.
            with strategy.extended.colocate_vars_with(variable):
                shadows.append(tf.Variable(variable, trainable=False, name=f"average_{i}"))
            sharded.mark(shadows[-1], sharded.variable_sharding(variable))
        self.shadows = shadows
        pairs = list(zip(map(tf_variable, variables), shadows, strict=True))
        Shadows.__init__(self, pairs)
        self._shadow_by_id = {id(variable): shadow for variable, shadow in pairs}.get
        self.reset()  # each replica of a sharded variable has the first one's shard so far

    @property
    def all_variables(self) -> list[tf.Variable]:
        """The variables with a shadow, in order."""
        return [variable for variable, _ in self._pairs()]

    def update(self, variables: Sequence, updates: tf.Tensor) -> None:
        """Updates the shadows once, after the variables' update. Replica code.

        Args:
          variables: variables in any order; those not passed to `build` have no average.
          updates: scalar int64, the number of updates so far.
        """
        # 1 - min(decay, (1 + t) / (10 + t)); in float32, 1 - 0.9999 would have a relative error of 2e-4.
        least = 9.0 / (10.0 + tf.cast(updates, tf.float32)) if self.warmup else 0.0
        rate = tf.maximum(1.0 - self.decay, least)
        pairs = [(variable, self._shadow_by_id(id(variable))) for variable in map(tf_variable, variables)]
        self.move([pair for pair in pairs if pair[1] is not None], rate)


class Averaged(tf.keras.Model):
    """A copy of a model whose weights are the exponential moving averages of the model's.

    copy += (1 - decay) x (model - copy), for all float weights after each step that is not skipped; others are copied.
    Such are the teacher of Tarvainen and Valpola 2017 (Mean teachers, https://arxiv.org/abs/1703.01780) and the target
    network of Grill et al. 2020 (BYOL, https://arxiv.org/abs/2006.07733). It is called like the model: in a step, in a
    hook, or afterwards, as `run.models["teacher"]`, by its attribute's name; its outputs are float32, as those of
    `Trainer.forward`, also with mixed precision. It is frozen: no optimizer updates it, and its batch normalization
    uses the averaged statistics.

    Make it in `Trainer.build`, as an attribute of the trainer, so that it is saved. Equal on all replicas.

    Args:
      model: a Keras model with its variables (`build_layers`).
      decay: 0 or more, below 1; or a function of the step, scalar int64 from 0 on, that returns it, scalar float32.
      copy: a model with the same weights, for one that Keras can't clone.

    Attributes:
      model: the copy.

    Raises:
      UsageError: the decay is not one, or the copy's weights are others.

    Example:
      >>> def build(self):  # in a Trainer with a teacher
      ...     super().build()
      ...     self.teacher = Averaged(self.model, decay=0.999)
    """

    def __new__(cls, model, decay, copy=None):  # Keras's would hide the arguments
        return super().__new__(cls, model, decay, copy)

    def __init__(
        self,
        model: tf.keras.Model,
        decay: float | Callable[[tf.Tensor], tf.Tensor],
        copy: tf.keras.Model | None = None,
    ):
        super().__init__(trainable=False)
        if not callable(decay) and not 0 <= decay < 1:
            raise UsageError(f"Averaged: decay={decay} is not a decay; use 0 up to, not including, 1")
        self.decay = decay
        self.model = _clone(model) if copy is None else copy
        self.model.trainable = False
        pairs = list(zip(map(tf_variable, model.weights), map(tf_variable, self.model.weights), strict=False))
        if len(model.weights) != len(self.model.weights) or any(v.shape != shadow.shape for v, shadow in pairs):
            raise UsageError(
                f"Averaged: {model.name} has {len(model.weights)} weights, and its copy {len(self.model.weights)}, or "
                "others; build the model first (crankshaft.build_layers), and pass a copy=self.build_model(), "
                "built for the same inputs, if Keras can't clone it"
            )
        self.built = True
        self._shadows = Shadows(pairs)
        self._pairs = lambda: pairs  # behind a function, as in `Shadows`
        self.reset()

    def call(self, *arguments, **keywords):
        return tf.nest.map_structure(keras_calls.in_float32, self.model(*arguments, **keywords))

    def get_config(self):
        raise NotImplementedError("the trainer's build makes an Averaged model")  # so that no file claims to define it

    def reset(self) -> None:
        """Restarts from the model's current weights."""
        self._shadows.reset()

    def follow(self, step: tf.Tensor, skipped: tf.Tensor | None = None) -> None:
        """Updates the copy after a step's update. Replica code.

        Args:
          step: scalar int64.
          skipped: scalar float32, 1 for a step without update; None if none is skipped.
        """
        rate = tf.cast(1.0 - (self.decay(step) if callable(self.decay) else self.decay), tf.float32)
        self._shadows.move(self._pairs(), rate if skipped is None else rate * (1.0 - skipped))


def _clone(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a built copy of a model. Raises `UsageError`."""
    try:
        copy = keras_copy.copied(model)
        if not copy.built and model.built:
            copy.build_from_config(model.get_build_config())
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        raise UsageError(
            f"Averaged: Keras can't clone {model.name} ({reason(error)}); pass a copy=self.build_model() that is built"
        ) from error
    return copy
