"""Finds, as a step is traced, where a loss or a metric computes with pairs of examples. Replica code.

Labels [n] and outputs [n, 1] broadcast to [n, n], a mistake that trains something else without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ..internals.graphs import all_called
from . import batches

_OF_SHAPES = {"Rank", "Shape", "ShapeN", "Size"}  # ops whose values are not the examples'


def checked(function: Callable, where: str, outputs, batch) -> Any:
    """Returns function(outputs, batch), of whose operations none may broadcast examples [n, 1] with examples [n].

    Those of each `tf.function`, branch and loop that it calls are looked at, too. An axis that is made on purpose, as
    by labels[None, :] or scores[:, None], is not a mistake.

    Raises:
      ValueError: one does; says the shapes.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = function(outputs, batch)
    tensors = [x for x in tf.nest.flatten((outputs, batch), expand_composites=True) if tf.is_tensor(x)]
    size = tf.nest.flatten(batch)[0].shape[0]
    captured = {id(outer): inner for outer, inner in getattr(graph, "captures", ())}
    here = [x for x in (captured.get(id(x), x) for x in tensors) if getattr(x, "graph", None) is graph]
    if size != 1 and _broadcasts(graph.get_operations()[before:], here):
        labels = batches.fields(batch).labels
        raise ValueError(
            f"{where}: values [n, 1] and [n] of n examples broadcast to [n, n], one for each pair of them (outputs are "
            f"{_shape(outputs, size)}, labels {_shape(() if labels is None else labels, size)}); make the shapes "
            "alike, by outputs[:, 0] or labels[:, None], or write labels[None, :] if pairs are meant"
        )
    return result


def _broadcasts(operations: Iterable[tf.Operation], tensors: Iterable[tf.Tensor]) -> bool:
    """Returns whether one of these operations pairs the examples of `tensors`, or of what is computed of them."""
    examples = {x.name for x in tensors}
    columns = {x.name for x in tensors if _is_column(x)}  # and what was [n, 1] all the way from there
    for op in operations:
        known = [x for x in op.inputs if x.name in examples]
        if not known or op.type in _OF_SHAPES:
            continue
        of_columns = [x for x in known if x.name in columns]
        if any(_is_pairs(wide, narrow, op.outputs) for wide in of_columns for narrow in known):
            return True
        for called in all_called(op):
            # A branch does not take the condition, which comes first.
            taken = zip(reversed(op.inputs), reversed(called.inputs), strict=False)
            if _broadcasts(called.get_operations(), [inner for outer, inner in taken if outer.name in examples]):
                return True
        examples.update(x.name for x in op.outputs)
        columns.update(x.name for x in op.outputs if of_columns and _is_column(x))
    return False


def _is_column(x: tf.Tensor) -> bool:
    return x.shape.rank == 2 and x.shape[1] == 1


def _is_pairs(wide: tf.Tensor, narrow: tf.Tensor, outputs) -> bool:
    size = wide.shape[0]
    return narrow.shape.rank == 1 and any(
        x.shape.rank == 2 and size == narrow.shape[0] == x.shape[0] == x.shape[1] for x in outputs
    )


def _shape(nest, size: int | None):
    """Returns the shape of each tensor of a nest, with n for the examples."""
    shapes = tf.nest.map_structure(lambda x: _named(x.shape, size), nest)
    return shapes if isinstance(shapes, str) else str(shapes).replace("'", "")


def _named(shape: tf.TensorShape, size: int | None) -> str:
    return f"[{', '.join('n' if axis == size else str(axis) for axis in shape)}]"
