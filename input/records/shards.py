"""Finds shards, and compares them with what features.json has noted of them. Host code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from .. import known
from ..data import Data, InputError
from ..files import listing, storage
from . import features
from .features import Features

BESIDE = r".*\.(json|md|txt)"  # that a glob may match
_EVALUATION = ("eval", "validation", "val", "test")  # folders beside "train"


def find_splits(data_dir: str | None, eval_data_dir: str, kind: listing.Kind) -> tuple[list[str], list[str] | None]:
    """Returns the files to train on and those to evaluate on, None if none: of a folder with train and eval, of both.

    Args:
      data_dir: see `listing.find`.
      eval_data_dir: likewise.
      kind: likewise.

    Raises:
      InputError: there are none.
    """
    if data_dir and listing.is_folder(listing.join(data_dir, "train")):
        if not eval_data_dir:
            folders = (listing.join(data_dir, name) for name in _EVALUATION)
            eval_data_dir = next((folder for folder in folders if listing.is_folder(folder)), "")
        data_dir = listing.join(data_dir, "train")
    train = _shards(data_dir, kind, "data_dir")
    return train, _shards(eval_data_dir, kind, "eval_data_dir") if eval_data_dir else None


def _shards(where: str | None, kind: listing.Kind, flag: str) -> list[str]:
    paths = listing.find(where, kind, flag).paths
    _check_noted(paths, listing.is_folder(where or ""))
    return paths


def open_splits(
    train: list[str], evaluation: list[str] | None, kind: Any, names: tuple[tuple, str, str], num_classes: int
) -> Data:
    """Opens the shards of both splits.

    Args:
      train: paths.
      evaluation: paths, or None.
      kind: what opens them: given paths and a function from samples of them to `Features`.
      names: features, label and weight, see `tfrecord.load`.
      num_classes: as it was given.
    """
    given, label, weight = names
    described: dict[str, Features] = {}

    def features_by(samples: Callable[[], list[bytes]]) -> Features:
        if not described:
            described["all"] = features.find(train, tuple(map(str, given)), label, weight, samples)
        return described["all"]

    splits = [kind(paths, features_by) if paths else None for paths in (train, evaluation)]
    return splits_of(splits, described["all"], num_classes)


def splits_of(splits: Sequence[Any], described: Features, num_classes: int) -> Data:
    """Returns opened splits, to train and to evaluate on, with what their features.json says of them.

    Args:
      splits: both, the second may be None.
      described: of their records.
      num_classes: as it was given; 0 is as features.json says.

    Raises:
      InputError: what it says is malformed.
    """
    try:
        about = known.of_json(described.about, features.NAME)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{features.NAME} does not say what is known of the data ({error}); run crankshaft prepare again"
        ) from None
    return dataclasses.replace(
        about, train=splits[0], evaluation=splits[1], num_classes=num_classes or about.num_classes
    )


def _check_noted(paths: list[str], is_whole_folder: bool) -> None:
    """Checks shards of `crankshaft prepare` against what features.json has noted of them; others are not checked.

    Args:
      paths: the shards.
      is_whole_folder: whether all that were written have to be there; else the user has named some.

    Raises:
      InputError: one is missing, or has another size.
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
            if (size := storage.size_of(here[name])) != by_name[name]["bytes"]:
                raise InputError(
                    f"{here[name]} has {size:,} bytes, and {features.NAME} says {by_name[name]['bytes']:,}; restore "
                    "it, or run crankshaft prepare again"
                )


def library() -> Any:
    """Returns array_record's module. Raises `InputError` where it is not installed."""
    try:
        from array_record.python import array_record_module
    except ImportError:
        raise InputError(
            "ArrayRecords need PyPI array_record, which is not installed; use pip install crankshaft[array-record]"
        ) from None
    return array_record_module
