"""Gathers examples' values across the replicas that make an update together, for losses of pairs. Replica code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..errors import UsageError
from ..internals.tensorflow import is_only_replica
from .context import step_context

_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)  # the dtypes of TensorFlow's collectives


def gather(trainer: Any, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers a value of each example from all replicas, for a loss that compares each example with all others.

    A replica's loss is the `mean` of one value for each of its own examples, compared with all replicas' examples. The
    gradient is that of the whole loss: an example's gradients from all replicas' losses are summed on its own replica.
    So results equal one device's, also for uneven batches: a replica without examples adds none. If replicas update by
    themselves (local SGD, servers), the examples are its own. It may not be in a loop or condition, so it can't be
    combined with micro-batches, which would also compare each example with fewer.

    Args:
      trainer: the trainer that calls it.
      values: [n, ...], of the replica's n examples, of any dtype; text is sent as its bytes.

    Returns:
      ([N, ...], first): the values of all N examples of the global batch, in the same order on each replica, and the
      scalar int32 index of this replica's first one.

    Raises:
      UsageError: the model is sharded over a mesh, or the batch split into micro-batches.

    Example:
      >>> def loss(self, outputs, batch):  # of a Trainer whose outputs are (images, texts), each [n, 64]
      ...     images, texts = outputs
      ...     all_texts, first = gather(self, texts)
      ...     similar = tf.matmul(images, all_texts, transpose_b=True)
      ...     own = first + tf.range(tf.shape(images)[0])
      ...     return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, similar))
    """
    step, reduction = step_context(), trainer.reduction
    step.applied.mark("gather")
    if step.is_training and trainer.run_context.options.accumulate_steps > 1:
        raise UsageError("accumulate_steps: gather needs a batch as a whole; use 1")
    if step.mesh.is_sharded:
        raise UsageError("mesh: gather needs a copy of the model on each replica; leave it out")
    if reduction.alone() or step.mesh.data.size == 1 or is_only_replica():
        return values, tf.constant(0)
    if values.dtype == tf.string:
        return _gather_text(trainer, values)
    if values.dtype not in _SENT:
        sent, first = gather(trainer, tf.cast(values, tf.float32 if values.dtype.is_floating else tf.int64))
        return tf.cast(sent, values.dtype), first
    has_examples = step.has_examples
    count = tf.shape(values)[0] if has_examples is None else tf.where(has_examples, tf.shape(values)[0], 0)
    counts = step.mesh.data.all_gather(count)
    first = tf.reduce_sum(tf.where(tf.range(counts.shape[0]) < step.mesh.data.rank, counts, 0))
    examples = tf.nest.flatten(step.batch)[0].shape[0]
    whole = step.batch_size if examples and values.shape[0] == examples else None

    @tf.custom_gradient
    def gathered(values):
        def backward(upstream):
            upstream = upstream if has_examples is None else tf.where(has_examples, upstream, tf.zeros_like(upstream))
            gradient = step.mesh.data.all_reduce(upstream)[first : first + count]
            return tf.pad(gradient, [[0, tf.shape(values)[0] - count], *[[0, 0]] * (values.shape.rank - 1)])

        everywhere = step.mesh.data.concatenate([values[:count]])[0]
        return tf.ensure_shape(everywhere, [whole, *values.shape[1:]]), backward

    # A replica without examples computes a padded one that counts in nothing; its number must be valid.
    return gathered(values), first if has_examples is None else tf.where(has_examples, first, 0)


def _gather_text(trainer: Any, texts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers text, [n, ...] string, as the numbers of its bytes, after its lengths."""
    lengths = tf.strings.length(texts)
    # All replicas send as many bytes for a text. The pad is for a replica without texts, which has no maximum.
    longest_here = tf.reduce_max(tf.pad(tf.reshape(lengths, [-1]), [[0, 1]]))
    longest = tf.reduce_max(step_context().mesh.data.all_gather(longest_here))
    numbers = tf.cast(tf.io.decode_raw(texts, tf.uint8, fixed_length=tf.maximum(longest, 1)), tf.int32)
    sent, first = gather(trainer, tf.concat([lengths[..., tf.newaxis], numbers], -1))
    octets = tf.gather(tf.constant([bytes([number]) for number in range(256)]), sent[..., 1:])
    return tf.strings.substr(tf.strings.reduce_join(octets, -1), tf.zeros_like(sent[..., 0]), sent[..., 0]), first


def gather_together(trainer: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gathers tensors [n, ...] of any numeric dtype or bool as `gather` does, in one message per dtype."""
    kinds: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype if tensor.dtype.is_floating else tf.int64, []).append(index)
    gathered: dict[int, tf.Tensor] = {}
    for dtype, indices in kinds.items():
        cast = [tf.cast(tensors[index], dtype) for index in indices]
        # Sequences that are padded have another length in each batch.
        shapes = [tf.shape(x)[1:] if None in x.shape[1:] else x.shape[1:] for x in cast]
        sizes = [tf.reduce_prod(shape) if tf.is_tensor(shape) else math.prod(shape) for shape in shapes]
        flat = [tf.reshape(x, [tf.shape(x)[0], size]) for x, size in zip(cast, sizes, strict=True)]
        everywhere, _ = gather(trainer, tf.concat(flat, 1))
        columns = tf.split(everywhere, sizes, axis=1, num=len(sizes))
        for index, shape, column in zip(indices, shapes, columns, strict=True):
            whole = tf.reshape(column, tf.concat([tf.shape(column)[:1], shape], 0))
            known = [column.shape[0], *tensors[index].shape[1:]]
            gathered[index] = tf.ensure_shape(tf.cast(whole, tensors[index].dtype), known)
    return [gathered[index] for index in range(len(tensors))]
