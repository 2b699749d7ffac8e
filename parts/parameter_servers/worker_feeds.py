"""How examples get to workers with parameter servers: arrays on each, sources that each reads, streams.

Coordinator code, except `through`, `next_operands`, `batch` and `replica_indices`, which are graph code of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine.data.feeds.combined import CombinedFeed
from ...engine.data.feeds.external_feed import ExternalFeed
from ...engine.data.feeds.feed import CallInput, Feed, FeedStats
from ...engine.data.feeds.resident_feed import ResidentFeed
from ...engine.data.feeds.streamed_feed import StreamedFeed
from ...engine.data.lengths import Padding
from ...engine.data.order import Order
from ...engine.data.reader import example_bytes, gather
from ...engine.data.source import Source, unknown_dimensions
from ...engine.internals.tensorflow import on_each_worker, wait_for_operations
from ...engine.mesh.layout import Mesh
from . import sources

_PIECE_BYTES = 16 << 20  # of an array at once, per worker: a message is copied about three times
_READ_BYTES = 8 << 20  # examples read at once, at most; for sent ones, per lease
_PIECES = 8  # per lease: its first steps wait for the first piece
_NUMBER = tf.TensorSpec([], tf.int64)


class InputStats(NamedTuple):
    """Statistics of the input of one lease, or of several.

    Attributes:
      seconds: time for which steps waited for examples.
      steps_ahead: steps whose examples were read before the steps before them were done.
    """

    seconds: Any
    bytes: Any
    steps_ahead: Any
    pieces: Any


class LeaseFeed(Feed):
    """A feed of workers with parameter servers: a call is a lease, run by one worker, perhaps again by another.

    Attributes:
      read_by_workers: the source that workers read themselves, if any.
    """

    read_by_workers: Source | None = None

    @property
    def operand_specs(self) -> Any:
        """Specs, on a worker, of the operands of `next_operands`."""
        raise NotImplementedError(f"{type(self).__name__} is not for workers with parameter servers")

    @property
    def lease_specs(self) -> Any:
        """Specs, on a worker, of the operands that `call_input` returns."""
        return self.operand_specs

    def through(self, operands: Any, first: tf.Tensor, stop: tf.Tensor, compute: Callable, state: tuple) -> tuple:
        """Runs a lease's steps [first, stop), as many at once as have examples ready. In a lease's graph.

        Args:
          stop: step after the last one to run.
          compute: runs steps: (operands as `next_operands` takes them, stop, state) -> (state, when it was done).
          state: state that steps pass on to the next ones.

        Returns:
          (the state after the last one; `InputStats` as [4] float64).
        """
        return compute(operands, stop, state)[0], tf.zeros([len(InputStats._fields)], tf.float64)

    def count(self, stats: Sequence[InputStats]) -> None:
        """Adds up the input statistics of the leases that were completed in a call."""
        return


class Workers:
    """A coordinator's workers instead of `Devices`: each has all arrays, and computes its examples' indices itself.

    Arrays are sent once to each worker, and again to a returning one.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator):
        self._coordinator = coordinator

    def put_arrays(self, arrays: Any) -> Any:
        """Sends arrays to each worker, in its own thread."""
        return on_each_worker(
            self._coordinator, lambda: tf.nest.map_structure(_send_in_pieces, arrays), self.specs(arrays)
        )

    def specs(self, arrays: Any) -> Any:
        """Returns the specs of a worker's arrays."""
        return tf.nest.map_structure(_array_spec, arrays)

    def indices(self, order: Order) -> StepIndices:
        return StepIndices(order)


class StepIndices:
    """The indices of a step's examples, computed by the worker from the step."""

    def __init__(self, order: Order):
        self._order = order

    def max_steps_per_call(self, step: int, limit: int) -> int:
        return limit

    def call_input(self, step: int, limit: int) -> tuple[Any, int, int]:
        return (), step, step + limit

    def most_steps(self, indices: Any) -> float:
        return math.inf

    def replica_indices(self, indices: Any, step: tf.Tensor) -> tf.Tensor:
        order = self._order
        size = None if order.remainder else order.batch_size
        return tf.ensure_shape(order.examples_between(step, step + 1)[0], [size])

    def close(self) -> None:
        return


class ResidentOnWorkers(LeaseFeed, ResidentFeed):
    """Arrays cached on each worker."""

    @property
    def operand_specs(self) -> Any:
        return self._devices.specs(self._source.as_arrays()), ()


class _LeaseExamples(LeaseFeed):
    """A batch of consecutive steps' examples, sliced per step; of one step if examples differ in length."""

    _element_spec: Any

    @property
    def operand_specs(self) -> Any:
        return _batch_specs(self._element_spec), _NUMBER

    def next_operands(self, operands: Any, step: tf.Tensor) -> tuple:
        piece, first = operands
        if unknown_dimensions(self._element_spec):
            return (piece,)
        before = self.order.examples_before
        start, end = before(step) - before(first), before(step + 1) - before(first)
        size = None if self.order.remainder else self.order.batch_size
        return (tf.nest.map_structure(lambda x: tf.ensure_shape(x[start:end], [size, *x.shape[1:]]), piece),)

    def batch(self, *operands: Any) -> Any:
        return operands[0]


class ReadByWorkersFeed(_LeaseExamples):
    """A source that each worker reads itself: a lease's steps in pieces, the next while steps of one run.

    Args:
      source: the coordinator's source, the same as each worker's.
      index: index of the source among the coordinator's.
      order: order of the source's examples, with blocks of one step.
      padding: padding of examples of varying length; None if they have one shape.
    """

    def __init__(
        self,
        source: Source,
        index: int,
        order: Order,
        read_timeout_seconds: float = 0.0,
        padding: Padding | None = None,
    ):
        self.order, self.read_by_workers, self._element_spec = order, source, source.element_spec
        self._source, self._index, self._timeout_seconds, self._padding = source, index, read_timeout_seconds, padding
        self._most_steps = 1 if padding else max(1, _READ_BYTES // max(1, order.batch_size * example_bytes(source)))
        self._bytes_read, self._steps_ahead = 0, None

    def stats(self) -> FeedStats:
        return FeedStats(self._bytes_read, self._steps_ahead)

    def count(self, stats: Sequence[InputStats]) -> None:
        pieces = sum(lease.pieces for lease in stats)
        self._bytes_read += int(sum(lease.bytes for lease in stats))
        self._steps_ahead = sum(lease.steps_ahead for lease in stats) / pieces if pieces else None

    def call_input(self, step: int, limit: int) -> CallInput:
        return CallInput((), step, step + limit)

    @property
    def lease_specs(self) -> Any:
        return ()

    def through(self, operands: Any, first: tf.Tensor, stop: tf.Tensor, compute: Callable, state: tuple) -> tuple:
        steps = tf.clip_by_value((stop - first) // _PIECES, 1, self._most_steps)

        def piece_end(first: tf.Tensor) -> tf.Tensor:
            return tf.minimum(tf.minimum(first + steps, self.order.epoch_from(first + 1)), stop)

        def read(first: tf.Tensor, end: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
            with tf.device("/job:worker/device:CPU:0"):
                piece, size = self._read(first, end)
            # The time is taken here: in a function TensorFlow orders stateful ops without variables, so after the steps
            # it would be taken at their end.
            return piece, size, timestamp_after(*tf.nest.flatten(piece))

        def no_examples(piece: Any) -> tuple[Any, tf.Tensor, tf.Tensor]:
            return piece, tf.zeros([], tf.int64), tf.zeros([], tf.float64)

        def one_piece(first: tf.Tensor, end: tf.Tensor, piece: Any, stats: tf.Tensor, state: tuple) -> tuple:
            next_end = piece_end(end)
            # Nothing here depends on the steps, so TensorFlow overlaps both.
            next_piece, size, there = tf.cond(end < stop, lambda: read(end, next_end), lambda: no_examples(piece))
            state, done = compute((piece, first), end, state)
            return end, next_end, next_piece, stats + _piece_stats(done, there, size, next_end - end), state

        began, end = timestamp_after(first), piece_end(first)
        # If only a lease's result was lost, it is run again without steps; the shuffle still needs one index.
        piece, size, there = read(first, tf.maximum(end, first + 1))
        start = (first, end, piece, _piece_stats(began, there, size, end - first), state)
        *_, stats, state = tf.while_loop(lambda first, *_: first < stop, one_piece, start, parallel_iterations=1)
        return state, stats

    def _read(self, first: tf.Tensor, stop: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns (the examples of steps [first, stop), all of one epoch, concatenated; bytes read)."""
        indices, epoch = self.order.examples_between(first, stop)
        sizes = []

        def stored(indices: Any) -> Any:
            piece, size = sources.read(self._source, self._index, self.order, self._timeout_seconds, indices, first)
            sizes.append(size)
            return piece

        examples = gather(self._source, self.order, indices, tf.fill(tf.shape(indices), epoch), stored)
        examples = self._padding.pad(indices, examples) if self._padding else examples
        return examples, tf.add_n([tf.zeros([], tf.int64), *sizes])


class SentFeed(_LeaseExamples, StreamedFeed):
    """A stream, which the coordinator reads in order: each lease includes its steps' examples.

    So a repeated lease has the same examples, only those of leases in progress are in memory, and the stream's position
    without a lease in progress follows from the step.
    """

    reads_in_loop = False

    @property
    def _element_spec(self) -> Any:  # type: ignore[override]
        return self.part.stream.element_spec

    def call_input(self, step: int, limit: int) -> CallInput:
        batches: list[list[tf.Tensor]] = []
        limit = 1 if unknown_dimensions(self._element_spec) else limit
        first = super().call_input(step, 1)  # opens the stream, if needed; later ones don't

        def read() -> CallInput:
            call_input, size = first, 0
            with tf.device("CPU:0"):
                while len(batches) < limit and size < _READ_BYTES:
                    if batches:
                        call_input = super(SentFeed, self).call_input(step + len(batches), 1)
                    (iterator,) = call_input.operands
                    batches.append(tf.nest.flatten(next(iterator)))
                    size += sum(map(_bytes, batches[-1]))
                whole = [tf.concat(pieces, 0) for pieces in zip(*batches, strict=True)]
                piece = tf.nest.pack_sequence_as(self._element_spec, whole)
                return CallInput((piece, tf.constant(step, tf.int64)), step, step + len(batches))

        return self.run_with_timeout(read, lambda: len(batches))


class ExternalWorkersFeed(LeaseFeed, ExternalFeed):
    """External data, read by the coordinator: a lease includes its steps' batches."""

    def __init__(self) -> None:
        super().__init__(1, Mesh())

    def call_input(self, step: int, limit: int) -> CallInput:
        call_input = super().call_input(step, limit)
        return CallInput((*call_input.operands, tf.constant(step, tf.int64)), step, step + call_input.stop)

    @property
    def operand_specs(self) -> Any:
        return _batch_specs(self.split.element_spec), _NUMBER, _NUMBER

    def next_operands(self, operands: Any, step: tf.Tensor) -> tuple:
        *examples, first = operands
        return super().next_operands(examples, step - first)

    def batch(self, *operands: Any) -> Any:
        return operands[0]


class CombinedOnWorkers(LeaseFeed, CombinedFeed):
    """Feeds of several inputs, whose leases begin at the same steps."""

    @property
    def operand_specs(self) -> Any:
        feeds: Sequence[Any] = [*self.feeds.values()]
        return [(feed.operand_specs, tf.TensorSpec([], tf.int32)) for feed in feeds]


def _piece_stats(since: tf.Tensor, there: tf.Tensor, size: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
    """Returns the `InputStats` of a piece as [4] float64; all are 0 for a piece of no steps.

    Args:
      since: time at which the steps before the piece were done.
      there: time at which the piece had been read.
      size: number of bytes read for the piece.
    """
    steps = tf.cast(steps, tf.float64)
    waited = tf.maximum(there - since, 0.0)
    ahead = tf.where(there <= since, steps, 0.0)
    return tf.stack([waited, tf.cast(size, tf.float64), ahead, tf.minimum(steps, 1.0)])


def timestamp_after(*tensors: tf.Tensor) -> tf.Tensor:
    """Returns the time, in seconds, at which tensors are there on this worker."""
    with tf.device("/job:worker/device:CPU:0"), tf.control_dependencies(tensors):
        return tf.timestamp()


def _batch_specs(element_spec: Any) -> Any:
    """Returns the specs of some examples in one piece."""
    return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape], tf.as_dtype(x.dtype)), element_spec)


def _array_spec(array: Any) -> tf.TensorSpec:
    return tf.TensorSpec(array.shape, tf.convert_to_tensor(array[:1] if array.ndim else array).dtype)


def _send_in_pieces(array: Any) -> tf.Tensor:
    """Sends an array piece by piece, so that neither process holds much more of it than the worker keeps."""
    if not array.ndim or array.nbytes <= _PIECE_BYTES:
        return tf.identity(array)
    size, spec = max(1, int(len(array) * _PIECE_BYTES / array.nbytes)), _array_spec(array)
    with tf.device("CPU:0"):
        whole = tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype)
        for first in range(0, len(array), size):
            piece = tf.constant(array[first : first + size])
            # A read would copy the whole variable after an assignment to a slice of it.
            tf.raw_ops.InplaceUpdate(x=whole, i=tf.range(first, first + len(piece)), v=piece)
            wait_for_operations()  # or all pieces would be on their way at once
    return tf.raw_ops.Identity(input=whole)  # on the device that computes


def _bytes(batch: tf.Tensor) -> int:
    if batch.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(batch)))
    return batch.shape.num_elements() * batch.dtype.size
