"""An assembled run: its parts, on which the modes work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..engine.checkpoints import Checkpoints
from ..engine.data import form
from ..engine.data.run_data import Data
from ..engine.data.source import Source, Split, WithoutBadRecords
from ..engine.data.streamed import Stream
from ..engine.hooks import Hook, StopRequest
from ..engine.hooks.base import Period
from ..engine.hooks.evaluation import FinalWeights
from ..engine.hooks.sync_check import SyncCheck
from ..engine.loop import Loop
from ..engine.state import TrainState
from ..engine.strategies.base import Strategy
from ..engine.trainer import Trainer
from . import terminal
from .command_line.config import Config, whole_periods
from .data.inputs import Inputs
from .history import History
from .host.signals import Signals
from .saved.preprocessor import Names

if TYPE_CHECKING:
    from ..engine.record.recorder import Recorder


@dataclasses.dataclass(repr=False, eq=False)
class BaseRun:
    """An assembled run, which is the argument of the modes' functions.

    `Run` adds the calls of a program. Of runs that train, `training.prepare` sets the attributes from `loop` on.

    Attributes:
      train_steps: the total number of updates; None if only the run's caller knows.
      checkpoints: checkpoints of the run; None without a run_dir.
      best: the checkpoint of the best evaluation; None without a run_dir.
      external_streams: the datasets that calls brought last, whether by batch, and each one's split.
      hooks: hooks of a run that trains, in the order in which they act.
      record: hook that writes the run's events; None in workers but the chief.
      sync_check: the check that compares replicas, if there are several.
      take_from_memory: writes the newest snapshot after a step that the attempt before has left in memory, and returns
        its step; None if the run takes no snapshots.
      resumed_from: step of the checkpoint that the run was resumed from; None without one.
      is_from_memory: whether that checkpoint is a snapshot that the attempt before has left in memory.
      is_ready: whether the run's steps were checked and their compiler was chosen.
      signals: the context in which a signal ends training at a step; the caller then decides what to do with the run.
      stop_request, history_hook, final: hooks: the requested stop, the run's history, and whether the weights have
        changed since they were evaluated.
    """

    config: Config
    strategy: Strategy
    inputs: Inputs
    state: TrainState
    train_steps: int | None
    checkpoints: Checkpoints | None
    best: Checkpoints | None
    external_streams: list[tuple[Any, bool, Split]] = dataclasses.field(default_factory=list)
    hooks: list[Hook] = dataclasses.field(default_factory=list)
    record: Recorder | None = None
    sync_check: SyncCheck | None = None
    take_from_memory: Callable[[int], int | None] | None = None
    resumed_from: int | None = None
    is_from_memory: bool = False
    is_ready: bool = False
    loop: Loop = dataclasses.field(init=False)
    signals: Signals = dataclasses.field(init=False)
    stop_request: StopRequest = dataclasses.field(default_factory=StopRequest)
    history_hook: History = dataclasses.field(init=False)
    final: FinalWeights = dataclasses.field(init=False)

    @functools.cached_property
    def names(self) -> Names:
        """Names of the model's numbers: `classes`, by label number, and `ids(features)`, which looks up text."""
        return Names(self.data_info)

    @property
    def data_info(self) -> Data:
        """The description of the data, without its examples."""
        return self.inputs.data_info

    @property
    def logits_kind(self) -> str | None:
        """The kind of logits that the trainer's `forward` outputs."""
        return self.trainer.logits_kind

    @property
    def splits(self) -> Mapping[str, Source | Stream]:
        """The run's examples, as `Data.splits`."""
        return self.inputs.splits

    def checkpoints_for(self, which: str | int) -> Checkpoints:
        """Returns the checkpoints of the run, where it has a run_dir: those of the best evaluation for "best"."""
        checkpoints = self.best if which == "best" else self.checkpoints
        assert checkpoints is not None, "run_dir is not given"
        return checkpoints

    @property
    def example(self) -> Any:
        """A batch of one example, zeros, in the form of the data."""
        return self.inputs.example

    @property
    def no_jit_reason(self) -> str:
        """Why training can't be one XLA program, whatever --jit is; "" if it can."""
        return self.config.no_jit_reason or self.strategy.no_jit_reason or ""

    @property
    def features(self) -> Any:
        """One example's features, as a batch of one, from which models are built."""
        return form.features(self.example)

    @property
    def trainer(self) -> Trainer:
        """The trainer, on which the run works."""
        return self.state.trainer

    @property
    def step(self) -> int:
        """Updates done."""
        return self.state.step

    @property
    def stop(self) -> str | None:
        """Why the run has stopped training: its end, or a hook's reason; None while it trains."""
        if not self.config.trains:
            return None
        status = self.loop.status
        last = f"step {status.step} is the last of the run" if status.last else None
        return str(status.stop) if status.stop else last

    @property
    def has_evaluation(self) -> bool:
        """Whether there is evaluation data."""
        return bool(self.inputs.evaluation_feeds)

    @property
    def evaluates(self) -> bool:
        """Whether the run itself makes evaluations."""
        return self.config.mode == "train_and_eval" and self.has_evaluation

    @property
    def epoch_period(self) -> Period:
        """The steps between actions due each epoch: the epoch's steps, rounded up to whole sync periods."""
        order = self.strategy.training.feed.order
        return Period(whole_periods(order.steps_per_epoch, self.config.sync_every_steps), order.shift)

    @property
    def prints(self) -> bool:
        """Whether the run prints its progress: on the chief alone, and not with --progress=off."""
        return self.strategy.is_chief and self.config.progress != "off"

    def log(self, *lines: str) -> None:
        """Prints lines, where the run `prints`."""
        for line in lines if self.prints else ():
            print(terminal.fitted(line, sys.stdout), flush=True)

    def timed_as(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Counts the time within as spent on something, one of `goodput.KINDS`."""
        return self.record.timed_as(kind) if self.record else contextlib.nullcontext()

    def bad_records(self) -> dict[str, int]:
        """Returns how many records were left out of each split that may have bad ones, by any of the workers."""
        left_out = {name: split for name, split in self.splits.items() if isinstance(split, WithoutBadRecords)}
        return {name: len(self.strategy.bad_records(split)) for name, split in left_out.items()}
