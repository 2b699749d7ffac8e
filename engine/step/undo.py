"""Undoes what a step wrote into some rows of variables, if the step is skipped. Replica code."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from ..internals.tensorflow import TemporaryVariable, temporary_variable


class UndoLog:
    """The rows of variables before a step's writes.

    It is in temporary variables, since the writes may be in conditions and loops, and costs what they do.

    Args:
      variables: this replica's variables, in a host's memory.
      step: the step of the `StepContext`.
    """

    def __init__(self, variables: Iterable[tf.Variable], step: tf.Tensor):
        # No rows, which TensorFlow's optimization of the graph must not know: it takes the first shape for all.
        none = tf.reshape(tf.where([step < 0]), [-1])
        self._rows: dict[int, tuple[tf.Variable, TemporaryVariable, TemporaryVariable]] = {}
        for variable in variables:
            values = temporary_variable(_gather(variable, none), [None, *variable.shape[1:]])
            self._rows[id(variable)] = variable, temporary_variable(none, [None]), values

    def add(self, variable: tf.Variable, indices: tf.Tensor) -> None:
        """Notes rows that are written next, by their indices [n], int64; does nothing for other variables."""
        if id(variable) not in self._rows:
            return
        _, *notes = self._rows[id(variable)]
        for note, more in zip(notes, (indices, _gather(variable, indices)), strict=True):
            value = tf.concat([_read(note), more], 0)
            tf.raw_ops.AssignVariableOp(resource=note.handle, value=value)

    def undo(self) -> None:
        """Restores the rows."""
        for variable, *notes in self._rows.values():
            indices, values = map(_read, notes)
            unique, positions = tf.unique(indices)
            first = tf.math.unsorted_segment_min(tf.range(tf.size(indices)), positions, tf.size(unique))
            tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=unique, updates=tf.gather(values, first))


def _gather(variable: tf.Variable, indices: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=indices, dtype=variable.dtype)


def _read(variable: TemporaryVariable) -> tf.Tensor:
    return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype), variable.shape)
