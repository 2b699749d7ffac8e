"""What a traced graph would wait for on a GPU, found without one: TensorFlow's registry says of each GPU kernel which
of its inputs and outputs are in the host's memory.

What it takes for granted: ops that no device is named for go to the GPU where they have a kernel (TensorFlow's placer),
and identities that no device is named for are gone (Grappler).
"""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.framework import kernels

from crankshaft.engine.internals import graphs

HOST, GPU = "host", "gpu"


def waits(function) -> list[str]:
    """Each place where something on the host needs a value that a GPU computes: "op <- tensor", loops entered once.

    Args:
      function: a concrete function; its arguments count as the host's.
    """
    found: list[str] = []
    _walk(function.graph, [HOST] * len(function.graph.inputs), None, found)
    return found


def _walk(graph, inputs: list[str], caller: str | None, found: list[str]) -> list[str]:
    """Where the graph's outputs are, given where its inputs are. `caller` is the kind of device of who calls it."""
    where = dict(zip(map(id, graph.inputs), inputs, strict=True))

    def read(op, tensor, wanted: str) -> None:
        if wanted == HOST and where.get(id(tensor), HOST) == GPU:
            found.append(f"{op.type} {op.name} <- {tensor.name}")

    for op in graph.get_operations():
        if op.type == "Placeholder":
            continue
        kind = tf.DeviceSpec.from_string(op.device or "").device_type or caller
        given = [where.get(id(tensor), HOST) for tensor in op.inputs]
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            outputs = _walk(graphs.called(op, "f"), given, kind, found)
        elif op.type in ("If", "StatelessIf"):
            read(op, op.inputs[0], HOST)
            branches = (graphs.called(op, name) for name in ("then_branch", "else_branch"))
            both = [_walk(branch, given[1:], kind, found) for branch in branches]
            outputs = [GPU if GPU in places else HOST for places in zip(*both, strict=True)]
        elif op.type in ("While", "StatelessWhile"):
            outputs = given  # a loop's variables stay where they come from
            _walk_loop(op, given, kind, found)
        elif op.type == "Identity" and not op.device:
            outputs = given
        else:
            wanted, outputs = _of_kernel(op, kind)
            for tensor, place in zip(op.inputs, wanted, strict=True):
                read(op, tensor, place)
        where |= zip(map(id, op.outputs), outputs, strict=True)
    return [where.get(id(tensor), HOST) for tensor in graph.outputs]


def _walk_loop(op, given: list[str], kind: str | None, found: list[str]) -> None:
    (goes_on,) = _walk(graphs.called(op, "cond"), given, kind, found)
    if goes_on == GPU:
        found.append(f"{op.type} {op.name} <- its condition")
    after = _walk(graphs.called(op, "body"), given, kind, found)
    for place, (a, b) in enumerate(zip(given, after, strict=True)):
        if a == HOST and b == GPU:
            found.append(f"{op.type} {op.name} <- its variable {place}")


def _of_kernel(op, kind: str | None) -> tuple[list[str], list[str]]:
    """Where the op's kernel has its inputs and its outputs."""
    kernel = None if kind == "CPU" else _gpu_kernel(op)
    if kernel is None:
        return [HOST] * len(op.inputs), [HOST] * len(op.outputs)
    on_host = set(kernel.host_memory_arg)
    names = (_names(op, op.op_def.input_arg), _names(op, op.op_def.output_arg))
    inputs, outputs = ([HOST if name in on_host else GPU for name in each] for each in names)
    return inputs, outputs


def _gpu_kernel(op):
    for kernel in _registered(op.type):
        constraints = {each.name: set(each.allowed_values.list.type) for each in kernel.constraint}
        if all(_types(op, name) <= allowed for name, allowed in constraints.items()):
            return kernel
    return None


@functools.cache
def _registered(op_type: str) -> list:
    found = [k for k in kernels.get_registered_kernels_for_op(op_type).kernel if k.device_type in ("GPU", "DEFAULT")]
    return sorted(found, key=lambda kernel: kernel.device_type != "GPU")


def _types(op, name: str) -> set[int]:
    value = op.get_attr(name)
    return {each.as_datatype_enum for each in (value if isinstance(value, list) else [value])}


def _names(op, args) -> list[str]:
    """The name of the argument that each of an op's inputs or outputs belongs to."""
    found = []
    for arg in args:
        count = len(op.get_attr(arg.type_list_attr)) if arg.type_list_attr else 1
        found += [arg.name] * (op.get_attr(arg.number_attr) if arg.number_attr else count)
    return found
