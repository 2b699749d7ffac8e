"""Reads a traced step's graph: ops that run, turns of loops, bytes of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from ...engine.internals.graphs import called

# Ops that call other graphs.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")


class NotCountableError(ValueError):
    """A graph's amount of computation is unknown. One line: the op, and the unknown length or shape."""


def needed(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops that a function's outputs and effects need; TensorFlow prunes others.

    Of an op without effects that others only come after, TensorFlow computes nothing: only what it follows counts.
    """
    values = dict.fromkeys(tensor.op for tensor in graph.outputs)  # each a set, in an order that plans do not differ by
    queue = [*values, *graph.control_outputs]
    reached = dict.fromkeys(queue)
    while queue:
        op = queue.pop()
        if op in values or op.op_def.is_stateful:
            used = [tensor.op for tensor in op.inputs if tensor.op not in values]
            values.update(dict.fromkeys(used))
            queue += used
        for before in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if before not in reached:
                reached[before] = None
                queue.append(before)
    yield from (op for op in reached if op in values or op.op_def.is_stateful)


def trips(loop: tf.Operation) -> int:
    """Computes how often a loop runs, if it counts by ones up to a constant; else raises `NotCountableError`."""
    condition = called(loop, "cond")
    comparisons, limits = [condition.outputs[0].op], list[int]()  # all have to hold
    for op in comparisons:
        if op.type in ("LogicalAnd", "Identity"):
            comparisons += [tensor.op for tensor in op.inputs]
        elif (limit := _trips_by_comparison(loop, condition, op)) is not None:
            limits.append(limit)
    if not limits:
        raise NotCountableError(f"{loop.name} is a loop whose length is not in its graph")
    return min(limits)


def _trips_by_comparison(loop: tf.Operation, condition: tf.Graph, less: tf.Operation) -> int | None:
    """Computes how often a loop runs if this comparison, in its condition, ends it; None if that is unknown."""
    if less.type != "Less" or (index := _index(condition.inputs, less.inputs[0])) is None:
        return None
    first, last = _first_count(loop, index), tf.get_static_value(less.inputs[1])
    if (outside := _index(condition.inputs, less.inputs[1])) is not None:  # handed in, and the same in each turn
        body = called(loop, "body")
        if through_identities(body.outputs[outside]) is body.inputs[outside]:
            last = _scalar(loop.inputs[outside])
    return None if first is None or last is None else max(0, int(last) - first)


def _first_count(loop: tf.Operation, index: int) -> int | None:
    """Finds the first value of a loop's variable, if it is in the graph and each turn adds one."""
    body = called(loop, "body")
    after = through_identities(body.outputs[index]).op
    added = [tensor for tensor in after.inputs if tensor is not body.inputs[index]]
    if after.type not in ("Add", "AddV2") or len(added) != 1 or tf.get_static_value(added[0]) != 1:
        return None
    first = tf.get_static_value(loop.inputs[index])
    return None if first is None else int(first)


def _scalar(tensor: tf.Tensor) -> int | None:
    """Finds a scalar in the graph: a constant, or another loop's count, as a gradient's loop needs."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type in LOOPS:
        first = _first_count(tensor.op, tensor.value_index)
        return None if first is None else first + trips(tensor.op)
    return value


def _index(tensors: Sequence[tf.Tensor], wanted: tf.Tensor) -> int | None:
    return next((index for index, tensor in enumerate(tensors) if tensor is wanted), None)


def through_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Follows a tensor to the op that computes it."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Computes the bytes of a tensor, at most where its first axis depends on the data; 0 of a handle or text."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    if tensor.shape.rank is None:  # of an op that a function's caller knows more of
        return tensor.dtype.size * _most_entries(tensor)
    return tensor.dtype.size * math.prod(_most_entries(tensor) if size is None else size for size in tensor.shape)


def _most_entries(tensor: tf.Tensor) -> int:
    """Bounds the unknown size of a tensor's axis by those of the tensors that it is computed from."""
    queue, seen, most = [(tensor, 1)], {id(tensor)}, 1
    for source, parts in queue:
        if source.shape.rank and source.shape[0] is not None:
            most = max(most, -(-source.shape[0] // parts))
            continue
        op = source.op
        parts *= op.get_attr("num_partitions") if op.type == "DynamicPartition" else 1
        new = [x for x in op.inputs if x.dtype != tf.resource and x.shape.rank != 0 and id(x) not in seen]
        seen.update(map(id, new))
        queue += [(x, parts) for x in new]
    return most
