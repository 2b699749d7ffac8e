"""A batch for a replica that has no example, in replica code: one example of zeros, whose results count for nothing.

Kernels do not bear empty batches: TensorFlow 2.21's convolutions by oneDNN give them a wrong shape, and batch
normalisation takes the mean of nothing, which is NaN.
"""

from __future__ import annotations

import tensorflow as tf

from crankshaft.engine.metrics.means import Mean


def with_stand_in(batch):
    """Returns (batch, whether it holds examples): an empty batch becomes one of a single example of zeros.

    Args:
      batch: nest of tensors whose first axis is examples.

    Returns:
      The batch, and a scalar bool tensor, or None where a batch cannot be empty.
    """
    first = tf.nest.flatten(batch)[0]
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1 or (first.shape[0] or 0) > 0:
        return batch, None
    present = tf.shape(first)[0] > 0
    missing = tf.where(present, 0, 1)

    def pad(x: tf.Tensor) -> tf.Tensor:
        return tf.concat([x, tf.zeros(tf.concat([[missing], tf.shape(x)[1:]], 0), x.dtype)], 0)

    return tf.nest.map_structure(pad, batch), present


def only_if(present: tf.Tensor | None, metrics: dict[str, Mean]) -> dict[str, Mean]:
    """Returns the metrics where examples were present; otherwise zeros, even for what is not finite."""
    if present is None:
        return metrics
    return tf.nest.map_structure(lambda x: tf.where(present, x, tf.zeros_like(x)), metrics)
