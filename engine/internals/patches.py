"""The three changes to TensorFlow and Keras that all code of the process meets. Replica code, but `patch_libraries`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import tensorflow as tf
from keras.src import backend
from keras.src.losses import loss as loss_module
from tensorflow.python.framework import ops

_undivided: contextvars.ContextVar[bool] = contextvars.ContextVar("undivided", default=False)
_keras_moments = tf.keras.layers.BatchNormalization._moments


def patch_libraries() -> None:
    """Replaces three functions of TensorFlow and Keras; `engine.internals` calls it once, at its import.

    A function is replaced only where users' own layers, losses and models call it, so that no code of the engine is
    between. Outside of what is described here each does what it did.

    1. The gradient of `tf.nn.bias_add`, by which Keras's layers add their biases. Upstream: on CPUs the kernel
       `BiasAddGrad` accumulates 16-bit values in 16 bits: 4,096 ones in bfloat16 make 256. Here: accumulates them in
       float32. Test: `tests/engine/layers/test_keras_layers.py`,
       `test_sums_over_positions_accumulate_in_float32`.
    2. The division of each Keras loss by the number of replicas, and its inverse, by which Keras records the loss in
       a metric. Upstream: divides wherever a replica calls a loss object, since Keras's optimizers sum over replicas.
       The engine divides by counts of examples instead, and a `compute_loss` of the model's own may call loss
       objects anywhere. Here: divides nothing within `undivided_losses`. Test:
       `tests/launch/fit/test_losses.py`, `test_a_loss_of_the_models_own_may_divide_an_output_or_distil_a_teacher`.
    3. The moments of `BatchNormalization`. Upstream: ignores `synchronized=True` for inputs with a mask. Here: sums
       all replicas' unmasked positions. Test: `tests/engine/layers/test_sync_batch_norm.py`,
       `test_masked_positions_count_on_no_replica`.
    """
    ops.gradient_registry._registry["BiasAdd"]["type"] = _bias_add_gradients
    loss_module.scale_loss_for_distribution = _unless_undivided(loss_module.scale_loss_for_distribution)
    loss_module.unscale_loss_for_distribution = _unless_undivided(loss_module.unscale_loss_for_distribution)
    tf.keras.layers.BatchNormalization._moments = _moments


def bias_gradient(dy: tf.Tensor, data_format: str | bytes = "NHWC") -> tf.Tensor:
    """Computes the gradient, added up in float32, of a bias [channels] from that of `tf.nn.bias_add`'s outputs."""
    if dy.dtype.size != 2:
        return tf.raw_ops.BiasAddGrad(out_backprop=dy, data_format=data_format)
    wide = tf.cast(dy, tf.float32)
    return tf.cast(tf.raw_ops.BiasAddGrad(out_backprop=wide, data_format=data_format), dy.dtype)


def _bias_add_gradients(op, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return dy, bias_gradient(dy, op.get_attr("data_format") or "NHWC")  # None for an eager op


@contextlib.contextmanager
def undivided_losses() -> Iterator[None]:
    """Makes Keras's loss objects called within return means over examples, also on replicas."""
    token = _undivided.set(True)
    try:
        yield
    finally:
        _undivided.reset(token)


def _unless_undivided(scale: Callable) -> Callable:
    return lambda value: value if _undivided.get() else scale(value)


def _moments(layer: tf.keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None):
    replica = tf.distribute.get_replica_context()
    if mask is None or not layer.synchronized or replica is None or replica.num_replicas_in_sync == 1:
        return _keras_moments(layer, inputs, mask)
    axes = layer._reduction_axes
    unmasked = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

    def total(values: tf.Tensor) -> tf.Tensor:
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(values, axes, keepdims=True))

    count = total(tf.cast(unmasked, inputs.dtype)) + backend.epsilon()
    mean = total(tf.where(unmasked, inputs, 0)) / count
    variance = total(tf.square(tf.where(unmasked, inputs - mean, 0))) / count
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
