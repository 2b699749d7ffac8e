"""Hooks that save checkpoints, the newest and the best, and restoring."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence

from ..checkpoints import Checkpoints, Manifest
from ..errors import CheckpointError, SaveError
from ..meter import Meter, unused
from ..state import TrainState
from .base import AgreedStep, Hook, Periodic, RequestBit, Status
from .evaluation import Evaluated
from .monitors import Monitor


def by_name(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Returns hooks by the name of their state in checkpoints; repeated names get numbers: `log-2`."""
    named: dict[str, Hook] = {}
    for hook in hooks:
        named[unused(hook.name, named)] = hook
    return named


def save(checkpoints: Checkpoints, status: Status, hooks: Sequence[Hook], again: bool = False) -> None:
    """Saves the state of `status` and of the hooks; returns when training may continue, before it is written.

    The step saved last is not saved again, unless `again`. See `state_to_save`.

    Raises:
      SaveError: a call was interrupted, so the variables are not those of one step.
    """
    checkpoints.save(status.step, state_to_save(status, hooks), force=again)


def state_to_save(status: Status, hooks: Sequence[Hook]) -> dict:
    """Prepares a save, and returns what it has besides variables, plain JSON and NumPy scalars.

    Calls the `before_save` of each hook first, and its `check_together` with the values of all processes: a hook that
    detects a bad state raises, and nothing is saved. For a snapshot in memory all processes return what the first has.

    Raises:
      SaveError: see `save`.
      UsageError: see `Captured.check_save`.
    """
    state = status.state
    if not state.is_whole or state.step != status.step:
        raise SaveError(
            f"step {status.step} could not be written: the call after it was interrupted, so the variables are not "
            "those of one step; restore a checkpoint, as run.restore('latest') does, and train from there"
        )
    state.trainer.inventory.captured.check_save()
    named = by_name(hooks)
    # Before the position is stored, for which processes exchange theirs: a hook that finds the state bad raises here.
    prepared = {name: value for name, hook in named.items() if (value := hook.before_save(status)) is not None}
    state.input.capture(status.step)
    hook_states = {name: values for name, hook in named.items() if (values := hook.host_state())}
    host_state = {"state": state.host_state(), "hooks": hook_states, "meter": status.meter.host_state()}
    sends = status.in_memory and status.strategy.is_chief
    answers = status.strategy.exchange([prepared, host_state if sends else None])  # both in one round
    for name in prepared:
        named[name].check_together(status, [values[name] for values, _ in answers])
    return answers[0][1] if status.in_memory else host_state


def restore(
    checkpoints: Checkpoints,
    state: TrainState,
    hooks: Sequence[Hook] = (),
    manifest: Manifest | None = None,
    allow_changed: bool = False,
    meter: Meter | None = None,
) -> Manifest | None:
    """Restores a run's state and hooks from a checkpoint. Call it before the loop begins.

    Args:
      state: built, with the checkpoint's model and optimizer.
      hooks: in the same order as when saved, for repeated names; a hook that is not in the checkpoint stays new.
      manifest: the checkpoint's; None is the latest valid one.
      allow_changed: whether trained variables and the optimizer may differ; matching names are restored
        (`TrainState.matching`).
      meter: the loop's, whose windows are also restored; None restores none.

    Returns:
      The restored manifest; None, without changes, if there is no checkpoint.

    Raises:
      CheckpointError: the checkpoint can't be read, or a hook can't restore its state.
    """
    manifest = checkpoints.restore(manifest, state.matching, allow_changed)
    if manifest is None:
        return None
    # Measurements by other rules are discarded like those on other data.
    saved_state = manifest.host_state.get("state", {})
    changed = {"train", "eval"} if state.changed_rules(saved_state) else manifest.other_data(checkpoints.about)
    host_state = copy.deepcopy(manifest.host_state)  # which is changed afterwards, and the manifest may be read again
    saved = host_state.get("hooks", {})
    owner = "state"
    try:
        state.restore_host_state(host_state.get("state", {}))
        for name, hook in by_name(hooks).items():
            if name in saved:
                owner = f"hooks.{name}"
                hook.restore_host_state(saved[name])
                hook.data_changed(changed)
        if meter is not None:
            owner = "meter"
            meter.restore_host_state({} if "train" in changed else host_state.get("meter", {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{manifest.name} in {checkpoints.directory}: its host_state.{owner} can't be restored ({error!r}); "
            "restore the manifest from a copy, or move this checkpoint away to continue from the previous one"
        ) from error
    return manifest


class Checkpointing(Periodic):
    """Saves a checkpoint periodically and at the run's end, and ends a run that has lost its folder.

    Time is that of the first process's clock: all save at the step at which they know that it is time.

    One that can't be written, e.g. on a full disk, is logged and the run continues; the last one has to be written.

    It comes last among a run's hooks, so that the checkpoint includes the others' changes at the same step.

    Args:
      every_steps: the period; 0 is never.
      hooks: the run's hooks, for their state; may be the list to which this hook is appended.
      every_seconds: the time since the last checkpoint after which another is saved; 0 is never.
    """

    name = "checkpointing"
    spent_on = "checkpoints"

    def __init__(
        self,
        checkpoints: Checkpoints,
        every_steps: int,
        hooks: Sequence[Hook] = (),
        every_seconds: float = 0.0,
        clock=time.monotonic,
    ):
        super().__init__(every_steps, at_end=True)
        self.checkpoints = checkpoints
        self.hooks = hooks
        self._every_seconds, self._clock = every_seconds, clock

    def begin(self, status: Status) -> None:
        self.checkpoints.check()
        self._agreed, self._saved_at = AgreedStep(RequestBit.SAVE), self._clock()

    def next_due(self, step: int, status: Status) -> int | None:
        due = super().next_due(step, status), self._agreed.next_due(step)
        return min((step for step in due if step is not None), default=None)

    def __call__(self, status: Status) -> None:
        self.checkpoints.check()
        self._agreed.request(status, self._is_time)
        if self._agreed.is_reached(status) or self.is_due(status):
            self.act(status)

    def _is_time(self) -> bool:
        return bool(self._every_seconds) and self._clock() - self._saved_at >= self._every_seconds

    def act(self, status: Status) -> None:
        self._saved_at = self._clock()
        # Without new steps, this is the call after an evaluation that an earlier process's end interrupted.
        save(self.checkpoints, status, self.hooks, again=not status.segment.steps)

    def end(self, status: Status) -> None:
        if status.segment.steps:  # else no step was done
            save(self.checkpoints, status, self.hooks)  # does nothing if this step is saved
        self.checkpoints.wait()

    def close(self) -> None:
        with contextlib.suppress(SaveError):  # a failed run reports its own error
            self.checkpoints.wait()


class Best(Monitor):
    """Keeps the state of the best evaluation. Override `keep`.

    Attributes:
      evaluation: all metrics of the best evaluation; None before there is one.
    """

    evaluation: Evaluated | None = None

    def observe(self, status: Status, value: float, improved: bool) -> None:
        if improved:
            evaluated = status.evaluation or {}
            self.evaluation = evaluated if isinstance(evaluated, Evaluated) else Evaluated(evaluated)
            self.keep(status)

    def keep(self, status: Status) -> None:
        """Keeps the state, the best so far."""
        raise NotImplementedError

    def forget(self) -> None:
        super().forget()
        self.evaluation = None

    def recall(self, values: dict) -> None:
        super().recall(values)
        self.evaluation = None if self.best is None else Evaluated.from_host_state(values.get("evaluation", {}))

    def host_state(self) -> dict:
        return {**super().host_state(), "evaluation": self.evaluation.host_state() if self.evaluation else {}}


class BestCheckpoint(Best):
    """Saves a checkpoint, in a separate directory (`run_dir/best`), whenever the metric is the best so far.

    The best value is stored with the best checkpoint itself: a run that is resumed from before it, or without its
    hooks' state, still replaces it only by a better one.

    Args:
      checkpoints: the destination; created with `keep=1`.
      **arguments: `Monitor`'s other ones.
    """

    name = "best_checkpoint"
    spent_on = "checkpoints"
    ends_last = True  # it raises if the best one was not written, and the run is to be saved all the same

    def __init__(self, checkpoints: Checkpoints, monitor: str, hooks: Sequence[Hook] = (), **arguments):
        super().__init__(monitor, **arguments)
        self.checkpoints = checkpoints
        self.hooks = hooks

    def begin(self, status: Status) -> None:
        # The files on disk decide, not this run's memory: a best checkpoint that is broken or was removed does not
        # count, but one that a killed process saved after its last other checkpoint does. A score on other data does
        # not count, either.
        manifest = self.checkpoints.latest()
        if manifest and self.monitored.source in manifest.other_data(self.checkpoints.about):
            manifest = None
        saved = manifest.host_state.get("hooks", {}) if manifest else {}
        values = [v for v in saved.values() if v.get("monitor") == self.monitor and v.get("is_best")]
        values = [v for v in values if isinstance(v.get("best"), (int, float))]
        self.best = self.best_step = self.evaluation = None
        if manifest and values:
            self.recall({**values[0], "best_step": manifest.step})

    def __call__(self, status: Status) -> None:
        if not self.is_pending:
            super().__call__(status)
        else:  # the run continues from this checkpoint, and the hooks after this one have not seen its evaluation
            self.is_pending, status.evaluation = False, copy.copy(self.evaluation)

    def keep(self, status: Status) -> None:
        hooks = self.hooks if self in self.hooks else [*self.hooks, self]
        self.is_pending = True  # in the checkpoint: see above
        try:
            save(self.checkpoints, status, hooks)
        finally:
            self.is_pending = False

    def end(self, status: Status) -> None:
        self.checkpoints.wait()

    def host_state(self) -> dict:
        return {**super().host_state(), "is_best": True, **({"is_pending": True} if self.is_pending else {})}

    def restore_host_state(self, values: dict) -> None:
        super().restore_host_state(values)
        self.is_pending = values.get("is_pending", False)


class BestWeights(Best):
    """Copies the whole state whenever the metric is the best so far, for runs without checkpoints.

    `put_back` restores that state; None before there is a best value.
    """

    name = "best_weights"
    spent_on = "checkpoints"

    def __init__(self, monitor: str, **arguments):
        super().__init__(monitor, **arguments)
        self.put_back: Callable[[], None] | None = None

    def keep(self, status: Status) -> None:
        self.put_back = None  # so that there is only one copy at a time
        self.put_back = status.state.make_restorer()
