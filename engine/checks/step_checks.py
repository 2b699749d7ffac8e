"""Traces a step, and has it checked by all the others of this folder."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from .. import logging
from ..errors import UsageError
from ..internals import graphs
from ..internals.variables import variable_path
from ..own_code import users_line, users_line_in
from ..state import TrainState
from ..step.context import StepContext
from ..step.runner import StepRunner
from .compiled import check_compilable, warn_of_step
from .losses import check_losses
from .options import check_options
from .python_state import PythonState, Retrace
from .variables import SecondTrace, check_aggregated, check_saved, check_written

_MADE_IN_A_STEP = (
    "{}: its step makes variables as it is traced ({}), {}; make them in build, after super().build(), as in self.m = "
    "[tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables], or build there the layer or "
    "optimizer that makes them"
)
_ELSEWHERE = (
    "{}: its step uses, at {}, a tensor of another {}, made at {}, since both have the object that keeps it; {}"
)


class StepChecks:
    """The checks of a program's step.

    Args:
      state, runner: the trainer's state, and what runs its step; None for a step that is not a trainer's.
      trains: whether it is `Trainer.train_step`.
      replicas: how many have copies of the variables.
      jit: whether XLA compiles it.
      run_eagerly: whether its Python runs at each step.
      check_assigned: a strategy's own check of what a training step assigns, with its graph and the replicas' contexts;
        None checks that what each replica assigns from its examples is aggregated.

    Attributes:
      second_trace: on which variables a second trace decides.
    """

    def __init__(
        self,
        state: TrainState | None,
        runner: StepRunner | None,
        trains: bool = True,
        replicas: int = 1,
        jit: bool = False,
        run_eagerly: bool = False,
        check_assigned: Callable[[tf.Graph, Sequence[StepContext]], None] | None = None,
    ):
        self._state, self._runner, self._trains, self._replicas = state, runner, trains, replicas
        self._jit, self._run_eagerly, self._check_assigned = jit, run_eagerly, check_assigned
        self.second_trace = SecondTrace()
        self._retrace: Retrace | None = None  # which lives as long as the program

    def traced(self, trace: Callable[[], tf.types.experimental.ConcreteFunction], replicates_batch: bool = False):
        """Traces a step by calling `trace`, checks it, and returns it.

        Args:
          replicates_batch: whether each replica computes the whole batch, so that what it assigns is the others' too.
        """
        before = _variables(self._state)
        python = self._state and not self._run_eagerly and PythonState(self._state.trainer.inventory.captured.owners)
        try:
            step = trace()
        except Exception as error:
            self._check_made(before, error)
            if self._state and type(error).__name__ == "InaccessibleTensorError":
                used = users_line(traceback.extract_tb(error.__traceback__))
                made = users_line_in(str(error))
                cure = "return it from where it is made, or assign its value to a tf.Variable"
                owner = type(self._state.trainer).__name__
                raise UsageError(_ELSEWHERE.format(owner, used, "trace, branch or loop", made, cure)) from error
            if not isinstance(error, UsageError):
                raise
            # A loss's mistake may be why, such as comparing pairs, which has no gradient: that is the error to show.
            if self._runner and self._state:
                check_losses(self._runner.pop_contexts(), type(self._state.trainer).__name__)
            raise
        self._check_made(before)
        replicas_traced = self._check(step.graph, replicates_batch)
        # With other processes, whose Python may change nothing, a second trace would number collectives differently.
        if python and self._state and self._runner and replicas_traced == self._replicas:
            python.warn_if_computed(step.graph, trace, self._runner.pop_contexts)
            self._retrace = Retrace(self._state.trainer.inventory.captured, trace, self._runner.pop_contexts)
        if self.second_trace.is_needed:
            # Of this trace nothing is run: it only shows which of the constants change with the batch's size.
            with self.second_trace.deciding():
                self._check(trace().graph)
        if self._jit:
            check_compilable(step.graph)
        warn_of_step(
            step.graph, self._replicas, is_resumed=bool(self._trains and self._state and self._state.is_resumed)
        )
        return step

    def _check_made(self, before: Mapping[int, tf.Variable], error: Exception | None = None) -> None:
        """Raises UsageError for variables that the trace has made, which a resumed run would lack, or logs a warning.

        Args:
          before: the variables before the trace.
          error: the trace's; replicas can't make variables in a step, which is why.
        """
        state, made = self._state, [v for key, v in _variables(self._state).items() if key not in before]
        if state is None or not made or (error is not None and self._replicas == 1):
            return
        names = ", ".join(f"{variable_path(v)} {v.shape.as_list()}" for v in made[:3]) + (", ..." if made[3:] else "")
        refused = self._replicas > 1 or state.is_saved
        why = "which replicas can't" if self._replicas > 1 else "which a resumed run would not have to restore"
        line = _MADE_IN_A_STEP.format(type(state.trainer).__name__, names, why)
        if refused:
            raise UsageError(line) from error
        logging.warning_once("%s", line)

    def _check(self, graph: tf.Graph, replicates_batch: bool = False) -> int:
        """Checks a step's graph, and returns of how many replicas it is; 0 of a step that is not a trainer's."""
        state = self._state
        if state and self._replicas > 1 and (found := graphs.of_another_replica(graph)):
            used, made = (users_line(op.traceback) for op in found)
            cure = "keep it in an attribute of the trainer, or in a list, dictionary or tf.Module there"
            raise UsageError(_ELSEWHERE.format(type(state.trainer).__name__, used, "replica", made, cure))
        if self._runner is None or state is None:
            return 0
        contexts = [context for context in self._runner.pop_contexts() if context.graph is graph]
        state.trainer.inventory.captured.note(is_traced=not self._run_eagerly)
        options, shards = state.trainer.run_context.options, self._replicas // contexts[0].mesh.model.size
        has_parts = max(shards, options.micro_batches) > 1 and not replicates_batch
        warns = has_parts and "gather" not in self._runner.applied.names
        check_losses(contexts, type(state.trainer).__name__, warns)
        if not self._trains:
            check_written(state, graph)
            return len(contexts)
        check_options(self._runner.applied, state.trainer, graph, contexts[0].mesh.shard_optimizer)
        check_saved(state, graph)
        if self._check_assigned is not None:
            self._check_assigned(graph, contexts)
        elif self._replicas > 1 and not replicates_batch:
            check_aggregated(state, graph, [context.batch for context in contexts], self._replicas, self.second_trace)
        return len(contexts)


def _variables(state: TrainState | None) -> dict[int, tf.Variable]:
    """The variables of a run's checkpoints, by `id`."""
    return {id(variable): variable for variable in state.variables()} if state else {}
