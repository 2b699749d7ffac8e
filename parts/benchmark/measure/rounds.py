"""Times the loop that users run, on the host: a warm-up, then rounds of steps in calls of the inner loop.

The device is awaited at both ends of a round, never within, so measuring costs two readings of the clock per call.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

from ....engine.machine import cpus, environment
from ....engine.metrics.sums import values_by_name
from ....engine.strategies.base import Program
from . import intervals, noise
from .statistics import Call, columns, describe_round, summarize

ENDLESS = 1 << 31  # more steps than any benchmark makes: only the pace limits a call
_GROWS = 1.5  # calls whose length or rate still changes by this factor are not paced yet
_MAX_CALLS = 30
_MAX_TRIALS = 5
_TRIAL_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class Length:
    """The number and length of the timed rounds.

    Attributes:
      steps: steps of a round; None: as many as `seconds` hold.
      seconds: approximate seconds of a round, where `steps` is None.
    """

    steps: int | None = None
    seconds: float = 0.0
    rounds: int = 1

    def agreed_steps(self, strategy, steps_per_sec: float, fraction: float = 1.0) -> int:
        """Returns a round's number of steps, the same in all processes.

        For a length in seconds, as many as fill a `fraction` of it at the chief's rate. If replicas synchronize
        periodically, and a round is long enough, it ends at a sync.
        """
        if self.steps is not None:
            return self.steps
        filling, period = self.seconds * fraction * steps_per_sec, strategy.sync_period_steps
        return strategy.exchange(period * round(filling / period) if filling >= period else max(1, round(filling)))[0]


def run(
    strategy,
    program: Program,
    length: Length,
    variables: Mapping[str, str],
    clock=time.perf_counter,
    at_round: Callable[[int, dict], None] = lambda number, totals: None,
    processes: Callable[[], Sequence[int]] = lambda: [os.getpid()],
) -> dict:
    """Warms up, then trains in rounds and times them.

    Several processes agree on the length of a round before it begins, so that all make the same calls.

    Args:
      program: program that trains; it continues from its present step.
      variables: the process's environment variables, for the report alone.
      at_round: called after each round with its number, from 1, and its totals, as in the result.
      processes: returns the ids of the benchmark's processes on this host; all others are noise.

    Returns:
      The result of `summarize` for all calls, and: `interval`, the 95 % interval of examples per second; `noise` and
      `warnings`, of the machine; `rounds`, each as `describe_round` has it; `calls`, their columns; `train`, the means
      of the metrics over the last call's steps; `compile_seconds`, the whole warm-up's; `first_step_seconds`, as
      `warm_up` returns it; `peak_rss_mb` and `device_peak_mb`; `environment`, as found before the first step.

      On devices that work asynchronously (GPU, TPU), a call's time is that of queueing it, until the queue is full.
      Totals are right all the same, since a round's last call lasts until the devices are done.
    """
    machine = environment.describe(variables)  # before the run: its own load is not part of the load average
    start, began = noise.read(processes()), clock()
    first_step_seconds, steps = warm_up(strategy, program, length, clock)
    compile_seconds, first_round = clock() - began, noise.read(processes())
    rounds: list[list[Call]] = []
    for number in range(1, length.rounds + 1):
        calls, sums = timed_round(strategy, program, steps, clock)
        rounds.append(calls)
        totals = describe_round(calls)
        steps = length.agreed_steps(strategy, totals["steps_per_sec"])
        at_round(number, totals)
    disturbed = noise.measure(start, first_round, noise.read(processes()), cpus.quota_cores())
    return {
        **_figures(rounds, disturbed, strategy.sync_period_steps),
        "train": values_by_name(sums),
        "compile_seconds": compile_seconds,
        "first_step_seconds": first_step_seconds,
        "environment": machine,
    }


def _figures(rounds: Sequence[Sequence[Call]], disturbed: noise.Noise, meet_steps: int) -> dict:
    """Computes the figures of the calls and the machine; replicas synchronize every `meet_steps`."""
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


def timed_round(strategy, program: Program, steps: int, clock=time.perf_counter) -> tuple[list[Call], dict]:
    """Trains for `steps` steps. Returns each call, and the sums of the metrics over the last one's steps.

    The devices have to be idle when this begins (a warm-up's end awaits them), and are when it ends.
    """
    end = program.step + steps
    noted = []  # the rest is computed after the timing
    before = clock()
    while program.step < end:
        first = program.step
        result = strategy.run(program, end - first)
        after = clock()
        noted.append((first, result.steps, after - before, result.input_seconds, result.workers))
        before = after
    sums = result.sums.read()  # waits for the devices, so the last call's time includes their work
    awaited = clock() - before
    # Replicas that train independently for a whole round sum between steps, outside of the timed calls.
    is_waited = result.workers is not None and strategy.sync_period_steps == 1
    calls = []
    for first, steps, seconds, input_seconds, workers in noted:
        examples = program.feed.order.examples_before(first + steps) - program.feed.order.examples_before(first)
        calls.append(Call(steps, examples, seconds, input_seconds, reduce_seconds(workers) if is_waited else None))
    calls[-1] = calls[-1]._replace(seconds=calls[-1].seconds + awaited)
    return calls, sums


def reduce_seconds(workers) -> float | None:
    """Returns the average seconds that workers waited for each other in a call, if known.

    See `engine.reduction.Reduction.pop_figures`.
    """
    figures = workers.read()
    if not all("reduce_seconds" in worker for worker in figures):
        return None
    return sum(worker["reduce_seconds"] for worker in figures) / len(figures)


def warm_up(strategy, program: Program, length: Length, clock=time.perf_counter) -> tuple[float, int]:
    """Warms up for rounds of a `length`. Devices are idle at its end.

    Returns:
      The seconds of the first call, until its steps are done: tracing, compiling, and its one step (or
      --steps_per_loop); and the number of steps of the first round.
    """
    first_step_seconds, steps_per_sec = _run_until_paced(strategy, program, length.steps or ENDLESS, clock)
    if length.steps is None:
        steps_per_sec = _trial_rate(strategy, program, length, steps_per_sec, clock)
    steps = length.agreed_steps(strategy, steps_per_sec)
    _finish_open_steps(strategy, program, steps)
    # An epoch's smaller last batch has a program of its own, which must not be compiled within a round. So it is
    # trained on now if the rounds may reach it, or twice as many steps, since later rounds go by the rates of earlier.
    order = program.feed.order
    before_it = order.steps_per_epoch - 1 - program.step % order.steps_per_epoch
    if order.remainder and program.feed.compilable and before_it < 2 * steps * length.rounds:
        program.advance(before_it)
        strategy.run(program, 1).sums.read()
        _finish_open_steps(strategy, program, steps)
    return first_step_seconds, steps


def _run_until_paced(strategy, program: Program, limit: int, clock) -> tuple[float, float]:
    """Compiles, and runs calls of at most `limit` steps until two in a row are not longer than the ones before.

    Returns:
      The seconds of the first one, and the steps per second of the last one.
    """
    began = clock()
    first_step_seconds, longest, settled = 0.0, 0, 0
    for number in range(_MAX_CALLS):
        before = clock()
        result = strategy.run(program, limit)
        if not number:
            result.sums.read()
            first_step_seconds = clock() - began
        settled = settled + 1 if result.steps <= _GROWS * longest else 0
        longest = max(longest, result.steps)
        if settled == 2:
            break
    result.sums.read()
    return first_step_seconds, result.steps / max(clock() - before, 1e-9)


def _trial_rate(strategy, program: Program, length: Length, steps_per_sec: float, clock) -> float:
    """Measures the rate of a short round, repeated until its duration is about what the previous one predicted.

    Single calls can't predict it: some are short, and some compile code that earlier calls did not need.
    """
    for _ in range(_MAX_TRIALS):
        expected, steps = steps_per_sec, length.agreed_steps(strategy, steps_per_sec, _TRIAL_FRACTION)
        first, before = program.step, clock()
        while program.step < first + steps:
            result = strategy.run(program, first + steps - program.step)
        result.sums.read()
        # more than requested if steps were already in progress
        steps_per_sec = (program.step - first) / max(clock() - before, 1e-9)
        agree = expected / _GROWS <= steps_per_sec <= expected * _GROWS
        if strategy.exchange(agree)[0]:
            break
    return steps_per_sec


def _finish_open_steps(strategy, program: Program, round_steps: int) -> None:
    """Ends the steps in progress, so that none of them is timed; devices are idle afterwards.

    If replicas synchronize periodically, and within rounds of `round_steps`, the timing begins after a sync. The
    program of a sync within a period, as at a step at which something is due, is compiled here: one of two steps ends
    there.
    """
    period = strategy.sync_period_steps
    if period > 1:
        strategy.run(program, 1)
        strategy.run(program, 1).sums.read()
    while round_steps >= period and (not strategy.in_step or program.step % period):
        strategy.run(program, period - program.step % period).sums.read()
