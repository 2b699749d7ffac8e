"""The files of a table, including those in key=value folders, whose keys are columns."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import unquote

from ..checks import InputError
from ..files import listing
from ..files.storage import Files

SUBFOLDERS = r"([^=/._][^=/]*)=(.*)"
_KEY = re.compile(SUBFOLDERS)
_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's value for a missing one


class TableFiles(NamedTuple):
    """The files of a table.

    Attributes:
      files: the files that are not empty.
      keys: columns from the folders' names: text values by name, one per file; "" is missing.
    """

    files: Files
    keys: dict[str, list[str]]


def find(
    data_dir: str | None, kind: listing.FileKind, flag: str = "data_dir", like: TableFiles | None = None
) -> TableFiles:
    """Lists the files of a table, as `listing.find` does, and those in subfolders such as year=2024.

    A key is a column if its folder is below the named one, if its value differs between files, or if it is a column of
    `like`.

    Raises:
      InputError: files are missing or all empty, or only some are in a folder of a key.
    """
    files = listing.find(data_dir, kind, flag)
    keys = {path: _keys(path) for path in files.paths}
    roots = [*map(_root, listing.patterns(data_dir or ""))]
    names: dict[str, None] = dict.fromkeys(like.keys if like else ())
    for path, its in keys.items():
        below = min((path[len(root) :] for root in roots if path.startswith(root)), key=len, default="")
        names |= dict.fromkeys(key for key in its if key in _keys(below) or keys[files.paths[0]].get(key) != its[key])
    for name in names:
        if out := [path for path in files.paths if name not in keys[path]]:
            inside = next((path for path in files.paths if name in keys[path]), like.files.paths[0] if like else "")
            raise InputError(f"{out[0]} is in no folder {name}=..., and {inside} is; give files of such folders alone")
    return TableFiles(files, {name: [keys[path][name] for path in files.paths] for name in names})


def _root(pattern: str) -> str:
    """Returns the folder that a pattern of data_dir names, up to its first wildcard."""
    return pattern if listing.is_folder(pattern) else os.path.dirname(re.split(r"[*?\[]", pattern, maxsplit=1)[0])


def _keys(path: str) -> dict[str, str]:
    """Returns the keys in the names of a file's folders, and their values."""
    pairs = [match.groups() for each in path.split("/")[:-1] if (match := _KEY.fullmatch(each))]
    return {unquote(key): "" if value == _NULL else unquote(value) for key, value in pairs}
