"""The inner loop: K steps in one compiled call, started by the host; each step runs on every replica."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..data.arrays import is_on_gpus
from ..data.feed import CallInput
from ..errors import NotCompilableError, reason
from ..health.watchdog import Arrivals
from ..internals import graphs
from ..internals.tensorflow import (
    forbid_exchange,
    replica_id,
    single_replica_context,
    summary_writer,
    timestamp,
    tracing_for_xla,
)
from ..metrics.sums import LoopSums, RowSpec, row_specs, stack, total_rows
from ..reduction.aggregation import Doubts
from ..state import TrainState
from ..step.diagnosis import warn_of_step
from .base import LoopResult, Program
from .pacing import Pace
from .syncs import Syncs

# A loop of small steps is unrolled by this factor: TensorFlow's executor completes an iteration before it starts the
# next; within one, a step's first operations overlap the updates of the step before. Steps with more operations than
# this, or with convolutions, gain nothing and take long to trace: dlrm in two micro-batches has 681, resnet20 1,384
# (`InnerLoop.operations`). In 16 bits an unrolled step would have other bits: Grappler may fuse a product with its bias
# in one of the two graphs alone, and a fused kernel rounds once.
_UNROLLED_STEPS = 4
_FEW_OPERATIONS = 700
# TensorFlow's errors as XLA compiles a program, and where their text has an op's kind, or its name alone.
_COMPILATION_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.NotFoundError,
)
_OP_KIND = re.compile(r"with op (\w+) must be|\{\{node (\S+?)\}\}")


def _loop_arguments(operands, step: int, start: int, stop: int, due: int | None, more: tuple) -> tuple:
    """Returns the arguments of `InnerLoop._loop`; observes the last step if something is due after it."""
    numbers = (step, start, stop, stop - 1 if step + stop - start == due else -1)
    return operands, tf.constant(numbers, tf.int64), *more


def _step_array(spec) -> tf.TensorArray:
    """Makes an array of a tensor [n, ...] per step, for any number of steps."""
    shape = [None, *spec.shape[1:]]
    return tf.TensorArray(spec.dtype, size=0, dynamic_size=True, infer_shape=False, element_shape=shape)


class Compiled(NamedTuple):
    """The compiled programs of an `InnerLoop`, without its feed and its data."""

    programs: dict[tuple, tf.types.experimental.ConcreteFunction]
    metric_specs: list[RowSpec]
    prediction_specs: Any
    step_graph: Any
    arrivals: Arrivals | None

    def newest(self, programs: int) -> Compiled:
        """Returns those with no more than so many programs, the last ones that were compiled."""
        return self._replace(programs=dict([*self.programs.items()][-programs:]))


class InnerLoop(Program):
    """Runs steps [start, stop) of a feed's operands: `strategy.run(step)` inside `tf.while_loop`.

    Not vice versa: an all-reduce can't be in a while loop within `strategy.run`. The number of steps is an argument of
    the compiled program, so one compilation serves all lengths, and the division into calls changes no bit.

    With GPUs the loop counts and decides on the host, with an int32 counter, which TensorFlow keeps there: for an int64
    or bool on the device the host would wait at each step.

    Args:
      strategy: the `tf.distribute.Strategy`.
      step_function: replica code, (batch, step, observed) -> metrics; `step` scalar int64, the step's number;
        `observed` scalar bool, true at a step at which something is due.
      feed: one of `engine.data.feeds`.
      jit: compile the whole loop as one XLA program (one replica), or leave it to TensorFlow's executor.
      sums_dtype: dtype of the metrics' sums; float64 unless the device lacks it.
      keeps_scores: return examples' scores for metrics of their ranking (`metrics.sums.stack`), not with XLA.
      returns_rows: steps return (metrics, nest of tensors [examples, ...]), and calls return the latter, too.
      syncs: synchronize replicas that train independently; None if they are always synchronized.
      unrolls: make several steps one iteration, if they are small.
      state: see `Program`.
      pace: the number of steps per call; None takes as many as possible.
      arrivals: counts the steps whose data has arrived; None creates one if the feed may wait in the loop.
      form: returns the values, other than its arguments, on which a traced step depends; each form has its own program.
      batch_shares: number of shares of a batch: one per replica, or per group that computes the same examples.
      doubts: what a trace of the step has left open, for a second one to decide.

    Attributes:
      programs: the compiled loops, by `form`, the form of their operands, and the writer of layers' own summaries.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_function,
        feed,
        *,
        jit: bool = False,
        sums_dtype=tf.float64,
        syncs: Syncs | None = None,
        unrolls: bool = False,
        state: TrainState | None = None,
        pace: Pace | None = None,
        arrivals: Arrivals | None = None,
        keeps_scores: bool = False,
        returns_rows: bool = False,
        form: Callable[[], Hashable] = tuple,
        batch_shares: int = 1,
        doubts: Doubts | None = None,
    ):
        super().__init__(feed, state)
        self._form, self.pace = form, pace
        self._keeps_scores, self._returns_rows = keeps_scores, returns_rows
        self.prediction_specs = None if returns_rows else ()
        self._syncs = syncs
        self._doubts = doubts
        self._batch_shares = batch_shares
        self._replicates_batch = False  # whether each replica computes the whole batch
        self.unrolls = unrolls
        self._arrivals = Arrivals() if arrivals is None and feed.reads_in_loop else arrivals
        self._strategy = strategy
        self._step_function = step_function
        self._sums_dtype = sums_dtype
        self._metric_specs: list[RowSpec] = []
        self._step_graph = None
        # An XLA program runs the whole loop on one device.
        self._counts_on_host = is_on_gpus(strategy) and not jit
        self._traced_input: tuple[int, int, CallInput] | None = None  # with its step and limit
        self.jit = jit
        self.programs: dict[tuple, tf.types.experimental.ConcreteFunction] = {}

    def __call__(self, step: int, limit: int, *loop_inputs, due: int | None = None) -> LoopResult:
        """Runs at most `limit` steps from global step `step` on; fewer if the operands end.

        Args:
          step: the global step of the first one.
          limit: the largest number of steps to run.
          *loop_inputs: the other arguments of `_loop`, in a subclass.
          due: the step after which metrics are read, if known.
        """
        before, programs = time.perf_counter(), len(self.programs)
        limit = int(min(limit, self.steps_per_call)) if self._returns_rows else limit
        operands, start, stop = self._call_input(step, limit)
        input_seconds = time.perf_counter() - before
        arguments = _loop_arguments(operands, self._number(step), start, stop, due, loop_inputs)
        # No lambda: its frame would keep the operands as long as an error, even after clearing.
        call = functools.partial(self._program(step, arguments), *arguments)
        compiles = len(self.programs) > programs
        with self.moving_to(step + stop - start), self._compilation_explained(compiles):
            if self._arrivals is None:
                tensors = call()
            else:  # steps may wait for input in the loop, too
                waited_before = self._arrivals.seconds()
                self._arrivals.add(input_seconds)
                tensors = self.feed.run_with_timeout(call, self._arrivals.count)
                input_seconds = self._arrivals.seconds() - waited_before
        result = self._result(tensors, stop - start, input_seconds)
        return result._replace(compiles=compiles)

    @contextlib.contextmanager
    def _compilation_explained(self, compiles: bool) -> Iterator[None]:
        try:
            yield
        except _COMPILATION_ERRORS as error:
            if not (self.jit and compiles):
                raise
            kind, name = match.groups() if (match := _OP_KIND.search(str(error))) else (None, None)
            named = (op.type for op in graphs.operations(self._step_graph) if op.name == name)
            op = kind or next(named, "an op")
            raise NotCompilableError(f"XLA can't compile {op}; use jit=auto or off ({reason(error)})") from error

    def trace(self, *loop_inputs) -> Sequence[RowSpec]:
        """Compiles the program of a call through the feed's epoch, which must be the next call, without running it."""
        step, limit = self.step, int(min(self.feed.order.steps_per_epoch, self.steps_per_collection))
        call_input = self._call_input(step, limit)
        operands, start, stop = call_input
        self._program(step, _loop_arguments(operands, self._number(step), start, stop, None, loop_inputs))
        self._traced_input = step, limit, call_input
        return self._metric_specs

    def _call_input(self, step: int, limit: int) -> CallInput:
        """Returns the feed's input of a call; what `trace` has read for it, so that an iterator is opened only once."""
        traced, self._traced_input = self._traced_input, None
        if traced is not None and traced[0] == step and traced[1] <= limit:
            return traced[2]
        return self.feed.call_input(step, limit)

    def _number(self, step: int) -> int:
        """Returns the number of a step in the run or, of an evaluation, of its batch."""
        return step if self.state else step % self.feed.order.steps_per_epoch

    @property
    def metric_specs(self) -> list[RowSpec]:
        """Describes the rows of metrics that a call returns; known after tracing."""
        return self._metric_specs

    @property
    def compiled(self) -> Compiled:
        """The compiled programs, which another loop of the same step, on a feed of the same `form`, can take over."""
        return Compiled(self.programs, self._metric_specs, self.prediction_specs, self._step_graph, self._arrivals)

    @compiled.setter
    def compiled(self, before: Compiled) -> None:
        self.programs, self._metric_specs, self.prediction_specs, self._step_graph, self._arrivals = before

    @property
    def writes_summaries(self) -> bool:
        """Whether it has compiled a step that may write summaries of its own."""
        return any(writer is not None for *_, writer in self.programs)

    def close(self) -> None:
        super().close()
        self._traced_input = None

    def _program(self, step: int, arguments: tuple) -> tf.types.experimental.ConcreteFunction:
        """Returns the compiled loop for operands of this form: this lookup is most of a `tf.function` call's time."""
        self._replicates_batch = self.feed.order.replicates_batch(step, self._batch_shares)
        operands = arguments[0] if self.jit else self.feed.traced(arguments[0])
        shapes = tuple(x.shape for x in tf.nest.flatten(operands, expand_composites=True))
        writer = None if self.jit else summary_writer()  # XLA compiles no summaries
        if (form := (self._form(), shapes, self._replicates_batch, writer)) not in self.programs:
            compiled = tf.function(self._loop, jit_compile=self.jit or None, autograph=False)
            with tracing_for_xla() if self.jit else contextlib.nullcontext():
                self.programs[form] = compiled.get_concrete_function(operands, *arguments[1:])
        return self.programs[form]

    def reach(self, step: int, limit: int) -> int:
        """Returns how many of `limit` steps from `step` on a call can take."""
        return self.feed.reach(step, limit)

    def one_step(self, step: int) -> tf.types.experimental.ConcreteFunction:
        """Traces step `step` on all of this host's replicas, as in the loop, for inspection only."""
        operands, start, _ = self.feed.call_input(step, 1)
        self._replicates_batch = self.feed.order.replicates_batch(step, self._batch_shares)
        offset, number = tf.constant(start, tf.int64), tf.constant(step, tf.int64)
        return self._trace_step(operands, offset, number)[0]

    @property
    def operations(self) -> Counter[str]:
        """The number of TensorFlow's operations in a step, by kind ("MatMul"); known after the first call."""
        return graphs.kinds(self._step_graph)

    def _result(self, tensors, steps: int, input_seconds: float) -> LoopResult:
        sums, rows = tensors
        return LoopResult(LoopSums(self._metric_specs, sums), steps, input_seconds, rows=rows)

    def _loop(self, operands, numbers):
        """Computes a call: the sums of its metrics over this host's replicas, [rows, 2], with its scores; its rows.

        Args:
          operands: operands of the call.
          numbers: [4] int64: the first step, and three offsets in the operands: its start, its stop, and that of the
            step whose costly figures (the gradients' norm) are needed, or -1.
        """
        with self._on_host():
            first_step, start, stop, observed_offset = tf.unstack(numbers)
            if self._counts_on_host:
                offsets = start, stop, observed_offset
                start, stop, observed_offset = (tf.cast(offset, tf.int32) for offset in offsets)
        one_step, zeros = self._trace_step(operands, start, first_step)
        unrolled = self.unrolls and self.feed.most_steps(operands) >= _UNROLLED_STEPS
        if unrolled:
            operations = self.operations
            is_small = operations.total() <= _FEW_OPERATIONS and not graphs.CONVOLUTIONS & operations.keys()
            unrolled = is_small and not any(graphs.has(self._step_graph, dtype) for dtype in ("bfloat16", "float16"))

        def body(steps, run_step):
            def run(offset, sums):
                for number in range(steps):
                    with tf.name_scope(f"step_{number}"):
                        batch = self._step_operands(operands, offset)
                        with self._on_host():
                            global_step = first_step + tf.cast(offset - start, tf.int64)
                            is_observed = tf.equal(offset, observed_offset)
                        sums = self._add_step(sums, run_step(batch, global_step, is_observed))
                        with self._on_host():
                            offset = offset + 1
                return offset, sums

            return run

        def run_until(end, offset, sums):
            if unrolled:
                # Inlined: calls of one graph would wait for each other, operations only for their inputs.
                several = body(_UNROLLED_STEPS, self._replicated_step)
                offset, sums = self._while(lambda offset: offset + _UNROLLED_STEPS <= end, several, offset, sums)
            return self._while(lambda offset: offset < end, body(1, one_step), offset, sums)

        if self._syncs is None:
            _, sums = run_until(stop, start, zeros)
        else:
            sums = self._run_periods(run_until, first_step, start, stop, zeros)
        if self.state is not None:  # here it is one more operation; from the host it would take half a millisecond
            with self._on_host():
                last_step = first_step + tf.cast(stop - start, tf.int64)
            self.state.step_variable.assign(last_step)
        return self._sum_replicas(sums)

    def _while(self, goes_on, body, offset, sums):
        """Returns (offset, sums) after iterating `body` sequentially while `goes_on(offset)`."""

        def condition(offset, _):
            with self._on_host():
                return goes_on(offset)

        return tf.while_loop(condition, body, (offset, sums), parallel_iterations=1)

    def _on_host(self):
        """Returns the context of the loop's own arithmetic."""
        return tf.device("CPU:0") if self._counts_on_host else contextlib.nullcontext()

    def _replica_contexts(self) -> list:
        """Returns, for each of this host's replicas, the context of its state between steps."""
        devices = self._strategy.extended.worker_devices
        return [tf.device(device) if self._counts_on_host else contextlib.nullcontext() for device in devices]

    def _add_step(self, sums: list, result) -> list:
        """Adds each replica's metrics of a step to its sums, on its own device, and its scores and rows to theirs."""
        added, results = [], self._replica_results(result)
        for here, (totals, scores, rows), metrics in zip(self._replica_contexts(), sums, results, strict=True):
            with here:
                metrics, *new = metrics if self._returns_rows else (metrics,)
                count = totals.shape[0]
                scores = [array.write(array.size(), metrics[count:]) for array in scores]
                totals = totals + (metrics[:count] if scores else metrics)
            with tf.device("CPU:0") if rows else contextlib.nullcontext():
                added.append((totals, scores, [x.write(x.size(), y) for x, y in zip(rows, new, strict=True)]))
        return added

    def _replica_results(self, result) -> list:
        """Lists the results of this host's replicas."""
        if not self._returns_rows:
            return self._strategy.experimental_local_results(result)
        return list(zip(*map(self._strategy.experimental_local_results, result), strict=True))

    def _sum_replicas(self, sums: list) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
        """Returns the sums of all of this host's replicas, the scores after them; and each replica's rows."""
        total = tf.add_n([totals for totals, _, _ in sums])
        if sums[0][1]:
            total = tf.concat([total, *(scores.concat() for _, (scores,), _ in sums)], 0)
        with tf.device("CPU:0") if self._returns_rows else contextlib.nullcontext():
            return total, [[array.concat() for array in rows] for _, _, rows in sums if rows]

    def _trace_step(self, operands, offset, step, *more):
        """Traces a step, and zeros of its metrics. One trace serves both, and a loop of single steps.

        `more` are specs of a step's arguments other than its batch, its number and whether it is observed.
        """
        one_batch = tf.function(self.feed.next_operands, autograph=False)
        batch_spec = one_batch.get_concrete_function(operands, offset).structured_outputs

        def trace():
            one_step = tf.function(self._replicated_step, autograph=False)
            return one_step.get_concrete_function(batch_spec, step, tf.constant(True), *more)

        one_step = trace()
        if self._doubts:
            with self._doubts.deciding():
                trace()
        self._step_graph = one_step.graph
        if self.jit and (op := graphs.lacked_by_xla(one_step.graph)):  # before XLA prints pages
            where = f", at {line}" if (line := graphs.program_line(op)) else ""
            cure = "give the loop maximum_iterations, or use" if op.type == "EmptyTensorList" else "use"
            raise NotCompilableError(f"XLA can't compile {op.type}{where}; {cure} jit=auto or off")
        warn_of_step(one_step.graph, self._strategy.num_replicas_in_sync)
        zeros, results = [], self._replica_results(self._sums(one_step.structured_outputs))
        for here, metrics in zip(self._replica_contexts(), results, strict=True):
            metrics, *rows = metrics if self._returns_rows else (metrics,)
            with here:
                totals = tf.zeros([total_rows(self._metric_specs), 2], metrics.dtype)
                scores = [_step_array(metrics)] if any(spec.keeps_scores for spec in self._metric_specs) else []
            with tf.device("CPU:0") if rows else contextlib.nullcontext():
                zeros.append((totals, scores, [*map(_step_array, rows)]))
        return one_step, zeros

    def _sums(self, outputs):
        """Returns the metrics in the result of `_replicated_step`."""
        return outputs

    def _run_periods(self, run_until, first_step, start, stop, zeros):
        """Runs the same steps with a sync of the replicas at the end of each period; `first_step` is that at `start`.

        This needs nested loops: a sum across replicas may be in a loop around `strategy.run`, not in a condition.
        """
        sync = self._syncs.sync.get_concrete_function()

        def period_end(offset):
            with self._on_host():
                step = first_step + tf.cast(offset - start, tf.int64)
                left = self._syncs.period_steps - step % self._syncs.period_steps
                return offset + tf.cast(left, offset.dtype)

        def whole_period(offset, sums):
            offset, sums = run_until(period_end(offset), offset, sums)
            with tf.control_dependencies(sums):
                sync()
            return offset, sums

        offset, sums = self._while(lambda offset: period_end(offset) <= stop, whole_period, start, zeros)
        return run_until(stop, offset, sums)[1]

    def _step_operands(self, operands, offset):
        """Returns the arguments of a step's `strategy.run`."""
        if self._arrivals is None:
            return self.feed.next_operands(operands, offset)
        before = timestamp()
        with tf.control_dependencies([before]):
            batch = self.feed.next_operands(operands, tf.identity(offset))
        self._arrivals.mark(batch, before)
        return batch

    def _replicated_step(self, batch, step, observed, *more):
        def run(*batch):
            batch, replica = self.feed.batch(*batch), tf.cast(replica_id(), tf.int64)
            if self._replicates_batch:
                exchange = single_replica_context()
            elif why := self.feed.order.no_exchange_reason(self._batch_shares):
                exchange = forbid_exchange(why)
            else:
                exchange = contextlib.nullcontext()
            with exchange:  # other than the engine's
                result = self._step_function(batch, step, observed, *more)
            metrics, rows = result if self._returns_rows else (result, ())
            self._metric_specs = row_specs(metrics, self._keeps_scores)
            sums = stack(metrics, self._sums_dtype, self._keeps_scores)
            if not self._returns_rows:
                return sums
            self.prediction_specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), rows)
            rows = tf.nest.flatten(rows)
            sort_keys = tf.fill(tf.shape(rows[0])[:1], step * self._strategy.num_replicas_in_sync + replica)
            return sums, sort_keys, *rows

        return self._strategy.run(run, args=batch)
