"""Counts the operations and the bytes moved of one training step, in its graph. Nothing is run.

Operations are those of matrix products and convolutions, forward and backward: the rest of a step is passes over
memory. Ops that TensorFlow would prune, since nothing uses their results, are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import tensorflow as tf

from ...engine.data import form
from ...engine.data.feeds.combined import CombinedFeed
from ...engine.data.feeds.feed import UntakenFeed
from ...engine.data.source import unknown_dimensions
from ...engine.internals import graphs
from ...engine.internals.variables import is_shard, state_key
from ...engine.optimizers.base import FusedOptimizer
from ...engine.optimizers.keras_adapter import KerasOptimizer
from ...engine.state import TrainState
from ...engine.strategies.inner_loop import InnerLoop
from ...engine.trainer import Trainer
from .quantities import Product, flops_by_dtype
from .traced_ops import BRANCHES, CALLS, LOOPS, NotCountableError, needed, tensor_bytes, trips

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

# Ops that only name, reshape or describe values.
FREE = {
    *("Const", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "NoOp", "Placeholder", "PreventGradient"),
    *("ReadVariableOp", "Reshape", "Shape", "ShapeN", "Size", "Squeeze", "StopGradient", "VarHandleOp"),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one step.

    Attributes:
      flops: {dtype: operations} of the products; a multiplication and an addition are two.
      bytes: bytes moved at least: each product reads its operands and writes its result, and the update reads gradients
        and reads and writes variables and slots. Ops in between (activation functions, biases, normalization, the rows
        of embeddings) are assumed to cost nothing more.
      resident_bytes: bytes of all tensors that the step touches, once each: the size of a cache that holds them.
    """

    flops: dict[str, float]
    bytes: float
    resident_bytes: float


def step_cost(strategy, state: TrainState, batch_size: int) -> Cost:
    """Counts one step on all replicas of all hosts. Traces it on a batch of zeros.

    Where parameter servers make the update, it is left out: it takes nothing of the devices that compute.

    Args:
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
    local_batch = batch_size // strategy.mesh.batch_shard(0, strategy.num_replicas)[1]
    specs = tf.nest.map_structure(
        lambda x: tf.TensorSpec([local_batch, *x.shape[1:]], x.dtype), state.trainer.run_context.example
    )
    if not isinstance(strategy.training, InnerLoop):
        raise NotCountableError(f"the strategy {strategy.name} compiles its steps in a way of its own")
    graph = strategy.program("train", UntakenFeed(specs, batch_size)).one_step(0).graph
    hosts = strategy.num_hosts
    updates = strategy.num_replicas // hosts if strategy.updates_here else 0
    moved, resident = (updates * size for size in update_bytes(state.trainer))
    listed = products(graph)
    tensors = {id(tensor): tensor for op, *_ in _products(graph) for tensor in (*op.inputs, *op.outputs)}
    return Cost(
        {dtype: hosts * flops for dtype, flops in flops_by_dtype(listed).items()},
        hosts * (moved + sum(product.count * product.bytes for product in listed)),
        float(hosts * (resident + sum(map(_product_bytes, tensors.values())))),
    )


def update_bytes(trainer: Trainer) -> tuple[float, float]:
    """Counts one replica's dense update: bytes read and written, and bytes of the arrays it touches.

    It reads gradients, and reads and writes variables and the optimizer's variables. Tables and their slots are left
    out, unless a Keras optimizer moves all of their rows: their updates touch a few.
    """
    moved = touched = 0
    for optimizer in trainer.inventory.optimizers.values():
        updated, state, by_rows = optimizer.updated_variables, list(optimizer.variables), set[int]()
        if isinstance(optimizer, KerasOptimizer):
            state += [variable.value for variable in optimizer.keras_optimizer.variables]
        elif isinstance(optimizer, FusedOptimizer):
            tables = [(v, state_key(v, n)) for n, v in enumerate(optimizer.all_variables) if is_shard(v)]
            by_rows = {id(v) for shard, key in tables for v in (shard, *optimizer.slots.get(key, {}).values())}
        ids = {id(variable) for variable in updated}
        dense = sum(variable_bytes(v) for v in updated if id(v) not in by_rows)
        slots = sum(variable_bytes(v) for v in state if id(v) not in ids | by_rows)
        moved += 3 * dense + 2 * slots
        touched += dense + slots
    return float(moved), float(touched)


def products(graph: tf.Graph) -> tuple[Product, ...]:
    """Lists the products in a function's graph, and in those that it calls, those of one size together."""
    counts: dict[Product, float] = {}
    for op, flops, times in _products(graph):
        size = float(sum(map(_product_bytes, [*op.inputs, *op.outputs])))
        product = Product(op.outputs[0].dtype.name, float(flops), size)
        counts[product] = counts.get(product, 0.0) + times
    return tuple(dataclasses.replace(product, count=count) for product, count in counts.items())


def _products(graph: tf.Graph) -> Iterator[tuple[tf.Operation, int, float]]:
    """Yields each product that a function executes, the operations of one, and how often."""
    for op, times in executed(graph):
        if (flops := _operations(op)) is not None:
            yield op, flops, times


def _total_flops(ops: Iterable[tuple[tf.Operation, float]]) -> float:
    return sum((_operations(op) or 0) * times for op, times in ops)


def passes(graph: tf.Graph) -> tuple[float, float]:
    """Counts a graph's ops, and the bytes that they read and write: (ops, bytes). Ops of no data are left out.

    Optimizers' kernels count as ops; what they move is in `update_bytes`.
    """
    ops = moved = 0.0
    for op, times in executed(graph):
        if op.type in FREE or not (size := sum(map(tensor_bytes, [*op.inputs, *op.outputs]))):
            continue
        ops += times
        moved += 0.0 if op.type.startswith("ResourceApply") else times * size
    return ops, moved


@graphs.without_recursion
def executed(graph: tf.Graph) -> Generator[tuple, Any, list[tuple[tf.Operation, float]]]:
    """Lists the ops that a function executes, with those of functions that it calls, each with how often.

    A loop counts as often as it runs, once if that is unknown and it has no products; of branches the one with most
    operations of products counts, or if all have as many the `else`.

    Raises:
      NotCountableError: a loop with products runs as often as only running it shows.
    """
    ops = list[tuple[tf.Operation, float]]()
    for op in needed(graph):
        if op.type in CALLS:
            ops += yield (graphs.called(op, "f"),)
        elif op.type in BRANCHES:
            branches = []
            for branch in graphs.all_called(op):
                branches.append((yield (branch,)))
            ops += max(branches, key=_total_flops)
        elif op.type in LOOPS:
            turn = yield (graphs.called(op, "body"),)
            turns = trips(op) if _total_flops(turn) else 1
            ops += ((inner, turns * times) for inner, times in turn)
        else:
            ops.append((op, 1.0))
    return ops


def _operations(op: tf.Operation) -> int | None:
    """Counts 2 x multiplications of a product; None for any other op."""
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


def _product_bytes(tensor: tf.Tensor) -> int:
    return tensor.dtype.size * math.prod(_shape(tensor))


def variable_bytes(variable: tf.Variable) -> int:
    """Computes the bytes of a variable, or of one replica's shard."""
    return variable.dtype.size * variable.shape.num_elements()


def roofline(cost: Cost, machine: dict, steps_per_sec: float, devices: int = 1) -> dict | None:
    """Computes which of the machine's two limits binds a model, and what fraction of it a run reaches: the roofline.

    Williams, Waterman and Patterson 2009, Roofline: an insightful visual performance model for multicore architectures
    (https://doi.org/10.1145/1498765.1498785).

    A step takes at least as long as its operations at the peak rate of matrix products in their dtypes, and at least as
    long as its bytes at the memory's rate, each divided over the devices. A step that touches no more than the last
    cache holds is measured by that cache's rate: memory does not limit it.

    Args:
      machine: limits of each device, as `parts.plan.measured_limits.probe` returns them.

    Returns:
      bound: "compute" or "memory". limit_steps_per_sec. share_of_limit: the run's rate divided by it; above 1 where the
      probe was disturbed, or where data stayed in caches that the count takes for memory. intensity_flops_per_byte.
      matmul_dtype: the dtype of most operations. bandwidth: "memory" or "cache", whose rate counts.
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
        "intensity_flops_per_byte": sum(cost.flops.values()) / cost.bytes,
        "matmul_dtype": max(cost.flops, key=cost.flops.__getitem__),
        "bandwidth": "cache" if cached else "memory",
        "compute_seconds": compute_seconds,
        "memory_seconds": memory_seconds,
    }
