"""Computes the most bytes that a traced step holds at once, of its tensors by their lifetimes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from ...engine.internals import graphs
from .traced_ops import BRANCHES, CALLS, LOOPS, NotCountableError, needed, tensor_bytes, through_identities, trips

# Ops whose outputs are their inputs' memory, or a variable's, or the caller's.
VIEWS = {
    *("Bitcast", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze"),
    *("StopGradient", "TensorListFromTensor", "TensorListPushBack", "TensorListSetItem"),
}
OUTSIDE = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}
# Ops that write to an input's memory if nothing else uses it (TensorFlow's forward_input).
_IN_PLACE = {
    *("Add", "AddN", "AddV2", "BiasAdd", "Cast", "DivNoNan", "Erf", "Exp", "LogSoftmax", "Maximum", "Minimum", "Mul"),
    *("Neg", "Pow", "RealDiv", "Relu", "ReluGrad", "Rsqrt", "SelectV2", "Sigmoid", "SigmoidGrad", "Softmax", "Sqrt"),
    *("Square", "Sub", "Tanh", "TanhGrad"),
}

_UPDATES = ("ResourceApply", "AssignAdd", "AssignSub")  # of a variable's memory: prefixes
_ADD = ("TensorListPushBack", "TensorListSetItem")  # an item to a list: for gradients, which stay longest, and others


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of a step at which its tensors take most.

    Attributes:
      total: bytes of all tensors that the step makes; without variables and the batch.
      gradients: bytes of those that are gradients of variables, and of the messages made from them.
      uncertain: a line for each part of `total` that may differ much.
    """

    total: float
    gradients: float
    uncertain: tuple[str, ...] = ()


def peak(graph: tf.Graph, gradients: Collection[int] = (), runs_in_parallel: bool = True) -> Peak:
    """Follows a graph's tensors from the op that makes each to the last that uses it.

    Ops run in the order in which they become ready, as TensorFlow's executor starts them: parts of a graph that do not
    wait for each other, such as parallel micro-batches, hold their tensors at the same time. Of branches the larger
    counts. Of a loop, its largest turn counts, and what all turns add to lists, which its gradient's loop removes
    again.

    Args:
      gradients: the `id`s of tensors that count as gradients.
      runs_in_parallel: whether ops that do not wait for each other end in any order, as on a CPU's threads.
    """
    wanted = set(needed(graph))
    # TensorFlow copies a variable to read it, once rows of it were updated in place.
    by_rows = {id(op.inputs[0]) for op in wanted if op.type.startswith("ResourceScatter")}
    copies = {op for op in wanted if op.type == "ReadVariableOp" and id(op.inputs[0]) in by_rows}
    ops = [op for op in graph.get_operations() if op in copies or (op in wanted and op.type not in OUTSIDE)]
    predecessors = _predecessors(ops)
    ops = _in_turn(predecessors)
    holder = _Holder(gradients, runs_in_parallel, _copies_by_updates(ops, predecessors) if runs_in_parallel else {})
    for op in ops:
        holder.uses.update(id(tensor) for tensor in op.inputs)
    holder.uses.update(id(tensor) for tensor in graph.outputs)
    for op in ops:
        holder.execute(op)
    return dataclasses.replace(holder.peak, uncertain=tuple(sorted(holder.uncertain)))


def _predecessors(ops: Sequence[tf.Operation]) -> dict[tf.Operation, set[tf.Operation]]:
    """Maps each of some ops to those of them that it waits for, also by way of others, such as variables' reads."""
    predecessors: dict[tf.Operation, set[tf.Operation]] = {op: set() for op in ops}
    for op, found in predecessors.items():
        queue, seen = [op], {op}
        for follower in queue:
            for other in (*(tensor.op for tensor in follower.inputs), *follower.control_inputs):
                if other not in seen:
                    seen.add(other)
                    if other in predecessors:
                        found.add(other)
                    else:
                        queue.append(other)
    return predecessors


def _in_turn(predecessors: Mapping[tf.Operation, Collection[tf.Operation]]) -> list[tf.Operation]:
    """Orders ops as they become ready."""
    waiting = {op: len(before) for op, before in predecessors.items()}
    followers: dict[tf.Operation, list[tf.Operation]] = {op: [] for op in predecessors}
    for op, before in predecessors.items():
        for other in before:
            followers[other].append(op)
    queue = [op for op, number in waiting.items() if not number]
    for op in queue:
        for follower in followers[op]:
            waiting[follower] -= 1
            if not waiting[follower]:
                queue.append(follower)
    return queue


def _copies_by_updates(
    in_turn: Sequence[tf.Operation], predecessors: Mapping[tf.Operation, Collection[tf.Operation]]
) -> dict[tf.Operation, int]:
    """Computes the bytes of a copy that TensorFlow makes for an update while another op may still use the old value.

    Such an op is the gradient of a layer's inputs: it reads the kernel, and the kernel's update does not wait for it.
    """
    users: dict[tf.Operation, list[tf.Operation]] = {}  # users of the value before an update
    sizes: dict[tf.Operation, int] = {}
    for op in in_turn:
        if op.type.startswith(_UPDATES):
            reads = [read for read in op.control_inputs if read.type == "ReadVariableOp"]
            values = [read.outputs[0] for read in reads if read.inputs[0] is op.inputs[0]]
            sizes[op], users[op] = max(map(tensor_bytes, values), default=0), []
            for value in values:
                for user in value.consumers():
                    if user.type in VIEWS:
                        values += user.outputs
                    elif user in predecessors:
                        users[op].append(user)
    bits = {user: 1 << number for number, user in enumerate({user for using in users.values() for user in using})}
    ended: dict[tf.Operation, int] = {}  # bits of the users that have ended once an op has
    for op in in_turn:
        ended[op] = bits.get(op, 0)
        for before in predecessors[op]:
            ended[op] |= ended[before]
    return {op: sizes[op] for op, using in users.items() if any(bits[user] & ~ended[op] for user in using)}


def _bytes_added_to_lists(loop: tf.Operation) -> dict[int, int]:
    """Computes the bytes that a loop's turns add to its lists, by the number of the loop's output.

    A tensor that several lists have, or that the next turn starts from, is in memory once; variables, and what is the
    same in each turn, are there anyway.

    Raises:
      NotCountableError: the number of turns is unknown.
    """
    body = graphs.called(loop, "body")
    inputs = {id(tensor): number for number, tensor in enumerate(body.inputs)}

    def owner(tensor: tf.Tensor) -> tf.Tensor | None:
        """Finds the tensor with the memory of a turn's tensor; None if the turn does not make it."""
        tensor = _owner(tensor)
        if (number := inputs.get(id(tensor))) is not None:
            tensor = _owner(body.outputs[number])  # from the previous iteration
        return None if tensor.op.type in OUTSIDE else tensor

    items: list[tuple[int, int, tf.Tensor]] = []
    for number, output in enumerate(body.outputs):
        queue = [output.op] if output.dtype == tf.variant else []
        reached = set(queue)
        for op in queue:  # back to the list as the turn got it
            if op.type in _ADD and (item := owner(op.inputs[-1])) is not None:
                items.append((_ADD.index(op.type), number, item))
            if op.type not in (*LOOPS, *BRANCHES, *CALLS):
                lists = op.inputs[:1] if op.type in _ADD else op.inputs
                new = [tensor.op for tensor in lists if tensor.dtype == tf.variant and tensor.op not in reached]
                reached.update(new)
                queue += new
    added, seen = collections.defaultdict[int, int](int), set[int]()
    for _, number, item in sorted(items, key=lambda found: found[:2]):
        if id(item) not in seen:
            seen.add(id(item))
            is_list = item.dtype == tf.variant and item.op.type in LOOPS  # of a loop within
            inner = _bytes_added_to_lists(item.op) if is_list else {item.value_index: tensor_bytes(item)}
            added[number] += inner.get(item.value_index, 0)
    return {number: size * trips(loop) for number, size in added.items() if size}


def _owner(tensor: tf.Tensor) -> tf.Tensor:
    """Finds the tensor whose memory a view has."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[min(tensor.value_index, len(tensor.op.inputs) - 1)]
    return tensor


class _Holder:
    """Holds tensors' buffers as a graph's ops are executed in turn.

    Attributes:
      uses: number of uses still to come of each tensor, by its `id`.
      peak, uncertain: result so far, see `Peak`.
    """

    def __init__(self, gradients: Collection[int], runs_in_parallel: bool, copies: Mapping[tf.Operation, int]):
        self.peak, self.uncertain = Peak(0.0, 0.0), set[str]()
        self.uses: collections.Counter[int] = collections.Counter()
        self._gradients, self._runs_in_parallel, self._copies = gradients, runs_in_parallel, copies
        self._buffer: dict[int, int] = {}  # of a tensor, the one whose memory it shares
        self._left: collections.Counter[int] = collections.Counter()  # uses of each buffer
        self._bytes: dict[int, int] = {}  # sizes of held buffers
        self._gradient_buffers: set[int] = set()
        self._held_bytes = self._gradient_bytes = 0

    def execute(self, op: tf.Operation) -> None:
        inputs = [self._buffer.get(id(tensor), id(tensor)) for tensor in op.inputs]
        called = graphs.all_called(op) if op.type in (*CALLS, *BRANCHES, *LOOPS) else ()
        peaks = [peak(graph, self._gradients, self._runs_in_parallel) for graph in called]
        self.uncertain.update(line for inner in peaks for line in inner.uncertain)
        if peaks:
            inner = max(peaks, key=lambda one: one.total)
            self._note_peak(inner.total, inner.gradients)
        self._note_peak(self._copies.get(op, 0))
        if op.type in LOOPS:
            self._end_loop(op, inputs)
            return
        self._make_outputs(op, inputs)
        self._release(inputs)

    def _end_loop(self, loop: tf.Operation, inputs: list[int]) -> None:
        """Replaces what a loop begins with by what it ends with: turns free the one as they make the other."""
        body = graphs.called(loop, "body")
        try:
            added = _bytes_added_to_lists(loop)
        except NotCountableError:
            added = {}
            without = f"without what turns of {loop.name} keep: their number is not in the graph"
            self.uncertain.add(f"the memory is a lower bound, {without}")
        for number, tensor in enumerate(loop.outputs):
            if through_identities(body.outputs[number]) is body.inputs[number]:
                self._share(tensor, inputs[number])
        self._release(inputs)
        for number, tensor in enumerate(loop.outputs):
            if id(tensor) not in self._buffer:
                self._allocate(tensor, added.get(number))
        self._free_unused(loop)

    def _make_outputs(self, op: tf.Operation, inputs: list[int]) -> None:
        uses = collections.Counter(inputs)
        for number, tensor in enumerate(op.outputs):
            if op.type in VIEWS:
                self._share(tensor, inputs[min(number, len(inputs) - 1)])
                continue
            reused = None
            if number == 0 and op.type in _IN_PLACE:
                size = tensor_bytes(tensor)
                fitting = (b for b in inputs if self._bytes.get(b) == size and self._left[b] == uses[b])
                reused = next(fitting, None)
            if reused is None:
                self._allocate(tensor)
            else:
                self._share(tensor, reused)
        self._free_unused(op)

    def _allocate(self, tensor: tf.Tensor, size: int | None = None) -> None:
        self._bytes[id(tensor)] = size = tensor_bytes(tensor) if size is None else size
        self._held_bytes += size
        self._share(tensor, id(tensor))
        self._note_peak()

    def _share(self, tensor: tf.Tensor, buffer: int) -> None:
        self._buffer[id(tensor)] = buffer
        self._left[buffer] += self.uses[id(tensor)]
        if id(tensor) in self._gradients and buffer in self._bytes and buffer not in self._gradient_buffers:
            self._gradient_buffers.add(buffer)
            self._gradient_bytes += self._bytes[buffer]

    def _release(self, buffers: Iterable[int]) -> None:
        for buffer in buffers:
            self._left[buffer] -= 1
            if self._left[buffer] == 0:
                self._free(buffer)

    def _free_unused(self, op: tf.Operation) -> None:
        for tensor in op.outputs:
            if not self.uses[id(tensor)] and self._buffer.get(id(tensor)) == id(tensor):
                self._free(id(tensor))

    def _free(self, buffer: int) -> None:
        size = self._bytes.pop(buffer, 0)
        self._held_bytes -= size
        if buffer in self._gradient_buffers:
            self._gradient_buffers.discard(buffer)
            self._gradient_bytes -= size

    def _note_peak(self, more: float = 0.0, more_gradients: float = 0.0) -> None:
        if self._held_bytes + more > self.peak.total:
            self.peak = Peak(float(self._held_bytes + more), float(self._gradient_bytes + more_gradients))
