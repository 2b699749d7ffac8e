"""Inspects how a `tf.data.Dataset` is built, by private names of TensorFlow.

`tests/engine/internals/test_private_names.py` lists those that a new TensorFlow lacks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import batching, from_list
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    concatenate_op,
    dataset_ops,
    from_tensor_slices_op,
    from_tensors_op,
    map_op,
    padded_batch_op,
    prefetch_op,
    range_op,
    rebatch_op,
    repeat_op,
    scan_op,
    shard_op,
    shuffle_op,
    skip_op,
    snapshot_op,
    take_op,
    unbatch_op,
    zip_op,
)

from ..errors import reason
from . import graphs
from .graphs import without_recursion
from .tensorflow import iterator_state

_BATCHES = (
    batching._MapAndBatchDataset,
    batch_op._BatchDataset,
    batch_op._ParallelBatchDataset,
    padded_batch_op._PaddedBatchDataset,
    rebatch_op._RebatchDataset,
)
_MAPS = (map_op._MapDataset, map_op._ParallelMapDataset, scan_op._ScanDataset)
_UNCHANGED = (dataset_ops.UnaryUnchangedStructureDataset, dataset_ops._RestructuredDataset)
_SAME_ELEMENTS = (  # as their input has, if in another order
    cache_op.CacheDataset,
    dataset_ops._OptionsDataset,
    prefetch_op._PrefetchDataset,
    shuffle_op._ShuffleDataset,
)
_MOVING = (concatenate_op._ConcatenateDataset, repeat_op._RepeatDataset, shuffle_op._ShuffleDataset)
_PARTS = (shard_op._ShardDataset, skip_op._SkipDataset, take_op._TakeDataset)
_SLICES = (from_list._ListDataset, from_tensor_slices_op._TensorSliceDataset)
_ARRAYS = (from_tensor_slices_op._TensorSliceDataset, from_tensors_op._TensorDataset, range_op._RangeDataset)
_READS = re.compile(".*PyFunc|ReadVariableOp")
_READS_FILES = re.compile("ReadFile|MatchingFiles|.*(Record|TextLine|Csv|CSV|Sql).*Dataset")
# Operations of mapped functions that return batches, or may.
_MAY_BATCH = ("Batch", "DataService", "GeneratorDataset", "LoadDataset", "TensorDataset")


def is_batched(dataset: tf.data.Dataset) -> bool | None:
    """Returns whether elements are batches, by the operations that made them; None if unknown."""
    return _batches(dataset, _first_axis(dataset))


@without_recursion
def _batches(dataset: tf.data.Dataset, size: int | None) -> Generator[tuple, Any, bool | None]:
    """Returns whether elements are batches. `size`: the first axis that all components of an element share, if any."""
    inputs = dataset._inputs()
    if isinstance(dataset, zip_op._ZipDataset):  # also of numbers, as by `enumerate`, which are no batches
        inputs = [input_ for input_ in inputs if not _has_scalars(input_)] or inputs
    if isinstance(dataset, _BATCHES):
        return True
    if isinstance(dataset, unbatch_op._UnbatchDataset):
        return False
    if isinstance(dataset, _MAPS):
        batched = yield inputs[0], _first_axis(inputs[0])
        return batched if not batched or size == _first_axis(inputs[0]) else None  # else it makes other examples
    if not inputs:
        return False if _is_of_examples(dataset) else None
    functions = [function.function.graph for function in dataset._functions()]
    if functions and not isinstance(dataset, _UNCHANGED):  # each element becomes a dataset
        kinds = set().union(*map(graphs.kinds, functions))
        return None if any(word in kind for kind in kinds for word in _MAY_BATCH) else False
    answers = set()
    for input_ in inputs:
        answers.add((yield input_, size))
    return answers.pop() if len(answers) == 1 else None


def has_opaque_source(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline begins with a dataset that does not show what made its elements."""
    sources = [part for part in _all(dataset) if not part._inputs()]
    return not all(isinstance(x, from_tensors_op._TensorDataset) or _is_of_examples(x) for x in sources)


def _is_of_examples(source: tf.data.Dataset) -> bool:
    """Returns whether a source has single examples: slices, or scalars as of record readers.

    Others, such as saved datasets and TensorFlow's data service, hide what made their elements.
    """
    is_tensor = isinstance(source, from_tensors_op._TensorDataset)
    return isinstance(source, _SLICES) or (_has_scalars(source) and not is_tensor)


def _has_scalars(dataset: tf.data.Dataset) -> bool:
    """Returns whether an element's components are all scalars."""
    return all(getattr(spec, "shape", None) == [] for spec in tf.nest.flatten(dataset.element_spec))


def batch_and_examples(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Returns (batch size, number of examples, or below 0) of a dataset that ends with `batch`; None for others.

    Batches of one size may be repeated.
    """
    times = 1
    while isinstance(dataset, (*_SAME_ELEMENTS, repeat_op._RepeatDataset)):
        if isinstance(dataset, repeat_op._RepeatDataset):
            times *= int(tf.get_static_value(dataset._count))
        (dataset,) = dataset._inputs()
    if not isinstance(dataset, _BATCHES) or not hasattr(dataset, "_batch_size"):
        return None
    size, examples = int(tf.get_static_value(dataset._batch_size)), int(dataset._inputs()[0].cardinality())
    if examples >= 0 and tf.get_static_value(dataset._drop_remainder):
        examples -= examples % size
    if times == 1:
        return size, examples
    return None if times < 0 or examples < 0 or examples % size else (size, examples * times)


def batches_may_differ(dataset: tf.data.Dataset, if_unknown: bool) -> bool:
    """Returns whether a batch before a dataset's last may be of another size, by its operations.

    Args:
      if_unknown: the result where these do not show it, as of a generator.
    """
    return len(_sizes_before_last(dataset, (-2, -1) if if_unknown else (), False)) > 1


@without_recursion
def _sizes_before_last(
    dataset: tf.data.Dataset, if_unknown: Sequence[int], is_moved: bool
) -> Generator[tuple, Any, set[Any]]:
    """Finds the sizes of batches before the last, 0 for a smaller one; tuples for a zip's.

    Args:
      if_unknown: the sizes where operations do not show any.
      is_moved: whether the dataset's last batch may come before the last of what is made of it.
    """
    if (size := _first_axis(dataset)) is not None:
        return {size}
    if isinstance(dataset, _BATCHES):
        size, examples = batch_and_examples(dataset) or (1, -1)
        return {size, 0} if is_moved and (examples < 0 or examples % size) else {size}
    is_zip, sizes = isinstance(dataset, zip_op._ZipDataset), []
    if not (is_zip or isinstance(dataset, (*_UNCHANGED, *_MAPS, *_MOVING))):
        return set(if_unknown)
    for input_ in dataset._inputs():
        sizes.append((yield input_, if_unknown, is_moved or isinstance(dataset, _MOVING)))
    return set(itertools.product(*sizes)) if is_zip else set().union(*sizes)


@without_recursion
def ends(dataset: tf.data.Dataset) -> Generator[tuple, bool, bool]:
    """Returns whether a dataset is known to end, even if its length is unknown, e.g. after a filter."""
    cardinality = int(dataset.cardinality())
    if cardinality != tf.data.UNKNOWN_CARDINALITY:
        return cardinality >= 0
    if not isinstance(dataset, (*_UNCHANGED, *_MAPS, *_BATCHES, unbatch_op._UnbatchDataset)):
        return False
    (input_,) = dataset._inputs()
    return (yield (input_,))


def _first_axis(dataset: tf.data.Dataset) -> int | None:
    """Returns the size of the first axis of an element's components, but scalars, if all have the same."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec) if hasattr(spec, "shape")]  # not None's
    sizes = {shape[0] if shape.rank else None for shape in shapes if shape.rank != 0}
    return sizes.pop() if len(sizes) == 1 else None


def is_padded(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset's batches come of `padded_batch`, each padded to its own longest example."""
    return any(isinstance(part, padded_batch_op._PaddedBatchDataset) for part in _all(dataset))


@without_recursion
def may_pad(dataset: tf.data.Dataset, comes_in_batches: bool) -> Generator[tuple, bool, bool]:
    """Returns whether elements may be padded to the longest of a batch, as far as operations show.

    `batch` pads nothing, nor does a batch of one example; what a function returns as a batch may be anything.
    """
    inputs = dataset._inputs()
    if isinstance(dataset, unbatch_op._UnbatchDataset):
        return (yield inputs[0], True)
    if isinstance(dataset, _BATCHES) and not isinstance(dataset, rebatch_op._RebatchDataset):
        return comes_in_batches and is_padded(dataset) and not _is_one_by_one(dataset)
    if not inputs or (dataset._functions() and not isinstance(dataset, _UNCHANGED)):
        return comes_in_batches and not _is_one_by_one(dataset)
    for input_ in inputs:
        if (yield input_, comes_in_batches):
            return True
    return False


def _is_one_by_one(dataset: tf.data.Dataset) -> bool:
    """Returns whether all batches in a pipeline are of one example."""
    sizes = [getattr(part, "_batch_size", None) for part in _all(dataset) if isinstance(part, _BATCHES)]
    return bool(sizes) and all(size is not None and tf.get_static_value(size) == 1 for size in sizes)


def variables(dataset: tf.data.Dataset) -> list[str]:
    """Returns the names of the variables that a pipeline's functions read."""
    graphs_called = [function.function.graph for part in _all(dataset) for function in part._functions()]
    return sorted({variable.name for graph in graphs_called for variable in graph.variables})


def is_constant(dataset: tf.data.Dataset, may_read_files: bool = False) -> bool:
    """Returns whether nothing that a program does between two readings of a pipeline changes its examples.

    It then begins with arrays, and its functions call no Python, and read no variable and, unless they may, no file.
    """
    parts = [*_all(dataset)]
    if files_written(dataset) or any(not isinstance(part, _ARRAYS) for part in parts if not part._inputs()):
        return False
    functions = [function.function.graph.as_graph_def() for part in parts for function in part._functions()]
    bodies = [nodes for graph in functions for nodes in (graph.node, *(f.node_def for f in graph.library.function))]
    operations = {type(part).__name__ for part in parts} | {node.op for nodes in bodies for node in nodes}
    reads = (_READS,) if may_read_files else (_READS, _READS_FILES)
    # What else has a state, TensorFlow says, in messages of its own.
    return not any(known.match(name) for known in reads for name in operations) and not stateful(dataset)


def files_written(dataset: tf.data.Dataset) -> list[str]:
    """Returns the paths that reading a pipeline writes to: its caches and snapshots."""
    paths = []
    for part in _all(dataset):
        if isinstance(part, cache_op.CacheDataset):
            paths.append(_text(part._filename))
        elif isinstance(part, snapshot_op._SnapshotDataset):
            paths.append(_text(part._path))
    return [path for path in paths if path]


def shuffles(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns those parts of a pipeline that are in another order at each reading, by a seed that is theirs."""
    found = [part for part in _all(dataset) if isinstance(part, shuffle_op._ShuffleDataset)]
    return [shuffle for shuffle in found if shuffle._reshuffle_each_iteration]


def samplers(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the other parts of a pipeline that sample by seeds: equally at each reading, and not in another process.

    They are shuffles of one order and random numbers, as of `sample_from_datasets`.
    """
    others = shuffles(dataset)
    return [part for part in _all(dataset) if hasattr(part, "_seed2") and part not in others]


def seeds(sampler: tf.data.Dataset) -> list[int]:
    """Returns the seeds of a shuffle or sampler; without any that are not 0, TensorFlow chooses them."""
    return [int(tf.get_static_value(each)) for each in (sampler._seed, sampler._seed2)]


def stateful(dataset: tf.data.Dataset) -> str:
    """Returns why TensorFlow can't save the state of a pipeline's functions; "" if it can.

    An iterator shows it only while it calls such a function, and is slow to open.
    """
    element = tf.TensorSpec([], tf.int64)
    for function in (each.function for part in _all(dataset) for each in part._functions()):
        if not any(op.op_def.is_stateful and op.type != "Assert" for op in graphs.operations(function.graph)):
            continue
        calling = tf.raw_ops.MapDataset(
            input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.range(0)),
            other_arguments=function.captured_inputs,
            f=function,
            output_types=[element.dtype],
            output_shapes=[element.shape],
        )
        try:
            iterator_state(iter(tf.data.experimental.from_variant(calling, element)))
        except tf.errors.OpError as error:
            return reason(error).rstrip(" .")
    return ""


def served(dataset: tf.data.Dataset) -> str:
    """Returns why there is no position in a pipeline of TensorFlow's data service; "" for others."""
    is_served = any("DataService" in type(part).__name__ for part in _all(dataset))
    return "TensorFlow's data service keeps none" if is_served else ""


def redrawn(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the sources from which a pipeline takes a different part at each reading: shuffled, then cut."""
    parts = [part for part in _all(dataset) if isinstance(part, _PARTS)]
    below = [source for part in parts for shuffle in shuffles(part) for source in _all(shuffle)]
    return [source for source in below if not source._inputs()]


def ordered(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the largest parts of a pipeline that are in the same order at each reading, as far as operations show."""
    return _ordered(dataset)[1]


@without_recursion
def _ordered(dataset: tf.data.Dataset) -> Generator[tuple, Any, tuple[bool, list[tf.data.Dataset]]]:
    """Returns whether an operation of a pipeline changes the order, and the parts whose order stays."""
    mixes = isinstance(dataset, shuffle_op._ShuffleDataset) or getattr(dataset, "_deterministic", "") == "false"
    parts = list[tf.data.Dataset]()
    for input_ in dataset._inputs():
        input_mixes, input_parts = yield (input_,)
        mixes, parts = mixes or input_mixes, parts + input_parts
    return mixes, parts if mixes or dataset.options().deterministic is False else [dataset]


def shards(dataset: tf.data.Dataset) -> list[list[int]]:
    """Returns (number of shards, index) of each `dataset.shard` in a pipeline."""
    found = [part for part in _all(dataset) if isinstance(part, shard_op._ShardDataset)]
    return [[int(shard._num_shards), int(shard._index)] for shard in found]


def _all(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    queue = [dataset]
    while queue:
        yield (part := queue.pop())
        queue += reversed(part._inputs())


def _text(path: tf.Tensor | str) -> str:
    return path if isinstance(path, str) else tf.get_static_value(path).decode()
