"""Entry of datasets: converts a `tf.data.Dataset`, of batches or single examples, to a stream."""

from __future__ import annotations

import dataclasses
import functools
import glob
from typing import Any

import tensorflow as tf

from ... import logging
from ...errors import UsageError
from ...internals import pipelines
from ...internals.tensorflow import remove_generated_files, unconverted
from ..form import fields
from ..lengths import with_lengths
from ..source import Spec
from ..streamed import DatasetStream, Stream, examples_as_tensors, map_elements
from . import views
from .array_entry import NEGATIVE_WEIGHT, Rules, check_real, check_weights, labels_without_none
from .py_dataset import ONE_SIZE

_GAPS = (
    "a sparse example of the dataset lacks values before its last, so its length is unknown; state its size in the "
    "dataset's spec, or make it dense by tf.sparse.to_dense"
)
_EMPTY = "the {} data is an empty dataset; give at least one example"
_NONE = type(tf.type_spec_from_value(None))
_KINDS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec, _NONE)


def stream_from_dataset(name: str, dataset: tf.data.Dataset, rules: Rules, notes: list[str]) -> Stream:
    """Converts a dataset of batches or of single examples; adds lines to print to `notes`.

    Raises:
      UsageError: it can't be used for training.
    """
    if dataset.cardinality() == 0:
        raise UsageError(_EMPTY.format(name))
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, _KINDS):
            raise UsageError(
                f"the {name} dataset holds a {type(spec).__qualname__}, and examples are tensors; in dataset.map, "
                "return its tensors in a dictionary, and make the object of them again in forward (ragged ones come as "
                "Padded)"
            )
    is_batched = rules.as_keras or _comes_in_batches(name, dataset, rules.rank)
    given_batches = pipelines.batch_and_examples(dataset) if is_batched else None
    # Now, of the user's own operations: functions that are mapped below would hide them.
    may_pad, rank_of_lists = pipelines.may_pad(dataset, is_batched), None if rules.as_keras else 1 + is_batched
    if any(isinstance(spec, _NONE) for spec in tf.nest.flatten(dataset.element_spec)):
        dataset = dataset.map(unconverted(functools.partial(_without_none, is_batched, rules.weighs_outputs)))
    given = dataset.element_spec
    if any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        dataset = map_elements(dataset, functools.partial(_without_sparse, rank_of_lists))
    dataset = examples_as_tensors(dataset)
    check_elements(name, dataset.element_spec, is_batched)
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    takes_any = is_batched and rules.by_batch and all(shape[1:].is_fully_defined() for shape in shapes)
    batch_examples, is_zip = None, False
    if rules.as_keras or (is_batched and rules.keeps_batch_size):
        takes_zip = takes_any and rules.as_keras
        batch_examples, is_zip = (given_batches[0], False) if given_batches else _batch_size(name, dataset, takes_zip)
    by_batch = is_zip or (takes_any and pipelines.batches_may_differ(dataset, not (rules.is_even and rules.ends)))
    if rules.as_keras and not by_batch:
        assert batch_examples is not None
        dataset = _check_batch_sizes(name, dataset, batch_examples) if rules.is_even else dataset
        dataset = _unbatch(name, dataset)
    elif is_batched and not by_batch:
        dataset = examples_as_tensors(dataset.unbatch())
        notes.append(f"the {name} dataset comes in batches: it is unbatched, and the run makes its own batches")
    for path in pipelines.files_written(dataset):
        for lock in tf.io.gfile.glob(f"{glob.escape(path)}*.lockfile"):  # TensorFlow does not repair such a cache
            raise UsageError(
                f"the {name} dataset's cache {path} is being written, or was when its process was killed: {lock} is "
                "there; if no other process reads this dataset, delete that file"
            )
    weights = fields(dataset.element_spec).weights
    check_weights(name, weights, rules)

    def check_values(features, labels, weights):
        def check_weight(weight):
            weight = tf.cast(weight, tf.float32)
            is_fine = tf.reduce_all(tf.math.is_finite(weight) & (weight >= 0))
            tf.debugging.Assert(is_fine, [NEGATIVE_WEIGHT.format(name), weight])
            return weight

        return features, labels, tf.nest.map_structure(check_weight, weights)

    stream = DatasetStream(dataset if weights is None else dataset.map(unconverted(check_values)), by_batch)
    if given_batches and not by_batch and stream.length == tf.data.UNKNOWN_CARDINALITY:
        stream.length = given_batches[1]
    if names := pipelines.variables(dataset):
        notes.append(
            f"the {name} dataset reads variables ({', '.join(names)}): within an epoch a few batches are read before "
            "their steps; set them between epochs"
        )

    def with_origin(spec: Spec, given: tf.TypeSpec) -> Spec:
        is_ragged, is_sparse = isinstance(given, tf.RaggedTensorSpec), isinstance(given, tf.SparseTensorSpec)
        has_lengths = is_ragged or (is_sparse and given.shape.rank == rank_of_lists)
        has_lengths = has_lengths or not (may_pad or (is_sparse and is_batched)) or not spec.unknown
        return dataclasses.replace(spec, is_ragged=is_ragged, has_lengths=has_lengths)

    stream.element_spec = tf.nest.map_structure(with_origin, stream.element_spec, given)
    warn_of_padding(name, stream.element_spec, rules)
    stream.batch_examples = batch_examples
    remove_generated_files()  # to count the examples may take long
    return with_lengths(stream)


def warn_of_padding(name: str, elements: Any, rules: Rules) -> None:
    """Warns that trainers can't tell the padding of batches from data, if examples' lengths are unknown."""
    if not rules.weighs_outputs and not all(spec.has_lengths for spec in tf.nest.flatten(elements)):
        logging.warning(
            "the %s data came in batches that may be padded, so its examples' lengths are unknown: the trainer gets "
            "arrays, whose padding counts as data; for lengths and masks give ragged tensors, sparse features, "
            "padded_batch(1) or a Source",
            name,
        )


def _without_sparse(rank_of_lists: int | None, element: Any) -> Any:
    """Converts sparse tensors of an element to dense ones, and lists of any length, of this rank, to ragged ones.

    A list's shape is not its length: the lists of a batch, also those taken from it, share that of its longest.
    """

    def dense(x: Any) -> Any:
        if not isinstance(x, tf.SparseTensor):
            return x
        if x.shape.rank != rank_of_lists or x.shape[-1] is not None:
            return tf.sparse.to_dense(x)
        lists = x if x.shape.rank == 2 else tf.sparse.expand_dims(x, 0)
        ragged = tf.RaggedTensor.from_value_rowids(x.values, lists.indices[:, 0], lists.dense_shape[0])
        in_list = tf.range(tf.size(x.values, tf.int64)) - tf.gather(ragged.row_starts(), lists.indices[:, 0])
        has_no_gaps = tf.reduce_all(lists.indices[:, 1] == in_list)
        with tf.control_dependencies([tf.debugging.Assert(has_no_gaps, [_GAPS])]):
            ragged = tf.identity(ragged)
        return ragged if x.shape.rank == 2 else ragged.values

    return tf.nest.map_structure(dense, element)


def _without_none(is_batched: bool, may_lack: bool, x, y=None, weights=None) -> tuple:
    """Replaces None in a dataset's element: weights by ones, and labels, if some `may_lack`."""
    y = labels_without_none(y) if may_lack and y is not None else y
    if weights is None:
        return (x,) if y is None else (x, y)
    examples = tf.shape(tf.nest.flatten(x)[0])[:1] if is_batched else ()
    return x, () if y is None else y, views.fill_missing_weights(y, weights, lambda: tf.ones(examples))


def _batch_size(name: str, dataset: tf.data.Dataset, takes_any: bool) -> tuple[int, bool]:
    """Returns the examples in a batch's first array, and whether other arrays have other numbers, as of a zip."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    sizes = [shape[0] if shape.rank else 0 for shape in shapes]
    if None in sizes and len({*sizes}) == 2:  # a function makes some, of as many examples, which unbatching checks
        sizes = [size for size in sizes if size is not None]
    elif None in sizes:  # from .batch(): the last may be smaller
        sizes = [int(tf.shape(x)[0]) for batch in dataset.take(1) for x in tf.nest.flatten(batch)]
        if not sizes:
            raise UsageError(_EMPTY.format(name))
    if takes_any and len({*sizes}) > 1 and all(sizes) and pipelines.is_batched(dataset) is not False:
        return sizes[0], True
    if len({*sizes}) > 1 or not all(sizes):
        shown = ", ".join(sorted({*map(str, sizes)}))
        raise UsageError(
            f"the {name} dataset's elements are not batches: their arrays have {shown} examples; call "
            "dataset.batch(32), or make as many in each"
        )
    return sizes[0], False


def _check_batch_sizes(name: str, dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Makes reading fail if batches differ in size, except for a smaller last one."""
    line = f"{name} has batches of {size} examples and, before its end, of others; {ONE_SIZE}"

    def checked(is_last: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        examples = tf.shape(tf.nest.flatten(batch)[0])[0]
        with tf.control_dependencies([tf.debugging.Assert(~is_last & (examples <= size), [line])]):
            return examples < size, tf.nest.map_structure(tf.identity, batch)

    return dataset.scan(tf.constant(False), unconverted(checked))


def _unbatch(name: str, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Unbatches a dataset; examples of unknown shape have the first ones', or any length by `padded_batch`."""
    examples = examples_as_tensors(dataset.unbatch())
    if all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(examples.element_spec)):
        return examples
    first_shapes = [tf.nest.map_structure(lambda x: x.shape[1:], batch) for batch in dataset.take(2)]  # as in Keras
    # A dimension in which the first batches' examples differ is unknown.
    merge = tf.TensorShape.most_specific_compatible_shape
    shapes = tf.nest.map_structure(lambda *shapes: functools.reduce(merge, shapes), *first_shapes)
    if pipelines.is_padded(dataset):

        def padded_shape(shape: tf.TensorShape, spec: tf.TensorSpec) -> tf.TensorShape:
            if spec.shape.rank is None:
                return shape
            sizes = spec.shape.as_list()
            unknown_first = [None] * sizes.count(None) + [size for size in sizes if size is not None]
            return spec.shape if sizes == unknown_first else shape

        padded = tf.nest.map_structure(padded_shape, shapes, examples.element_spec)
        shapes = (*padded[:2], *shapes[2:]) if isinstance(shapes, tuple) else padded  # weights have one shape
    with_shape = functools.partial(_with_shape, name)
    return map_elements(examples, lambda example: tf.nest.map_structure(with_shape, example, shapes))


def _with_shape(name: str, x: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Sets a static shape, which may have unknown dimensions; an error if the tensor's is another."""
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


def check_elements(name: str, elements, may_be_ragged: bool = False) -> None:
    """Raises `UsageError` unless elements of this specification are examples of known rank in a form of a batch."""
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
        check_real(name, spec.dtype)
    for key, spec in fields(elements).named():
        if spec.shape.rank is None:
            raise UsageError(f"the {name} dataset's examples are of unknown rank ({key}); use tf.ensure_shape in map")


def _comes_in_batches(name: str, dataset: tf.data.Dataset, rank: int | None) -> bool:
    if rank is not None and tf.nest.flatten(fields(dataset.element_spec).features)[0].shape.rank == rank:
        return True
    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if not isinstance(spec, _NONE)]
    sizes = {spec.shape[0] if spec.shape.rank else 0 for spec in specs}
    if len(sizes) > 1 or sizes == {0}:
        return False
    is_batch, (size,) = pipelines.is_batched(dataset), sizes
    # As .batch() makes them, or examples of any length.
    if is_batch is None and (size or pipelines.has_opaque_source(dataset)):
        length, examples = (size, size) if size else ("any length", "as many")
        raise UsageError(
            f"the {name} dataset's elements have a first axis of {length} in each component, {examples} examples or "
            "one: its operations don't tell. If each element is a batch, end the dataset with unbatch(); if it is one "
            "example, with batch(1)"
        )
    return is_batch is not False
