"""Counts ids and labels that are out of range where kernels do not raise for them: a step's metrics have them.

On CPUs TensorFlow's kernels raise, and name one. XLA takes another row in their place, GPUs zeros. Replica code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from ..metrics.means import Outside, Pair
from .context import step_context

# The ops that take such numbers, and what they call them.
_OPS = {"GatherV2": "ids", "ResourceGather": "ids", "SparseSoftmaxCrossEntropyWithLogits": "labels"}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, Pair]]:
    """Yields a dictionary that has, after the context, the counts of what is traced within: metrics of a step."""
    found: dict[str, Pair] = {}
    context, graph = step_context(), tf.compat.v1.get_default_graph()
    noted, first = len(context.outside), len(graph.get_operations())
    yield found
    pairs = [(name, pair) for name, pair in context.outside[noted:] if pair.total.graph is graph]
    if context.counts_ids:
        pairs += _of_operations(graph.get_operations()[first:])
    for name, pair in pairs:
        found[name] = Outside(*(a + b for a, b in zip(found[name], pair, strict=True))) if name in found else pair


def note_ids(ids: tf.Tensor, size: int) -> None:
    """Counts ids that a table of so many rows does not have, for code that looks them up without a kernel's check."""
    step_context().outside.append(_outside("ids", ids, size))


def note_labels(labels: tf.Tensor, classes: int) -> None:
    """Counts labels beyond the last class, for losses that take no notice of them. Negative ones may be padding."""
    step_context().outside.append(_outside("labels", tf.maximum(tf.cast(labels, tf.int64), 0), classes))


def _of_operations(operations: list[tf.Operation]) -> Iterator[tuple[str, Pair]]:
    for op in operations:
        if op.type in _OPS and tf.get_static_value(op.inputs[1]) is None:
            yield _outside(_OPS[op.type], op.inputs[1], _size(op, op.inputs[0]))


def _size(op: tf.Operation, numbered: tf.Tensor):
    """Returns how many rows, or classes, an op's numbers are of: an int, or a scalar where that is not known."""
    if op.type == "ResourceGather":
        return tf.raw_ops.VariableShape(input=numbered)[0]
    axis = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else -1
    return numbered.shape[axis] or tf.shape(numbered)[axis]


def _outside(what: str, numbers: tf.Tensor, size) -> tuple[str, Outside]:
    """Returns the name of the metric, and its pair of the numbers that are not from 0 to below `size`."""
    values = tf.cast(numbers, tf.float64)  # GPUs compute with int32 on the host, for which a step would wait
    above, below = values >= tf.cast(size, tf.float64), values < 0
    largest = tf.maximum(tf.reduce_max(tf.where(above, values, 0.0)), 0.0)  # of none it is -inf
    least = tf.minimum(tf.reduce_min(tf.where(below, values, 0.0)), 0.0)
    parts = tf.cast(tf.stack([tf.reduce_any(above), tf.reduce_any(below)]), tf.float64)
    name = f"{what} from 0 to {size - 1}" if isinstance(size, int) else f"{what} out of range"
    return name, Outside(tf.stack([largest, least]), parts)
