"""Loads the run's data: from the input module that the flags name, or from the user's own function. Host code.

The inputs that come with Crankshaft use NumPy alone, so a file that is missing or broken is found before TensorFlow
has started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...engine.data.data import Data
from ...engine.data.source import Source
from ...engine.internals.errors import SourceError, UnavailableError
from .. import explanations
from ..command_line.config import Config
from ..errors import EXIT_USAGE, UsageError

_MOST_VALUES = 4  # of a tuple in place of a `Data`


def load(config: Config) -> Data:
    """Loads the splits of --input."""
    entry = config.input_entry
    arguments = {**config.given_arguments("input_arg"), **{name: getattr(config, name) for name in entry.from_flags}}
    return call(functools.partial(entry.make, config.data_dir, config.seed, **arguments))


def sources(config: Config, data: Callable | Sequence | None) -> list[Source]:
    """Loads what a worker of a coordinator reads by itself: the sources whose examples are not in memory.

    Raises:
      SourceError: they can't be loaded; as the coordinator explains its own mistakes.
    """
    try:
        if config.input is None and data is None:
            raise UsageError("it was started without data; give all tasks the same command line")
        from . import splits

        loaded = load(config) if config.input else call(data)
        both = splits.of(config, loaded.train, loaded.evaluation)[:2]
        return [split for split in both if split is not None and split.by_index and split.as_arrays() is None]
    except Exception as error:  # the border of what a worker does by itself
        code, line = explanations.explain(error)
        raise (SourceError if code == EXIT_USAGE else UnavailableError)(line) from None


def call(data: Callable | Sequence | Data) -> Data:
    """Calls the user's function, if it is one, and makes `Data` of its tuple; see `train.main` for the tuple."""
    returned = data() if callable(data) else data
    if isinstance(returned, Data):
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
