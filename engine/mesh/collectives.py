"""Sums and gathers across all replicas of a strategy, in as few messages as possible. Replica code.

Also which tensors are sent together as a bucket, between replicas, workers and servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from ..internals import tensorflow

# Between CPUs, values of at most this size in all are gathered, and each replica adds them up itself.
GATHERED_BYTES = 1 << 20


def all_reduce(context: tf.distribute.ReplicaContext, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum over replicas, the same bits on each.

    A ring of n replicas takes 2 (n - 1) messages in turn, each of 1/n of the bytes; a gather takes n - 1, each of all
    bytes. An empty message between two processes on a CPU takes 0.3 ms, so gathering is faster for small values
    (Thakur, Rabenseifner & Gropp 2005, https://doi.org/10.1177/1094342005051521).
    """
    if _between_hosts(context) and is_small(value, context.num_replicas_in_sync):
        return tf.add_n(tf.unstack(all_gather(context, value)))
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


def all_gather(context: tf.distribute.ReplicaContext, value: tf.Tensor) -> tf.Tensor:
    """Gathers the replicas' values, of one static shape, in the order of the replicas: [replicas, ...]."""
    if not _between_hosts(context):
        return context.all_gather(value[tf.newaxis], axis=0)
    # TensorFlow's `all_gather` first gathers the shapes, in messages of their own, and copies all values four times to
    # transpose, pad, slice and transpose them back. Shapes here are static and equal, so its bare collective suffices.
    gathered = tensorflow.gather(context, value[tf.newaxis])
    return tf.ensure_shape(gathered, [context.num_replicas_in_sync, *value.shape])


def buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Groups tensors of these sizes into buckets: lists of indices, complete when they have `most`.

    A tensor as large as a bucket is sent by itself, unchanged: joining would copy it twice. Buckets are in the order in
    which they are complete, since each waits for the one before it. `most` of 0 makes one bucket.
    """
    groups: list[list[int]] = []
    unfinished: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        if most and size >= most:
            groups.append([index])
            continue
        unfinished.append(index)
        held += size
        if most and held >= most:
            groups.append(unfinished)
            unfinished, held = [], 0
    return [*groups, unfinished] if unfinished else groups


def as_one(bucket: Sequence[tf.Tensor], move: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
    """Joins tensors along their last axis, calls `move` once, and splits the result along that axis, too."""
    return tf.split(move(tf.concat(bucket, -1)), [tensor.shape[-1] for tensor in bucket], axis=-1)


def _between_hosts(context: tf.distribute.ReplicaContext) -> bool:
    return isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy)


def is_small(value: tf.Tensor, replicas: int) -> bool:
    """Returns whether a value of each of these replicas is summed by a gather, between hosts."""
    if tf.DeviceSpec.from_string(value.device).device_type not in (None, "CPU") or not value.shape.is_fully_defined():
        return False
    return replicas * value.shape.num_elements() * value.dtype.size <= GATHERED_BYTES
