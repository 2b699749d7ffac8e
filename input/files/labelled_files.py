"""Finds files and the class of each: in a folder for each class, or by a list. Host code."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np

from ..data import InputError
from . import storage

_LISTS = (".txt", ".csv", ".tsv", ".lst")
_NOT_READ = (".gif", ".bmp", ".webp", ".tif", ".tiff", ".heic", ".avif", ".jp2", ".jxl")  # and would be missed
_NUMBER = re.compile(r"\d{1,9}")  # what int32 holds
_HEADERS = ({"path", "label"}, {"file", "label"}, {"filename", "label"}, {"image", "label"})


class Labelled(NamedTuple):
    """Files and their classes.

    Attributes:
      paths: of the files.
      labels: int32 [files], the class of each.
      names: of the classes, by number; None where a list gives numbers.
      num_classes: how many there are.
    """

    paths: list[str]
    labels: np.ndarray
    names: list[str] | None
    num_classes: int


def find(data_dir: str | None, suffixes: tuple[str, ...], flag: str, training: Labelled | None = None) -> Labelled:
    """Finds the files that a flag names, and numbers their classes.

    Classes that have names are numbered in the names' order. Where files come by lists alone and each label is a whole
    number, that is the class.

    Args:
      data_dir: a folder of folders, one for each class; a list, a file with a path and a label on each line, with a
        comma or white space between, paths as seen from the list; a glob of files in such folders; or several of these
        with commas between.
      suffixes: of the files, in lower case: (".jpg", ".png").
      flag: its name, for messages.
      training: whose classes these are; None numbers them by what is found.

    Raises:
      InputError: nothing is there, a line has no label, or a class is not one of those of training.
    """
    expected = f"a folder of classes with {', '.join(suffixes)} files, or a list ({', '.join(_LISTS)}) of path,label"
    if not data_dir:
        raise InputError(f"--{flag} is not given; name {expected}")
    pairs: list[tuple[str, str]] = []
    by_lists = True
    for part in data_dir.split(","):
        part = os.path.expanduser(part.strip())
        if part.lower().endswith(_LISTS):
            pairs += _listed(part)
            continue
        by_lists = False
        if storage.is_folder(part):
            pairs += _in_class_folders(part, suffixes, expected, flag)
        else:
            paths = storage.find(part, (), expected, flag)
            pairs += [(path, os.path.basename(os.path.dirname(path))) for path in paths]
    if not by_lists:
        # In a fixed random order, so that the last so many examples are of all classes.
        pairs = [pairs[at] for at in np.random.default_rng(0).permutation(len(pairs))]
    return _numbered(pairs, by_lists, flag, training)


def _numbered(pairs: list[tuple[str, str]], by_lists: bool, flag: str, training: Labelled | None) -> Labelled:
    paths, texts = [path for path, _ in pairs], [text for _, text in pairs]
    if training is None and not (by_lists and all(map(_NUMBER.fullmatch, {*texts}))):
        names = sorted({*texts})
        training = Labelled([], np.zeros(0, np.int32), names, len(names))
    if training is not None and training.names is not None:
        numbers = {name: number for number, name in enumerate(training.names)}
        known = _few(training.names)
    else:  # as they are given
        numbers = {text: int(text) for text in {*texts} if _NUMBER.fullmatch(text)}
        known = ""
        if training is not None:
            numbers = {text: number for text, number in numbers.items() if number < training.num_classes}
            known = f"0 to {training.num_classes - 1}"
    for path, text in pairs:
        if text not in numbers:
            raise InputError(
                f"--{flag}: {path} is of class {text}, which the training data has not ({known}); let both have the "
                "same classes"
            )
    labels = np.array([numbers[text] for text in texts], np.int32)
    if training is None:
        return Labelled(paths, labels, None, int(labels.max()) + 1)
    return Labelled(paths, labels, training.names, training.num_classes)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _in_class_folders(folder: str, suffixes: tuple[str, ...], expected: str, flag: str) -> list[tuple[str, str]]:
    """Returns (path, class) of each file, classes and files in the order of their names."""
    classes = [name for name in storage.folders_in(folder) if not name.startswith(".")]
    if not classes:
        raise InputError(f"--{flag}={folder}: expected {expected}, found {storage.what_is_there(folder)}")
    pairs = []
    for name in classes:
        inside = os.path.join(folder, name)
        inside_it = [each for each in storage.names_in(inside) if not each.startswith(".")]
        if other := next((each for each in inside_it if each.lower().endswith(_NOT_READ)), None):
            raise InputError(
                f"{os.path.join(inside, other)} is of a kind that is not read; convert it to {' or '.join(suffixes)}, "
                "or move it elsewhere"
            )
        names = [each for each in inside_it if each.lower().endswith(suffixes)]
        if not names:
            raise InputError(
                f"--{flag}={folder}: the class folder {name} has no {', '.join(suffixes)} file, but "
                f"{storage.what_is_there(inside)}; each folder in it is a class: remove it, or name the folder above "
                "the classes"
            )
        pairs += [(os.path.join(inside, each), name) for each in names]
    return pairs


def _listed(path: str) -> list[tuple[str, str]]:
    """Returns (path, label) of each line of a list."""
    files = storage.Files([path])
    try:
        lines = files.read(0).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}); write it again"
        ) from None
    folder, pairs = os.path.dirname(path), []
    for number, line in enumerate(lines, 1):
        if not (line := line.strip()):
            continue
        name, _, label = line.rpartition(",") if "," in line else _by_white_space(line)
        name, label = name.strip().strip('"'), label.strip().strip('"')
        if number == 1 and {name.lower(), label.lower()} in _HEADERS:
            continue
        if not name or not label:
            raise InputError(
                f"{path}, line {number}: expected path,label, found {line[:80]!r}; write both on each line"
            )
        pairs.append((name if storage.is_remote(name) else os.path.join(folder, name), label))
    if not pairs:
        raise InputError(f"{path} names no file; write path,label on each line")
    return pairs


def _by_white_space(line: str) -> tuple[str, str, str]:
    name, *label = line.rsplit(None, 1)
    return name, " ", "".join(label)
