"""Loads the run's data: from the input module that the flags name, or from the user's own function.

The inputs that come with Crankshaft use NumPy alone, so a file that is missing or broken is found before TensorFlow
has started.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from ...engine import logging
from ...engine.data.run_data import Data
from ...engine.data.source import Source, WithoutBadRecords
from ...engine.errors import SourceError, UnavailableError
from ...input.files import tokens
from .. import explanations
from ..command_line import rules
from ..command_line.config import READING, Config
from ..failures import EXIT_USAGE, UsageError

_MOST_VALUES = 4  # largest number of values in a tuple instead of a `Data`
_ONE_INPUT_FLAGS = ("bucket_by", "max_bad_records")
_BY_INDEX_FLAGS = ("max_bad_records", "shuffle_window")


def load(config: Config, trained_on: Data | None = None) -> Data:
    """Loads the splits of --input, with the preprocessing of the data that a model was trained on; None: of the run."""
    user_data = config.input_entry
    assert user_data, "input is not given"
    arguments = {
        **config.configured_arguments("input_arg"),
        **{name: getattr(config, name) for name in user_data.from_flags},
    }
    if trained_on and "trained_on" in arguments:
        arguments["trained_on"] = trained_on
    return data_from(functools.partial(user_data.make, config.data_dir, config.seed, **arguments))


def sources(config: Config, data: Callable | Sequence | None) -> list[Source]:
    """Loads the sources that a worker of a coordinator reads by itself: those whose examples are not in memory.

    Raises:
      SourceError: they can't be loaded; as the coordinator explains its own mistakes.
    """
    try:
        if config.input:
            loaded = load(config)
        elif data is not None:
            loaded = data_from(data)
        else:
            raise UsageError("it was started without data; give all tasks the same command line")
        entered, _ = enter(config, loaded)
        return [split for split in entered.splits.values() if split.by_index and split.as_arrays() is None]
    except Exception as error:  # the border of the worker's own work
        code, line = explanations.explain(error)
        raise (SourceError if code == EXIT_USAGE else UnavailableError)(line) from None


def enter(config: Config, data: Data) -> tuple[Data, list[str]]:
    """Returns a run's data with a `Source` or a `Stream` for each split, the same in each process, and lines to print.

    Bad records are left out where the run is to tolerate any.

    Raises:
      UsageError: data can't be trained on, or not with these flags.
    """
    from ...engine.data import lengths  # with TensorFlow
    from ...engine.data.buckets import LengthBuckets
    from ...engine.data.entry import user_data, views
    from ...engine.data.feeds import combined

    fraction = config.validation_split
    evaluates_other = data.evaluation is not None and config.mode in READING  # examples than the run was to evaluate
    entered, notes = user_data.enter(data, 0.0 if evaluates_other else fraction, config.has_compiled_model)
    train, evaluation = entered.train, entered.evaluation
    if fraction and evaluates_other:
        train = views.divided(train, fraction)[0]
    for name in () if train.by_index else _BY_INDEX_FLAGS:
        if value := getattr(config, name):
            raise UsageError(
                f"{name}={value} is for examples that are read by their indices, and the train data is a stream; leave "
                "it out"
            )
    for name in _ONE_INPUT_FLAGS if combined.first(train) is not train else ():
        if value := getattr(config, name):
            raise UsageError(f"{name}={value} is for one input, and the train data has several; leave it out")
    if config.bucket_by:
        train = lengths.bucketed(train, LengthBuckets(*rules.parse_buckets(config.bucket_by)))
    if config.max_bad_records:
        if train.as_arrays() is not None:
            raise UsageError(
                f"max_bad_records={config.max_bad_records} is for examples that are read as the run goes, and the "
                "train data is in memory already; leave it out"
            )
        limit = config.max_bad_records
        train, evaluation = _without_bad_records(train, limit), _without_bad_records(evaluation, limit)
    return dataclasses.replace(entered, train=train, evaluation=evaluation), notes


def _without_bad_records(split, limit: int):
    if isinstance(split, dict):  # several evaluation sets
        return {name: _without_bad_records(one, limit) for name, one in split.items()}
    if split is None or not split.by_index or split.as_arrays() is not None:
        return split
    return WithoutBadRecords(split, limit, lambda line: logging.warning("%s", line))


def data_from(data: Callable | Sequence | Data) -> Data:
    """Calls the user's function, if it is one, and makes `Data` of its tuple; see `train.main` for the tuple."""
    returned = data() if callable(data) else data
    if isinstance(returned, Data):
        if returned.tokens is not None and type(returned.tokens) not in (tokens.Bytes, tokens.Vocabulary):
            raise UsageError(
                f"Data.tokens is a {type(returned.tokens).__name__}, which a saved run could not make again; give "
                "Bytes or a Vocabulary of crankshaft.input.files.tokens, or leave it out: generate takes tokens, too"
            )
        return returned
    values = returned if isinstance(returned, (tuple, list)) else (returned,)
    if returned is None or not 1 <= len(values) <= _MOST_VALUES:
        raise UsageError(
            f"the data function gave {'None' if returned is None else f'{len(values)} values'}; return (train, eval), "
            "(train, eval, num_classes), (train, eval, num_classes, vocabulary) or a crankshaft.Data"
        )
    if len(values) == 1 and hasattr(values[0], "shape"):  # an array alone is features, which no other form can be
        return Data((values[0],))
    return Data(*values)


def faster_input(train, resident_data_mb: int, shuffle_window: int) -> str:
    """Names the changes that make the input faster, for a run whose steps wait for it."""
    from ...engine.data.reader import example_bytes  # with TensorFlow

    more = "or give the run more cores"
    if not train.by_index:
        parallel = "have the dataset read and map in parallel (num_parallel_calls=tf.data.AUTOTUNE)"
        return f"{parallel}; write its examples to files that `crankshaft prepare` indexes; {more}"
    ways = []
    if resident_data_mb < (needed := -(-example_bytes(train) * len(train) >> 20)) and not train.is_random:
        ways.append(f"resident_data_mb={needed} keeps the data in memory, if there is room for {needed:,} MiB")
    if train.as_arrays() is None:
        if train.chunk_examples == 1 and not shuffle_window and train.files():
            ways.append("shuffle_window=64 reads neighbours together, for a slow or distant disk")
        ways.append("`crankshaft prepare` writes files that take less to read")
    return "; ".join([*ways, more])
