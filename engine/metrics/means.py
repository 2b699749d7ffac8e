"""Metrics as (total, count) pairs, which merge exactly, whatever the sizes of batches and replicas' parts of them.

Replica code makes pairs; the inner loop adds them up on the device; host code merges the sums and finishes once.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from ..internals.errors import UsageError
from . import ranking


class Pair(NamedTuple("Pair", [("total", tf.Tensor), ("count", tf.Tensor)])):
    """The base of all kinds of pairs: a sum and a count.

    Attributes:
      weigh: a function that makes the pair again, each example counting by its weight, float32 [batch]; None where the
        examples' values are not known.
      has_weights: whether it was made with weights, which are multiplied by the examples'.
      direction: "max" or "min", the better one of its values; None if it is not known. TensorFlow takes named tuples
        apart and makes them again by their class, so this is the class's, and so is `is_several`.
      is_several: whether it may have several values, by names.
    """

    weigh: Callable[[tf.Tensor], Pair] | None = None
    has_weights = False
    direction: str | None = None
    is_several = False

    def mistake(self) -> str | None:
        """Returns what is wrong with what was summed, if it makes the value wrong. Host code."""
        return None


class Mean(Pair):
    """A sum and the number of things summed. Its value is total / count.

    Pairs are added over steps, replicas and workers before they are divided: that is exact on uneven batches.

    Args:
      total: scalar float32, the sum.
      count: scalar float32, the number of things summed, or the sum of their weights.

    Example:
      >>> Mean(total=6.0, count=4.0).value()
      1.5
    """

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class RootMean(Mean):
    """A pair of squares, of errors: its value is the root of their mean."""

    direction = "min"

    def value(self) -> float | None:
        return math.sqrt(self.total / self.count) if self.count else None


class ExpMean(Mean):
    """A pair whose value is e to the mean, e^709 at most: of losses in nats, the perplexity."""

    direction = "min"

    def value(self) -> float | None:
        return float(np.exp(np.minimum(self.total / self.count, 709.0))) if self.count else None


class Auc(Pair):
    """Labels and weights by logit; its value is the area under the ROC curve.

    In a step both are sparse (`ranking.by_logit`). Training adds up a histogram of both, float32
    [ranking.BUCKETS + 1, 2], as total and a count of 0, and the host has its columns; its area has an error. An
    evaluation keeps them all, see `ExactAuc`.
    """

    direction = "max"

    def value(self) -> float | None:
        return math.nan if self.mistake() else self._area()[0]

    def error_bound(self) -> float:
        """Returns the most that the value may be off by."""
        return self._area()[1] or 0.0

    def mistake(self) -> str | None:
        return _wrong(self.total[-1], self.count[-1])

    def _area(self) -> tuple:
        return ranking.area_of_histogram(*(np.asarray(x, np.float64) for x in self)) or (None, None)


class ExactAuc(Auc):
    """What an evaluation has kept of an `Auc`: a `ranking.Ranking` as total, and a count of 0. Host code."""

    def mistake(self) -> str | None:
        return _wrong(*self.total.wrong)

    def _area(self) -> tuple:
        return self.total.area() or (None, None)


def _wrong(total: float, count: float) -> str | None:
    if not count:
        return None
    shown = f"{total / count:{'g' if total % count else '.0f'}}"
    which = f"{count:g} labels are {shown} on average" if count > 1 else f"a label is {shown}"
    return f"{which}, not 0 or 1; give labels of two classes, and give them first: auc(labels, logits)"


class KerasSums(Pair):
    """The state of a Keras metric that is made of sums, float32 [values], and its number of updates, in each entry.

    It is made by a `KerasMetric`, whose own subclass knows the metric and gives its value.
    """

    is_several = True

    def value(self) -> None:
        return None  # the metric is not known any more


class Confusion(Pair):
    """Numbers of examples by label and prediction, float32 [classes * classes], which an evaluation alone adds up.

    The first count is that of labels which are none of the classes.
    """

    def value(self) -> None:
        return None  # it is no number

    def mistake(self) -> str | None:
        if not self.count[0]:
            return None
        return f"{self.count[0]:g} labels are not classes from 0 to {len(self.matrix()) - 1}; number them from 0"

    def matrix(self) -> np.ndarray:
        """Returns the numbers of examples, int64 [classes, classes]: a row a label, a column a prediction."""
        counts = np.asarray(self.total).astype(np.int64)
        return counts.reshape(math.isqrt(len(counts)), -1)


class Outside(Pair):
    """Sums of the largest number above a range, and of the least below, of parts of batches; counts of such parts."""

    def mistake(self) -> str | None:
        ends = (("the largest number is at least", 1), ("the least number is at most", -1))
        found = [
            f"{'a number is' if parts == 1 else end} {sign * math.ceil(sign * total / parts)}"
            for (end, sign), total, parts in zip(ends, *self, strict=True)
            if parts
        ]
        return f"{' and '.join(found)}, out of that range; correct the data, or allow for more" if found else None


# Kinds beside Mean, by the name that a row of sums carries. Those of several rows hold vectors.
_KINDS: dict[str, type[Pair]] = {"root_mean": RootMean, "exp_mean": ExpMean, "auc": Auc, "keras": KerasSums}
_KINDS |= {"confusion": Confusion, "outside": Outside}
_VECTORS, _NO_NUMBERS = (Auc, KerasSums, Confusion, Outside), (Confusion, Outside)
FEW_CLASSES = 100  # of so many a confusion matrix costs next to nothing
_ENGINES = ("loss", "loss_with_penalties", "gradient_norm", "skipped")  # names of metrics that are the engine's
_ONE_NUMBER = (
    "crankshaft.mean was given one number for a batch, which counts as one example, however large the batch is; give "
    "one value an example (Keras losses: reduction=None), or say crankshaft.Mean(number, 1.0) if that is what is meant"
)


@functools.cache
def _directed(direction: str | None) -> type[Mean]:
    if direction not in (None, "max", "min"):
        raise UsageError(f"direction={direction!r} is unknown; use 'max' or 'min', or leave it out")
    return type("Mean", (Mean,), {"direction": direction}) if direction else Mean


def mean(values, weights=None, direction: str | None = None) -> Mean:
    """Makes the pair for a tensor of per-example values.

    Where the data has weights (`step.batches`), the results of `Trainer.loss` and `Trainer.metrics` are made again with
    them: each example's values count by its weight.

    Args:
      values: tensor of any shape and numeric or bool dtype, one entry an example (or a token, a pixel).
      weights: None, or a tensor that broadcasts to `values`. An entry of weight 0 does not count, NaN or infinite too,
        and its gradient here is 0. What computed it still makes NaN of that, as the square of a NaN does: put a finite
        number instead of such labels first, loss(tf.where(weights > 0, labels, 0.0)). Labels under the data's own
        weights need not be.
      direction: "max" if a higher mean is better, as of an accuracy, or "min"; `monitor` goes by it.

    Returns:
      Mean(sum of values, number of values), or the weighted sum and the sum of weights. Both are 0 for an empty
      batch, which therefore weighs nothing.

    Example:
      >>> pair = mean([1.0, 2.0, 6.0])
      >>> float(pair.total), float(pair.count)
      (9.0, 3.0)
    """
    values, kind = tf.cast(values, tf.float32), _directed(direction)

    def weigh(examples):
        return mean(values, combined(weights, examples, values), direction)

    if weights is None:
        if values.shape.rank == 0:
            logging.log_first_n(logging.WARNING, _ONE_NUMBER, 1)
        pair = kind(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))
        return weighable(pair, weigh)
    spread = tf.broadcast_to(tf.cast(weights, tf.float32), tf.shape(values))
    values = tf.where(spread == 0.0, 0.0, values)  # an entry without weight may be anything: padding often is
    pair = kind(tf.reduce_sum(values * spread), tf.reduce_sum(spread))
    return weighable(pair, weigh, has_weights=True)


def root_mean_square(values, weights=None) -> RootMean:
    """Makes the pair for the root of the mean of squares.

    Args:
      values: see `mean`.
      weights: see `mean`.

    Example:
      >>> pair = root_mean_square([3.0, 5.0])  # of errors, say
      >>> float(pair.total), float(pair.count)
      (34.0, 2.0)
    """
    return _of_kind(RootMean, mean(tf.square(tf.cast(values, tf.float32)), weights))


def exp_mean(values, weights=None) -> ExpMean:
    """Makes the pair for e to the mean, such as the perplexity of losses. Arguments as `mean`'s."""
    return _of_kind(ExpMean, mean(values, weights))


def _of_kind(kind: type[Mean], pair: Mean):
    return weighable(kind(*pair), lambda examples: kind(*pair.weigh(examples)), pair.has_weights)


def auc(labels, logits, weights=None) -> Auc:
    """Makes the pair for the area under the ROC curve of a binary classifier.

    An evaluation's is exact, up to some 10^7 examples: the share of (positive, negative) pairs that are in the right
    order, those of one logit counting half. In training, and beyond, it has an error, and NAME_error_bound, the most
    that it may be, is shown beside it.

    Args:
      labels: any shape, 0 or 1, one an example; any other label ends the run.
      logits: of the same shape; sigmoid(logits) is the predicted probability. Those that are not finite do not count.
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
    return weighable(pair, lambda its: auc(labels, scores, combined(weights, its, scores)), weights is not None)


def confusion_matrix(labels, predictions, mask=None) -> Confusion:
    """Makes the pair for the confusion matrix of a classifier, of which an evaluation's report by class is computed.

    Each example counts as one, whatever it weighs. Steps of training leave it out, and so cost nothing more.

    Args:
      labels: integers [batch, ...], from 0 to below the number of classes.
      predictions: [batch, ..., classes], of which the largest is the class that is predicted.
      mask: None, or bool of the shape of `labels`: False where a label does not count, such as padding, whatever it is.

    Example:
      >>> pair = confusion_matrix([0, 1, 1], [[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
      >>> pair.matrix().tolist()  # of the two examples of class 1 one is taken for 0
      [[1, 0], [1, 1]]
    """
    predictions = tf.convert_to_tensor(predictions)
    classes = predictions.shape[-1]
    labels = tf.reshape(tf.cast(labels, tf.int64), [-1])  # int32 is the host's, beside GPUs
    predicted = tf.reshape(tf.argmax(predictions, axis=-1), [-1])
    known = (labels >= 0) & (labels < classes)
    counted = tf.ones_like(known) if mask is None else tf.reshape(tf.cast(mask, tf.bool), [-1])
    places = tf.where(known & counted, labels * classes + predicted, -1)  # of which nothing is counted
    counts = tf.math.unsorted_segment_sum(tf.ones_like(labels, tf.float32), places, classes * classes)
    unknown = tf.reduce_sum(tf.cast(counted & ~known, tf.float32))
    return Confusion(counts, tf.pad(unknown[tf.newaxis], [[0, classes * classes - 1]]))


def scaled(pair: Mean, factors: tf.Tensor) -> Mean:
    """Multiplies each example's values in a pair of `mean` by its factor, float32 [batch]; the count stays.

    Raises:
      UsageError: the pair was not made by `mean`.
    """
    if pair.weigh is None:
        raise UsageError("a loss whose examples are to be weighed has to be made by crankshaft.mean(losses)")

    def weigh(examples):
        return Mean(pair.weigh(factors * examples).total, pair.weigh(examples).count)

    return weighable(Mean(pair.weigh(factors).total, pair.count), weigh, pair.has_weights)


def weighable(pair, weigh, has_weights: bool = False):
    """Sets how the pair is made again with weights, see `Pair`, and returns it."""
    pair.weigh, pair.has_weights = weigh, has_weights
    return pair


def combined(weights, examples: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns the examples' weights [batch] in the shape of their values [batch, ...], times the values' own weights.

    Raises:
      UsageError: there are not as many examples.
    """
    size, rank = values.shape[:1], values.shape.rank
    if rank == 0 or not examples.shape[:1].is_compatible_with(size):
        raise UsageError(
            f"the data has weights, one for each of {examples.shape[0] or 'the'} examples, and crankshaft.mean was "
            f"given values of shape {values.shape}; give values whose first axis is the examples"
        )
    examples = tf.broadcast_to(tf.reshape(examples, [-1] + [1] * (rank - 1)), tf.shape(values))
    return examples if weights is None else tf.cast(weights, tf.float32) * examples


def as_pair(pair, where: str, weights=None) -> Pair:
    """Converts a pair (total, count) to its kind, with scalar float32 tensors; a plain one becomes a `Mean`.

    With the examples' `weights`, float32 [batch], it is weighed by them; a pair that was not made by a function of this
    module stays as it is.

    Raises:
      UsageError: it is not a pair; the message begins with `where` it came from.
    """
    if weights is not None and getattr(pair, "weigh", None):
        pair = pair.weigh(weights)
    if isinstance(pair, _VECTORS):
        return pair
    if isinstance(pair, tf.keras.metrics.Metric):
        raise UsageError(
            f"{where}: a Keras metric is not a pair; keep self.{pair.name} = crankshaft.KerasMetric(metric), made in "
            f"__init__ or build, and return self.{pair.name}(labels, predictions)"
        )
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise UsageError(f"{where}: a {type(pair).__name__} is not a pair (total, count); {_instead(pair)}")
    total, count = (tf.cast(part, tf.float32) for part in pair)
    for name, part in (("total", total), ("count", count)):
        if part.shape.rank not in (None, 0):
            raise UsageError(
                f"{where}: its {name} is not a scalar, but of shape {part.shape}; use crankshaft.mean(values)"
            )
    return (type(pair) if isinstance(pair, Mean) else Mean)(total, count)


def _instead(returned) -> str:
    """Returns what to return in place of something that is not a pair."""
    if isinstance(returned, (dict, tuple, list)):  # such as a loss for each output, or the sum of two pairs
        return "add up what belongs to an example, and return one pair: crankshaft.mean(losses + others)"
    line = "return crankshaft.mean(values)"
    if tf.is_tensor(returned) and returned.shape.rank == 0:
        line += "; a Keras loss gives values with reduction=None, a Keras metric a pair by crankshaft.KerasMetric"
    return line


def as_loss(pair, where: str, weights=None, check_values: bool = False) -> Mean:
    """Converts a loss by `as_pair`; ValueError where weights can't be applied to it. `check_values` adds asserts."""
    if weights is not None and not getattr(pair, "weigh", None):
        raise UsageError(
            f"{where}: the data has weights, and its pair was not made by crankshaft.mean, so they can't be applied; "
            "return crankshaft.mean(losses), all that belongs to an example added up before"
        )
    pair = as_pair(pair, where, weights)
    if check_values:
        message = f"{where}: its count is negative or not finite; count examples, or add weights up"
        tf.debugging.Assert(tf.logical_and(pair.count >= 0, tf.math.is_finite(pair.count)), [message, pair.count])
    return pair


def checked(metrics, where: str, weights=None) -> dict[str, Pair]:
    """Converts pairs by name, each by `as_pair`, weighed if there are weights.

    Raises:
      UsageError: one is not a pair, or a name can't be a metric's; the message begins with `where`.
    """
    if not isinstance(metrics, dict):
        raise UsageError(f"{where} returned a {type(metrics).__name__}; return a dictionary of pairs, {{}} for none")
    for name in metrics:
        if not isinstance(name, str) or name in _ENGINES or _named_kind(name)[1] is not Mean:
            raise UsageError(f"{where}: {name!r} can't be the name of a metric; the engine's own are {_ENGINES}")
    return {name: as_pair(pair, f"{where}[{name!r}]", weights) for name, pair in metrics.items()}


def folded(metrics: dict[str, Pair]) -> dict[str, Pair]:
    """Returns what training adds up: a histogram in place of an `Auc`'s sparse parts, and no confusion matrix."""

    def dense(pair):
        sparse = isinstance(pair, Auc) and isinstance(pair.total, tf.IndexedSlices)
        return Auc(ranking.histogram(*pair), tf.zeros([])) if sparse else pair

    return {name: dense(pair) for name, pair in metrics.items() if not isinstance(pair, Confusion)}


def stack(metrics: dict[str, Mean], dtype: tf.DType, keeps_scores: bool = False) -> tf.Tensor:
    """Stacks the pairs into one [rows, 2] tensor, ordered as `row_names`: a row a metric, or a row a vector's entry.

    The inner loop carries it in float64: a sum of so many float32 values is then exact for all practical lengths, so it
    does not depend on where the loop was cut.

    With `keeps_scores` an `Auc` has one row, which stays 0, and the rows of `ranking.entries` come after those with
    names; they are not to be added up, but joined.
    """
    scalars, vectors = _in_order(metrics)
    rows = [tf.stack([tf.cast(tf.stack(metrics[name]), dtype) for name in scalars])] if scalars else []
    scores: list[tf.Tensor] = []
    for name in vectors:
        pair = metrics[name]
        if keeps_scores and isinstance(pair, Auc):
            rows.append(tf.zeros([1, 2], dtype))
            scores.append(ranking.entries(len(scores), *pair, dtype))
        elif isinstance(pair, Auc):
            rows.append(tf.cast(folded({name: pair})[name].total, dtype))
        else:
            rows.append(tf.cast(tf.stack(pair, axis=1), dtype))
    rows += scores
    return rows[0] if len(rows) == 1 else tf.concat(rows, 0)


class RowName(str):
    """The name of a row of sums, which knows the row's kind of pair."""

    __slots__ = ("kind",)
    kind: type[Pair]


def row_names(metrics: dict[str, Mean], keeps_scores: bool = False) -> list[RowName]:
    """Names each row of `stack`: the metric's name; for other kinds than `Mean` with the kind before it."""
    scalars, vectors = _in_order(metrics)
    names = [_row_name(name, metrics[name]) for name in scalars]
    for name in vectors:
        pair = metrics[name]
        rows = (1 if keeps_scores else ranking.BUCKETS + 1) if isinstance(pair, Auc) else pair.total.shape[0]
        names += [_row_name(name, pair)] * rows
    return names


def keep_scores(names: Sequence[str]) -> bool:
    """Returns whether scores come after the rows of these names."""
    return any(issubclass(_named_kind(name)[1], Auc) and names.count(name) == 1 for name in dict.fromkeys(names))


def _in_order(metrics: dict) -> tuple[list[str], list[str]]:
    names = sorted(metrics)
    vectors = [name for name in names if isinstance(metrics[name], _VECTORS)]
    return [name for name in names if name not in vectors], vectors


def _row_name(name: str, pair) -> RowName:
    row_name = RowName(next((f"{key}:{name}" for key, kind in _KINDS.items() if isinstance(pair, kind)), name))
    row_name.kind = type(pair)
    return row_name


def _named_kind(row_name: str) -> tuple[str, type[Pair]]:
    """Returns (the metric's name, the kind of its pairs): a plain string knows no Keras metric."""
    key, colon, name = row_name.partition(":")
    name, kind = (name, _KINDS[key]) if colon and key in _KINDS else (str(row_name), Mean)
    return name, getattr(row_name, "kind", kind)


def kinds_of(row_names: Sequence[str]) -> dict[str, type[Pair]]:
    """Returns the kinds of the metrics of some rows that are numbers, by name."""
    return {name: kind for name, kind in map(_named_kind, row_names) if not issubclass(kind, _NO_NUMBERS)}


def values_by_name(pairs: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns values by name, a vector's as NAME_0 and so on, a dictionary's as NAME_KEY; None of a mean of nothing.

    Left out are confusion matrices, numbers out of range, a gradients' norm that no step has measured, and a Keras
    metric of a checkpoint that no step has added to.
    """
    results: dict[str, float | None] = {}
    for name, pair in pairs.items():
        if isinstance(pair, _NO_NUMBERS) or type(pair) is KerasSums or (name == "gradient_norm" and not pair.count):
            continue
        value = pair.value()
        results |= {f"{name}_{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
        if isinstance(pair, Auc) and (bound := pair.error_bound()):
            results[f"{name}_error_bound"] = bound
    return results


def or_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns numbers by name, nan for None."""
    return {name: math.nan if value is None else value for name, value in values.items()}


class Sums:
    """The sums of some steps, held as the device returned them until they are read. Host code.

    Adding does not wait for a device: it reads only steps that are long done. Reading waits.

    Args:
      values: what `host_state` returned.
    """

    COLLAPSE_AT = 64  # of so many unread tensors all but the newest are added up: it bounds a long window's memory
    IN_FLIGHT = 2  # tensors that a device may still be computing

    def __init__(self, values: dict[str, tuple] | None = None):
        named = [(*_named_kind(row_name), pair) for row_name, pair in (values or {}).items()]
        self._values = {name: kind(*(np.array(x) if isinstance(x, list) else x for x in p)) for name, kind, p in named}
        self._unread: list[LoopSums] = []

    def add(self, sums: LoopSums) -> None:
        """Adds one call's sums, without reading them."""
        self._unread.append(sums)
        if len(self._unread) >= self.COLLAPSE_AT:
            self._read_all_but(self.IN_FLIGHT)

    def values(self) -> dict[str, Pair]:
        """Returns the pair (total, count), of its kind, float64, by name. Waits for the steps that were added."""
        self._read_all_but(0)
        return dict(self._values)

    def host_state(self) -> dict[str, list]:
        """Returns the values as JSON takes them. Waits as `values` does."""
        return {
            str(_row_name(name, pair)): [x.tolist() if isinstance(x, np.ndarray) else x for x in pair]
            for name, pair in self.values().items()
        }

    def exchange_scores(self, exchange_bytes: Callable[[bytes], list[bytes]]) -> None:
        """Joins the scores that this process has kept with those of the others that train with it; all have to call it.

        Args:
          exchange_bytes: `Processes.exchange_bytes`.
        """
        for name, pair in self.values().items():
            if isinstance(pair, ExactAuc):
                everyones = map(ranking.Ranking.from_bytes, exchange_bytes(pair.total.to_bytes()))
                self._values[name] = ExactAuc(functools.reduce(operator.add, everyones), 0.0)

    def _read_all_but(self, newest: int) -> None:
        done = len(self._unread) - newest
        for sums in self._unread[:done]:
            for name, pair in sums.read().items():
                old = self._values.get(name)
                same = old is not None and np.shape(old[0]) == np.shape(pair[0])  # else what was kept is of another
                self._values[name] = type(pair)(old[0] + pair[0], old[1] + pair[1]) if same else pair
        del self._unread[:done]

    def means(self) -> dict[str, float]:
        """Returns `values_by_name` of the values, nan for None. Waits as `values` does."""
        return or_nan(values_by_name(self.values()))


class LoopSums:
    """The result of one call of the inner loop: a [rows, 2] tensor, and `row_names`. Read at most once.

    Rows that have no name are scores, see `stack`.
    """

    def __init__(self, names: list[str], tensor: tf.Tensor):
        self.names, self._tensor = names, tensor
        self._read: dict[str, Pair] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host has the values, and need not wait for them."""
        return self._read is not None

    def read(self) -> dict[str, Pair]:
        """Returns the pair (total, count), of its kind, by name."""
        if self._read is None:
            array = np.asarray(self._tensor, np.float64)
            scores = array[len(self.names) :].reshape(-1, 4)
            pairs: dict[str, Pair] = {}
            start, kept = 0, itertools.count()
            for row_name, rows in itertools.groupby(self.names):
                (name, kind), stop = _named_kind(row_name), start + sum(1 for _ in rows)
                if issubclass(kind, Auc) and stop == start + 1:
                    pairs[name] = ExactAuc(ranking.Ranking(scores[scores[:, 0] == next(kept), 1:]), 0.0)
                else:
                    part = array[start:stop].T if issubclass(kind, _VECTORS) else map(float, array[start])
                    pairs[name] = kind(*part)
                start = stop
            self._read = pairs  # at once: threads read it too
        return self._read
