"""Benchmark mode, on the host: warm up, time steps of the loop that users get, and describe the times.

Device work is awaited at both ends of the timed span and never inside it, so measuring costs two readings of the clock
a call. Nothing is dropped: no outlier is removed and no best of several is picked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine import environment
from engine.state import TrainState

_MAD_TO_DEVIATION = 1.4826  # 1 / the normal distribution's third quartile: makes jitter a standard deviation there
_GROWS = 1.5  # a call this many times as long as any before it is still being paced
_MAX_WARM_UP_CALLS = 30


class Call(NamedTuple):
    """One timed call of the inner loop.

    Attributes:
      steps, examples: done by the call.
      seconds: from the return of the call before it to its own, so that the calls' seconds add up to the span.
      input_seconds: the part of it spent waiting for input.
    """

    steps: int
    examples: int
    seconds: float
    input_seconds: float


def run(strategy, state: TrainState, steps: int, variables: Mapping[str, str], clock=time.perf_counter) -> dict:
    """Warms up, then trains for `steps` steps and times them.

    Args:
      strategy: with training data bound.
      state: what the strategy trains; it goes on from where it is.
      steps: to time, at least 1.
      variables: the process's environment variables, for the report alone.
      clock: returns seconds.

    Returns:
      What `summarize` returns, and: `train`, the means of the metrics over the last call's steps; `compile_seconds`,
      the whole warm-up's; `peak_rss_mb`, the most memory that this process has held, in 2**20 bytes; `environment`,
      as found before the first step (see `engine.environment.describe`).

      Where devices work behind the host's back (GPU, TPU), a call's time is that of starting it until the queue is
      full; totals hold all the same, since the last call's time lasts until the devices are done.

    Raises:
      ValueError: steps is below 1.
    """
    if steps < 1:
        raise ValueError(f"benchmark_steps={steps} leaves nothing to time; use 1 or more")
    found = environment.describe(variables)  # before the run, so that the load average is that of others
    compile_seconds = warm_up(strategy, steps, clock)
    calls, means = timed_calls(strategy, state, steps, clock)
    return {
        **summarize(calls),
        "train": means,
        "compile_seconds": compile_seconds,
        "peak_rss_mb": environment.peak_rss_mb(),
        "environment": found,
    }


def warm_up(strategy, limit: int, clock=time.perf_counter) -> float:
    """Compiles, and runs until two calls in a row are no longer than those before them. Returns the seconds it took.

    Args:
      strategy: with training data bound.
      limit: most steps a call.
      clock: returns seconds.
    """
    before = clock()
    longest = settled = 0
    for _ in range(_MAX_WARM_UP_CALLS):
        result = strategy.run_train_steps(limit)
        settled = settled + 1 if result.steps <= _GROWS * longest else 0
        longest = max(longest, result.steps)
        if settled == 2:
            break
    result.sums.read()
    return clock() - before


def timed_calls(strategy, state: TrainState, steps: int, clock=time.perf_counter) -> tuple[list[Call], dict]:
    """Trains for `steps` steps. Returns each call, and the means of the metrics over the last one's steps.

    The devices have to be idle when this begins (a warm-up's end awaits them), and are when it ends.
    """
    order = strategy.train_order
    end = state.step + steps
    times = []
    before = clock()
    while state.step < end:
        first = state.step
        result = strategy.run_train_steps(end - first)
        examples = order.examples_before(first + result.steps) - order.examples_before(first)
        after = clock()
        times.append(Call(result.steps, examples, after - before, result.input_seconds))
        before = after
    sums = result.sums.read()  # waits for the devices: the last call's time goes on until they are done
    times[-1] = times[-1]._replace(seconds=times[-1].seconds + clock() - before)
    return times, {name: value for name, pair in sums.items() if (value := pair.value()) is not None}


def summarize(calls: Sequence[Call]) -> dict:
    """Describes timed calls.

    Returns:
      steps, wall_seconds: totals.
      steps_per_sec, examples_per_sec: totals over wall time.
      step_ms: {p50, p90, p99} of a step's milliseconds. A step's time is its call's, divided evenly over the call's
        steps; the quantile p is the smallest time that a share p of all steps keeps within.
      mean, stderr, jitter: of the calls' rates, in examples per second, each call weighing as many as its steps: the
        average; its standard error, None for a single call; 1.4826 times the median absolute deviation from the
        median (of two middle values the lower), which is the standard deviation if the rates are normally
        distributed, and which a few slow calls do not move.
      input_wait_fraction: share of wall time spent waiting for input, 0 to 1.
    """
    steps = np.array([call.steps for call in calls], np.float64)
    seconds = np.array([call.seconds for call in calls], np.float64)
    examples = np.array([call.examples for call in calls], np.float64)
    wall_seconds = float(seconds.sum())
    rates = examples / seconds
    mean = float(np.average(rates, weights=steps))
    median = weighted_quantile(rates, steps, 0.5)
    step_ms = 1e3 * seconds / steps
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
    }


def weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """The smallest of `values` such that it and those below it hold `share` (0 to 1) of all weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    # Weights are whole steps: a part of one that rounding adds to the product must not take the next value.
    place = np.searchsorted(reached, share * reached[-1] - 1e-6)
    return float(values[order][place])


def standard_error(values: np.ndarray, weights: np.ndarray, mean: float) -> float | None:
    """Of a weighted mean: s / sqrt(n), effective size n = (sum of w)^2 / sum of w^2 (Kish, Survey Sampling, 1965).

    With equal weights it is the usual one. None for a single value.
    """
    effective = weights.sum() ** 2 / np.sum(weights**2)
    if len(values) < 2:
        return None
    variance = np.average((values - mean) ** 2, weights=weights) * effective / (effective - 1)
    return float(np.sqrt(variance / effective))
