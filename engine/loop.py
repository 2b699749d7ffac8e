"""The outer loop: runs steps until a hook is due, then calls it; knows no model and no device. Runs on the host."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from .errors import UsageError
from .hooks import Hook, Status
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
      until_step: the step at which the run ends; None if only its caller knows.
      clock: returns seconds; the clock may stop while the process is stopped.

    Attributes:
      meter: merges the calls' segments.
      status: the run's status; its `stop` and `agreed_stop` are the reason if it ended early.
    """

    def __init__(
        self,
        strategy: Strategy,
        state: TrainState,
        hooks: Sequence[Hook],
        until_step: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._hooks = hooks
        self._strategy, self._state, self._clock = strategy, state, clock
        order = strategy.training.feed.order
        self._hook_seconds: dict[str, float] = collections.defaultdict(float)
        self._uncalled: list[Hook] = []  # that have not seen the latest call
        self._is_due = False  # whether a hook is due at the step of the latest call
        # The step at which each hook is next due, by its `id`: not all are hashable.
        self._due: dict[int, int | None] = {}
        self._time_left = _TimeLeft(until_step, state.step)
        self.meter = Meter()
        self._calls = self.meter.window()  # totals of `train_to`
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
        for hook in self._hooks:
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
          program: a program of steps on external data; None is the run's own.

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
            for hook in self._hooks:
                if type(hook).before_call is not Hook.before_call:  # few act then, and each is timed
                    self._timed(hook, hook.before_call)
            # Other weights are frozen from there on, which is another trace: a call ends before it.
            until = min(step, state.freezing.next_change(first) or step)
            self._due = {id(hook): _next_due(hook, self.status, first) for hook in self._hooks}
            # No call passes a step at which a hook is due: the hook is to find the variables of that step.
            due = min([until, *(step for step in self._due.values() if step is not None)])
            result = strategy.run(program, due - first)
            after = self._clock()
            read = feed.stats()
            segment = Segment(
                first,
                result.steps,
                examples=order.examples_before(first + result.steps) - order.examples_before(first),
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
                seconds_left=self._time_left.seconds(after, state.step),
            )
            self._call_hooks()
            before = self._clock()  # hooks' time is not counted as the steps'
        return self._calls.take()

    def rewind(self) -> None:
        """Makes the hooks continue from the state's step, after both were restored."""
        self.status = dataclasses.replace(self.status, step=self._state.step, segment=Segment(self._state.step))
        self.resume_work()
        self._uncalled, self._time_left = [], _TimeLeft(self.status.until_step, self._state.step)
        for hook in self._hooks:
            hook.rewind(self.status)
        self._call_again()

    def _call_again(self) -> None:
        """Calls the hook that was interrupted at this step, if any, and those after it, before the next step."""
        pending = next((number for number, hook in enumerate(self._hooks) if hook.is_pending), len(self._hooks))
        self._uncalled, self._is_due = [*self._hooks[pending:]], True

    def resume_work(self) -> None:
        """Continues a run that was stopped; all processes call it."""
        self.status.stop = self.status.agreed_stop = None
        self._strategy.resume_work()

    def end(self) -> None:
        """Ends the hooks, those that save last; each has seen the latest call, unless one was interrupted in it."""
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
                seconds = self._timed(hook, hook)
            except Interrupted as request:
                self.status.stop = self.status.stop or request.args[0]
                self._uncalled = [hook, *self._uncalled]
                break
            if self._due.get(id(hook)) == self.status.step:
                self._time_left.add(id(hook), self.status.step, seconds)
                self.status.seconds_left = self._time_left.seconds(self._clock(), self.status.step)
        began = self._clock()
        _agree_to_stop(self.status, together=self._is_due)
        self._hook_seconds["waiting"] += self._clock() - began  # for other processes, if at all
        if self.status.stop:
            self._strategy.stop_new_work()

    def _timed(self, hook: Hook, call: Callable[[Status], None]) -> float:
        """Calls a hook, and returns the seconds that it has taken."""
        began = self._clock()
        call(self.status)
        if self.status.figures:
            self.meter.note(self.status.figures)
            self.status.figures.clear()
        seconds = self._clock() - began
        self._hook_seconds[hook.spent_on] += seconds
        return seconds


class _TimeLeft:
    """Estimates the time to a run's end: of steps by their rate, of hooks by what they take when they are due.

    The latter is divided by the steps from one time that a hook is due to the next, since a period's end that is still
    ahead takes as long as the last one, however many steps ago that was.

    Args:
      until_step: the run's last step; None if it is unknown.
    """

    def __init__(self, until_step: int | None, step: int):
        self._until_step, self._began = until_step, step
        self._first: tuple[float, int] | None = None  # the time when the first call had ended, and its step
        self._hook_seconds = 0.0
        # For each hook, the first and the newest step at which it was due, the seconds of the first, which may compile,
        # and of the later ones.
        self._due: dict[int, tuple[int, int, float, float]] = {}

    def add(self, hook: int, step: int, seconds: float) -> None:
        """Adds what a hook has taken at a step at which it was due."""
        self._hook_seconds += seconds
        if hook in self._due:
            first, _, first_seconds, later = self._due[hook]
            self._due[hook] = first, step, first_seconds, later + seconds
        else:
            self._due[hook] = step, step, seconds, 0.0

    def seconds(self, now: float, step: int) -> float | None:
        """Returns the estimate at a step; None if the end or the rate is unknown."""
        self._first = self._first or (now, step)
        (then, first), until = self._first, self._until_step
        if until is None or step == first:
            return None if step != until else 0.0
        left = max(0, until - step) * max(0.0, now - then - self._hook_seconds) / (step - first)
        for first, last, first_seconds, later in self._due.values():
            per_step = later / (last - first) if last > first else first_seconds / (first - self._began)
            left += max(0, until - last) * per_step
        return left


def _agree_to_stop(status: Status, together: bool) -> None:
    """Makes all processes stop at the same step, for the reason of a hook in one of them.

    `together`: whether all of them are at this step, since a hook is due at it.
    """
    status.agreed_stop = status.strategy.agree_to_stop(status.agreed_stop or status.stop, together)
    status.stop = str(status.agreed_stop) if status.agreed_stop else None


def _next_due(hook: Hook, status: Status, step: int) -> int | None:
    due = hook.next_due(step, status)
    if due is not None and due <= step:
        raise UsageError(
            f"hook {hook.name} returned at step {step} that it is next due at step {due}; return a later step from its "
            "next_due, or None for never"
        )
    return due
