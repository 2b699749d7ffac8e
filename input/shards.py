"""Finds shards, and compares them with what features.json has noted of them. Host code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from crankshaft.input import features, record_index, storage
from crankshaft.input.features import Features
from crankshaft.input.splits import InputError, Splits

_EVALUATION = ("eval", "validation", "val", "test")  # folders beside "train"


def find_splits(
    data_dir: str | None, eval_data_dir: str | None, patterns: tuple[str, ...], expected: str
) -> tuple[list[str], list[str] | None]:
    """Returns the files to train on and those to evaluate on, None if none: of a folder with train and eval, of both.

    Args:
      data_dir: see `storage.find`.
      eval_data_dir: likewise.
      patterns: likewise.
      expected: likewise.

    Raises:
      InputError: there are none.
    """
    if data_dir and storage.is_folder(os.path.join(data_dir, "train")):
        if not eval_data_dir:
            folders = (os.path.join(data_dir, name) for name in _EVALUATION)
            eval_data_dir = next((folder for folder in folders if storage.is_folder(folder)), None)
        data_dir = os.path.join(data_dir, "train")
    train = _shards(data_dir, patterns, expected, "data_dir")
    return train, _shards(eval_data_dir, patterns, expected, "eval_data_dir") if eval_data_dir else None


def _shards(where: str | None, patterns: tuple[str, ...], expected: str, flag: str) -> list[str]:
    for number, pattern in enumerate(patterns):
        try:
            found = storage.find(where, (pattern,), expected, flag)
        except InputError:
            if number + 1 == len(patterns):
                raise
            continue
        if shards := [path for path in found if record_index.is_shard(path)]:
            return shards
    raise InputError(f"--{flag}={where}: expected {expected}, found their indices alone")


def open_splits(
    train: list[str], evaluation: list[str] | None, kind: Any, asked: tuple[tuple, str, str], num_classes: int
) -> Splits:
    """Opens the shards of both splits.

    Args:
      train: paths.
      evaluation: paths, or None.
      kind: what opens them: given paths and a function from samples of them to `Features`.
      asked: features, label and weight, see `tfrecord.load`.
      num_classes: as it was given.
    """
    given, label, weight = asked
    found: dict[str, Features] = {}

    def features_by(samples: Callable[[], list[bytes]]) -> Features:
        if not found:
            found["all"] = features.find(train, tuple(map(str, given)), label, weight, samples)
        return found["all"]

    splits = [kind(paths, features_by) if paths else None for paths in (train, evaluation)]
    about = found["all"].about
    for split, paths in zip(splits, (train, evaluation), strict=True):
        if split is not None:
            check_against(about, paths, len(split))
    return Splits(
        splits[0], splits[1], num_classes or about.get("num_classes"), about.get("vocabulary"), about.get("ids")
    )


def check_against(about: Mapping[str, Any], paths: list[str], examples: int) -> None:
    """Checks shards of `crankshaft prepare` against what it has noted. Others are not checked.

    Args:
      about: what a features.json holds.
      paths: the shards found; a folder's or all those of a list.
      examples: how many records they have.

    Raises:
      InputError: one is missing, or has another size, or there are more or fewer records.
    """
    for split, noted in (about.get("splits") or {}).items():
        by_name = {os.path.basename(shard["file"]): shard for shard in noted["shards"]}
        here = {os.path.basename(path): path for path in paths}
        if not by_name.keys() & here.keys():
            continue
        folder = os.path.dirname(paths[0])
        for name, shard in by_name.items():
            if name not in here:
                if not os.path.exists(os.path.join(folder, name)):
                    raise InputError(
                        f"{os.path.join(folder, name)} is missing, one of the {len(by_name)} shards of {split} that "
                        "features.json names; restore it, or run crankshaft prepare again"
                    )
                continue  # the user has named others of them
            if (size := storage.size_of(here[name])) != shard["bytes"]:
                raise InputError(
                    f"{here[name]} has {size:,} bytes, and features.json says {shard['bytes']:,}; restore it, or run "
                    "crankshaft prepare again"
                )
        expected = sum(shard["examples"] for name, shard in by_name.items() if name in here)
        if here.keys() <= by_name.keys() and examples != expected:
            raise InputError(
                f"{folder} has {examples:,} records, and features.json says {expected:,}; run crankshaft prepare again"
            )
