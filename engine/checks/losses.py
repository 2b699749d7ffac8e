"""Checks what a step's losses and metrics are computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from .. import logging
from ..data.form import fields, text_fields
from ..errors import UsageError
from ..internals import graphs
from ..step.context import StepContext, TracedLoss
from ..step.diagnosis import casts_text

_BY_SHAPES = {"Rank", "Shape", "ShapeN", "Size"}  # ops whose values are not the examples'
_COMPARED_IN_PARTS = (
    "%s compares examples with one another, and each replica or micro-batch only those of its own part of the global "
    "batch, which is not what one device computes; compare with those of crankshaft.gather(self, values), without "
    "accumulate_steps"
)


def check_losses(contexts: Iterable[StepContext], owner: str, warns_of_parts: bool = False) -> None:
    """Checks what losses and metrics were computed from: text as numbers and pairs of examples give wrong values.

    Args:
      warns_of_parts: whether each computes a part of a batch, so that one that compares examples is another.

    Raises:
      UsageError: a forward pass computes with text, or a loss broadcasts examples [n, 1] with examples [n].
    """
    for loss in (loss for context in contexts for loss in context.losses):
        results = tf.nest.flatten(loss.result, expand_composites=True)
        # None if a loss returned numbers alone, or was executed op by op.
        graph = next(filter(None, (getattr(x, "graph", None) for x in results)), None)
        text = text_fields((fields(loss.batch).features,))
        if text and graph is not None and casts_text(graph):
            raise UsageError(
                f"{', '.join(text)} holds strings, and {owner} computes with them as with numbers; look them up "
                "before, by tf.keras.layers.StringLookup, Hashing or TextVectorization"
            )
        _check_pairs(loss, graph, warns_of_parts)


def _compares(op: tf.Operation, inputs: Sequence[tf.Tensor], columns: Collection[str]) -> bool:
    """Returns whether an operation multiplies matrices of examples, or broadcasts [n, 1, ...] with [1, n, ...]."""
    if op.type in ("MatMul", "BatchMatMulV2"):
        return [x.shape.rank for x in inputs] == [2, 2]
    if op.type == "Einsum":  # of two whose first axes are not the same one
        terms = op.get_attr("equation").split(b"->")[0].split(b",")
        return len(inputs) == len({term.strip()[:1] for term in terms}) == 2
    shapes = [x.shape for x in inputs if (x.shape.rank or 0) > 1]
    return any(x[0] == 1 != x[1] for x in shapes) and any(x[0] != 1 == x[1] for x in shapes)


def _check_pairs(loss: TracedLoss, graph: tf.Graph | None, warns_of_parts: bool) -> None:
    """Checks that no operation of a loss broadcasts examples [n, 1] with examples [n].

    Labels [n] and outputs [n, 1] broadcast to [n, n], whose mean trains something else. Each `tf.function`, branch and
    loop that the loss calls is checked too. An axis that is added on purpose, as by labels[None, :] or scores[:, None],
    is not a mistake, but a loss of a part of the batch is then another, which `warns_of_parts` logs.
    """
    size = tf.nest.flatten(loss.batch)[0].shape[0]
    if graph is None or size == 1:
        return
    tensors = tf.nest.flatten((loss.outputs, loss.batch), expand_composites=True)
    results = [x for x in tf.nest.flatten(loss.result, expand_composites=True) if getattr(x, "graph", None) is graph]
    captured = {id(outer): inner for outer, inner in getattr(graph, "captures", ())}
    here = [x for x in (captured.get(id(x), x) for x in tensors) if getattr(x, "graph", None) is graph]
    operations = graph.get_operations()
    positions = {op.name: position for position, op in enumerate(operations)}
    first = max((positions[x.op.name] for x in here), default=0)
    last = max(positions[x.op.name] for x in results)
    if _finds(operations[first : last + 1], here, _broadcasts):
        labels = fields(loss.batch).labels
        raise UsageError(
            f"{loss.owner}: values [n, 1] and [n] of n examples broadcast to [n, n], one for each pair of them "
            f"(outputs are {_shape(loss.outputs, size)}, labels {_shape(() if labels is None else labels, size)}); "
            "make the shapes alike, by outputs[:, 0] or labels[:, None], or write labels[None, :] if pairs are meant"
        )
    if warns_of_parts:
        needed = {x.op.name for x in results}  # not a gradient that is made beside another one, and not used
        for op in reversed(operations[: last + 1]):
            needed.update(x.op.name for x in op.inputs if op.name in needed)
        # What replicas have exchanged is not of this part alone. A loop's turns, as those of tf.map_fn, are mostly of
        # single examples.
        of_part = (op for op in operations if op.name in needed and not graphs.exchanges(op))
        if _finds(of_part, here, _compares, enters_loops=False):
            logging.warning_once(_COMPARED_IN_PARTS, loss.owner)


def _broadcasts(op: tf.Operation, inputs: Sequence[tf.Tensor], columns: Collection[str]) -> bool:
    """Returns whether an operation broadcasts [n, 1] with [n], which pairs the examples."""
    sizes = {x.shape[0] for x in inputs if x.name in columns} & {x.shape[0] for x in inputs if x.shape.rank == 1}
    return any(x.shape == [size, size] for size in sizes for x in op.outputs)


def _finds(
    operations: Iterable[tf.Operation], tensors: Iterable[tf.Tensor], is_found: Callable[..., bool], enters_loops=True
) -> bool:
    """Returns whether an operation is found that computes with `tensors`, or with what is computed from them.

    Args:
      is_found: gets an operation, those of its inputs, and the names of all that are [n, 1], as the tensors are.
    """
    examples = {x.name for x in tensors}
    columns = {x.name for x in tensors if _is_column(x)}
    for op in operations:
        inputs = [x for x in op.inputs if x.name in examples]
        if not inputs or op.type in _BY_SHAPES:
            continue
        if is_found(op, inputs, columns):
            return True
        for called in graphs.all_called(op) if enters_loops or not op.type.endswith("While") else ():
            # From the last on, since a branch does not take the condition, the first input.
            arguments = zip(reversed(op.inputs), reversed(called.inputs), strict=False)
            inner_tensors = [inner for outer, inner in arguments if outer.name in examples]
            if _finds(called.get_operations(), inner_tensors, is_found, enters_loops):
                return True
        of_examples = (x for x in op.outputs if any(source.name in examples for source in graphs.value_inputs(x)))
        examples.update([x.name for x in of_examples])
        if any(x.name in columns for x in inputs):
            columns.update(x.name for x in op.outputs if _is_column(x))
    return False


def _is_column(x: tf.Tensor) -> bool:
    return x.shape.rank == 2 and x.shape[1] == 1


def _shape(nest: Any, size: int | None) -> str:
    """Returns the shape of each tensor of a nest, with n for the examples."""

    def named(x: Any) -> str:
        return f"[{', '.join('n' if axis == size else str(axis) for axis in x.shape)}]"

    return str(tf.nest.map_structure(named, nest)).replace("'", "")
