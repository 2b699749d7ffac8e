"""What workers around parameter servers train on: arrays that each of them has. Coordinator code, but for `batch`."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from crankshaft.engine.data import host_arrays
from crankshaft.engine.data.base import Feed, Run
from crankshaft.engine.data.order import Order
from crankshaft.engine.internals.tensorflow import on_each_worker, wait_for_operations

_PIECE_BYTES = 16 << 20  # of an array at once, for each worker: a message is copied some three times on its way


class WorkersFeed(Feed):
    """Arrays that each worker has whole; a step's batch is a gather by index, computed by the worker from the step.

    They travel once to each worker, and again to one that comes back.
    """

    random_access = True

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, arrays, order: Order):
        self.order = order
        self._coordinator = coordinator
        self._arrays = arrays
        self._resident: Any = None

    @property
    def operands(self):
        if self._resident is None:
            self._resident = on_each_worker(self._coordinator, self._send, *self.operand_specs)
        return (self._resident,)

    @property
    def operand_specs(self):
        """What `operands` look like to a worker."""
        return (tf.nest.map_structure(_spec, self._arrays),)

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

    def batch(self, arrays, step: tf.Tensor):
        examples = self.order.examples(step)[0]
        return tf.nest.map_structure(lambda array: tf.gather(array, examples), arrays)


class RepeatedWorkersFeed(WorkersFeed):
    """The same arrays for every step, as `engine.data.feeds.RepeatedFeed`; each worker has them."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, arrays, batch_size: int):
        super().__init__(coordinator, arrays, Order(batch_size, batch_size, block_steps=1))

    def batch(self, arrays, step: tf.Tensor):
        return arrays


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
