"""Entry of user data: converts it to a `Source` or a `Stream`, with weights.

`run`, `fit`, `train(data)`, `evaluate(data)` and `predict(data)` all use it; nothing else converts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ... import logging
from ...errors import UsageError
from ...internals import pipelines
from .. import arrays as host_arrays
from .. import form, frames
from ..arrays import ArraySource
from ..feeds.combined import Combined
from ..form import fields
from ..lengths import with_lengths
from ..run_data import Data
from ..source import Source, Spec, Split
from ..streamed import Stream
from ..timeouts import quote_files
from . import views
from .array_entry import Rules, arrays_in_form, check_array, check_real, check_weights, to_dense

_Split = Source | Stream


def enter(data: Data, validation_split: float = 0.0, weighs_outputs: bool = False) -> tuple[Data, list[str]]:
    """Converts the splits of a run's data; returns the data, and lines to print.

    Args:
      validation_split: fraction of the training data to use for evaluation, see `views.divided`.

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
        for one in _sets(evaluation):
            if not weighs_outputs:  # else the model's own steps may take different forms: its trainer decides
                form.check_same_fields(train.element_spec, one.element_spec)
            _warn_of_shared_shuffle(train, one)
    elif validation_split:
        train, evaluation = views.divided(train, validation_split)
    if data.class_weight is not None:
        train = views.with_class_weights(train, data.class_weight)
    train, *sets = views.unify_weight_structure([train, *_sets(evaluation)])
    evaluation = dict(zip(evaluation, sets, strict=True)) if isinstance(evaluation, dict) else next(iter(sets), None)
    return dataclasses.replace(data, train=train, evaluation=evaluation), notes


def _sets(evaluation: _Split | dict[str, _Split] | None) -> list[_Split]:
    return [*evaluation.values()] if isinstance(evaluation, dict) else [evaluation] if evaluation is not None else []


def _evaluation(data: Any, rules: Rules, notes: list[str]) -> _Split | dict[str, _Split]:
    """Converts the evaluation data, or each set of a dictionary of several."""
    if not (isinstance(data, dict) and data and all(map(_is_split, data.values()))):
        return _evaluation_set("eval", data, rules, notes)
    if rules.weighs_outputs:
        raise UsageError(
            f"the eval data is several sets ({', '.join(map(str, data))}), and a compiled model is evaluated on one; "
            "give one, or write a Trainer"
        )
    for name in data:
        if not isinstance(name, str) or not name or "/" in name:
            raise UsageError(f"the eval data has a set named {name!r}; a name is text, without /, and not empty")
    return {name: _evaluation_set(f"eval[{name!r}]", one, rules, notes) for name, one in data.items()}


def _is_split(data: Any) -> bool:
    """Returns whether a value of a dictionary is data of its own, rather than an array of features."""
    return isinstance(data, (tuple, list)) or has_whole_examples(data)


def _evaluation_set(name: str, data: Any, rules: Rules, notes: list[str]) -> _Split:
    evaluation = split(name, data, rules, notes)
    if isinstance(evaluation, Stream) and evaluation.length == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            f"the {name} dataset never ends, and an evaluation reads all of it; end it by dataset.take(n), which "
            "counts batches after dataset.batch"
        )
    return evaluation


def _warn_of_shared_shuffle(train: Split, evaluation: Split) -> None:
    datasets = [split.dataset if isinstance(split, Stream) else None for split in (train, evaluation)]
    shuffles = [[] if dataset is None else pipelines.redrawn(dataset) for dataset in datasets]
    if any(one is other for one, other in itertools.product(*shuffles)):
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
    members = {name: split(f"train[{name!r}]", member, rules, notes) for name, member in data.train.items()}
    evaluation = None if data.evaluation is None else _evaluation(data.evaluation, rules, notes)
    train = Combined(members, data.batch_sizes or {})
    return dataclasses.replace(data, train=train, evaluation=evaluation, batch_sizes=None)


def is_several(name: str, data: Any, batch_sizes: Mapping[str, int] | None) -> bool:
    """Returns whether a split is several inputs per step rather than one: a dict of splits, not of arrays.

    Raises:
      UsageError: a dict may be both, or has both; or batch sizes are of one input.
    """
    values = data if isinstance(data, dict) else {}
    whole = {key for key, value in values.items() if has_whole_examples(_unwrap(name, value))}
    others = {key for key, value in values.items() if isinstance(value, (tuple, list))} - whole
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


def split(name: str, data: Any, rules: Rules | None = None, notes: list[str] | None = None) -> Source | Stream:
    """Converts one split.

    Arrays, in one of the forms of a batch, become an `ArraySource`: float64, NumPy's default, becomes float32, as do
    weights, and lists become tuples. A `tf.data.Dataset`, of batches or single examples, becomes a `Stream`, a
    `PyDataset` a source.

    Args:
      data: data in one of the forms of a batch, or a `Source`, a `Stream`, a dataset, a loader.
      notes: list to which lines to print are added.

    Raises:
      UsageError: it can't be used for training.
    """
    rules, notes = rules or Rules(), [] if notes is None else notes
    data = _unwrap(name, data)
    if isinstance(data, Iterator) and not rules.as_keras:
        raise UsageError(
            f"the {name} data: a {type(data).__name__} can be read once only, and not from where a run resumes; give a "
            "keras.utils.PyDataset, or tf.data.Dataset.from_generator(function, output_signature=...).batch(...)"
        )
    if frames.is_loader(data):
        kind = type(data).__name__
        if not (rules.as_keras or frames.shows_batches(data)):
            raise UsageError(
                f"the {name} data is a {kind} whose operations show no batch: its elements may be batches or examples. "
                "If each is one example, end it with batch(32), or a DataLoader with grain.transforms.Batch(32); if it "
                "is a batch, give tf.data.Dataset.from_generator(lambda: iter(data), output_signature=...).unbatch()"
            )
        notes.append(f"the {name} data is a {kind}: each epoch reads it from its beginning")
        data = frames.loader_dataset(data)
    if isinstance(data, tf.data.Dataset):
        from .dataset_entry import stream_from_dataset

        return _with_look_up(stream_from_dataset(name, data, rules, notes), rules)
    if isinstance(data, tf.keras.utils.PyDataset):
        from .dataset_entry import warn_of_padding
        from .py_dataset import BatchSource

        # Without a length it never ends, and is read in order, as a stream.
        is_endless = rules.as_keras and data.num_batches is None and not rules.ends
        data = map(data.__getitem__, itertools.count()) if is_endless else BatchSource(data)
        if isinstance(data, BatchSource):
            warn_of_padding(name, data.element_spec, rules)
    if isinstance(data, Iterator):
        from .py_dataset import GeneratorStream

        data = GeneratorStream(data, rules.ends, rules.by_batch)
    if isinstance(data, Stream):
        from .dataset_entry import check_elements

        elements = data.examples(None, tf.constant(0, tf.int64)).element_spec
        check_elements(name, elements)
        check_weights(name, fields(elements).weights, rules)
        notes.append(
            f"the {name} data is a stream{quote_files(data.files())}: without an index, so it is read in order"
        )
        return _with_look_up(with_lengths(data), rules)
    if isinstance(data, Source) and not isinstance(data, ArraySource):
        checked = _check_source(name, data, rules)
        return checked if checked.preprocessing_digest else _with_look_up(checked, rules)
    if isinstance(data, ArraySource):
        arrays = data.as_arrays()
        data = arrays if isinstance(arrays, (tuple, dict)) else (arrays,)
    return with_lengths(ArraySource(arrays_in_form(name, data, rules)))


def features(data: Any, rules: Rules) -> Source | Stream:
    """Converts data to predict on: features, or a source, stream or dataset, with or without labels."""
    if has_whole_examples(data) or isinstance(data, Iterator):
        return split("given", data, rules)
    arrays = frames.as_arrays(data, may_lack=rules.may_lack)
    arrays = to_dense(rules.look_up(arrays) if rules.look_up else arrays, rules)
    arrays = tf.nest.map_structure(lambda x: x if isinstance(x, host_arrays.Mapped) else np.asarray(x), arrays)
    given = (arrays,) if isinstance(arrays, tuple) else arrays
    for key, array in fields(given).named():
        check_array("given", key, array)
    return with_lengths(ArraySource(given))


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


def _with_look_up(split: Source | Stream, rules: Rules) -> Source | Stream:
    return split if rules.look_up is None else views.with_features(split, rules.look_up)


def _check_source(name: str, source: Source, rules: Rules) -> Source:
    """Checks a source's attributes; its examples are checked when they are read."""
    for key, spec in fields(source.element_spec).named():
        if not isinstance(spec, Spec):
            raise UsageError(
                f"the {name} data's {type(source).__name__}.element_spec holds a {type(spec).__name__} ({key}); give "
                "a Spec(shape, dtype) for each component of an example"
            )
        check_real(name, tf.as_dtype(spec.dtype))
    try:
        examples = len(source)
    except (TypeError, ValueError) as error:  # Python's own check: a float, a number below 0
        title = f"the {name} data's {type(source).__name__}.__len__"
        raise UsageError(f"{title}: {error}; return how many examples there are") from None
    if not examples:
        raise UsageError(f"the {name} data has no examples; give at least one")
    check_weights(name, fields(source.element_spec).weights, rules)
    return with_lengths(source)
