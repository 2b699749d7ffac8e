"""The whole loop that users get, timed on the host: warm up, then steps in calls of the inner loop.

Device work is awaited at both ends of the timed span and never inside it, so measuring costs two readings of the clock
a call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from engine import environment
from engine.benchmark.statistics import Call, summarize
from engine.state import TrainState

_GROWS = 1.5  # a call this many times as long as any before it is still being paced
_MAX_WARM_UP_CALLS = 30


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
