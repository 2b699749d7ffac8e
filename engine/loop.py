"""The outer loop, on the host: runs steps until a hook is due, then calls it. Independent of models and devices."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from .errors import UsageError
from .hooks import Hook, Status
from .hooks.rollback import Rollback
from .meter import Meter, Segment, Totals
from .state import TrainState
from .strategies.base import Interrupted, Program, Strategy


class Loop:
    """The loop of one run: `begin`, then any number of calls of `train_to`, then `end`.

    Hooks do not depend on the number of calls in which a run is trained: they begin once, see each call of the inner
    loop, and end once. If one of them raises, the later ones see that call when the caller continues or ends the run.

    Args:
      strategy: bound to the state and the data.
      state: changed by steps; it may be restored afterwards.
      hooks: called in this order.
      until_step: at which the run ends; None if only its caller knows.
      rollback: one of the hooks, which runs the steps; None runs them by the strategy.
      clock: returns seconds; the clock may stop while the process is stopped.

    Attributes:
      meter: merges the calls' segments.
      status: of the run; its `stop` and `agreed_stop` are the reason if it ended early.
    """

    def __init__(
        self,
        strategy: Strategy,
        state: TrainState,
        hooks: Sequence[Hook],
        until_step: int | None,
        rollback: Rollback | None = None,
        clock=time.perf_counter,
    ):
        self._run = functools.partial(rollback.run, strategy) if rollback else strategy.run
        self._strategy, self._state, self._hooks, self._clock = strategy, state, hooks, clock
        order = strategy.training.feed.order
        self._hook_seconds: dict[str, float] = collections.defaultdict(float)
        self._uncalled: list[Hook] = []  # that have not seen the latest call
        self._is_due = False  # whether a hook is due at the step of the latest call
        self._first: tuple[float, int] | None = None  # the time when the first call had ended, and its step
        self.meter = Meter()
        self._calls = self.meter.window()  # of `train_to`
        self.status = Status(
            step=state.step,
            until_step=until_step,
            segment=Segment(state.step),
            steps_per_epoch=order.steps_per_epoch,
            epoch_shift=order.shift,
            state=state,
            strategy=strategy,
            program=strategy.training,
            meter=self.meter,
            hook_seconds=self._hook_seconds,
        )
        for hook in hooks:
            hook.attach(state, self.meter)

    def begin(self) -> None:
        """Begins the hooks, any of which may stop the run."""
        self.status = dataclasses.replace(
            self.status, step=self._state.step, segment=Segment(self._state.step), stop=None, agreed_stop=None
        )
        for hook in self._hooks:
            hook.begin(self.status)
        self._call_again()
        _agree_to_stop(self.status, together=True)

    def train_to(self, step: int, program: Program | None = None) -> Totals:
        """Trains up to a step, or until a hook stops the run, calling each hook after each call of the inner loop.

        Args:
          step: at which to end.
          program: of steps on external data; None is the run's own.

        Returns:
          The totals of these steps, unread.
        """
        strategy, state = self._strategy, self._state
        program = program or strategy.training
        feed, order = program.feed, program.feed.order
        self._calls.take()  # from a call that raised
        self._call_hooks()
        bytes_before = feed.stats().bytes_read
        before = self._clock()
        while state.step < step and not (self.status.stop and strategy.in_step):
            first = state.step
            until = min(step, state.freezing.next_change(first) or step)
            due = _next_due(self._hooks, self.status, first, until)
            result = self._run(program, due - first)
            after = self._clock()
            read = feed.stats()
            segment = Segment(
                first,
                result.steps,
                examples=order.examples_before(first + result.steps) - order.examples_before(first)
                if result.sums
                else 0,
                sums=result.sums,
                seconds=after - before,
                input_seconds=result.input_seconds,
                input_bytes=None if read.bytes_read is None else read.bytes_read - (bytes_before or 0),
                steps_ahead=read.steps_ahead,
                workers=result.workers,
                compiles=result.compiles,
            )
            bytes_before = read.bytes_read
            self.meter.add(segment)
            self._uncalled, self._is_due = [*self._hooks], state.step == due
            self.status = dataclasses.replace(
                self.status,
                program=program,
                step=state.step,
                segment=segment,
                evaluation=None,
                off_schedule=False,
                seconds_left=self._seconds_left(after, state.step),
            )
            self._call_hooks()
            before = self._clock()  # hooks' time is not counted as the steps'
        return self._calls.take()

    def _seconds_left(self, now: float, step: int) -> float | None:
        if self._first is None or step <= self._first[1]:
            self._first = now, step
        (then, first), last = self._first, self.status.until_step
        if last is None or step == first:
            return None if step != last else 0.0
        return max(0, last - step) * (now - then) / (step - first)

    def rewind(self) -> None:
        """Makes the hooks continue from the state's step, after both were restored."""
        self.status = dataclasses.replace(self.status, step=self._state.step, segment=Segment(self._state.step))
        self.resume_work()
        self._uncalled, self._first = [], None
        for hook in self._hooks:
            hook.rewind(self.status)
        self._call_again()

    def _call_again(self) -> None:
        """Calls the hook that was interrupted at this step, if any, and those after it, before the next step."""
        pending = next((number for number, hook in enumerate(self._hooks) if hook.is_pending), len(self._hooks))
        self._uncalled, self._is_due = [*self._hooks[pending:]], True

    def resume_work(self) -> None:
        """Continues a run that was stopped, in all processes alike."""
        self.status.stop = self.status.agreed_stop = None
        self._strategy.resume_work()

    def end(self) -> None:
        """Ends the hooks."""
        if not any(hook.is_pending for hook in self._hooks):
            self._call_hooks()
        for hook in sorted(self._hooks, key=lambda hook: hook.ends_last):
            self._timed(hook, hook.end)

    def _call_hooks(self) -> None:
        """Calls the hooks that have not seen the latest call; then all processes agree whether to stop."""
        if not self._uncalled:
            return
        while self._uncalled:
            hook = self._uncalled.pop(0)
            try:
                self._timed(hook, hook)
            except Interrupted as request:
                self.status.stop = self.status.stop or request.args[0]
                self._uncalled = [hook, *self._uncalled]
                break
        began = self._clock()
        _agree_to_stop(self.status, together=self._is_due)
        self._hook_seconds["waiting"] += self._clock() - began  # for other processes, if at all
        if self.status.stop:
            self._strategy.stop_new_work()

    def _timed(self, hook: Hook, call: Callable[[Status], None]) -> None:
        began = self._clock()
        call(self.status)
        self._hook_seconds[hook.spent_on] += self._clock() - began


def train(
    strategy: Strategy, state: TrainState, hooks: Sequence[Hook], until_step: int, clock=time.perf_counter
) -> Status:
    """Trains a run to its end, `until_step`, and returns the last status."""
    loop = Loop(strategy, state, hooks, until_step, clock=clock)
    loop.begin()
    loop.train_to(until_step)
    loop.end()
    return loop.status


def _agree_to_stop(status: Status, together: bool) -> None:
    """Makes all processes stop at the same step, for the reason of a hook in one of them.

    `together`: whether all of them are at this step, since a hook is due at it.
    """
    status.agreed_stop = status.strategy.agree_to_stop(status.stop, together)
    status.stop = str(status.agreed_stop) if status.agreed_stop else None


def _next_due(hooks: Sequence[Hook], status: Status, step: int, until_step: int) -> int:
    due = until_step
    for hook in hooks:
        wanted = hook.next_due(step, status)
        if wanted is not None and wanted <= step:
            raise UsageError(
                f"hook {hook.name} returned at step {step} that it is next due at step {wanted}; return a later "
                "step from its next_due, or None for never"
            )
        due = due if wanted is None else min(due, wanted)
    return due
