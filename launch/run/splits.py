"""The border where a run takes its data: each split is checked, and becomes a `Source` or a `Stream`. Host code."""

from __future__ import annotations

import glob
import math
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ...engine.data import arrays as host_arrays
from ...engine.data import frames
from ...engine.data.arrays import ArraySource
from ...engine.data.form import fields
from ...engine.data.py_dataset import OfBatches
from ...engine.data.reading import example_bytes
from ...engine.data.source import Source, Spec, Split, WithoutBadRecords
from ...engine.data.streamed import OfDataset, Stream
from ...engine.data.waiting import of_files
from ...engine.internals import pipelines
from ...engine.internals.errors import SourceError
from ..command_line.config import READING, Config
from ..errors import UsageError, setting
from ..explanations import with_flags

_FORMS = "give (features, labels), (features, labels, weights), (features,) without labels, or a tf.data.Dataset"
_COUNTS_SHOWN = 8
_LABELS_LOOKED_AT = 1 << 17
_BY_INDEX = ("max_bad_records", "shuffle_window")  # flags
_ONE_SHAPE = (
    "give examples of one shape: dataset.unbatch(); in dataset.map, tf.pad where they differ, then tf.ensure_shape"
)
_NEGATIVE = "a weight of the {} data is negative or not finite; give numbers of 0 or more"


def of(config: Config, train, evaluation) -> tuple[Source | Stream, Source | Stream | None, list[str]]:
    """Checks and converts what was loaded, as `prepare`, and leaves bad records out where a run is to put up with any.

    The same in each process that reads.
    """
    share = config.validation_split
    if share and evaluation is not None and config.mode in READING:  # of other examples than the run was to evaluate
        train, evaluation, said = prepare(train, evaluation)
        train = divided(train, share)[0]
    else:
        train, evaluation, said = prepare(train, evaluation, share)
    for name in () if train.by_index else _BY_INDEX:
        if value := getattr(config, name):
            raise UsageError(
                f"{setting(name, value)} is for examples that are read by their indices, and the train data is a "
                "stream; leave it out"
            )
    if config.max_bad_records and train.as_arrays() is not None:
        raise UsageError(
            f"{setting('max_bad_records', config.max_bad_records)} is for examples that are read as the run goes, and "
            "the train data is in memory already; leave it out"
        )
    return _without_bad_records(config, train), _without_bad_records(config, evaluation), said


def _without_bad_records(config: Config, split):
    is_read = split is not None and split.by_index and split.as_arrays() is None
    if not config.max_bad_records or not is_read:
        return split
    return WithoutBadRecords(split, config.max_bad_records, lambda line: logging.warning("%s", with_flags(line)))


def prepare(train, evaluation, validation_split: float = 0.0) -> tuple[Any, Any, list[str]]:
    """Checks and converts both splits; returns (train, evaluation, lines to print), evaluation None if there is none.

    Arrays, in one of the forms of a batch, become an `ArraySource`: float64, NumPy's default, becomes float32, as do
    weights, and lists become tuples. A `tf.data.Dataset` of single examples becomes a `Stream`.

    Args:
      train: as the data function gave it.
      evaluation: as the data function gave it.
      validation_split: the share of the training data that is taken for evaluation: its last examples, as they stand,
        which is Keras's rule. So it does not depend on the seed or on how many workers there are.

    Raises:
      UsageError: what was given can't be trained on.
    """
    said: list[str] = []
    train = checked("train", train, said)
    if validation_split and evaluation is not None:
        raise UsageError(
            f"{setting('validation_split', validation_split)} takes evaluation data from the training data, and the "
            "data has its own; leave the flag out, or return the training data alone"
        )
    if validation_split:
        return *divided(train, validation_split), said
    if evaluation is not None:
        evaluation = checked("eval", evaluation, said)
        if isinstance(evaluation, Stream) and evaluation.length == tf.data.INFINITE_CARDINALITY:
            raise UsageError(
                "the eval dataset never ends, and an evaluation reads all of it; end it by dataset.take(n), which "
                "counts batches after dataset.batch"
            )
        _check_alike(train, evaluation)
    return train, evaluation, said


def faster_input(train: Source | Stream, resident_data_mb: int, shuffle_window: int) -> str:
    """Returns what makes the input faster, for a run whose steps wait for it."""
    more = "or give the run more cores"
    if not train.by_index:
        parallel = "have the dataset read and map in parallel (num_parallel_calls=tf.data.AUTOTUNE)"
        return f"{parallel}; write its examples to files that `crankshaft prepare` indexes; {more}"
    ways = []
    if resident_data_mb < (needed := -(-example_bytes(train) * len(train) >> 20)) and not train.draws:
        ways.append(f"--resident_data_mb={needed} keeps the data in memory, if there is room for {needed:,} MiB")
    if train.as_arrays() is None:
        if train.chunk_examples == 1 and not shuffle_window and train.files():
            ways.append("--shuffle_window=64 reads neighbours together, for a slow or distant disk")
        ways.append("`crankshaft prepare` writes files that take less to read")
    return "; ".join([*ways, more])


def example(split: Split):
    """Returns one example of zeros, or of empty strings, with a batch axis of 1."""
    return tf.nest.map_structure(zeros, split.element_spec)


def zeros(spec: Spec) -> np.ndarray:
    """Returns a batch of one example, of zeros or empty strings."""
    shape = [1, *spec.shape]
    is_text = tf.as_dtype(spec.dtype) == tf.string
    return np.full(shape, b"", object) if is_text else np.zeros(shape, spec.dtype)


def labels_shown(split: Source | Stream) -> str:
    """Describes a split's labels, by the first of them that is not a whole number from 0 to below 2^31 if one is."""
    spec = fields(split.element_spec).labels
    kind = f"its labels are {tf.as_dtype(spec.dtype).name}{list(spec.shape) or ''}" if isinstance(spec, Spec) else ""
    if not kind or not split.by_index or tf.as_dtype(spec.dtype) == tf.string:
        return kind or "its labels are several"
    most = min(len(split), _LABELS_LOOKED_AT)
    for rows in np.array_split(np.arange(most), -(-most // 1024)):
        values = np.asarray(fields(split.read(rows)).labels).reshape(-1)
        odd = values[~((values >= 0) & (values < 1 << 31) & (np.floor(values) == values))]
        if len(odd):
            return f"{kind}, {odd[0]} among them"
    return kind


def num_classes(split: Split) -> int | None:
    """Returns how many classes labels in arrays are of, by their values: integers from 0 on, or floats 0 and 1."""
    arrays = split.as_arrays()
    labels = None if arrays is None else fields(arrays).labels
    if not isinstance(labels, (np.ndarray, host_arrays.Mapped)) or labels.ndim != 1 or not len(labels):
        return None
    values = np.asarray(labels)
    if values.dtype.kind == "f":
        return 2 if ((values == 0) | (values == 1)).all() else None
    return int(values.max()) + 1 if values.dtype.kind in "iu" and values.min() >= 0 else None


def checked(name: str, split, said: list[str]) -> Source | Stream:
    """Returns a split as a `Source` or a `Stream`, see `prepare`; adds lines to print to `said`."""
    if frames.is_loader(split):
        said.append(f"the {name} data is a {type(split).__name__}: each epoch reads it from its beginning")
        split = frames.of_loader(split)
    if isinstance(split, tf.data.Dataset):
        return OfDataset(_checked_dataset(name, split, said))
    if isinstance(split, tf.keras.utils.PyDataset):
        split = OfBatches(split)
    if isinstance(split, Stream):
        elements = split.examples(None, tf.constant(0, tf.int64)).element_spec
        _check_elements(name, elements)
        _check_shapes(name, elements)
        said.append(f"the {name} data is a stream{of_files(split.files())}: without an index, so it is read in order")
        return split
    if isinstance(split, ArraySource):
        split = split.as_arrays()
    elif isinstance(split, Source):
        return _checked_source(name, split)
    return ArraySource(_checked_arrays(name, as_arrays(_in_form(name, _without_frames(name, split)))))


def check_arrays(name: str, split) -> None:
    """Raises `UsageError` unless a split, in a form of a batch, is of arrays, all of as many examples."""
    for what, array in fields(split).named():
        _check_array(name, what, array)
    counts = [len(array) for array in tf.nest.flatten(split)]
    if len(set(counts)) > 1:
        shown = ", ".join(map(str, counts[:_COUNTS_SHOWN])) + (", ..." if len(counts) > _COUNTS_SHOWN else "")
        raise UsageError(
            f"the {name} data has arrays of {shown} examples; give as many of each (make a list of examples an array "
            "by np.stack, of examples padded to one shape)"
        )
    if not counts or counts[0] == 0:
        raise UsageError(f"the {name} data has no examples; give at least one")


def _checked_arrays(name: str, split):
    check_arrays(name, split)
    parts = fields(split)
    if parts.weights is None:
        return split
    _check_weights(name, parts.weights, np.shape(parts.weights)[1:])
    weights = np.asarray(parts.weights, np.float32)
    if wrong := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))[:1].tolist():
        found_there = f"found {weights[wrong[0]]} at example {wrong[0]}"
        raise UsageError(f"{_NEGATIVE.format(name)} ({found_there})")
    if not weights.any():
        raise UsageError(f"all weights of the {name} data are 0, so no example counts; give some more than that")
    return (parts.features, () if parts.labels is None else parts.labels, weights)


def _without_frames(name: str, split):
    """Returns a split with arrays for what data frames and lists of its parts hold; those parts may be in a list."""
    try:
        parts = tuple(map(frames.as_arrays, split)) if isinstance(split, (tuple, list)) else frames.as_arrays(split)
    except SourceError as error:
        raise UsageError(f"the {name} data: {error.message}") from None
    return parts


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


def as_arrays(nest):
    """Converts a nest to NumPy arrays and tuples.

    Eager tensors become arrays, memory maps are read in pieces, float64, NumPy's default, becomes float32, and lists
    become tuples.

    Raises:
      UsageError: an array is sparse or ragged, or holds ids that float32 would round.
    """

    def array(x):
        if hasattr(x, "shape") and not hasattr(x, "__array__"):
            raise UsageError(
                f"a {type(x).__name__} is not a dense array; make it one: tf.sparse.to_dense(x), SciPy's x.toarray(), "
                "or a ragged tensor's x.to_tensor(), which pads examples with zeros to the longest"
            )
        x = np.asarray(x) if tf.is_tensor(x) else host_arrays.of(x)
        try:
            return frames.as_float32(x)
        except SourceError as error:
            raise UsageError(error.message) from None

    return tf.nest.map_structure(array, tf.keras.tree.lists_to_tuples(nest))


def _check_array(name: str, what: str, array) -> None:
    where = f"the {name} data"
    if not np.ndim(array) or not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise UsageError(
            f"{where} holds a {type(array).__name__} ({what}); give NumPy arrays whose first axis is examples"
        )
    objects = np.ravel(array) if array.dtype == object else ()
    if strange := next((type(x).__name__ for x in objects if not isinstance(x, (str, bytes))), None):
        raise UsageError(
            f"{where} has an array of Python objects ({what}), a {strange} among them; give an array of numbers, such "
            "as np.stack makes of arrays of one shape (pad them to the longest by np.pad), or of text alone"
        )
    try:
        _check_real(name, tf.as_dtype(array.dtype))
    except TypeError:
        raise UsageError(
            f"{where} has an array of {array.dtype} ({what}), which TensorFlow does not take; give numbers or text"
        ) from None


def _check_real(name: str, dtype: tf.DType) -> None:
    if dtype.is_complex:
        raise UsageError(
            f"the {name} data holds complex numbers ({dtype.name}), of which layers take the real part; give both "
            "parts (array.real, array.imag) as features"
        )


def _check_weights(name: str, weights, shape) -> None:
    """Raises `UsageError` unless weights are one number an example; `shape` is of one example's."""
    dtype = None if isinstance(weights, (tuple, dict)) else tf.as_dtype(weights.dtype)
    if dtype is None or not (dtype.is_floating or dtype.is_integer or dtype == tf.bool):
        kind = f"a {type(weights).__name__}" if dtype is None else f"of type {dtype.name}"
        raise UsageError(f"the weights of the {name} data, its third part, are {kind}; give one number an example")
    if tuple(shape):
        raise UsageError(
            f"the weights of the {name} data, its third part, are of shape {[*shape]} an example; give one number an "
            "example"
        )


def _check_elements(name: str, elements) -> None:
    """Raises `UsageError` unless elements of this specification are single examples in a form of a batch."""
    if isinstance(elements, tuple) and not 1 <= len(elements) <= 3:
        raise UsageError(
            f"the {name} dataset's elements are {len(elements)} values; give (features, labels), (features, labels, "
            "weights) or features alone, one example each"
        )
    for part in tf.nest.flatten(elements):
        if isinstance(part, tf.RaggedTensorSpec) and not part.ragged_rank:  # `map` gets a tensor, without `to_tensor`
            raise UsageError(f"the {name} dataset's examples are of shape {part.shape}; {_ONE_SHAPE}")
        if not isinstance(part, tf.TensorSpec):
            raise UsageError(
                f"the {name} dataset holds a {type(part).__name__}; give dense tensors: in dataset.map, pad a ragged x "
                "to one shape for all by x.to_tensor(shape=[most, ...]), and make a sparse x dense: tf.sparse.to_dense"
            )
        _check_real(name, part.dtype)


def _check_shapes(name: str, spec) -> None:
    for what, part in fields(spec).named():
        if not part.shape.is_fully_defined():
            raise UsageError(f"the {name} dataset's examples are of shape {part.shape} ({what}); {_ONE_SHAPE}")


def _checked_dataset(name: str, dataset: tf.data.Dataset, said: list[str]) -> tf.data.Dataset:
    if dataset.cardinality() == 0:
        raise UsageError(f"the {name} data is an empty dataset; give at least one example")
    _check_elements(name, dataset.element_spec)
    if _comes_in_batches(name, dataset):
        dataset = dataset.unbatch()
        said.append(
            f"the {name} dataset comes in batches: taken apart into examples, of which the run makes batches of its own"
        )
    _check_shapes(name, dataset.element_spec)
    _check_caches(name, dataset)
    weights = fields(dataset.element_spec).weights
    if weights is None:
        return dataset
    _check_weights(name, weights, getattr(weights, "shape", ()))

    def checked(features, labels, weights):
        weights = tf.cast(weights, tf.float32)
        fine = tf.math.is_finite(weights) & (weights >= 0)
        tf.debugging.Assert(fine, [_NEGATIVE.format(name), weights])
        return features, labels, weights

    return dataset.map(checked)


def _comes_in_batches(name: str, dataset: tf.data.Dataset) -> bool:
    parts = tf.nest.flatten(dataset.element_spec)
    sizes = {part.shape[0] if part.shape.rank else 0 for part in parts}
    if len(sizes) > 1 or sizes == {0}:
        return False
    if sizes == {None}:  # as .batch() makes them
        return True
    is_batch = pipelines.comes_in_batches(dataset)
    if is_batch is None:
        (size,) = sizes
        raise UsageError(
            f"the {name} dataset's elements have {size} rows in each part, which are {size} examples or one: its "
            "operations don't tell. If each element is a batch, end the dataset with unbatch(); if it is one example, "
            "with batch(1)"
        )
    return bool(is_batch)


def _check_caches(name: str, dataset: tf.data.Dataset) -> None:
    """Raises `UsageError` where a killed process has left a cache half written: TensorFlow leaves it so."""
    for path in pipelines.files_written(dataset):
        for lock in tf.io.gfile.glob(f"{glob.escape(path)}*.lockfile"):
            raise UsageError(
                f"the {name} dataset's cache {path} is being written, or was when its process was killed: {lock} is "
                "there; if no other process reads this dataset, delete that file"
            )


def _checked_source(name: str, source: Source) -> Source:
    """Checks what a source says of its examples; what it reads is checked as it is read."""
    for what, spec in fields(source.element_spec).named():
        if not isinstance(spec, Spec):
            raise UsageError(
                f"the {name} data's {type(source).__name__}.element_spec holds a {type(spec).__name__} ({what}); give "
                "a Spec(shape, dtype) for each part of an example"
            )
        if None in spec.shape:
            raise UsageError(
                f"the {name} data's {type(source).__name__}.element_spec has the shape {spec.shape} ({what}); give "
                "whole numbers: examples of one shape, to which `read` pads shorter ones by np.pad"
            )
        _check_real(name, tf.as_dtype(spec.dtype))
    try:
        examples = len(source)
    except (TypeError, ValueError) as error:  # Python's own check: a float, a number below 0
        where = f"the {name} data's {type(source).__name__}.__len__"
        raise UsageError(f"{where}: {error}; return how many examples there are") from None
    if not examples:
        raise UsageError(f"the {name} data has no examples; give at least one")
    weights = fields(source.element_spec).weights
    if weights is not None:
        _check_weights(name, weights, getattr(weights, "shape", ()))
    return source


def _check_alike(train: Split, evaluation: Split) -> None:
    """Checks that both have labels or neither, and the same features by name; weights may be in one alone."""
    trained, evaluated = (
        {name for name, _ in fields(each.element_spec).named()} - {"weights"} for each in (train, evaluation)
    )
    for one, name, other, other_name in ((trained, "train", evaluated, "eval"), (evaluated, "eval", trained, "train")):
        if only := sorted(one - other):
            raise UsageError(
                f"the {name} data has {only[0]}, and the {other_name} data has {', '.join(sorted(other))}; give both "
                "in one form"
            )


def divided(train, share: float) -> tuple[Source, Source]:
    """Splits into (all but the last examples, the last ones), by Keras's rule."""
    if train.by_index and train.by_epoch:
        raise UsageError(
            f"{setting('validation_split', share)} takes the last examples, and the data has on_epoch_begin or "
            "on_epoch_end, which may put others there; return two datasets, (train, eval), from the data function"
        )
    if not train.by_index:
        raise UsageError(
            f"{setting('validation_split', share)} divides arrays, and the data is a tf.data.Dataset; return "
            "(dataset.skip(n), dataset.take(n)) from the data function"
        )
    examples = len(train)
    first = math.floor(examples * (1.0 - share))
    if not 0 < first < examples:
        raise UsageError(
            f"{setting('validation_split', share)} of {examples} examples leaves {first} to train on and "
            f"{examples - first} to evaluate; use another share"
        )
    return train.between(0, first), train.for_evaluation().between(first, examples)
