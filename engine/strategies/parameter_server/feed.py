"""Feeds of workers around parameter servers: arrays that each holds, files that each reads, streams sent to them.

Coordinator code, but for `through`, `next_operands` and `batch`, which are graph code of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...data import host_arrays
from ...data.base import Feed, Run
from ...data.dataset_feed import DatasetFeed, divide, unwatched
from ...data.lent_feed import LentFeed
from ...data.order import Order
from ...data.reading import example_seeds
from ...data.source import Source
from ...data.split import example_bytes, spec_of
from ...internals.tensorflow import on_each_worker, wait_for_operations
from ...mesh.mesh import Mesh
from . import sources

_PIECE_BYTES = 16 << 20  # of an array at once, for each worker: a message is copied some three times on its way
_READ_BYTES = 8 << 20  # of examples at once, at most; of those that are sent, in a closure
_PIECES = 8  # of a lease: its first steps wait for the first one


class Took(NamedTuple):
    """What input took in a lease, or in some.

    Attributes:
      seconds: for which steps waited for it.
      bytes: that were read.
      steps_ahead: whose examples were there before the steps before them were done.
      pieces: of examples that were asked for.
    """

    seconds: Any
    bytes: Any
    steps_ahead: Any
    pieces: Any


class WorkersFeed(Feed):
    """Arrays that each worker has whole; a step's batch is a gather by index, computed by the worker from the step.

    They travel once to each worker, and again to one that comes back.

    Attributes:
      stream: the stream whose position a checkpoint keeps; None where the step says all.
    """

    random_access = True
    stream: DatasetFeed | None = None

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, arrays, order: Order):
        self.order = order
        self._coordinator = coordinator
        self._arrays = arrays
        self._resident: Any = None

    def lease(self, step: int, limit: int) -> Run:
        """Returns what a closure of at most `limit` steps is given, which may be run again, and those steps."""
        if self._resident is None:
            self._resident = on_each_worker(self._coordinator, self._send, *self.operand_specs)
        return Run((self._resident,), step, step + limit)

    def count(self, took: Sequence[Took]) -> None:
        """Counts what workers say that input took, in the leases that have come back in a call."""

    @property
    def operand_specs(self):
        """Specs, on a worker, of what `next_operands` takes."""
        return (tf.nest.map_structure(_spec, self._arrays),)

    @property
    def lease_specs(self):
        """Specs, on a worker, of what `lease` returns."""
        return self.operand_specs

    def through(self, operands, first: tf.Tensor, stop: tf.Tensor, run, state: tuple) -> tuple:
        """Runs a lease's steps [first, stop), as many at once as there are examples at hand. In a closure's graph.

        Args:
          operands: of the lease.
          first: step.
          stop: step.
          run: runs steps: (operands as `next_operands` takes them, stop, state) -> (state, when it was done).
          state: what the steps carry.

        Returns:
          (the state after the last one; a `Took` as [4] float64).
        """
        return run(operands, stop, state)[0], tf.zeros([len(Took._fields)], tf.float64)

    def _send(self):
        """Sends the arrays to the worker whose devices are in scope, in the thread that serves it."""
        return tf.nest.map_structure(_sent, self._arrays)

    def reach(self, step: int, limit: int) -> int:
        return limit

    def take(self, step: int, limit: int) -> Run:
        """Returns the operands of steps for the coordinator itself, as the other feeds do."""
        with tf.device("CPU:0"):
            return Run((tf.nest.map_structure(host_arrays.as_tensor, self._arrays),), step, step + limit)

    def most_steps(self, operands) -> float:
        return math.inf

    def next_operands(self, operands, step: tf.Tensor):
        return (*operands, step)

    def batch(self, *operands):
        arrays, step = operands
        examples = self.order.examples(step)[0]
        return tf.nest.map_structure(lambda array: tf.gather(array, examples), arrays)


class _PiecesFeed(WorkersFeed):
    """Examples of some steps, one after the other, of which each step takes its own."""

    @property
    def _element_spec(self) -> Any:
        """Nest of what has the shape and dtype of an example's part."""
        raise NotImplementedError

    @property
    def operand_specs(self):
        def spec(part) -> tf.TensorSpec:
            return tf.TensorSpec([None, *part.shape], tf.string if part.dtype == object else part.dtype)

        return tf.nest.map_structure(spec, self._element_spec), tf.TensorSpec([], tf.int64)

    def next_operands(self, operands, step: tf.Tensor):
        piece, first = operands
        start = self._examples_before(first)
        offset, end = self._examples_before(step) - start, self._examples_before(step + 1) - start
        size = None if self.order.remainder else self.order.batch_size
        return (tf.nest.map_structure(lambda x: tf.ensure_shape(x[offset:end], [size, *x.shape[1:]]), piece),)

    def batch(self, *operands):
        return operands[0]

    def _examples_before(self, step: tf.Tensor) -> tf.Tensor:
        """Computes `Order.examples_before` in a graph."""
        order = self.order
        in_epoch = tf.minimum(step % order.steps_per_epoch * order.batch_size, order.num_examples)
        return step // order.steps_per_epoch * order.num_examples + in_epoch


class ReadByWorkersFeed(_PiecesFeed):
    """A source that each worker reads by itself: a lease's steps in pieces, the next one while steps of one run.

    Args:
      source: the coordinator's, as each worker has it.
      index: among its sources.
      order: of its examples, with blocks of one step.
      read_timeout_seconds: see `FeedOptions`.
    """

    def __init__(self, source: Source, index: int, order: Order, read_timeout_seconds: float = 0.0):
        self.order, self.source, self._index, self._timeout_seconds = order, source, index, read_timeout_seconds
        self._most_steps = max(1, _READ_BYTES // max(1, order.batch_size * example_bytes(source)))
        self._bytes_read, self._steps_ahead = 0, None
        self._read_here = tf.function(self._read, autograph=False)

    @property
    def bytes_read(self) -> int | None:
        return self._bytes_read

    @property
    def steps_ahead(self) -> float | None:
        """Of the leases that were counted last, the mean over their pieces."""
        return self._steps_ahead

    def count(self, took: Sequence[Took]) -> None:
        pieces = sum(each.pieces for each in took)
        self._bytes_read += int(sum(each.bytes for each in took))
        self._steps_ahead = sum(each.steps_ahead for each in took) / pieces if pieces else None

    def lease(self, step: int, limit: int) -> Run:
        return Run((), step, step + limit)

    @property
    def lease_specs(self):
        return ()

    @property
    def _element_spec(self) -> Any:
        return self.source.element_spec

    def through(self, operands, first: tf.Tensor, stop: tf.Tensor, run, state: tuple) -> tuple:
        steps = tf.clip_by_value((stop - first) // _PIECES, 1, self._most_steps)

        def end_of(first):
            epoch_end = (first // self.order.steps_per_epoch + 1) * self.order.steps_per_epoch
            return tf.minimum(tf.minimum(first + steps, epoch_end), stop)

        def read(first, end):
            with tf.device("/job:worker/device:CPU:0"):
                piece, size = self._read(first, end)
            # Taken here: in a function TensorFlow orders what has state and no variables, so that after the steps it
            # would be taken when these are done.
            return piece, size, timestamp_after(*tf.nest.flatten(piece))

        def nothing(piece):
            return piece, tf.zeros([], tf.int64), tf.zeros([], tf.float64)

        def one_piece(first, end, piece, took, state):
            next_end = end_of(end)
            # Nothing here depends on the steps, so TensorFlow does both side by side.
            next_piece, size, there = tf.cond(end < stop, lambda: read(end, next_end), lambda: nothing(piece))
            state, done = run((piece, first), end, state)
            return end, next_end, next_piece, took + _piece_took(done, there, size, next_end - end), state

        began, end = timestamp_after(first), end_of(first)
        piece, size, there = read(first, end)
        start = (first, end, piece, _piece_took(began, there, size, end - first), state)
        *_, took, state = tf.while_loop(lambda first, *_: first < stop, one_piece, start, parallel_iterations=1)
        return state, took

    def take(self, step: int, limit: int) -> Run:
        with tf.device("CPU:0"):
            first = tf.constant(step, tf.int64)
            return Run((self._read_here(first, first + 1)[0], first), step, step + 1)

    def _read(self, first: tf.Tensor, stop: tf.Tensor):
        """Returns (the examples of steps [first, stop), all of one epoch, one after the other; bytes read)."""
        indices, epoch = self.order.examples_of(first, stop)
        stored, size = sources.read(self.source, self._index, self.order, self._timeout_seconds, indices, first)
        seeds = example_seeds(self.order, tf.fill(tf.shape(indices), epoch), indices)
        examples = tf.nest.map_structure(
            lambda x, spec: tf.ensure_shape(x, [None, *spec.shape]),
            self.source.decode(stored, seeds),
            self.source.element_spec,
        )
        return examples, size


class SentFeed(_PiecesFeed):
    """A stream, which the coordinator reads, in order: each lease has the examples of its steps with it.

    So a lease that is run again has the same examples, only those of leases that are out are in memory, and the
    stream's position when no lease is out follows from the step.

    Args:
      stream: the coordinator's own feed of it, of one replica.
    """

    random_access = False

    def __init__(self, stream: DatasetFeed):
        self.order, self.stream = stream.order, stream

    @property
    def bytes_read(self) -> int | None:
        return self.stream.bytes_read

    def about(self) -> dict[str, Any]:
        return self.stream.about()

    def lease(self, step: int, limit: int) -> Run:
        batches: list[list[tf.Tensor]] = []
        first = self.stream.take(step, 1)  # which opens it, if need be; those after it do not

        def read() -> Run:
            run, size = first, 0
            with tf.device("CPU:0"):
                while True:
                    batches.append(self._batch_of(run))
                    size += sum(map(_bytes, batches[-1]))
                    if len(batches) == limit or size >= _READ_BYTES:
                        return self._piece(batches, step)
                    run = self.stream.take(step + len(batches), 1)

        return self.stream.awaited(read, lambda: len(batches))

    def take(self, step: int, limit: int) -> Run:
        return self.lease(step, limit)

    def look(self, step: int) -> Run:
        run = self.stream.look(step)

        def read() -> Run:
            with tf.device("CPU:0"):
                return self._piece([self._batch_of(run)], step)

        return self.stream.awaited(read, lambda: None)

    def close(self) -> None:
        self.stream.close()

    @property
    def _element_spec(self) -> Any:
        return self.stream.share.stream.element_spec

    def _batch_of(self, run: Run) -> list[tf.Tensor]:
        return tf.nest.flatten(self.stream.next_operands(run.operands, tf.constant(run.start)))

    def _piece(self, batches: list[list[tf.Tensor]], step: int) -> Run:
        whole = [tf.concat(parts, 0) for parts in zip(*batches, strict=True)]
        piece = tf.nest.pack_sequence_as(self._element_spec, whole)
        return Run((piece, tf.constant(step, tf.int64)), step, step + len(batches))


def sent(stream, processes, batch_size: int, seed: int | None, options, known=None) -> SentFeed:
    """Makes the feed of a stream.

    Args:
      stream: a `Stream` or a `tf.data.Dataset`.
      processes: the coordinator's strategy.
      batch_size: see `Order`.
      seed: see `Order`.
      options: `FeedOptions`.
      known: see `divide`.
    """
    watch = options.watch or unwatched
    timeout = options.read_timeout_seconds
    share = divide(stream, processes, known=known, watch=watch, timeout_seconds=timeout)
    order = share.order(batch_size, seed, drop_remainder=False)
    buffer = options.shuffle_buffer
    made = DatasetFeed(
        processes.distribution, share, order, shuffle_buffer=buffer, watch=watch, timeout_seconds=timeout
    )
    return SentFeed(made)


class LentWorkersFeed(LentFeed, WorkersFeed):
    """Data that a program hands to its run, read by the coordinator: a lease has the batches of its steps with it."""

    def __init__(self):
        LentFeed.__init__(self, 1, Mesh())

    def lease(self, step: int, limit: int) -> Run:
        run = self.take(step, limit)
        return Run((*run.operands, tf.constant(step, tf.int64)), step, step + run.stop)

    @property
    def operand_specs(self):
        def spec(part) -> tf.TensorSpec:
            return tf.TensorSpec([None, None, *part.shape], tf.string if part.dtype == object else part.dtype)

        return tf.nest.map_structure(spec, spec_of(self.split)), tf.TensorSpec([], tf.int64)

    def next_operands(self, operands, step: tf.Tensor):
        block, first = operands
        return (tf.nest.map_structure(lambda x: x[step - first], block),)

    def batch(self, *operands):
        return operands[0]


class RepeatedWorkersFeed(WorkersFeed):
    """The same arrays for every step, as `engine.data.feeds.RepeatedFeed`; each worker has them."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, arrays, batch_size: int):
        super().__init__(coordinator, arrays, Order(batch_size, batch_size, block_steps=1))

    def batch(self, *operands):
        return operands[0]


def _piece_took(since: tf.Tensor, there: tf.Tensor, size: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
    """Returns the `Took` of a piece for so many steps, 0 if there is none, [4] float64.

    Args:
      since: when the steps before it were done.
      there: when it was.
      size: its bytes.
      steps: that it is for.
    """
    steps = tf.cast(steps, tf.float64)
    waited = tf.maximum(there - since, 0.0)
    ahead = tf.where(there <= since, steps, 0.0)
    return tf.stack([waited, tf.cast(size, tf.float64), ahead, tf.minimum(steps, 1.0)])


def timestamp_after(*tensors: tf.Tensor) -> tf.Tensor:
    """Returns the time, in seconds, at which tensors are there on this worker."""
    with tf.device("/job:worker/device:CPU:0"), tf.control_dependencies(tensors):
        return tf.timestamp()


def _spec(array) -> tf.TensorSpec:
    return tf.TensorSpec(array.shape, tf.convert_to_tensor(array[:1] if array.ndim else array).dtype)


def _sent(array) -> tf.Tensor:
    """Sends an array piece by piece, so that neither process holds much more of it than the worker keeps."""
    if not array.ndim or array.nbytes <= _PIECE_BYTES:
        return tf.identity(array)
    rows, spec = max(1, int(len(array) * _PIECE_BYTES / array.nbytes)), _spec(array)
    with tf.device("CPU:0"):
        whole = tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype)
        for first in range(0, len(array), rows):
            piece = tf.constant(array[first : first + rows])
            # A variable would be copied whole where it is read after an assignment of a part.
            tf.raw_ops.InplaceUpdate(x=whole, i=tf.range(first, first + len(piece)), v=piece)
            wait_for_operations()  # or all pieces would be on their way at once
    return tf.raw_ops.Identity(input=whole)  # on the device that computes


def _bytes(batch: tf.Tensor) -> int:
    if batch.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(batch)))
    return batch.shape.num_elements() * batch.dtype.size
