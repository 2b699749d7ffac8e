"""The kinds of (total, count) pairs, which merge exactly for any sizes of batches, global and local."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from . import ranking


class Pair(NamedTuple("Pair", [("total", Any), ("count", Any)])):
    """The base of all kinds of pairs, own ones too: two sums, whose `value` is the metric's.

    Both are added up over micro-batches, steps, replicas and workers, in float64. A checkpoint has the sums, and the
    value of a kind of one's own: never its class, which is the next step's.

    To type checkers what makes a metric returns a `Mean`, so that a user's `metrics` is a dict[str, Mean] of any kind.

    Args:
      total: the sum; a scalar, or [length] of a kind that `is_vector`.
      count: the number of things summed, or another sum.

    Attributes:
      weigh: recomputes the pair with the examples' weights, float32 [batch]; None if their values are unknown.
      has_weights: whether it was made with weights, which are multiplied by the examples'.
      direction: "max" or "min", the better one; None if unknown. TensorFlow unpacks named tuples and recreates them
        from their class, so this is an attribute of the class, as are those that follow.
      is_several: whether it may have several values: `value` returns a dictionary, shown as NAME_KEY.
      is_vector: whether both are vectors of one fixed length; a scalar count is then that of each entry.
      is_number: whether its value is shown.

    Example:
      >>> class Percent(Pair):
      ...     def value(self):
      ...         return 100 * self.total / self.count
      >>> Percent(3.0, 4.0).value()
      75.0
    """

    weigh: Callable[[tf.Tensor], Pair] | None = None
    has_weights = False
    direction: str | None = None
    is_several = is_vector = False
    is_number = True

    def value(self) -> Any:
        """Returns the value of the sums: a number, None for that of nothing. Override it.

        On the host: total and count are Python's floats, or NumPy's float64 [length] of a kind that `is_vector`.
        """
        raise UsageError(f"{type(self).__name__} defines no value(), the number that its total and count amount to")

    def mistake(self) -> str | None:
        """Returns the problem of the sums, if it makes the value wrong."""
        return None

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        """Returns the pair's own product with a NumPy number; other functions take the pair as a tuple."""
        if ufunc is np.multiply and method == "__call__":
            return self * next((x for x in inputs if x is not self), self)
        return getattr(ufunc, method)(*(tuple(x) if isinstance(x, Pair) else x for x in inputs), **options)

    def __mul__(self, factor: Any) -> Mean:
        _not_a_tensor(self)

    def __rmul__(self, factor: Any) -> Mean:
        return self * factor


def _not_a_tensor(pair: Pair, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"a {type(pair).__name__} is a pair (total, count), not a tensor; only a crankshaft.mean(losses) can be "
        "multiplied"
    )


# A tensor that is multiplied by what it can't convert leaves the product to it.
tf.register_tensor_conversion_function(Pair, _not_a_tensor, priority=0)


class Mean(Pair):
    """A sum and the number of things summed. Its value is total / count.

    Pairs are added over steps, replicas and workers before division, which is exact for uneven batches. Multiplying a
    mean by a number or a scalar tensor multiplies its total, and so its value.

    Args:
      total: scalar float32, the sum.
      count: scalar float32, the number of things summed, or the sum of their weights.

    Example:
      >>> Mean(total=6.0, count=4.0).value()
      1.5
    """

    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    def plus(self, total: tf.Tensor, count: tf.Tensor) -> Mean | SumOfMeans:
        """Returns the sum of this mean and another, which adds nothing where this is of nothing. Replica code."""
        if count is self.count:
            return Mean(self.total + total, count)
        return SumOfMeans(tf.stack([[self.total, self.count], [total, count]]), self.count)

    def __mul__(self, factor: Any) -> Mean:
        if type(self).value is not Mean.value:
            _not_a_tensor(self)
        pair = type(self)(self.total * factor, self.count)
        if weigh := self.weigh:
            pair.weigh, pair.has_weights = lambda examples: weigh(examples) * factor, self.has_weights
        return pair


class SumOfMeans(Pair):
    """Means whose sum is the value; those of nothing add 0.

    In a step total is float32 [means, 2], totals and counts, and count the sum of the loss's own; on the host both are
    [means].
    """

    is_vector = True

    def value(self) -> float | None:
        counted = self.count != 0
        return float((self.total[counted] / self.count[counted]).sum()) if counted.any() else None

    def plus(self, total: tf.Tensor, count: tf.Tensor) -> SumOfMeans:
        """Returns the pair with one more mean. Replica code."""
        return SumOfMeans(tf.concat([self.total, [[total, count]]], 0), self.count)


class RootMean(Mean):
    """A pair of squared errors, whose value is the root of their mean."""

    direction = "min"

    def value(self) -> float | None:
        return math.sqrt(self.total / self.count) if self.count else None


class ExpMean(Mean):
    """A pair whose value is e to the mean, at most e^709: for losses in nats, the perplexity."""

    direction = "min"

    def value(self) -> float | None:
        return float(np.exp(np.minimum(self.total / self.count, 709.0))) if self.count else None


class Auc(Pair):
    """Labels and weights by logit; its value is the area under the ROC curve.

    In a step both are sparse (`ranking.by_logit`). Training adds up a histogram of both, float32
    [ranking.BUCKETS + 1, 2], as total, with a count of 0; its area has an error. An evaluation keeps all of them, see
    `ExactAuc`.
    """

    direction = "max"
    is_vector = True

    def value(self) -> float | None:
        return math.nan if self.mistake() else self._area()[0]

    def error_bound(self) -> float:
        """Returns the bound of the value's error."""
        return self._area()[1] or 0.0

    def mistake(self) -> str | None:
        return _wrong(self.total[-1], self.count[-1])

    def _area(self) -> tuple:
        return ranking.area_of_histogram(*(np.asarray(x, np.float64) for x in self)) or (None, None)


class ExactAuc(Auc):
    """An evaluation's `Auc`: a `ranking.Ranking` as total, and a count of 0."""

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
    """The state of a Keras metric, sums float32 [values], and the number of updates in each entry.

    Created by a `KerasMetric`, whose own subclass knows the metric and computes its value.
    """

    is_several = is_vector = True

    def value(self) -> Any:
        return None  # the metric is no longer known

    @staticmethod
    def known(value: Any) -> type[KerasSums]:
        """Makes the class of sums whose value a checkpoint has, also of an own kind, until a step adds to them."""
        return type("KerasSums", (KerasSums,), {"value": lambda sums: value})


class Confusion(Pair):
    """Numbers of examples by label and prediction, float32 [classes * classes]; only evaluations add it up.

    The first count is that of labels that are no class.
    """

    is_vector, is_number = True, False

    def value(self) -> None:
        return None  # not a number

    def mistake(self) -> str | None:
        if not self.count[0]:
            return None
        return f"{self.count[0]:g} labels are not classes from 0 to {len(self.matrix()) - 1}; number them from 0"

    def matrix(self) -> np.ndarray:
        """Returns the numbers of examples, int64 [classes, classes]: rows are labels, columns predictions."""
        counts = np.asarray(self.total).astype(np.int64)
        return counts.reshape(math.isqrt(len(counts)), -1)


class Outside(Pair):
    """Sums of micro-batches' largest values above a range, and smallest below, with their counts."""

    is_vector, is_number = True, False

    def mistake(self) -> str | None:
        ends = (("the largest number is at least", 1), ("the least number is at most", -1))
        problems = [
            f"{'a number is' if batches == 1 else end} {sign * math.ceil(sign * total / batches)}"
            for (end, sign), total, batches in zip(ends, *self, strict=True)
            if batches
        ]
        return f"{' and '.join(problems)}, out of that range; correct the data, or allow for more" if problems else None
