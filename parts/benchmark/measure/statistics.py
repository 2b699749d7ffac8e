"""A benchmark's figures from its timed calls: rates, quantiles, errors. NumPy only.

Nothing is dropped: no outlier is removed and no best of several is picked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_MAD_TO_DEVIATION = 1.4826  # 1 / the normal distribution's third quartile


class Call(NamedTuple):
    """One timed call of the inner loop.

    Attributes:
      seconds: seconds from the return of the call before to its own, so that the calls' seconds add up to the span.
      input_seconds: seconds of the call spent waiting for input.
      reduce_seconds: seconds of the call that workers waited for each other's sums, on average; None if unknown.
    """

    steps: int
    examples: int
    seconds: float
    input_seconds: float
    reduce_seconds: float | None = None


def summarize(calls: Sequence[Call]) -> dict:
    """Describes timed calls.

    Returns:
      steps, wall_seconds: totals.
      steps_per_sec, examples_per_sec: totals over wall time.
      step_ms: {p50, p90, p99} of a step's milliseconds. A step's time is its call's, divided by the call's steps; the
        quantile p is the smallest time that a fraction p of all steps does not exceed.
      mean, stderr, jitter: statistics of the calls' rates, in examples per second, weighted by steps: the average; its
        standard error, None for a single call; 1.4826 times the median absolute deviation from the median (the lower of
        two middle values), a standard deviation that a few slow calls do not move.
      input_wait_fraction, reduce_fraction: fractions of wall time spent waiting for input and for sums over workers, 0
        to 1; the second None where it is not known.
    """
    steps = np.array([call.steps for call in calls], np.float64)
    seconds = np.array([call.seconds for call in calls], np.float64)
    examples = np.array([call.examples for call in calls], np.float64)
    wall_seconds = float(seconds.sum())
    rates = examples / seconds
    mean = float(np.average(rates, weights=steps))
    median = weighted_quantile(rates, steps, 0.5)
    step_ms = 1e3 * seconds / steps
    reduce_seconds = [call.reduce_seconds for call in calls if call.reduce_seconds is not None]
    return {
        "steps": int(steps.sum()),
        "wall_seconds": wall_seconds,
        "steps_per_sec": float(steps.sum()) / wall_seconds,
        "examples_per_sec": float(examples.sum()) / wall_seconds,
        "step_ms": {f"p{p}": weighted_quantile(step_ms, steps, p / 100) for p in (50, 90, 99)},
        "mean": mean,
        "stderr": standard_error(rates, steps, mean),
        "jitter": _MAD_TO_DEVIATION * weighted_quantile(np.abs(rates - median), steps, 0.5),
        "input_wait_fraction": sum(call.input_seconds for call in calls) / wall_seconds,
        "reduce_fraction": sum(reduce_seconds) / wall_seconds if len(reduce_seconds) == len(calls) else None,
    }


def describe_round(calls: Sequence[Call]) -> dict:
    """Returns totals of a round: steps, wall_seconds, steps_per_sec, examples_per_sec."""
    steps, seconds = sum(call.steps for call in calls), math.fsum(call.seconds for call in calls)
    examples = sum(call.examples for call in calls)
    return {
        "steps": steps,
        "wall_seconds": seconds,
        "steps_per_sec": steps / seconds,
        "examples_per_sec": examples / seconds,
    }


def columns(rounds: Sequence[Sequence[Call]]) -> dict[str, Any]:
    """Returns every call, in order, as columns: `Call`'s attributes, and `round`, counted from 0.

    A column with an unknown value is None. Plain JSON.
    """
    calls = [call for round in rounds for call in round]
    figures = dict[str, Any](zip(Call._fields, map(list, zip(*calls, strict=True)), strict=True))
    if any(call.reduce_seconds is None for call in calls):
        figures["reduce_seconds"] = None
    return {**figures, "round": [number for number, round in enumerate(rounds) for _ in round]}


def weighted_quantile(values: np.ndarray, weights: np.ndarray, fraction: float) -> float:
    """Returns the smallest of `values` up to which the weights are at least a `fraction` (0 to 1) of all weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    # Weights are whole steps: a rounding error in the product must not select the next value.
    index = np.searchsorted(reached, fraction * reached[-1] - 1e-6)
    return float(values[order][index])


def standard_error(values: np.ndarray, weights: np.ndarray, mean: float) -> float | None:
    """Computes the standard error of a weighted mean: s / sqrt(n), with the effective size n.

    n = (sum of w)^2 / sum of w^2 (Kish, Survey Sampling, 1965). None for a single value.
    """
    effective = weights.sum() ** 2 / np.sum(weights**2)
    if len(values) < 2:
        return None
    variance = np.average((values - mean) ** 2, weights=weights) * effective / (effective - 1)
    return float(np.sqrt(variance / effective))
