"""The contract of hooks and the basic ones: callables with a period, called by the outer loop on the host.

A hook sees every call of the inner loop and acts when it is due. It reads the totals since it last acted from a window
of the run's meter. Its own state, if any, is part of each checkpoint.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UsageError
from ..meter import Meter, Segment, Window
from ..state import TrainState

if TYPE_CHECKING:
    from ..data.feeds.feed import Feed
    from ..strategies.base import Program, Stop, Strategy


@dataclasses.dataclass(kw_only=True)
class Status:
    """The state of a run: one small record, passed to every hook after each call of the inner loop.

    Attributes:
      step: number of completed steps (updates).
      until_step: the run's last step; None if only its caller knows.
      segment: the newest call's steps, examples, metrics and time.
      steps_per_epoch: the number of steps in an epoch of the training data, in batches of the run's present size.
      epoch_shift: added to the step to count epochs; not 0 if the run was resumed with another batch size.
      state: the `TrainState`.
      strategy: the run's strategy, for hooks that evaluate.
      program: the program of the newest call: on the run's own or external data.
      meter: merges the segments of all calls.
      evaluation: the metrics of an evaluation at this step, if a hook has made one.
      off_schedule: whether it was made only because the run ends here.
      stop: the reason to end the run, set by a hook, on any worker: all end at one step, this one if something is due
        at it, else one or two calls later. A `Stop` has an exit code too; once all have agreed it is text.
      agreed_stop: why the run ends, and the worker that requested it, once all know.
      seconds_left: estimate to the run's end, with what hooks take when they are due, such as evaluations and
        checkpoints, once they were; None if the end or the rate is unknown.
      in_memory: whether `before_save` is for a snapshot in memory, which is frequent, not for a checkpoint.
      figures: numbers by name that a hook sets, shown beside the step's metrics: in the log, on the page, in
        TensorBoard, the history and the result. Each belongs to one window, with its newest value; those of the chief
        are shown.
      hook_seconds: time spent in hooks so far, by `Hook.spent_on`, and in agreeing with other processes.

    Example:
      >>> def stop_after_an_epoch(status, metrics):  # hooks.every_steps(10, stop_after_an_epoch)
      ...     if status.epoch >= 1:
      ...         status.stop = "one epoch is enough"
    """

    step: int
    until_step: int | None
    segment: Segment
    steps_per_epoch: int
    epoch_shift: int = 0
    state: TrainState
    strategy: Strategy
    program: Program | None = None
    meter: Meter
    evaluation: dict[str, float] | None = None
    off_schedule: bool = False
    stop: Stop | str | None = None
    agreed_stop: Stop | None = None
    seconds_left: float | None = None
    in_memory: bool = False
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    hook_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return (self.step + self.epoch_shift) // self.steps_per_epoch

    @property
    def epochs(self) -> float:
        """Epochs done, with the present one's fraction."""
        return (self.step + self.epoch_shift) / self.steps_per_epoch

    @property
    def data_epoch(self) -> Period:
        """The period of the data's epochs."""
        return Period(self.steps_per_epoch, self.epoch_shift)

    def next_in_step(self, steps: int = 0) -> int:
        """Returns the first step, at least so many from now, at which replicas are synchronized.

        A hook that is due at it finds the state of that step or a later one, with no update in progress.
        """
        period = self.strategy.sync_period_steps
        return -(-(self.step + max(steps, not self.strategy.in_step)) // period) * period

    @property
    def last(self) -> bool:
        return self.until_step is not None and self.step >= self.until_step


@dataclasses.dataclass(frozen=True)
class Period:
    """A period of steps: multiples of `steps` after adding `shift`.

    Attributes:
      steps: the period's length; 0 is never.
      shift: the number that is added to a step, see above.
      within: a longer period, at whose end the last one ends early, and a new one begins; 0 is none.

    Raises:
      UsageError: the period is not a whole number, or below 0.
    """

    steps: int
    shift: int = 0
    within: int = 0

    def __post_init__(self):
        if not isinstance(self.steps, numbers.Integral) or self.steps < 0:
            raise UsageError(f"every_steps={self.steps!r} is not a number of steps; use 1 or more, or 0 for never")

    def position(self, step: int) -> tuple[int, int]:
        """Returns (number of whole periods before a step, steps since the last of them)."""
        if not self.within:
            return divmod(step + self.shift, self.steps)
        passes, rest = divmod(step + self.shift, self.within)
        number, offset = divmod(rest, self.steps)
        return passes * -(-self.within // self.steps) + number, offset

    def period_ends_at(self, number: int) -> int:
        """Returns the step at which so many periods have ended."""
        if not self.within:
            return number * self.steps - self.shift
        passes, rest = divmod(number, -(-self.within // self.steps))
        return passes * self.within + rest * self.steps - self.shift

    def end_after(self, step: int) -> int:
        """Returns the next end of a period after a step."""
        return self.period_ends_at(self.position(step)[0] + 1)

    def ends_at(self, step: int) -> bool:
        """Returns whether a period ends at a step."""
        return self.position(step)[1] == 0


class Arrangement(NamedTuple):
    """How a hook, such as that of Keras callbacks, arranges the run's evaluations.

    Attributes:
      period: between evaluations; None: the run's.
      options: arguments of `evaluation.Evaluation`.
      may_end: returns whether an evaluation may be interrupted now.
      ends_at_nonfinite: whether the hook ends a run whose loss is not finite, so that such a loss is not an error.
    """

    period: Period | None
    options: Mapping[str, Any]
    may_end: Callable[[], bool]
    ends_at_nonfinite: bool


class Hook:
    """A hook that does nothing and is never due. Override methods as needed.

    Attributes:
      name: the name of the hook's state in checkpoints; unique among a run's hooks.
      spent_on: the kind of its time (`goodput.KINDS`).
      ends_last: whether its `end` is called after the last save, since it changes the state or may raise.
      is_pending: whether a request to end the run has interrupted it: it, and those after it, are called again before
        the next step, also of a resumed run.
      needs_epochs: whether it acts at epochs' ends, so data of unknown length must be counted.
      reads_metrics: whether it has to know the metrics of an evaluation before the first step: see `find_metrics`.
      runs_user_code: whether it runs a user's code, which may set variables, in this process only.

    Example:
      >>> class Slowest(Hook):
      ...     name = "slowest"
      ...     seconds = 0.0
      ...     def __call__(self, status):
      ...         self.seconds = max(self.seconds, status.segment.seconds)
      ...     def end(self, status):
      ...         print(f"the slowest call took {self.seconds:.3f} s")
    """

    name = "hook"
    spent_on = "other"
    ends_last = False
    is_pending = False
    needs_epochs = False
    reads_metrics = False
    runs_user_code = True

    def arranged(self, feed: Feed) -> Arrangement | None:
        """Returns how the evaluations of a run on this training data are arranged; None leaves that to the run."""
        return None

    def find_metrics(self, kinds: Mapping[str, type], trainer: Any) -> None:
        """Finds what it reads among the metrics of an evaluation, {} if none is made, by the kinds of their pairs."""

    def attach(self, state: TrainState, meter: Meter) -> None:
        """Adds to the state (`TrainState.hook_state`), and creates windows. Called once, before a restore."""

    def begin(self, status: Status) -> None:
        """Prepares the hook; called before the first step of this process."""

    def rewind(self, status: Status) -> None:
        """Restarts the hook after the state, and its own, were restored in this process."""
        self.begin(status)

    def last_step(self, feed: Feed) -> int | None:
        """Returns the step at which the run ends at the latest, on this training data; None is without limit."""
        return None

    def next_due(self, step: int, status: Status) -> int | None:
        """Returns the next step after `step` at which the loop must stop for this hook; None is never."""
        return None

    def schedule(self) -> str:
        """Describes when the loop must stop for this hook, which all processes must have alike; "" is never."""
        if type(self).next_due is Hook.next_due:
            return ""
        return type(self).__name__ if self.name == Hook.name else self.name

    def before_call(self, status: Status) -> None:
        """Acts before each call of the inner loop, which makes at least one step."""

    def __call__(self, status: Status) -> None:
        """Acts after each call of the inner loop, due or not. May set `status.stop`."""

    def before_save(self, status: Status) -> Any:
        """Prepares a save: raises if the state must not be saved, and writes what must be on disk first.

        Returns the value that `check_together` gets from every process, plain JSON; None: it is not called. Either
        all processes return a value, or none does.
        """

    def check_together(self, status: Status, values: list) -> None:
        """Raises if the state must not be saved, by what `before_save` has returned in each process, in order."""

    def end(self, status: Status) -> None:
        """Ends the hook after the last step, or after a hook stopped the run; not after an exception."""

    def close(self) -> None:
        """Releases the hook's resources (a terminal, a thread), however the run ended; after `end`, if called."""

    def host_state(self) -> dict:
        """Returns this hook's state for checkpoints, plain JSON."""
        return {}

    def restore_host_state(self, values: dict) -> None:
        """Continues from what `host_state` has returned, read back from a checkpoint."""

    def data_changed(self, splits: set[str]) -> None:
        """Discards measurements on these splits ("train", "eval"), whose data has changed.

        Called after `restore_host_state`.
        """


class RequestBit(enum.IntEnum):
    """The requests on which processes agree, by `Processes.agree_on_requests`: a bit each."""

    CHECKPOINT = 1  # these two by `crankshaft ask`
    PROFILE = 2
    SNAPSHOT = 4  # and these by a clock
    SAVE = 8


class AgreedStep:
    """The step at which all processes act, once the first one has requested it, for example by its clock."""

    def __init__(self, bit: RequestBit):
        self._bit = bit
        self._step: int | None = None

    def request(self, status: Status, is_time: Callable[[], bool]) -> bool:
        """Requests a step if the first process's `is_time`; returns whether all have agreed on one now.

        Every process calls it after each call of the inner loop.
        """
        if self._step is not None:
            return False
        requested = self._bit if status.strategy.is_chief and is_time() else 0
        if status.strategy.agree_on_requests(requested, self._bit):
            self._step = status.next_in_step()
        return self._step is not None

    def is_reached(self, status: Status) -> bool:
        """Returns whether the run has come to the step, and if so forgets it."""
        if self._step is None or status.step < self._step:
            return False
        self._step = None
        return True

    def next_due(self, step: int) -> int | None:
        """Returns the step if it is still ahead."""
        return self._step if self._step is not None and self._step > step else None


class Periodic(Hook):
    """A hook that acts every so many steps. Override `act`.

    Args:
      every_steps: the period, an int or a `Period`; 0 is never.
      at_end: also act at the run's last step.
      more: other periods, at whose ends it acts, too.

    Raises:
      UsageError: the period is not a whole number, or below 0.

    Example:
      >>> class Ping(Periodic):
      ...     def act(self, status):
      ...         print(f"step {status.step} of {status.until_step}")
      >>> ping = Ping(every_steps=100)
      >>> ping.next_due(step=250, status=None)
      300
    """

    def __init__(self, every_steps: int | Period, at_end: bool = False, more: Collection[int | Period] = ()):
        self.every_steps = every_steps
        self.at_end = at_end
        self.more = more
        _ = self._periods  # checks them

    @property
    def _periods(self) -> list[Period]:
        periods = (
            period if isinstance(period, Period) else Period(period) for period in (self.every_steps, *self.more)
        )
        return [period for period in periods if period.steps]

    def next_due(self, step: int, status: Status) -> int | None:
        return min((period.end_after(step) for period in self._periods), default=None)

    def schedule(self) -> str:
        steps = " and ".join(str(period.steps) for period in self._periods)
        return f"{super().schedule()} every {steps} steps" if steps else super().schedule()

    def ends_period(self, status: Status) -> bool:
        """Returns whether one of the periods ends at this step."""
        return any(period.ends_at(status.step) for period in self._periods)

    def is_due(self, status: Status) -> bool:
        return self.ends_period(status) or (self.at_end and status.last)

    def __call__(self, status: Status) -> None:
        if self.is_due(status):
            self.act(status)

    def act(self, status: Status) -> None:
        raise NotImplementedError


class Windowed(Periodic):
    """A periodic hook with a window of the calls since it last took them, whose metrics survive a restart.

    Args:
      every_steps: the period, see `Periodic`.
      at_end: whether to act also at the run's last step.
      more: other periods, see `Periodic`.

    Attributes:
      window: a `Window` of the run's meter; `window.take()` returns and clears the `Totals` of the calls since the last
        time, `window.totals` keeps them.

    Example:
      >>> class Loss(Windowed):
      ...     def act(self, status):
      ...         print(status.step, self.window.take().means()["loss"])
    """

    window: Window

    def attach(self, state: TrainState, meter: Meter) -> None:
        self.window = meter.window(self.name)


class StopRequest(Hook):
    """Ends the run at the next call after a request, or at a step.

    `request` can be called in a signal handler or a thread.

    Args:
      at_step: the step at which to end a longer run; a run that has already reached it makes no step.

    Attributes:
      reason: why this process wants the run to end; None before.

    Example:
      >>> stop = StopRequest()  # among a run's hooks
      >>> stop.request("the budget is spent")
      >>> stop.reason
      'the budget is spent'
    """

    name = "stop_request"

    def __init__(self, at_step: int | None = None):
        self.reason: str | None = None
        self._at_step = at_step

    def request(self, reason: str) -> None:
        """Requests the end; keeps the first reason."""
        self.reason = self.reason or reason

    def begin(self, status: Status) -> None:
        self(status)

    def next_due(self, step: int, status: Status) -> int | None:
        return self._at_step if self._at_step and self._at_step > step else None

    def __call__(self, status: Status) -> None:
        ends = self._at_step and status.step >= self._at_step and not status.last
        status.stop = status.stop or self.reason or (f"stop_at_step={self._at_step}" if ends else None)


class _Every(Windowed):
    def __init__(self, function: Callable, steps: int, name: str):
        super().__init__(steps)
        self.name = name
        self._function = function

    def act(self, status: Status) -> None:
        self._function(status, {"loss": math.nan, **self.window.take().means()})


class _EveryEpoch(_Every):
    needs_epochs = True

    def next_due(self, step: int, status: Status) -> int | None:
        return status.data_epoch.end_after(step)

    def is_due(self, status: Status) -> bool:
        return status.data_epoch.ends_at(status.step)


class _BeforeEpoch(Hook):
    needs_epochs = True

    def __init__(self, function: Callable[[Status], None], name: str):
        self.name = name
        self._function = function

    def next_due(self, step: int, status: Status) -> int | None:
        return status.data_epoch.end_after(step)

    def before_call(self, status: Status) -> None:
        if status.data_epoch.ends_at(status.step):
            self._function(status)


def every_steps(steps: int, function: Callable[[Status, dict[str, float]], None]) -> Hook:
    """Returns a user's hook that calls `function(status, metrics)` every so many steps, with the means since the last.

    Args:
      steps: the period, 1 or more.
      function: called with a `Status` and the means by name, floats. They always include `loss`; it is NaN if no step
        counted, since all were skipped.

    Raises:
      UsageError: the period is not 1 or more.

    Example:
      >>> hook = every_steps(100, lambda status, metrics: print(status.step, metrics["loss"]))
    """
    if isinstance(steps, numbers.Integral) and steps < 1:
        raise UsageError(f"every_steps({steps}, ...) is never called; use 1 or more, or leave the hook out")
    return _Every(function, steps, getattr(function, "__name__", "every_steps"))


def every_epoch(function: Callable[[Status, dict[str, float]], None]) -> Hook:
    """Returns a user's hook that calls `function(status, metrics)` at the end of each epoch, with the epoch's means.

    Args:
      function: see `every_steps`.

    Example:
      >>> hook = every_epoch(lambda status, metrics: print(status.epoch, metrics["loss"]))
    """
    return _EveryEpoch(function, 0, getattr(function, "__name__", "every_epoch"))


def before_every_epoch(function: Callable[[Status], None]) -> Hook:
    """Returns a user's hook that calls `function(status)` before the first step of each epoch, and not at a run's end.

    A run that is resumed where an epoch begins calls it: checkpoints of that step are written before.

    Args:
      function: called with a `Status`, whose `epoch` is the number of the epoch that begins, from 0.

    Example:
      >>> hook = before_every_epoch(lambda status: print("epoch", status.epoch, "begins"))
    """
    return _BeforeEpoch(function, getattr(function, "__name__", "before_every_epoch"))
