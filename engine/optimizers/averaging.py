"""Exponential moving average of the weights: updated in replica code, swapped in by the host for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import tensorflow as tf

from ..internals.variables import on_server, tf_variable
from ..mesh import shards
from ..reduction import per_replica


class Shadows:
    """Variables and their shadows, which are their averages.

    Args:
      pairs: (variable, shadow).
    """

    def __init__(self, pairs: Sequence[tuple[tf.Variable, tf.Variable]]):
        # Behind a function: a list or dictionary would put the model's variables into the checkpoint a second time.
        self._pairs = lambda: pairs

    @contextlib.contextmanager
    def averages_in_place(self):
        """Assigns the variables their averages within this context, then restores their exact values. Host code."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def hand_over(self) -> None:
        """Assigns each variable its average permanently. Host code."""
        for variable, shadow in self._components():
            variable.assign(tf.identity(shadow))

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
      warmup: whether it is warmed up.
    """

    def __init__(self, decay: float, warmup: bool = True):
        tf.Module.__init__(self, name="weight_average")
        self.decay, self.warmup = decay, warmup

    def build(self, variables: Sequence) -> None:
        """Makes a shadow for each variable, equal to it. Host code, in the strategy's scope."""
        strategy, shadows = tf.distribute.get_strategy(), []
        for i, variable in enumerate(map(tf_variable, variables)):
            with strategy.extended.colocate_vars_with(variable):
                shadows.append(tf.Variable(variable, trainable=False, name=f"average_{i}"))
            shards.mark(shadows[-1], shards.sharding_of(variable))
        self.shadows = shadows
        pairs = list(zip(map(tf_variable, variables), shadows, strict=True))
        Shadows.__init__(self, pairs)
        self._shadow_of = {id(variable): shadow for variable, shadow in pairs}.get
        self.reset()  # each replica of a sharded variable has the first one's shard so far

    @property
    def of_variables(self) -> list[tf.Variable]:
        """The variables with a shadow, in order."""
        return [variable for variable, _ in self._pairs()]

    def reset(self, positions: Collection[int] | None = None) -> None:
        """Restarts averages from the variables' current values. Host code, called after weights were loaded.

        Args:
          positions: of the variables in the order of `build`; None is all.
        """
        for position, pair in enumerate(self._pairs()):
            for variable, shadow in zip(*map(per_replica.components, pair), strict=True):
                if positions is None or position in positions:
                    shadow.assign(tf.identity(variable))

    def update(self, variables: Sequence, updates: tf.Tensor) -> None:
        """Updates the shadows once, after the variables' update. Replica code.

        Args:
          variables: in any order; those not passed to `build` have no average.
          updates: scalar int64, the number of updates so far.
        """
        # 1 - min(decay, (1 + t) / (10 + t)); in float32, 1 - 0.9999 would have a relative error of 2e-4.
        least = 9.0 / (10.0 + tf.cast(updates, tf.float32)) if self.warmup else 0.0
        rate = tf.maximum(1.0 - self.decay, least)
        for variable in variables:
            shadow = self._shadow_of(id(tf_variable(variable)))
            if shadow is None:
                continue
            with on_server(shadow):
                difference = tf.convert_to_tensor(tf_variable(variable)) - shadow
                tf.raw_ops.AssignAddVariableOp(resource=shadow.handle, value=rate * difference)
