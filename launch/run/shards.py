"""Writes an input's examples into shards, by several processes, so that a call that was ended is taken up again.

A shard exists when it is whole: it is written under another name and renamed. `prepare.jsonl` in the folder has what
is asked for in its first line, and then a line for each shard that is done; at the end it becomes features.json, by
which `input.tfrecord` and `input.array_record` read. Host code.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from filelock import lock_descriptor

from ...engine.internals.errors import counted
from ...input.records import features, shard_writing
from ...input.records.shard_writing import Shard, ShardRequest
from ..command_line import own_files
from ..errors import UsageError
from ..host import files
from . import fingerprints, shard_pool
from .shard_job import Loaded, load, write

_JOURNAL = "prepare.jsonl"
_SAID_SECONDS = 5.0


def prepare(request: ShardRequest, processes: int, say: Callable[[str], None]) -> str:
    """Writes the shards that are not there yet, and features.json. Returns what there is then, one line.

    Args:
      request: what and where.
      processes: that write, at most; more than one are fresh processes.
      say: is given a line now and then.

    Raises:
      UsageError: this input can't be written, or the folder has something else in it.
      SourceError: an example can't be read.
      OSError: a file can't be written.
    """
    loaded = load(request)
    planned = _planned(request, loaded)
    plan = _plan(request, loaded)
    os.makedirs(request.output_dir, exist_ok=True)
    with _journal(request.output_dir, plan, say) as (done, note):
        kept = _still_whole(request.output_dir, [shard for shard in planned if shard.file in done], done)
        left = [shard for shard in planned if shard.file not in kept]
        if done:
            say(f"{len(kept)} of {len(planned)} shards are there and whole")
        for split in loaded.by_name:
            os.makedirs(os.path.join(request.output_dir, split), exist_ok=True)
        for file, figures in _written(request, loaded, left, min(processes, len(left)), say):
            kept[file] = figures
            note(file, figures)
        _finish(request, loaded, plan, [(shard, kept[shard.file]) for shard in planned])
    parts = [_described(planned, name, len(split)) for name, split in loaded.by_name.items()]
    return f"{request.output_dir} has {' and '.join(parts)}"


def _described(planned: list[Shard], split: str, examples: int) -> str:
    shards = sum(shard.split == split for shard in planned)
    return f"{counted(examples, 'example')} in {counted(shards, 'shard')} of {split}"


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
    """Returns all that decides what the shards hold, as JSON has it."""
    examples = {name: fingerprints.of(split, len(split)) for name, split in loaded.by_name.items()}
    of_input = {"input": own_files.name_of(request.input), "input_arg": {**request.arguments}, "seed": request.seed}
    shards = {"shards": request.shards, "format": request.format, "examples": examples}
    return json.loads(json.dumps({**of_input, **shards}, default=str))


@contextlib.contextmanager
def _journal(
    folder: str, plan: dict[str, Any], say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], Callable[[str, Any], None]]]:
    """Yields the shards that were done before, by file, and what notes one more; holds the folder.

    What a call has left that was ended is of no use if the examples are other ones now: it begins again.

    Raises:
      UsageError: another process writes there, or something else was written there.
    """
    path = os.path.join(folder, _JOURNAL)
    others = [name for name in os.listdir(folder) if not name.startswith(".")]
    manifest = _read_json(os.path.join(folder, features.NAME))
    if others and manifest is None and not os.path.exists(path):
        raise UsageError(f"--output_dir={folder} has other files in it ({others[0]}); give another folder")
    with open(path, "a+", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock_descriptor(file.fileno(), blocking=False):
                raise UsageError(f"--output_dir={folder} is written by another process; wait for it")
        file.seek(0)
        lines = [entry for line in file if line.endswith("\n") and (entry := _parsed(line)) is not None]
        if lines and manifest is None and _is_of_other_examples(lines[0], plan):
            say("the data has changed since the last call, which was ended: all shards are written again")
            for line in lines[1:]:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(folder, line["file"]))
            lines = []
            file.truncate(0)
        was = lines[0] if lines else (manifest or {}).get("prepared_from")
        if (lines or manifest is not None) and was != plan:
            if not lines:
                os.remove(path)
            raise UsageError(
                f"--output_dir={folder} has shards of something else ({_difference(was, plan)}); give another folder, "
                "or remove that one"
            )
        done = {
            shard["file"]: shard for split in (manifest or {}).get("splits", {}).values() for shard in split["shards"]
        }
        done |= {line["file"]: line for line in lines[1:]}

        def add(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

        if not lines:
            add(plan)
        else:
            file.write("\n")  # what was being written as the last call was killed ends here
        yield done, lambda name, entry: add({"file": name, **entry})


def _is_of_other_examples(was: Any, plan: Mapping[str, Any]) -> bool:
    """Returns whether two calls differ in their data, and in nothing else."""
    return isinstance(was, dict) and was != plan and {**was, "examples": None} == {**plan, "examples": None}


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def _difference(was: Any, plan: Mapping[str, Any]) -> str:
    names = [name for name in plan if not isinstance(was, dict) or was.get(name) != plan[name]]
    return f"of other {', '.join(names)}" if isinstance(was, dict) and names else "not written by crankshaft prepare"


def _still_whole(folder: str, planned: list[Shard], done: Mapping[str, Any]) -> dict[str, Any]:
    whole = {}
    for shard in planned:
        noted = {name: done[shard.file][name] for name in ("examples", "bytes", "crc32c")}
        with contextlib.suppress(OSError):
            there = shard_writing.checked(os.path.join(folder, shard.file))
            if noted == {"examples": shard.stop - shard.first, **there}:
                whole[shard.file] = noted
    return whole


def _written(
    request: ShardRequest, loaded: Loaded, left: list[Shard], processes: int, say: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields (file, what there is to know of it) of each shard as it is done."""
    tell = _Telling(left, say)
    if processes > 1:
        yield from shard_pool.written(request, left, processes, tell)
        return
    for shard in left:
        figures = write(request, loaded, shard, tell.add)
        tell.shards += 1
        yield shard.file, figures


class _Telling:
    """Says now and then how far the writing is.

    Attributes:
      examples: that are written.
      shards: that are done.
    """

    def __init__(self, left: list[Shard], say: Callable[[str], None]):
        self.examples = self.shards = 0
        self._of = f"of {sum(shard.stop - shard.first for shard in left):,} examples"
        self._of_shards, self._say = len(left), say
        self._said = self._began = time.monotonic()

    def add(self, examples: int) -> None:
        self.examples += examples
        self.tell()

    def tell(self) -> None:
        now = time.monotonic()
        if now - self._said >= _SAID_SECONDS and self.examples:
            self._said = now
            rate = f"{self.examples / (now - self._began):,.0f} examples/s"
            self._say(f"{self.examples:,} {self._of}, {self.shards} of {self._of_shards} shards, {rate}")


def _finish(
    request: ShardRequest, loaded: Loaded, plan: dict[str, Any], shards: list[tuple[Shard, dict[str, int]]]
) -> None:
    """Writes features.json and removes the journal."""
    splits: dict[str, Any] = {}
    for shard, counts in shards:
        split = splits.setdefault(shard.split, {"examples": 0, "shards": []})
        split["examples"] += counts["examples"]
        split["shards"].append({"file": shard.file, **counts})
    content = {**loaded.features.as_json(), "format": request.format, "splits": splits, "prepared_from": plan}
    files.write_json(os.path.join(request.output_dir, features.NAME), content)
    os.remove(os.path.join(request.output_dir, _JOURNAL))
