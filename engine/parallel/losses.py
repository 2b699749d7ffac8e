"""Losses of outputs that are cut over a mesh's axis `model`, without gathering them. Replica code."""

from __future__ import annotations

import tensorflow as tf

from ..mesh.mesh import Mesh


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, vocabulary: int, mesh: Mesh | None = None) -> tf.Tensor:
    """Computes -log softmax(logits)[label] of each row, from logits that are cut by vocabulary.

    Each replica computes three numbers: its largest logit m, the sum of exp(logit - m), and the label's logit if it is
    among its own. They are gathered over `model`, 12 bytes a row and replica in one message, and all replicas compute
    the same bits from them. The backward pass sends nothing.

    Args:
      logits: [..., rows of a replica], as `Embedding.logits` returns them; converted to float32. Columns of padding,
        beyond the vocabulary, don't count, and have gradients of 0.
      labels: int [...]; a label that is no id (-1, as `input.text` marks what does not count) gives some finite loss,
        which a mean leaves out by its weights: `mean(losses, weights=labels >= 0)`.
      vocabulary: number of ids.
      mesh: the logits are cut over its axis `model`; None is a mesh of one.

    Returns:
      float32 [...], in nats, the same on all replicas that have the same rows.
    """
    logits = tf.cast(logits, tf.float32)
    labels = tf.cast(labels, tf.int32)
    if mesh is None or not mesh.is_cut:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.clip_by_value(labels, 0, vocabulary - 1), logits)
    own = logits.shape[-1]
    first = mesh.model.rank * own
    if own * mesh.model.size > vocabulary:
        logits = tf.where(first + tf.range(own) < vocabulary, logits, logits.dtype.min)
    return _cross_entropy(logits, tf.clip_by_value(labels, 0, vocabulary - 1) - first, mesh)


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor, mesh: Mesh) -> tf.Tensor:
    """Computes the losses for labels that count from this replica's first column."""

    @tf.custom_gradient
    def losses(logits):
        largest = tf.reduce_max(logits, -1, keepdims=True)
        exponentials = tf.exp(logits - largest)
        chosen = tf.one_hot(labels, logits.shape[-1])  # all 0 where another replica has the label
        mine = [largest[..., 0], tf.reduce_sum(exponentials, -1), tf.reduce_sum(chosen * logits, -1)]
        maxima, sums, of_labels = tf.unstack(mesh.model.all_gather(tf.stack(mine)), axis=1)
        maximum = tf.reduce_max(maxima, 0)
        total = tf.reduce_sum(sums * tf.exp(maxima - maximum), 0)

        def gradient(dy):
            share = tf.exp(largest[..., 0] - maximum) / total
            return dy[..., tf.newaxis] * (exponentials * share[..., tf.newaxis] - chosen)

        # In this order: a large logit less a large one is exact, with a logarithm between them it is not.
        return tf.math.log(total) + (maximum - tf.reduce_sum(of_labels, 0)), gradient

    return losses(logits)
