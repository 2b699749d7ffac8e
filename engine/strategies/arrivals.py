"""When a call's steps have their data: counted in the compiled loop, read on the host."""

from __future__ import annotations

import tensorflow as tf

from ..internals import tensorflow


class Arrivals:
    """Counts, in the compiled loop, the steps whose data has arrived, and the time spent waiting for it.

    Distinguishes, within a call, a worker that waits for its data from one that waits for its peers. The data must be
    endless: if a distributed dataset can end, `next` itself communicates with all workers.
    """

    def __init__(self):
        with tf.device("/device:CPU:0"):
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="arrivals")
            self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="waited_for_data")
            self._reported = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="waited_for_data_and_reported")

    def mark(self, batch, requested_at: tf.Tensor) -> None:
        """Counts one step when its data has arrived. In a `tf.function`, once per step and worker.

        Args:
          batch: nest of tensors, the data.
          requested_at: `timestamp` of the request.
        """
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            self._count.assign_add(1, read_value=False)
            self._waited.assign_add(tensorflow.seconds_since(requested_at), read_value=False)

    def add(self, seconds: float) -> None:
        """Adds the host's wait before it called the loop."""
        self._waited.assign_add(seconds, read_value=False)

    def seconds(self) -> float:
        """Returns the seconds spent waiting for data so far."""
        return float(self._waited.numpy())

    def take_seconds(self) -> tf.Tensor:
        """Returns the seconds spent waiting for data since its last call, scalar float64. In the loop."""
        waited = self._waited.read_value()
        seconds = waited - self._reported.read_value()
        with tf.control_dependencies([seconds]):
            self._reported.assign(waited, read_value=False)
        return seconds

    def count(self) -> int:
        """Returns the number of steps so far; from any thread, also while the loop runs."""
        return int(self._count.numpy())
