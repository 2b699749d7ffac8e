"""The common part of the rules on TensorFlow's fused kernels: slots, a step's scalars, and the update.

Also for variables on a parameter server. Built on the host in a strategy's scope, applied in replica code.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from crankshaft.engine.internals.variables import server_of
from crankshaft.engine.optimizers.base import Optimizer
from crankshaft.engine.reduction import wire
from crankshaft.engine.step.context import step_context
from crankshaft.engine.step.gradients import sum_duplicate_rows


class FusedOptimizer(Optimizer):
    """A rule of one fused kernel per variable: its slots, a step's scalars, and two updates.

    Slots and scalars carry the names of the kernels' arguments (https://www.tensorflow.org/api_docs/python/tf/raw_ops).
    Slots are float32 and so must the variables be. A sparse gradient (tf.IndexedSlices) updates the rows it touches and
    no others, after the gradients of a row that occurs more than once are summed. Under XLA the sparse kernels do not
    compile, so there momentum, adagrad and ftrl take dense gradients only.

    Args:
      learning_rate: as Optimizer's.
      use_locking: updates of one variable wait for one another; for several workers that share
        variables. The default lets them overlap.
      **arguments: Optimizer's others.

    To a variable on a parameter server gradients travel as `StepContext.wire_dtype`.
    """

    dense_kernel: Callable[..., None]
    sparse_kernel: Callable[..., None]

    def __init__(self, learning_rate, *, use_locking=False, **arguments):
        super().__init__(learning_rate, **arguments)
        self.use_locking = use_locking
        self.slots = None

    def initial_slots(self):
        """Returns {slot: the number it is filled with at first}."""
        return {}

    def scalars(self, learning_rate, step):
        """Computes a step's scalars, once for all variables.

        Args:
          learning_rate: float32 scalar tensor.
          step: float64 scalar tensor, 1.0 for the first update.

        Returns:
          {argument: number or scalar tensor}; they come to the kernels in float32.
        """
        return {"lr": learning_rate}

    def dense(self, var, slots, gradient, scalars):
        """Updates all of `var` (a resource handle, as are the slots)."""
        self.dense_kernel(var=var, **slots, grad=gradient, **scalars, use_locking=self.use_locking)

    def sparse(self, var, slots, gradient, indices, scalars):
        """Updates rows `indices`, each of which occurs once, from gradient [len(indices), ...]."""
        self.sparse_kernel(
            var=var,
            **slots,
            grad=gradient,
            indices=indices,
            **scalars,
            use_locking=self.use_locking,
        )

    def _build_slots(self, targets):
        strategy = tf.distribute.get_strategy()
        slots = {}
        for target in targets:
            variable = target.variable
            if variable.dtype != tf.float32:
                raise ValueError(
                    f"variable {target.path} is {variable.dtype.name}, and {self.name} updates "
                    "float32; keep variables in float32 and compute in less (mixed precision)"
                )
            with strategy.extended.colocate_vars_with(variable):
                slots[target.key] = {
                    slot: tf.Variable(
                        lambda: tf.fill(variable.shape, np.float32(value)),  # noqa: B023
                        trainable=False,
                        name=f"{self.name}/{target.key}/{slot}",
                    )
                    for slot, value in self.initial_slots().items()
                }
        self.slots = slots

    def _update(self, pairs, learning_rate, iterations):
        step = tf.cast(iterations + 1, tf.float64)
        for alike in _grouped(pairs, lambda target: target.multiplier).values():
            scalars = self.scalars(alike[0][1].rate(learning_rate), step)
            self._update_alike(alike, {name: tf.cast(value, tf.float32) for name, value in scalars.items()})

    def _update_alike(self, pairs, scalars):
        """Updates pairs of one rate, each on the device of its variable."""
        pairs = [(sum_duplicate_rows(g) if isinstance(g, tf.IndexedSlices) else g, target) for g, target in pairs]
        for server, there in _grouped(pairs, lambda target: server_of(target.variable)).items():
            values = [tf.cast(g.values if isinstance(g, tf.IndexedSlices) else g, tf.float32) for g, _ in there]
            if server is None:
                self._apply(there, values, scalars)
                continue
            with tf.device(server):
                shapes = [_shape(*pair) for pair in there]
            exact, values = wire.send(list(scalars.values()), values, shapes, server, step_context().wire_dtype)
            with tf.device(server):
                self._apply(there, values, dict(zip(scalars, exact, strict=True)))

    def _apply(self, pairs, values, scalars):
        """Runs the kernels, each with its slots; `values` are the gradients', of touched rows or of all."""
        for (gradient, target), value in zip(pairs, values, strict=True):
            slots = {name: slot.handle for name, slot in self.slots[target.key].items()}
            if isinstance(gradient, tf.IndexedSlices):
                self.sparse(target.handle, slots, value, gradient.indices, scalars)
            else:
                self.dense(target.handle, slots, value, scalars)


def _shape(gradient, target):
    """Returns the shape of a gradient's values: a `tf.TensorShape`, or, for rows, whose number varies, a tensor."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.concat([tf.shape(gradient.indices), target.variable.shape[1:]], 0)
    return target.variable.shape


def _grouped(pairs, key):
    """Groups pairs by `key` of their target, in order."""
    found: dict[Any, list] = {}
    for gradient, target in pairs:
        found.setdefault(key(target), []).append((gradient, target))
    return found
