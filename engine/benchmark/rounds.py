"""The whole loop that users get, timed on the host: warm up, then rounds of steps in calls of the inner loop.

Device work is awaited at both ends of a round and never inside it, so measuring costs two readings of the clock a call.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine import environment
from engine.benchmark import intervals, noise
from engine.benchmark.statistics import Call, columns, describe_round, summarize, weighted_quantile
from engine.state import TrainState

_GROWS = 1.5  # a call this many times as long as any before it is still being paced
_MAX_WARM_UP_CALLS = 30
_ENDLESS = 1 << 31  # steps that no benchmark comes to: the pace alone says how long a call is


@dataclasses.dataclass(frozen=True)
class Length:
    """How much is timed.

    Attributes:
      steps: of a round; None: as many as `seconds` hold.
      seconds: of a round, about, where `steps` is None.
      rounds: how many, one after another.
    """

    steps: int | None = None
    seconds: float | None = None
    rounds: int = 1


class Watcher(NamedTuple):
    """Who is told how a benchmark goes on.

    Attributes:
      at_round: called after the warm-up and after each round, with the rounds so far, as in the result, and the steps
        of the next one.
      at_call: called within what is timed, at each call's end, with the round's steps and seconds so far: it has to
        return at once nearly always. None: nobody is.
    """

    at_round: Callable[[Sequence[dict], int], None] = lambda rounds, steps: None
    at_call: Callable[[int, float], None] | None = None


class WarmUp(NamedTuple):
    """What came before the first round.

    Attributes:
      first_step_seconds: the first call, until its steps were done: tracing and compiling, and its one step (or as many
        as a call has by --steps_per_loop).
      steps_per_sec: the median over steps of their calls' rates, since other calls than the first may compile too.
    """

    first_step_seconds: float
    steps_per_sec: float


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
    _check(length)
    at_round, at_call = watcher or Watcher()
    found = environment.describe(variables)  # before the run, so that the load average is that of others
    start, began = noise.read(processes()), clock()
    warmed = warm_up(strategy, state, length.steps or _ENDLESS, clock)
    steps = length.steps or _agreed_steps(strategy, length.seconds, warmed.steps_per_sec)
    _compile_last_batch(strategy, state, steps * length.rounds)
    compile_seconds, first_round = clock() - began, noise.read(processes())
    rounds, described = [], []
    at_round(described, steps)
    for _ in range(length.rounds):
        calls, sums = timed_round(strategy, state, steps, clock, at_call)
        rounds.append(calls)
        described.append(describe_round(calls))
        steps = length.steps or _agreed_steps(strategy, length.seconds, described[-1]["steps_per_sec"])
        at_round(described, steps)
    disturbed = noise.between(start, first_round, noise.read(processes()), environment.quota_cores())
    return {
        **_figures(rounds, disturbed),
        "train": {name: value for name, pair in sums.items() if (value := pair.value()) is not None},
        "compile_seconds": compile_seconds,
        "first_step_seconds": warmed.first_step_seconds,
        "environment": found,
    }


def _figures(rounds: Sequence[Sequence[Call]], disturbed: noise.Noise) -> dict:
    """What the calls say, and the machine."""
    timed = columns(rounds)
    return {
        **summarize([call for calls in rounds for call in calls]),
        "interval": intervals.interval(timed, disturbed.lost_share),
        "warnings": noise.warnings(disturbed, timed),
        "noise": disturbed._asdict(),
        "peak_rss_mb": environment.peak_rss_mb(),
        "device_peak_mb": environment.device_peak_mb(),
        "rounds": [describe_round(calls) for calls in rounds],
        "calls": timed,
    }


def _check(length: Length) -> None:
    if length.rounds < 1:
        raise ValueError(f"benchmark_rounds={length.rounds} leaves nothing to time; use 1 or more")
    if length.steps is None and not (length.seconds and length.seconds > 0):
        raise ValueError(f"benchmark_seconds={length.seconds} leaves nothing to time; use more than 0")
    if length.steps is not None and length.steps < 1:
        raise ValueError(f"benchmark_steps={length.steps} leaves nothing to time; use 1 or more")


def _agreed_steps(strategy, seconds: float, steps_per_sec: float) -> int:
    """Steps that fill `seconds` at the chief's rate so far: the same number in all processes, and, where replicas meet
    now and then, up to where they do."""
    each = strategy.round_steps
    return strategy.exchange(each * max(1, round(seconds * steps_per_sec / each)))[0]


def warm_up(strategy, state: TrainState, limit: int, clock=time.perf_counter) -> WarmUp:
    """Compiles, and runs until two calls in a row are no longer than those before them. Devices are idle at its end.

    Args:
      strategy: with training data bound.
      state: what the strategy trains.
      limit: most steps a call.
      clock: returns seconds.
    """
    began = before = clock()
    first_step_seconds = None
    steps, seconds = [], []
    settled = 0
    for _ in range(_MAX_WARM_UP_CALLS):
        longest = max(steps, default=0)
        result = strategy.run_train_steps(limit)
        if first_step_seconds is None:
            result.sums.read()
            first_step_seconds = clock() - began
        now = clock()
        steps.append(result.steps)
        seconds.append(now - before)
        before = now
        settled = settled + 1 if result.steps <= _GROWS * longest else 0
        if settled == 2:
            break
    result.sums.read()
    _come_in_step(strategy, state)
    rates = np.array(steps[1:]) / np.maximum(seconds[1:], 1e-9)
    return WarmUp(first_step_seconds, weighted_quantile(rates, np.array(steps[1:]), 0.5))


def _compile_last_batch(strategy, state: TrainState, steps: int) -> None:
    """Trains on an epoch's smaller last batch if the next `steps` may come to it, twice as many for safety's sake.

    It has a compiled program of its own, which is not to be made within a round.
    """
    order = strategy.train_order
    before_it = order.steps_per_epoch - 1 - state.step % order.steps_per_epoch
    if order.remainder and strategy.train_feed.random_access and before_it < 2 * steps:
        state.advance(before_it)
        strategy.run_train_steps(1).sums.read()
        _come_in_step(strategy, state)


def _come_in_step(strategy, state: TrainState) -> None:
    """Ends what is under way, so that none of it counts in what is timed next; devices are idle afterwards.

    Where replicas meet each `round_steps` only, that begins where they have met. By what they meet within such a round,
    as they do where something is due, is compiled here: one of two steps ends there.
    """
    each = strategy.round_steps
    if each > 1:
        strategy.run_train_steps(1)
        strategy.run_train_steps(1).sums.read()
    while not strategy.in_step or state.step % each:
        strategy.run_train_steps(each - state.step % each).sums.read()


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
    noted = []  # no more than this within what is timed: the rest is computed afterwards
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
    known = result.workers is not None and strategy.round_steps == 1
    calls = []
    for first, steps, seconds, input_seconds, workers in noted:
        examples = strategy.train_order.examples_before(first + steps) - strategy.train_order.examples_before(first)
        calls.append(Call(steps, examples, seconds, input_seconds, _reduce_seconds(workers) if known else None))
    calls[-1] = calls[-1]._replace(seconds=calls[-1].seconds + awaited)
    return calls, sums


def _reduce_seconds(workers) -> float:
    """What workers waited for each other in a call, on average (`engine.reduction.Reduction.figures`)."""
    rows = workers.read()
    return sum(row["reduce_seconds"] for row in rows) / len(rows)
