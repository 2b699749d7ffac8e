"""One update from several micro-batches: gradients of sums add up, so N small batches equal one big one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import tensorflow as tf


def accumulate(compute: Callable, batch, steps: int):
    """Runs `compute` on up to `steps` micro-batches of a batch, one after the other, and adds up what it returns.

    Replica code. The batch is cut along its first axis into parts that differ by one example at most; a batch of
    fewer examples than `steps` makes so many parts. Memory holds one part's activations and one set of sums.

    Args:
      compute: batch -> (gradients, metrics): gradients of a *sum* of losses, tensors, `tf.IndexedSlices` or None;
        metrics are nests of tensors that add up, such as (total, count) pairs.
      batch: nest of tensors whose first axis is examples.
      steps: number of micro-batches; 1 is a plain call.

    Returns:
      (gradients, metrics) of the whole batch. Slices stay slices: a row is there once for each part that has it.
    """
    if steps == 1:
        return compute(batch)
    first = tf.nest.flatten(batch)[0]
    size = first.shape[0]
    if size is None:
        size = tf.shape(first)[0]
        parts = tf.maximum(1, tf.minimum(steps, size))
    else:
        parts = max(1, min(steps, size))
    even = isinstance(size, int) and size % parts == 0

    def part_sums(i):
        start, end = i * size // parts, (i + 1) * size // parts
        length = size // parts if even else end - start
        gradients, metrics = compute(tf.nest.map_structure(lambda x: _rows(x, start, length), batch))
        return list(gradients), metrics

    first_sums = part_sums(0)
    if isinstance(size, int) and not even:  # XLA takes no lengths that differ within a loop, so it is unrolled
        added = [_present(first_sums), *(_present(part_sums(i)) for i in range(1, parts))]
        return _restored(first_sums, [_sum(column) for column in zip(*added, strict=True)])
    return _restored(first_sums, _looped(part_sums, _present(first_sums), parts))


def _looped(part_sums: Callable, firsts: list, parts) -> list:
    """The sums of the parts' tensors, in the order of `firsts`, those of the first part; slices are strung together."""

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


def _rows(x: tf.Tensor, start, length) -> tf.Tensor:
    rank = x.shape.rank
    return tf.slice(x, [start] + [0] * (rank - 1), [length] + [-1] * (rank - 1))


def _sum(parts: Sequence):
    if isinstance(parts[0], tf.IndexedSlices):
        values, indices = (tf.concat([getattr(x, name) for x in parts], 0) for name in ("values", "indices"))
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    return functools.reduce(operator.add, parts)


def _present(sums) -> list:
    """The tensors of a nest, without its Nones (gradients of variables that the loss does not reach)."""
    return [x for x in tf.nest.flatten(sums) if x is not None]


def _restored(template, flat: list):
    flat = iter(flat)
    return tf.nest.map_structure(lambda x: None if x is None else next(flat), template)
