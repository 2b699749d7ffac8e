"""A traced function's graph, and those that it calls: branches, loops, functions. Host code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import tensorflow as tf

from .tensorflow import function_graph

CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
PYTHON = {"EagerPyFunc", "PrintV2", "PyFunc", "PyFuncStateless"}  # that show a batch to Python, or to people
# Ops of `tf.random` that draw from a state of the process.
STATEFUL_RANDOM = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}
# Ops whose kernels on CPUs accumulate 16-bit values in 16 bits.
_SUMS = {
    "Cumsum",
    "DepthwiseConv2dNativeBackpropFilter",
    "ScatterNd",
    "SegmentMean",
    "SegmentSum",
    "SegmentSumV2",
    "TensorScatterAdd",
    "UnsortedSegmentSum",
}


def called(op: tf.Operation, name: str) -> tf.Graph:
    """Returns the graph of the function that an op knows by this name."""
    return function_graph(op.graph, name)


def all_called(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of all functions that an op's attributes name."""
    attributes = op.node_def.attr.values()
    functions = [each for attribute in attributes for each in (attribute.func, *attribute.list.func)]
    return [called(op, function.name) for function in functions if function.name]


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops of a graph and of those that it calls."""
    queue = [graph]
    for each in queue:
        for op in each.get_operations():
            yield op
            queue += all_called(op)


def kinds(graph: tf.Graph) -> Counter[str]:
    """Counts the ops of each kind, such as "MatMul", in a graph and in those that it calls."""
    return Counter(op.type for op in operations(graph))


def has(graph: tf.Graph, dtype: str) -> bool:
    """Returns whether an op of a graph, or of those that it calls, has an output of a dtype."""
    return any(output.dtype.name == dtype for op in operations(graph) for output in op.outputs)


def sums_in_16_bits(graph: tf.Graph) -> list[str]:
    """Returns the names of the ops that accumulate 16-bit values in 16 bits, which loses small ones."""
    halves = (tf.bfloat16, tf.float16)
    return [op.name for op in operations(graph) if op.type in _SUMS and op.outputs[0].dtype in halves]
