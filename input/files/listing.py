"""Lists the files that a flag names; all inputs list theirs here.

Folders are read completely, each file once. Files left out are logged; incomplete sets are errors.
"""

from __future__ import annotations

import collections
import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...engine import logging
from ..checks import InputError
from .storage import Files, is_remote, read_remote, retried

_PACKED = re.compile(r"(.*)\.(bz2|xz|zst|zstd|lz4|z|zip|7z|rar|tar|tgz)")  # not read; only gzip is
_TEMPORARY = re.compile(
    r".*(~|\.(bak|backup|orig|old|sw[nop]|part|partial|crdownload)|\.(tmp|temp)(\.[0-9a-f]+)?|\.incomplete(\..*)?)|#.*#|~\$.*"
)
# Beside shards, never data.
_OURS = re.compile(r".*\.(index|lock|crc|md5|sha1|sha256|sha512)|features\.json|prepare\.jsonl")
_SET_MEMBER = re.compile(r"(.*?)-([0-9]{4,})-of-([0-9]{4,})(?![0-9]).*", re.DOTALL)
_SPLITS = {"data_dir": ("train", "training"), "eval_data_dir": ("validation", "valid", "val", "eval", "dev", "test")}
SPLITS = (*_SPLITS["data_dir"], *_SPLITS["eval_data_dir"])  # as files and folders are named
_SPLIT = re.compile(rf"(?:.*[-_.])?({'|'.join(SPLITS)})(\.\w+)?")
OTHER = "other names"  # a reason
_SHOWN = 5  # names in a message


class FileKind(NamedTuple):
    """The files of a folder that are an input's data.

    Attributes:
      expected: description for messages: "shards of TFRecords (*.tfrecord)".
      names: regular expressions for whole names in lower case, without the `.gz` that any may have; the first that any
        file matches is used, and files that match a later one are then left out.
      empty: the expectation that a file of 0 bytes fails, for messages; such files are then left out; "" reads them.
      subfolders: a regular expression for names of subfolders to read; "" for none.
      beside: a regular expression for names that a glob may match and that are not data.
    """

    expected: str
    names: tuple[str, ...]
    empty: str = ""
    subfolders: str = ""
    beside: str = ""


class ListedFile(NamedTuple):
    """A file that a pattern or folder names: as it was found there, and what it is a link to."""

    path: str
    resolved: str  # the same for all paths of one file

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def find(data_dir: str | None, kind: FileKind, flag: str = "data_dir") -> Files:
    """Returns the files that a flag names, each once, in order; those of a folder or a glob are sorted by name.

    Numbers in names count as numbers: day-2 stands before day-10. Hidden, backup, temporary and empty files are left
    out, and a packed file beside the same one unpacked; a warning names them. Files named NAME-00000-of-00004 must be
    complete sets. If files' names have splits (train, test), training uses a folder's files of train, and evaluation
    those of validation, else of test.

    Args:
      data_dir: a folder, a file, a glob, or several with commas between; one that exists is never read as a glob.
      flag: the flag's name, for messages, and for the split.

    Raises:
      InputError: the flag is not set, or files are missing, incomplete or all empty.
    """
    if not data_dir:
        raise InputError(f"{flag} is not set; name a folder with {kind.expected}, a glob, or comma-separated files")
    paths_by_target: dict[str, str] = {}
    for pattern in patterns(data_dir):
        left_out: dict[str, list[str]] = collections.defaultdict(list)
        entries = (in_folder if is_folder(pattern) else _matching)(pattern, kind, flag, left_out)
        if not entries:
            raise InputError(f"{flag}={pattern}: expected {kind.expected}, found {describe_path(pattern)}")
        for entry in entries:
            if entry.resolved in paths_by_target:
                left_out[f"the same file as {os.path.basename(paths_by_target[entry.resolved])}"].append(entry.path)
            else:
                paths_by_target[entry.resolved] = entry.path
        log_left_out(f"{flag}={pattern}", left_out)
    files = Files([*paths_by_target.values()])
    if not kind.empty:
        return files
    return files.only(not_empty(files.paths, [not size for size in files.sizes], kind.empty))


def patterns(data_dir: str) -> list[str]:
    """Splits a flag's value at commas into paths and globs, unless a path contains the commas."""
    whole = os.path.expanduser(data_dir)
    if "," not in data_dir or exists(whole):
        return [whole]
    return [os.path.expanduser(part.strip()) for part in data_dir.split(",")]


def not_empty(paths: Sequence[str], empty: Sequence[bool], line: str) -> list[int]:
    """Returns the indices of the files that are not empty; logs the empty ones.

    `line` is the end of the message: the expectation and the fix.

    Raises:
      InputError: all are empty.
    """
    if all(empty):
        raise InputError(f"{paths[0]} is empty{f', as all {len(paths):,} files are' if paths[1:] else ''}: {line}")
    log_empty([path for path, is_empty in zip(paths, empty, strict=True) if is_empty])
    return [number for number, is_empty in enumerate(empty) if not is_empty]


def log_empty(paths: list[str]) -> None:
    """Logs that empty files are left out."""
    if paths:
        logging.warning("%d left out as empty: %s", len(paths), _name_few(paths))


def log_left_out(source: str, left_out: dict[str, list[str]]) -> None:
    """Logs in one line which files are not read, by reason."""
    left_out = {why: names for why, names in left_out.items() if names}
    if left_out:
        reasons = "; ".join(f"{_name_few(sorted(names, key=natural))} ({why})" for why, names in left_out.items())
        logging.warning("%s: %d not read: %s", source, sum(map(len, left_out.values())), reasons)


def is_hidden_or_temporary(name: str) -> bool:
    """Returns whether a name is that of a hidden, backup or temporary file."""
    return name.startswith(".") or _TEMPORARY.fullmatch(name.lower()) is not None


def exists(path: str) -> bool:
    """Returns whether a path exists."""
    return read_remote(path, "exists") if is_remote(path) else os.path.lexists(path)


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder."""
    if is_remote(path):  # not `isdir`, which is False for an unreachable folder
        return exists(path) and read_remote(path, "stat").is_directory
    return os.path.isdir(path)


def join(folder: str, name: str) -> str:
    """Joins a folder and a name."""
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(folder, name)


def files_and_folders(folder: str) -> tuple[dict[str, str], list[str]]:
    """Returns a folder's files, by name with their resolved paths, and its folders' names. Raises `InputError`."""
    if is_remote(folder):
        names = sorted(read_remote(folder, "listdir"))
        folders = [
            name.rstrip("/")
            for name in names
            if name.endswith("/") or read_remote(join(folder, name), "stat").is_directory
        ]
        return {name: join(folder, name) for name in names if name.rstrip("/") not in folders}, folders
    try:
        return retried(folder, lambda: _scan(folder))
    except OSError as error:
        raise InputError(f"{folder} can't be read ({error.strerror}); see to its permissions") from None


def _scan(folder: str) -> tuple[dict[str, str], list[str]]:
    real = os.path.realpath(folder)
    files, folders = {}, []
    with os.scandir(folder or os.curdir) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.name)
            else:
                is_link = entry.is_symlink()
                files[entry.name] = os.path.realpath(entry.path) if is_link else os.path.join(real, entry.name)
    return dict(sorted(files.items())), sorted(folders)


def walk(folder: str, subfolders: str, left_out: dict[str, list[str]]) -> Iterator[ListedFile]:
    """Yields the files of a folder and of its matching subfolders, at any depth.

    `left_out` receives the names of the other folders.
    """
    # With the real paths above each, since a link to one of them would be followed for ever.
    reading = [(folder, frozenset({os.path.realpath(folder)}))]
    for path, above in reading:  # grows during the loop
        files, folders = files_and_folders(path)
        yield from (ListedFile(join(path, name), resolved) for name, resolved in files.items())
        for name in folders:
            inside = join(path, name)
            real = inside if is_remote(inside) else os.path.realpath(inside)
            if not name.startswith(".") and re.fullmatch(subfolders, name) and real not in above:
                reading.append((inside, above | {real}))
            elif not name.startswith("."):
                left_out["folders"].append(f"{name}/")


def in_folder(folder: str, kind: FileKind, flag: str, left_out: dict[str, list[str]]) -> list[ListedFile]:
    """Returns the data files of a folder, sorted by path; see `find`.

    `left_out` receives the names of files that are left out, by reason.

    Raises:
      InputError: the files are incomplete or can't be read.
    """
    by_rank: dict[int, list[ListedFile]] = collections.defaultdict(list)
    for entry in walk(folder, kind.subfolders, left_out):
        name = entry.name.lower()
        rank = _rank(name, kind)
        if _OURS.fullmatch(name) or (rank is None and name.startswith((".", "_"))):
            continue
        if is_hidden_or_temporary(name):
            left_out["hidden, backup or temporary"].append(entry.name)
        elif rank is None:
            if (packed := _PACKED.fullmatch(name)) and _rank(packed[1], kind) is not None:
                raise InputError(f"{entry.path} is packed as {packed[2]}, which is not read; unpack it, or use gzip")
            left_out[OTHER].append(entry.name)
        else:
            by_rank[rank].append(entry)
    if not by_rank:
        return []
    best = min(by_rank)
    for rank in sorted(by_rank.keys() - {best}):
        left_out["read only if there are no others"] += [entry.name for entry in by_rank[rank]]
    entries = _leave_out_packed(by_rank[best], left_out)
    entries = _select_split(sorted(entries, key=lambda entry: natural(entry.path)), folder, flag, left_out)
    _check_sets(entries, flag, is_folder=True)
    return entries


def _rank(name: str, kind: FileKind) -> int | None:
    """Returns the index of the first of a kind's expressions that matches a name in lower case, or None."""
    name = name.removesuffix(".gz")
    return next((rank for rank, names in enumerate(kind.names) if re.fullmatch(names, name, re.DOTALL)), None)


def _matching(pattern: str, kind: FileKind, flag: str, left_out: dict[str, list[str]]) -> list[ListedFile]:
    if exists(pattern):  # also with a bracket in its name
        return [ListedFile(pattern, pattern if is_remote(pattern) else os.path.realpath(pattern))]
    paths = read_remote(pattern, "glob") if is_remote(pattern) else glob.glob(pattern)
    entries = []
    for path in sorted(paths, key=natural):
        name = os.path.basename(path).lower()
        if is_folder(path):
            left_out["folders"].append(f"{os.path.basename(path)}/")
        elif is_hidden_or_temporary(name):
            left_out["hidden, backup or temporary"].append(os.path.basename(path))
        elif not (_OURS.fullmatch(name) or re.fullmatch(kind.beside, name)):
            entries.append(ListedFile(path, path if is_remote(path) else os.path.realpath(path)))
    entries = _leave_out_packed(entries, left_out)
    _check_sets(entries, flag, is_folder=False)
    return entries


def _leave_out_packed(entries: list[ListedFile], left_out: dict[str, list[str]]) -> list[ListedFile]:
    """Returns the files without packed ones whose unpacked file exists too."""
    paths = {entry.path for entry in entries}
    twice = {entry.path for entry in entries if entry.path[-3:].lower() == ".gz" and entry.path[:-3] in paths}
    if twice:
        left_out["there unpacked as well"] += map(os.path.basename, twice)
    return [entry for entry in entries if entry.path not in twice]


def _sets(entries: list[ListedFile]) -> dict[str, dict[int, dict[int, list[str]]]]:
    """Returns the files that are parts of sets: by prefix, by the set's size, by number."""
    sets: dict[str, dict[int, dict[int, list[str]]]] = {}
    for entry in entries:
        if match := _SET_MEMBER.fullmatch(entry.name):
            parts = sets.setdefault(join(os.path.dirname(entry.path), match[1]), {}).setdefault(int(match[3]), {})
            parts.setdefault(int(match[2]), []).append(entry.path)
    return sets


def _select_split(
    entries: list[ListedFile], folder: str, flag: str, left_out: dict[str, list[str]]
) -> list[ListedFile]:
    """Returns the files of a flag's split, if the files' names have several."""
    splits = {
        prefix: match[1] for prefix in _sets(entries) if (match := _SPLIT.fullmatch(os.path.basename(prefix).lower()))
    }
    if len({*splits.values()}) < 2:
        return entries
    wanted = next((name for name in _SPLITS.get(flag, ()) if name in splits.values()), None)
    if wanted is None:
        prefix = sorted(splits)[0]
        raise InputError(
            f"{flag}={folder} has files of several splits ({', '.join(sorted({*splits.values()}))}); name those of one "
            f"by a glob: {flag}={glob.escape(prefix)}*"
        )
    prefixes = tuple(f"{prefix}-" for prefix, split in splits.items() if split == wanted)
    others = [entry.name for entry in entries if not entry.path.startswith(prefixes)]
    left_out[f"not of the split {wanted}; name another one's by a glob"] += others
    return [entry for entry in entries if entry.path.startswith(prefixes)]


def _check_sets(entries: list[ListedFile], flag: str, is_folder: bool) -> None:
    """Raises `InputError` unless sets of files (NAME-00000-of-00004, ...) are complete, with one set per name."""
    for prefix, by_count in _sets(entries).items():
        if len(by_count) > 1:
            counts = " and ".join(
                f"{sum(map(len, parts.values()))} of {count}" for count, parts in sorted(by_count.items())
            )
            example = f"{glob.escape(prefix)}-*-of-{max(by_count):05d}*"
            raise InputError(
                f"{prefix} has sets with different numbers of files ({counts}); one may be an older one: remove that, "
                f"or name one by a glob: {flag}={example}"
            )
        count, parts = next(iter(by_count.items()))
        if twice := next((paths for paths in parts.values() if len(paths) > 1), None):
            raise InputError(f"{twice[0]} and {twice[1]} are one part of a set of {count}; remove one of them")
        if len(parts) < count:
            first = 1 if 0 not in parts and count in parts else 0  # numbered from 1
            missing = [number for number in range(first, first + count) if number not in parts]
            there = next(iter(parts.values()))[0]
            names = prefix + re.sub(r"-[0-9]+", f"-{missing[0]:05d}", there[len(prefix) :], count=1)
            names += f" and {len(missing) - 1} more" if missing[1:] else ""
            if is_folder:
                raise InputError(
                    f"{names} is missing, of a set of {count} files; restore it, or name those to be read by a glob, "
                    f"{flag}={glob.escape(prefix)}-*"
                )
            logging.warning("%d of the %d files of %s are read, without %s", len(parts), count, prefix, names)


def describe_path(path: str) -> str:
    """Describes a path for a message: nothing, or a folder's contents."""
    if not is_folder(path):
        return "nothing"
    files, folders = files_and_folders(path)
    return _name_few(sorted([*files, *folders])) or "an empty folder"


def _name_few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def natural(path: str) -> list:
    """Returns a sort key by which numbers in names count as numbers."""
    return [*((int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", path)), (0, path)]
