"""Sums of metrics, which the inner loop adds up on the device; merged and evaluated on the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from . import ranking
from .pairs import Auc, Confusion, ExactAuc, ExpMean, KerasSums, Mean, Outside, Pair, RootMean, SumOfMeans

# The kinds of pairs by their names in a checkpoint, where others are "own": each has its own `value`.
_KINDS: dict[str, type[Pair]] = {"root_mean": RootMean, "exp_mean": ExpMean, "auc": Auc, "keras": KerasSums}
_KINDS |= {"confusion": Confusion, "outside": Outside, "sum_of_means": SumOfMeans, "mean": Mean}


class SumSpec(NamedTuple):
    """Describes the sums of one metric: (total, count) pairs that follow each other in a tensor.

    Attributes:
      size: the number of pairs: one, or one for each entry of a vector.
    """

    name: str
    kind: type[Pair]
    size: int = 1

    @property
    def keeps_scores(self) -> bool:
        """Whether the metric's scores come after all sums, see `stack`."""
        return issubclass(self.kind, Auc) and self.size == 1


def without_details(metrics: dict[str, Pair]) -> dict[str, Pair]:
    """Returns the pairs that training adds up: a histogram for an `Auc`, and no confusion matrix."""
    kept = {name: pair for name, pair in metrics.items() if not isinstance(pair, Confusion)}
    for name, pair in kept.items():
        if isinstance(pair, Auc) and isinstance(pair.total, tf.IndexedSlices):
            kept[name] = Auc(ranking.histogram(*pair), tf.zeros([]))
    return kept


def stack(metrics: dict[str, Mean], dtype: tf.DType, keeps_scores: bool = False) -> tf.Tensor:
    """Stacks the pairs into one [sums, 2] tensor, ordered as `sum_specs`: one per metric, or per entry of a vector.

    The inner loop carries it in float64: a call's sums of float32 values are then exact, unless a value is 2^29 times
    another. Calls are added by `Sums`, so results don't depend on how the loop was divided into calls.

    With `keeps_scores` an `Auc` has one pair, which stays 0, and the values of `ranking.entries` follow the sums of all
    metrics; these are concatenated, not added up.
    """
    scalars, vectors = _in_order(metrics)
    sums = [tf.stack([tf.cast(tf.stack([*metrics[name]]), dtype) for name in scalars])] if scalars else []
    scores: list[tf.Tensor] = []
    for name in vectors:
        pair = metrics[name]
        if keeps_scores and isinstance(pair, Auc):
            sums.append(tf.zeros([1, 2], dtype))
            scores.append(ranking.entries(len(scores), *pair, dtype))
        elif isinstance(pair, (Auc, SumOfMeans)):
            sums.append(tf.cast(without_details({name: pair})[name].total, dtype))
        else:
            sums.append(tf.cast(tf.stack([*pair], axis=1), dtype))
    sums += scores
    if not sums:
        return tf.zeros([0, 2], dtype)
    return sums[0] if len(sums) == 1 else tf.concat(sums, 0)


def sum_specs(metrics: dict[str, Mean], keeps_scores: bool = False) -> list[SumSpec]:
    """Describes the sums of `stack`, in order."""
    scalars, vectors = _in_order(metrics)

    def size(pair: Any) -> int:
        if isinstance(pair, Auc):
            return 1 if keeps_scores else ranking.BUCKETS + 1
        return pair.total.shape[0]

    specs = [SumSpec(name, type(metrics[name])) for name in scalars]
    return specs + [SumSpec(name, type(metrics[name]), size(metrics[name])) for name in vectors]


def num_sums(specs: Sequence[SumSpec]) -> int:
    """Returns the number of sums, without scores."""
    return sum(spec.size for spec in specs)


def _in_order(metrics: dict) -> tuple[list[str], list[str]]:
    names = sorted(metrics)
    vectors = [name for name in names if metrics[name].is_vector]
    return [name for name in names if name not in vectors], vectors


def kinds_by_name(specs: Sequence[SumSpec]) -> dict[str, type[Pair]]:
    """Returns the kinds of the metrics that are numbers, by name."""
    return {spec.name: spec.kind for spec in specs if spec.kind.is_number}


def values_by_name(pairs: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns values by name: vectors as NAME_0, ..., dictionaries as NAME_KEY; None for a mean of nothing.

    Omits confusion matrices, numbers out of range, and a gradient norm or a Keras metric that no step has updated.
    """
    results: dict[str, float | None] = {}
    for name, pair in pairs.items():
        if not pair.is_number or type(pair) is KerasSums or (name == "gradient_norm" and not pair.count):
            continue
        value = _value(pair)
        results |= {f"{name}_{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
        if isinstance(pair, Auc) and (bound := pair.error_bound()):
            results[f"{name}_error_bound"] = bound
    return results


def _value(pair: Pair) -> Any:
    """The pair's value with Python's numbers; an own kind's may be NumPy's."""
    value = pair.value()
    if isinstance(value, dict):
        return {key: x if x is None else float(x) for key, x in value.items()}
    return value if value is None else float(value)


def nan_if_missing(values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns numbers by name, NaN for None."""
    return {name: math.nan if value is None else value for name, value in values.items()}


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CallResult(Protocol[T_co]):
    """The result of a call of the inner loop; reading it waits for the device."""

    @property
    def is_read(self) -> bool: ...

    def read(self) -> T_co: ...


@dataclasses.dataclass(frozen=True)
class KnownResult(Generic[T]):  # not a NamedTuple: Python 3.10 allows no generic ones
    """A value on the host, instead of one on a device."""

    values: T
    is_read: bool = True

    def read(self) -> T:
        return self.values


class LazyMerge(Generic[T]):
    """The results of several calls, merged when read. Override `_joined`.

    Adding does not wait for a device: it reads only calls that have long completed. Reading waits.
    """

    COLLAPSE_AT = 64  # at this number, all but the newest results are merged: bounds the memory
    IN_FLIGHT = 2  # calls that a device may still be computing

    def __init__(self, values: T | None = None):
        self._results: list[CallResult[T]] = [] if values is None else [KnownResult(values)]

    def add(self, result: CallResult[T]) -> None:
        """Adds the result of a call, without reading it."""
        self._results.append(result)
        if len(self._results) >= self.COLLAPSE_AT:
            self._join(len(self._results) - self.IN_FLIGHT)

    def extend(self, other: LazyMerge[T]) -> None:
        """Adds the results of later calls, without waiting for a device; `other` keeps them, too."""
        other._join(sum(1 for _ in itertools.takewhile(lambda result: result.is_read, other._results)))
        for result in other._results:
            self.add(result)

    def _read(self, nothing: T) -> T:
        self._join(len(self._results))
        return self._results[0].read() if self._results else nothing

    def _join(self, oldest: int) -> None:
        if oldest > 1:
            read = (result.read() for result in self._results[:oldest])
            self._results[:oldest] = [KnownResult(functools.reduce(self._joined, read))]

    def _joined(self, older: T, newer: T) -> T:
        raise NotImplementedError


class _Sum(NamedTuple):
    """A pair of sums in float64, and the error of rounding each to it."""

    pair: Pair
    error: tuple[Any, Any] = (0.0, 0.0)


class Sums(LazyMerge[Mapping[str, "_Sum | Pair"]]):
    """The sums of some steps, kept as the device returned them until they are read.

    Calls are added in twice the precision of float64, so that the sums do not depend on which are merged first: windows
    begin at times, and a run that was resumed has other windows.

    Args:
      values: the result of `host_state`.
    """

    def __init__(self, values: Mapping[str, Sequence] | None = None):
        sums = {}
        for name, (kind, *numbers) in (values or {}).items():
            total, count, *errors = (np.array(x) if isinstance(x, list) else x for x in numbers)
            made = KerasSums.known(errors.pop()["value"]) if errors and isinstance(errors[-1], dict) else _KINDS[kind]
            sums[name] = _Sum(made(total, count), (errors[0], errors[1]) if errors else (0.0, 0.0))
        super().__init__(sums or None)

    def values(self) -> dict[str, Pair]:
        """Returns the pairs (total, count), each of its kind, float64, by name. Waits for the added steps."""
        return {name: _with_error(result).pair for name, result in self._read({}).items()}

    def host_state(self) -> dict[str, list]:
        """Returns a JSON value: each pair's kind, total, count, and their errors if any is not 0. Waits as `values`.

        Last also the value of a Keras metric or an own kind, which only a step that is traced knows how to compute.
        """
        state = {}
        for name, (pair, error) in ((name, _with_error(result)) for name, result in self._read({}).items()):
            kind = next((key for key, kind in _KINDS.items() if type(pair).value is kind.value), "own")
            numbers = [*pair, *error] if any(map(np.any, error)) else pair
            state[name] = [kind, *(x.tolist() if isinstance(x, np.ndarray) else x for x in numbers)]
            if kind == "own":
                state[name].append({"value": _value(pair)})
        return state

    def exchange_scores(self, exchange_bytes: Callable[[bytes], list[bytes]]) -> None:
        """Merges this process's scores with those of the other training processes; all must call it.

        Args:
          exchange_bytes: `Processes.exchange_bytes`.
        """
        values = self.values()
        for name, pair in values.items():
            # Scores alone: all other sums are those of all processes, by the exchange that ends each call.
            if isinstance(pair, ExactAuc):
                rankings = map(ranking.Ranking.from_bytes, exchange_bytes(pair.total.to_bytes()))
                values[name] = ExactAuc(functools.reduce(operator.add, rankings), 0.0)
        self._results = [KnownResult(values)]

    def means(self) -> dict[str, float]:
        """Returns `values_by_name` of the values, NaN for None. Waits as `values`."""
        return nan_if_missing(values_by_name(self.values()))

    def _joined(self, older: Mapping[str, _Sum | Pair], newer: Mapping[str, _Sum | Pair]) -> dict[str, _Sum | Pair]:
        joined = dict(older)
        for name, added in newer.items():
            old = older.get(name)
            joined[name] = added if old is None else _added(_with_error(old), _with_error(added))
        return joined


def _with_error(value: _Sum | Pair) -> _Sum:
    return value if isinstance(value, _Sum) else _Sum(value)


def _added(old: _Sum, new: _Sum) -> _Sum:
    """Adds sums in twice the precision of float64; returns `new` if it is of another metric."""
    if np.shape(old.pair.total) != np.shape(new.pair.total):
        return new
    if isinstance(new.pair, ExactAuc):
        return _Sum(ExactAuc(old.pair.total + new.pair.total, 0.0))
    sums = [_two_sum(*numbers) for numbers in zip(old.pair, old.error, new.pair, new.error, strict=True)]
    return _Sum(type(new.pair)(*(total for total, _ in sums)), (sums[0][1], sums[1][1]))


def _two_sum(a: Any, a_error: Any, b: Any, b_error: Any) -> tuple[Any, Any]:
    """Returns the float64 sum of two numbers or arrays with errors, and its error (Knuth's two-sum)."""
    rounded = a + b
    from_b = rounded - a
    error = (a - (rounded - from_b)) + (b - from_b) + (a_error + b_error)
    total = rounded + error
    error = error - (total - rounded)
    # The error of an infinite sum is NaN, which would make the sum NaN, too.
    if isinstance(total, float):
        return (total, error) if math.isfinite(total) else (rounded, 0.0)
    finite = np.isfinite(total)
    return np.where(finite, total, rounded), np.where(finite, error, 0.0)


class LoopSums:
    """The result of one call of the inner loop: a [sums, 2] tensor, and their specs. Read at most once.

    After the sums of `specs` come scores, see `stack`.
    """

    def __init__(self, specs: Sequence[SumSpec], tensor: tf.Tensor | np.ndarray):
        self.specs, self._tensor = specs, tensor
        self._read: dict[str, Pair] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host has the values, without waiting."""
        return self._read is not None

    def read(self) -> dict[str, Pair]:
        """Returns the pairs (total, count), each of its kind, by name."""
        if self._read is None:
            array = np.asarray(self._tensor, np.float64)
            scores = array[num_sums(self.specs) :].reshape(-1, 4)
            pairs: dict[str, Pair] = {}
            start, positions = 0, itertools.count()
            for spec in self.specs:
                if spec.keeps_scores:
                    pairs[spec.name] = ExactAuc(ranking.Ranking(scores[scores[:, 0] == next(positions), 1:]), 0.0)
                elif spec.kind.is_vector:
                    pairs[spec.name] = spec.kind(*array[start : start + spec.size].T)
                else:
                    pairs[spec.name] = spec.kind(*map(float, array[start]))
                start += spec.size
            self._read = pairs  # atomically: other threads read it
        return self._read
