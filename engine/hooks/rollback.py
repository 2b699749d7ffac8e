"""Takes a run back to its last good state after an error in its numbers, and leaves out the steps that cause it.

Host code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import logging
from ..checkpoints import Checkpoints
from ..errors import NonfiniteError, OutOfSyncError, RunError, counted
from ..state import TrainState
from ..strategies.base import LoopResult, Program, Strategy
from . import numerics, saving
from .base import Hook, Status


class Rollback(Hook):
    """Repeats a run from its last checkpoint after `NonfiniteError` or `OutOfSyncError`, at most `most` times.

    The steps one of which may have caused an inf or NaN are repeated one by one, each from a copy of the state. One
    that is not finite again is left out: the copy is put back, the step counts, and its batch is not used again. A
    checkpoint is then saved, so a resumed run does not come to that step. All processes act alike.

    It comes after all hooks that save.

    Args:
      most: how many times to return, in the whole run.
      checkpoints: of the run. They begin with one of the state before its first step.
      hooks: the run's, as for `saving.Checkpointing`.

    Attributes:
      returns: how many times it has returned.
      left_out: the steps that were left out, in order.
    """

    name = "rollback"
    spent_on = "checkpoints"

    def __init__(self, most: int, checkpoints: Checkpoints, hooks: Sequence[Hook]):
        self.most, self.returns = most, 0
        self.left_out: list[int] = []
        self._checkpoints, self._hooks = checkpoints, hooks
        self._suspects = range(0)

    def begin(self, status: Status) -> None:
        saving.save(self._checkpoints, status, self._hooks)  # does nothing if the run was resumed

    def rewind(self, status: Status) -> None:
        pass

    def next_due(self, step: int, status: Status) -> int | None:
        alone = min((suspect for suspect in (*self._suspects, *self.left_out) if suspect > step), default=None)
        return None if alone is None else max(step + 1, alone - 1)

    def run(self, strategy: Strategy, program: Program, limit: int) -> LoopResult:
        """Executes steps of training as `Strategy.run`, or a suspect alone; the result of one left out has no sums."""
        state = strategy.state
        step = state.step + 1
        if step not in self._suspects and step not in self.left_out:
            return strategy.run(program, limit)
        put_back = state.make_restorer()
        result = strategy.run(program, 1)
        if step not in self.left_out:
            if (why := _mistake(strategy, state, result)) is None:
                return result
            self.left_out.append(step)
            logging.warning("step %d is left out, with its batch: %s", step, why)
        put_back()
        state.advance(1)
        return LoopResult(None, 1, result.input_seconds)

    def __call__(self, status: Status) -> None:
        if status.step in self._suspects and status.step in self.left_out:
            saving.save(self._checkpoints, status, self._hooks)

    def check(self, status: Status) -> None:
        """Raises what the last save would raise, while the run can return."""
        saving.state_to_save(status, self._hooks)

    def after(self, error: NonfiniteError | OutOfSyncError, restore: Callable[[], None], state: TrainState) -> None:
        """Returns to the last good state after an error.

        Args:
          error: that training has raised, in all processes.
          restore: restores the run's newest checkpoint.
          state: of the run.

        Raises:
          RunError: the same error, if no step has caused it, or after `most` returns.
        """
        steps = error.steps if isinstance(error, NonfiniteError) else (0, 0)
        if steps is None:
            raise error
        if self.returns >= self.most:
            line = f"{error.message}; the run has returned to a checkpoint {counted(self.returns, 'time')}"
            raise type(error)(line) from error
        found_at, progress = state.step, (self.returns + 1, self.left_out)
        restore()
        self.returns, self.left_out = progress
        first, last = steps
        # A step whose loss is finite may have left weights that are not.
        self._suspects = range(max(state.step + 1, first - 1), last + 1)
        logging.warning(
            "%s. The run returns from step %d to step %d (return %d of at most %d)",
            error.message,
            found_at,
            state.step,
            self.returns,
            self.most,
        )

    def host_state(self) -> dict:
        return {"returns": self.returns, "left_out": self.left_out} if self.returns else {}

    def restore_host_state(self, values: dict) -> None:
        self.returns, self.left_out = values.get("returns", 0), values.get("left_out", [])


def _mistake(strategy: Strategy, state: TrainState, result: LoopResult) -> str | None:
    """Returns in what way a step was not finite, the same in all processes; None if it was."""
    totals = result.sums.read()
    if wrong := ", ".join(f"{name} is {value}" for name, value in numerics.nonfinite_metrics(totals)):
        return wrong
    try:
        numerics.check_weights(state.trainer, "after it", strategy)
    except RunError as error:
        return error.message.partition(";")[0]
    return None
