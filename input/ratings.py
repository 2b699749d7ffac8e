"""Ratings of items by users, from delimited text: user, item, rating[, timestamp]; ids any strings.

Host code, NumPy only.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import zlib

import numpy as np

from ..engine.data.data import Data
from .data import InputError, check_at_least, check_share, eval_count
from .drawn.draws import generator
from .files import listing
from .files.text_files import read_lines
from .tables.delimited import BadRecords, decode, read_records, shown

_KIND = listing.Kind(
    "a .tsv, .csv, .data or .inter file, plain or .gz",
    (r".*\.(tsv|csv|data|inter)",),
    "expected lines of data, found 0 bytes",
)
_SEPARATORS = {"\t": "tabs", "::": "'::'", ",": "commas"}
_COLUMNS = ("user", "item", "rating", "timestamp")
_THINGS = ("item", "movie", "book", "product", "song", "track", "artist", "game", "business")
# A header's names, in lower case and without what is neither letter nor digit.
_COLUMN_OF_NAME = {
    **dict.fromkeys(("user", "userid", "uid"), "user"),
    **dict.fromkeys((*_THINGS, *(thing + "id" for thing in _THINGS), "iid"), "item"),
    **dict.fromkeys(("rating", "score", "stars"), "rating"),
    **dict.fromkeys(("timestamp", "time", "ts"), "timestamp"),
}


def load(
    data_dir: str | None, seed: int, *, split: str = "time", eval_share: float = 0.1, max_bad_records: int = 0
) -> Data:
    """Reads a file, or the .tsv, .csv, .data and .inter files of a folder, plain or gzip, such as MovieLens, RecBole.

    Fields stand between tabs, commas (quotes as in RFC 4180, no line breaks inside) or `::`. The first line may name
    the columns, in any order and with further ones between, also typed as in `user_id:token`; without names they are
    user, item, rating and, if there are four, timestamp. Text is UTF-8.

    Args:
      data_dir: the file or folder.
      seed: of the random split; "time" does not use it.
      split: "time" takes the last records by timestamp for evaluation, of equal ones the last by
        their order in the files; "random" takes any, by the seed.
      eval_share: the evaluation split's part of all records, above 0 and below 1.
      max_bad_records: up to so many malformed records are skipped, with one warning.

    Returns:
      Features {"user": int64 [N], "item": int64 [N]}, labels float32 [N], the ratings; in the
      files' order in both splits. Ids are numbered from 1 in the order of their first appearance in
      the training split; an id that only the evaluation split has is 0. The vocabulary counts the 0.

    Raises:
      InputError: no file, no structure that is recognised, too many malformed records, no timestamps
        to split by, or an argument out of range.
    """
    if not data_dir:
        raise InputError(f"input=ratings needs --data_dir: a file, or a folder with {_KIND.expected}")
    if split not in ("time", "random"):
        raise InputError(f"split={split} is unknown; use time or random")
    check_share("eval_share", eval_share)
    check_at_least("max_bad_records", max_bad_records, 0)
    users, items, ratings, times, *names = _read(data_dir, split == "time", max_bad_records)
    count = len(ratings)
    held_out = eval_count(count, eval_share, f"data_dir={data_dir}")
    order = np.argsort(times, kind="stable") if split == "time" else generator(seed, 0).permutation(count)
    is_eval = np.zeros(count, bool)
    is_eval[order[count - held_out :]] = True
    users, known_users = _number(users, ~is_eval)
    items, known_items = _number(items, ~is_eval)
    ids = 0
    for each, known in zip(names, (known_users, known_items), strict=True):
        ids = zlib.crc32("\n".join([*(each[number] for number in known), ""]).encode(), ids)

    def part(rows: np.ndarray):
        return {"user": users[rows], "item": items[rows]}, ratings[rows]

    vocabulary = {"user": len(known_users) + 1, "item": len(known_items) + 1}
    return Data(part(~is_eval), part(is_eval), None, vocabulary, ids)


def _read(data_dir: str, with_times: bool, max_bad_records: int) -> tuple:
    """Reads the records of all files.

    Returns:
      Users and items int64, numbered by first appearance; ratings float32; times float64, of length 0 if not asked for;
      and the lists of the users' and of the items' ids, by number.
    """
    bad_records = BadRecords(max_bad_records)
    numbers_of_users, numbers_of_items = _numbers(), _numbers()
    pieces = []
    for path in listing.find(data_dir, _KIND).paths:
        layout = _Layout.of(path, with_times)
        for columns in read_records(path, layout.parse, layout.why_bad, bad_records, layout.header_lines):
            user_ids, item_ids, ratings, times = columns
            users = np.array([numbers_of_users[user] for user in user_ids], np.int64)
            items = np.array([numbers_of_items[item] for item in item_ids], np.int64)
            pieces.append((users, items, ratings, times))
    bad_records.warn()
    if not pieces:
        raise InputError(f"data_dir={data_dir} holds no ratings: expected lines of user, item, rating[, timestamp]")
    columns = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return (*columns, list(numbers_of_users), list(numbers_of_items))


def _numbers() -> dict[str, int]:
    """Returns a dictionary that numbers its keys from 0 in the order in which they are first looked up."""
    numbers: collections.defaultdict[str, int] = collections.defaultdict()
    numbers.default_factory = numbers.__len__
    return numbers


def _number(ids: np.ndarray, in_training: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Renumbers ids from 1 by first appearance in training, others as 0; also returns the known ids in that order."""
    known = ids[in_training]
    first = np.full(int(ids.max()) + 1, len(known), np.int64)
    first[known[::-1]] = np.arange(len(known))[::-1]  # of repeated indices, NumPy keeps the last value
    seen = np.flatnonzero(first < len(known))
    known = seen[np.argsort(first[seen])]
    new = np.zeros(len(first), np.int64)
    new[known] = np.arange(1, len(known) + 1)
    return new[ids], known


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The layout of one file's lines.

    Attributes:
      separator: between fields.
      columns: a line's number of fields.
      indices: of user, item, rating and, where it is asked for, timestamp.
      header_lines: lines at the start that are not records.
    """

    separator: str
    columns: int
    indices: tuple[int, ...]
    header_lines: int

    @classmethod
    def of(cls, path: str, with_times: bool) -> _Layout:
        """Finds the layout from the file's first line that is not blank."""
        lines = next(read_lines(path))
        number = next((i for i, line in enumerate(lines) if line), 0)
        where = f"{path}:{number + 1}"
        try:
            line = decode([lines[number]])[0]
        except ValueError:
            raise InputError(f"{where}: expected UTF-8, found {shown(lines[number])}; convert the file") from None
        separator, fields = _separate(path, where, line)
        if any(map(_is_number, fields)):
            indices, header_lines = dict(zip(_COLUMNS, range(len(fields)), strict=False)), number
            if len(fields) > len(_COLUMNS):
                raise InputError(
                    f"{where}: expected 3 or 4 columns where the first line does not name them, found {len(fields)} "
                    f"({shown(line)}); put a line of names before it: user, item, rating, timestamp"
                )
        else:
            indices, header_lines = _named(where, fields), number + 1
        if with_times and "timestamp" not in indices:
            raise InputError(
                f"{where}: split=time needs a fourth column, the timestamp, found {shown(line)}; "
                "use --input_arg split=random"
            )
        wanted = _COLUMNS if with_times else _COLUMNS[:3]
        return cls(separator, len(fields), tuple(indices[name] for name in wanted), header_lines)

    def parse(self, lines: list[bytes]):
        """Parses lines into user and item ids (strings), ratings float32, times float64 (length 0 if not asked for)."""
        rows = [_fields(line, self.separator) for line in decode(lines)]
        if set(map(len, rows)) != {self.columns}:
            raise ValueError("not as many columns in each line")
        columns = list(zip(*rows, strict=True))
        users, items, rating_fields, *time_fields = (columns[index] for index in self.indices)
        if not (all(users) and all(items)):
            raise ValueError("an empty id")
        with np.errstate(over="ignore"):
            ratings = np.array(list(map(float, rating_fields))).astype(np.float32)
        times = np.array([float(time) for column in time_fields for time in column])
        if not (np.isfinite(ratings).all() and np.isfinite(times).all()):
            raise ValueError("not finite")
        return users, items, ratings, times

    def why_bad(self, line: bytes) -> str | None:
        """Returns what makes a line malformed for `parse`; None if nothing does."""
        try:
            text = line.decode()
        except UnicodeDecodeError:
            return f"expected UTF-8, found {shown(line)}"
        try:
            fields = _fields(text, self.separator)
        except ValueError:
            return f"expected quotes around whole fields, and closed, found {shown(text)}"
        if len(fields) != self.columns:
            return (
                f"expected {self.columns} columns between {_SEPARATORS[self.separator]}, "
                f"found {len(fields)} ({shown(text)})"
            )
        for name, index in zip(_COLUMNS, self.indices, strict=False):
            if name in ("user", "item"):
                if not fields[index]:
                    return f"expected the id of {'a user' if name == 'user' else 'an item'}, found an empty field"
            elif not _is_finite(fields[index], np.float32 if name == "rating" else np.float64):
                expected = "a rating" if name == "rating" else "a timestamp, in seconds,"
                return f"expected {expected} that is a number, found {shown(fields[index])}"
        return None


def _separate(path: str, where: str, line: str) -> tuple[str, list[str]]:
    """Finds the separator, trying first the one that the file's name suggests; returns it and the line's fields."""
    named_comma = path.removesuffix(".gz").endswith(".csv")
    for separator in sorted(_SEPARATORS, key=lambda s: named_comma and s != ","):
        try:
            fields = _fields(line, separator)
        except ValueError:
            continue
        if len(fields) >= 3:
            return separator, fields
    raise InputError(
        f"{where}: expected user, item, rating[, timestamp] between tabs, commas or '::', found {shown(line)}; "
        "if the folder holds other tables too, pass the file of ratings as --data_dir"
    )


def _named(where: str, fields: list[str]) -> dict[str, int]:
    """Finds the columns' indices by the names in a header."""
    names = ["".join(filter(str.isalnum, field.partition(":")[0].lower())) for field in fields]
    indices: dict[str, int] = {}
    for index, name in enumerate(names):
        if column := _COLUMN_OF_NAME.get(name):
            if column in indices:
                raise InputError(
                    f"{where}: expected one column for {column}, found {shown(fields[indices[column]])} and "
                    f"{shown(fields[index])}; rename one of them"
                )
            indices[column] = index
    if missing := [column for column in _COLUMNS[:3] if column not in indices]:
        raise InputError(
            f"{where}: expected columns user, item, rating[, timestamp], found no {missing[0]} in "
            f"{shown(','.join(fields))}; name them so, or pass the file of ratings as --data_dir"
        )
    return indices


def _fields(line: str, separator: str) -> list[str]:
    """Splits a line into fields; quotes count only between commas."""
    if separator != "," or '"' not in line:
        return line.split(separator)
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_finite(text: str, kind: type) -> bool:
    with np.errstate(over="ignore"):
        return _is_number(text) and bool(np.isfinite(kind(float(text))))
