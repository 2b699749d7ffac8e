"""A traced function's graph, and those that it calls: branches, loops, functions. Host code."""

from __future__ import annotations

from collections import Counter

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


def called(op: tf.Operation, name: str) -> tf.Graph:
    """Returns the graph of the function that an op knows by this name."""
    return function_graph(op.graph, name)


def all_called(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of all functions that an op's attributes name."""
    attributes = op.node_def.attr.values()
    functions = [each for attribute in attributes for each in (attribute.func, *attribute.list.func)]
    return [called(op, function.name) for function in functions if function.name]


def kinds(graph: tf.Graph) -> Counter[str]:
    """Counts the ops of each kind, such as "MatMul", in a graph and in those that it calls."""
    counts: Counter[str] = Counter()
    queue = [graph]
    for each in queue:
        for op in each.get_operations():
            counts[op.type] += 1
            queue += all_called(op)
    return counts
