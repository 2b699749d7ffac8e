"""Searches a traced function's graph, and those that it calls: branches, loops, functions."""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from ..own_code import COMPUTING_FILES, ROOT, is_frameworks, is_pythons, users_line
from .tensorflow import function_attributes, function_graph, has_two_seeds, may_write, xla_kernels

# Files of the engine that make ops in place of Keras's own, for the program's layers.
_FOR_LAYERS = tuple(f"{ROOT}engine/{path}" for path in ("internals/keras", "internals/patches.py", "layers/"))
CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_ASSIGNMENTS = {"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"}
ENGINE_SCOPE = "engines_own"  # name scope of the engine's assignments
REPLICA_SCOPE = "replica_number"  # and of a replica's number, from which its random numbers are seeded
# Ops whose inputs after the first describe its layout.
_DEPENDING_ON_FIRST = {"BroadcastTo", "Pad", "Reshape", "Slice", "SplitV", "StridedSlice", "Transpose"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHING = {"Case", "If", "StatelessCase", "StatelessIf"}  # their first input chooses a graph
_SHAPE_OPS = {"Rank", "Shape", "ShapeN", "Size"}  # independent of values
_COLLECTIVES = ("Collective", "Nccl")  # prefixes of their names
# Beginnings of the names of ops that TensorFlow does not list as reads, and that change none of a run's state: look-ups
# in tables, locks, tokens, and what is shown.
_LOOK_UPS = ("LookupTableExport", "LookupTableFind", "LookupTableSize", "VarIsInitialized")
_KEEPS_STATE = (*_COLLECTIVES, *_LOOK_UPS, "FlushSummary", "MutexLock", "Write")
_REPLICA = re.compile(r"(^|/)(replica_\d+)/")  # TensorFlow's name scope of all but a process's first replica
# Ops whose result may be a multiple of their input plus something.
_COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual", "OneHot"}
_SUMS = {"Add", "AddN", "AddV2"}
_PRODUCTS = {"DivNoNan", "Mul", "RealDiv"}
_PASSING = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.variant)  # dtypes that gradients pass
_IDENTITIES = {"EnsureShape", "Identity", "IdentityN", "StopGradient"}
_AFFINE_OPS = _SUMS | {"Cast", "Mul", "Neg", "RealDiv", "SelectV2", "Sub"}

Result = TypeVar("Result")


def without_recursion(function: Callable[..., Generator[tuple, Any, Result]]) -> Callable[..., Result]:
    """Decorates a generator that yields the arguments of a call of itself, and is sent its result.

    A graph's paths can be longer than Python's stack, and double with each op: calls with the same objects are one.
    """

    @functools.wraps(function)
    def call(*arguments):
        results: dict[tuple[int, ...], tuple[Any, tuple]] = {}  # with the arguments, which keep their `id`s
        calls, result = [(arguments, function(*arguments))], None
        while calls:
            try:
                inner = calls[-1][1].send(result)
            except StopIteration as end:
                ended, result = calls.pop()[0], end.value
                results[tuple(map(id, ended))] = result, ended
                continue
            result, known = results.get(tuple(map(id, inner)), (None, None))
            if known is None:
                calls.append((inner, function(*inner)))
        return result

    return call


def called(op: tf.Operation, attribute: str) -> tf.Graph:
    """Returns the graph that an attribute of an op names."""
    return function_graph(op.graph, op.get_attr(attribute).name)


def all_called(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of all functions that an op's attributes name, in these attributes' alphabetical order."""
    functions: list = []
    for attribute in function_attributes(op.type):
        value = op.get_attr(attribute)
        functions += value if isinstance(value, list) else [value]
    return [function_graph(op.graph, function.name) for function in functions if function.name]


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops of a graph and of those that it calls."""
    queue = [graph]
    for searched in queue:  # which grows meanwhile, as in other searches here
        for op in searched.get_operations():
            yield op
            queue += all_called(op)


def lacked_by_xla(graph: tf.Graph) -> tf.Operation | None:
    """Finds an op that XLA has no kernel for, or a list of any length, among those that a function's graph needs."""
    kernels = xla_kernels() | {"Placeholder"}  # of the functions' inputs
    for op in _needed(graph):
        grows = op.type == "EmptyTensorList" and (tf.get_static_value(op.inputs[1]) or 0) < 0
        if grows or op.type not in kernels:
            return op
    return None


def _needed(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops that a function's graph, and those that it calls, need for their results and effects."""
    queue, seen = [*(x.op for x in graph.outputs), *graph.control_outputs], set()
    for op in queue:
        if op not in seen:
            seen.add(op)
            yield op
            queue += [*(x.op for x in op.inputs), *op.control_inputs]
            for inner in all_called(op):
                yield from _needed(inner)


def kinds(graph: tf.Graph) -> Counter[str]:
    """Counts the ops of each kind, such as "MatMul", in a graph and in those that it calls."""
    return Counter(op.type for op in operations(graph))


def samples(op: tf.Operation) -> bool:
    """Returns whether an op samples by a state of the process, which a resumed one does not have.

    Such ops have two seeds, and are marked as stateful, except that pooling by random regions has a state unless it is
    `deterministic`. Recurrent layers of cuDNN sample if they drop out.
    """
    if not has_two_seeds(op.type):
        return False
    attributes = op.node_def.attr
    if "dropout" in attributes:
        return attributes["dropout"].f > 0
    return not attributes["deterministic"].b if "deterministic" in attributes else op.op_def.is_stateful


def has(graph: tf.Graph, dtype: str) -> bool:
    """Whether an op of a graph, or of those that it calls, has an output of a dtype."""
    return any(output.dtype.name == dtype for op in operations(graph) for output in op.outputs)


def sums_by_name(graph: tf.Graph) -> bool:
    """Returns whether a sum has three or more terms that TensorFlow orders by names, so that it rounds by these.

    Grappler sorts a sum's terms, and may take those of an inner sum for it: terms of backpropagation, whose names begin
    with `gradient_tape`, stand before the others in some name scopes, and after them elsewhere (`UniqueNodes` and
    `AddOpsRewriteStage` in tensorflow/core/grappler/optimizers).
    """
    terms = dict[str, tuple[int, set[bool]]]()  # their number, up to 3, and whether they are backpropagation's
    for op in graph.get_operations():
        if op.type in _SUMS and op.outputs[0].dtype.is_floating:
            names = [x.op.name for x in op.inputs]
            inner = [terms[name] for name in names if name in terms]
            count = min(3, len(names) + sum(number for number, _ in inner))
            kinds = {name.startswith("gradient_tape/") for name in names}.union(*(kinds for _, kinds in inner))
            if count > 2 and len(kinds) == 2:
                return True
            terms[op.name] = count, kinds
    return False


def written(graph: tf.Graph) -> Iterator[tuple[tf.Tensor, tf.Operation]]:
    """Yields the resources from outside of all graphs that a graph, or one that it calls, may write, and each op."""
    for outside, inside in graph.captures:
        if inside.dtype == tf.resource and not isinstance(getattr(outside, "graph", None), tf.__internal__.FuncGraph):
            yield from ((outside, op) for op in _writers(inside))


def _writers(handle: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the ops that may write a resource, by its handle in their graph."""
    for op in handle.consumers():
        if op.type.startswith(_KEEPS_STATE) or not any(handle is one for one in may_write(op)):
            continue
        positions = [n - _first_argument(op) for n, tensor in enumerate(op.inputs) if tensor is handle]
        inner = [called.inputs[n] for called in all_called(op) for n in positions if n < len(called.inputs)]
        if op.type in _IDENTITIES:
            inner = list(op.outputs)
        if not inner:
            yield op
        for tensor in inner:
            yield from _writers(tensor)


def _first_argument(op: tf.Operation) -> int:
    """Returns the number of an op's first input that it passes to the graphs that it calls."""
    return 1 if op.type in _BRANCHING else 0


def program_line(op: tf.Operation) -> str | None:
    """Returns "FILE:LINE in FUNCTION" of the program's code that made an op; None if the engine made it for itself."""
    makers = (frame for frame in reversed(op.traceback) if not frame.filename.startswith(_FOR_LAYERS))
    maker = next((frame for frame in makers if not (is_frameworks(frame.filename) or is_pythons(frame.filename))), None)
    if maker is None or maker.filename.startswith(COMPUTING_FILES):
        return None
    return users_line(op.traceback) or f"{maker.filename}:{maker.lineno} in {maker.name}"  # a library's


def writes() -> Counter[int]:
    """Counts the ops of the traced graph, and of those around it, that may write a resource, by its handle's `id`."""
    counts, graph = Counter[int](), tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        counts.update(id(handle) for handle, _ in written(graph))
        graph = graph.outer_graph
    return counts


@dataclasses.dataclass(eq=False)
class _CalledGraph:
    """A graph and its caller, an op whose inputs from number `offset` on are the graph's."""

    graph: tf.Graph
    caller: tf.Operation | None = None
    outside: _CalledGraph | None = None
    offset: int = 0

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The numbers of the graph's inputs, by their names."""
        return {source.name: number for number, source in enumerate(self.graph.inputs)}


def _caller_input(tensor: tf.Tensor, scope: _CalledGraph) -> tuple[tf.Tensor, _CalledGraph] | None:
    """Returns the input of a called graph's caller that a tensor is, with the graph that it is in; None for others."""
    if scope.caller is None or scope.outside is None or tensor.op.type != "Placeholder":
        return None
    number = scope.numbers.get(tensor.name)
    return None if number is None else (scope.caller.inputs[number + scope.offset], scope.outside)


OWN, EXCHANGED, COMMON = "own", "exchanged", "common"


class Assignments:
    """The assignments of a traced step to variables, and what they are computed from.

    Args:
      batch: nest of tensors, the replica's batch.
      per_replica: handles of variables whose values differ by replica.
      since_sum: whether only assignments that follow the engine's last one to their variable count.
    """

    def __init__(self, graph: tf.Graph, batch=(), per_replica: Sequence[tf.Tensor] = (), since_sum: bool = False):
        self._handles = {inside.name: id(outside) for outside, inside in graph.captures}
        tensors = tf.nest.flatten(batch, expand_composites=True)
        self._batch = {tensor.name for tensor in tensors}
        sized = [tensor for tensor in tensors if tensor.shape.rank]
        self._sizes = {tensor.shape[0] for tensor in sized if (tensor.shape[0] or 0) > 1}
        self._per_replica = set(map(id, per_replica))
        self._root = _CalledGraph(graph)
        self._uses: dict[int | None, list[tuple[tf.Operation, _CalledGraph]]] = {}
        self._positions = functools.cache(_positions)
        if self._handles:
            self._note_uses(self._root, since_sum)

    def _note_uses(self, scope: _CalledGraph, since_sum: bool) -> None:
        """Notes the assignments of a graph, and of those that it calls, in their order."""
        for op in scope.graph.get_operations():
            if op.type in _ASSIGNMENTS or op.type.startswith("ResourceScatter"):
                handle = self._handle(op.inputs[0], scope)
                if ENGINE_SCOPE not in op.name:
                    self._uses.setdefault(handle, []).append((op, scope))
                elif since_sum:
                    self._uses.pop(handle, None)
            for inner in all_called(op):
                self._note_uses(_CalledGraph(inner, op, scope, _first_argument(op)), since_sum)

    def depend_on_batch(self, handle: tf.Tensor, by_size: bool = False) -> bool:
        """Whether a variable is assigned values that depend on the replica's batch or on its random numbers.

        Values summed or gathered across replicas are the same on all, and don't count.

        Args:
          by_size: whether a constant that equals the batch's size, known when tracing, counts as depending on it.
        """
        uses = self._uses.get(id(handle), ())
        return any(self._origin(op.inputs[1:], scope, by_size) == OWN for op, scope in uses)

    def exchanged(self, handle: tf.Tensor) -> bool:
        """Whether a variable is assigned values summed or gathered across replicas, that depend on none of its own."""
        uses = self._uses.get(id(handle), ())
        return any(self._origin(op.inputs[1:], scope, by_size=True) == EXCHANGED for op, scope in uses)

    def only_add(self, handle: tf.Tensor) -> bool:
        """Whether all assignments to a variable add something independent of its value."""
        for op, scope in self._uses.get(id(handle), ()):
            if op.type == "AssignVariableOp":
                if self._kind(op, scope, handle) != ADDS:
                    return False
            elif op.type not in ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd"):
                return False
        return True

    def any_to(self, handle: tf.Tensor) -> bool:
        """Whether a variable is assigned anything."""
        return id(handle) in self._uses

    def from_itself(self, handle: tf.Tensor, *values: tf.Tensor) -> bool:
        """Whether a variable is assigned a value computed from its value, other than by adding to it.

        Args:
          *values: the variable's values in the step's graph that were read before the step.
        """
        return any(
            op.type == "AssignVariableOp" and self._kind(op, scope, handle, values) != FREE
            for op, scope in self._uses.get(id(handle), ())
        )

    def _kind(self, op: tf.Operation, scope: _CalledGraph, handle: tf.Tensor, before: Sequence[tf.Tensor] = ()) -> str:
        """How an assignment to a variable depends on its value."""
        reads = [read for read in scope.graph.get_operations() if read.type == "ReadVariableOp"]
        values = [read.outputs[0] for read in reads if self._handle(read.inputs[0], scope) == id(handle)]
        return dependence(op.inputs[1], [*values, *(before if scope is self._root else ())])

    def _outside(self, tensor: tf.Tensor, scope: _CalledGraph) -> tuple[tf.Tensor, _CalledGraph]:
        """Follows an input of a called graph to where it was computed."""
        while out := _caller_input(tensor, scope):
            tensor, scope = out
        return tensor, scope

    def _handle(self, tensor: tf.Tensor, scope: _CalledGraph) -> int | None:
        tensor, scope = self._outside(tensor, scope)
        return self._handles.get(tensor.name) if scope is self._root else None

    def _is_size(self, tensor: tf.Tensor) -> bool:
        """Whether a constant is the batch's size or shape, known to TensorFlow when tracing."""
        is_shape = tensor.shape.rank == 1 and tensor.op.name.split("/")[-1].startswith("Shape")
        if tensor.op.type != "Const" or not self._sizes or not (tensor.shape.rank == 0 or is_shape):
            return False
        return bool(self._sizes.intersection(tf.get_static_value(tensor).reshape(-1).tolist()))

    def _origin(self, tensors: Sequence[tf.Tensor], scope: _CalledGraph, by_size: bool) -> str:
        """Returns whether values are computed from a replica's OWN, else from what was EXCHANGED, or from neither."""
        queue, seen, origin = [(tensor, scope) for tensor in tensors], set(), COMMON
        for inner, inner_scope in queue:
            tensor, scope = self._outside(inner, inner_scope)
            if (name := (id(scope), tensor.name)) in seen:
                continue
            seen.add(name)
            op = tensor.op
            if (scope is self._root and tensor.name in self._batch) or REPLICA_SCOPE in op.name:
                return OWN
            if samples(op):
                return OWN
            if by_size and self._is_size(tensor):
                return OWN
            if exchanges(op):
                origin = EXCHANGED
                continue
            if op.type == "ReadVariableOp":
                handle = self._handle(op.inputs[0], scope)
                if handle in self._per_replica:
                    return OWN
                for use, use_scope in self._uses.get(handle, ()):
                    positions = self._positions(scope.graph)
                    if use_scope is not scope or positions[use.name] < positions[op.name]:
                        queue += [(value, use_scope) for value in use.inputs[1:]]
            queue += [(value, scope) for value in value_inputs(tensor)]
        return origin


def hidden_by_custom_gradients(results: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]) -> set[str]:
    """Finds sources that functions with custom gradients compute with and do not have as arguments.

    A tape passes no gradient to these.

    Args:
      results: tensors of one graph, computed from the functions' results.
      sources: captured by that graph, or in it.

    Returns:
      The names of the sources from which, along ops that pass gradients on, a function's result is computed.
    """
    if not any(op.type == "IdentityN" and _is_custom(op) for op in operations(results[0].graph)):
        return set()
    root, scopes = _CalledGraph(results[0].graph), dict[tuple, _CalledGraph]()
    captured = {id(outside): inside for outside, inside in root.graph.captures}
    names = {captured.get(id(source), source).name: source.name for source in sources}
    hidden, seen, nothing = set(), set(), frozenset[tuple]()
    queue = [(tensor, root, nothing) for tensor in results]
    for inner, inner_scope, arguments in queue:  # these of the functions within which `inner` is
        tensor, scope = inner, inner_scope
        while (key := (id(scope), tensor.name)) not in arguments and (out := _caller_input(tensor, scope)):
            tensor, scope = out
        op = tensor.op
        if key in arguments or (key, arguments) in seen or op.type == "StopGradient" or not tensor.dtype.is_floating:
            continue
        seen.add((key, arguments))
        if scope is root and tensor.name in names:
            hidden |= {names[tensor.name]} if arguments else set()
        elif op.type == "IdentityN" and _is_custom(op):
            rest = [source for source in op.inputs if source is not op.inputs[tensor.value_index]]
            within = frozenset((id(scope), source.name) for source in rest)
            queue += [(source, scope, arguments) for source in rest]
            queue.append((op.inputs[tensor.value_index], scope, arguments | within))
        else:
            queue += [(source, scope, arguments) for source in op.inputs]
        for number, graph in enumerate(all_called(op)):
            call = id(scope), op.name, number
            called = scopes.setdefault(call, _CalledGraph(graph, op, scope, _first_argument(op)))
            queue += [(output, called, arguments) for output in graph.outputs]
    return hidden


def _is_custom(op: tf.Operation) -> bool:
    return "_gradient_op_type" in op.node_def.attr


def is_collective(op: tf.Operation) -> bool:
    """Whether an op exchanges values with other devices or processes."""
    return op.type.startswith(_COLLECTIVES)


def of_another_replica(graph: tf.Graph) -> tuple[tf.Operation, tf.Operation] | None:
    """Finds an op of one replica that takes a tensor of another of the process, and the op that made that.

    What replicas exchange is computed in the thread that waits for theirs.
    """
    for op in graph.get_operations():
        for source in (tensor.op for tensor in op.inputs):
            if _replica(source) not in ("", _replica(op)) and any(map(_is_replica_thread, op.traceback)):
                return op, source
    return None


def _is_replica_thread(frame: traceback.FrameSummary) -> bool:
    return frame.name == "run" and frame.filename.endswith("/distribute/mirrored_run.py")


def _replica(op: tf.Operation) -> str:
    """Returns the name scope of an op's replica; "" for the process's first, and outside of replicas."""
    found = _REPLICA.search(op.name)
    return found[2] if found else ""


def exchanges(op: tf.Operation) -> bool:
    """Whether an op's result is the same on all replicas: a collective's, or what joins values of several replicas.

    In one process TensorFlow may concatenate or add these without a collective, outside of the replicas' name scopes.
    """
    if is_collective(op):
        return True
    return not _replica(op) and any(_replica(source.op) for source in op.inputs)


def value_inputs(output: tf.Tensor) -> list[tf.Tensor]:
    """Lists the inputs of its op that an output's values depend on."""
    op = output.op
    if op.type == "IdentityN":  # of a function with a custom gradient: its results, then its arguments
        return [op.inputs[output.value_index]]
    return list(op.inputs)[:1] if op.type in _DEPENDING_ON_FIRST else list(op.inputs)


def _positions(graph: tf.Graph) -> dict[str, int]:
    return {op.name: position for position, op in enumerate(graph.get_operations())}


def _dependents(on: Sequence[tf.Tensor]) -> set[str]:
    """Lists the names of tensors of one graph, and of all whose values depend on theirs."""
    dependent, queue = {tensor.name for tensor in on}, list(on)
    for tensor in queue:
        for op in tensor.consumers():
            new = [output for output in op.outputs if output.name not in dependent]
            if not new or op.type in _SHAPE_OPS or exchanges(op):
                continue
            new = [output for output in new if any(source.name in dependent for source in value_inputs(output))]
            dependent.update(output.name for output in new)
            queue += new
    return dependent


def compared_with(tensors: Sequence[tf.Tensor]) -> set[float]:
    """Finds the finite constants to which an op compares what is computed from tensors of a graph.

    Of arrays of more than 16, only the smallest and largest count. The depth of a one-hot encoding is one, too.
    """
    numbers, queue = set[float](), [(tensor.graph, _dependents(tensors)) for tensor in tensors[:1]]
    for graph, dependent in queue:
        outside = _captured(graph)
        for op in graph.get_operations():
            if dependent and not any(tensor.name in dependent for tensor in op.inputs):
                continue
            queue += [(inner, set()) for inner in all_called(op)]
            for tensor in op.inputs if op.type in _COMPARISONS else ():
                value = tf.get_static_value(outside.get(tensor.name, tensor))
                if value is not None and np.issubdtype(value.dtype, np.number):
                    finite = np.unique(value[np.isfinite(value)]).astype(float)
                    numbers.update(finite if finite.size <= 16 else finite[[0, -1]])
    return numbers


def _captured(graph: tf.Graph) -> dict[str, tf.Tensor]:
    """Finds the tensors outside of a function that it has captured, by their names in it; without handles."""
    return {inside.name: outside for outside, inside in graph.captures if outside.dtype != tf.resource}


def computed_in(tensor: tf.Tensor, function: str, file: str) -> bool:
    """Returns whether a tensor is computed from a scalar that a function made in its graph, by the function's name."""
    queue, seen = [tensor.op], set()
    for op in queue:
        if op.name in seen or not op.inputs:
            continue
        seen.add(op.name)
        is_scalar = any(output.shape.rank == 0 for output in op.outputs)
        if is_scalar and any(frame.name == function and frame.filename == file for frame in op.traceback):
            return True
        queue += [source.op for source in op.inputs]
    return False


def shapes_of_penalties(total: tf.Tensor, on: Sequence[tf.Tensor]) -> set[tuple[int | None, ...]]:
    """Finds the shapes of what a scalar's terms that depend on no tensor of a batch are computed from, as of weights.

    A forward pass computes with weights, too, but mostly makes no scalar of them before it computes with the batch.
    """
    dependent, shapes, seen, queue = _dependents(on), set(), set(), [(total, False)]
    for tensor, is_penalty in queue:
        is_penalty |= tensor.shape.rank == 0 and tensor.name not in dependent
        if (tensor.name, is_penalty) not in seen:
            seen.add((tensor.name, is_penalty))
            shapes |= {tuple(tensor.shape)} if is_penalty and tensor.shape.rank else set()
            queue += [(source, is_penalty) for source in value_inputs(tensor)]
    return shapes


def joined_examples(
    total: tf.Tensor, on: Sequence[tf.Tensor], divisor: float, size: int | None
) -> Iterator[tuple[tf.Tensor, float]]:
    """Yields the examples, tensors of a batch, that a scalar is computed from by other ops than a mean.

    With each comes `divisor`, or a constant on the way by which it is divided, if that is a multiple of the size. What
    is multiplied or divided by a number that is known only as the graph runs, such as a batch's shape, may be a mean:
    it is left out, and so is what a loop computes, except of the batch's axis.

    Args:
      size: the length of the batch's axis, if it is known; the axis may be merged with others.
    """
    dependent, batched = _dependents(on), {tensor.name for tensor in on if tensor.shape.rank}
    outputs = (output for op in total.graph.get_operations() for output in op.outputs)
    for output in (output for output in outputs if output.name in dependent and output.shape.rank):
        length, inputs = output.shape[0], [source for source in value_inputs(output) if source.name in batched]
        is_moved = output.op.type in ("Reshape", "Transpose")
        if length in (size, None) or any(is_moved or source.shape[0] == length for source in inputs):
            batched.add(output.name)
    queue, seen = [(total, divisor)], set()
    for tensor, divided in queue:
        op, inputs = tensor.op, [x for x in value_inputs(tensor) if x.name in dependent and x.dtype in _PASSING]
        if (tensor.name, divided) in seen or not inputs:
            continue
        seen.add((tensor.name, divided))
        joined = next((source for source in inputs if source.name in batched), None)
        if op.type in _CALLS | _BRANCHING:
            arguments = list(op.inputs)[_first_argument(op) :]
            for graph in all_called(op):
                both = zip(arguments, graph.inputs, strict=True)
                passed = [inside for outside, inside in both if outside.name in dependent]
                yield from joined_examples(graph.outputs[tensor.value_index], passed, divided, size)
        elif op.type in _PRODUCTS:
            number = 1 if op.inputs[0] is inputs[0] else 0
            factor = tf.get_static_value(op.inputs[number])
            if factor is not None and factor.size == 1 and factor.all() and (number or op.type == "Mul"):
                constant = 1 / factor.item() if op.type == "Mul" else factor.item()
                counts = (round(x) for x in (divided, constant, divided * constant) if size and _is_multiple(x, size))
                queue.append((inputs[0], next(counts, divided)))
        elif joined is None:
            queue += [(source, divided) for source in inputs]
        elif op.type == "TensorListFromTensor" and joined.shape[0] != size:  # of a loop over another axis
            continue
        elif op.type != "Mean" and not all_called(op):
            yield joined, divided


def _is_multiple(number: float, size: int) -> bool:
    """Whether a number that float32 has rounded is a multiple of a size."""
    return round(number / size) > 0 and abs(number / size / round(number / size) - 1) < 1e-6


def static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns a tensor's value if it is known when tracing, also that of a function that is called."""
    while tensor.op.type in _CALLS:
        tensor = all_called(tensor.op)[0].outputs[tensor.value_index]
    return tf.get_static_value(tensor)


FREE, ADDS, AFFINE, OTHER = "free", "adds", "affine", "other"


def dependence(tensor: tf.Tensor, on: Sequence[tf.Tensor]) -> str:
    """Finds how a tensor depends on others of its graph, which all have one value v.

    Returns:
      FREE: not at all; ADDS: it is v plus something; AFFINE: v times something plus something; OTHER: in another way.
      The factors and terms are independent of v, or the same on all replicas.
    """
    dependent, start = _dependents(on), {tensor.name for tensor in on}

    @without_recursion
    def kind(tensor: tf.Tensor) -> Generator[tuple, str, str]:
        if tensor.name not in dependent:
            return FREE
        if tensor.name in start:
            return ADDS
        op, kinds = tensor.op, []
        if op.type not in _AFFINE_OPS | _IDENTITIES:
            return OTHER
        for source in value_inputs(tensor):
            kinds.append((yield (source,)))
        if op.type in _IDENTITIES:
            return kinds[0]
        if OTHER in kinds:
            return OTHER
        if op.type in ("Add", "AddV2", "AddN", "Sub"):
            dependences = [one for one in kinds if one != FREE]
            return ADDS if dependences == [ADDS] and not (op.type == "Sub" and kinds[0] == FREE) else AFFINE
        if op.type == "SelectV2":
            if kinds[0] != FREE or FREE in kinds[1:]:
                return OTHER
            return ADDS if kinds[1:] == [ADDS, ADDS] else AFFINE
        if op.type == "Cast":
            return kinds[0] if op.inputs[0].dtype == op.outputs[0].dtype else AFFINE
        factors = [one for one in kinds if one != FREE]
        return AFFINE if len(factors) == 1 and (op.type != "RealDiv" or kinds[1] == FREE) else OTHER

    return kind(tensor)


def to_function(tensor: tf.Tensor, on: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., tf.Tensor]]:
    """Finds how a tensor, ADDS or AFFINE, is computed from another of its graph, to compute it from other values.

    Returns:
      (terms, compute): the tensors independent of `on` that it is computed from, and a function of a value in place of
      `on` and of the terms, which adds ops to the current graph.
    """
    dependent, terms, seen, queue = _dependents([on]), {}, {on.name}, [tensor]
    for source in queue:
        if source.name in seen:
            continue
        seen.add(source.name)
        if source.name in dependent:
            queue += value_inputs(source)
        else:
            terms[source.name] = source

    def compute(value: tf.Tensor, *copies: tf.Tensor) -> tf.Tensor:
        values = {on.name: value, **dict(zip(terms, copies, strict=True))}

        @without_recursion
        def copy(original: tf.Tensor) -> Generator[tuple, tf.Tensor, tf.Tensor]:
            if original.name in values:
                return values[original.name]
            op, inputs = original.op, []
            for source in value_inputs(original):
                inputs.append((yield (source,)))
            if op.type in _IDENTITIES:
                return inputs[0]
            attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
            return op.graph.create_op(op.type, inputs, [original.dtype], attrs=attributes).outputs[0]

        return copy(tensor)

    return [*terms.values()], compute


class Computation(NamedTuple):
    """How a tensor is computed from the values of variables alone.

    Attributes:
      variables: the numbers of the variables that it is computed from.
      outputs: the tensors on the way, which depend on them.
      compute: a function of the values of these variables.
    """

    variables: list[int]
    outputs: list[tf.Tensor]
    compute: Callable[..., tf.Tensor]


def computation(tensor: tf.Tensor, handles: Sequence[tf.Tensor]) -> Computation | None:
    """Finds how a tensor is computed from the values of variables, by their handles outside of the tensor's graph.

    Returns:
      None if it is independent of them.

    Raises:
      UsageError: it depends on anything else, too, or on a variable within a function that its graph calls.
    """
    tensor, numbers = tf.identity(tensor), {id(handle): number for number, handle in enumerate(handles)}
    captured = [(inside, numbers[id(outside)]) for outside, inside in tensor.graph.captures if id(outside) in numbers]
    dependent = _dependents([inside for inside, _ in captured])
    if tensor.name not in dependent:
        return None
    outside = _captured(tensor.graph)
    by_handle, reads = {inside.name: number for inside, number in captured}, dict[str, tuple[int, tf.TensorSpec]]()
    ops, constants, queue = dict[str, tf.Operation](), dict[str, np.ndarray](), [tensor]
    for value in queue:
        op = value.op
        if op.type == "ReadVariableOp" and op.inputs[0].name in by_handle:
            reads[value.name] = by_handle[op.inputs[0].name], tf.TensorSpec(value.shape, value.dtype)
        elif value.name in outside and not tf.is_symbolic_tensor(outside[value.name]):
            constants[value.name] = outside[value.name].numpy()
        elif op.type == "Placeholder" or op.op_def.is_stateful:
            raise UsageError(program_line(op) or op.name)
        elif op.name not in ops:
            ops[op.name] = op
            queue += op.inputs
    graph_def, name = tf.compat.v1.GraphDef(versions=tensor.graph.graph_def_versions), tensor.name
    for op in ops.values():
        node = graph_def.node.add(name=op.name, op=op.type, input=[source.name for source in op.inputs])
        for key, attribute in op.node_def.attr.items():
            if not key.startswith("_"):  # of gradients, devices and XLA
                node.attr[key].CopyFrom(attribute)
    if any(map(all_called, ops.values())):
        graph_def.library.CopyFrom(tensor.graph.as_graph_def().library)

    def compute(*values: tf.Tensor) -> tf.Tensor:
        given = {**dict(zip(reads, values, strict=True)), **{key: tf.constant(x) for key, x in constants.items()}}
        return tf.graph_util.import_graph_def(graph_def, given, [name], name="")[0]

    outputs = [output for op in ops.values() for output in op.outputs if output.name in dependent]
    variables, specs = zip(*reads.values(), strict=True)
    with tf.init_scope():
        return Computation([*variables], outputs, tf.function(compute, autograph=False).get_concrete_function(*specs))
