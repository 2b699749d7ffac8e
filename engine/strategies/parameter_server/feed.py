"""What workers around parameter servers train on: arrays that each of them has. Coordinator code, but for `batch`."""

from __future__ import annotations

import tensorflow as tf

from crankshaft.engine.data.feeds import Run
from crankshaft.engine.data.order import Order

_PIECE_BYTES = 256 << 20  # arrays travel to workers in pieces: a message of 2 GiB does not


class WorkersFeed:
    """Arrays that each worker has whole; a step's batch is a gather by index, computed by the worker from the step.

    They travel once to each worker, and again to one that comes back.
    """

    random_access = True

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, arrays, order: Order):
        self.order = order
        self._coordinator = coordinator
        self._arrays = arrays
        self._resident = None

    @property
    def operands(self):
        if self._resident is None:
            with tf.device("CPU:0"):
                pieces = tf.nest.map_structure(_Pieces, self._arrays)
            whole = tf.function(lambda: tf.nest.map_structure(_Pieces.whole, pieces), autograph=False)
            # The one way to keep a value on each worker that is made again where a worker comes back; datasets, which
            # have a public name for it, would hold the arrays in their graph, and take none of 2 GiB.
            self._resident = self._coordinator._create_per_worker_resources(whole)
        return (self._resident,)

    def reach(self, step: int, limit: int) -> int:
        return limit

    def take(self, step: int, limit: int) -> Run:
        """The operands of steps for the coordinator itself, as the other feeds have them."""
        with tf.device("CPU:0"):
            return Run((tf.nest.map_structure(tf.convert_to_tensor, self._arrays),), step, step + limit)

    def next_operands(self, operands, step: tf.Tensor):
        return (*operands, step)

    def batch(self, arrays, step: tf.Tensor):
        examples = self.order.examples(step)[0]
        return tf.nest.map_structure(lambda array: tf.gather(array, examples), arrays)


class RepeatedWorkersFeed(WorkersFeed):
    """The same arrays for every step, as `engine.data.feeds.RepeatedFeed`; each worker has them."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, arrays, batch_size: int):
        super().__init__(coordinator, arrays, Order(batch_size, batch_size, block_steps=1))

    def batch(self, arrays, step: tf.Tensor):
        return arrays


class _Pieces:
    """An array in parts, of which a message holds one."""

    def __init__(self, array):
        if not array.ndim:
            self._parts = [tf.constant(array)]
            return
        rows = max(1, int(len(array) * _PIECE_BYTES / max(1, array.nbytes)))
        self._parts = [tf.constant(array[first : first + rows]) for first in range(0, len(array), rows)]

    def whole(self) -> tf.Tensor:
        return tf.concat(self._parts, 0) if len(self._parts) > 1 else tf.identity(self._parts[0])
