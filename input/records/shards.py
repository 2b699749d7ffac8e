"""Finds shards, and compares them with what features.json has noted of them. Host code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...engine.data.data import Data
from ...engine.data.source import WrappedSource
from ...engine.errors import BadRecordError, setting
from .. import known
from ..checks import InputError
from ..files import listing, storage
from . import features
from .examples import ExampleSource
from .features import Features

BESIDE = r".*\.(json|md|txt)"  # that a glob may match
_EVALUATION = ("eval", "validation", "val", "test")  # folders beside "train"


def find_splits(data_dir: str | None, eval_data_dir: str, kind: listing.FileKind) -> tuple[list[str], list[str] | None]:
    """Returns the files to train on and those to evaluate on, None if none: of a folder with train and eval, of both.

    Args:
      data_dir: see `listing.find`.
      eval_data_dir: likewise.
      kind: likewise.

    Raises:
      InputError: there are none.
    """
    to_train, to_evaluate = [], []
    for part in listing.parts(data_dir) if data_dir else []:
        inner = listing.join(part, "train")
        to_train.append(inner if listing.is_folder(inner) else part)
        if listing.is_folder(inner):
            folders = (listing.join(part, name) for name in _EVALUATION)
            to_evaluate += [*filter(listing.is_folder, folders)][:1]
    train = _shards(",".join(to_train), kind, "data_dir")
    eval_data_dir = eval_data_dir or ",".join(to_evaluate)
    return train, _shards(eval_data_dir, kind, "eval_data_dir") if eval_data_dir else None


def _shards(where: str | None, kind: listing.FileKind, flag: str) -> list[str]:
    paths = listing.find(where, kind, flag).paths
    for folder, own in _by_folder(paths).items():
        _check_noted(own, folder in map(os.path.normpath, listing.parts(where or "")))
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
      train: paths.
      evaluation: paths, or None.
      kind: what opens them: given paths and a function from samples of them to `Features`.
      names: features, label and weight, see `tfrecord.load`.
      num_classes: as it was given.
    """
    selected, label, weight = names
    described: dict[str, Features] = {}

    def features_by(samples: Callable[[], list[bytes]]) -> Features:
        if not described:
            described["all"] = features.find(train, tuple(map(str, selected)), label, weight, samples)
        return described["all"]

    splits = [kind(paths, features_by) if paths else None for paths in (train, evaluation)]
    classes, numbers = numbering(train, evaluation or [])
    if numbers:
        splits = [split and Renumbered(split, numbers) for split in splits]
    return splits_of(splits, described["all"], num_classes, classes)


def numbering(train: list[str], evaluation: list[str]) -> tuple[list[str] | None, dict[str, list[int]]]:
    """Returns the names of classes of shards in several folders, and by folder what its own numbers become, if others.

    None stands for the names that the first folder has.
    The names are those of all shards to train on, sorted; those of one folder keep their order.

    Raises:
      InputError: folders of shards differ in more than the classes, or those to evaluate on have a class that those to
        train on have not.
    """
    folders = _by_folder([*train, *evaluation])
    contents = {folder: features.read_json(paths)[1] or {} for folder, paths in folders.items()}
    first, *others = contents
    names = {folder: content.get("classes") or [] for folder, content in contents.items()}
    own = {"classes", "num_classes", "columns", "splits", "prepared_from", *(["ids"] if any(names.values()) else [])}
    for folder in filter(contents.get, others) if contents[first] else ():
        keys = (contents[first].keys() | contents[folder].keys()) - own
        if other := sorted(key for key in keys if contents[first].get(key) != contents[folder].get(key)):
            raise InputError(
                f"the shards in {first} and in {folder} differ in {', '.join(other)}, by their {features.NAME}; write "
                "both by crankshaft prepare from one source, or train on one of them"
            )
    of_training = [names[folder] for folder in _by_folder(train)]
    if not any(of_training):
        return None, {}
    classes = of_training[0]
    if any(each != classes for each in of_training):
        if unnamed := next((folder for folder in _by_folder(train) if not names[folder]), None):
            raise InputError(f"the shards in {unnamed} do not name their classes, and others do; write them again")
        classes = sorted({name for each in of_training for name in each})
    for folder in _by_folder(evaluation):
        if unknown := sorted({*names[folder]} - {*classes}):
            raise InputError(
                f"the shards in {folder} have the class {unknown[0]}, which the training data has not "
                f"({', '.join(classes[:5])}{', ...' * (len(classes) > 5)}); let both have the same classes"
            )
    at = {name: number for number, name in enumerate(classes)}
    numbers = {folder: [at[name] for name in each] for folder, each in names.items() if each not in ([], classes)}
    return (None if classes == of_training[0] else classes), numbers


class Renumbered(WrappedSource):
    """Shards of several folders, each with its own numbers of classes, as one source with one numbering.

    Args:
      source: the shards.
      numbers: by folder, what its own numbers become; those of others stay.
    """

    def __init__(self, source: ExampleSource, numbers: Mapping[str, list[int]]):
        super().__init__(source)
        self.source: ExampleSource
        most, kind = max(map(max, numbers.values())), self.element_spec[1].dtype
        if kind.kind not in "iu" or most > np.iinfo(kind).max:
            raise InputError(f"{kind.name} labels do not number {most + 1} classes; write the shards from one source")
        self._numbers = [numbers.get(os.path.normpath(os.path.dirname(path))) for path in source.files()]

    def read(self, indices: np.ndarray) -> Any:
        features, labels, *rest = self.source.read(indices)
        shards, renumbered = self.source.shards_of(indices), np.array(labels)
        for shard in {*shards.tolist()}:
            numbers, rows = self._numbers[shard], shards == shard
            if numbers is None:
                continue
            wrong = rows & ((labels < 0) | (labels >= len(numbers)))
            if wrong.any():
                index = int(indices[np.flatnonzero(wrong)[0]])
                raise BadRecordError(
                    index,
                    f"{self.source.where(index)} has a label that is none of its {len(numbers)} classes; write it "
                    f"again, or leave such ones out by {setting('max_bad_records')}",
                )
            renumbered[rows] = np.array(numbers)[labels[rows]]
        return (features, renumbered, *rest)

    def identity(self) -> str:
        return f"{self.source.identity()} {self._numbers}"


def splits_of(splits: Sequence[Any], described: Features, num_classes: int, classes: list[str] | None = None) -> Data:
    """Returns opened splits, to train and to evaluate on, with what their features.json says of them.

    Args:
      splits: both, the second may be None.
      described: of their records.
      num_classes: as it was given; 0 is as features.json says.
      classes: their names, where shards of several folders are numbered by one list.

    Raises:
      InputError: what it says is malformed.
    """
    try:
        data = known.from_json(described.extra, features.NAME)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{features.NAME} does not say what is known of the data ({error}); run crankshaft prepare again"
        ) from None
    if classes:
        ids = known.ids_of(classes)
        data = dataclasses.replace(data, classes=tuple(classes), num_classes=len(classes), ids=ids)
    return dataclasses.replace(data, train=splits[0], evaluation=splits[1], num_classes=num_classes or data.num_classes)


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
