"""Counts the operations and the bytes moved of one training step, in its graph. Host code; nothing is run.

Operations are those of matrix products and convolutions, forward and backward: the rest of a step is passes over
memory. Ops that TensorFlow would prune, since nothing uses their results, are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from ...engine.data import form
from ...engine.data.combined import CombinedFeed
from ...engine.data.source import unknown_dimensions
from ...engine.internals import graphs
from ...engine.inventory import Inventory
from ...engine.optimizers.keras_adapter import KerasOptimizer
from ...engine.state import TrainState
from ...engine.trainer import Trainer
from .quantities import Product

SOURCE = "matrix products and convolutions in the step's graph, forward and backward"
_MATMULS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_BACKWARD_CONVOLUTIONS = (
    "Conv2DBackpropInput",
    "Conv2DBackpropFilter",
    "Conv3DBackpropInputV2",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
)
# Ops that call another graph, and the attributes that name it.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")


# Ops that only name, reshape or describe values.
FREE = {
    *("Const", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "NoOp", "Placeholder", "PreventGradient"),
    *("ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Squeeze", "StopGradient", "VarHandleOp"),
}


class NotCountableError(ValueError):
    """A graph's amount of computation is unknown. One line: the op, and the unknown length or shape."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one step.

    Attributes:
      flops: {dtype: operations} of the products; a multiplication and an addition are two.
      bytes: moved at least: each product reads its operands and writes its result, and the update reads gradients and
        reads and writes variables and slots. Ops in between (activation functions, biases, normalization, the rows
        of embeddings) are assumed to cost nothing more.
      resident_bytes: of all tensors that the step touches, once each: the size of a cache that holds them.
    """

    flops: dict[str, float]
    bytes: float
    resident_bytes: float

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        flops = {name: self.flops.get(name, 0.0) + other.flops.get(name, 0.0) for name in self.flops | other.flops}
        return Cost(flops, self.bytes + other.bytes, self.resident_bytes + other.resident_bytes)

    def __mul__(self, times: float) -> Cost:
        flops = {name: times * count for name, count in self.flops.items()}
        return Cost(flops, times * self.bytes, times * self.resident_bytes)


NOTHING = Cost({}, 0.0, 0.0)


def step_cost(strategy, state: TrainState, batch_size: int) -> Cost:
    """Counts one step on all replicas of all hosts. Traces it on a batch of zeros.

    Where parameter servers make the update, it is left out: it takes nothing of the devices that compute.

    Args:
      strategy: of the run.
      state: of the run.
      batch_size: the global batch, which divides over the mesh's data axis.

    Raises:
      NotCountableError: the graph has a loop of a length, or a tensor of a shape, that is known only by running it; or
        the strategy has no such batch.
    """
    if unknown_dimensions(form.element_spec(state.trainer.run_context.example)):
        raise NotCountableError("examples differ in length, and so does what steps cost")
    if isinstance(strategy.training.feed, CombinedFeed):
        raise NotCountableError("a step takes a batch of each of several inputs")
    # Replicas along the mesh's model axis share examples.
    share = batch_size // strategy.mesh.batch_share(0, strategy.num_replicas)[1]
    batch = tf.nest.map_structure(lambda x: np.repeat(np.asarray(x), share, axis=0), state.trainer.run_context.example)
    try:
        graph = strategy.program("train", strategy.repeated(batch, batch_size)).one_step(0).graph
    except NotImplementedError as error:
        raise NotCountableError(str(error)) from error
    local_replicas = strategy.num_replicas // strategy.num_hosts
    update = update_cost(state.trainer) * local_replicas if strategy.updates_here else NOTHING
    return (graph_cost(graph) + update) * strategy.num_hosts


def update_cost(trainer: Trainer) -> Cost:
    """Counts one replica's dense update: gradients read, variables and the optimizer's variables read and written.

    Tables and their slots are left out: their updates touch a few rows.
    """
    inventory = Inventory(trainer)
    sparse, shapes = ({of(shard) for shard in inventory.shards} for of in (id, lambda shard: tuple(shard.shape)))
    moved = held = 0
    for optimizer in inventory.optimizers.values():
        updated = optimizer.updated_variables
        kept = list(optimizer.variables)
        if isinstance(optimizer, KerasOptimizer):
            kept += [variable.value for variable in optimizer.keras_optimizer.variables]
        known = {id(variable) for variable in updated}
        dense = sum(variable_bytes(v) for v in updated if id(v) not in sparse)
        slots = sum(variable_bytes(v) for v in kept if id(v) not in known and tuple(v.shape) not in shapes)
        moved += 3 * dense + 2 * slots
        held += dense + slots
    return Cost({}, float(moved), float(held))


def graph_cost(graph: tf.Graph) -> Cost:
    """Counts the products in a function's graph, and in those that it calls; see `executed`."""
    seen: set[int] = set()
    cost = NOTHING
    for op, times in executed(graph):
        if (count := _operations(op)) is not None:
            tensors = [*op.inputs, *op.outputs]
            new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
            seen.update(new)
            cost += Cost(
                {op.outputs[0].dtype.name: times * count},
                times * sum(map(_tensor_bytes, tensors)),
                float(sum(map(_tensor_bytes, new.values()))),
            )
    return cost


def products(graph: tf.Graph) -> tuple[Product, ...]:
    """Lists the products in a function's graph, and in those that it calls, those of one size together."""
    counts: dict[Product, float] = {}
    for op, times in executed(graph):
        if (count := _operations(op)) is not None:
            size = float(sum(map(_tensor_bytes, [*op.inputs, *op.outputs])))
            one = Product(op.outputs[0].dtype.name, float(count), size)
            counts[one] = counts.get(one, 0.0) + times
    return tuple(dataclasses.replace(one, count=count) for one, count in counts.items())


def passes(graph: tf.Graph) -> tuple[float, float]:
    """Counts a worker's ops, and the bytes that they read and write: (ops, bytes). Ops of no data are left out.

    Optimizers' kernels count as ops; what they move is `update_cost`'s.
    """
    ops = moved = 0.0
    for op, times in executed(graph):
        if op.type in FREE or server_of(op) or not (size := sum(map(bytes_of, [*op.inputs, *op.outputs]))):
            continue
        ops += times
        moved += 0.0 if op.type.startswith("ResourceApply") else times * size
    return ops, moved


def executed(graph: tf.Graph, times: float = 1.0) -> Iterator[tuple[tf.Operation, float]]:
    """Yields the ops that a function executes, with those of functions that it calls, each with how often.

    A loop counts as often as it runs, once if that is unknown and it has no products; of branches the one with most
    operations of products counts, or if all have as many the `else`.

    Raises:
      NotCountableError: a loop with products runs as often as only running it shows.
    """
    for op in needed(graph):
        if op.type in CALLS:
            yield from executed(callee(op, "f"), times)
        elif op.type in BRANCHES:
            yield from executed(max(graphs.all_called(op), key=lambda each: graph_cost(each).total_flops), times)
        elif op.type in LOOPS:
            body = callee(op, "body")
            yield from executed(body, times * (trips(op) if graph_cost(body).flops else 1.0))
        else:
            yield op, times


def needed(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops that a function's outputs and effects need.

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


def _operations(op: tf.Operation) -> int | None:
    """Returns 2 x multiplications of a product; None for any other op."""
    if op.type in _MATMULS:
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        inner = _shape(op.inputs[0])[-2 if transposed else -1]
        return 2 * inner * math.prod(_shape(op.outputs[0]))
    if op.type == "Einsum":
        return _einsum_operations(op)
    if op.type in graphs.CONVOLUTIONS:
        return _convolution_operations(op, _shape(op.outputs[0]), _shape(op.inputs[1]))
    if op.type in _BACKWARD_CONVOLUTIONS:
        # As many as the forward one's, whose outputs have the shape of the gradients that come in.
        kernel = _constant_shape(op.inputs[1]) if "BackpropFilter" in op.type else _shape(op.inputs[1])
        return _convolution_operations(op, _shape(op.inputs[2]), kernel)
    return None


def _convolution_operations(op: tf.Operation, outputs: list[int], kernel: list[int]) -> int:
    """Counts a convolution: each output is a sum over all but the kernel's last axis, or over height and width.

    `kernel` is [..., channels in (of a group), channels out], a depthwise one [height, width, channels, multiplier].
    """
    inner = kernel[:2] if op.type.startswith("Depthwise") else kernel[:-1]
    return 2 * math.prod(outputs) * math.prod(inner)


def _einsum_operations(op: tf.Operation) -> int | None:
    if len(op.inputs) < 2:
        return None  # a transposition or a sum
    sizes: dict[str, int] = {}
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    for term, tensor in zip(terms, op.inputs, strict=True):
        shape, before = _shape(tensor), term.partition("...")[0]
        letters = term.replace("...", "")
        hidden = len(shape) - len(letters)  # axes under the ellipsis, named from the right
        axes = [*before, *range(hidden, 0, -1), *letters[len(before) :]]
        for axis, size in zip(axes, shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    return 2 * math.prod(sizes.values())


def trips(op: tf.Operation) -> int:
    """Returns how often a loop runs, if it counts by ones up to a constant of the graph.

    Raises:
      NotCountableError: it does not.
    """
    condition = callee(op, "cond")
    ends = [_trips_by(op, condition, each) for each in _conjuncts(condition.outputs[0])]
    if not (known := [end for end in ends if end is not None]):
        raise NotCountableError(f"{op.name} is a loop whose length is not in its graph")
    return min(known)


def _conjuncts(tensor: tf.Tensor) -> list[tf.Operation]:
    """Returns the comparisons that all have to hold."""
    op = tensor.op
    if op.type in ("LogicalAnd", "Identity"):
        return [each for part in op.inputs for each in _conjuncts(part)]
    return [op]


def _trips_by(op: tf.Operation, condition: tf.Graph, less: tf.Operation) -> int | None:
    """Returns how often a loop runs if this comparison, in its condition, ends it; None if that is unknown."""
    if less.type != "Less" or (index := _index_of(condition.inputs, less.inputs[0])) is None:
        return None
    first, last = _counts_from(op, index), tf.get_static_value(less.inputs[1])
    if (outside := _index_of(condition.inputs, less.inputs[1])) is not None:  # handed in, and the same in each turn
        body = callee(op, "body")
        if through_identities(body.outputs[outside]) is body.inputs[outside]:
            last = _value(op.inputs[outside])
    return None if first is None or last is None else max(0, int(last) - first)


def _counts_from(op: tf.Operation, index: int) -> int | None:
    """Returns the first value of a loop's variable, if it is known and each turn adds one."""
    body = callee(op, "body")
    after = through_identities(body.outputs[index]).op
    others = [part for part in after.inputs if part is not body.inputs[index]]
    if after.type not in ("Add", "AddV2") or len(others) != 1 or tf.get_static_value(others[0]) != 1:
        return None
    first = tf.get_static_value(op.inputs[index])
    return None if first is None else int(first)


def _value(tensor: tf.Tensor) -> int | None:
    """Returns a scalar known from the graph: a constant, or another loop's count, as a gradient's loop needs."""
    known = tf.get_static_value(tensor)
    if known is None and tensor.op.type in LOOPS:
        first = _counts_from(tensor.op, tensor.value_index)
        return None if first is None else first + trips(tensor.op)
    return known


def _index_of(tensors, wanted: tf.Tensor) -> int | None:
    return next((i for i, tensor in enumerate(tensors) if tensor is wanted), None)


def through_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Follows a tensor to the op that computes it."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def callee(op: tf.Operation, attribute: str) -> tf.Graph:
    """Returns the graph that an attribute of an op names."""
    return graphs.called(op, op.get_attr(attribute).name)


def _shape(tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise NotCountableError(f"{tensor.op.name} is of shape {tensor.shape}, known only by running it")
    return tensor.shape.as_list()


def _constant_shape(tensor: tf.Tensor) -> list[int]:
    if tensor.op.type == "ShapeN":  # get_static_value does not know it
        return _shape(tensor.op.inputs[tensor.value_index])
    shape = tf.get_static_value(tensor)
    if shape is None:
        raise NotCountableError(f"{tensor.op.name} is a shape known only by running it")
    return [int(size) for size in shape]


def _tensor_bytes(tensor: tf.Tensor) -> int:
    return tensor.dtype.size * math.prod(_shape(tensor))


def bytes_of(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor, at most where its number of rows depends on the data; 0 of a handle or text."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    if tensor.shape.rank is None:  # of an op that a function's caller knows more of
        return tensor.dtype.size * _rows(tensor)
    return tensor.dtype.size * math.prod(_rows(tensor) if size is None else size for size in tensor.shape)


def _rows(tensor: tf.Tensor) -> int:
    """Returns the most rows of a tensor whose number depends on the data: those of what it is computed from."""
    queue, seen, most = [(tensor, 1)], {id(tensor)}, 1
    for each, parts in queue:
        if each.shape.rank and each.shape[0] is not None:
            most = max(most, -(-each.shape[0] // parts))
            continue
        op = each.op
        parts *= op.get_attr("num_partitions") if op.type == "DynamicPartition" else 1
        new = [x for x in op.inputs if x.dtype != tf.resource and x.shape.rank != 0 and id(x) not in seen]
        seen.update(map(id, new))
        queue += [(x, parts) for x in new]
    return most


def server_of(op: tf.Operation) -> str:
    """Returns the parameter server that executes an op, its own or its variable's; "" of a worker's."""
    devices = [op.device, *(_home(each) for each in op.inputs if each.dtype == tf.resource)]
    return next((device for device in devices if "/job:ps" in device), "")


def _home(handle: tf.Tensor) -> str:
    """Returns the device of a variable by its handle, perhaps one that functions capture."""
    for outside, inside in getattr(handle.graph, "captures", ()):
        if inside is handle:
            return _home(outside)
    return handle.device


def variable_bytes(variable: tf.Variable) -> int:
    """Returns the bytes of a variable, or of one replica's shard."""
    return variable.dtype.size * variable.shape.num_elements()


def roofline(cost: Cost, machine: dict, steps_per_sec: float, devices: int = 1) -> dict | None:
    """Computes which of the machine's two limits binds a model, and what share of it a run reaches: the roofline.

    Williams, Waterman and Patterson 2009, Roofline: an insightful visual performance model for multicore architectures
    (https://doi.org/10.1145/1498765.1498785).

    A step takes at least as long as its operations at the peak rate of matrix products in their dtypes, and at least as
    long as its bytes at the memory's rate, each divided over the devices. A step that touches no more than the last
    cache holds is measured by that cache's rate: memory does not limit it.

    Args:
      cost: of a step.
      machine: of each device, as `launch.plan.machine.probe` returns it.
      steps_per_sec: of the run.
      devices: that share the work.

    Returns:
      bound: "compute" or "memory". limit_steps_per_sec. share_of_limit: the run's rate as a share of it; above 1 where
      the probe was disturbed, or where data stayed in caches that the count takes for memory. intensity_flops_per_byte.
      matmul_dtype: the dtype of most operations. bandwidth: "memory" or "cache", whose rate was taken.
      compute_seconds, memory_seconds: what each limit alone would allow a step.

      None if the step has no matrix products, or one in a dtype that was not measured.
    """
    peaks = machine["matmul_gflops"]
    if not cost.flops or not cost.bytes or not set(cost.flops) <= set(peaks):
        return None
    cached = machine.get("cache_gb_per_sec") and cost.resident_bytes / devices <= machine["cache_mb"] * 2**20
    rate = machine["cache_gb_per_sec"] if cached else machine["memory_gb_per_sec"]
    compute_seconds = sum(count / (1e9 * peaks[dtype]) for dtype, count in cost.flops.items()) / devices
    memory_seconds = cost.bytes / (1e9 * rate) / devices
    limit = 1.0 / max(compute_seconds, memory_seconds)
    return {
        "bound": "compute" if compute_seconds >= memory_seconds else "memory",
        "limit_steps_per_sec": limit,
        "share_of_limit": steps_per_sec / limit,
        "intensity_flops_per_byte": cost.total_flops / cost.bytes,
        "matmul_dtype": max(cost.flops, key=cost.flops.get),
        "bandwidth": "cache" if cached else "memory",
        "compute_seconds": compute_seconds,
        "memory_seconds": memory_seconds,
    }
