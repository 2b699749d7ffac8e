"""The inner loop: K steps in one compiled call, started by the host; each step runs on every replica.

Methods are in the order in which a first call reaches them: `__call__` on the host, `_compiled_loop`, which traces
`_loop` once, the steps in it, and what describes a program to others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from .. import logging
from ..checks import StepChecks
from ..checks.digests import StepDigest, digest
from ..data.arrays import is_on_gpus
from ..data.feeds.feed import CallInput, Feed
from ..errors import NotCompilableError, reason
from ..internals import graphs
from ..internals.tensorflow import (
    forbid_exchange,
    remove_generated_files,
    replica_id,
    single_replica_context,
    summary_writer,
    timestamp,
    tracing_for_xla,
)
from ..machine.threads import TRACING
from ..metrics.sums import LoopSums, SumSpec, num_sums, stack, sum_specs
from ..state import TrainState
from .arrivals import Arrivals
from .loop_result import LoopResult
from .pace import Pace
from .program import Program
from .syncs import Syncs

_VARIANTS = 8  # of a step, whose programs are kept
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
_Loops = Sequence[tuple[int, Callable]]  # that follow each other: (steps per iteration, the function of a step)
_OP_KIND = re.compile(r"with op (\w+) must be|\{\{node (\S+?)\}\}")


def _step_array(spec: tf.TensorSpec) -> tf.TensorArray:
    """Makes an array of a tensor [n, ...] per step, for any number of steps."""
    shape = [None, *spec.shape[1:]]
    return tf.TensorArray(spec.dtype, size=0, dynamic_size=True, infer_shape=False, element_shape=shape)


@dataclasses.dataclass
class StepTrace:
    """How a step is traced, and what the trace shows.

    Attributes:
      replicates_batch: whether each replica computes the whole batch.
      batch_shapes: the static shapes of the batches of this host's replicas.
      metric_specs: the sums of metrics that a call returns; [] before the trace.
      graph: the step's graph; None before the trace.
    """

    replicates_batch: bool = False
    batch_shapes: set[str] = dataclasses.field(default_factory=set)
    metric_specs: list[SumSpec] = dataclasses.field(default_factory=list)
    prediction_specs: Any = ()
    graph: Any = None

    @functools.cached_property
    def digest(self) -> StepDigest:
        """The step's digest."""
        return digest(self.graph)


class _Call(NamedTuple):
    """The arguments of a call as it is traced: its data, its first step, and offsets in the data.

    Attributes:
      first_step: scalar int64, the number of the step at `start`.
      start, stop: the offsets of its steps, [start, stop).
      norm_offset: offset of the step whose costly figures (the gradients' norm) are needed, or -1.
    """

    operands: Any
    first_step: tf.Tensor
    start: tf.Tensor
    stop: tf.Tensor
    norm_offset: tf.Tensor

    def step(self, offset: tf.Tensor) -> tf.Tensor:
        """Returns the number of the step at an offset, int64."""
        return self.first_step + tf.cast(offset - self.start, tf.int64)


class Traced(NamedTuple):
    """A compiled program, and the trace of its step."""

    program: Callable
    trace: StepTrace


class Programs(dict[tuple, Any]):
    """Compiled programs, by the values on which a traced step depends (`Inventory.step_variant`), and by further ones.

    Those of the newest variants of the step are kept: a callback may set another momentum before each step.
    """

    def add(self, key: tuple, program: Any) -> None:
        """Adds a program, and frees those of the oldest variant of too many."""
        self[key] = program
        if len(variants := [*dict.fromkeys(variant for variant, *_ in self)]) <= _VARIANTS:
            return
        for old in [old for old in self if old[0] == variants[0]]:
            del self[old]
        both = (itertools.chain.from_iterable(variant[2:]) for variant in variants[-2:])  # the optimizers' settings
        changed = dict.fromkeys(name for (name, value), (_, other) in zip(*both, strict=True) if value != other)
        logging.warning_once(
            "%s changes again and again, and the step is compiled for each value, which takes as long as before the "
            "first step; change it less often, such as once per epoch (a learning rate takes effect without)",
            ", ".join(changed) or "what is trainable",
        )


class Compiled(NamedTuple):
    """The compiled programs of an `InnerLoop`, without its feed and its data."""

    programs: Programs
    arrivals: Arrivals | None

    def newest(self, programs: int) -> Compiled:
        """Returns those with no more than so many programs, the last ones that were compiled."""
        return self._replace(programs=Programs([*self.programs.items()][-programs:]))


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
      predicts: steps return (metrics, nest of tensors [examples, ...]), and calls return the latter, too.
      batch_shards: number of shards of a batch: one per replica, or per group that computes the same examples.
      arrivals: counts the steps whose data has arrived; None creates one if the feed may wait in the loop.
      checks: traces the step, and checks it; None for those of any step.
      run_eagerly: execute steps op by op, once one has been traced.

    Attributes:
      programs: the compiled loops, by the values on which a traced step depends (`Inventory.step_variant`), the form of
        their operands, and the writer of layers' own summaries.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_function: Callable[..., Any],
        feed: Feed,
        *,
        state: TrainState | None = None,
        pace: Pace | None = None,
        jit: bool = False,
        syncs: Syncs | None = None,
        predicts: bool = False,
        batch_shards: int = 1,
        arrivals: Arrivals | None = None,
        checks: StepChecks | None = None,
        run_eagerly: bool = False,
    ):
        super().__init__(feed, state)
        is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._strategy, self._step_function = strategy, step_function
        self.pace, self.jit = pace, jit
        self._syncs, self._checks, self._batch_shards = syncs, checks or StepChecks(state, None), batch_shards
        self._arrivals = Arrivals() if arrivals is None and feed.reads_in_loop else arrivals
        self._sums_dtype = tf.float32 if is_tpu else tf.float64  # which TPUs lack
        # Only an evaluation's area under the curve is exact; training adds up histograms.
        self._keeps_scores = state is None and not is_tpu
        self._predicts, self._is_eager = predicts, run_eagerly
        # Several steps in an iteration gain nothing with several replicas or in XLA's programs (also TPUs'), nor if
        # steps may wait in the loop, since the wait could not be distinguished from the steps beside it.
        is_plain = not (jit or is_tpu or syncs or self._arrivals)
        self.unrolls = state is not None and is_plain and strategy.num_replicas_in_sync == 1
        # An XLA program runs the whole loop on one device. "" leaves the device to TensorFlow.
        self._counts_on_host = is_on_gpus(strategy) and not jit
        self._counter_device = "CPU:0" if self._counts_on_host else ""
        replicas = strategy.extended.worker_devices
        self._sums_devices = [device if self._counts_on_host else "" for device in replicas]
        self._predictions_device = "CPU:0" if predicts else ""
        self._trace = StepTrace(prediction_specs=None if predicts else ())  # the newest
        self._traced_input: tuple[int, int, CallInput] | None = None  # with its step and limit
        self.programs = Programs()

    def __call__(self, step: int, limit: int, *loop_inputs: Any, due: int | None = None) -> LoopResult:
        """Runs at most `limit` steps from global step `step` on; fewer if the operands end.

        Args:
          *loop_inputs: the other arguments of `_loop`, in a subclass.
          due: the step after which metrics are read, if known.
        """
        before = time.perf_counter()
        call_input = self._call_input(step, int(min(limit, self.steps_per_call)))
        input_seconds, steps = time.perf_counter() - before, call_input.stop - call_input.start
        arguments = self._arguments(step, call_input, step + steps == due, loop_inputs)
        # No lambda: its frame would keep the operands as long as an error, even after clearing.
        program, compiles = self._compiled_loop(step, arguments)
        call = functools.partial(program, *arguments)
        # The host's step is that of the end already while the call is queued: what the host plans next must not wait
        # for it.
        with self.moving_to(step + steps), self._compilation_explained(compiles):
            if self._arrivals is None:
                tensors = call()
            else:  # steps may wait for input in the loop, too
                waited_before = self._arrivals.seconds()
                self._arrivals.add(input_seconds)
                tensors = self.feed.run_with_timeout(call, self._arrivals.count)
                input_seconds = self._arrivals.seconds() - waited_before
        return self._result(tensors, steps, input_seconds)._replace(compiles=compiles)

    def _call_input(self, step: int, limit: int) -> CallInput:
        """Returns the feed's input of a call; what `trace` has read for it, so that an iterator is opened only once."""
        traced, self._traced_input = self._traced_input, None
        if traced is not None and traced[0] == step and traced[1] <= limit:
            return traced[2]
        return self.feed.call_input(step, limit)

    def _arguments(self, step: int, call_input: CallInput, is_due: bool, more: tuple) -> tuple:
        """Returns the arguments of `_loop`; the last step collects the norm if something is due after it."""
        operands, start, stop = call_input
        # Of an evaluation, its batch's.
        number = step if self.state else self.first_batch + step % self.feed.order.steps_per_epoch
        # One tensor instead of four: each argument of a call costs the host some microseconds.
        return operands, tf.constant((number, start, stop, stop - 1 if is_due else -1), tf.int64), *more

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

    def _result(self, tensors: tuple, steps: int, input_seconds: float) -> LoopResult:
        sums, predictions = tensors
        return LoopResult(LoopSums(self.metric_specs, sums), steps, input_seconds, predictions=predictions)

    def _compiled_loop(self, step: int, arguments: tuple) -> tuple[Callable, bool]:
        """Returns the compiled loop for operands of these specs, and whether it is new.

        This lookup is most of a `tf.function` call's time.
        """
        replicates_batch = self.feed.order.replicates_batch(step, self._batch_shards)
        operands = arguments[0] if self.jit else self.feed.traced(arguments[0])
        shapes = tuple(x.shape for x in tf.nest.flatten(operands, expand_composites=True))
        # A trace keeps the writer that was the default as it was traced, so another writer needs another trace.
        writer = None if self.jit else summary_writer()  # XLA compiles no summaries
        with TRACING:
            variant = (self._variant(), shapes, replicates_batch, writer)
            if compiles := variant not in self.programs:
                trace = StepTrace(replicates_batch)
                try:
                    program = self._compile(trace, variant, (operands, *arguments[1:]))
                except Exception:
                    if not self.feed.any_size:
                        raise
                    self.feed.any_size = False  # a layer may need the size
                    return self._compiled_loop(step, arguments)
                self.programs.add(variant, Traced(program, trace))
            program, self._trace = self.programs[variant]
        # Steps that are executed op by op are traced all the same: checks, metrics and zeros need the trace.
        return functools.partial(self._execute, self._trace) if self._is_eager else program, compiles

    def _compile(self, trace: StepTrace, variant: tuple, arguments: tuple) -> Callable:
        """Compiles the loop for a variant of the step (a key of `programs`), and fills its trace."""
        loop = tf.function(functools.partial(self._loop, trace), jit_compile=self.jit or None, autograph=False)
        with tracing_for_xla() if self.jit else contextlib.nullcontext():
            return loop.get_concrete_function(*arguments)

    def _variant(self) -> Hashable:
        """The values, other than its arguments, on which a traced step depends; each variant has its own program."""
        return self.state.trainer.inventory.step_variant() if self.state else ()

    def _loop(self, trace: StepTrace, operands: Any, numbers: tf.Tensor) -> tuple:
        """Computes a call: its metrics' sums over this host's replicas, [sums, 2], with its scores; its predictions.

        Args:
          trace: the trace of the step, to be filled.
          numbers: [4] int64, the numbers of `_Call`.
        """
        with tf.device(self._counter_device):
            call = _Call(operands, *tf.unstack(numbers))
            if self._counts_on_host:
                offsets = {name: tf.cast(getattr(call, name), tf.int32) for name in ("start", "stop", "norm_offset")}
                call = call._replace(**offsets)
        one_step, sums = self._trace_step(trace, operands, call.start, call.first_step)
        loops = [(1, one_step)]
        # The rest of a call, fewer steps than are unrolled, is done one by one by the second loop.
        if self._is_unrolled(trace.graph, operands):
            # Inlined: calls of one graph would wait for each other, operations only for their inputs.
            loops.insert(0, (_UNROLLED_STEPS, functools.partial(self._replicated_step, trace)))
        if self._syncs is None:
            _, sums = self._run_until(call.stop, call, loops, call.start, sums)
        else:
            sums = self._run_periods(self._syncs, call, loops, sums)
        if self.state is not None:  # here it is one more operation; from the host it would take half a millisecond
            with tf.device(self._counter_device):
                last_step = call.step(call.stop)
            self.state.step_variable.assign(last_step)
        return self._sum_replicas(sums)

    def _execute(self, trace: StepTrace, operands: Any, numbers: tf.Tensor) -> tuple:
        """Computes a call as `_loop` does, op by op; `trace` is that of its step."""
        call, sums = _Call(operands, *numbers.numpy().tolist()), list[Any]()
        for offset in range(call.start, call.stop):
            batch = self._step_operands(operands, tf.constant(offset, tf.int64))
            step = tf.constant(call.first_step + offset - call.start, tf.int64)
            result = self._replicated_step(trace, batch, step, tf.constant(offset == call.norm_offset))
            sums = self._add_step(sums or self._zeros(trace, result), result)
        if self.state is not None:
            self.state.step_variable.assign(call.first_step + call.stop - call.start)
        return self._sum_replicas(sums)

    def _trace_step(self, trace: StepTrace, operands: Any, offset: tf.Tensor, step: tf.Tensor, *more: Any) -> tuple:
        """Traces a step, and zeros of its metrics. One trace serves both, and a loop of single steps.

        `more` are specs of a step's arguments other than its batch, its number and whether it collects the norm.
        """
        one_batch = tf.function(self.feed.next_operands, autograph=False)
        # The step is traced on the batch's specification alone, not in the loop's graph: the loop, its zeros and the
        # checks need the step's graph before there is a loop.
        batch_spec = one_batch.get_concrete_function(operands, offset).structured_outputs

        def traced() -> tf.types.experimental.ConcreteFunction:
            one_step = tf.function(functools.partial(self._replicated_step, trace), autograph=False)
            return one_step.get_concrete_function(batch_spec, step, tf.constant(True), *more)

        one_step = self._checks.traced(traced, trace.replicates_batch)
        trace.graph = one_step.graph
        if self.state is not None and self.state.is_saved:
            self.state.note_step(trace.digest.value)
        remove_generated_files()
        return one_step, self._zeros(trace, self._step_result(one_step.structured_outputs))

    def _zeros(self, trace: StepTrace, result: tuple) -> list:
        """Returns zeros of a step's metrics, and arrays for its scores and predictions, per replica of this host."""
        local_results, zeros = map(self._strategy.experimental_local_results, result), []
        for device, (metrics, *predictions) in zip(self._sums_devices, zip(*local_results, strict=True), strict=True):
            with tf.device(device):
                totals = tf.zeros([num_sums(trace.metric_specs), 2], metrics.dtype)
                scores = [_step_array(metrics)] if any(spec.keeps_scores for spec in trace.metric_specs) else []
            with tf.device(self._predictions_device):
                zeros.append((totals, scores, [*map(_step_array, predictions)]))
        return zeros

    def _step_result(self, outputs: tuple) -> tuple:
        """Returns the result of a step among the outputs of `_replicated_step`."""
        return outputs

    def _is_unrolled(self, graph: tf.Graph, operands: Any) -> bool:
        """Returns whether an iteration has several of the steps that were traced in a graph."""
        if not self.unrolls or self.feed.most_steps(operands) < _UNROLLED_STEPS:
            return False
        operations = graphs.kinds(graph)
        is_small = operations.total() <= _FEW_OPERATIONS and not graphs.CONVOLUTIONS & operations.keys()
        in_16_bits = any(graphs.has(graph, dtype) for dtype in ("bfloat16", "float16"))
        return is_small and not in_16_bits and not graphs.sums_by_name(graph)

    def _run_until(self, end: tf.Tensor, call: _Call, loops: _Loops, offset: tf.Tensor, sums: list) -> tuple:
        """Runs the steps from an offset up to another; returns (the offset, the sums) after them."""
        for steps, run_step in loops:

            def iterate(offset: tf.Tensor, sums: list, steps: int = steps, run_step: Callable = run_step) -> tuple:
                for number in range(steps):
                    with tf.name_scope(f"step_{number}"):
                        batch = self._step_operands(call.operands, offset)
                        with tf.device(self._counter_device):
                            step, collect_norm = call.step(offset), tf.equal(offset, call.norm_offset)
                        # Adding within the loop keeps the metrics on the device: a call returns one tensor however many
                        # steps it had.
                        sums = self._add_step(sums, run_step(batch, step, collect_norm))
                        with tf.device(self._counter_device):
                            offset = offset + 1
                return offset, sums

            def fits(offset: tf.Tensor, steps: int = steps) -> tf.Tensor:
                return offset < end if steps == 1 else offset + steps <= end

            offset, sums = self._while(fits, iterate, offset, sums)
        return offset, sums

    def _run_periods(self, syncs: Syncs, call: _Call, loops: _Loops, sums: list) -> list:
        """Runs a call's steps with a sync of the replicas at the end of each period; returns the sums.

        This needs nested loops: a sum across replicas may be in a loop around `strategy.run`, not in a condition.
        """
        sync, period_steps = syncs.sync.get_concrete_function(), syncs.period_steps

        def period_end(offset: tf.Tensor) -> tf.Tensor:
            with tf.device(self._counter_device):
                return offset + tf.cast(period_steps - call.step(offset) % period_steps, offset.dtype)

        def whole_period(offset: tf.Tensor, sums: list) -> tuple[tf.Tensor, list]:
            offset, sums = self._run_until(period_end(offset), call, loops, offset, sums)
            with tf.control_dependencies(sums):
                sync()
            return offset, sums

        offset, sums = self._while(lambda offset: period_end(offset) <= call.stop, whole_period, call.start, sums)
        return self._run_until(call.stop, call, loops, offset, sums)[1]

    def _while(self, goes_on: Callable, body: Callable, offset: tf.Tensor, sums: list) -> tuple[tf.Tensor, list]:
        """Returns (offset, sums) after iterating `body` sequentially while `goes_on(offset)`."""

        def condition(offset: tf.Tensor, _: Any) -> tf.Tensor:
            with tf.device(self._counter_device):
                return goes_on(offset)

        return tf.while_loop(condition, body, (offset, sums), parallel_iterations=1)

    def _step_operands(self, operands: Any, offset: tf.Tensor) -> tuple:
        """Returns the arguments of a step's `strategy.run`."""
        if self._arrivals is None:
            return self.feed.next_operands(operands, offset)
        before = timestamp()
        with tf.control_dependencies([before]):
            # Behind the timestamp, or TensorFlow would start to read before it, and the wait would count as none.
            batch = self.feed.next_operands(operands, tf.identity(offset))
        self._arrivals.mark(batch, before)
        return batch

    def _add_step(self, sums: list, result: tuple) -> list:
        """Adds each replica's metrics of a step to its sums, on its own device; likewise its scores and predictions."""
        added, results = [], zip(*map(self._strategy.experimental_local_results, result), strict=True)
        for device, (totals, scores, arrays), (metrics, *new) in zip(self._sums_devices, sums, results, strict=True):
            with tf.device(device):
                count = totals.shape[0]
                scores = [array.write(array.size(), metrics[count:]) for array in scores]
                totals = totals + (metrics[:count] if scores else metrics)
            with tf.device(self._predictions_device):
                added.append((totals, scores, [x.write(x.size(), y) for x, y in zip(arrays, new, strict=True)]))
        return added

    def _sum_replicas(self, sums: list) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
        """Returns the sums of all of this host's replicas, the scores after them; and each replica's predictions."""
        total = tf.add_n([totals for totals, _, _ in sums])
        if sums[0][1]:
            total = tf.concat([total, *(scores.concat() for _, (scores,), _ in sums)], 0)
        with tf.device(self._predictions_device):
            return total, [[array.concat() for array in arrays] for _, _, arrays in sums if arrays]

    def _replicated_step(
        self, trace: StepTrace, batch: Any, step: tf.Tensor, collect_norm: tf.Tensor, *more: Any
    ) -> tuple:
        """Computes a step on each replica, and describes its results in `trace`.

        Returns each replica's metrics, `metrics.sums.stack`, and its predictions, if any, after their sort keys.
        """

        def run(*batch: Any) -> tuple:
            batch, replica = self.feed.batch(*batch), tf.cast(replica_id(), tf.int64)
            trace.batch_shapes.add(str([x.shape for x in tf.nest.flatten(batch, expand_composites=True)]))
            if trace.replicates_batch:
                # A batch of fewer examples than replicas is computed by each as a whole; a layer that sums over
                # replicas would count each example as often as there are replicas.
                exchange = single_replica_context()
            elif why := self.feed.order.no_exchange_reason(self._batch_shards):
                # Some replicas may have no batch left while others do: a sum in a layer would wait for them forever.
                exchange = forbid_exchange(why)
            else:
                exchange = contextlib.nullcontext()
            with exchange:  # other than the engine's
                result = self._step_function(batch, step, collect_norm, *more)
            metrics, predictions = result if self._predicts else (result, ())
            # Known only now, since what a step returns is up to its code.
            trace.metric_specs = sum_specs(metrics, self._keeps_scores)
            sums = stack(metrics, self._sums_dtype, self._keeps_scores)
            if not self._predicts:
                return (sums,)
            trace.prediction_specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), predictions)
            flat = tf.nest.flatten(predictions)
            # Replicas and calls return predictions in no common order; keys put them back into the data's order.
            sort_keys = tf.fill(tf.shape(flat[0])[:1], step * self._strategy.num_replicas_in_sync + replica)
            return sums, sort_keys, *flat

        return self._strategy.run(run, args=batch)

    def trace(self, *loop_inputs: Any) -> Sequence[SumSpec]:
        """Compiles the program of a call through the feed's epoch, which must be the next call, without running it."""
        step, limit = self.step, int(min(self.feed.order.steps_per_epoch, self.steps_per_collection))
        call_input = self._call_input(step, limit)
        self._compiled_loop(step, self._arguments(step, call_input, False, loop_inputs))
        self._traced_input = step, limit, call_input
        return self.metric_specs

    def one_step(self, step: int) -> tf.types.experimental.ConcreteFunction:
        """Traces step `step` on all of this host's replicas, as in the loop, for inspection only."""
        operands, start, _ = self.feed.call_input(step, 1)
        self._trace = StepTrace(self.feed.order.replicates_batch(step, self._batch_shards))
        offset, number = tf.constant(start, tf.int64), tf.constant(step, tf.int64)
        return self._trace_step(self._trace, operands, offset, number)[0]

    @property
    def metric_specs(self) -> list[SumSpec]:
        """Describes the sums of metrics that a call returns; known after tracing."""
        return self._trace.metric_specs

    @property
    def prediction_specs(self) -> Any:  # type: ignore[override]
        return self._trace.prediction_specs

    @property
    def operations(self) -> Counter[str]:
        """The number of TensorFlow's operations in a step, by kind ("MatMul"); known after the first call."""
        return graphs.kinds(self._trace.graph)

    @property
    def lacked_by_xla(self) -> tf.Operation | None:
        """An op of a step that XLA has no kernel for, if any; known after tracing."""
        return graphs.lacked_by_xla(self._trace.graph)

    @property
    def compiled(self) -> Compiled:
        """The compiled programs, which another loop of the same step, on a feed of the same `form`, can take over."""
        return Compiled(self.programs, self._arrivals)

    @compiled.setter
    def compiled(self, before: Compiled) -> None:
        self.programs, self._arrivals = before
        self._trace = self._newest_trace

    @property
    def _newest_trace(self) -> StepTrace:
        return [*self.programs.values()][-1].trace if self.programs else self._trace

    @property
    def writes_summaries(self) -> bool:
        """Whether it has compiled a step that may write summaries of its own."""
        return any(writer is not None for *_, writer in self.programs)

    def on(self, feed: Feed) -> InnerLoop:
        program: Any = super().on(feed)
        with TRACING:
            program._trace, program._traced_input = self._newest_trace, None
        return program

    def close(self) -> None:
        super().close()
        self._traced_input = None
