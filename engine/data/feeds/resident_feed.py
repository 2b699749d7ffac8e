"""The feed of arrays that are cached on the devices: a step gathers its batch by index, in the compiled loop."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..arrays import ArraySource, Mapped
from ..order import Order
from .feed import CallInput, Feed


class ResidentFeed(Feed):
    """Arrays cached on every device; a step gathers its batch by index, in the compiled loop.

    `devices` are `Devices`, or workers with parameter servers, which keep the arrays.
    """

    compilable = True

    def __init__(self, devices, source: ArraySource, order: Order):
        self.order, self._devices, self._source = order, devices, source
        self._arrays: Any = None
        self._indices = devices.indices(order)

    def max_steps_per_call(self, step: int, limit: int) -> int:
        return self._indices.max_steps_per_call(step, limit)

    def call_input(self, step: int, limit: int) -> CallInput:
        # Not in the constructor: a run that only predicts has a training feed, too, and would fill the device's memory.
        if self._arrays is None:
            self._arrays = self._devices.put_arrays(self._source.as_arrays())
        indices, start, stop = self._indices.call_input(step, limit)
        return CallInput((self._arrays, indices), start, stop)

    @property
    def form(self) -> Any:
        in_files = any(isinstance(array, Mapped) for array in tf.nest.flatten(self._source.as_arrays()))
        # A program that reads by a function holds that function, and so its files: another feed can't take it over.
        plain = type(self._source) is ArraySource and not in_files  # others are read by functions in the program
        return (self._source.element_spec, self.order.batch_size) if plain else None

    def traced(self, operands) -> Any:
        if not all(map(tf.is_tensor, tf.nest.flatten(operands))):  # of several replicas, or in files
            return operands
        # One program for any number of examples; an epoch's smaller last batch has its own, unless it takes any size.
        arrays, indices = operands
        steps, batch = indices.shape
        any_size = self.any_size and self.order.whole_steps and self.order.remainder
        anys = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), arrays)
        return anys, tf.TensorSpec([None, None] if any_size else [1 if steps == 1 else None, batch], indices.dtype)

    def most_steps(self, operands) -> float:
        return self._indices.most_steps(operands[1])

    def batch(self, arrays, indices, offset: tf.Tensor):
        return self._source.gather_from(arrays, self._indices.replica_indices(indices, offset))

    def close(self) -> None:
        self._indices.close()
