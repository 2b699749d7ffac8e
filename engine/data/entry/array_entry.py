"""Entry of arrays: converts a split in arrays, in one of the forms of a batch, to dense ones that can be trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import SourceError, UsageError
from .. import arrays as host_arrays
from .. import frames
from ..arrays import ArraySource
from ..form import Fields, fields
from . import views

_FORMS = "give (features, labels), (features, labels, weights), (features,) without labels, or a tf.data.Dataset"
_COUNTS_SHOWN = 8
NEGATIVE_WEIGHT = "a weight of the {} data is negative or not finite; give numbers of 0 or more"


@dataclasses.dataclass(frozen=True)
class Rules:
    """How callers want a split's data converted.

    Attributes:
      as_keras: whether to convert as Keras's `fit` does: a data frame is one array, a list of one array is that array,
        and a dataset, which must be batched, keeps its batch size and the shapes of its first batches.
      is_even: whether all batches of such a dataset but the last must have one size.
      by_batch: whether batches of any sizes are each a step's, where they are not of one.
      ends: whether to read a generator to its end first, into memory, since its length is unknown before.
      weighs_outputs: whether there may be several weights: per output, or per step of a sequence.
      keeps_batch_size: whether data that comes in batches has their size as its default.
      rank: rank of the first feature of a batch of the run that data is for: a dataset's elements of this rank are
        batches; None: its operations show what they are.
      look_up: converts raw features, nests of arrays or tensors; a source that its input preprocessed stays.
      may_lack: whether columns of data frames may lack values, which `look_up` fills.
      keeps_float64: whether arrays of float64 stay so, for a run that takes such.
    """

    as_keras: bool = False
    is_even: bool = False
    by_batch: bool = False
    ends: bool = False
    weighs_outputs: bool = False
    keeps_batch_size: bool = False
    rank: int | None = None
    look_up: Callable[[Any], Any] | None = None
    may_lack: bool = False
    keeps_float64: bool = False


def arrays_in_form(name: str, data: Any, rules: Rules) -> Any:
    """Converts a split to dense arrays, in one of the forms of a batch, with weights in float32.

    Args:
      data: arrays, lists and data frames; its components may be in a list.
    """

    def to_arrays(component):
        return frames.as_arrays(component, may_lack=rules.may_lack, as_one=rules.as_keras)

    try:
        data = tuple(map(to_arrays, data)) if isinstance(data, (tuple, list)) else to_arrays(data)
    except SourceError as error:
        raise UsageError(f"the {name} data: {error.message}") from None
    features, labels, weights = _fields(name, data)
    if features is None:
        raise UsageError(f"the {name} data has no features; give an array, or a dictionary or list of arrays")
    if rules.as_keras:
        features = without_optional(features)
        features = features[0] if isinstance(features, (tuple, list)) and len(features) == 1 else features
    if labels is not None and any(label is None for label in tf.keras.tree.flatten(labels)):
        if not rules.weighs_outputs:
            raise UsageError(f"the {name} data: y is None for an output; leave it out, or give a compiled Keras model")
        labels = labels_without_none(labels)
    if rules.weighs_outputs and weights is not None:
        examples = np.shape(tf.nest.flatten((features, 0))[0])[:1]
        weights = views.fill_missing_weights(labels, weights, lambda: np.ones(examples, np.float32))
        weights = weights[:, 0] if np.ndim(weights) == 2 and np.shape(weights)[1] == 1 else weights
    features = to_dense(features if rules.look_up is None else rules.look_up(features), rules)
    labels, weights = (None if component is None else to_dense(component, rules) for component in (labels, weights))
    if weights is None:
        arrays = (features, labels) if labels is not None else (features,) if isinstance(features, tuple) else features
        _check_arrays(name, arrays)
        return arrays
    labels = () if labels is None else labels
    _check_arrays(name, (features, labels, weights))
    return features, labels, _to_float32_weights(name, weights, rules)


def _fields(name: str, split) -> Fields:
    if isinstance(split, (tuple, list)):
        if not 1 <= len(split) <= 3:
            raise UsageError(f"the {name} data is {len(split)} values; {_FORMS}")
        return fields(tuple(split))
    if isinstance(split, dict):
        return fields(split)
    more = ""
    if hasattr(split, "shape"):
        more = "; ((features, labels), None) is training data alone"
    elif hasattr(split, "__iter__") and not isinstance(split, str):
        more = ", or an iterable of batches in a torch.utils.data.DataLoader(data, batch_size=None)"
    raise UsageError(f"the {name} data is a {type(split).__name__}; {_FORMS}{more}")


def to_dense(nest: Any, rules: Rules) -> Any:
    """Converts a nest to NumPy arrays and tuples.

    Eager tensors become arrays, those in files are read in pieces, ragged tensors by example, float64, NumPy's default,
    becomes float32 unless the rules keep it, and lists become tuples.

    Raises:
      UsageError: an array is ragged within examples, or holds ids that float32 would round.
    """

    def dense(x):
        array = host_arrays.wrap(x)
        if hasattr(array, "shape") and not hasattr(array, "__array__"):
            raise UsageError(
                f"a {type(x).__name__} is neither a dense array nor one whose examples alone differ in length; make "
                "it one, such as by a ragged tensor's x.to_tensor(), which pads with zeros to the longest"
            )
        return array if rules.keeps_float64 else frames.as_float32(array)

    return tf.nest.map_structure(dense, tf.keras.tree.lists_to_tuples(nest))


def _check_arrays(name: str, split: Any) -> None:
    """Raises `UsageError` unless a split, in a form of a batch, has arrays with equally many examples."""
    for key, array in fields(split).named():
        check_array(name, key, array)
    counts = [len(array) for array in tf.nest.flatten(split)]
    if len(set(counts)) > 1:
        shown = ", ".join(map(str, counts[:_COUNTS_SHOWN])) + (", ..." if len(counts) > _COUNTS_SHOWN else "")
        raise UsageError(
            f"the {name} data has arrays of {shown} examples; give as many of each (make a list of examples an array "
            "by np.stack, of examples padded to one shape)"
        )
    if not counts or counts[0] == 0:
        raise UsageError(f"the {name} data has no examples; give at least one")


def _to_float32_weights(name: str, weights: Any, rules: Rules) -> Any:
    if any(isinstance(array, host_arrays.RaggedArray) for array in tf.nest.flatten(weights)):
        raise UsageError(f"the weights of the {name} data, its third part, are ragged; give dense arrays")
    check_weights(name, ArraySource(weights).element_spec, rules)
    weights = tf.nest.map_structure(lambda array: np.asarray(array, np.float32), weights)
    for array in tf.nest.flatten(weights):
        if wrong := np.argwhere(~(np.isfinite(array) & (array >= 0)))[:1].tolist():
            value, example = array[tuple(wrong[0])], wrong[0][0]
            raise UsageError(f"{NEGATIVE_WEIGHT.format(name)} (found {value} at example {example})")
    if not any(array.any() for array in tf.nest.flatten(weights)):
        raise UsageError(f"all weights of the {name} data are 0, so no example counts; give some more than that")
    return weights


def check_array(name: str, key: str, array) -> None:
    """Raises `UsageError` for an array that TensorFlow does not take."""
    title = f"the {name} data"
    if not np.ndim(array) or not hasattr(array, "shape") or not hasattr(array, "dtype"):
        fix = "NumPy arrays whose first axis is examples"
        if isinstance(array, tf.distribute.DistributedDataset):
            fix = "the dataset that it was made of, which the run distributes"
        raise UsageError(f"{title} holds a {type(array).__name__} ({key}); give {fix}")
    values = array.values if isinstance(array, host_arrays.RaggedArray) else array
    objects = np.ravel(values) if array.dtype == object else ()
    if strange := next((type(x).__name__ for x in objects if not isinstance(x, (str, bytes))), None):
        raise UsageError(
            f"{title} has an array of Python objects ({key}), a {strange} among them; give an array of numbers, such "
            "as np.stack makes of arrays of one shape (pad them to the longest by np.pad), or of text alone"
        )
    try:
        check_real(name, tf.as_dtype(array.dtype))
    except TypeError:
        raise UsageError(
            f"{title} has an array of {array.dtype} ({key}), which TensorFlow does not take; give numbers or text"
        ) from None


def check_real(name: str, dtype: tf.DType) -> None:
    """Raises `UsageError` for complex numbers."""
    if dtype.is_complex:
        raise UsageError(
            f"the {name} data holds complex numbers ({dtype.name}), of which layers take the real part; give both "
            "parts (array.real, array.imag) as features"
        )


def check_weights(name: str, weights: Any, rules: Rules) -> None:
    """Raises `UsageError` unless weights (the spec of one example's, or None) are numbers, as rules require."""
    title = f"the weights of the {name} data, its third part, are"
    if isinstance(weights, (tuple, dict)) and not rules.weighs_outputs:
        raise UsageError(f"{title} a {type(weights).__name__}; give one number per example")
    for spec in [] if weights is None else tf.nest.flatten(weights):
        dtype = tf.as_dtype(spec.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype == tf.bool):
            raise UsageError(f"{title} of type {dtype.name}; give one number per example")
        if tuple(spec.shape) and not rules.weighs_outputs:
            raise UsageError(f"{title} of shape {[*spec.shape]} an example; give one number per example")


def labels_without_none(labels: Any) -> Any:
    """Replaces labels of None by (), which has no arrays; see `form.with_none`."""
    return tf.nest.map_structure(lambda label: () if label is None else label, tf.keras.tree.lists_to_tuples(labels))


def without_optional(features: Any) -> Any:
    """Leaves out inputs that are None, which are optional in a Keras model, except in a list."""
    if isinstance(features, dict):
        return {name: x for name, x in features.items() if x is not None}
    if isinstance(features, (list, tuple)) and any(x is None for x in features):
        raise SourceError(
            "features are None for an input of a list, which is not optional; pass a dictionary by the inputs' names"
        )
    return features
