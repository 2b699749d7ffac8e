"""A worker's execution of a lease: a range of steps in one compiled call, counted on the servers. Worker code.

If a worker dies, TensorFlow runs its lease again on another one. It continues from the servers' counts: steps are
repeated only if they were applied but not yet counted at the failure, as the last one is until the next one begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...engine.internals.variables import server_device, tf_variable
from ...engine.metrics.sums import SumSpec
from ...engine.optimizers.base import Optimizer
from ...engine.reduction import wire
from ...engine.strategies.inner_loop import InnerLoop, Programs, StepTrace
from .pulled import PulledValues, read_progress
from .worker_feeds import InputStats, LeaseFeed, timestamp_after

COUNT_SCOPE = "count_step"  # names of the ops that count a step; traces identify steps by them
LAGS = 16  # of staleness: updates with 0, 1, ... of others between their pull and their push, and with 15 or more


class Lease(NamedTuple):
    """A range of steps of the data's order, scheduled for any worker.

    Attributes:
      number: number of the lease, from 1 on, over the whole run of the process.
      slot: index of the lease among the counters while it is in progress.
      steps_before, starts_before: the slot's counts when the lease was created.
      first, stop: the range of steps, [first, stop).
      first_batch: see `Program`.
    """

    number: int
    slot: int
    steps_before: int
    starts_before: int
    first: int
    stop: int
    first_batch: int

    @property
    def steps(self) -> int:
        return self.stop - self.first


class LeaseResult(NamedTuple):
    """The result of a lease.

    Attributes:
      sums: [sums, 2], the metrics' sums over the steps of this run, and its scores.
      staleness: the number of others' updates between a step's pull and its push: sum and maximum over these steps;
        then the number of steps with 0, 1, ... of them (`LAGS`).
      first: the first of these steps.
      starts: how often the lease was started, by the counters; 0 if not counted.
      steps_seconds: the duration of the lease's steps, without the messages before the first and after the last.
      worker: index of the worker that ran the lease.
      input_stats: `InputStats` of the lease; [4] in the graph.
    """

    sums: Any
    staleness: Any
    first: Any
    starts: Any
    seconds: Any
    steps_seconds: Any
    worker: Any
    input_stats: Any

    @classmethod
    def unpacked(cls, vector: np.ndarray) -> LeaseResult:
        sums, staleness, numbers, stats = np.split(vector, [-11 - LAGS, -9, -4])
        first, starts, seconds, steps_seconds, worker = numbers.tolist()
        staleness = staleness.astype(np.int64).tolist()
        input_stats = InputStats(*stats.tolist())
        durations = seconds, steps_seconds
        return cls(sums.reshape(-1, 2), staleness, int(first), int(starts), *durations, int(worker), input_stats)


class Counters:
    """Counts of the run's progress, on the first server: int64, not in checkpoints.

    Attributes:
      counts: [1 + 2 slots]: the total of updates; for each slot, its steps and its leases' starts. They only grow, all
        in one operation, so that they are consistent.
      takers: [slots], the last worker to start the lease in each slot.
    """

    def __init__(self, slots: int):
        self._slots = slots
        with tf.device("/job:ps/task:0/device:CPU:0"):
            self.counts = tf.Variable(tf.zeros([1 + 2 * slots], tf.int64), trainable=False, name="counts")
            self.takers = tf.Variable(tf.zeros([slots], tf.int64), trainable=False, name="takers")

    def steps_at(self, slot):
        return 1 + slot

    def starts_at(self, slot):
        return 1 + self._slots + slot

    def ones_at(self, *indices: tf.Tensor) -> tf.Tensor:
        """Returns an int64 per count: 1 at these indices, else 0."""
        return tf.add_n([tf.one_hot(index, 1 + 2 * self._slots, dtype=tf.int64) for index in indices])

    def add(self, amounts: tf.Tensor) -> tf.Tensor:
        """Adds to all counts at once, and returns the new counts."""
        tf.raw_ops.AssignAddVariableOp(resource=self.counts.handle, value=amounts)
        return tf.raw_ops.ReadVariableOp(resource=self.counts.handle, dtype=tf.int64)

    def begin(self, lease: Lease, worker: tf.Tensor) -> tf.Tensor:
        """Records a worker's start of a lease; returns the counts."""
        # Not among what waits for `taker`: the server's answer would go to the worker, and this back.
        a_start = self.ones_at(self.starts_at(lease.slot))
        taker = tf.raw_ops.ResourceScatterUpdate(resource=self.takers.handle, indices=lease.slot, updates=worker)
        with tf.control_dependencies([taker]):
            return self.add(a_start)


class Pull:
    """Reads float32 Keras variables and the optimizers' progress from their servers.

    A server's values are sent as one vector, or as a few if they exceed a message (`wire.WireLayout`). Variables of
    other dtypes, and those on no server, are read where they are used.

    Args:
      reduce_dtype: dtype in which values are sent.
      moved: Keras variables that layers may assign, which steps read themselves.
      tables: the tables that steps update, of which a step first reads how many rows were freed.
    """

    def __init__(
        self,
        variables: Sequence[tf.keras.Variable],
        reduce_dtype: tf.DType,
        optimizers: Sequence[Optimizer] = (),
        moved: Sequence[tf.keras.Variable] = (),
        tables: Iterable[Any] = (),
    ):
        self._moved, self._reduce_dtype, self._tables = moved, reduce_dtype, [*tables]
        floats = [variable for variable in variables if tf_variable(variable).dtype == tf.float32]
        placed = [(server_device(tf_variable(variable)), variable) for variable in floats]
        progressing = [(server_device(optimizer.iterations), optimizer) for optimizer in optimizers]
        self._servers = []  # each with its optimizers, its variables, and their layout
        for server in dict.fromkeys(server for server, _ in [*placed, *progressing] if server):
            counting = [optimizer for device, optimizer in progressing if device == server]
            held = [variable for device, variable in placed if device == server]
            shapes = [tf.TensorShape(variable.shape) for variable in held]
            # float64 as float32 lanes
            progress = [tf.TensorShape([2 + len(optimizer.all_variables), 2]) for optimizer in counting]
            self._servers.append((server, counting, held, wire.WireLayout(progress, shapes, reduce_dtype)))

    def buckets(self) -> list[tf.Tensor]:
        """Reads the present values: vectors of each server, with the progress there."""
        buckets: list[tf.Tensor] = []
        for server, optimizers, variables, layout in self._servers:
            with tf.device(server):
                handles = [tf_variable(variable).handle for variable in variables]
                reads = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in handles]
                progress = [tf.bitcast(read_progress(optimizer), tf.float32) for optimizer in optimizers]
                buckets += layout.join(progress, reads)
        return buckets

    def start_values(self, buckets: Sequence[tf.Tensor]) -> PulledValues:
        """Splits `buckets` into the values with which a step computes: of variables, and the optimizers' progress."""
        pairs: list[tuple] = []
        progress: dict[int, tf.Tensor] = {}
        buckets = list(buckets)
        for _, optimizers, variables, layout in self._servers:
            here, buckets = buckets[: layout.num_buckets], buckets[layout.num_buckets :]
            counts, values = layout.split(here)
            counts = [tf.bitcast(lanes, tf.float64) for lanes in counts]
            progress.update(zip(map(id, optimizers), counts, strict=True))
            pairs += zip(variables, values, strict=True)
        admissions = ((s, a) for table in self._tables for s, a in zip(table.shards, table.admissions, strict=False))
        freed = {id(shard): read for shard, admission in admissions if (read := admission.read_freed())}
        return PulledValues(variables=pairs, pull=self._again, moved=self._moved, progress=progress, freed=freed)

    def _again(self, variables: Sequence[tf.keras.Variable]) -> Sequence[tuple[tf.keras.Variable, tf.Tensor]]:
        """Reads variables within a step; returns them with their values."""
        pull = Pull(variables, self._reduce_dtype)
        return pull.start_values(pull.buckets()).variables


class LeaseLoop(InnerLoop):
    """Runs a lease's steps without counting them: if steps are run twice, the last run's results are used.

    Args:
      strategy, feed: see `InnerLoop`.
      step: replica code, (batch, step, collect_norm, pulled) -> metrics.
      pull: reads the variables that steps compute with; here once per lease.
    """

    feed: LeaseFeed

    def __init__(self, strategy, step, feed: LeaseFeed, pull: Pull, **more):
        super().__init__(strategy, step, feed, **more)
        self._pull = pull
        self._functions = Programs()

    def on(self, feed) -> LeaseLoop:
        self.feed = feed  # in place, since leases are of this program: its calls are made one after the other
        self.restart()
        return self

    @property
    def function(self) -> tf.function:
        """The function to schedule, with the arguments (operands, lease); the lease is an int64 vector."""
        specs = self.feed.lease_specs
        if (variant := (self._variant(), repr(specs))) not in self._functions:
            # Leases include examples of any number of steps; one graph is enough for all.
            signature = (specs, tf.TensorSpec([len(Lease._fields)], tf.int64))
            self._trace = StepTrace()
            loop = functools.partial(self._loop, self._trace)
            self._functions.add(variant, tf.function(loop, autograph=False, input_signature=signature))
        return self._functions[variant]

    def trace(self) -> Sequence[SumSpec]:
        self.one_step(0)
        return self.metric_specs

    def one_step(self, step: int) -> tf.types.experimental.ConcreteFunction:
        """Traces step `step` as run by a worker, for inspection only."""
        self._trace, step = StepTrace(), tf.constant(step, tf.int64)
        more = self._argument_specs(self._pull.buckets())
        return self._trace_step(self._trace, self.feed.operand_specs, step, step, *more)[0]

    def _argument_specs(self, pulled: list[tf.Tensor]) -> tuple:
        """Returns the specs of a step's arguments other than its batch, its number and whether it collects the norm."""
        return (tf.nest.map_structure(tf.TensorSpec.from_tensor, pulled),)

    def _loop(self, trace: StepTrace, operands: Any, lease: tf.Tensor) -> tuple:  # type: ignore[override]
        """Runs a lease. Returns its `LeaseResult` as one vector, as tensors are fetched one by one; its predictions."""
        lease = Lease(*tf.unstack(lease))
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            worker = tf.identity(tf.distribute.coordinator.experimental_get_current_worker_index())
        result, predictions = self._run_lease(trace, operands, lease, worker)
        if self._counts_on_host:  # a GPU's work is done when the host has its result
            with tf.device("/job:worker/device:CPU:0"):
                result = tf.nest.map_structure(tf.identity, result)
        with tf.control_dependencies(tf.nest.flatten(result)):
            result = result._replace(seconds=tf.maximum(tf.timestamp() - began, 0.0))
        return tf.concat([tf.cast(tf.reshape(x, [-1]), tf.float64) for x in result], 0), predictions

    def _run_lease(
        self, trace: StepTrace, operands: Any, lease: Lease, worker: tf.Tensor
    ) -> tuple[LeaseResult, list[list[tf.Tensor]]]:
        """Returns the result of a lease, without its duration, and its predictions."""
        pulled, specs = self._pull.buckets(), self.feed.operand_specs
        one_step, zeros = self._trace_step(trace, specs, lease.first, lease.first, *self._argument_specs(pulled))

        def body(operands, step, sums):
            batch, number = self._step_operands(operands, step), lease.first_batch + step
            result = one_step(batch, number, tf.equal(step, lease.stop - 1), pulled)
            return step + 1, self._add_step(sums, result)

        (_, sums), input_stats, seconds = self._run_steps(operands, lease.stop, body, (lease.first, zeros))
        nothing = tf.zeros([2 + LAGS], tf.int64)
        total, predictions = self._sum_replicas(sums)
        return LeaseResult(total, nothing, lease.first, nothing[0], seconds, seconds, worker, input_stats), predictions

    def _run_steps(self, operands: Any, stop: tf.Tensor, body: Callable, state: tuple) -> tuple:
        """Runs body(operands, *state) -> state up to step `stop`; the state begins with the step.

        Returns what `feed.through` does, and the seconds that it took.
        """

        def run(operands, stop, state):
            def one_step(_, *state):
                state = body(operands, *state)
                return (timestamp_after(state[0]), *state)

            start = (tf.zeros([], tf.float64), *state)
            ended, *state = tf.while_loop(lambda _, step, *__: step < stop, one_step, start, parallel_iterations=1)
            return tuple(state), ended

        began = timestamp_after(state[0])
        state, input_stats = self.feed.through(operands, state[0], stop, run, state)
        return state, input_stats, tf.maximum(timestamp_after(*tf.nest.flatten(state)) - began, 0.0)


class UpdateLoop(LeaseLoop):
    """Runs a lease's steps, which are updates, and counts each of them in the counters.

    A lease that is run again continues where its previous run stopped, by the counters. A step ends by pulling the
    variables for the next one: they come with the answer to its push, while a pull at the next step's start would be
    another request.

    Args:
      The rest is `LeaseLoop`'s.
    """

    def __init__(self, strategy, step, feed, pull, counters: Counters, **more):
        super().__init__(strategy, step, feed, pull, **more)
        self._counters = counters

    def _run_lease(
        self, trace: StepTrace, operands: Any, lease: Lease, worker: tf.Tensor
    ) -> tuple[LeaseResult, list[list[tf.Tensor]]]:
        counters, specs = self._counters, self.feed.operand_specs
        counts = counters.begin(lease, worker)
        first = lease.first + counts[counters.steps_at(lease.slot)] - lease.steps_before
        starts = counts[counters.starts_at(lease.slot)] - lease.starts_before
        pulled = _copy_to_worker(self._pull.buckets())
        one_step, zeros = self._trace_step(trace, specs, lease.first, lease.first, *self._argument_specs(pulled))
        a_step = counters.ones_at(0, counters.steps_at(lease.slot))

        def body(operands, step, sums, staleness, pulled, pulled_at):
            before = a_step * tf.cast(step > first, tf.int64)
            result = one_step(self._step_operands(operands, step), step, tf.equal(step, lease.stop - 1), pulled, before)
            result, pulled, counts = result
            staleness = _add_staleness(staleness, step > first, counts, pulled_at)
            with tf.control_dependencies(tf.nest.flatten(result)):  # i.e. applied on all servers
                step = step + 1
            # It pulled before it, or at the end of the previous one: about when it began.
            return step, self._add_step(sums, result), staleness, _copy_to_worker(pulled), counts

        start = (first, zeros, tf.zeros([2 + LAGS], tf.int64), pulled, counts)
        state, input_stats, seconds = self._run_steps(operands, lease.stop, body, start)
        last, sums, staleness, _, pulled_at = state
        counts = counters.add(a_step * tf.cast(last > first, tf.int64))
        staleness = _add_staleness(staleness, last > first, counts, pulled_at)
        total, predictions = self._sum_replicas(sums)
        return LeaseResult(total, staleness, first, starts, seconds, seconds, worker, input_stats), predictions

    def _argument_specs(self, pulled: list[tf.Tensor]) -> tuple:
        return *super()._argument_specs(pulled), tf.TensorSpec(self._counters.counts.shape, tf.int64)

    def _replicated_step(self, trace: StepTrace, batch, step, collect_norm, pulled, before):
        """Runs one step, and counts the one `before`: the counters' increments, zeros without one.

        Returns (the step's metrics, the values for the next one, the counters including the one before).

        The step before is counted only now that it is applied on all servers: a step in doubt is repeated, never
        omitted. It is counted as this step begins, so that the round trip to the counters costs no extra time.
        """
        with tf.name_scope(COUNT_SCOPE):
            counts = self._counters.add(before)
        result = super()._replicated_step(trace, batch, step, collect_norm, pulled)
        return result, self._pull.buckets(), counts

    def _step_result(self, outputs):
        return outputs[0]


def _copy_to_worker(tensors):
    """Copies tensors to the worker.

    TensorFlow would else keep a loop's variables on their server, and send them both ways each step.
    """
    with tf.device("/job:worker"):
        return tf.nest.map_structure(tf.identity, tensors)


def _add_staleness(staleness: tf.Tensor, done: tf.Tensor, counts: tf.Tensor, pulled_at: Any) -> tf.Tensor:
    """Adds the staleness of a step, if it is `done`, to a lease's: all updates since its pull but its own."""
    by_others = tf.where(done, counts[0] - pulled_at[0] - 1, 0)
    lag = tf.where(done, tf.minimum(by_others, LAGS - 1), -1)  # -1 does not count
    head = tf.stack([staleness[0] + by_others, tf.maximum(staleness[1], by_others)])
    return tf.concat([head, staleness[2:] + tf.one_hot(lag, LAGS, dtype=tf.int64)], 0)
