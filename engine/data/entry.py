"""Entry of user data: converts it to a `Source` or a `Stream`, with weights. Host code.

`run`, `fit`, `train(data)`, `evaluate(data)` and `predict(data)` all use it; nothing else converts.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from .. import logging
from ..errors import SourceError, UsageError
from ..internals import pipelines
from . import arrays as host_arrays
from . import frames, views
from .arrays import ArraySource
from .combined import Combined
from .data import Data
from .form import fields, map_padded
from .lengths import with_lengths
from .py_dataset import OfBatches, OfGenerator, without_optional
from .source import Source, Spec, Split
from .streamed import OfDataset, Stream, of_tensors
from .timeouts import names_of

_FORMS = "give (features, labels), (features, labels, weights), (features,) without labels, or a tf.data.Dataset"
_COUNTS_SHOWN = 8
_NEGATIVE = "a weight of the {} data is negative or not finite; give numbers of 0 or more"
_GAPS = (
    "a sparse row of the dataset lacks values before its last, so its length is unknown; state its size in the "
    "dataset's spec, or make it dense by tf.sparse.to_dense"
)
_NONE = type(tf.type_spec_from_value(None))


@dataclasses.dataclass(frozen=True)
class Rules:
    """How callers want a split's data converted.

    Attributes:
      as_keras: as Keras's `fit` does: a data frame is one array, a list of one array is that array, and a dataset,
        which must be batched, keeps its batch size and the shapes of its first batches.
      is_even: whether all batches of such a dataset but the last must have one size.
      ends: whether to read a generator to its end first, into memory, since its length is unknown before.
      weighs_outputs: whether there may be several weights: per output, or per step of a sequence.
      look_up: converts raw features, nests of arrays or tensors; a source that its input preprocessed stays.
      may_lack: whether columns of data frames may lack values, which `look_up` fills.
    """

    as_keras: bool = False
    is_even: bool = False
    ends: bool = False
    weighs_outputs: bool = False
    look_up: Callable[[Any], Any] | None = None
    may_lack: bool = False


def enter(data: Data, validation_split: float = 0.0, weighs_outputs: bool = False) -> tuple[Data, list[str]]:
    """Converts the splits of a run's data; returns the data, and lines to print.

    Args:
      data: from users or inputs.
      validation_split: fraction of the training data to use for evaluation, see `views.divided`.
      weighs_outputs: see `Rules`.

    Raises:
      UsageError: the data can't be used for training.
    """
    notes: list[str] = []
    rules = Rules(weighs_outputs=weighs_outputs)
    if is_several("train", data.train, data.batch_sizes):
        return _enter_several(data, validation_split, rules, notes), notes
    train, evaluation = split("train", data.train, rules, notes), None
    if data.evaluation is not None:
        if validation_split:
            raise UsageError(
                f"validation_split={validation_split} takes evaluation data from the training data, and the data has "
                "its own; leave it out, or return the training data alone"
            )
        evaluation = _evaluation(data.evaluation, rules, notes)
        _check_alike(train, evaluation, rules)
        _warn_of_redrawn(train, evaluation)
    elif validation_split:
        train, evaluation = views.divided(train, validation_split)
    if data.class_weight is not None:
        train = views.weighed_by_class(train, data.class_weight)
    train, evaluation = views.weighed_alike([train, evaluation])
    return dataclasses.replace(data, train=train, evaluation=evaluation, class_weight=None), notes


def _evaluation(data: Any, rules: Rules, notes: list[str]) -> Source | Stream:
    if is_several("eval", data, None):
        raise UsageError(
            f"the eval data is several inputs ({', '.join(data)}), and an evaluation reads each example of one once; "
            "give it alone, of any form that the trainer's forward and loss take"
        )
    evaluation = split("eval", data, rules, notes)
    if isinstance(evaluation, Stream) and evaluation.length == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "the eval dataset never ends, and an evaluation reads all of it; end it by dataset.take(n), which "
            "counts batches after dataset.batch"
        )
    return evaluation


def _warn_of_redrawn(train: Split, evaluation: Split) -> None:
    datasets = [split.dataset if isinstance(split, Stream) else None for split in (train, evaluation)]
    both = [[] if each is None else pipelines.redrawn(each) for each in datasets]
    if any(one is other for one, other in itertools.product(*both)):
        logging.warning(
            "training and evaluation data are parts (skip, take, shard) of one dataset that is in another order at "
            "each reading, so examples are trained on and evaluated in turn: give its shuffle "
            "reshuffle_each_iteration=False, or shuffle after the division"
        )


def _enter_several(data: Data, validation_split: float, rules: Rules, notes: list[str]) -> Data:
    """Converts several inputs per step, each as one, and the evaluation data, whose form may be another."""
    for name, value in (("validation_split", validation_split), ("class_weight", data.class_weight)):
        if value:
            raise UsageError(f"{name}={value} is for one input, and the train data has several; leave it out")
    members = {name: split(f"train[{name!r}]", each, rules, notes) for name, each in data.train.items()}
    evaluation = None if data.evaluation is None else _evaluation(data.evaluation, rules, notes)
    train = Combined(members, data.batch_sizes or {})
    return dataclasses.replace(data, train=train, evaluation=evaluation, batch_sizes=None)


def is_several(name: str, data: Any, batch_sizes: Mapping[str, int] | None) -> bool:
    """Returns whether a split is several inputs per step rather than one: a dict of splits, not of arrays.

    Raises:
      UsageError: a dict may be both, or has both; or batch sizes are of one input.
    """
    values = data if isinstance(data, dict) else {}
    whole = {key for key, each in values.items() if has_whole_examples(_unwrap(name, each))}
    others = {key for key, each in values.items() if isinstance(each, (tuple, list))} - whole
    if batch_sizes is None and not whole:
        if others and len(others) == len(values):
            raise UsageError(
                f"the {name} data is a dictionary of tuples ({', '.join(map(str, values))}): several inputs per step, "
                "or features? Give Data(..., batch_sizes={}) for several inputs, or (features,) for features alone"
            )
        return False
    if not values:
        raise UsageError(f"batch_sizes is for several inputs per step, and the {name} data is one; leave it out")
    if alone := sorted(map(str, values.keys() - whole - others)):
        raise UsageError(
            f"the {name} data has several inputs per step, and {alone[0]!r} is a {type(values[alone[0]]).__name__}; "
            "give (features, labels), (features,), a tf.data.Dataset, a Source or a Stream"
        )
    return True


def split(name: str, data: Any, rules: Rules = Rules(), notes: list[str] | None = None) -> Source | Stream:
    """Converts one split.

    Arrays, in one of the forms of a batch, become an `ArraySource`: float64, NumPy's default, becomes float32, as do
    weights, and lists become tuples. A `tf.data.Dataset`, of batches or single examples, becomes a `Stream`, a
    `PyDataset` a source.

    Args:
      name: of the split, for messages.
      data: in one of the forms of a batch, or a `Source`, a `Stream`, a dataset, a loader.
      rules: how it is taken.
      notes: lines to print are added to it.

    Raises:
      UsageError: it can't be used for training.
    """
    notes = [] if notes is None else notes
    data = _unwrap(name, data)
    if isinstance(data, Iterator) and not rules.as_keras:
        raise UsageError(
            f"the {name} data: a {type(data).__name__} can be read once only, and not from where a run resumes; give a "
            "keras.utils.PyDataset, or tf.data.Dataset.from_generator(function, output_signature=...).batch(...)"
        )
    if frames.is_loader(data):
        notes.append(f"the {name} data is a {type(data).__name__}: each epoch reads it from its beginning")
        data = frames.loader_dataset(data)
    if isinstance(data, tf.data.Dataset):
        return _looked_up(_of_dataset(name, data, rules, notes), rules)
    if isinstance(data, tf.keras.utils.PyDataset):
        is_endless = rules.as_keras and data.num_batches is None and not rules.ends
        data = map(data.__getitem__, itertools.count()) if is_endless else OfBatches(data)
        if isinstance(data, OfBatches):
            data.element_spec = tf.nest.map_structure(
                lambda spec: _with_lengths_if(spec.is_ragged or data.batch_examples == 1, spec, rules),
                data.element_spec,
            )
            _warn_of_padding(name, data.element_spec, rules)
    if isinstance(data, Iterator):
        data = OfGenerator(data, rules.ends)
    if isinstance(data, Stream):
        elements = data.examples(None, tf.constant(0, tf.int64)).element_spec
        _check_elements(name, elements)
        _check_shapes(name, elements)
        _check_weights(name, fields(elements).weights, rules)
        notes.append(f"the {name} data is a stream{names_of(data.files())}: without an index, so it is read in order")
        return _looked_up(with_lengths(data), rules)
    if isinstance(data, Source) and not isinstance(data, ArraySource):
        checked = _checked_source(name, data, rules)
        return checked if checked.preprocessing_digest else _looked_up(checked, rules)
    if isinstance(data, ArraySource):
        arrays = data.as_arrays()
        data = arrays if isinstance(arrays, (tuple, dict)) else (arrays,)
    return with_lengths(ArraySource(_of_arrays(name, data, rules)))


def features(data: Any, rank: int, rules: Rules) -> Source | Stream:
    """Converts data to predict on: features, or a source, stream or dataset, with or without labels.

    Args:
      data: see `crankshaft.Run.predict`.
      rank: of the model's first feature, including the axis of examples, by which a dataset's batches are recognized.
      rules: how it is taken.
    """
    if isinstance(data, tf.data.Dataset):
        taken = tf.nest.flatten(fields(data.element_spec).features)[0].shape.rank
        data = data.unbatch() if taken == rank else data
    if has_whole_examples(data) or isinstance(data, Iterator):
        return split("given", data, rules)
    arrays = frames.as_arrays(data, may_lack=rules.may_lack)
    arrays = _dense(rules.look_up(arrays) if rules.look_up else arrays)
    arrays = tf.nest.map_structure(lambda x: x if isinstance(x, host_arrays.Ragged) else np.asarray(x), arrays)
    return with_lengths(ArraySource((arrays,) if isinstance(arrays, tuple) else arrays))


def has_whole_examples(data: Any) -> bool:
    """Returns whether data yields whole examples, with labels and weights, rather than being a nest of arrays."""
    return isinstance(data, (Split, tf.data.Dataset, tf.keras.utils.PyDataset)) or frames.is_loader(data)


def _unwrap(name: str, data: Any) -> Any:
    """Unwraps such data from a tuple around it."""
    first = data[0] if isinstance(data, (tuple, list)) and data else None
    if not has_whole_examples(first) and not isinstance(first, Iterator):
        return data
    for field, value in zip(("labels", "weights"), data[1:], strict=False):
        if value is not None:
            kind = type(first).__name__
            raise UsageError(f"the {name} data is a {kind}, which comes with all of an example; leave its {field} out")
    return first


def _check_alike(train: Split, evaluation: Split, rules: Rules) -> None:
    """Checks that both or neither have labels, and the same features by name; weights may be in either."""

    def names(split: Split) -> set[str]:
        spec = split.element_spec
        spec = map_padded(lambda padded: padded.values, spec) if rules.weighs_outputs else spec  # which lose lengths
        return {name for name, _ in fields(spec)._replace(weights=None).named()}

    trained, evaluated = names(train), names(evaluation)
    for one, name, other, other_name in ((trained, "train", evaluated, "eval"), (evaluated, "eval", trained, "train")):
        if only := sorted(one - other):
            raise UsageError(
                f"the {name} data has {only[0]}, and the {other_name} data has {', '.join(sorted(other))}; give both "
                "in one form"
            )


# -- arrays


def _of_arrays(name: str, data: Any, rules: Rules) -> Any:
    """Returns a split in arrays, in one of the forms of a batch, with weights in float32."""
    made, labels, weights = fields(_in_form(name, _without_frames(name, data, rules)))
    if made is None:
        raise UsageError(f"the {name} data has no features; give an array, or a dictionary or list of arrays")
    if rules.as_keras:
        made = without_optional(made)
        made = made[0] if isinstance(made, (tuple, list)) and len(made) == 1 else made
    if labels is not None and any(each is None for each in tf.keras.tree.flatten(labels)):
        if not rules.weighs_outputs:
            raise UsageError(f"the {name} data: y is None for an output; leave it out, or give a compiled Keras model")
        labels = _without_missing(labels)
    if rules.weighs_outputs and weights is not None:
        examples = np.shape(tf.nest.flatten((made, 0))[0])[:1]
        weights = views.of_all(labels, weights, lambda: np.ones(examples, np.float32))
        weights = weights[:, 0] if np.ndim(weights) == 2 and np.shape(weights)[1] == 1 else weights
    made = _dense(made if rules.look_up is None else rules.look_up(made))
    labels, weights = (None if each is None else _dense(each) for each in (labels, weights))
    if weights is None:
        arrays = (made, labels) if labels is not None else (made,) if isinstance(made, tuple) else made
        _check_arrays(name, arrays)
        return arrays
    labels = () if labels is None else labels
    _check_arrays(name, (made, labels, weights))
    return made, labels, _checked_weights(name, weights, rules)


def _without_frames(name: str, data: Any, rules: Rules) -> Any:
    """Converts data frames and lists in a split's components to arrays; the components may be in a list."""

    def arrays(component):
        return frames.as_arrays(component, may_lack=rules.may_lack, as_one=rules.as_keras)

    try:
        return tuple(map(arrays, data)) if isinstance(data, (tuple, list)) else arrays(data)
    except SourceError as error:
        raise UsageError(f"the {name} data: {error.message}") from None


def _in_form(name: str, split):
    """Returns the split with tuples for lists, without a tuple around lone features, and with () for no labels."""
    if isinstance(split, (tuple, list)):
        if not 1 <= len(split) <= 3:
            raise UsageError(f"the {name} data is {len(split)} values; {_FORMS}")
        split = tuple(split)
        if len(split) > 1 and split[1] is None:
            split = split[:1] if len(split) == 2 or split[2] is None else (split[0], (), split[2])
        if len(split) == 3 and split[2] is None:
            split = split[:2]
        return split[0] if len(split) == 1 and not isinstance(split[0], (tuple, list)) else split
    if isinstance(split, dict):
        return split
    alone = "; ((features, labels), None) is training data alone" if hasattr(split, "shape") else ""
    raise UsageError(f"the {name} data is a {type(split).__name__}; {_FORMS}{alone}")


def _dense(nest: Any):
    """Converts a nest to NumPy arrays and tuples.

    Eager tensors become arrays, memory maps are read in pieces, ragged tensors by example, float64, NumPy's default,
    becomes float32, and lists become tuples.

    Raises:
      UsageError: an array is ragged within examples, or holds ids that float32 would round.
    """

    def array(x):
        is_own = host_arrays.is_sparse(x) or host_arrays.is_ragged(x)
        if hasattr(x, "shape") and not hasattr(x, "__array__") and not is_own:
            raise UsageError(
                f"a {type(x).__name__} is neither a dense array nor one whose examples alone differ in length; make "
                "it one, such as by a ragged tensor's x.to_tensor(), which pads with zeros to the longest"
            )
        return frames.as_float32(np.asarray(x) if tf.is_tensor(x) and not is_own else host_arrays.of(x))

    return tf.nest.map_structure(array, tf.keras.tree.lists_to_tuples(nest))


def _check_arrays(name: str, split: Any) -> None:
    """Raises `UsageError` unless a split, in a form of a batch, has arrays with equally many examples."""
    for key, array in fields(split).named():
        _check_array(name, key, array)
    counts = [len(array) for array in tf.nest.flatten(split)]
    if len(set(counts)) > 1:
        shown = ", ".join(map(str, counts[:_COUNTS_SHOWN])) + (", ..." if len(counts) > _COUNTS_SHOWN else "")
        raise UsageError(
            f"the {name} data has arrays of {shown} examples; give as many of each (make a list of examples an array "
            "by np.stack, of examples padded to one shape)"
        )
    if not counts or counts[0] == 0:
        raise UsageError(f"the {name} data has no examples; give at least one")


def _checked_weights(name: str, weights: Any, rules: Rules) -> Any:
    """Returns weights in float32."""
    if any(isinstance(each, host_arrays.Ragged) for each in tf.nest.flatten(weights)):
        raise UsageError(f"the weights of the {name} data, its third part, are ragged; give dense arrays")
    spec = ArraySource(weights).element_spec
    _check_weights(name, spec, rules)
    weights = tf.nest.map_structure(lambda each: np.asarray(each, np.float32), weights)
    for each in tf.nest.flatten(weights):
        if wrong := np.argwhere(~(np.isfinite(each) & (each >= 0)))[:1].tolist():
            value, example = each[tuple(wrong[0])], wrong[0][0]
            raise UsageError(f"{_NEGATIVE.format(name)} (found {value} at example {example})")
    if not any(each.any() for each in tf.nest.flatten(weights)):
        raise UsageError(f"all weights of the {name} data are 0, so no example counts; give some more than that")
    return weights


def _check_array(name: str, key: str, array) -> None:
    title = f"the {name} data"
    if not np.ndim(array) or not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise UsageError(
            f"{title} holds a {type(array).__name__} ({key}); give NumPy arrays whose first axis is examples"
        )
    values = array.values if isinstance(array, host_arrays.Ragged) else array
    objects = np.ravel(values) if array.dtype == object else ()
    if strange := next((type(x).__name__ for x in objects if not isinstance(x, (str, bytes))), None):
        raise UsageError(
            f"{title} has an array of Python objects ({key}), a {strange} among them; give an array of numbers, such "
            "as np.stack makes of arrays of one shape (pad them to the longest by np.pad), or of text alone"
        )
    try:
        _check_real(name, tf.as_dtype(array.dtype))
    except TypeError:
        raise UsageError(
            f"{title} has an array of {array.dtype} ({key}), which TensorFlow does not take; give numbers or text"
        ) from None


def _check_real(name: str, dtype: tf.DType) -> None:
    if dtype.is_complex:
        raise UsageError(
            f"the {name} data holds complex numbers ({dtype.name}), of which layers take the real part; give both "
            "parts (array.real, array.imag) as features"
        )


def _check_weights(name: str, weights: Any, rules: Rules) -> None:
    """Raises `UsageError` unless weights (the spec of one example's, or None) are numbers, as rules require."""
    title = f"the weights of the {name} data, its third part, are"
    if isinstance(weights, (tuple, dict)) and not rules.weighs_outputs:
        raise UsageError(f"{title} a {type(weights).__name__}; give one number per example")
    for each in [] if weights is None else tf.nest.flatten(weights):
        dtype = tf.as_dtype(each.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype == tf.bool):
            raise UsageError(f"{title} of type {dtype.name}; give one number per example")
        if tuple(each.shape) and not rules.weighs_outputs:
            raise UsageError(f"{title} of shape {[*each.shape]} an example; give one number per example")


# -- datasets, streams and sources


def _looked_up(split: Source | Stream, rules: Rules) -> Source | Stream:
    return split if rules.look_up is None else views.with_features(split, rules.look_up)


def _of_dataset(name: str, dataset: tf.data.Dataset, rules: Rules, notes: list[str]) -> Stream:
    if dataset.cardinality() == 0:
        raise UsageError(f"the {name} data is an empty dataset; give at least one example")
    is_batched = rules.as_keras or _comes_in_batches(name, dataset)
    may_pad, rank_of_rows = pipelines.may_pad(dataset, is_batched), 1 + is_batched
    if any(isinstance(spec, _NONE) for spec in tf.nest.flatten(dataset.element_spec)):
        dataset = dataset.map(functools.partial(_without_none, is_batched, rules.weighs_outputs))
    given = dataset.element_spec
    if any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        dataset = dataset.map(functools.partial(_without_sparse, None if rules.as_keras else rank_of_rows))
    if not rules.as_keras:
        if is_batched:
            dataset = dataset.unbatch()
            notes.append(f"the {name} dataset comes in batches: it is unbatched, and the run makes its own batches")
        dataset = of_tensors(dataset)
    _check_elements(name, dataset.element_spec, rules.as_keras)
    batch_examples = None
    if rules.as_keras:
        batch_examples = _batch_examples(name, dataset)
        dataset = _of_one_size(name, dataset, batch_examples) if rules.is_even else dataset
        dataset = _of_known_shape(name, dataset)
    _check_shapes(name, dataset.element_spec)
    _check_caches(name, dataset)
    weights = fields(dataset.element_spec).weights
    _check_weights(name, weights, rules)

    def checked(features, labels, weights):
        def fine(each):
            each = tf.cast(each, tf.float32)
            is_fine = tf.reduce_all(tf.math.is_finite(each) & (each >= 0))
            tf.debugging.Assert(is_fine, [_NEGATIVE.format(name), each])
            return each

        return features, labels, tf.nest.map_structure(fine, weights)

    stream = OfDataset(dataset if weights is None else dataset.map(checked))

    def with_origin(spec: Spec, given: tf.TypeSpec) -> Spec:
        is_ragged, is_sparse = isinstance(given, tf.RaggedTensorSpec), isinstance(given, tf.SparseTensorSpec)
        has_lengths = is_ragged or (is_sparse and given.shape.rank == rank_of_rows)
        has_lengths = has_lengths or not (may_pad or (is_sparse and is_batched))
        return dataclasses.replace(_with_lengths_if(has_lengths, spec, rules), is_ragged=is_ragged)

    stream.element_spec = tf.nest.map_structure(with_origin, stream.element_spec, given)
    _warn_of_padding(name, stream.element_spec, rules)
    stream.batch_examples = batch_examples
    return with_lengths(stream)


def _with_lengths_if(has_lengths: bool, spec: Spec, rules: Rules) -> Spec:
    return dataclasses.replace(spec, has_lengths=has_lengths or rules.as_keras or not spec.unknown)


def _warn_of_padding(name: str, elements: Any, rules: Rules) -> None:
    if not rules.weighs_outputs and not all(spec.has_lengths for spec in tf.nest.flatten(elements)):
        logging.warning(
            "the %s data came in batches that may be padded, so its examples' lengths are unknown: the trainer gets "
            "arrays, whose padding counts as data; for lengths and masks give ragged tensors, sparse features, "
            "padded_batch(1) or a Source",
            name,
        )


def _without_sparse(rank_of_rows: int | None, *element):
    """Makes sparse tensors of a dataset's element dense; rows of any length, of this rank, are of their values alone.

    Their shape is no length: rows of a batch, also those taken from it, share that of its longest.
    """

    def dense(x: Any) -> Any:
        if not isinstance(x, tf.SparseTensor):
            return x
        if x.shape.rank != rank_of_rows or x.shape[-1] is not None:
            return tf.sparse.to_dense(x)
        rows = x if x.shape.rank == 2 else tf.sparse.expand_dims(x, 0)
        ragged = tf.RaggedTensor.from_value_rowids(x.values, rows.indices[:, 0], rows.dense_shape[0])
        in_row = tf.range(tf.size(x.values, tf.int64)) - tf.gather(ragged.row_starts(), rows.indices[:, 0])
        has_no_gaps = tf.reduce_all(rows.indices[:, 1] == in_row)
        with tf.control_dependencies([tf.debugging.Assert(has_no_gaps, [_GAPS])]):
            ragged = tf.identity(ragged)
        return ragged if x.shape.rank == 2 else ragged.values

    element = element if len(element) > 1 or isinstance(element[0], tuple) else element[0]
    return tf.nest.map_structure(dense, element)


def _without_missing(labels: Any) -> Any:
    """Replaces labels of None by (), which has no arrays; see `form.with_none`."""
    return tf.nest.map_structure(lambda each: () if each is None else each, tf.keras.tree.lists_to_tuples(labels))


def _without_none(is_batched: bool, may_lack: bool, x, y=None, weights=None) -> tuple:
    """Replaces None in a dataset's element: weights by ones, and labels, if some `may_lack`."""
    y = _without_missing(y) if may_lack and y is not None else y
    if weights is None:
        return (x,) if y is None else (x, y)
    examples = tf.shape(tf.nest.flatten(x)[0])[:1] if is_batched else ()
    return x, () if y is None else y, views.of_all(y, weights, lambda: tf.ones(examples))


def _batch_examples(name: str, dataset: tf.data.Dataset) -> int:
    """Returns the size of a dataset's batches."""
    sizes = {spec.shape[0] if spec.shape.rank else 0 for spec in tf.nest.flatten(dataset.element_spec)}
    if sizes == {None}:  # from .batch(): the last may be smaller
        sizes = {int(tf.shape(x)[0]) for batch in dataset.take(1) for x in tf.nest.flatten(batch)}
    size = sizes.pop() if len(sizes) == 1 else 0
    if not size:
        raise UsageError(f"the {name} dataset is empty, or its elements are not batches; call dataset.batch(32)")
    return size


def _of_one_size(name: str, dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns a dataset of batches that fails if they differ in size, except for a smaller last one."""
    line = (
        f"{name} has batches of {size} examples and, before its end, of others; call repeat() and such before batch()"
    )

    def checked(is_last: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        examples = tf.shape(tf.nest.flatten(batch)[0])[0]
        with tf.control_dependencies([tf.debugging.Assert(~is_last & (examples <= size), [line])]):
            return examples < size, tf.nest.map_structure(tf.identity, batch)

    return dataset.scan(tf.constant(False), checked)


def _of_known_shape(name: str, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Unbatches a dataset; those of unknown shape have the first ones', or any length by `padded_batch`."""
    examples = of_tensors(dataset.unbatch())
    if all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(examples.element_spec)):
        return examples
    seen = [tf.nest.map_structure(lambda x: x.shape[1:], batch) for batch in dataset.take(2)]  # as many as Keras
    shapes = tf.nest.map_structure(_of_all, *seen)
    if pipelines.is_padded(dataset):
        own = tf.nest.map_structure(lambda first, spec: _of_any_length(spec) or first, shapes, examples.element_spec)
        shapes = (*own[:2], *shapes[2:]) if isinstance(shapes, tuple) else own  # weights have one shape
    of_shape = functools.partial(_of_shape, name)
    if not isinstance(shapes, tuple):
        return examples.map(lambda x: tf.nest.map_structure(of_shape, x, shapes))
    return examples.map(lambda *components: tf.nest.map_structure(of_shape, components, shapes))


def _of_shape(name: str, x: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns a tensor with a static shape, which may have unknown dimensions; an error if its own is another."""
    sizes = {axis: size for axis, size in enumerate(shape) if size is not None}
    line = (
        f"{name} has an example of another shape than {[*shape]}, as its first two batches have; make all of one "
        "shape, or let these differ where others do"
    )
    fits = tf.reduce_all(tf.gather(tf.shape(x), [*sizes]) == [*sizes.values()]) if sizes else True
    with tf.control_dependencies([tf.debugging.Assert(fits, [line, tf.shape(x)])]):
        x = tf.identity(x)
    x.set_shape(shape)
    return x


def _of_all(*shapes: tf.TensorShape) -> tf.TensorShape:
    """Returns the shape of examples in batches of these; a dimension in which they differ is unknown."""
    return functools.reduce(lambda one, other: one.most_specific_compatible_shape(other), shapes)


def _of_any_length(spec: tf.TensorSpec) -> tf.TensorShape | None:
    """Returns a shape whose first dimensions alone are unknown; None if that of a spec is another."""
    sizes = spec.shape.as_list() if spec.shape.rank else []
    return spec.shape if sizes == [None] * sizes.count(None) + [size for size in sizes if size is not None] else None


def _check_elements(name: str, elements, may_be_ragged: bool = False) -> None:
    """Raises `UsageError` unless elements of this specification are single examples in a form of a batch."""
    if isinstance(elements, tuple) and not 1 <= len(elements) <= 3:
        raise UsageError(
            f"the {name} dataset's elements are {len(elements)} values; give (features, labels), (features, labels, "
            "weights) or features alone, one example each"
        )
    for spec in tf.nest.flatten(elements):
        is_ragged = may_be_ragged and isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1
        if not isinstance(spec, tf.TensorSpec) and not is_ragged:
            raise UsageError(
                f"the {name} dataset holds a {type(spec).__name__}; give dense tensors: in dataset.map, pad a ragged x "
                "to one shape for all by x.to_tensor(shape=[most, ...])"
            )
        _check_real(name, spec.dtype)


def _check_shapes(name: str, elements) -> None:
    for key, spec in fields(elements).named():
        if spec.shape.rank is None:
            raise UsageError(f"the {name} dataset's examples are of unknown rank ({key}); use tf.ensure_shape in map")


def _comes_in_batches(name: str, dataset: tf.data.Dataset) -> bool:
    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if not isinstance(spec, _NONE)]
    sizes = {spec.shape[0] if spec.shape.rank else 0 for spec in specs}
    if len(sizes) > 1 or sizes == {0}:
        return False
    if sizes == {None}:  # as .batch() makes them, or examples of any length
        return pipelines.is_batched(dataset) is not False
    is_batch = pipelines.is_batched(dataset)
    if is_batch is None:
        (size,) = sizes
        raise UsageError(
            f"the {name} dataset's elements have {size} rows in each component, which are {size} examples or one: its "
            "operations don't tell. If each element is a batch, end the dataset with unbatch(); if it is one example, "
            "with batch(1)"
        )
    return bool(is_batch)


def _check_caches(name: str, dataset: tf.data.Dataset) -> None:
    """Raises `UsageError` if a killed process left a cache half written, which TensorFlow does not repair."""
    for path in pipelines.files_written(dataset):
        for lock in tf.io.gfile.glob(f"{glob.escape(path)}*.lockfile"):
            raise UsageError(
                f"the {name} dataset's cache {path} is being written, or was when its process was killed: {lock} is "
                "there; if no other process reads this dataset, delete that file"
            )


def _checked_source(name: str, source: Source, rules: Rules) -> Source:
    """Checks a source's attributes; its examples are checked when they are read."""
    for key, spec in fields(source.element_spec).named():
        if not isinstance(spec, Spec):
            raise UsageError(
                f"the {name} data's {type(source).__name__}.element_spec holds a {type(spec).__name__} ({key}); give "
                "a Spec(shape, dtype) for each component of an example"
            )
        _check_real(name, tf.as_dtype(spec.dtype))
    try:
        examples = len(source)
    except (TypeError, ValueError) as error:  # Python's own check: a float, a number below 0
        title = f"the {name} data's {type(source).__name__}.__len__"
        raise UsageError(f"{title}: {error}; return how many examples there are") from None
    if not examples:
        raise UsageError(f"the {name} data has no examples; give at least one")
    _check_weights(name, fields(source.element_spec).weights, rules)
    return with_lengths(source)
