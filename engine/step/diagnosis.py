"""Finds, while a step is traced, mistakes that only the running code shows: the rest is `engine.checks`.

Text used as numbers by a loss, ids and labels out of range, weights that get no gradient; and, before a run, large ids
used as numbers. Replica code, except `warn_of_rounded`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .. import logging
from ..data.arrays import Mapped
from ..data.form import named_arrays
from ..errors import UsageError
from ..internals import keras
from ..internals.graphs import hidden_by_custom_gradients, joined_examples, shapes_of_penalties, static_value
from ..internals.variables import tf_variable, variable_path
from ..metrics.pairs import Mean, Outside, Pair
from .context import step_context

_EXACT = 1 << 24  # up to here float32 represents all whole numbers
_PIECE_BYTES = 64 << 20  # checked at once
# Ops that pass on the values of their input, the first if there are several.
_BY_FIRST = {*"Cast ExpandDims GatherV2 Identity Reshape Slice Squeeze StridedSlice Transpose".split()}
_BY_ALL = {"ConcatV2", "Pack"}
# Ops whose ids or labels XLA and GPUs do not check to be in range, and the word for them. TensorFlow's CPU kernels
# raise; XLA takes another row instead, GPUs zeros.
_NUMBERED = {"GatherV2": "ids", "ResourceGather": "ids", "SparseSoftmaxCrossEntropyWithLogits": "labels"}
_ROUNDED = (
    "%s: whole numbers up to %s become float32 in the model, which represents them exactly up to %s; subtract an "
    "offset, divide them, or look them up as ids"
)
_PENALTIES_TWICE = (
    "%s: it adds what layers' `losses` have (regularizers, add_loss), which training adds by itself, so they count "
    "twice; leave them out"
)
_PENALTIES_LEFT_OUT = (
    "%s: the regularizer of %s is not minimized, since the loss that minimize gets has to add it; add "
    "tf.add_n(self.model.losses) to each example's loss, or make the layer without a regularizer"
)
_SUM_OF_EXAMPLES = (
    "%s: its count is always %g, and its total a sum over the examples of a share of the batch, of which there are %d; "
    "totals are divided by the sum of all counts, so this is not what one device computes of the whole batch; return "
    "crankshaft.Mean(sum, number of examples), times global_batch_size if the sum itself is meant"
)


def warn_of_penalties_twice(owner: str, total: tf.Tensor, added: Sequence[tf.Tensor]) -> None:
    """Warns of a loss that has what training adds to it, of layers' regularizers and `added` losses."""
    if tf.is_symbolic_tensor(total) and keras.reads_losses(total, added):
        logging.warning_once(_PENALTIES_TWICE, owner)


def warn_of_penalties_left_out(owner: str, total: tf.Tensor, variables: Sequence, batch: Any) -> None:
    """Warns of a loss of a batch without the regularizers of the variables by which it is differentiated."""
    frozen = step_context().frozen
    updated = [variable for variable in variables if id(tf_variable(variable)) not in frozen]
    regularized = [variable for variable in updated if getattr(variable, "regularizer", None) is not None]
    if regularized and tf.is_symbolic_tensor(total) and not keras.reads_losses(total):
        penalized = shapes_of_penalties(total, _examples(batch, total.graph))  # by the program's own code
        for variable in [v for v in regularized if tuple(v.shape) not in penalized][:1]:
            logging.warning_once(_PENALTIES_LEFT_OUT, owner, variable_path(variable))


def _examples(batch: Any, graph: tf.Graph) -> list[tf.Tensor]:
    return [x for x in tf.nest.flatten(batch, expand_composites=True) if getattr(x, "graph", None) is graph]


def warn_of_sums(owner: str, pairs: Iterable[Pair], batch: Any, micro_batches: int) -> None:
    """Warns of a loss that sums over examples, of which its count is independent, if a batch has several shares.

    Args:
      pairs: this replica's pairs, of its batch or micro-batch; only a `Mean` is looked at.
      micro_batches: the number of each replica's.
    """
    shares = step_context().mesh.data.size * micro_batches
    means = [pair for pair in pairs if isinstance(pair, Mean) and tf.is_symbolic_tensor(pair.total)]
    for total, count in means if shares > 1 else ():
        examples = _examples(batch, total.graph)
        known = static_value(count) if tf.is_symbolic_tensor(count) else tf.get_static_value(count)
        if known is None or not known or not examples:
            continue
        size = examples[0].shape[0]
        for joined, divisor in joined_examples(total, examples, float(known), size):
            counts = np.cumprod(joined.shape) if joined.shape.is_fully_defined() else [size]
            # A multiple counts several things per example. Divided by the global batch, shares add up to too little.
            is_count = divisor in counts or (size and divisor % size == 0 and divisor != size * shares)
            if not is_count:
                logging.warning_once(_SUM_OF_EXAMPLES, owner, float(known), shares)


def casts_text(graph: tf.Graph, first: int = 0) -> bool:
    """Returns whether an op of a graph, from number `first` on, casts text to numbers."""
    ops = graph.get_operations()[first:]
    return any(op.type == "Cast" and op.get_attr("SrcT") == tf.string for op in ops)


@contextlib.contextmanager
def labels_as_numbers(labels: Any, trainer: Any) -> Iterator[None]:
    """Raises UsageError if a loss that is traced within uses labels that are text as numbers."""
    named = () if labels is None else named_arrays("labels", labels)
    names = [name for name, array in named if array.dtype == tf.string]
    cause, graph = None, tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    try:
        yield
    except (TypeError, ValueError) as error:
        if not names:
            raise
        cause = error
    if cause or (names and casts_text(graph, first)):
        raise UsageError(
            f"{', '.join(names)} holds strings, and {type(trainer).__name__}.loss computes with them as with numbers; "
            "number them before, by np.unique(labels, return_inverse=True), or look them up by "
            "tf.keras.layers.StringLookup"
        ) from cause


def warn_of_rounded(trainer: Any, features: Any) -> None:
    """Warns of each feature with integers that the model casts to floats inexactly.

    Ids that stay integers are fine. Traces `forward` if there are numbers that large.

    Args:
      features: an array whose first axis is examples, or a dictionary of arrays by name; other nests are not checked.
    """
    named = features if isinstance(features, dict) else {"features": features}
    large = {name: most for name, array in named.items() if (most := _largest(array)) > _EXACT}
    if not large:
        return
    specs = {name: tf.TensorSpec([None, *x.shape[1:]], x.dtype) for name, x in named.items()}

    def forward(named):
        trainer.forward(named if isinstance(features, dict) else named["features"], training=False)

    try:
        graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    except Exception:
        return  # the step itself reports a mistake in it
    inputs = dict(zip(sorted(named), graph.inputs, strict=False))  # captured tensors follow
    for name, most in large.items():
        if any(_casts_to_floats(inputs[name])):
            logging.warning(_ROUNDED, name, f"{most:,}", f"{_EXACT:,}")


def _largest(array: Any) -> int:
    """Returns the largest magnitude of an array of integers; 0 for anything else."""
    if not isinstance(array, (np.ndarray, Mapped)) or array.dtype.kind not in "iu" or not array.nbytes:
        return 0
    at_once = max(1, _PIECE_BYTES * len(array) // array.nbytes)
    pieces = (array[first : first + at_once] for first in range(0, len(array), at_once))
    return max(max(int(piece.max()), -int(piece.min())) for piece in pieces)


def _casts_to_floats(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the ops that cast a tensor's own values to floats."""
    queue, seen = [tensor], set()
    for value in queue:
        for op in value.consumers() if value.name not in seen else ():
            if op.type in _BY_ALL or (op.type in _BY_FIRST and value is op.inputs[0]):
                if op.outputs[0].dtype.is_floating:
                    yield op
                else:
                    queue += op.outputs
        seen.add(value.name)


def check_gradients_pass(losses: Sequence[tf.Tensor], variables: Sequence, values: Sequence) -> None:
    """Checks that a function with a custom gradient has as arguments the weights whose given values it computes with.

    Args:
      losses: scalars of this graph.
      variables: the variables whose gradients the losses are to have.
      values: for each variable the tensor with which layers compute, or the variable itself.

    Raises:
      UsageError: it has not, so that a weight would not be trained.
    """
    given = [(variable, x) for variable, x in zip(variables, values, strict=True) if isinstance(x, tf.Tensor)]
    if given and (hidden := hidden_by_custom_gradients(losses, [value for _, value in given])):
        first = next(variable for variable, value in given if value.name in hidden)
        raise UsageError(
            f"{variable_path(first)} {first.shape}: around parameter servers layers compute with values that a step "
            "reads as it begins, which tf.recompute_grad and tf.custom_gradient pass no gradient to, so it would not "
            "be trained; call a block by crankshaft.engine.layers.recomputed(layer, inputs), or give the function the "
            "layer's weights as arguments"
        )


@contextlib.contextmanager
def numbers_out_of_range() -> Iterator[dict[str, Pair]]:
    """Yields a dictionary that has, after the context, counts of ids and labels out of range, as metrics of a step.

    Counts those of operations traced within whose kernels do not raise, and those that were noted.
    """
    counts: dict[str, Pair] = {}
    context, graph = step_context(), tf.compat.v1.get_default_graph()
    noted, first = len(context.outside), len(graph.get_operations())
    yield counts
    pairs = [(name, pair) for name, pair in context.outside[noted:] if pair.total.graph is graph]
    if context.counts_ids:
        for op in graph.get_operations()[first:]:
            if op.type in _NUMBERED and tf.get_static_value(op.inputs[1]) is None:
                pairs.append(_outside(_NUMBERED[op.type], op.inputs[1], _size(op, op.inputs[0])))
    for name, pair in pairs:
        counts[name] = Outside(*(a + b for a, b in zip(counts[name], pair, strict=True))) if name in counts else pair


def note_ids(ids: tf.Tensor, size: int) -> None:
    """Counts ids beyond a table's `size` rows, for code that looks them up without a kernel's check."""
    step_context().outside.append(_outside("ids", ids, size))


def note_labels(labels: tf.Tensor, classes: int) -> None:
    """Counts labels beyond the last class, for losses that ignore them. Negative ones may be padding."""
    step_context().outside.append(_outside("labels", tf.maximum(tf.cast(labels, tf.int64), 0), classes))


def _size(op: tf.Operation, numbered: tf.Tensor) -> int | tf.Tensor:
    """Returns the number of rows or classes that an op's numbers refer to: an int, or a scalar if unknown."""
    if op.type == "ResourceGather":
        return tf.raw_ops.VariableShape(input=numbered)[0]
    axis = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else -1
    return numbered.shape[axis] or tf.shape(numbered)[axis]


def _outside(name: str, numbers: tf.Tensor, size: Any) -> tuple[str, Outside]:
    """Returns the metric's name, and its pair of the numbers outside [0, size)."""
    values = tf.cast(numbers, tf.float64)  # GPUs compute with int32 on the host, for which a step would wait
    above, below = values >= tf.cast(size, tf.float64), values < 0
    largest = tf.maximum(tf.reduce_max(tf.where(above, values, 0.0)), 0.0)  # -inf for an empty tensor
    least = tf.minimum(tf.reduce_min(tf.where(below, values, 0.0)), 0.0)
    batches = tf.cast(tf.stack([tf.reduce_any(above), tf.reduce_any(below)]), tf.float64)
    name = f"{name} from 0 to {size - 1}" if isinstance(size, int) else f"{name} out of range"
    return name, Outside(tf.stack([largest, least]), batches)
