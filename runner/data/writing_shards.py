"""Writes an input's examples into shards; an interrupted call leaves the complete ones.

A shard that exists is complete: it is written under another name and renamed. `prepare.json` in the folder describes
the data that all are of; once they are complete there is features.json, by which `input.tfrecord` and
`input.array_record` read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from filelock import lock_descriptor

from ...engine.data import reader
from ...engine.data.entry import user_data
from ...engine.data.source import Source, unknown_dimensions
from ...engine.errors import counted
from ...engine.machine.files import naming, open_lock, read_json, sync
from ...input import data_json
from ...input.files import storage
from ...input.records import features, shard_writing
from ...input.records.features import Features
from ...input.records.shard_writing import Shard, ShardRequest
from ..command_line import registry, user_files
from ..failures import UsageError
from ..host import text_files
from ..saved import fingerprints
from . import loading

_PLAN = "prepare.json"
_PLAN_BEGINS = '{"plan": '  # its text
_LOG_SECONDS = 5.0
_SHARD = re.compile(
    rf"(train|eval)/\1-\d{{5,}}-of-\d{{5,}}({'|'.join(map(re.escape, shard_writing.FORMATS.values()))})"
)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An input that can be written, by the name of its splits."""

    by_name: dict[str, Source]
    features: Features


def load(request: ShardRequest) -> Loaded:
    """Loads the input and checks that it can be written."""
    load_input = registry.find("input", request.input).make
    loaded = loading.data_from(load_input(request.data_dir, request.seed, **request.arguments))
    entered, _ = user_data.enter(loaded)
    train, by_name = entered.train, entered.splits
    if isinstance(entered.evaluation, dict):
        raise UsageError(
            f"the eval data of input={request.input} is several sets ({', '.join(entered.evaluation)}), and shards "
            "have one; write each by an input of its own"
        )
    for name, split in by_name.items():
        if not split.by_index:
            raise UsageError(
                f"the {name} data of input={request.input} is a tf.data.Dataset, whose examples have no number; give "
                "arrays or a Source"
            )
        if unknown_dimensions(split.element_spec):
            raise UsageError(
                f"the {name} data of input={request.input} has examples that differ in length, and shards hold those "
                "of one length; train on it as it is"
            )
        if split.is_random:
            raise UsageError(
                f"the {name} data of input={request.input} has random examples, which differ by epoch, and shards "
                "would keep those of one; turn that off by input_arg"
            )
    return Loaded(by_name, shard_writing.described(train.element_spec, data_json.as_json(loaded)))


def write(request: ShardRequest, loaded: Loaded, shard: Shard) -> dict[str, int]:
    """Writes a shard; returns its counts."""
    encoder = shard_writing.Encoder(loaded.features)
    pieces = reader.in_pieces(loaded.by_name[shard.split], shard.first, shard.stop)
    records = (encoder.records(_arrays(piece)) for piece in pieces)
    return shard_writing.write(os.path.join(request.output_dir, shard.file), records, request.format)


def _arrays(nest: Any) -> list[np.ndarray]:
    """Flattens a nest in the order of `features.names_in`; `tf.nest.flatten` would sort by name."""
    if isinstance(nest, dict):
        return [array for component in nest.values() for array in _arrays(component)]
    if isinstance(nest, (tuple, list)):
        return [array for component in nest for array in _arrays(component)]
    return [nest]


def prepare(
    request: ShardRequest,
    write_all: Callable[[Loaded, list[Shard]], Iterable[tuple[Shard, dict[str, int]]]],
    log: Callable[[str], None],
) -> str:
    """Writes the missing shards and features.json. Returns the result as one line.

    Args:
      write_all: writes shards, and yields each that is done with what `write` returns for it.
      log: receives a line of progress now and then.

    Raises:
      UsageError: this input can't be written, or the folder has something else in it.
      SourceError: an example can't be read.
      OSError: a file can't be written.
    """
    loaded = load(request)
    planned = _planned(request, loaded)
    plan = _plan(request, loaded)
    os.makedirs(request.output_dir, exist_ok=True)
    with _locked(request.output_dir, plan, planned, log) as noted:
        figures = {}  # the counts of the shards that exist and match what was noted of them, if anything
        for shard in planned:
            with contextlib.suppress(OSError):
                checked = shard_writing.checked(os.path.join(request.output_dir, shard.file))
                counts = {"examples": shard.stop - shard.first, **checked}
                if shard.file not in noted or noted[shard.file] == {"file": shard.file, **counts}:
                    figures[shard.file] = counts
        if figures or noted:
            log(f"{len(figures)} of {len(planned)} shards are there and whole")
        for split in loaded.by_name:
            os.makedirs(os.path.join(request.output_dir, split), exist_ok=True)
        left = [shard for shard in planned if shard.file not in figures]
        total, written = sum(shard.stop - shard.first for shard in left), 0
        logged_at = began = time.monotonic()
        for number, (shard, counts) in enumerate(write_all(loaded, left), 1):
            figures[shard.file] = counts
            written += shard.stop - shard.first
            if (now := time.monotonic()) - logged_at >= _LOG_SECONDS:
                logged_at, rate = now, written / (now - began)
                log(f"{written:,} of {total:,} examples, {number} of {len(left)} shards, {rate:,.0f} examples/s")
        # features.json comes last: the inputs read a folder that has it, so it must name whole shards only.
        splits: dict[str, Any] = {}
        for shard in planned:
            split = splits.setdefault(shard.split, {"examples": 0, "shards": []})
            split["examples"] += figures[shard.file]["examples"]
            split["shards"].append({"file": shard.file, **figures[shard.file]})
        content = {**loaded.features.as_json(), "format": request.format, "splits": splits}
        text_files.write_run_file(os.path.join(request.output_dir, features.NAME), content)
    parts = []
    for name, examples in loaded.by_name.items():
        shards = sum(shard.split == name for shard in planned)
        parts.append(f"{counted(len(examples), 'example')} in {counted(shards, 'shard')} of {name}")
    return f"{request.output_dir} has {' and '.join(parts)}"


def _planned(request: ShardRequest, loaded: Loaded) -> list[Shard]:
    """Lists all shards, those of evaluation of as many examples as those of training."""
    shards_of_splits = []
    examples = {name: len(split) for name, split in loaded.by_name.items()}
    for name, count in examples.items():
        shards = min(count, max(1, round(request.shards * count / examples["train"])))
        for number in range(shards):
            file = f"{name}/{name}-{number:05d}-of-{shards:05d}{shard_writing.FORMATS[request.format]}"
            shards_of_splits.append(Shard(name, file, count * number // shards, count * (number + 1) // shards))
    return shards_of_splits


def _plan(request: ShardRequest, loaded: Loaded) -> dict[str, Any]:
    """Describes everything that determines the shards' contents, as plain JSON."""
    examples = {name: fingerprints.fingerprint(split, len(split)) for name, split in loaded.by_name.items()}
    for name, split in loaded.by_name.items():  # a fingerprint is of some of the contents only
        if paths := split.files():
            times = [storage.file_state(path).written_ns for path in paths if not storage.is_remote(path)]
            examples[name]["written"] = zlib.crc32(repr(times).encode())
    source = {
        "input": user_files.portable_name(request.input),
        "input_arg": {name: value for name, value in request.arguments.items() if name != "allow_outside"},
        "seed": request.seed,
    }
    shards = {"shards": request.shards, "format": request.format, "examples": examples}
    return json.loads(json.dumps({**source, **shards}, default=str))


@contextlib.contextmanager
def _locked(
    folder: str, plan: dict[str, Any], planned: list[Shard], log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Locks the folder, for shards of a plan alone; yields what features.json notes of each, by file.

    If the examples have changed since an interrupted call, its shards are removed, and all are written again.

    Raises:
      UsageError: another process writes there, or something else was written there.
      OSError: the folder's files are links, or can't be read or written.
    """
    path = os.path.join(folder, _PLAN)
    others = [name for name in os.listdir(folder) if not name.startswith(".")]
    if others and not os.path.exists(path):
        raise UsageError(f"--output_dir={folder} has other files in it ({others[0]}); give another folder")
    # To append: a plan that is there is neither emptied nor replaced before the lock on it is held.
    with open(open_lock(path, os.O_RDWR | os.O_APPEND), "r+", encoding="utf-8", errors="replace") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock_descriptor(file.fileno(), blocking=False):
                raise UsageError(f"--output_dir={folder} is written by another process; wait for it")
        begun = _read_plan(path, file.read())
        manifest = _read_json(os.path.join(folder, features.NAME))
        was = begun.get("plan", plan)
        if names := [name for name in {**plan, **was} if was.get(name) != plan.get(name)]:
            if manifest is not None or names != ["examples"]:
                raise UsageError(
                    f"--output_dir={folder} has shards of something else (of other {', '.join(names)}); give another "
                    "folder, or remove that one"
                )
            log("the data has changed since the last call, which was ended: all shards are written again")
            for shard in begun["shards"]:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(folder, shard))
            begun = {}
        if not begun:
            with naming(path):
                file.truncate(0)
                file.write(json.dumps({"plan": plan, "shards": [shard.file for shard in planned]}))
                file.flush()
                sync(path)
        yield _noted(manifest)


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _read_plan(path: str, text: str) -> dict[str, Any]:
    """Reads the plan of a call before; {} if that was killed before it wrote one.

    Raises:
      UsageError: `prepare` has not written it, so it lists what must not be removed.
    """
    try:
        begun = json.loads(text or "{}")
    except (ValueError, RecursionError):
        begun = {} if _PLAN_BEGINS.startswith(text[: len(_PLAN_BEGINS)]) else None
    if isinstance(begun, dict) and begun.keys() <= {"plan", "shards"}:
        plan, shards = begun.get("plan", {}), begun.get("shards", [])
        if isinstance(plan, dict) and isinstance(shards, list) and all(_SHARD.fullmatch(str(name)) for name in shards):
            return begun
    raise UsageError(f"{path} is not what crankshaft prepare writes there; give another folder, or remove that file")


def _noted(manifest: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what a manifest notes of each shard, by its file; nothing if it is not of that form."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        splits = (manifest or {}).get("splits", {}).values()
        return {shard["file"]: shard for split in splits for shard in split["shards"]}
    return {}
