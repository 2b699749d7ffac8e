"""CSV files with a header, columns by name; their types are found, and they are indexed once.

Host code, NumPy only.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..engine.data.source import SourceError, Spec
from .files import storage
from .files.prepared import Writer, prepared, progress
from .files.storage import Files
from .splits import InputError, Splits
from .tables.columns import Choice, Group, Table, splits_of

_PATTERNS = ("*.csv", "*.tsv")
_EXPECTED = "CSV files (*.csv, else *.tsv)"
_GROUP_ROWS = 1024
_MOST_TEXTS = 4096  # different ones of a column, that the prepared file says
_INDEX = np.dtype("<u8")
_END = np.dtype("<u4")
_CHECKSUM_BYTES = 4
_GZIP = b"\x1f\x8b"
_SHOWN = 40  # characters of a field in a message
# What a column may be, in the order in which it is tried, and how that is called.
_KINDS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "int": (int, np.dtype("<i8"), "an integer"),
    "float": (float, np.dtype("<f4"), "a number"),
    "text": (str, np.dtype(object), "text"),
}


def load(
    data_dir: str | None,
    seed: int,
    *,
    label: str = "label",
    features: tuple[str, ...] = (),
    numbers: tuple[str, ...] = (),
    array: bool = False,
    missing: str = "refuse",
    delimiter: str = ",",
    eval_data_dir: str = "",
    prepared_dir: str = "",
) -> Splits:
    """Reads CSV in UTF-8 whose first record names the columns; fields may be quoted, and have line breaks then.

    A column whose values are all integers is int64, one of numbers float32, any other text; an empty field has no
    value, but in a column of text. A column of integers from 0 on is ids, for models with tables of embeddings, unless
    `numbers` names it. The files are read twice, once, and kept in typed form, see `input.files.prepared`.

    Args:
      data_dir: a folder, whose *.csv are read (*.tsv where there are none), files or globs, with commas between.
      seed: not used.
      label: the column of labels; text is numbered in its order; `none` where there is none.
      features: columns; all others by default.
      numbers: columns of integers that are read as float32.
      array: whether features are one float32 array, [columns], in place of a dict by name.
      missing: `refuse` records without a value, as bad ones; or read `zero`.
      delimiter: between fields: a character, or `tab`.
      eval_data_dir: the files to evaluate on, as data_dir; their columns' types are those to train on.
      prepared_dir: where the typed form is kept, in place of `.crankshaft` beside the files.

    Returns:
      Features by name, labels int64 or float32. Labels that are text or integers from 0 on are classes.

    Raises:
      InputError: there are no such files, a record is malformed, or the columns are not those.
    """
    choice = Choice(label, features, numbers, array, missing)
    delimiter = "\t" if delimiter == "tab" else delimiter
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise InputError(f"delimiter={delimiter} is no delimiter; give one character, or tab")
    train = CsvTable(Files(storage.find(data_dir, _PATTERNS, _EXPECTED)), delimiter, prepared_dir)
    evaluation = None
    if eval_data_dir:
        files = Files(storage.find(eval_data_dir, _PATTERNS, _EXPECTED, "eval_data_dir"))
        evaluation = CsvTable(files, delimiter, prepared_dir, like=train)
    return splits_of(train, evaluation, choice)


class CsvTable(Table):
    """Records of CSV files, of which each has the same header, from the typed form that is prepared of them.

    Args:
      files: of them.
      delimiter: between fields.
      prepared_dir: see `prepared`.
      like: the table whose columns' types these have; None finds them.

    Raises:
      InputError: a record is malformed, or the headers are not the same.
      SourceError: what was prepared is damaged.
    """

    def __init__(self, files: Files, delimiter: str, prepared_dir: str | None, like: CsvTable | None = None):
        self.where = files.paths[0]
        self._paths = files.paths
        kinds = like.kinds if like else None

        def write(writer: Writer) -> None:
            _write(writer, files, delimiter, kinds, like.where if like else None)

        found = prepared(files, "csv", {"delimiter": delimiter, "kinds": kinds}, write, prepared_dir)
        self._prepared, self._about, self.paths = found, found.about, [found.path]
        self.kinds: dict[str, str] = found.about["kinds"]
        self.columns = {name: Spec((), _KINDS[kind][1].newbyteorder("=")) for name, kind in self.kinds.items()}
        rows = sum(found.about["records"])
        groups = -(-rows // _GROUP_ROWS)
        self.group_rows = np.minimum(_GROUP_ROWS, rows - _GROUP_ROWS * np.arange(groups))
        index = found.read(found.about["index"], (groups + 1) * _INDEX.itemsize)
        self._offsets = np.frombuffer(index, _INDEX).astype(np.int64)
        if self._offsets[0] or (np.diff(self._offsets) <= 0).any() or self._offsets[-1] != found.about["index"]:
            raise SourceError(
                f"{found.path}: its index is damaged (groups do not follow one another); remove the file, it is "
                "made anew"
            )
        self.identity = f"{rows} records of {found.about['digest']}"

    def read(self, group: int, names: list[str]) -> Group:
        first, stop = self._offsets[group : group + 2].tolist()
        data = self._prepared.read(first, stop - first)
        body = data[:-_CHECKSUM_BYTES]
        if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != data[-_CHECKSUM_BYTES:]:
            raise SourceError(str(self._prepared.damaged(f"group {group}")))
        return _unpacked(body, int(self.group_rows[group]), self.kinds, {*names})

    def describe_row(self, group: int, row: int) -> str:
        row += group * _GROUP_ROWS
        for path, records in zip(self._paths, self._about["records"], strict=True):
            if row < records:
                return f"{path}, record {row + 1}"
            row -= records
        raise IndexError(row)

    def extremes(self, name: str) -> tuple[int, int] | None:
        found = self._about["extremes"][name]
        return (found[0], found[1]) if found else None

    def texts(self, name: str) -> list[bytes]:
        found = self._about["texts"][name]
        return super().texts(name) if found is None else sorted(text.encode() for text in found)


def _packed(arrays: list[np.ndarray], missing: list[np.ndarray]) -> bytes:
    """Packs columns: of each whether any value is missing, and which are; of text the ends, then the bytes."""
    parts: list[bytes] = []
    for array, gone in zip(arrays, missing, strict=True):
        parts.append(gone.any().tobytes())
        if gone.any():
            parts.append(gone.tobytes())
        if array.dtype == object:
            parts += [np.cumsum([len(text) for text in array]).astype(_END).tobytes(), *array]
        else:
            parts.append(array.tobytes())
    body = b"".join(parts)
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")


def _unpacked(body: bytes, rows: int, kinds: dict[str, str], names: set[str]) -> Group:
    found, at = Group({}, {}, {}), 0
    for name, kind in kinds.items():
        dtype = _KINDS[kind][1]
        any_missing, at = body[at], at + 1
        if any_missing:
            if name in names:
                found.missing[name] = np.frombuffer(body, bool, rows, at)
            at += rows
        if kind != "text":
            if name in names:
                found.arrays[name] = np.frombuffer(body, dtype, rows, at).astype(dtype.newbyteorder("="))
            at += rows * dtype.itemsize
            continue
        ends = np.frombuffer(body, _END, rows, at).tolist()
        at += rows * _END.itemsize
        if name in names:
            texts = np.empty(rows, object)
            texts[:] = [body[at + first : at + end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]
            found.arrays[name] = texts
        at += ends[-1]
    return found


def _write(writer: Writer, files: Files, delimiter: str, kinds: dict[str, str] | None, like: str | None) -> None:
    """Writes the records of all files: groups of typed columns, and where each begins."""
    passes = 1 if kinds else 2
    done = progress(f"preparing {files.paths[0]}", passes * sum(files.sizes))
    header = _header(files, delimiter)
    if kinds is None:
        kinds = _kinds(header, _records(files, delimiter, header, done, 0))
    elif [*kinds] != header:
        raise InputError(f"{files.paths[0]} has the columns {', '.join(header)}, and {like} {', '.join(kinds)}")
    packing = _Packing(writer, kinds, like)
    for path, rows in _records(files, delimiter, header, done, (passes - 1) * sum(files.sizes)):
        packing.add(path, rows)
    packing.end(files)


class _Packing:
    """Gathers records to groups and writes these."""

    def __init__(self, writer: Writer, kinds: dict[str, str], like: str | None):
        self._writer, self._kinds, self._like = writer, kinds, like
        self._offsets: list[int] = []
        self._rows: list[list[str]] = []  # of the group that is not full yet
        self._records: dict[str, int] = {}
        self._extremes: dict[str, list[int]] = {name: [] for name, kind in kinds.items() if kind == "int"}
        self._texts: dict[str, set[str] | None] = {name: set() for name, kind in kinds.items() if kind == "text"}

    def add(self, path: str, rows: list[list[str]]) -> None:
        """Adds records of a file."""
        before = self._records.get(path, 0)
        for number, (name, fields) in enumerate(zip(self._kinds, zip(*rows, strict=True), strict=True)):
            self._check(path, before, number, name, fields)
        self._records[path] = before + len(rows)
        self._rows += rows
        while len(self._rows) >= _GROUP_ROWS:
            self._write(self._rows[:_GROUP_ROWS])
            self._rows = self._rows[_GROUP_ROWS:]

    def end(self, files: Files) -> None:
        """Writes what is left, and where groups begin."""
        if self._rows:
            self._write(self._rows)
        writer = self._writer
        writer.about.update(
            kinds=self._kinds,
            records=[self._records.get(path, 0) for path in files.paths],
            index=writer.offset,
            extremes=self._extremes,
            texts={name: None if found is None else sorted(found) for name, found in self._texts.items()},
        )
        writer.write(np.array([*self._offsets, writer.offset], _INDEX).tobytes())

    def _check(self, path: str, before: int, number: int, name: str, fields: tuple[str, ...]) -> None:
        parse, _, wanted = _KINDS[self._kinds[name]]
        if self._like is None or parse is str:
            return  # the types were found in these files
        for row, field in enumerate(fields):
            if field and not _is(parse, field):
                raise InputError(
                    f"{path}, record {before + row + 1}: column {name!r}: expected {wanted}, as in {self._like}, found "
                    f"{field[:_SHOWN]!r}; mend it"
                )

    def _write(self, rows: list[list[str]]) -> None:
        arrays, missing = [], []
        for (name, kind), fields in zip(self._kinds.items(), zip(*rows, strict=True), strict=True):
            parse, dtype, _ = _KINDS[kind]
            if kind == "text":
                array = np.empty(len(fields), object)
                array[:] = [field.encode() for field in fields]
                gone = np.zeros(len(fields), bool)
                texts = self._texts[name]
                if texts is not None and len(texts) <= _MOST_TEXTS:
                    texts |= {*fields}
                    self._texts[name] = texts if len(texts) <= _MOST_TEXTS else None
            else:
                array = np.array([parse(field) if field else 0 for field in fields]).astype(dtype)
                gone = np.array([not field for field in fields]) | (array != array)  # NaN counts as missing
                array[gone] = 0
            if kind == "int" and not gone.all():
                there = [*self._extremes[name], int(array[~gone].min()), int(array[~gone].max())]
                self._extremes[name] = [min(there), max(there)]
            arrays.append(array)
            missing.append(gone)
        self._offsets.append(self._writer.offset)
        self._writer.write(_packed(arrays, missing))


def _kinds(header: list[str], records: Iterator[tuple[str, list[list[str]]]]) -> dict[str, str]:
    """Finds each column's type: the first in `_KINDS` that all of its values are."""
    order = [*_KINDS]
    ranks = [0] * len(header)
    there = [False] * len(header)
    for _, rows in records:
        for column, fields in enumerate(zip(*rows, strict=True)):
            values = {field for field in fields if field}
            there[column] |= bool(values)
            while ranks[column] < len(order) - 1 and not all(_is(_KINDS[order[ranks[column]]][0], x) for x in values):
                ranks[column] += 1
    return {name: order[rank] if any_ else "text" for name, rank, any_ in zip(header, ranks, there, strict=True)}


def _is(parse: Callable[[str], Any], field: str) -> bool:
    try:
        value = parse(field)
    except ValueError:
        return False
    return "_" not in field and (parse is not int or -(2**63) <= value < 2**63)


def _header(files: Files, delimiter: str) -> list[str]:
    """Returns the names of the columns, which are the same in each file."""
    first: list[str] | None = None
    for number, path in enumerate(files.paths):
        if files.pread(number, 0, min(len(_GZIP), files.sizes[number])) == _GZIP:
            raise InputError(f"{path} is gzip: expected CSV; unpack it")
        names = next(_rows(path, files.stream(number), delimiter), (0, None))[1]
        if names is None:
            raise InputError(f"{path} is empty: expected a header and records, found nothing; remove it")
        names = [name.strip() for name in names]
        twice = sorted(name for name in {*names} if names.count(name) > 1 or not name)
        if twice:
            found = f"two columns {twice[0]!r}" if twice[0] else "a column without a name"
            raise InputError(f"{path}:1: expected a header, a name for each column, found {found}; mend it")
        if first is not None and names != first:
            raise InputError(
                f"{path}:1: the header is {', '.join(names)}, and that of {files.paths[0]} {', '.join(first)}; give "
                "files of the same columns"
            )
        first = names
    assert first is not None  # there is a file
    return first


def _records(
    files: Files, delimiter: str, header: list[str], done: Callable[[int], None], before: int
) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields (path, some records of the file)."""
    for number, path in enumerate(files.paths):
        rows: list[list[str]] = []
        some = False
        stream = files.stream(number)
        records = _rows(path, stream, delimiter)
        next(records)  # the header
        for line, row in records:
            if len(row) != len(header):
                raise InputError(
                    f"{path}:{line}: expected {len(header)} fields, as the header has, found {len(row)}; mend it"
                )
            rows.append(row)
            if len(rows) == _GROUP_ROWS:
                yield path, rows
                done(before + sum(files.sizes[:number]) + stream.tell())
                rows, some = [], True
        if rows:
            yield path, rows
        elif not some:
            raise InputError(f"{path} has a header and no records; remove it")


def _rows(path: str, stream: io.BufferedReader, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (the line where it ends, its fields) of each record of a file, but empty lines."""
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if row:
                    yield reader.line_num, row
        except csv.Error as error:
            raise InputError(
                f"{path}:{reader.line_num}: {error}; mend the record, a quote may not be closed or doubled"
            ) from None
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, after line {reader.line_num}: expected text in UTF-8, found "
                f"0x{error.object[error.start]:02x}; convert the file"
            ) from None
