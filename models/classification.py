"""What classifiers share: cross-entropy on integer labels, and accuracy. Replica code. Not a model by itself."""

from __future__ import annotations

import tensorflow as tf

from crankshaft.engine import Mean, Trainer, mean


class Classifier(Trainer):
    """A trainer whose model gives logits [batch, classes] and whose labels are int [batch]."""

    def loss(self, outputs, batch) -> Mean:
        _, labels = batch
        if self.options.debug:
            _check(outputs, labels)
        # In float32 whatever layers compute in: a softmax over 16-bit logits loses small probabilities.
        logits = tf.cast(outputs, tf.float32)
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    def metrics(self, outputs, batch) -> dict[str, Mean]:
        _, labels = batch
        predicted = tf.argmax(outputs, axis=-1)  # int64: GPUs compare int32 on the host, which would wait for them
        return {"accuracy": mean(tf.equal(predicted, tf.cast(labels, tf.int64)))}


def _check(logits: tf.Tensor, labels: tf.Tensor) -> None:
    """The asserts of `--debug`."""
    tf.debugging.assert_rank(logits, 2, message="a classifier's outputs are [batch, classes]")
    tf.debugging.assert_rank(labels, 1, message="a classifier's labels are [batch]")
    classes = tf.cast(tf.shape(logits)[-1], labels.dtype)
    tf.debugging.assert_equal(tf.shape(logits)[0], tf.shape(labels)[0], message="logits and labels of different count")
    tf.debugging.assert_non_negative(labels, message="a label is negative")
    tf.debugging.assert_less(labels, classes, message="a label is not below the number of classes")
