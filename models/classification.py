"""The base of classifiers: cross-entropy on integer labels, and accuracy. Replica code; not a model itself."""

from __future__ import annotations

import math

import tensorflow as tf

from ..engine.errors import UsageError
from ..engine.metrics.means import FEW_CLASSES, confusion_matrix, mean, scaled
from ..engine.metrics.pairs import Mean
from ..engine.trainer import Trainer


class Classifier(Trainer):
    """A trainer whose model returns logits [batch, classes] and whose labels are int [batch].

    Args:
      class_weight: factors of the classes' losses in training, as in Keras's `fit(class_weight=...)`: the mean is over
        the number of examples, and evaluations and accuracy don't change. None is 1 for each.
    """

    class_weight = None
    needs_labels = needs_classes = True
    logits_kind = "classes"

    def __init__(self, class_weight: tuple[float, ...] | None = None):
        super().__init__()
        self.class_weight = tuple(class_weight) if isinstance(class_weight, list) else class_weight

    def build(self) -> None:
        if self.class_weight is not None:
            _check_class_weight(self.class_weight, self.run_context.num_classes)
        super().build()

    def loss(self, outputs, batch) -> Mean:
        _, labels = batch
        if self.run_context.options.debug:
            _check(outputs, labels)
        # In float32 for any precision: a softmax over 16-bit logits loses small probabilities.
        logits = tf.cast(outputs, tf.float32)
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    def training_loss(self, outputs, batch) -> Mean:
        loss = self.loss(outputs, batch)
        if self.class_weight is None:
            return loss
        return scaled(loss, tf.gather(tf.constant(self.class_weight, tf.float32), batch[1]))

    def metrics(self, outputs, batch) -> dict:
        _, labels = batch
        predicted = tf.argmax(outputs, axis=-1)  # int64: int32 would be compared on the host, which waits for the GPU
        metrics: dict = {"accuracy": mean(tf.equal(predicted, tf.cast(labels, tf.int64)), direction="max")}
        if outputs.shape[-1] <= FEW_CLASSES:
            metrics["confusion"] = confusion_matrix(labels, outputs)
        return metrics


def _check_class_weight(weights, classes: int | None) -> None:
    fine = isinstance(weights, (tuple, list)) and all(
        isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in weights
    )
    if not fine or len(weights) != classes:
        shown = ",".join(map(str, weights)) if isinstance(weights, (tuple, list)) else weights
        raise UsageError(
            f"class_weight={shown} is not one number of 0 or more for each of the {classes} classes; give as many, "
            "separated by commas"
        )


def _check(logits: tf.Tensor, labels: tf.Tensor) -> None:
    """Adds the asserts of `--debug`."""
    tf.debugging.assert_rank(logits, 2, message="a classifier's outputs are [batch, classes]")
    tf.debugging.assert_rank(labels, 1, message="a classifier's labels are [batch]")
    classes = tf.cast(tf.shape(logits)[-1], labels.dtype)
    tf.debugging.assert_equal(tf.shape(logits)[0], tf.shape(labels)[0], message="logits and labels of different count")
    tf.debugging.assert_non_negative(labels, message="a label is negative")
    tf.debugging.assert_less(labels, classes, message="a label is not below the number of classes")
