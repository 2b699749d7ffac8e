"""Searches a traced function's graph, and those that it calls: branches, loops, functions. Host code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from .tensorflow import function_graph

CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
# Ops of `tf.random` that use a state of the process.
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
_ASSIGNMENTS = {"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"}
ENGINES_OWN = "engines_own"  # name scope of the engine's own assignments
# Ops whose inputs after the first describe its layout.
_OF_FIRST = {"BroadcastTo", "Pad", "Reshape", "Slice", "SplitV", "StridedSlice", "Transpose"}
_OF_SHAPE = {"Rank", "Shape", "ShapeN", "Size"}  # independent of values
_COLLECTIVES = ("Collective", "Nccl")  # prefixes of their names
# Ops whose result may be a multiple of their input plus something.
_COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual", "OneHot"}
_IDENTITIES = {"EnsureShape", "Identity", "IdentityN", "StopGradient"}
_AFFINE_OPS = {"Add", "AddN", "AddV2", "Cast", "Mul", "Neg", "RealDiv", "SelectV2", "Sub"}


def called(op: tf.Operation, attribute: str) -> tf.Graph:
    """Returns the graph that an attribute of an op names."""
    return function_graph(op.graph, op.get_attr(attribute).name)


def all_called(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of all functions that an op's attributes name, in these attributes' alphabetical order."""
    attributes = [attribute for _, attribute in sorted(op.node_def.attr.items())]  # of no order that processes share
    functions = [each for attribute in attributes for each in (attribute.func, *attribute.list.func)]
    return [function_graph(op.graph, function.name) for function in functions if function.name]


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


class _CalledGraph(NamedTuple):
    """A graph and its caller, an op whose inputs from number `offset` on are the graph's."""

    graph: tf.Graph
    caller: tf.Operation | None = None
    outside: _CalledGraph | None = None
    offset: int = 0


class Assignments:
    """The assignments of a traced step to variables, and what they are computed from.

    Args:
      graph: of the traced step, or one that it calls.
      batch: nest of tensors, the replica's batch.
      own: handles of variables whose values differ by replica.
    """

    def __init__(self, graph: tf.Graph, batch=(), own: Sequence[tf.Tensor] = ()):
        self._handles = {inside.name: id(outside) for outside, inside in graph.captures}
        tensors = tf.nest.flatten(batch, expand_composites=True)
        self._batch = {each.name for each in tensors}
        self._sizes = {each.shape[0] for each in tensors if each.shape.rank and (each.shape[0] or 0) > 1}
        self._own = set(map(id, own))
        self._root = _CalledGraph(graph)
        self._uses: dict[int, list[tuple[tf.Operation, _CalledGraph]]] = {}
        queue = [self._root] if self._handles else []
        for scope in queue:
            for op in scope.graph.get_operations():
                is_assignment = op.type in _ASSIGNMENTS or op.type.startswith("ResourceScatter")
                if is_assignment and ENGINES_OWN not in op.name:
                    self._uses.setdefault(self._handle(op.inputs[0], scope), []).append((op, scope))
                offset = 1 if op.type in ("If", "StatelessIf", "Case", "StatelessCase") else 0
                queue += [_CalledGraph(each, op, scope, offset) for each in all_called(op)]

    def depend_on_batch(self, handle: tf.Tensor) -> bool:
        """Returns whether a variable is assigned values that depend on the batch or on random numbers.

        Values summed or gathered across replicas are the same on all, and don't count.
        """
        return any(self._depends(op.inputs[1:], scope) for op, scope in self._uses.get(id(handle), ()))

    def only_add(self, handle: tf.Tensor) -> bool:
        """Returns whether all assignments to a variable add something independent of its value."""
        for op, scope in self._uses.get(id(handle), ()):
            if op.type == "AssignVariableOp":
                if self._kind(op, scope, handle) != ADDS:
                    return False
            elif op.type not in ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd"):
                return False
        return True

    def from_itself(self, handle: tf.Tensor) -> bool:
        """Returns whether a variable is assigned a value computed from its own, other than by adding to it."""
        return any(
            op.type == "AssignVariableOp" and self._kind(op, scope, handle) != FREE
            for op, scope in self._uses.get(id(handle), ())
        )

    def _kind(self, op: tf.Operation, scope: _CalledGraph, handle: tf.Tensor) -> str:
        """Returns how an assignment to a variable depends on its value."""
        reads = [each for each in scope.graph.get_operations() if each.type == "ReadVariableOp"]
        own = [each.outputs[0] for each in reads if self._handle(each.inputs[0], scope) == id(handle)]
        return dependence(op.inputs[1], own)

    def _outside(self, tensor: tf.Tensor, scope: _CalledGraph) -> tuple[tf.Tensor, _CalledGraph]:
        """Follows an input of a called graph to where it was computed."""
        while scope.caller is not None and tensor.op.type == "Placeholder":
            names = [each.name for each in scope.graph.inputs]
            if tensor.name not in names:
                break
            tensor, scope = scope.caller.inputs[names.index(tensor.name) + scope.offset], scope.outside
        return tensor, scope

    def _handle(self, tensor: tf.Tensor, scope: _CalledGraph) -> int | None:
        tensor, scope = self._outside(tensor, scope)
        return self._handles.get(tensor.name) if scope is self._root else None

    def _is_size(self, tensor: tf.Tensor) -> bool:
        """Returns whether a constant is the batch's size or shape, known to TensorFlow when tracing."""
        if tensor.op.type != "Const" or not self._sizes or not (tensor.shape.rank == 0 or _is_shape(tensor)):
            return False
        return bool(self._sizes.intersection(tf.get_static_value(tensor).reshape(-1).tolist()))

    def _depends(self, tensors: Sequence[tf.Tensor], scope: _CalledGraph) -> bool:
        queue, seen = [(each, scope) for each in tensors], set()
        for each in queue:
            tensor, scope = self._outside(*each)
            if (name := (id(scope), tensor.name)) in seen:
                continue
            seen.add(name)
            op = tensor.op
            if scope is self._root and tensor.name in self._batch:
                return True
            if "Random" in op.type or op.type in STATEFUL_RANDOM or self._is_size(tensor):
                return True
            if op.type.startswith(_COLLECTIVES):
                continue
            if op.type == "ReadVariableOp":
                handle = self._handle(op.inputs[0], scope)
                if handle in self._own:
                    return True
                earlier = [e for e in self._uses.get(handle, ()) if e[1] is not scope or _precedes(e[0], op)]
                queue += [(value, place) for e, place in earlier for value in e.inputs[1:]]
            queue += [(value, scope) for value in _made_of(tensor)]
        return False


def _is_shape(constant: tf.Tensor) -> bool:
    return constant.shape.rank == 1 and constant.op.name.split("/")[-1].startswith("Shape")


def _made_of(output: tf.Tensor) -> list[tf.Tensor]:
    """Returns the inputs of its op that an output's values depend on."""
    op = output.op
    if op.type == "IdentityN":  # of a function with a custom gradient: its results, then its arguments
        return [op.inputs[output.value_index]]
    return list(op.inputs)[:1] if op.type in _OF_FIRST else list(op.inputs)


def _precedes(op: tf.Operation, other: tf.Operation) -> bool:
    operations = [each.name for each in op.graph.get_operations()]
    return operations.index(op.name) < operations.index(other.name)


def _dependents(on: Sequence[tf.Tensor]) -> set[str]:
    """Returns the names of tensors of one graph, and of all whose values depend on theirs."""
    dependent, queue = {each.name for each in on}, list(on)
    for each in queue:
        for op in each.consumers():
            if op.type.startswith(_COLLECTIVES) or op.type in _OF_SHAPE:
                continue
            new = [output for output in op.outputs if output.name not in dependent]
            new = [output for output in new if any(each.name in dependent for each in _made_of(output))]
            dependent.update(output.name for output in new)
            queue += new
    return dependent


def compared_with(tensors: Sequence[tf.Tensor]) -> set[float]:
    """Returns the finite numbers known when tracing to which an op compares what is computed from tensors of a graph.

    Of arrays of more than 16, only the smallest and largest count. The depth of a one-hot encoding is one, too.
    """
    numbers, dependent = set[float](), _dependents(tensors)
    queue = [(op, dependent) for each in tensors[:1] for op in each.graph.get_operations()]
    for op, searched in queue:
        if searched and not any(each.name in searched for each in op.inputs):
            continue
        queue += [(inner, None) for graph in all_called(op) for inner in graph.get_operations()]
        for each in op.inputs if op.type in _COMPARISONS else ():
            value = tf.get_static_value(_captured(each))
            if value is not None and np.issubdtype(value.dtype, np.number):
                found = np.unique(value[np.isfinite(value)]).astype(float)
                numbers.update(found if found.size <= 16 else found[[0, -1]])
    return numbers


def _captured(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor outside of a function that is captured as this one, or itself."""
    captures = ((inside, outside) for outside, inside in tensor.graph.captures)
    return next((outside for inside, outside in captures if inside is tensor and outside.dtype != tf.resource), tensor)


FREE, ADDS, AFFINE, OTHER = "free", "adds", "affine", "other"


def dependence(tensor: tf.Tensor, on: Sequence[tf.Tensor]) -> str:
    """Returns how a tensor depends on others of its graph, which all have one value v.

    Returns:
      FREE: not at all; ADDS: it is v plus something; AFFINE: v times something plus something; OTHER: in another way.
      The factors and terms are independent of v, or the same on all replicas.
    """
    dependent, start, known = _dependents(on), {each.name for each in on}, {}

    def kind(tensor: tf.Tensor) -> str:
        if tensor.name not in dependent:
            return FREE
        if tensor.name not in known:
            known[tensor.name] = ADDS if tensor.name in start else of_op(tensor)
        return known[tensor.name]

    def of_op(tensor: tf.Tensor) -> str:
        op = tensor.op
        if op.type in _IDENTITIES:
            return kind(_made_of(tensor)[0])
        if op.type not in _AFFINE_OPS:
            return OTHER
        kinds = [kind(each) for each in op.inputs]
        if OTHER in kinds:
            return OTHER
        if op.type in ("Add", "AddV2", "AddN", "Sub"):
            own = [each for each in kinds if each != FREE]
            return ADDS if own == [ADDS] and not (op.type == "Sub" and kinds[0] == FREE) else AFFINE
        if op.type == "SelectV2":
            if kinds[0] != FREE or FREE in kinds[1:]:
                return OTHER
            return ADDS if kinds[1:] == [ADDS, ADDS] else AFFINE
        if op.type == "Cast":
            return kinds[0] if op.inputs[0].dtype == op.outputs[0].dtype else AFFINE
        factors = [each for each in kinds if each != FREE]
        return AFFINE if len(factors) == 1 and (op.type != "RealDiv" or kinds[1] == FREE) else OTHER

    return kind(tensor)


def function_of(tensor: tf.Tensor, on: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., tf.Tensor]]:
    """Returns how a tensor, ADDS or AFFINE, is computed from another of its graph, to compute it from other values.

    Returns:
      (terms, compute): the tensors independent of `on` that it is computed from, and a function of a value in place of
      `on` and of the terms, which adds ops to the current graph.
    """
    dependent, terms, seen, queue = _dependents([on]), {}, {on.name}, [tensor]
    for each in queue:
        if each.name in seen:
            continue
        seen.add(each.name)
        if each.name in dependent:
            queue += _made_of(each)
        else:
            terms[each.name] = each

    def compute(value: tf.Tensor, *copies: tf.Tensor) -> tf.Tensor:
        known = {on.name: value, **dict(zip(terms, copies, strict=True))}

        def copy(original: tf.Tensor) -> tf.Tensor:
            if original.name not in known:
                op, inputs = original.op, [copy(each) for each in _made_of(original)]
                attributes = {name: each for name, each in op.node_def.attr.items() if not name.startswith("_")}
                if op.type in _IDENTITIES:
                    known[original.name] = inputs[0]
                else:
                    made = op.graph.create_op(op.type, inputs, [original.dtype], attrs=attributes)
                    known[original.name] = made.outputs[0]
            return known[original.name]

        return copy(tensor)

    return [*terms.values()], compute
