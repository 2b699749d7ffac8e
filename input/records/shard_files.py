"""Finds shards, and checks them against their features.json."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from ...engine.data.run_data import Data
from ...engine.errors import importing
from .. import data_json
from ..checks import InputError
from ..files import listing, storage
from . import features
from .features import Features

BESIDE = r".*\.(json|md|txt)"  # files that a glob may match
_EVALUATION = ("eval", "validation", "val", "test")  # folders beside "train"


def find_splits(data_dir: str | None, eval_data_dir: str, kind: listing.FileKind) -> tuple[list[str], list[str] | None]:
    """Returns the training and evaluation shards (None if none), both from a folder with subfolders train and eval.

    Args:
      data_dir: training shards, or a folder with subfolders train and eval; see `listing.find`.
      eval_data_dir: evaluation shards; empty for none outside of `data_dir`.

    Raises:
      InputError: there are no shards.
    """
    to_train, to_evaluate = [], []
    for pattern in listing.patterns(data_dir) if data_dir else []:
        inner = listing.join(pattern, "train")
        to_train.append(inner if listing.is_folder(inner) else pattern)
        if listing.is_folder(inner):
            folders = (listing.join(pattern, name) for name in _EVALUATION)
            to_evaluate += [*filter(listing.is_folder, folders)][:1]
    train = _shards(",".join(to_train), kind, "data_dir")
    eval_data_dir = eval_data_dir or ",".join(to_evaluate)
    return train, _shards(eval_data_dir, kind, "eval_data_dir") if eval_data_dir else None


def _shards(data_dir: str | None, kind: listing.FileKind, flag: str) -> list[str]:
    paths = listing.find(data_dir, kind, flag).paths
    for folder, folder_paths in _by_folder(paths).items():
        _check_noted(folder_paths, folder in map(os.path.normpath, listing.patterns(data_dir or "")))
    return paths


def _by_folder(paths: Sequence[str]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for path in paths:
        folders.setdefault(os.path.normpath(os.path.dirname(path)), []).append(path)
    return folders


def open_splits(
    train: list[str], evaluation: list[str] | None, kind: Any, names: tuple[tuple, str, str], num_classes: int
) -> Data:
    """Opens the shards of both splits.

    Args:
      kind: opens shards: called with their paths and a function from sample records to `Features`.
      names: names of the features, the label and the weight, see `tfrecord.load`.
    """
    selected, label, weight = names
    described: dict[str, Features] = {}

    def features_by(samples: Callable[[], list[bytes]]) -> Features:
        if not described:
            described["all"] = features.find(train, tuple(map(str, selected)), label, weight, samples)
        return described["all"]

    splits = [kind(paths, features_by) if paths else None for paths in (train, evaluation)]
    check_same_features(train, evaluation or [])
    return data_from_splits(splits, described["all"], num_classes)


def check_same_features(train: list[str], evaluation: list[str]) -> None:
    """Raises `InputError` if the features.json of folders of shards differ in how to read records, or in the classes.

    A record has its class as a number. Evaluation shards without names have the training shards' numbers.
    """
    trained, folders = _by_folder(train), _by_folder([*train, *evaluation])
    contents = {folder: features.read_json(paths)[1] or {} for folder, paths in folders.items()}
    names = {folder: content.get("classes") or [] for folder, content in contents.items()}
    first, *others = contents
    ignored = {"classes", "num_classes", "columns", "splits", "ids" if any(names.values()) else ""}
    for folder in others:
        both = contents[first] and contents[folder]
        keys = (contents[first].keys() | contents[folder].keys()) - ignored if both else ()
        other = [key for key in sorted(keys) if contents[first].get(key) != contents[folder].get(key)]
        if names[folder] != names[first] and (folder in trained or (names[folder] and names[first])):
            other.append("the numbers of classes")
        if other:
            raise InputError(
                f"the shards in {first} and in {folder} differ in {', '.join(other)}, by their {features.NAME}; write "
                "both by crankshaft prepare from one source, or train on one of them"
            )


def data_from_splits(splits: Sequence[Any], described: Features, num_classes: int) -> Data:
    """Returns opened training and evaluation splits with the properties in their features.json.

    Args:
      splits: training and evaluation examples; the latter may be None.
      num_classes: number of classes that the user passed; 0 is features.json's.

    Raises:
      InputError: features.json is malformed.
    """
    try:
        data = data_json.from_json(described.extra, features.NAME)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{features.NAME} lacks properties of the data ({error}); run crankshaft prepare again"
        ) from None
    for split in filter(None, splits if data.preprocessing.columns else ()):
        split.preprocessing_digest = data.preprocessing.digest
    return dataclasses.replace(data, train=splits[0], evaluation=splits[1], num_classes=num_classes or data.num_classes)


def _check_noted(paths: list[str], is_whole_folder: bool) -> None:
    """Checks shards written by `crankshaft prepare` against features.json; others are not checked.

    Args:
      is_whole_folder: whether all written shards must be present; else the user selected some.

    Raises:
      InputError: a shard is missing or has another size.
    """
    _, content = features.read_json(paths)
    here = {os.path.basename(path): path for path in paths}
    for split, noted in ((content or {}).get("splits") or {}).items():
        by_name = {os.path.basename(shard["file"]): shard for shard in noted["shards"]}
        if not by_name.keys() & here.keys():
            continue
        if is_whole_folder and (missing := [name for name in by_name if name not in here]):
            raise InputError(
                f"{os.path.join(os.path.dirname(paths[0]), missing[0])} is missing, one of the {len(by_name)} shards "
                f"of {split} that {features.NAME} names; restore it, or run crankshaft prepare again"
            )
        for name in by_name.keys() & here.keys():
            if (size := storage.file_state(here[name]).nbytes) != by_name[name]["bytes"]:
                raise InputError(
                    f"{here[name]} has {size:,} bytes, and {features.NAME} says {by_name[name]['bytes']:,}; restore "
                    "it, or run crankshaft prepare again"
                )


def library() -> Any:
    """Returns array_record's module. Raises `UsageError` without it."""
    with importing("array_record", "ArrayRecords need the library array_record; pip install array_record crc32c"):
        from array_record.python import array_record_module
    return array_record_module
