"""What a process that writes shards does: it loads the input, and writes shards of its examples. Host code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...engine.data import entry, reading
from ...engine.data.source import Source
from ...input import known
from ...input.records import shard_writing
from ...input.records.features import Features
from ...input.records.shard_writing import Shard, ShardRequest
from ..command_line import registry
from ..errors import UsageError, setting
from . import data


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An input that can be written, by the name of its splits."""

    by_name: dict[str, Source]
    features: Features


def load(request: ShardRequest) -> Loaded:
    """Loads the input and checks that it can be written."""
    load_input = registry.find("input", request.input).make
    loaded = data.call(load_input(request.data_dir, request.seed, **request.arguments))
    entered, _ = entry.enter(loaded)
    train, evaluation = entered.train, entered.evaluation
    by_name = {name: split for name, split in (("train", train), ("eval", evaluation)) if split is not None}
    for name, split in by_name.items():
        if not split.by_index:
            raise UsageError(
                f"the {name} data of {setting('input', request.input)} is a tf.data.Dataset, whose examples have no "
                "number; give arrays or a Source"
            )
        if split.draws:
            raise UsageError(
                f"the {name} data of {setting('input', request.input)} draws its examples again each epoch, and shards "
                f"would keep one draw of them; turn that off by {setting('input_arg')}"
            )
    return Loaded(by_name, shard_writing.described(train.element_spec, known.as_json(loaded)))


def write(request: ShardRequest, loaded: Loaded, shard: Shard, count: Callable[[int], None]) -> dict[str, int]:
    """Writes a shard; returns what there is to know of it. `count` is given the examples of each piece."""
    encoder = shard_writing.Encoder(loaded.features)

    def records() -> Iterator[list[bytes]]:
        for piece in reading.in_pieces(loaded.by_name[shard.split], shard.first, shard.stop):
            arrays = _arrays(piece)
            yield encoder.records(arrays)
            count(len(arrays[0]))

    return shard_writing.write(os.path.join(request.output_dir, shard.file), records(), request.format)


def _arrays(nest: Any) -> list[np.ndarray]:
    """Returns a nest's arrays in the order of `features.names_in`."""
    if isinstance(nest, dict):
        return [array for part in nest.values() for array in _arrays(part)]
    if isinstance(nest, (tuple, list)):
        return [array for part in nest for array in _arrays(part)]
    return [nest]
