"""Computes metrics of a batch in replica code, as pairs that merge exactly (`pairs`); the inner loop adds them up."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from .. import logging
from ..errors import UsageError
from . import ranking
from .pairs import Auc, Confusion, ExpMean, Mean, Pair, RootMean, SumOfMeans

FEW_CLASSES = 100  # up to this number, a confusion matrix costs almost nothing
_ENGINES = ("loss", "loss_with_penalties", "gradient_norm", "skipped")  # the engine's metric names
_ONE_NUMBER = (
    "crankshaft.mean got one number for a batch, which counts as one example, however large the batch is; pass "
    "one value per example (Keras losses: reduction=None), or use crankshaft.Mean(number, 1.0) if that is intended"
)


def is_loss(name: str) -> bool:
    """Returns whether a metric is a loss, by its name, such as `loss` or `log_loss`."""
    return "loss" in name.split("_")


@functools.cache
def _directed(direction: str) -> type[Mean]:
    if direction not in ("max", "min"):
        raise UsageError(f"direction={direction!r} is unknown; use 'max' or 'min', or leave it out")
    return type("Mean", (Mean,), {"direction": direction})


def mean(values: Any, weights: Any = None, direction: str | None = None) -> Mean:
    """Returns the pair of a tensor of per-example values.

    If the data has weights (`step.batches`), the results of `Trainer.loss` and `Trainer.metrics` are recomputed with
    them: each example's values count by its weight.

    Args:
      values: tensor of any shape and numeric or bool dtype, one entry per example (or token, or pixel).
      weights: None, or a tensor that broadcasts to `values`. Entries of weight 0 don't count, even NaN or infinite
        ones, and their gradient here is 0. But the backward pass of the code that computed them may still yield NaN,
        e.g. for the square of a NaN: replace such labels first, loss(tf.where(weights > 0, labels, 0.0)). With the
        data's own weights this is not needed.
      direction: "max" if a higher mean is better, as for accuracy, or "min"; used by `monitor`.

    Returns:
      Mean(sum of values, number of values), or the weighted sum and the sum of weights. Both are 0 for an empty
      batch, which then has no weight.

    Example:
      >>> pair = mean([1.0, 2.0, 6.0])
      >>> float(pair.total), float(pair.count)
      (9.0, 3.0)
    """
    values, kind = tf.cast(values, tf.float32), Mean if direction is None else _directed(direction)

    def weigh(examples):
        return mean(values, combined(weights, examples, values), direction)

    if weights is None:
        if values.shape.rank == 0:
            logging.warning_once(_ONE_NUMBER)
        pair = kind(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))
        return weighed_by(pair, weigh)
    spread = tf.broadcast_to(tf.cast(weights, tf.float32), tf.shape(values))
    values = tf.where(spread == 0.0, 0.0, values)  # an entry without weight may be any value, as padding often is
    pair = kind(tf.reduce_sum(values * spread), tf.reduce_sum(spread))
    return weighed_by(pair, weigh, has_weights=True)


def root_mean_square(values: Any, weights: Any = None) -> RootMean:
    """Returns the pair of the root of the mean of squares.

    Args:
      values: see `mean`.
      weights: see `mean`.

    Example:
      >>> pair = root_mean_square([3.0, 5.0])  # of errors, say
      >>> float(pair.total), float(pair.count)
      (34.0, 2.0)
    """
    return _weighed_mean(RootMean, mean(tf.square(tf.cast(values, tf.float32)), weights))


def exp_mean(values: Any, weights: Any = None) -> ExpMean:
    """Returns the pair of e to the mean, e.g. the perplexity of losses. Arguments as `mean`'s."""
    return _weighed_mean(ExpMean, mean(values, weights))


def _weighed_mean(kind: type[Mean], pair: Mean) -> Any:
    weigh = pair.weigh
    assert weigh  # as `mean` sets it
    return weighed_by(kind(*pair), lambda examples: kind(*weigh(examples)), pair.has_weights)


def auc(labels: Any, logits: Any, weights: Any = None) -> Mean:
    """Returns the pair of a binary classifier's area under the ROC curve.

    In evaluations of up to some 10^7 examples it is exact: the fraction of (positive, negative) pairs in the right
    order, with half of the pairs of equal logits. In training, and beyond, it has an error, whose bound is shown as
    NAME_error_bound.

    Args:
      labels: any shape, 0 or 1, one per example; any other label ends the run.
      logits: a tensor of the same shape; sigmoid(logits) is the predicted probability. Non-finite ones don't count.
      weights: None, or of the same shape, at least 0.

    Example:
      >>> def metrics(self, outputs, batch):  # of a Trainer whose outputs are logits [n, 1], and labels [n, 1]
      ...     return {"auc": auc(batch[1], outputs)}
    """
    scores = tf.convert_to_tensor(logits)
    logits = tf.reshape(tf.cast(scores, tf.float32), [-1])
    weights = None if weights is None else tf.reshape(tf.cast(weights, tf.float32), tf.shape(scores))
    parts = tf.cast(labels, tf.float32), tf.ones_like(logits) if weights is None else weights
    pair = Auc(*(ranking.by_logit(logits, tf.reshape(part, [-1])) for part in parts))
    return weighed_by(pair, lambda its: auc(labels, scores, combined(weights, its, scores)), weights is not None)


def confusion_matrix(labels: Any, predictions: Any, mask: Any = None) -> Mean:
    """Returns the pair of a classifier's confusion matrix, for an evaluation's report by class.

    Each example counts as one, whatever its weight. Training steps omit it, at no cost.

    Args:
      labels: integers [batch, ...], from 0 to below the number of classes.
      predictions: [batch, ..., classes]; the largest is the predicted class.
      mask: None, or bool of the shape of `labels`: False for labels that don't count, such as padding.

    Example:
      >>> pair = confusion_matrix([0, 1, 1], [[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
      >>> pair.matrix().tolist()  # one of the two examples of class 1 is predicted as 0
      [[1, 0], [1, 1]]
    """
    predictions = tf.convert_to_tensor(predictions)
    classes = predictions.shape[-1]
    labels = tf.reshape(tf.cast(labels, tf.int64), [-1])  # int32 stays on the host with GPUs
    predicted = tf.reshape(tf.argmax(predictions, axis=-1), [-1])
    in_range = (labels >= 0) & (labels < classes)
    counted = tf.ones_like(in_range) if mask is None else tf.reshape(tf.cast(mask, tf.bool), [-1])
    cells = tf.where(in_range & counted, labels * classes + predicted, -1)  # -1 is not counted
    counts = tf.math.unsorted_segment_sum(tf.ones_like(labels, tf.float32), cells, classes * classes)
    unknown = tf.reduce_sum(tf.cast(counted & ~in_range, tf.float32))
    return Confusion(counts, tf.pad(unknown[tf.newaxis], [[0, classes * classes - 1]]))  # type: ignore[return-value]


def scaled(pair: Mean, factors: tf.Tensor) -> Mean:
    """Multiplies each example's values in a pair of `mean` by its factor, float32 [batch]; keeps the count.

    Raises:
      UsageError: the pair is not `mean`'s.
    """
    if (weigh := getattr(pair, "weigh", None)) is None:
        raise UsageError("a loss whose examples are to be weighed has to be made by crankshaft.mean(losses)")

    def weigh_scaled(examples):
        return Mean(weigh(factors * examples).total, weigh(examples).count)

    return weighed_by(Mean(weigh(factors).total, pair.count), weigh_scaled, pair.has_weights)


def weighed_by(pair: Any, weigh: Any, has_weights: bool = False) -> Any:
    """Sets how the pair is recomputed with weights, see `Pair`, and returns it."""
    pair.weigh, pair.has_weights = weigh, has_weights
    return pair


def combined(weights: Any, examples: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns the examples' weights [batch], in the shape of their values [batch, ...], times the values' own weights.

    Raises:
      UsageError: the numbers of examples differ.
    """
    size, rank = values.shape[:1], values.shape.rank
    if rank == 0 or not examples.shape[:1].is_compatible_with(size):
        raise UsageError(
            f"the data has weights, one for each of {examples.shape[0] or 'the'} examples, and crankshaft.mean got "
            f"values of shape {values.shape}; give values whose first axis is the examples"
        )
    examples = tf.broadcast_to(tf.reshape(examples, [-1] + [1] * (rank - 1)), tf.shape(values))
    return examples if weights is None else tf.cast(weights, tf.float32) * examples


def as_pair(pair: Any, owner: str, weights: Any = None, is_loss: bool = False, check_values: bool = False) -> Any:
    """Converts a pair (total, count) to its kind, with scalar float32 tensors; a plain tuple becomes a `Mean`.

    Args:
      owner: the method that returned it, for messages.
      weights: the examples' weights, float32 [batch], by which the pair is weighted; None if there are none.
      is_loss: whether weights that can't be applied are an error; a metric without values of examples stays as it is.
      check_values: whether to add asserts.

    Raises:
      UsageError: it is not a pair, or weights can't be applied to it.
    """
    weigh = getattr(pair, "weigh", None)
    if weights is not None and is_loss and weigh is None:
        raise UsageError(
            f"{owner}: the data has weights, and its pair was not made by crankshaft.mean, so they can't be applied; "
            "return crankshaft.mean(losses), all that belongs to an example added up before"
        )
    if weights is not None and weigh:
        pair = weigh(weights)
    if isinstance(pair, tf.keras.metrics.Metric):
        raise UsageError(
            f"{owner}: a Keras metric is not a pair; keep self.{pair.name} = crankshaft.KerasMetric(metric), made in "
            f"__init__ or build, and return self.{pair.name}(labels, predictions)"
        )
    if not isinstance(pair, (Auc, SumOfMeans)):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UsageError(f"{owner}: a {type(pair).__name__} is not a pair (total, count); {_suggestion(pair)}")
        kind = type(pair) if isinstance(pair, Pair) else Mean
        total, count = (tf.cast(part, tf.float32) for part in pair)
        if kind.is_vector and count.shape.rank == 0:
            count = tf.broadcast_to(count, tf.shape(total))
        ranks, sizes = {x.shape.rank for x in (total, count)}, {x.shape.num_elements() for x in (total, count)}
        if ranks != {1} or len(sizes) != 1 or None in sizes if kind.is_vector else not ranks <= {None, 0}:
            wanted = "vectors of one fixed length" if kind.is_vector else "scalars: use crankshaft.mean(values)"
            raise UsageError(f"{owner}: total and count are of shape {total.shape} and {count.shape}, not {wanted}")
        pair = kind(total, count)
    if check_values:
        message = f"{owner}: its count is negative or not finite; count examples, or add weights up"
        tf.debugging.Assert(tf.logical_and(pair.count >= 0, tf.math.is_finite(pair.count)), [message, pair.count])
    return pair


def _suggestion(returned: Any) -> str:
    if isinstance(returned, (dict, tuple, list)):  # e.g. a loss per output, or the sum of two pairs
        return (
            "add up what belongs to an example, and return one pair: crankshaft.mean(losses + others); or, each over "
            "its own count, {'a': crankshaft.mean(losses), 'b': crankshaft.mean(others)}"
        )
    line = "return crankshaft.mean(values)"
    if tf.is_tensor(returned) and returned.shape.rank == 0:
        line += "; a Keras loss gives values with reduction=None, a Keras metric a pair by crankshaft.KerasMetric"
    return line


def as_losses(returned, owner: str, weights=None, check_values: bool = False) -> dict[str, Mean | SumOfMeans]:
    """Converts a loss by `as_pair`, a dictionary's each; returns `loss`, of several their sum, and each under its name.

    Raises:
      UsageError: one is not a mean, or a name can't be a metric's; the message begins with `owner`.
    """

    def loss(returned, owner, kinds):
        if isinstance(returned, Pair) and not isinstance(returned, kinds):
            raise UsageError(f"{owner} is a {type(returned).__name__}; return a crankshaft.mean(losses)")
        return as_pair(returned, owner, weights, True, check_values)

    if not isinstance(returned, dict):
        return {"loss": loss(returned, owner, (Mean, SumOfMeans))}
    means: dict[str, Mean] = {}
    for name, mean_of_it in returned.items():
        _check_name(name, owner)
        pair = loss(mean_of_it, f"{owner}[{name!r}]", Mean)
        means[name] = type(pair)(tf.where(pair.count == 0.0, 0.0, pair.total), pair.count)
    if not means:
        raise UsageError(f"{owner} returned an empty dictionary; return a mean by name: {{'a': crankshaft.mean(a)}}")
    sums = tf.stack([tf.stack([*pair]) for pair in means.values()])
    return {"loss": SumOfMeans(sums, tf.reduce_sum(sums[:, 1])), **means}


def _check_name(name: Any, owner: str) -> None:
    if not isinstance(name, str) or name in _ENGINES:
        raise UsageError(f"{owner}: {name!r} can't be the name of a metric; the engine's own are {_ENGINES}")


def checked(metrics: Any, owner: str, weights: Any = None) -> dict[str, Pair]:
    """Converts pairs by name, each by `as_pair`, with weights if any.

    Raises:
      UsageError: one is not a pair, or a name can't be a metric's; the message begins with `owner`.
    """
    if not isinstance(metrics, dict):
        raise UsageError(f"{owner} returned a {type(metrics).__name__}; return a dictionary of pairs, {{}} for none")
    for name in metrics:
        _check_name(name, owner)
    return {name: as_pair(pair, f"{owner}[{name!r}]", weights) for name, pair in metrics.items()}
