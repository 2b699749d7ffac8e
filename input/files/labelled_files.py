"""Finds files and the class of each: in a folder for each class, or by a list."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...engine.errors import counted
from ..checks import InputError
from . import listing, storage

_LISTS = (".txt", ".csv", ".tsv", ".lst")
# Image formats that are not decoded.
_NOT_READ = (".webp", ".tif", ".tiff", ".heic", ".avif", ".jp2", ".jxl", ".ppm", ".pgm")
_NUMBER = re.compile(r"\d{1,9}")  # fits into int32
_HEADERS = ({"path", "label"}, {"file", "label"}, {"filename", "label"}, {"image", "label"})


class Labelled(NamedTuple):
    """Files and their classes.

    Attributes:
      labels: class of each file, int32 [files].
      names: names of the classes, by number; None if a list has numbers.
    """

    paths: list[str]
    labels: np.ndarray
    names: list[str] | None
    num_classes: int


def find(
    data_dir: str | None,
    kind: listing.FileKind,
    is_one: Callable[[bytes], bool],
    flag: str,
    training: Labelled | None = None,
    allows_outside: bool = True,
) -> Labelled:
    """Finds the files that a flag names, and numbers their classes.

    Classes that have names are numbered in the names' order. Where files come by lists alone and each label is a whole
    number, that is the class.

    Args:
      data_dir: a folder of folders, one for each class, whose own folders are read too; a list, a file with a path and
        a label on each line, with a comma or white space between, paths as seen from the list; a glob of files in
        folders of classes; or several of these with commas between.
      is_one: returns whether a file without a suffix is one of them, by its first 16 bytes.
      training: the training data, whose classes are used; None numbers the classes.
      allows_outside: whether a list may name, and a folder may have links to, files that are not below its folder.

    Raises:
      InputError: there are no files, a line has no label, files are not below the folder, or a class is not in the
        training data.
    """
    if not data_dir:
        raise InputError(f"{flag} is not set; name {_expected(kind)}")
    pairs: list[tuple[str, str]] = []
    by_lists = True
    for pattern in listing.patterns(data_dir):
        is_list, folder = pattern.lower().endswith(_LISTS), os.path.dirname(re.split(r"[*?\[]", pattern)[0])
        by_lists = by_lists and is_list
        if is_list:
            found = _read_list(pattern)
        elif listing.is_folder(pattern):
            folder = pattern
            found = [(path, _name(inside)) for path, inside in _read_class_folders(pattern, kind, is_one, flag)]
        else:
            paths = listing.find(pattern, kind, flag).paths
            found = [(path, _name(os.path.basename(os.path.dirname(path)))) for path in paths]
        if not allows_outside and (outside := [path for path, _ in found if not _is_below(path, folder)]):
            raise InputError(
                f"{flag}={pattern}: {counted(len(outside), 'file')} of {len(found):,} not below its folder, first "
                f"{outside[0]}, as whoever made the data chose by a list's line or a link; look what is there, and "
                "give input_arg=allow_outside=true to read it"
            )
        pairs += found
    if not by_lists:
        # In a fixed random order, so that any number of last examples has all classes.
        pairs = [pairs[at] for at in np.random.default_rng(0).permutation(len(pairs))]
    return _number_labels(pairs, by_lists, flag, training)


def _name(folder: str) -> str:
    """Returns a class's name from its folder's: as UTF-8 if possible, whatever the process's locale."""
    return os.fsencode(folder).decode(errors="surrogateescape")


def _number_labels(pairs: list[tuple[str, str]], by_lists: bool, flag: str, training: Labelled | None) -> Labelled:
    paths, texts = [path for path, _ in pairs], [text for _, text in pairs]
    if training is None and not (by_lists and all(map(_NUMBER.fullmatch, {*texts}))):
        names = sorted({*texts})
        training = Labelled([], np.zeros(0, np.int32), names, len(names))
    if training is not None and training.names is not None:
        numbers = {name: number for number, name in enumerate(training.names)}
        allowed = _name_few(training.names)
    else:  # the labels are the numbers
        numbers = {text: int(text) for text in {*texts} if _NUMBER.fullmatch(text)}
        allowed = ""
        if training is not None:
            numbers = {text: number for text, number in numbers.items() if number < training.num_classes}
            allowed = f"0 to {training.num_classes - 1}"
    for path, text in pairs:
        if text not in numbers:
            raise InputError(
                f"{flag}: {path} is of class {text}, which the training data lacks ({allowed}); let both have the same "
                "classes"
            )
    labels = np.array([numbers[text] for text in texts], np.int32)
    if training is None:
        return Labelled(paths, labels, None, int(labels.max()) + 1)
    return Labelled(paths, labels, training.names, training.num_classes)


def _name_few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _expected(kind: listing.FileKind) -> str:
    return f"a folder of classes with {kind.expected} files, or a list ({', '.join(_LISTS)}) of path,label"


def _read_class_folders(
    folder: str, kind: listing.FileKind, is_one: Callable[[bytes], bool], flag: str
) -> list[tuple[str, str]]:
    """Returns (path, class) of each file, sorted by the names of classes and files; logs what is left out."""
    left_out: dict[str, list[str]] = collections.defaultdict(list)
    beside, classes = listing.files_and_folders(folder)
    classes = [name for name in classes if not name.startswith(".")]
    if not classes:
        raise InputError(f"{flag}={folder}: expected {_expected(kind)}, found {listing.describe_path(folder)}")
    left_out["beside the folders of classes"] += [name for name in beside if not name.startswith(".")]
    pairs = []
    for name in classes:
        inside = listing.join(folder, name)
        entries = listing.in_folder(inside, kind, flag, left_out)
        unread = (other for other in left_out[listing.OTHER] if other.lower().endswith(_NOT_READ))
        if other := next(unread, None):
            raise InputError(
                f"{os.path.join(inside, other)} is of a kind that is not read; convert it to one of {kind.expected}, "
                "or move it elsewhere"
            )
        # In reverse, as a later entry replaces an earlier one: of several names of a file the first stays.
        paths = {entry.resolved: entry.path for entry in sorted(entries, key=lambda entry: entry.path, reverse=True)}
        unnamed = [path for path in paths.values() if "." not in os.path.basename(path)]
        files = storage.Files(unnamed)
        others = {path for n, path in enumerate(unnamed) if not is_one(files.pread(n, 0, min(files.sizes[n], 16)))}
        left_out[listing.OTHER] += map(os.path.basename, others)
        class_paths = [path for path in reversed(paths.values()) if path not in others]
        if name.lower() in listing.SPLITS and not any(os.path.dirname(path) == inside for path in class_paths):
            class_paths = []  # a folder above class folders
        if not class_paths:
            raise InputError(
                f"{flag}={folder}: the class folder {name} has no {kind.expected} file, but "
                f"{listing.describe_path(inside)}; each folder in it is a class: remove it, or name the folder above "
                "the classes"
            )
        pairs += [(path, name) for path in class_paths]
    listing.log_left_out(f"{flag}={folder}", left_out)
    return pairs


def _is_below(path: str, folder: str) -> bool:
    """Returns whether a file is in a folder or in one of those in it, whatever links are on its path."""
    if storage.is_remote(path):
        return path.startswith(f"{folder}/") and ".." not in path.split("/")
    within = os.path.realpath(folder)
    return os.path.commonpath([within, os.path.realpath(path)]) == within


def _read_list(path: str) -> list[tuple[str, str]]:
    """Returns (path, label) of each line of a list."""
    try:
        lines = storage.Files([path]).read(0).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}); write it again"
        ) from None
    folder, pairs = os.path.dirname(path), []
    for number, line in enumerate(lines, 1):
        if not (line := line.strip()):
            continue
        name, *rest = line.rsplit("," if "," in line else None, 1)
        name, label = name.strip().strip('"'), "".join(rest).strip().strip('"')
        if number == 1 and {name.lower(), label.lower()} in _HEADERS:
            continue
        if not name or not label:
            raise InputError(f"{path}, line {number}: expected path,label, found one of them; write both on each line")
        listed = name if storage.is_remote(name) else os.path.join(folder, name)
        pairs.append((listed, label))
    if not pairs:
        raise InputError(f"{path} names no file; write path,label on each line")
    return pairs
