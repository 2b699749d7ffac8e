"""One update from several micro-batches: gradients of sums add up, so N small batches equal one big one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def accumulate(compute: Callable, batch, steps: int, parts: int = 1):
    """Runs `compute` on up to `steps` micro-batches of a batch, one after the other, and adds up what it returns.

    Replica code. The batch is cut along its first axis into micro-batches that differ by one example at most; a batch
    of fewer examples than `steps` makes so many. Memory holds one's activations and one set of sums.

    Args:
      compute: batch -> (gradients, metrics): gradients of a *sum* of losses, tensors, `tf.IndexedSlices` or None;
        metrics are nests of tensors that add up, such as (total, count) pairs.
      batch: nest of tensors whose first axis is examples.
      steps: number of micro-batches; 1 is a plain call.
      parts: that each micro-batch is cut into, see `side_by_side`.

    Returns:
      (gradients, metrics) of the whole batch. Slices stay slices: a row is there once for each part that has it.
    """
    if steps == parts == 1:
        return compute(batch)

    def listed(batch):
        gradients, metrics = compute(batch)
        return list(gradients), metrics

    def sums(batch):
        return side_by_side(listed, batch, parts)

    size = _size(batch)
    if steps == 1:
        return sums(batch)
    if isinstance(size, int) and size % min(steps, size or 1):
        # XLA takes no lengths that differ within a loop, so there is none.
        return side_by_side(sums, batch, steps)
    micro_batches = max(1, min(steps, size)) if isinstance(size, int) else tf.maximum(1, tf.minimum(steps, size))

    def micro_batch_sums(i):
        return sums(_cut(batch, size, i, micro_batches))

    first_sums = micro_batch_sums(0)
    return _restored(first_sums, _looped(micro_batch_sums, _present(first_sums), micro_batches))


def side_by_side(compute: Callable, batch, parts: int):
    """Runs `compute` on up to `parts` parts of a batch, none of which waits for another, and adds up what it returns.

    Replica code. Where each part has a thread (`engine.strategies.devices.a_thread_each`), that is less work than to
    share each operation of the whole batch among threads, which then wait for each other at its end.

    Args:
      compute: batch -> nest of tensors that add up, `tf.IndexedSlices` or None.
      batch: nest of tensors whose first axis is examples.
      parts: that differ by one example at most. Of fewer examples there are as many parts, or where it is not known
        when they are traced how many there are, one: kernels do not bear empty batches.
    """
    size = _size(batch)
    if isinstance(size, int):
        parts = max(1, min(parts, size))
    if parts == 1:
        return compute(batch)
    traced: list[Any] = []

    def sums():
        traced[:] = [compute(_cut(batch, size, i, parts)) for i in range(parts)]
        return [_sum(column) for column in zip(*map(_present, traced), strict=True)]

    flat = sums() if isinstance(size, int) else tf.cond(size < parts, lambda: _present(compute(batch)), sums)
    return _restored(traced[0], flat)


def _looped(part_sums: Callable, firsts: list, parts) -> list:
    """Sums the parts' tensors, in the order of `firsts`, those of the first part; slices are joined."""

    def strung(x: tf.IndexedSlices) -> list[tf.TensorArray]:
        return [
            tf.TensorArray(y.dtype, size=parts, infer_shape=False, element_shape=[None, *y.shape[1:]]).write(0, y)
            for y in (x.values, x.indices)
        ]

    def plus(i, kept, x):
        if isinstance(x, tf.IndexedSlices):
            return [array.write(i, y) for array, y in zip(kept, (x.values, x.indices), strict=True)]
        return kept + x

    _, kept = tf.while_loop(
        lambda i, _: i < parts,
        lambda i, kept: (i + 1, [plus(i, k, x) for k, x in zip(kept, _present(part_sums(i)), strict=True)]),
        (1, [strung(x) if isinstance(x, tf.IndexedSlices) else x for x in firsts]),
        parallel_iterations=1,
    )
    return [
        tf.IndexedSlices(*(array.concat() for array in k), x.dense_shape) if isinstance(x, tf.IndexedSlices) else k
        for k, x in zip(kept, firsts, strict=True)
    ]


def _size(batch):
    """Returns how many examples there are: an int if that is known when it is traced, else a scalar int32."""
    first = tf.nest.flatten(batch)[0]
    return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]


def _cut(batch, size, i, parts):
    """Returns the batch's part `i` of `parts`, of a static shape where all are of one."""
    start, end = i * size // parts, (i + 1) * size // parts
    even = isinstance(size, int) and isinstance(parts, int) and size % parts == 0
    length = size // parts if even else end - start

    def rows(x):
        rest = x.shape.rank - 1
        part = tf.slice(x, [start] + [0] * rest, [length] + [-1] * rest)
        part.set_shape([None, *x.shape[1:]])  # which a slice of a length that is not known yet has lost
        return part

    return tf.nest.map_structure(rows, batch)


def _sum(parts: Sequence):
    if isinstance(parts[0], tf.IndexedSlices):
        values, indices = (tf.concat([getattr(x, name) for x in parts], 0) for name in ("values", "indices"))
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    return functools.reduce(operator.add, parts)


def _present(sums) -> list:
    """Returns the tensors of a nest, without its Nones (gradients of variables that the loss does not reach)."""
    return [x for x in tf.nest.flatten(sums) if x is not None]


def _restored(template, flat: list):
    rest = iter(flat)
    return tf.nest.map_structure(lambda x: None if x is None else next(rest), template)
