"""What a process that writes shards does: it loads the input, and writes shards of its examples. Host code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...engine.data import reading
from ...engine.data.source import Source
from ...engine.data.split import spec_of
from ...engine.data.streamed import is_stream
from ...input import known
from ...input.records import shard_writing
from ...input.records.features import Features
from ...input.records.shard_writing import Shard, ShardRequest
from ..command_line import registry
from ..errors import UsageError
from . import data, splits

_PIECE = 4096  # examples of arrays that are written at once


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An input that can be written: `by_name` has arrays or a Source for each split."""

    by_name: dict[str, Any]  # split -> arrays or a Source
    features: Features


def load(asked: ShardRequest) -> Loaded:
    """Loads the input and checks that it can be written."""
    load_input = registry.find("input", asked.input).make
    found = data.call(load_input(asked.data_dir, asked.seed, **asked.arguments))
    for name, split in (("train", found.train), ("eval", found.evaluation)):
        if is_stream(split):
            raise UsageError(
                f"the {name} data of --input={asked.input} is a tf.data.Dataset, whose examples have no number; give "
                "arrays or a Source"
            )
        if isinstance(split, Source) and split.draws:
            raise UsageError(
                f"the {name} data of --input={asked.input} draws its examples anew each epoch, and shards would keep "
                "one draw of them; turn that off by --input_arg"
            )
    train, evaluation, _ = splits.prepare(found.train, found.evaluation)
    by_name = {name: split for name, split in (("train", train), ("eval", evaluation)) if split is not None}
    return Loaded(by_name, shard_writing.described(spec_of(train), known.as_json(found)))


def write(asked: ShardRequest, loaded: Loaded, shard: Shard, count: Callable[[int], None]) -> dict[str, int]:
    """Writes a shard; returns what there is to know of it. `count` is given the examples of each piece."""
    encoder = shard_writing.Encoder(loaded.features)

    def records() -> Iterator[list[bytes]]:
        for piece in _pieces(loaded.by_name[shard.split], shard.first, shard.stop):
            yield encoder.records(piece)
            count(len(piece[0]))

    return shard_writing.write(os.path.join(asked.output_dir, shard.file), records(), asked.format)


def _pieces(split: Any, first: int, stop: int) -> Iterator[list[np.ndarray]]:
    """Yields the arrays of examples [first, stop), in the order of `features.names_in`."""
    if isinstance(split, Source):
        for piece in reading.in_pieces(split, first, stop):
            yield _arrays(piece)
        return
    for start in range(first, stop, _PIECE):
        yield [np.asarray(array[start : min(start + _PIECE, stop)]) for array in _arrays(split)]


def _arrays(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [array for part in nest.values() for array in _arrays(part)]
    if isinstance(nest, (tuple, list)):
        return [array for part in nest for array in _arrays(part)]
    return [nest]
