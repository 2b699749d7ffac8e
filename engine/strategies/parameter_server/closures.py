"""What a worker runs for the coordinator: a range of steps in one compiled call, counted by the servers. Worker code.

Where a worker dies, TensorFlow runs its closure again on another one. The servers know how far it was, so it goes on
from there: steps are repeated only if they were applied and not yet counted when the worker died or the step failed, as
the last one is until the next one begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...internals.tensorflow import sleep
from ..inner_loop import InnerLoop
from . import staleness
from .feed import Took, timestamp_after
from .pull import Pull

_PAUSES = (1_000, 50_000)  # microseconds, the shortest and the longest between two looks of a worker that waits
DEAD = -1  # a worker that the coordinator has found dead
COUNT_SCOPE = "count_step"  # of the ops that count a step, by which a trace's steps are known


class Lease(NamedTuple):
    """A range of steps of the data's order, handed out to whichever worker takes it.

    Attributes:
      number: from 1 on, over the whole run of the process.
      slot: its index among the counters while it is open.
      steps_before, starts_before: what the slot had counted when the lease was made.
      first, stop: the range, [first, stop).
    """

    number: int
    slot: int
    steps_before: int
    starts_before: int
    first: int
    stop: int


class Returned(NamedTuple):
    """What a closure gives back.

    Attributes:
      sums: [rows, 2], the metrics' sums over the steps that this run of it did, and the scores that it keeps.
      staleness: [rows], see `staleness.bucketed`.
      row: the worker; the first of these steps; how often the lease was begun, and its steps, by the counters.
      took: a `Took`, as [4] in the graph.
      seconds: the time that it took in all.
    """

    sums: Any
    staleness: Any
    row: Any
    took: Any = Took(0.0, 0.0, 0.0, 0.0)
    seconds: Any = 0.0

    @classmethod
    def unpacked(cls, vector: np.ndarray) -> Returned:
        after = [staleness.ROWS, 4, len(Took._fields), 1]
        sums, seen, row, took, seconds = np.split(vector, np.cumsum([len(vector) - sum(after), *after])[:-1])
        row = row.astype(np.int64).tolist()
        return cls(sums.reshape(-1, 2), seen.astype(np.int64), row, Took(*took.tolist()), float(seconds[0]))


class LeasedStep(NamedTuple):
    """What a step of `UpdateLoop` knows about itself.

    Attributes:
      marks: int64, what the counters grow by with each of the closure's steps.
      worker: int64 scalar.
      counts: bool scalar, whether a step of the closure comes before it, which is to be counted.
    """

    marks: tf.Tensor
    worker: tf.Tensor
    counts: tf.Tensor


class Counters:
    """Counts of the run's progress, on the first server: int64, not in checkpoints.

    Attributes:
      counts: [1 + 2 slots + workers]: updates in all; for each slot, its steps and how often a closure was begun; each
        worker's updates. They are only ever added to, all in one operation, so that they agree.
      holding: [workers], the number of the lease that each worker holds; 0 is none, -1 a worker found dead.
      takers: [slots], the worker that was the last to begin the lease in each slot.
    """

    def __init__(self, slots: int, workers: int):
        self.slots, self.workers = slots, workers
        self._size = 1 + 2 * slots + workers
        with tf.device("/job:ps/task:0/device:CPU:0"):
            self.counts = tf.Variable(tf.zeros([self._size], tf.int64), trainable=False, name="counts")
            self.holding = tf.Variable(tf.zeros([workers], tf.int64), trainable=False, name="holding")
            self.takers = tf.Variable(tf.zeros([slots], tf.int64), trainable=False, name="takers")

    def ones_at(self, *indices: tf.Tensor) -> tf.Tensor:
        """Returns as many int64 as there are counts: 1 at these indices, else 0."""
        return tf.add_n([tf.one_hot(index, self._size, dtype=tf.int64) for index in indices])

    def add(self, amounts: tf.Tensor) -> tf.Tensor:
        """Adds to all counts at once, and returns what they are then."""
        tf.raw_ops.AssignAddVariableOp(resource=self.counts.handle, value=amounts)
        return self.read()

    def read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.counts.handle, dtype=tf.int64)

    def read_holding(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.holding.handle, dtype=tf.int64)

    def take(self, worker: tf.Tensor, lease: Lease) -> list[tf.Operation]:
        """Records which worker holds a lease."""
        return [_put(self.holding, worker, lease.number), _put(self.takers, lease.slot, worker)]

    def release(self, worker: tf.Tensor) -> None:
        _put(self.holding, worker, tf.constant(0, tf.int64))

    def clear_leases(self) -> None:
        """Clears every live worker's lease, while no closure runs; dead workers stay marked dead."""
        holding = self.holding.read_value()
        self.holding.assign(tf.where(holding == DEAD, holding, tf.zeros_like(holding)))

    def steps_at(self, slot):
        return 1 + slot

    def starts_at(self, slot):
        return 1 + self.slots + slot

    def clock_at(self, worker):
        return 1 + 2 * self.slots + worker

    def updates_ahead(self, counts: tf.Tensor, holding: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """Returns how many updates a worker is ahead of the slowest worker that holds a lease."""
        clocks = counts[self.clock_at(0) :]
        return clocks[worker] - tf.reduce_min(tf.where(holding > 0, clocks, clocks[worker]))

    def wait_for_slower(self, worker: tf.Tensor, seen: tf.Tensor, max_ahead: int) -> tf.Tensor:
        """Waits until a worker is at most so many updates ahead of the slowest; returns the counters' values then.

        Reads the counters again each time after an eighth of the time waited so far: it waits too long by no more than
        that, and the longer the wait, the more rarely it asks the first server, which answers all workers.

        Args:
          worker: that waits.
          seen: the counters' values that it has read last.
          max_ahead: updates.
        """
        with tf.control_dependencies([seen]):
            first = (seen, self.read_holding(), tf.zeros([], tf.int64))

        def look_again(_, __, waited):
            pause = tf.clip_by_value(waited // 8, *_PAUSES)
            with tf.control_dependencies([sleep(pause)]):
                return self.read(), self.read_holding(), waited + pause

        return tf.while_loop(
            lambda counts, holding, _: self.updates_ahead(counts, holding, worker) > max_ahead,
            look_again,
            first,
            parallel_iterations=1,
        )[0]


def _put(variable: tf.Variable, index: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=index, updates=value)


class ClosureLoop(InnerLoop):
    """Runs a lease's steps without counting them: where steps are run twice, the last run's results are taken.

    Args:
      strategy, feed: as `InnerLoop` has them.
      step: replica code, (batch, step, observed, pulled) -> metrics.
      pull: reads the variables that steps compute with; here once a lease.
    """

    def __init__(self, strategy, step, feed, pull: Pull, keeps_scores: bool = False):
        super().__init__(strategy, step, feed, keeps_scores=keeps_scores)
        self._pull = pull
        # Leases have examples of any number of steps with them, for which one graph is enough.
        lease = tf.TensorSpec([len(Lease._fields)], tf.int64)
        self._compiled = tf.function(self._loop, autograph=False, input_signature=(feed.lease_specs, lease))

    @property
    def function(self) -> tf.function:
        """The function to schedule, with the arguments (operands, lease); the lease is an int64 vector."""
        return self._compiled

    def one_step(self, step: int) -> tf.types.experimental.ConcreteFunction:
        """Traces step `step` as a worker runs it: for inspection, not to be run."""
        step = tf.constant(step, tf.int64)
        return self._traced(self._feed.operand_specs, step, step, *self._more_operands())[0]

    def _more_operands(self) -> tuple:
        """Specs of what a step is given besides its batch, its number and whether it is observed."""
        return (_specs(self._pull.packs()),)

    def _loop(self, operands, lease):  # type: ignore[override]
        """Runs a closure. Returns a `Returned` as one vector, since the coordinator fetches each tensor separately."""
        lease = Lease(*tf.unstack(lease))
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            worker = tf.identity(tf.distribute.coordinator.experimental_get_current_worker_index())
        found = self._run_lease(operands, lease, worker)
        if self._hosted:  # a GPU's work is done when the host has its result
            with tf.device("/job:worker/device:CPU:0"):
                found = tf.nest.map_structure(tf.identity, found)
        with tf.control_dependencies(tf.nest.flatten(found)):
            found = found._replace(seconds=tf.timestamp() - began)
        return tf.concat([tf.cast(tf.reshape(part, [-1]), tf.float64) for part in found], 0)

    def _run_lease(self, operands, lease: Lease, worker):
        pulled = self._pull.packs()
        one_step, zeros = self._traced(self._feed.operand_specs, lease.first, lease.first, _specs(pulled))

        def body(operands, step, sums):
            result = one_step(self._batch(operands, step), step, tf.equal(step, lease.stop - 1), pulled)
            return step + 1, self._added(sums, result)

        (_, sums), took = self._run_steps(operands, lease.stop, body, (lease.first, zeros))
        row = tf.stack([worker, lease.first, 0, 0])
        return Returned(self._total(sums), tf.zeros([staleness.ROWS], tf.int64), row, took)

    def _run_steps(self, operands, stop, body, state: tuple) -> tuple:
        """Runs body(operands, *state) -> state up to step `stop`, as `feed.through`; the state begins with the step."""

        def run(operands, stop, state):
            def one_step(_, *state):
                state = body(operands, *state)
                return (timestamp_after(state[0]), *state)

            start = (tf.zeros([], tf.float64), *state)
            ended, *state = tf.while_loop(lambda _, step, *__: step < stop, one_step, start, parallel_iterations=1)
            return tuple(state), ended

        return self._feed.through(operands, state[0], stop, run, state)


class UpdateLoop(ClosureLoop):
    """Runs a lease's steps, which are updates, and counts each of them in the counters.

    A closure that is run again goes on where the one before it stopped, by the counters.

    A step ends by pulling the variables for the next one: they come with the answer to its push, where a pull at the
    next step's start would be a request of its own. Only a worker that waits for slower ones pulls after its wait.

    Args:
      counters: where steps are counted.
      max_staleness_steps: a worker that is more updates than this ahead of the slowest waits (Ho et al. 2013, More
        effective distributed ML via a stale synchronous parallel parameter server); None lets it run.
      The rest is `ClosureLoop`'s.
    """

    def __init__(self, strategy, step, feed, pull, counters, max_staleness_steps=None):
        super().__init__(strategy, step, feed, pull)
        self._counters = counters
        self._max_staleness_steps = max_staleness_steps
        self._waits = max_staleness_steps is not None

    def _run_lease(self, operands, lease: Lease, worker):
        counters = self._counters
        counts = self._begin(worker, lease)
        done_before = counts[counters.steps_at(lease.slot)] - lease.steps_before
        starts = counts[counters.starts_at(lease.slot)] - lease.starts_before
        first = lease.first + done_before
        pulled = _on_worker(self._pull.packs())
        marks = counters.ones_at(0, counters.steps_at(lease.slot), counters.clock_at(worker))
        context = LeasedStep(marks, worker, tf.constant(False))
        specs = self._feed.operand_specs
        one_step, zeros = self._traced(specs, lease.first, lease.first, _specs(pulled), _specs(context))

        def body(operands, step, sums, seen, pulled, pulled_at):
            here = context._replace(counts=step > first)
            result = one_step(self._batch(operands, step), step, tf.equal(step, lease.stop - 1), pulled, here)
            result, pulled, counted, begun = result
            seen += self._staleness_if(step > first, worker, counted, pulled_at)
            with tf.control_dependencies(tf.nest.flatten(result)):  # and so applied on all servers
                step = step + 1
            # It pulled before it, or at the end of the one before it: in any case about when it began.
            return step, self._added(sums, result), seen, _on_worker(pulled), begun

        start = (first, zeros, tf.zeros([staleness.ROWS], tf.int64), pulled, counts)
        (last, sums, seen, _, pulled_at), took = self._run_steps(operands, lease.stop, body, start)
        counts = counters.add(marks * tf.cast(last > first, tf.int64))
        seen += self._staleness_if(last > first, worker, counts, pulled_at)
        with tf.control_dependencies([counts]):
            counters.release(worker)
        row = tf.stack([worker, first, starts, lease.stop - lease.first])
        return Returned(self._total(sums), seen, row, took)

    def _more_operands(self) -> tuple:
        marks, one = self._counters.ones_at(0), tf.constant(True)
        return _specs(self._pull.packs()), _specs(LeasedStep(marks, marks[0], one))

    def _staleness_if(self, done, worker, counts, pulled_at):
        """Returns a one in the bucket of the staleness of the step before this one, zeros if that is not `done`."""
        since = counts - pulled_at
        return tf.cast(done, tf.int64) * staleness.bucketed(since[0] - since[self._counters.clock_at(worker)])

    def _replicated_step(self, batch, step, observed, pulled, context: LeasedStep):
        """Runs one step.

        Returns (a step's metrics, what the next one computes with, the counters with the one before, and when it
        had waited).

        The step before is counted only now, when it is applied on all servers: a step in doubt is done again, never
        left out. It is counted as this step begins, so that the round trip to the counters costs no time of its own.
        """
        with tf.name_scope(COUNT_SCOPE):
            counted = begun = self._counters.add(context.marks * tf.cast(context.counts, tf.int64))
        if self._waits:
            begun = self._counters.wait_for_slower(context.worker, counted, self._max_staleness_steps)
            with tf.control_dependencies([begun]):
                # So that rows are looked up when it has waited, too.
                batch, step = tf.nest.map_structure(tf.identity, (batch, step))
                pulled = self._pull.packs()
        sums = super()._replicated_step(batch, step, observed, pulled)
        return sums, pulled if self._waits else self._pull.packs(), counted, begun

    def _sums(self, outputs):
        return outputs[0]

    def _begin(self, worker, lease: Lease) -> tf.Tensor:
        """Notes that this worker has the lease; returns the counters' values."""
        counters = self._counters
        if self._waits:
            # A worker that was dead must not make the others wait until it has caught up.
            before = counters.read_holding()
            behind = tf.maximum(-_slack(counters, before, worker), 0)
            counters.add(counters.ones_at(counters.clock_at(worker)) * tf.where(before[worker] == DEAD, behind, 0))
        with tf.control_dependencies(counters.take(worker, lease)):
            return counters.add(counters.ones_at(counters.starts_at(lease.slot)))


def _on_worker(tensors):
    """Copies tensors to the worker.

    TensorFlow would otherwise keep what a loop carries on the server that made it, and each step send it both ways.
    """
    with tf.device("/job:worker"):
        return tf.nest.map_structure(tf.identity, tensors)


def _specs(tensors):
    return tf.nest.map_structure(tf.TensorSpec.from_tensor, tensors)


def _slack(counters: Counters, holding: tf.Tensor, worker) -> tf.Tensor:
    """Returns a worker's updates minus those of the slowest other worker that holds a lease; 0 if none does."""
    counts = counters.read()
    clocks = counts[counters.clock_at(0) :]
    others = tf.logical_and(holding > 0, tf.range(counters.workers, dtype=tf.int64) != worker)
    slowest = tf.reduce_min(tf.where(others, clocks, clocks.dtype.max))
    return tf.where(tf.reduce_any(others), clocks[worker] - slowest, 0)
