"""Whole numbers that a model takes for floats, and that float32 cannot hold. Host code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from ..data.host_arrays import Mapped

EXACT = 1 << 24  # float32 tells whole numbers apart up to here
_PIECE_BYTES = 64 << 20  # looked at at once
# Ops that give the values of their inputs on; of those with more than one, the first has the values.
_OF_FIRST = {"Cast", "ExpandDims", "GatherV2", "Identity", "Reshape", "Slice", "Squeeze", "StridedSlice", "Transpose"}
_OF_ALL = {"ConcatV2", "Pack"}


def rounded(trainer, features) -> dict[str, int]:
    """Returns each feature's largest value that the model casts from integers to floats inexactly.

    Ids that stay integers are not concerned. Traces `forward` if there are numbers that large.

    Args:
      trainer: built.
      features: an array whose first axis is examples, or a dictionary of arrays by name; any other nest is not looked
        at.
    """
    named = features if isinstance(features, dict) else {"features": features}
    large = {name: most for name, array in named.items() if (most := _largest(array)) > EXACT}
    if not large:
        return {}
    specs = {name: tf.TensorSpec([None, *x.shape[1:]], x.dtype) for name, x in named.items()}

    def forward(named):
        trainer.forward(named if isinstance(features, dict) else named["features"], training=False)

    try:
        graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    except Exception:
        return {}  # the step itself reports a mistake in it
    inputs = dict(zip(sorted(named), graph.inputs, strict=False))  # what it captures comes after
    return {name: most for name, most in large.items() if any(_casts_to_floats(inputs[name]))}


def _largest(array) -> int:
    """Returns the largest magnitude of an array of integers; 0 of anything else."""
    if not isinstance(array, (np.ndarray, Mapped)) or array.dtype.kind not in "iu" or not array.nbytes:
        return 0
    at_once = max(1, _PIECE_BYTES * len(array) // array.nbytes)
    pieces = (array[first : first + at_once] for first in range(0, len(array), at_once))
    return max(max(int(piece.max()), -int(piece.min())) for piece in pieces)


def _casts_to_floats(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the ops by which a tensor's own values become floats."""
    queue = [tensor]
    for each in queue:
        for op in each.consumers():
            if op.type in _OF_ALL or (op.type in _OF_FIRST and each is op.inputs[0]):
                if op.outputs[0].dtype.is_floating:
                    yield op
                else:
                    queue += op.outputs
