"""Computes the most bytes that a traced step holds at once, of its tensors by their lifetimes. Host code."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

import tensorflow as tf

from ...engine.internals import graphs
from .cost import BRANCHES, CALLS, LOOPS, bytes_of, needed, server_of

# Ops whose outputs are their inputs' memory, or a variable's, or the caller's.
VIEWS = {
    *("Bitcast", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze"),
    *("StopGradient",),
}
OUTSIDE = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}
# Ops that write to an input's memory if nothing else uses it (TensorFlow's forward_input).
_IN_PLACE = {
    *("Add", "AddN", "AddV2", "BiasAdd", "Cast", "DivNoNan", "Erf", "Exp", "LogSoftmax", "Maximum", "Minimum", "Mul"),
    *("Neg", "Pow", "RealDiv", "Relu", "ReluGrad", "Rsqrt", "SelectV2", "Sigmoid", "SigmoidGrad", "Softmax", "Sqrt"),
    *("Square", "Sub", "Tanh", "TanhGrad"),
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of a step at which its tensors take most.

    Attributes:
      total: bytes of all tensors that the step makes; without variables and the batch.
      gradients: those of them that are gradients of variables, and what is made of them to be sent.
    """

    total: float
    gradients: float


def peak(graph: tf.Graph, gradients: Collection[int] = ()) -> Peak:
    """Follows a graph's tensors from the op that makes each to the last that uses it.

    Ops run in the order in which they become ready, as TensorFlow's executor starts them: parts of a graph that do not
    wait for each other, such as parallel micro-batches, hold their tensors at the same time. Tensors on parameter
    servers are not counted, but those that come from there are, from their arrival on. Of branches the larger counts.

    Args:
      graph: of a function.
      gradients: the `id`s of tensors that count as gradients.
    """
    wanted = set(needed(graph))
    ops = _in_turn([op for op in graph.get_operations() if op in wanted and op.type not in OUTSIDE])
    held = _Held(gradients)
    for op in ops:
        held.uses.update(id(tensor) for tensor in op.inputs)
    held.uses.update(id(tensor) for tensor in graph.outputs)
    for op in ops:
        held.execute(op)
    return held.peak


def _in_turn(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns ops in the order in which they become ready."""
    before = {op: {*(tensor.op for tensor in op.inputs), *op.control_inputs} for op in ops}
    waiting = {op: sum(each in before for each in those) for op, those in before.items()}
    after: dict[tf.Operation, list[tf.Operation]] = {op: [] for op in ops}
    for op in ops:
        for each in before[op]:
            if each in after:
                after[each].append(op)
    queue = [op for op in ops if not waiting[op]]
    for op in queue:
        for each in after[op]:
            waiting[each] -= 1
            if not waiting[each]:
                queue.append(each)
    return queue


class _Held:
    """The tensors that are held as a graph's ops are executed in turn."""

    def __init__(self, gradients: Collection[int]):
        self.peak = Peak(0.0, 0.0)
        self.uses: collections.Counter[int] = collections.Counter()  # that are still to come
        self._gradients = gradients
        self._buffer: dict[int, int] = {}  # of a tensor, the one whose memory it shares
        self._left: collections.Counter[int] = collections.Counter()  # uses of each buffer
        self._bytes: dict[int, int] = {}  # of held buffers
        self._is_gradient: set[int] = set()
        self._now = self._of_gradients = 0

    def execute(self, op: tf.Operation) -> None:
        is_here, inputs = not server_of(op), [self._buffer.get(id(each), id(each)) for each in op.inputs]
        if is_here:
            for tensor in op.inputs:  # from a server
                if server_of(tensor.op) and id(tensor) not in self._buffer and bytes_of(tensor):
                    self._make(tensor)
            inputs = [self._buffer.get(id(each), id(each)) for each in op.inputs]
            called = graphs.all_called(op) if op.type in (*CALLS, *BRANCHES, *LOOPS) else ()
            inner = max((peak(each, self._gradients) for each in called), key=lambda each: each.total, default=None)
            if inner:
                self._note(inner.total, inner.gradients)
            self._outputs(op, inputs)
        for buffer in inputs:
            self._left[buffer] -= 1
            if self._left[buffer] == 0:
                self._free(buffer)

    def _outputs(self, op: tf.Operation, inputs: list[int]) -> None:
        uses = collections.Counter(inputs)
        for number, tensor in enumerate(op.outputs):
            if op.type in VIEWS:
                self._share(tensor, inputs[min(number, len(inputs) - 1)])
                continue
            size = bytes_of(tensor)
            reused = None
            if number == 0 and op.type in _IN_PLACE:
                fits = (each for each in inputs if self._bytes.get(each) == size and self._left[each] == uses[each])
                reused = next(fits, None)
            if reused is None:
                self._make(tensor)
            else:
                self._share(tensor, reused)
        for tensor in op.outputs:
            if not self.uses[id(tensor)] and self._buffer.get(id(tensor)) == id(tensor):
                self._free(id(tensor))

    def _make(self, tensor: tf.Tensor) -> None:
        self._bytes[id(tensor)] = size = bytes_of(tensor)
        self._now += size
        self._share(tensor, id(tensor))
        self._note()

    def _share(self, tensor: tf.Tensor, buffer: int) -> None:
        self._buffer[id(tensor)] = buffer
        self._left[buffer] += self.uses[id(tensor)]
        if id(tensor) in self._gradients and buffer in self._bytes and buffer not in self._is_gradient:
            self._is_gradient.add(buffer)
            self._of_gradients += self._bytes[buffer]

    def _free(self, buffer: int) -> None:
        size = self._bytes.pop(buffer, 0)
        self._now -= size
        if buffer in self._is_gradient:
            self._is_gradient.discard(buffer)
            self._of_gradients -= size

    def _note(self, more: float = 0.0, of_gradients: float = 0.0) -> None:
        if self._now + more > self.peak.total:
            self.peak = Peak(float(self._now + more), float(self._of_gradients + of_gradients))
