"""The inner loop: K steps in one compiled call, started by the host; each step runs on every replica.

`Pace` chooses K: few enough steps to respond to a signal soon, enough to hide the call's own cost. One call is queued
behind the running one: the device never waits for the host, and the time between calls is the device's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..data.arrays import is_on_gpus
from ..data.feed import CallInput, Feed
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
from ..internals.variables import compiled_once
from ..metrics.sums import LoopSums, RowSpec, row_specs, stack, total_rows
from ..reduction import Reduction
from ..reduction.aggregation import Doubts
from ..state import TrainState
from ..step.diagnosis import warn_of_step

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
# Calls of several workers end, and leases of servers begin and end, by messages. Over a slow link, calls of 0.25 s
# would be single steps, and spend most of their time on these. So a call lasts until they take a tenth as long as its
# steps, but no longer for it than 4 s: a signal is answered between calls.
_OVERHEAD = 0.1
_LONGEST_SECONDS = 4.0
_ROWS_BYTES = 64 << 20  # of a program's rows, across processes, that are collected and exchanged at once
_STEPS_PER_COLLECTION = 16  # whose rows are collected and exchanged at once, if the rows' sizes are unknown


class LoopResult(NamedTuple):
    """The result of one call: its metrics (unread), its steps, their seconds of input wait.

    Also, with several workers, their reports (`engine.strategies.workers.WorkerRows`), whether a program was compiled
    for it, and of a program with `prediction_specs`, what `metrics.predictions.in_order` takes.
    """

    sums: LoopSums
    steps: int
    input_seconds: float
    workers: Any = None
    compiles: bool = False
    rows: Sequence[Sequence[Any]] = ()

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, by the first worker's clock in the call. Waits for the call; None if it timed no step."""
        first = self.workers.read()[0] if self.workers else {}
        return first["seconds"] / first["steps"] if "seconds" in first and first["steps"] else None


class Pace:
    """Fits calls of the inner loop to a duration. Changes no number: a loop may be divided anywhere.

    Args:
      steps_per_loop: a fixed number of steps, or 0 to fit them.
      sync_period_steps: a call that would come near a multiple of it, or pass one, ends there; a run can stop only
        there, and at a step at which a hook is due.
      target_seconds: the intended duration. A call costs 1 to 3 ms: the host's Python with cold caches, overlap lost at
        its ends, and with several workers the wait for the slowest.

    Attributes:
      steps: approximate number for the next call; calls divide those to the next due one evenly, if syncs allow.
      step_seconds: duration of a step in the newest call that the pace was fitted to; 0 before any.
    """

    def __init__(
        self,
        steps_per_loop: int = 0,
        sync_period_steps: int = 1,
        target_seconds: float = 0.25,
        clock=time.perf_counter,
    ):
        self.steps = steps_per_loop or 1
        self.step_seconds = 0.0
        self._fixed = steps_per_loop
        self._target_seconds = target_seconds
        self._sync_period_steps = sync_period_steps
        self.clock = clock
        self._calls = 0
        self._before: LoopResult | None = None  # of the previous call, which may still be running

    def next_steps(self, step: int, left: int, limit: int) -> int:
        """Returns how many of the `left` steps from `step` on, which a call can take, the next one takes.

        Something is due after `limit` steps.
        """
        steps = min(left, self._fixed or math.ceil(left / max(1, round(left / self.steps))))
        if steps == limit:
            return limit
        end = round((step + steps) / self._sync_period_steps) * self._sync_period_steps
        if end > step + (steps if self._fixed else min(left, 2 * steps)):
            end -= self._sync_period_steps
        return end - step if end > step else steps

    def add_call(self, result: LoopResult, began: float) -> None:
        """Waits for the call before this one, and fits `steps` to the time since this one `began`, by the clock."""
        step_seconds = None  # without what a call takes beside them, where workers measure it
        if self._before is not None:
            self._before.sums.read()
            step_seconds = self._before.step_seconds
        self._before = result
        seconds = self.clock() - began
        self._calls += 1
        # A much shorter call than intended is no evidence, unless it took too long; the first one compiles.
        is_reliable = 2 * result.steps >= self.steps or (result.steps > 1 and seconds > self._target_seconds)
        if self._calls > 1 and is_reliable:
            overhead = 0.0
            if step_seconds is not None:  # to wait for data takes the longer the more steps there are
                overhead = max(0.0, seconds - result.steps * step_seconds - result.input_seconds)
            self.fit(result.steps, seconds - overhead, overhead)

    def fit(self, steps: float, seconds: float, overhead_seconds: float = 0.0) -> None:
        """Fits `steps` to the target; at most to 8 times as many. A fixed number does not change.

        Args:
          seconds: duration of the call's steps.
          overhead_seconds: time that the call takes beside its steps, whatever their number.
        """
        self.step_seconds = seconds / steps
        if not self._fixed:
            target = max(self._target_seconds - overhead_seconds, min(overhead_seconds / _OVERHEAD, _LONGEST_SECONDS))
            wanted = steps * target / max(seconds, 1e-6)
            self.steps = max(1, min(round(wanted), 8 * self.steps))


class Program:
    """A compiled step on a feed: `Strategy.program` makes it, `Strategy.run` executes it.

    Args:
      state: state that steps change, and whose step they advance; None for an evaluation, which counts its own.

    Attributes:
      jit: whether XLA compiles a whole call.
      unrolls: whether several small steps are one iteration, which takes longer to trace.
      evaluation_pace: the pace of an evaluation: its steps per call, in each of the processes that compute.
      prediction_specs: nest of specs of what steps return of each example, [examples, ...]; () if they return
        nothing, None if they are not traced.
    """

    jit = unrolls = False
    prediction_specs: Any = ()

    def __init__(self, feed: Feed, state: TrainState | None = None):
        self.feed, self.state = feed, state
        self._done = 0
        self.evaluation_pace = Pace(target_seconds=0.5)

    @property
    def step(self) -> int:
        return self.state.step if self.state else self._done

    def restart(self) -> None:
        """Restarts an evaluation at its first step."""
        self._done = 0

    def advance(self, steps: int) -> None:
        """Counts steps that no compiled call counts."""
        if self.state:
            self.state.advance(steps)
        self._done += steps

    @contextlib.contextmanager
    def moving_to(self, step: int) -> Iterator[None]:
        """Advances to a step around a compiled call, which counts the state's steps itself."""
        with self.state.moving_to(step) if self.state else contextlib.nullcontext():
            yield
        self._done = step

    @property
    def steps_per_call(self) -> float:
        """The most steps of a call: one if their rows may differ in size, inf if only the feed limits it."""
        shapes = [spec.shape[1:] for spec in tf.nest.flatten(self.prediction_specs or ())]
        return math.inf if all(shape.is_fully_defined() for shape in shapes) else 1

    @property
    def steps_per_collection(self) -> float:
        """The steps whose rows are collected at once: all if there are none, one if they are not traced."""
        if self.prediction_specs is None or self.steps_per_call == 1:
            return 1 if self.prediction_specs is None else _STEPS_PER_COLLECTION
        row_bytes = sum(
            x.shape[1:].num_elements() * max(1, x.dtype.size) for x in tf.nest.flatten(self.prediction_specs)
        )
        return max(1, _ROWS_BYTES // (row_bytes * self.feed.order.batch_size)) if row_bytes else math.inf

    def trace(self) -> Sequence[RowSpec]:
        """Traces its step, if possible before its first call, and describes its rows of metrics."""
        return ()

    def close(self) -> None:
        """Frees the feed's read-ahead; running the program again reopens it."""
        self.feed.close()


class Syncs:
    """Synchronizes replicas at the end of each period of steps, counted from step 0.

    Within a call, the inner loop does it (`sync`). If something is due within a period, `after_call` ends the period,
    so that hooks find synchronized replicas.

    Attributes:
      period_steps: steps per period, `sync_every_steps`.
      sync: synchronizes replicas; a `tf.function`.
      in_step: whether replicas are synchronized after the last call.
    """

    def __init__(self, distribution: tf.distribute.Strategy, reduction: Reduction):
        self.period_steps = reduction.sync_every_steps
        self.sync = tf.function(lambda: distribution.run(reduction.sync), autograph=False)
        self.in_step = True
        self._begin = compiled_once(lambda: distribution.run(reduction.begin_period))
        self._begun = False

    def before_call(self) -> None:
        """Begins the first period, or one after hooks have acted, with the present weights."""
        if not self._begun:
            self._begin()
            self._begun = True

    def after_call(self, step: int, due: bool) -> None:
        """Synchronizes replicas at `step` if something is `due` within a period."""
        at_end = step % self.period_steps == 0
        if due and not at_end:
            self.sync.get_concrete_function()()
        self.in_step = due or at_end
        self._begun = not due


def _loop_arguments(operands, step: int, start: int, stop: int, due: int | None, more: tuple) -> tuple:
    """Returns the arguments of `InnerLoop._loop`; the last step collects the norm if something is due after it."""
    numbers = (step, start, stop, stop - 1 if step + stop - start == due else -1)
    return operands, tf.constant(numbers, tf.int64), *more


def _step_array(spec) -> tf.TensorArray:
    """Makes an array of a tensor [n, ...] per step, for any number of steps."""
    shape = [None, *spec.shape[1:]]
    return tf.TensorArray(spec.dtype, size=0, dynamic_size=True, infer_shape=False, element_shape=shape)


@dataclasses.dataclass
class StepTrace:
    """How a step is traced, and what the trace shows.

    Attributes:
      replicates_batch: whether each replica computes the whole batch.
      metric_specs: the rows of metrics that a call returns; [] before the trace.
      graph: the step's graph; None before the trace.
    """

    replicates_batch: bool = False
    metric_specs: list[RowSpec] = dataclasses.field(default_factory=list)
    prediction_specs: Any = ()
    graph: Any = None


class Compiled(NamedTuple):
    """The compiled programs of an `InnerLoop`, without its feed and its data."""

    programs: dict[tuple, tf.types.experimental.ConcreteFunction]
    trace: StepTrace
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

    A program without state is an evaluation, whose calls return examples' scores, too (`metrics.sums.stack`).

    Args:
      step_function: replica code, (batch, step, collect_norm) -> metrics; `step` scalar int64, the step's number;
        `collect_norm` scalar bool, true at a step at which something is due.
      feed: one of `engine.data.feeds`.
      pace: the number of steps per call; None takes as many as possible.
      jit: compile the whole loop as one XLA program (one replica), or leave it to TensorFlow's executor.
      syncs: synchronize replicas that train independently; None if they are always synchronized.
      returns_rows: steps return (metrics, nest of tensors [examples, ...]), and calls return the latter, too.
      batch_shares: number of shares of a batch: one per replica, or per group that computes the same examples.
      arrivals: counts the steps whose data has arrived; None creates one if the feed may wait in the loop.
      run_eagerly: execute steps op by op, once they have been traced.
      doubts: what a trace of the step has left open, for a second one to decide.

    Attributes:
      programs: the compiled loops, by the values on which a traced step depends (`Inventory.step_form`), the form of
        their operands, and the writer of layers' own summaries.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_function,
        feed,
        *,
        state: TrainState | None = None,
        pace: Pace | None = None,
        jit: bool = False,
        syncs: Syncs | None = None,
        returns_rows: bool = False,
        batch_shares: int = 1,
        arrivals: Arrivals | None = None,
        run_eagerly: bool = False,
        doubts: Doubts | None = None,
    ):
        super().__init__(feed, state)
        is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._strategy, self._step_function = strategy, step_function
        self.pace, self.jit = pace, jit
        self._syncs, self._doubts, self._batch_shares = syncs, doubts, batch_shares
        self._arrivals = Arrivals() if arrivals is None and feed.reads_in_loop else arrivals
        self._sums_dtype = tf.float32 if is_tpu else tf.float64  # which TPUs lack
        self._keeps_scores = state is None and not is_tpu
        self._returns_rows, self._is_eager = returns_rows, run_eagerly
        # Several steps in an iteration gain nothing with several replicas or in XLA's programs (also TPUs'), nor if
        # steps may wait in the loop, since the wait could not be distinguished from the steps beside it.
        is_plain = not (jit or is_tpu or syncs or self._arrivals)
        self.unrolls = state is not None and is_plain and strategy.num_replicas_in_sync == 1
        # An XLA program runs the whole loop on one device.
        self._counts_on_host = is_on_gpus(strategy) and not jit
        self._trace = StepTrace(prediction_specs=None if returns_rows else ())  # the newest
        self._traced_input: tuple[int, int, CallInput] | None = None  # with its step and limit
        self.programs: dict[tuple, tf.types.experimental.ConcreteFunction] = {}

    def __call__(self, step: int, limit: int, *loop_inputs, due: int | None = None) -> LoopResult:
        """Runs at most `limit` steps from global step `step` on; fewer if the operands end.

        Args:
          *loop_inputs: the other arguments of `_loop`, in a subclass.
          due: the step after which metrics are read, if known.
        """
        before, programs = time.perf_counter(), len(self.programs)
        limit = int(min(limit, self.steps_per_call)) if self._returns_rows else limit
        operands, start, stop = self._call_input(step, limit)
        input_seconds = time.perf_counter() - before
        arguments = _loop_arguments(operands, self._number(step), start, stop, due, loop_inputs)
        # No lambda: its frame would keep the operands as long as an error, even after clearing.
        call = functools.partial(self._compiled_loop(step, arguments), *arguments)
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
            named = (op.type for op in graphs.operations(self._trace.graph) if op.name == name)
            op = kind or next(named, "an op")
            raise NotCompilableError(f"XLA can't compile {op}; use jit=auto or off ({reason(error)})") from error

    def trace(self, *loop_inputs) -> Sequence[RowSpec]:
        """Compiles the program of a call through the feed's epoch, which must be the next call, without running it."""
        step, limit = self.step, int(min(self.feed.order.steps_per_epoch, self.steps_per_collection))
        call_input = self._call_input(step, limit)
        operands, start, stop = call_input
        self._compiled_loop(step, _loop_arguments(operands, self._number(step), start, stop, None, loop_inputs))
        self._traced_input = step, limit, call_input
        return self.metric_specs

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
        return self._trace.metric_specs

    @property
    def prediction_specs(self) -> Any:  # type: ignore[override]
        return self._trace.prediction_specs

    @property
    def compiled(self) -> Compiled:
        """The compiled programs, which another loop of the same step, on a feed of the same `form`, can take over."""
        return Compiled(self.programs, self._trace, self._arrivals)

    @compiled.setter
    def compiled(self, before: Compiled) -> None:
        self.programs, self._trace, self._arrivals = before

    @property
    def writes_summaries(self) -> bool:
        """Whether it has compiled a step that may write summaries of its own."""
        return any(writer is not None for *_, writer in self.programs)

    def close(self) -> None:
        super().close()
        self._traced_input = None

    def _form(self) -> Hashable:
        """The values, other than its arguments, on which a traced step depends; each form has its own program."""
        return self.state.trainer.inventory.step_form() if self.state else ()

    def _compiled_loop(self, step: int, arguments: tuple) -> tf.types.experimental.ConcreteFunction:
        """Returns the compiled loop for operands of this form: this lookup is most of a `tf.function` call's time."""
        replicates_batch = self.feed.order.replicates_batch(step, self._batch_shares)
        operands = arguments[0] if self.jit else self.feed.traced(arguments[0])
        shapes = tuple(x.shape for x in tf.nest.flatten(operands, expand_composites=True))
        writer = None if self.jit else summary_writer()  # XLA compiles no summaries
        if (form := (self._form(), shapes, replicates_batch, writer)) not in self.programs:
            trace = StepTrace(replicates_batch)
            loop = functools.partial(self._loop, trace)
            compiled = tf.function(loop, jit_compile=self.jit or None, autograph=False)
            with tracing_for_xla() if self.jit else contextlib.nullcontext():
                self.programs[form] = compiled.get_concrete_function(operands, *arguments[1:])
            if self._is_eager:
                self.programs[form] = functools.partial(self._execute, trace)
            self._trace = trace
        return self.programs[form]

    def one_step(self, step: int) -> tf.types.experimental.ConcreteFunction:
        """Traces step `step` on all of this host's replicas, as in the loop, for inspection only."""
        operands, start, _ = self.feed.call_input(step, 1)
        self._trace = StepTrace(self.feed.order.replicates_batch(step, self._batch_shares))
        offset, number = tf.constant(start, tf.int64), tf.constant(step, tf.int64)
        return self._trace_step(self._trace, operands, offset, number)[0]

    @property
    def operations(self) -> Counter[str]:
        """The number of TensorFlow's operations in a step, by kind ("MatMul"); known after the first call."""
        return graphs.kinds(self._trace.graph)

    def _result(self, tensors, steps: int, input_seconds: float) -> LoopResult:
        sums, rows = tensors
        return LoopResult(LoopSums(self.metric_specs, sums), steps, input_seconds, rows=rows)

    def _loop(self, trace: StepTrace, operands, numbers):
        """Computes a call: the sums of its metrics over this host's replicas, [rows, 2], with its scores; its rows.

        Args:
          trace: the trace of the step, to be filled.
          numbers: [4] int64: the first step, and three offsets in the operands: its start, its stop, and that of the
            step whose costly figures (the gradients' norm) are needed, or -1.
        """
        with self._on_host():
            first_step, start, stop, norm_offset = tf.unstack(numbers)
            if self._counts_on_host:
                start, stop, norm_offset = (tf.cast(offset, tf.int32) for offset in (start, stop, norm_offset))
        one_step, zeros = self._trace_step(trace, operands, start, first_step)
        unrolled = self.unrolls and self.feed.most_steps(operands) >= _UNROLLED_STEPS
        if unrolled:
            operations = graphs.kinds(trace.graph)
            is_small = operations.total() <= _FEW_OPERATIONS and not graphs.CONVOLUTIONS & operations.keys()
            unrolled = is_small and not any(graphs.has(trace.graph, dtype) for dtype in ("bfloat16", "float16"))

        def body(steps, run_step):
            def run(offset, sums):
                for number in range(steps):
                    with tf.name_scope(f"step_{number}"):
                        batch = self._step_operands(operands, offset)
                        with self._on_host():
                            global_step = first_step + tf.cast(offset - start, tf.int64)
                            collect_norm = tf.equal(offset, norm_offset)
                        sums = self._add_step(sums, run_step(batch, global_step, collect_norm))
                        with self._on_host():
                            offset = offset + 1
                return offset, sums

            return run

        def run_until(end, offset, sums):
            if unrolled:
                # Inlined: calls of one graph would wait for each other, operations only for their inputs.
                several = body(_UNROLLED_STEPS, functools.partial(self._replicated_step, trace))
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

    def _execute(self, trace: StepTrace, operands, numbers):
        """Computes a call as `_loop` does, op by op; `trace` is that of a step before."""
        first_step, start, stop, norm_offset = numbers.numpy().tolist()
        sums: list = []
        for offset in range(start, stop):
            batch = self._step_operands(operands, tf.constant(offset, tf.int64))
            step = tf.constant(first_step + offset - start, tf.int64)
            result = self._replicated_step(trace, batch, step, tf.constant(offset == norm_offset))
            sums = self._add_step(sums or self._zeros(trace, result), result)
        if self.state is not None:
            self.state.step_variable.assign(first_step + stop - start)
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

    def _trace_step(self, trace: StepTrace, operands, offset, step, *more):
        """Traces a step, and zeros of its metrics. One trace serves both, and a loop of single steps.

        `more` are specs of a step's arguments other than its batch, its number and whether it collects the norm.
        """
        one_batch = tf.function(self.feed.next_operands, autograph=False)
        batch_spec = one_batch.get_concrete_function(operands, offset).structured_outputs

        def traced():
            one_step = tf.function(functools.partial(self._replicated_step, trace), autograph=False)
            return one_step.get_concrete_function(batch_spec, step, tf.constant(True), *more)

        one_step = traced()
        if self._doubts:
            with self._doubts.deciding():
                traced()
        trace.graph = one_step.graph
        if self.jit and (op := graphs.lacked_by_xla(one_step.graph)):  # before XLA prints pages
            where = f", at {line}" if (line := graphs.program_line(op)) else ""
            fix = "give the loop maximum_iterations, or use" if op.type == "EmptyTensorList" else "use"
            raise NotCompilableError(f"XLA can't compile {op.type}{where}; {fix} jit=auto or off")
        warn_of_step(one_step.graph, self._strategy.num_replicas_in_sync)
        return one_step, self._zeros(trace, self._sums(one_step.structured_outputs))

    def _zeros(self, trace: StepTrace, result) -> list:
        """Returns zeros of a step's metrics, and arrays for its scores and rows, for each of this host's replicas."""
        zeros = []
        for here, metrics in zip(self._replica_contexts(), self._replica_results(result), strict=True):
            metrics, *rows = metrics if self._returns_rows else (metrics,)
            with here:
                totals = tf.zeros([total_rows(trace.metric_specs), 2], metrics.dtype)
                scores = [_step_array(metrics)] if any(spec.keeps_scores for spec in trace.metric_specs) else []
            with tf.device("CPU:0") if rows else contextlib.nullcontext():
                zeros.append((totals, scores, [*map(_step_array, rows)]))
        return zeros

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

    def _replicated_step(self, trace: StepTrace, batch, step, collect_norm, *more):
        """Computes a step on each replica, and describes its results in `trace`."""

        def run(*batch):
            batch, replica = self.feed.batch(*batch), tf.cast(replica_id(), tf.int64)
            if trace.replicates_batch:
                exchange = single_replica_context()
            elif why := self.feed.order.no_exchange_reason(self._batch_shares):
                exchange = forbid_exchange(why)
            else:
                exchange = contextlib.nullcontext()
            with exchange:  # other than the engine's
                result = self._step_function(batch, step, collect_norm, *more)
            metrics, rows = result if self._returns_rows else (result, ())
            trace.metric_specs = row_specs(metrics, self._keeps_scores)
            sums = stack(metrics, self._sums_dtype, self._keeps_scores)
            if not self._returns_rows:
                return sums
            trace.prediction_specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), rows)
            rows = tf.nest.flatten(rows)
            sort_keys = tf.fill(tf.shape(rows[0])[:1], step * self._strategy.num_replicas_in_sync + replica)
            return sums, sort_keys, *rows

        return self._strategy.run(run, args=batch)
