"""Digests of traced steps: steps that compute the same have the same one, in any process and with any names.

An op is hashed by its kind, attributes, called graphs, static shapes and inputs. Left out is what differs between
processes that train alike: names, and the values of integers, among which TensorFlow has a replica's number and its
slice of a batch. Steps that differ in a whole number alone thus have the same digest, except that one process compares
two traces with their integers, without the numbers of collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from ..internals import graphs

_NAMES = {"config", "config_proto", "container", "executor_type", "shared_name", "token"}  # attributes
_SIZE = 12  # bytes of a hash


class StepDigest(NamedTuple):
    """The digest of a traced step.

    Attributes:
      value: 24 hexadecimal digits.
      ops: its ops and those of the graphs that it calls, in the order in which they were traced, each with a hash of
        all that it computes.
    """

    value: str
    ops: list[tuple[str, tf.Operation]]


def digest(graph: tf.Graph, integers: bool = False) -> StepDigest:
    """Computes the digest of a traced step's graph; `integers` compares constant integers, too, and lists constants."""
    ops: list[tuple[str, tf.Operation]] = []
    return StepDigest(_digest(graph, ops, {}, integers), ops)


def describe(op: tf.Operation) -> str:
    """Describes an op for its program: kind, constants, shapes and line."""
    constants = [tf.get_static_value(source) for source in op.inputs if source.dtype.is_floating]
    values = "".join(f" by {constant}" for constant in constants if constant is not None and constant.ndim == 0)
    results = "".join(f" of {output.dtype.name} {output.shape}" for output in op.outputs[:1])
    at = f" at {line}" if (line := graphs.program_line(op)) else ""
    return f"{op.type}{results}{values}{at}"


def _digest(graph: tf.Graph, ops: list[tuple[str, tf.Operation]], done: dict[tf.Graph, str], integers: bool) -> str:
    """Hashes a graph, and adds its ops; `done` has the hashes of the graphs before."""
    hashes: dict[str, bytes] = {}
    positions = {tensor.op.name: number for number, tensor in enumerate(graph.inputs)}
    for op in graph.get_operations():
        called = graphs.all_called(op)
        for inner in called:
            if inner not in done:
                done[inner] = _digest(inner, ops, done, integers)
        parts = [op.type.encode(), str(positions.get(op.name)).encode(), *_attributes(op, integers)]
        parts += [done[inner].encode() for inner in called]
        parts += [f"{output.dtype.name} {output.shape}".encode() for output in op.outputs]
        # A message of a failed assertion has names. An input of a loop's gradient may be made after the loop.
        inputs = op.inputs[:1] if op.type == "Assert" else op.inputs
        parts += [hashes.get(source.op.name, b"") + bytes([source.value_index % 256]) for source in inputs]
        parts += sorted(hashes.get(before.name, b"") for before in op.control_inputs if before.type != "Const")
        hashes[op.name] = hashlib.blake2b(b"\0".join(parts), digest_size=_SIZE).digest()
        if integers or op.type != "Const":  # shown by what computes with it
            ops.append((hashes[op.name].hex(), op))
    computed = sorted(hashes[op.name] for op in graph.get_operations() if op.type != "Const")
    results = [hashes.get(output.op.name, b"") for output in graph.outputs]
    return hashlib.blake2b(b"".join([*computed, *results]), digest_size=_SIZE).hexdigest()


def _attributes(op: tf.Operation, integers: bool) -> Iterator[bytes]:
    for name, value in sorted(op.node_def.attr.items()):
        is_graph = value.WhichOneof("value") == "func" or bool(value.list.func)
        is_integer = op.type == "Const" and name == "value" and op.outputs[0].dtype.is_integer
        is_left_out = is_integer and not (integers and not any(map(graphs.is_collective, op.outputs[0].consumers())))
        if not (name.startswith("_") or name in _NAMES or is_graph or is_left_out):
            yield name.encode() + value.SerializeToString(deterministic=True)
