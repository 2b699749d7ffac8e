"""The outer loop, on the host: runs steps until a hook is due, then calls it. It knows no model and no device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from .hooks import Hook, Status
from .state import TrainState
from .strategies.base import Strategy


def train(
    strategy: Strategy, state: TrainState, hooks: Sequence[Hook], until_step: int, clock=time.perf_counter
) -> Status:
    """Trains up to `until_step`, calling each hook, in order, after each call of the inner loop.

    Returns:
      The last status; its `stop` and `agreed_stop` say why a run ended early.
    """
    feed_order = strategy.train_order
    status = Status(state.step, until_step, 0, 0, feed_order.steps_per_epoch, None, 0.0, 0.0, state, strategy)
    for hook in hooks:
        hook.begin(status)
    _agree_to_stop(status, together=True)
    feed = strategy.train_feed
    bytes_before = feed.bytes_read if feed else None
    before = clock()
    while state.step < until_step and not (status.stop and strategy.in_step):
        first, due = state.step, _next_due(hooks, status, state.step, until_step)
        result = strategy.run_train_steps(due - first)
        after = clock()
        bytes_now = feed.bytes_read if feed else None
        status = dataclasses.replace(
            status,
            step=state.step,
            steps=result.steps,
            examples=feed_order.examples_before(first + result.steps) - feed_order.examples_before(first),
            sums=result.sums,
            seconds=after - before,
            input_seconds=result.input_seconds,
            workers=result.workers,
            input_bytes=None if bytes_now is None else bytes_now - (bytes_before or 0),
            steps_ahead=feed.steps_ahead if feed else None,
            evaluation=None,
        )
        bytes_before = bytes_now
        for hook in hooks:
            hook(status)
        _agree_to_stop(status, together=state.step == due)
        if status.stop:
            strategy.wind_up()
        before = clock()  # the time that hooks take is not counted as the steps'
    for hook in hooks:
        hook.end(status)
    return status


def _agree_to_stop(status: Status, together: bool) -> None:
    """Turns a hook's reason to stop, in this process, into what all processes do at the same step.

    `together`: all of them stand at this step, since something is due at it.
    """
    status.agreed_stop = status.strategy.agree_to_stop(status.stop, together)
    status.stop = str(status.agreed_stop) if status.agreed_stop else None


def _next_due(hooks: Sequence[Hook], status: Status, step: int, until_step: int) -> int:
    due = until_step
    for hook in hooks:
        wanted = hook.next_due(step, status)
        if wanted is not None and wanted <= step:
            raise ValueError(
                f"hook {hook.name} says at step {step} that it is next due at step {wanted}; return a later step from "
                "its next_due, or None for never"
            )
        due = due if wanted is None else min(due, wanted)
    return due
