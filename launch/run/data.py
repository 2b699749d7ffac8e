"""Loads the run's data: from the input module that the flags name, or from the user's own function. Host code.

The inputs that come with Crankshaft use NumPy alone, so a file that is missing or broken is found before TensorFlow
has started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...engine.data.source import Source, SourceError
from ...input.splits import Splits
from .. import explanations
from ..command_line import own_files
from ..command_line.config import Config
from ..errors import UsageError


def load(config: Config) -> Splits:
    """Loads the splits of --input."""
    found = own_files.module("input", config.input)
    arguments = {**config.input_arg, **{name: getattr(config, name) for name in config.input_entry.from_flags}}
    return call(functools.partial(found.load, config.data_dir, config.seed, **arguments))


def sources(config: Config, data: Callable | Sequence | None) -> list[Source]:
    """Loads what a worker of a coordinator reads by itself: those of the splits that are a `Source`.

    Raises:
      SourceError: they can't be loaded; as the coordinator explains its own mistakes.
    """
    try:
        if config.input_entry is None and data is None:
            raise UsageError("it was started without data; give all tasks the same command line")
        from . import splits

        train, evaluation, *_ = load(config) if config.input_entry else call(data)
        return [split for split in splits.of(config, train, evaluation)[:2] if isinstance(split, Source)]
    except Exception as error:  # the border of what a worker does by itself
        raise SourceError(explanations.explain(error)[1]) from None


def call(data: Callable | Sequence) -> Splits:
    """Calls the user's function, if it is one, and fills up its tuple with None; see `train.main` for the tuple."""
    most = len(Splits._fields)
    splits = data() if callable(data) else data
    if splits is not None and not isinstance(splits, (tuple, list)):
        splits = (splits,)
    if splits is None or not 1 <= len(splits) <= most:
        found = "None" if splits is None else f"{len(splits)} values"
        raise UsageError(
            f"the data function gave {found}; return (train, eval), (train, eval, num_classes) or (..., vocabulary)"
        )
    if len(splits) == 1 and hasattr(splits[0], "shape"):  # an array alone is features, which no other form can be
        splits = ((splits[0],),)
    return Splits(*splits, *[None] * (most - len(splits)))
