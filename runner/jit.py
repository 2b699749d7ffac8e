"""Chooses whether a run's steps are compiled by XLA."""

from __future__ import annotations

from ..engine.errors import counted
from ..engine.strategies import jit_choice
from ..engine.strategies.base import Interrupted
from .base import BaseRun
from .failures import UsageError


def choose_jit(run: BaseRun, left: int | None) -> str:
    """Decides `state.jit`, measuring if --jit=auto leaves it open, and returns a line with the reason.

    Args:
      left: number of steps that the choice is for; None: a run without end.
    """
    config, state, strategy = run.config, run.state, run.strategy
    if reason := run.no_jit_reason:
        if config.jit == "on":
            raise UsageError(f"jit=on: {reason}; use jit=auto or off")
        if state.jit is None:
            state.jit = False  # a choice that was made before is kept for the next process
        return f"XLA off: {reason}"
    why = "as this run began"
    if config.jit != "auto":
        state.jit, why = config.jit == "on", "as configured"
    elif state.jit is None and run.trainer.wants_jit:
        state.jit, why = True, "as the model is compiled"
    if state.jit is None and left is not None and jit_choice.is_short(left):
        return f"XLA off: not timed, since the run has {counted(left, 'step')} left"
    if state.jit is not None:
        if strategy.training.jit != state.jit:
            strategy.training = strategy.program("train", strategy.training.feed, state.jit)
        return f"XLA {'on' if state.jit else 'off'}, {why}"
    run.log("timing steps, also with XLA if it may be faster: seconds, more where the machine is busy")
    try:
        measured, why_not = jit_choice.measure(strategy, state, steps=left, ends=lambda: run.stop_request.reason)
    except Interrupted:
        return "XLA is timed when the run continues"
    state.jit = jit_choice.choose(measured)
    if not measured:
        return f"XLA off: not timed, since {why_not}"
    strategy.training = measured[state.jit][1]
    rates = {jit: f"{rate:,.0f}" for jit, (rate, _) in measured.items()}
    with_xla = f"{rates[True]} with it" if True in rates else why_not
    return f"XLA {'on' if state.jit else 'off'}: steps/s {rates[False]} without, {with_xla}"
