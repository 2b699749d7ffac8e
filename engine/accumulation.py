"""One update from several micro-batches: gradients of sums add up, so N small batches equal one big one."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def accumulate(compute: Callable, batch, steps: int):
    """Runs `compute` on up to `steps` micro-batches of a batch, one after the other, and adds up what it returns.

    Replica code. The batch is cut along its first axis into parts that differ by one example at most; a batch of
    fewer examples than `steps` makes so many parts. Memory holds one part's activations and one set of sums.

    Args:
      compute: batch -> (gradients, metrics): gradients of a *sum* of losses, where `tf.IndexedSlices` are made dense;
        metrics are nests of tensors that add up, such as (total, count) pairs.
      batch: nest of tensors whose first axis is examples.
      steps: number of micro-batches; 1 is a plain call.

    Returns:
      (gradients, metrics) of the whole batch.
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
        return [None if g is None else tf.convert_to_tensor(g) for g in gradients], metrics

    sums = part_sums(0)
    if isinstance(size, int) and not even:  # XLA takes no lengths that differ within a loop, so it is unrolled
        for i in range(1, parts):
            sums = _add(sums, part_sums(i))
        return sums
    template = sums
    _, flat = tf.while_loop(
        lambda i, _: i < parts,
        lambda i, flat: (i + 1, [a + b for a, b in zip(flat, _present(part_sums(i)), strict=True)]),
        (1, _present(sums)),
        parallel_iterations=1,
    )
    return _restored(template, flat)


def _rows(x: tf.Tensor, start, length) -> tf.Tensor:
    rank = x.shape.rank
    return tf.slice(x, [start] + [0] * (rank - 1), [length] + [-1] * (rank - 1))


def _add(a, b):
    return _restored(a, [x + y for x, y in zip(_present(a), _present(b), strict=True)])


def _present(sums) -> list[tf.Tensor]:
    """The tensors of a nest, without its Nones (gradients of variables that the loss does not reach)."""
    return [x for x in tf.nest.flatten(sums) if x is not None]


def _restored(template, flat: list[tf.Tensor]):
    flat = iter(flat)
    return tf.nest.map_structure(lambda x: None if x is None else next(flat), template)
