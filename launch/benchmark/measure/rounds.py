"""Times the whole loop that users get, on the host: warm-up, then rounds of steps in calls of the inner loop.

Device work is awaited at both ends of a round and never inside it, so measuring costs two readings of the clock a call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ....engine.machine import cpus, environment
from ....engine.metrics.means import values_by_name
from ....engine.state import TrainState
from . import intervals, noise
from .length import Length
from .statistics import Call, columns, describe_round, summarize
from .warm_up import warm_up


class Watcher(NamedTuple):
    """Callbacks that observe how a benchmark goes on.

    Attributes:
      at_round: called after the warm-up and after each round, with the rounds so far, as in the result, and the steps
        of the next one.
      at_call: called within what is timed, at each call's end, with the round's steps and seconds so far: it has to
        return at once nearly always. None calls nothing.
    """

    at_round: Callable[[Sequence[dict], int], None] = lambda rounds, steps: None
    at_call: Callable[[int, float], None] | None = None


def run(
    strategy,
    state: TrainState,
    length: Length,
    variables: Mapping[str, str],
    clock=time.perf_counter,
    watcher: Watcher | None = None,
    processes: Callable[[], Sequence[int]] = lambda: [os.getpid()],
) -> dict:
    """Warms up, then trains in rounds and times them.

    Where there are several processes, all make the same calls: the length of a round is agreed before it begins.

    Args:
      strategy: with training data bound.
      state: what the strategy trains; it goes on from where it is.
      length: of what is timed.
      variables: the process's environment variables, for the report alone.
      clock: returns seconds.
      watcher: is told how it goes on.
      processes: returns the ids of the benchmark's processes on this host; all others are noise.

    Returns:
      What `summarize` returns of all calls, and: `interval`, the 95 % interval of examples per second; `noise` and
      `warnings`, of the machine; `rounds`, each as `describe_round` has it; `calls`, their columns; `train`, the means
      of the metrics over the last call's steps; `compile_seconds`, the whole warm-up's; `first_step_seconds`, as
      `WarmUp` has it; `peak_rss_mb` and `device_peak_mb`; `environment`, as found before the first step.

      Where devices work behind the host's back (GPU, TPU), a call's time is that of starting it until the queue is
      full; totals hold all the same, since a round's last call's time lasts until the devices are done.

    Raises:
      ValueError: a round of no steps, or no rounds.
    """
    length.check()
    at_round, at_call = watcher or Watcher()
    found = environment.describe(variables)  # before the run, so that the load average is that of others
    start, began = noise.read(processes()), clock()
    first_step_seconds, steps = warm_up(strategy, state, length, clock)
    compile_seconds, first_round = clock() - began, noise.read(processes())
    rounds: list[Any] = []
    described: list[Any] = []
    at_round(described, steps)
    for _ in range(length.rounds):
        calls, sums = timed_round(strategy, state, steps, clock, at_call)
        rounds.append(calls)
        described.append(describe_round(calls))
        steps = length.agreed_steps(strategy, described[-1]["steps_per_sec"])
        at_round(described, steps)
    disturbed = noise.between(start, first_round, noise.read(processes()), cpus.quota_cores())
    return {
        **_figures(rounds, disturbed, strategy.sync_period_steps),
        "train": values_by_name(sums),
        "compile_seconds": compile_seconds,
        "first_step_seconds": first_step_seconds,
        "environment": found,
    }


def _figures(rounds: Sequence[Sequence[Call]], disturbed: noise.Noise, meet_steps: int) -> dict:
    """Returns the figures of the calls and the machine, where replicas meet each `meet_steps`."""
    timed, warnings = columns(rounds), []
    shortest = min(sum(call.steps for call in calls) for calls in rounds)
    if shortest < meet_steps:
        warnings.append(
            f"short rounds: {shortest:,} steps, where replicas meet each {meet_steps:,}; here they met at a round's end"
        )
    return {
        **summarize([call for calls in rounds for call in calls]),
        "interval": intervals.interval(timed, disturbed.lost_share),
        "warnings": [*warnings, *noise.warnings(disturbed, timed)],
        "noise": disturbed._asdict(),
        "peak_rss_mb": environment.peak_rss_mb(),
        "device_peak_mb": environment.device_peak_mb(),
        "rounds": [describe_round(calls) for calls in rounds],
        "calls": timed,
    }


def timed_round(
    strategy,
    state: TrainState,
    steps: int,
    clock=time.perf_counter,
    at_call: Callable[[int, float], None] | None = None,
) -> tuple[list[Call], dict]:
    """Trains for `steps` steps. Returns each call, and the sums of the metrics over the last one's steps.

    The time that `at_call` takes (see `run`) is the next call's. The devices have to be idle when this begins (a
    warm-up's end awaits them), and are when it ends.
    """
    end = state.step + steps
    noted = []  # only this is done within what is timed: the rest is computed afterwards
    began = before = clock()
    while state.step < end:
        first = state.step
        result = strategy.run_train_steps(end - first)
        after = clock()
        noted.append((first, result.steps, after - before, result.input_seconds, result.workers))
        before = after
        if at_call:
            at_call(steps + state.step - end, after - began)
    sums = result.sums.read()  # waits for the devices: the last call's time goes on until they are done
    awaited = clock() - before
    # Replicas that train by themselves for a round have their sums between steps, where they are not timed.
    known = result.workers is not None and strategy.sync_period_steps == 1
    calls = []
    for first, steps, seconds, input_seconds, workers in noted:
        examples = strategy.train_order.examples_before(first + steps) - strategy.train_order.examples_before(first)
        calls.append(Call(steps, examples, seconds, input_seconds, reduce_seconds(workers) if known else None))
    calls[-1] = calls[-1]._replace(seconds=calls[-1].seconds + awaited)
    return calls, sums


def reduce_seconds(workers) -> float | None:
    """Returns the average seconds that workers waited for each other in a call, if known.

    See `engine.step.context.StepContext.figures`.
    """
    rows = workers.read()
    if not all("reduce_seconds" in row for row in rows):
        return None
    return sum(row["reduce_seconds"] for row in rows) / len(rows)
