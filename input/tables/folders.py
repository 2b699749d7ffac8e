"""The files of a table, of folders named key=value too, whose keys are columns. Host code."""

from __future__ import annotations

import fnmatch
import os
import re
from typing import NamedTuple
from urllib.parse import unquote

from ..data import InputError
from ..files import storage
from ..files.storage import Files

_KEY = re.compile(r"([^=/._][^=/]*)=(.*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's value for a missing one


class TableFiles(NamedTuple):
    """The files of a table.

    Attributes:
      files: those that are not empty.
      keys: columns that the folders' names hold: values by name, one for each file, text; "" is a missing value.
      empty: paths of files of 0 bytes.
    """

    files: Files
    keys: dict[str, list[str]]
    empty: list[str]


def find(
    data_dir: str | None,
    patterns: tuple[str, ...],
    expected: str,
    flag: str = "data_dir",
    like: TableFiles | None = None,
) -> TableFiles:
    """Finds the files of a table, as `storage.find` does, and those in folders such as year=2024 of a folder.

    The key of such a folder is a column if the folder is below the one that is named, if its value is not the same for
    all files, or if it is a column of `like`.

    Raises:
      InputError: there are no such files, all are empty, or some are in a folder of a key and others are not.
    """
    parts = [os.path.expanduser(part.strip()) for part in (data_dir or "").split(",")]
    leaves = ",".join(leaf for part in parts for leaf in _leaves(part, patterns))
    paths = storage.find(leaves, patterns, expected, flag)
    said = {path: _keys(path) for path in paths}
    names: dict[str, None] = dict.fromkeys(like.keys if like else ())
    for path, its in said.items():
        below = min((path[len(root) :] for root in map(_root, parts) if path.startswith(root)), key=len, default="")
        names |= dict.fromkeys(key for key in its if key in _keys(below) or said[paths[0]].get(key) != its[key])
    for name in names:
        if out := [path for path in paths if name not in said[path]]:
            inside = next((path for path in paths if name in said[path]), like.files.paths[0] if like else "")
            raise InputError(f"{out[0]} is in no folder {name}=..., and {inside} is; give files of such folders alone")
    files = Files(paths)
    empty = [path for path, size in zip(paths, files.sizes, strict=True) if not size]
    if len(empty) == len(paths):
        raise InputError(f"{paths[0]} is empty: expected rows, found 0 bytes; give files that have some")
    whole = [path for path in paths if path not in {*empty}]
    return TableFiles(
        Files(whole) if empty else files, {name: [said[path][name] for path in whole] for name in names}, empty
    )


def _leaves(folder: str, patterns: tuple[str, ...]) -> list[str]:
    """Returns the folders that hold a table's files: those of all keys, or the folder itself."""
    if not storage.is_folder(folder):
        return [folder]
    inner = [name for name in storage.folders_in(folder) if _KEY.fullmatch(name)]
    if not inner:
        return [folder]
    has_files = any(fnmatch.fnmatch(name, pattern) for name in storage.names_in(folder) for pattern in patterns)
    below = [leaf for name in inner for leaf in _leaves(f"{folder.rstrip('/')}/{name}", patterns)]
    return [*([folder] if has_files else []), *below]


def _root(part: str) -> str:
    """Returns the folder that a part of data_dir names, up to its first wildcard."""
    return part if storage.is_folder(part) else os.path.dirname(re.split(r"[*?\[]", part, maxsplit=1)[0])


def _keys(path: str) -> dict[str, str]:
    """Returns the keys in the names of a file's folders, and their values."""
    pairs = [match.groups() for each in path.split("/")[:-1] if (match := _KEY.fullmatch(each))]
    return {unquote(key): "" if value == _NULL else unquote(value) for key, value in pairs}
