"""Loads the run's data: from the input module that the flags name, or from the user's own function. Host code.

The inputs that come with Crankshaft use NumPy alone, so a file that is missing or broken is found before TensorFlow
has started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...engine.data.source import Source, SourceError
from ...input.data import Data
from .. import explanations
from ..command_line.config import Config
from ..errors import UsageError

_MOST_VALUES = 4  # of a tuple in place of a `Data`


def load(config: Config) -> Data:
    """Loads the splits of --input."""
    entry = config.input_entry
    arguments = {**config.given_arguments("input_arg"), **{name: getattr(config, name) for name in entry.from_flags}}
    return call(functools.partial(entry.make, config.data_dir, config.seed, **arguments))


def sources(config: Config, data: Callable | Sequence | None) -> list[Source]:
    """Loads what a worker of a coordinator reads by itself: those of the splits that are a `Source`.

    Raises:
      SourceError: they can't be loaded; as the coordinator explains its own mistakes.
    """
    try:
        if config.input is None and data is None:
            raise UsageError("it was started without data; give all tasks the same command line")
        from . import splits

        found = load(config) if config.input else call(data)
        return [split for split in splits.of(config, found.train, found.evaluation)[:2] if isinstance(split, Source)]
    except Exception as error:  # the border of what a worker does by itself
        raise SourceError(explanations.explain(error)[1]) from None


def call(data: Callable | Sequence | Data) -> Data:
    """Calls the user's function, if it is one, and makes `Data` of its tuple; see `train.main` for the tuple."""
    found = data() if callable(data) else data
    if isinstance(found, Data):
        return found
    values = found if isinstance(found, (tuple, list)) else (found,)
    if found is None or not 1 <= len(values) <= _MOST_VALUES:
        raise UsageError(
            f"the data function gave {'None' if found is None else f'{len(values)} values'}; return (train, eval), "
            "(train, eval, num_classes), (train, eval, num_classes, vocabulary) or a crankshaft.Data"
        )
    if len(values) == 1 and hasattr(values[0], "shape"):  # an array alone is features, which no other form can be
        return Data((values[0],))
    return Data(*values)
