"""Tries users' code, such as Keras's metrics and losses, on small random batches."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from ...engine.machine import threads

T = TypeVar("T")
EXAMPLES = (5, 3)  # in the two batches that a trial compares with their concatenation
TRIALS = 3
_MANY, _FEW_EXAMPLES = 1 << 18, (2, 1)  # an example's entries that make a trial slow; the numbers of examples then
# Usual values of missing labels: in classes, in segmentations, in text, in measurements.
MISSING = (-1, 255, -100, math.nan)


def sample(dtype: tf.DType, shape: Sequence, examples: int, random: np.random.Generator, is_label: bool) -> tf.Tensor:
    """Samples a batch [examples, *shape] that any metric and loss accepts.

    Labels and whole numbers are 0 or 1, valid classes of any metric; the rest is in (0, 1), like probabilities and
    weights. An axis of unknown size has 2 entries. Examples have different means, since those of many equally
    distributed entries would be equal, up to rounding.
    """
    means = _random_per_example([examples, *shape], random)
    values = 1 - random.random([examples, *(size or 2 for size in shape)], np.float32)
    whole = is_label or not dtype.is_floating
    drawn = tf.constant(values < means if whole else values * means)
    return tf.as_string(drawn) if dtype == tf.string else tf.cast(drawn, dtype)


def _random_per_example(shape: Sequence, random: np.random.Generator) -> np.ndarray:
    """Samples a number between 0.1 and 1 for each example of an array of this shape, to be broadcast to it."""
    return random.uniform(0.1, 1, [shape[0], *(1 for _ in shape[1:])]).astype(np.float32)


def is_close(a, b) -> bool:
    """Returns whether arrays are equal up to rounding, or both NaN."""
    return bool(np.allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=1e-5, equal_nan=True))


class Found(NamedTuple):
    """What a trial has found: the names of losses that are not means over examples, and of those it says nothing of."""

    not_additive: list[str]
    undecided: list[str]


def find_not_additive(
    sums: Callable[[tuple], dict[str, tuple]], specs: tuple, compared: Collection[float] | None
) -> Found:
    """Finds losses that are not means over examples, by a trial on random batches of these specs.

    A sum that is not finite, or the same whatever the model computes, decides nothing: a division by the number of
    objects in the labels, or a logarithm of them, may give that on labels of 0 and 1.

    Args:
      sums: computes tuples of sums by the loss's name: those of two batches must add up, also if labels are missing.
      specs: the specs of a batch (features, labels, outputs, weights).
      compared: the numbers to which the losses compare labels: those equal to one, or on one side of it, may be left
        out of the mean. None if none are left out.
    """
    random = np.random.default_rng(0)

    def sampled(examples: int, are_whole: bool = True) -> list:
        def to_sample(spec, is_label):
            if spec is None:
                return None
            return sample(tf.as_dtype(spec.dtype), spec.shape[1:], examples, random, is_label and are_whole)

        return [
            tf.nest.map_structure(functools.partial(to_sample, is_label=i == 1), structure)
            for i, structure in enumerate(specs)
        ]

    def joined(*values):
        return None if values[0] is None else tf.concat(values, 0)

    def differing(batches) -> set[str]:
        whole, first, second = map(sums, (tf.nest.map_structure(joined, *batches), *batches))
        triples = {name: zip(values, first[name], second[name], strict=True) for name, values in whole.items()}
        return {name for name, triple in triples.items() if not all(is_close(a, b + c) for a, b, c in triple)}

    def decides(batch) -> set[str]:
        other = sampled(len(tf.nest.flatten(batch)[0]))
        before, after = sums(tuple(batch)), sums((other[0], batch[1], other[2], batch[3]))
        totals = {name: (before[name][0], after[name][0]) for name in before}
        return {name for name, pair in totals.items() if np.isfinite(pair).all() and not is_close(*pair)}

    names, drawn = set[str](), list[list]()
    entries = sum(math.prod(size or 2 for size in x.shape[1:]) for x in tf.nest.flatten(specs) if x is not None)
    for _ in range(TRIALS if entries < _MANY else 1):
        batches = [sampled(examples) for examples in (EXAMPLES if entries < _MANY else _FEW_EXAMPLES)]
        names |= differing(batches)
        drawn.append(batches)
    missing_values = () if compared is None else (*MISSING, *sorted({x + by for x in compared for by in (-1, 0, 1)}))
    for value in missing_values:
        missing = functools.partial(with_missing, value=value, random=random)
        with contextlib.suppress(Exception):  # of any class: a loss need not take them
            names |= differing([[x, tf.nest.map_structure(missing, y), *more] for x, y, *more in batches])
    undecided = sums(tuple(batches[0])).keys() - names.union(*(decides(first) for first, _ in drawn))
    if undecided:
        with contextlib.suppress(Exception):  # of any class: a loss need not take labels between 0 and 1
            batches = [sampled(len(tf.nest.flatten(batch)[0]), are_whole=False) for batch in batches]
            names |= differing(batches)
            undecided -= decides(batches[0])
    return Found(sorted(names), sorted(undecided - names))


def with_missing(labels: tf.Tensor | None, value: float, random: np.random.Generator) -> tf.Tensor | None:
    """Returns labels, some of each example replaced by `value`, if they are numbers whose dtype has it."""
    dtype = tf.string if labels is None else labels.dtype
    if labels is None or not (dtype.is_floating or (dtype.is_integer and dtype.min <= value <= dtype.max)):
        return labels
    is_kept = random.random(labels.shape, np.float32) < _random_per_example(labels.shape, random)
    return tf.where(is_kept, labels, tf.cast(value, dtype))


def in_a_thread(function: Callable[[], T]) -> T:
    """Calls a function on the CPU outside any graph, strategy or Keras scope, which all are per thread."""

    def call():
        with tf.device("CPU:0"):
            return function()

    return threads.call("trial", call).result()
