"""Checks, once when a step is traced, that `mean` gets values of examples and not of pairs of them. Host code.

Labels [n] and outputs [n, 1] broadcast to [n, n], a mistake that trains something else without any error.
"""

from __future__ import annotations

import tensorflow as tf

from ..internals import graphs
from ..metrics.means import SUM_OF_VALUES
from . import batches

_SIZES = (7, 11)  # of batches, unlikely for any other axis


def check(trainer, outputs, batch) -> None:
    """Traces `loss` and `metrics` for batches of two sizes, and compares what each `mean` sums up.

    Several values an example (tokens, pixels) grow as the batch does, pairs of examples with its square.

    Args:
      trainer: whose `loss` and `metrics` they are.
      outputs: what these are given, tensors, as they are being traced.
      batch: likewise.

    Raises:
      ValueError: a mean is over pairs of examples; says the shapes.
    """
    given = tf.nest.flatten((outputs, batch))
    if not all(isinstance(x, tf.Tensor) for x in given):
        return
    size = tf.nest.flatten(batch)[0].shape[0]
    try:
        small, large = (_summed(trainer, *_specs((outputs, batch), size, n)) for n in _SIZES)
    except Exception:
        return  # the step itself fails too, and reports it, or the code is written for batches of one size
    for (where, shape), (_, other) in zip(small, large, strict=False):
        if shape.num_elements() * _SIZES[1] < other.num_elements() * _SIZES[0]:
            labels = batches.fields(batch).labels
            at_hand = f"outputs are {_shape(outputs, size)}, labels {_shape(() if labels is None else labels, size)}"
            raise ValueError(
                f"{type(trainer).__name__}.{where}: crankshaft.mean was given {_named(shape, _SIZES[0])} values for n "
                f"examples, one for each pair of them ({at_hand}); make the shapes alike, by outputs[:, 0] or "
                "labels[:, None], or say crankshaft.Mean(total, count) if pairs are meant"
            )


def _specs(nest, size: int | None, n: int):
    """Specifications of a nest's tensors, with batches of n examples in place of `size`."""

    def spec(x: tf.Tensor) -> tf.TensorSpec:
        of_examples = x.shape.rank and x.shape[0] in (None, size)
        return tf.TensorSpec([n, *x.shape[1:]] if of_examples else x.shape, x.dtype)

    return tf.nest.map_structure(spec, nest)


def _summed(trainer, outputs, batch) -> list[tuple[str, tf.TensorShape]]:
    """Returns the method ("loss", "metrics") and the shape of what each `mean` in it sums up, where that is known."""

    def run(outputs, batch):
        for method in (trainer.loss, trainer.metrics):
            with tf.name_scope(method.__name__):
                method(outputs, batches.without_weights(batch))

    graph = tf.function(run, autograph=False).get_concrete_function(outputs, batch).graph
    found, queue = [], [(None, graph)]
    for where, each in queue:
        for op in each.get_operations():
            scope = where or op.name.partition("/")[0]
            if (
                op.type == "Sum"
                and SUM_OF_VALUES in op.name.rpartition("/")[2]
                and op.inputs[0].shape.is_fully_defined()
            ):
                found.append((scope, op.inputs[0].shape))
            queue += [(scope, called) for called in graphs.all_called(op)]
    return found


def _shape(nest, size: int | None):
    """Returns the shape of each tensor of a nest, with n for the examples."""
    shapes = tf.nest.map_structure(lambda x: _named(x.shape, size), nest)
    return shapes if isinstance(shapes, str) else str(shapes).replace("'", "")


def _named(shape: tf.TensorShape, size: int | None) -> str:
    return f"[{', '.join('n' if axis in (None, size) else str(axis) for axis in shape)}]"
