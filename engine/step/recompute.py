"""Activation checkpointing: recomputes blocks' activations in the backward pass, not kept. Replica code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from ..internals import graphs, keras_scopes
from .context import step_context


def recomputed(layer: tf.keras.layers.Layer, *inputs: Any, **arguments: Any) -> Any:
    """Calls a block, a Keras layer; in a training step, the backward pass calls it again.

    A model calls it if `Trainer.run_context.options.recompute` is set. A training step then keeps only the
    block's inputs and outputs, at the cost of one more forward pass of it (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174). The second call uses the weights, seeds and moving statistics of the first, so
    dropout drops the same values, and the first call's assignments are made once. Sums across replicas within the block
    are repeated.

    Args:
      layer: the block, built. Its layers must not add losses; weight regularizers are allowed.
      *inputs: arguments of the call, nests of tensors.
      **arguments: further arguments of the call, without gradients.

    Raises:
      UsageError: the block adds to the loss, by add_loss or an activity regularizer; or it changes what is none of its
        Keras variables.
    """
    context = step_context()
    if not context.is_training:
        return layer(*inputs, **arguments)
    context.applied.mark("recomputed")
    flat = tf.nest.flatten(inputs)
    trained = keras_scopes.values(layer.trainable_variables)
    fixed = keras_scopes.values(layer.non_trainable_variables)
    first, as_before = _Call(layer, inputs, arguments, fixed), context.copy()

    @tf.custom_gradient
    def compute(*tensors):
        def gradient(*upstream):
            again = computed_after(tensors[: len(flat)], upstream)  # separately from the first
            sources = [x for x in (*again, *tensors[len(flat) :]) if x.dtype.is_floating]
            with tf.GradientTape(watch_accessed_variables=False) as tape, as_before.copy():
                tape.watch(sources)
                outputs = _Call(layer, inputs, arguments, fixed).outputs(again, tensors[len(flat) :])
            gradients = iter(tape.gradient(outputs, sources, list(upstream), unconnected_gradients="zero"))
            return [next(gradients) if x.dtype.is_floating else None for x in tensors]

        return first.outputs(tensors[: len(flat)], tensors[len(flat) :]), gradient

    written = graphs.writes()
    outputs = compute(*flat, *trained)
    own = {id(variable) for variable in layer.variables}
    if graphs.writes() != written or any(id(variable) not in own for variable, _ in first.assigned):
        raise UsageError(
            f"recompute calls {layer.name} twice, and it changes a variable, table or generator that is not its own by "
            "add_weight, which would be changed twice; make it so, or call the layer without recompute"
        )
    for variable, value in first.assigned:
        variable.assign(value)
    return tf.nest.pack_sequence_as(first.structure, tf.nest.flatten(outputs))


def computed_after(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the same values, for operations that are to run after others, and again if they have run before.

    XLA merges equal operations and knows no control edges, so values depend on the others', as in `tf.recompute_grad`.
    """
    with tf.control_dependencies(others):
        values = [tf.reshape(x, [-1])[:1] for x in others if x.dtype.is_floating]
        if not values:
            return [tf.identity(x) for x in tensors]
        value = tf.reduce_max(values[0])
        zero = tf.where(tf.math.is_nan(value), tf.constant(np.nan, value.dtype), tf.zeros([], value.dtype))
        return [x + tf.cast(zero, x.dtype) if x.dtype.is_floating else tf.identity(x) for x in tensors]


class _Call:
    """One call of a layer with fixed values of its variables."""

    def __init__(self, layer: Any, inputs: Any, arguments: dict[str, Any], fixed: Sequence[tf.Tensor]):
        self._layer, self._inputs, self._arguments, self._fixed = layer, inputs, arguments, fixed
        self.structure: Any = None
        self.assigned: list = []

    def outputs(self, flat: Sequence[tf.Tensor], trained: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Calls the layer; returns its outputs, flat, and records their structure and the assignments."""
        layer = self._layer
        trained_pairs = zip(layer.trainable_variables, trained, strict=True)
        values = [*trained_pairs, *zip(layer.non_trainable_variables, self._fixed, strict=True)]
        inputs = tf.nest.pack_sequence_as(self._inputs, flat)
        with keras_scopes.Scope(values) as scope:
            self.structure = layer(*inputs, **self._arguments)
        if scope.losses:
            raise UsageError(
                f"recompute calls {layer.name} twice, and it adds to the loss (add_loss, activity_regularizer); leave "
                "one of them out"
            )
        self.assigned = [*scope.assigned.values()]
        return tf.nest.flatten(self.structure)
