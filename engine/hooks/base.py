"""The contract of hooks and the basic ones: callables with a period, called by the outer loop on the host.

A hook sees every call of the inner loop (so that it can gather sums without waiting for a device) and acts when it is
due. Its own state, if it has any, goes into each checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..internals.errors import UsageError
from ..metrics.sums import LoopSums, Sums
from ..state import TrainState

if TYPE_CHECKING:
    from ..strategies.base import Stop, Strategy


@dataclasses.dataclass
class Status:
    """Where a run stands: one small record, handed to every hook after each call of the inner loop.

    Attributes:
      step: global steps (updates) done.
      until_step: where the run ends; None where only its caller knows.
      steps: steps done by this call.
      examples: in the batches of this call; an epoch's last batch may be a smaller one.
      steps_per_epoch: of the training data, in batches of the run's present size.
      epoch_shift: what is added to the step to count epochs; not 0 where the run was resumed with another batch size.
      sums: this call's metrics, unread: reading waits for the device.
      seconds: wall time of this call.
      input_seconds: spent in it waiting for input.
      input_bytes: read meanwhile by this process, ahead mostly; None where nothing is read as steps go.
      steps_ahead: whose examples are read and not taken yet; None where that is not known.
      state: the `TrainState`.
      strategy: where steps run, for hooks that evaluate.
      workers: each worker's figures of this call, unread, where there are several (`WorkerRows`).
      evaluation: the metrics of an evaluation at this step, once a hook has made one.
      off_schedule: whether that was made only because the run ends here.
      stop: set by a hook that wants the run to end, to the reason. Of several workers, any one's hook may: all end at
        one step, this one if something is due at it, else after the next call or two.
      agreed_stop: why the run ends, and which worker wants it to, once all know.
      compiles: whether a program was compiled in this call.
      seconds_left: to the run's end, by the clock since the first call, evaluations and checkpoints included; None if
        the end or the rate is not known.
      hook_seconds: what hooks have taken so far, by `Hook.spent_on`; and what agreeing with other processes has.

    Example:
      >>> def stop_after_an_epoch(status, metrics):  # hooks.every_steps(10, stop_after_an_epoch)
      ...     if status.epoch >= 1:
      ...         status.stop = "one epoch is enough"
    """

    step: int
    until_step: int | None
    steps: int
    examples: int
    steps_per_epoch: int
    sums: LoopSums | None
    seconds: float
    input_seconds: float
    state: TrainState
    strategy: Strategy
    workers: Any = None
    input_bytes: int | None = None
    steps_ahead: float | None = None
    evaluation: dict[str, float] | None = None
    off_schedule: bool = False
    stop: str | None = None
    agreed_stop: Stop | None = None
    compiles: bool = False
    seconds_left: float | None = None
    hook_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    epoch_shift: int = 0

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return (self.step + self.epoch_shift) // self.steps_per_epoch

    @property
    def epochs(self) -> float:
        """Epochs done."""
        return (self.step + self.epoch_shift) / self.steps_per_epoch

    @property
    def data_epoch(self) -> Period:
        """The period of the data's epochs."""
        return Period(self.steps_per_epoch, self.epoch_shift)

    @property
    def last(self) -> bool:
        return self.until_step is not None and self.step >= self.until_step


@dataclasses.dataclass(frozen=True)
class Period:
    """Every so many steps: those that are multiples of `steps` once `shift` is added.

    Raises:
      UsageError: the period is not a whole number, or below 0.
    """

    steps: int
    shift: int = 0

    def __post_init__(self):
        if not isinstance(self.steps, numbers.Integral) or self.steps < 0:
            raise UsageError(f"every_steps={self.steps!r} is not a number of steps; use 1 or more, or 0 for never")

    def end_after(self, step: int) -> int:
        """Returns the first end of a period after a step."""
        return ((step + self.shift) // self.steps + 1) * self.steps - self.shift

    def ends_at(self, step: int) -> bool:
        """Returns whether a period ends at a step."""
        return (step + self.shift) % self.steps == 0


class Hook:
    """A hook that does nothing and is never due. Override what is needed.

    Attributes:
      name: names the hook's state in a checkpoint; unique among a run's hooks.
      spent_on: what its time is counted as, of what a run's time goes to (`goodput.KINDS`).
      ends_last: whether its `end` is called after the last save, since it changes what is saved.
      needs_epochs: whether it acts at the ends of epochs, so that data of unknown length has to be counted.

    Example:
      >>> class Slowest(Hook):
      ...     name = "slowest"
      ...     seconds = 0.0
      ...     def __call__(self, status):
      ...         self.seconds = max(self.seconds, status.seconds)
      ...     def end(self, status):
      ...         print(f"the slowest call took {self.seconds:.3f} s")
    """

    name = "hook"
    spent_on = "other"
    ends_last = False
    needs_epochs = False

    def attach(self, state: TrainState) -> None:
        """Has the state keep more (`TrainState.of_hooks`). Called once, before it is restored."""

    def begin(self, status: Status) -> None:
        """Prepares the hook; called before the first step of this process."""

    def rewind(self, status: Status) -> None:
        """Begins again after the state, and the hook's own, were restored in this process."""
        self.begin(status)

    def next_due(self, step: int, status: Status) -> int | None:
        """Returns the next step, after `step`, at which the loop has to stop for this hook; None is never."""
        return None

    def __call__(self, status: Status) -> None:
        """Acts after each call of the inner loop, due or not. May set `status.stop`."""

    def settle(self, status: Status) -> None:
        """Prepares a save: raises if the state must not be saved, and writes what must be on disk by then."""

    def end(self, status: Status) -> None:
        """Ends the hook after the last step, or when a hook stopped the run; not after an exception."""

    def close(self) -> None:
        """Releases what the hook holds (a terminal, a thread), however the run ended; after `end`, if called."""

    def host_state(self) -> dict:
        """Returns what a checkpoint keeps of this hook: plain JSON."""
        return {}

    def restore_host_state(self, values: dict) -> None:
        """Restores what `host_state` returned."""

    def data_changed(self, splits: set[str]) -> None:
        """Forgets what was measured on these splits ("train", "eval"), whose data has changed.

        Called after `restore_host_state`.
        """


class Periodic(Hook):
    """A hook that acts every so many steps. Override `act`.

    Args:
      every_steps: the period, an int or a `Period`; 0 is never.
      at_end: act at the run's last step too, whatever the period.
      more: other periods, at whose ends it acts too.

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

    every_steps: int | Period
    at_end: bool
    more: Collection[int | Period] = ()

    def __init__(self, every_steps: int | Period, at_end: bool = False, more: Collection[int | Period] = ()):
        self.every_steps = every_steps
        self.at_end = at_end
        self.more = more
        _ = self._periods  # which checks them

    @property
    def _periods(self) -> list[Period]:
        periods = (each if isinstance(each, Period) else Period(each) for each in (self.every_steps, *self.more))
        return [period for period in periods if period.steps]

    def next_due(self, step: int, status: Status) -> int | None:
        return min((period.end_after(step) for period in self._periods), default=None)

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


class Rates:
    """Adds up calls of the inner loop: their steps, examples, time and input.

    Args:
      leaves_out_first: whether the first call, which compiles, counts only until there is another.
      memory_seconds: of more time than this, older calls count for less.

    Attributes:
      calls: that were added.
    """

    def __init__(self, leaves_out_first: bool = False, memory_seconds: float = math.inf):
        self.calls = 0
        self._leaves_out_first = leaves_out_first
        self._memory_seconds = memory_seconds
        self._totals: dict[str, float] = {}

    def add(self, status: Status) -> None:
        """Adds one call."""
        fade = 1.0 - status.seconds / self._memory_seconds if self.seconds > self._memory_seconds else 1.0
        if self._leaves_out_first and self.calls == 1:
            fade = 0.0
        latest = {"seconds": status.seconds, "steps": status.steps, "examples": status.examples}
        latest["input_seconds"] = status.input_seconds
        if status.input_bytes is not None:
            latest["input_bytes"] = status.input_bytes
        if status.steps_ahead is not None:
            latest |= {"steps_ahead": status.steps_ahead, "calls_ahead": 1}
        totals = self._totals if fade == 1.0 else {name: max(0.0, fade) * x for name, x in self._totals.items()}
        self._totals = {**totals, **{name: totals.get(name, 0) + value for name, value in latest.items()}}
        self.calls += 1

    @property
    def seconds(self) -> float:
        """Wall time of the calls."""
        return self._totals.get("seconds", 0.0)

    @property
    def steps(self) -> int:
        """The steps that the calls did."""
        return int(self._totals.get("steps", 0))

    @property
    def speeds(self) -> dict[str, float]:
        """`steps_per_sec` and `examples_per_sec`; none where no time has passed."""
        return {f"{name}_per_sec": self._totals[name] / self.seconds for name in ("steps", "examples") if self.seconds}

    @property
    def input(self) -> dict[str, float]:
        """What input takes, of this process; none where no time has passed.

        `input_wait_fraction`: the share of the time in which steps wait for input. And of what is read as steps go,
        from files or a dataset: `input_wait_ms`, of a step; `input_bytes_per_sec`; where it is known,
        `input_steps_ahead`: steps whose examples are there before they are asked for, on average over the calls.
        """
        if not self.seconds:
            return {}
        totals, waited = self._totals, self._totals["input_seconds"]
        figures = {"input_wait_fraction": min(1.0, waited / self.seconds)}
        if "input_bytes" in totals:
            figures["input_wait_ms"] = 1e3 * waited / max(1.0, totals["steps"])
            figures["input_bytes_per_sec"] = totals["input_bytes"] / self.seconds
        if totals.get("calls_ahead"):
            figures["input_steps_ahead"] = totals["steps_ahead"] / totals["calls_ahead"]
        return figures


class Window(Rates):
    """Calls of the inner loop, with the sums of their metrics.

    Args:
      values: what `host_state` returned: of the metrics alone.
    """

    def __init__(self, values: dict | None = None):
        super().__init__()
        self._sums = Sums(values)

    def add(self, status: Status) -> None:
        super().add(status)
        if status.sums is not None:
            self._sums.add(status.sums)

    def means(self) -> dict[str, float]:
        """Returns the metrics' means. Waits for the steps that were added."""
        return self._sums.means()

    def steady_means(self) -> dict[str, float]:
        """Returns `means` but that of the gradients' norm, which is measured only where something is due."""
        return {name: mean for name, mean in self.means().items() if name != "gradient_norm"}

    def host_state(self) -> dict[str, list]:
        """Returns the metrics' sums as JSON takes them. Waits as `means` does."""
        return self._sums.host_state()


class Windowed(Periodic):
    """A periodic hook with a window of the calls since it last acted, whose metrics survive a restart.

    `act` may keep `window`: the next one is a new object.

    Args:
      every_steps: as `Periodic` takes it.
      at_end: likewise.
      more: likewise.

    Attributes:
      window: the sums since the hook last acted; `means()` reads them.

    Example:
      >>> class Loss(Windowed):
      ...     def act(self, status):
      ...         print(status.step, self.window.means()["loss"])
    """

    def __init__(self, every_steps: int | Period, at_end: bool = False, more: Collection[int | Period] = ()):
        super().__init__(every_steps, at_end, more)
        self.window = Window()

    def __call__(self, status: Status) -> None:
        self.window.add(status)
        if self.is_due(status):
            self.act(status)
            self.window = Window()

    def host_state(self) -> dict:
        return {"window": self.window.host_state()}

    def restore_host_state(self, values: dict) -> None:
        self.window = Window(values.get("window"))

    def data_changed(self, splits: set[str]) -> None:
        if "train" in splits:
            self.window = Window()


class StopRequest(Hook):
    """Ends the run at the next call after a request. `request` may be called in a signal handler or a thread.

    Attributes:
      reason: why this process wants the run to end; None before.

    Example:
      >>> stop = StopRequest()  # among a run's hooks
      >>> stop.request("the budget is spent")
      >>> stop.reason
      'the budget is spent'
    """

    name = "stop_request"

    def __init__(self):
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """Requests the end; the first reason stays."""
        self.reason = self.reason or reason

    def begin(self, status: Status) -> None:
        self(status)

    def __call__(self, status: Status) -> None:
        status.stop = status.stop or self.reason


class _Every(Windowed):
    def __init__(self, function: Callable, steps: int, name: str):
        super().__init__(steps)
        self.name = name
        self._function = function

    def act(self, status: Status) -> None:
        self._function(status, {"loss": math.nan, **self.window.means()})


class _EveryEpoch(_Every):
    needs_epochs = True

    def next_due(self, step: int, status: Status) -> int | None:
        return status.data_epoch.end_after(step)

    def is_due(self, status: Status) -> bool:
        return status.data_epoch.ends_at(status.step)


def every_steps(steps: int, function: Callable[[Status, dict[str, float]], None]) -> Hook:
    """Makes a user's hook: calls `function(status, metrics)` every so many steps, with the means since the last.

    Args:
      steps: the period, 1 or more.
      function: takes a `Status` and the means by name, floats. `loss` is always among them; it is nan where no step
        counted, since float16's loss scale skipped them all.

    Raises:
      UsageError: the period is not 1 or more.

    Example:
      >>> hook = every_steps(100, lambda status, metrics: print(status.step, metrics["loss"]))
    """
    if isinstance(steps, numbers.Integral) and steps < 1:
        raise UsageError(f"every_steps({steps}, ...) is never called; use 1 or more, or leave the hook out")
    return _Every(function, steps, getattr(function, "__name__", "every_steps"))


def every_epoch(function: Callable[[Status, dict[str, float]], None]) -> Hook:
    """Makes a user's hook: calls `function(status, metrics)` at the end of each epoch, with the epoch's means.

    Args:
      function: see `every_steps`.

    Example:
      >>> hook = every_epoch(lambda status, metrics: print(status.epoch, metrics["loss"]))
    """
    return _EveryEpoch(function, 0, getattr(function, "__name__", "every_epoch"))
