"""Warms up before the first round: everything is compiled, calls have found their length, the rate is known."""

from __future__ import annotations

import time
from typing import NamedTuple

from ....engine.state import TrainState
from .length import ENDLESS, Length

_GROWS = 1.5  # a call this many times longer than all before is still being paced; so are rates that differ so
_MAX_CALLS = 30
_MAX_TRIALS = 5
_TRIAL_SHARE = 0.1


class WarmUp(NamedTuple):
    """The outcome of the warm-up.

    Attributes:
      first_step_seconds: the first call, until its steps were done: tracing and compiling, and its one step (or as many
        as a call has by --steps_per_loop).
      steps: of the first round.
    """

    first_step_seconds: float
    steps: int


def warm_up(strategy, state: TrainState, length: Length, clock=time.perf_counter) -> WarmUp:
    """Warms up for rounds of a `length`. Devices are idle at its end.

    Args:
      strategy: with training data bound.
      state: what the strategy trains.
      length: of what is timed.
      clock: returns seconds.
    """
    first_step_seconds, steps_per_sec = _settle(strategy, length.steps or ENDLESS, clock)
    if length.steps is None:
        steps_per_sec = _try(strategy, state, length, steps_per_sec, clock)
    steps = length.agreed_steps(strategy, steps_per_sec)
    _come_in_step(strategy, state, steps)
    _compile_last_batch(strategy, state, steps, steps * length.rounds)
    return WarmUp(first_step_seconds, steps)


def _settle(strategy, limit: int, clock) -> tuple[float, float]:
    """Compiles, and runs calls of at most `limit` steps until two in a row are no longer than those before them.

    Returns:
      The seconds of the first one, and the steps per second of the last one.
    """
    began = clock()
    first_step_seconds, longest, settled = None, 0, 0
    for _ in range(_MAX_CALLS):
        before = clock()
        result = strategy.run_train_steps(limit)
        if first_step_seconds is None:
            result.sums.read()
            first_step_seconds = clock() - began
        settled = settled + 1 if result.steps <= _GROWS * longest else 0
        longest = max(longest, result.steps)
        if settled == 2:
            break
    result.sums.read()
    return first_step_seconds, result.steps / max(clock() - before, 1e-9)


def _try(strategy, state: TrainState, length: Length, steps_per_sec: float, clock) -> float:
    """Returns the rate of a short round, repeated until it takes about as long as the one before predicted.

    Single calls do not tell it: some are short, and some compile what a call before them did not need.
    """
    for _ in range(_MAX_TRIALS):
        expected, steps = steps_per_sec, length.agreed_steps(strategy, steps_per_sec, _TRIAL_SHARE)
        first, before = state.step, clock()
        while state.step < first + steps:
            result = strategy.run_train_steps(first + steps - state.step)
        result.sums.read()
        # More than asked for, where steps were in progress already.
        steps_per_sec = (state.step - first) / max(clock() - before, 1e-9)
        agree = expected / _GROWS <= steps_per_sec <= expected * _GROWS
        if strategy.exchange(int(agree))[0]:
            break
    return steps_per_sec


def _compile_last_batch(strategy, state: TrainState, round_steps: int, steps: int) -> None:
    """Trains on an epoch's smaller last batch if the next `steps`, or for safety twice as many, may reach it.

    It has a separately compiled program, which must not be made within a round.
    """
    order = strategy.train_order
    before_it = order.steps_per_epoch - 1 - state.step % order.steps_per_epoch
    if order.remainder and strategy.train_feed.random_access and before_it < 2 * steps:
        state.advance(before_it)
        strategy.run_train_steps(1).sums.read()
        _come_in_step(strategy, state, round_steps)


def _come_in_step(strategy, state: TrainState, round_steps: int) -> None:
    """Ends the steps in progress, so that none of them counts in what is timed next; devices are idle afterwards.

    Where replicas meet now and then, and within rounds of `round_steps`, the timing begins where they have met. The
    program by which they meet in between, as they do where something is due, is compiled here: one of two steps ends
    there.
    """
    each = strategy.sync_period_steps
    if each > 1:
        strategy.run_train_steps(1)
        strategy.run_train_steps(1).sums.read()
    while round_steps >= each and (not strategy.in_step or state.step % each):
        strategy.run_train_steps(each - state.step % each).sums.read()
