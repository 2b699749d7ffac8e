"""Rows of Parquet files, read by whole row groups: NumPy arrays by column, and which values are missing or wrong.

Host code, NumPy and `pyarrow` only.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...engine.data.source import SourceError
from ..data import InputError
from ..files import storage
from ..files.storage import Files

_FOOTER_BYTES = 1 << 16  # of a file's end, which tells one from another
_LARGE_GROUP_BYTES = 16 << 20
_IDLE_READERS = 16  # files that stay open between reads
_MOST_INT64 = 2**63 - 1
_DAY_MICROSECONDS = 24 * 3600 * 10**6


class Column(NamedTuple):
    """What a column holds.

    Attributes:
      kind: `int64`, `float32`, `text`, `date` (float32 days since 1970-01-01) or `timestamp` (float32 [2]: such days,
        and seconds of the day, in UTC where it has a zone); of lists the dtype of their numbers.
      shape: of one value.
      why: why it is text, where its values look like numbers.
    """

    kind: str
    shape: tuple[int, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {[*self.shape]}" if self.shape and self.kind != "timestamp" else self.kind


class Texts(NamedTuple):
    """A column of text: row i has `words[codes[i]]`; a missing value is the word b""."""

    codes: np.ndarray
    words: np.ndarray


class Group(NamedTuple):
    """Neighbouring rows of a table.

    Attributes:
      values: by column, arrays [rows, ...], or `Texts`.
      missing: by column, where any are: which values are missing, bool of the values' shape; the array has 0 there.
      wrong: by column, where any are: what is wrong with a row, by row; the array has 0 there.
    """

    values: dict[str, Any]
    missing: dict[str, np.ndarray]
    wrong: dict[str, dict[int, str]]


class ParquetTable:
    """A table in Parquet files, of which each has the same columns.

    Args:
      files: of them.
      texts: columns whose values are read as text, whatever they are.
      metadata: of each file; None reads it.
      prepared_dir: where what is learnt of its columns is kept; None is beside the files.

    Attributes:
      where: the first file, for messages.
      source: the files that are read.
      paths: of them.
      columns: what each column holds, by name, in order; None where it can't be read.
      group_rows: rows of each group, [groups] int64.
      identity: text that differs where the contents do.

    Raises:
      InputError: one is not such a file, has other columns, or no rows.
    """

    cure = "restore the file"

    def __init__(
        self,
        files: Files,
        texts: Sequence[str] = (),
        metadata: list | None = None,
        prepared_dir: str | None = None,
    ):
        self._pa, self._parquet = library("parquet")
        self.prepared_dir = prepared_dir
        self.source, self._texts = files, texts
        self._idle: list[tuple[int, Any]] = []  # (number, reader) of files that no thread reads now
        self._lock = threading.Lock()
        self.where, self.paths = files.paths[0], files.paths
        self._metadata = metadata or [self._opened(n, InputError).metadata for n in range(len(files.paths))]
        schemas = [each.schema.to_arrow_schema() for each in self._metadata]
        self._schema = schemas[0]
        rows = [[each.row_group(i).num_rows for i in range(each.num_row_groups)] for each in self._metadata]
        # (file, group in it) of each group that has rows
        self._groups = [(n, i) for n, sizes in enumerate(rows) for i, size in enumerate(sizes) if size]
        self.group_rows = np.array([rows[n][i] for n, i in self._groups], np.int64)
        for number, path in enumerate(files.paths):
            if not sum(rows[number]):
                raise InputError(f"{path} has no rows; remove it")
            _check_schema(path, schemas[number], self.where, self._schema)
        self.columns: dict[str, Column | None] = {field.name: self._column(field) for field in self._schema}
        self._read_uint64()
        self.identity = f"{sum(self.group_rows)} rows of {[self._footer(number) for number in range(len(files.paths))]}"
        self._warn_of_large_groups()

    def read(self, group: int, names: Sequence[str]) -> Group:
        """Reads some columns of a group of rows; may be called by several threads. Raises `SourceError`."""
        number, row_group = self._groups[group]
        self.source.check(number)
        with self._lock:
            at = next((i for i, (each, _) in enumerate(self._idle) if each == number), None)
            reader = None if at is None else self._idle.pop(at)[1]
        reader = reader or self._opened(number, SourceError, self._metadata[number])
        try:
            # One thread: whoever reads groups ahead does so by several.
            table = reader.read_row_group(row_group, columns=[*names], use_threads=False)
            values = Group({}, {}, {})
            for name in names:
                self._decode(name, table.column(name), values)
        except (self._pa.ArrowException, OSError) as error:
            raise self._unreadable(SourceError, number, row_group, error) from None
        with self._lock:
            self._idle = [*self._idle[1 - _IDLE_READERS :], (number, reader)]
        return values

    def describe_row(self, group: int, row: int) -> str:
        """Returns the file and the row in it of a group's row, for messages."""
        number, row_group = self._groups[group]
        before = sum(self._metadata[number].row_group(i).num_rows for i in range(row_group))
        return f"{self.source.paths[number]}, row {before + row}"

    def extremes(self, names: Sequence[str]) -> dict[str, tuple[int, int] | None]:
        """Returns the least and the most value of columns of integers; None of one that has no values."""
        ends: dict[str, list[int]] = {name: [] for name in names}
        places = [self._places(metadata) for metadata in self._metadata]
        for group, (number, row_group) in enumerate(self._groups):
            about, unknown = self._metadata[number].row_group(row_group), []
            for name in names:
                statistics = about.column(places[number][name]).statistics if name in places[number] else None
                if statistics is not None and statistics.has_min_max:
                    ends[name] += [int(statistics.min), int(statistics.max)]
                elif statistics is None or statistics.null_count != self.group_rows[group]:
                    unknown.append(name)
            if unknown:
                values = self.read(group, unknown)
                for name in unknown:
                    present = values.values[name]
                    if name in values.missing:
                        present = present[~values.missing[name]]
                    ends[name] += [int(present.min()), int(present.max())] if len(present) else []
            ends = {name: [min(each), max(each)] if each else [] for name, each in ends.items()}
        return {name: (each[0], each[1]) if each else None for name, each in ends.items()}

    @staticmethod
    def _places(metadata) -> dict[str, int]:
        return {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}

    def _read_uint64(self) -> None:
        """Makes text of columns of uint64 that have values beyond int64: as text each value is itself."""
        is_uint64 = self._pa.types.is_uint64
        names = [
            field.name for field in self._schema if is_uint64(field.type) and self.columns[field.name].kind == "int64"
        ]
        if not names:
            return
        self.columns |= {name: Column("uint64") for name in names}
        for name, ends in self.extremes(names).items():
            beyond = ends is not None and ends[1] > _MOST_INT64
            self.columns[name] = Column("text", why="integers beyond int64") if beyond else Column("int64")

    def _opened(self, number: int, error_class: type[ValueError], metadata=None):
        path = self.source.paths[number]
        self.source.check(number)
        try:
            return self._parquet.ParquetFile(
                self.source.stream(number) if storage.is_remote(path) else path,
                metadata=metadata,
                page_checksum_verification=True,
                pre_buffer=storage.is_remote(path),  # of local files it costs a fifth of the time
            )
        except (self._pa.ArrowException, OSError) as error:
            raise error_class(
                f"{path} is not a whole Parquet file ({first_line(error)}); restore or remove it"
            ) from None

    def _footer(self, number: int) -> tuple[int, int]:
        size = self.source.sizes[number]
        length = min(size, _FOOTER_BYTES)
        return size, zlib.crc32(self.source.pread(number, size - length, length))

    def _column(self, field) -> Column | None:
        """Returns what a column is read as; None where it can't be."""
        types = self._pa.types
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
            values = kind.value_type
            if not (types.is_integer(values) or types.is_floating(values)):
                return None
            length = kind.list_size if types.is_fixed_size_list(kind) else self._length(field.name)
            return Column("float32" if types.is_floating(values) else str(values), (length,))
        texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
        is_text = any(getattr(types, f"is_{each}")(kind) for each in texts)
        if is_text or (field.name in self._texts and not types.is_nested(kind)):
            return Column("text", why="" if is_text else "as texts= says")
        if types.is_integer(kind) or types.is_boolean(kind):
            return Column("int64")
        if types.is_floating(kind) or types.is_decimal(kind):
            return Column("float32")
        if types.is_date(kind):
            return Column("date")
        return Column("timestamp", (2,)) if types.is_timestamp(kind) else None

    def _length(self, name: str) -> int:
        """Returns how many values the first row that has any has in a column of lists."""
        for number, row_group in self._groups:
            try:
                for batch in self._opened(number, InputError).iter_batches(64, row_groups=[row_group], columns=[name]):
                    if length := next((len(row) for row in batch.column(0) if row.is_valid), 0):
                        return length
            except (self._pa.ArrowException, OSError) as error:
                raise self._unreadable(InputError, number, row_group, error) from None
        return 0

    def _unreadable(self, kind: type[ValueError], number: int, row_group: int, error: Exception) -> ValueError:
        path = self.source.paths[number]
        return kind(f"{path}: row group {row_group} can't be read ({first_line(error)}); {self.cure}")

    def _decode(self, name: str, chunks, group: Group) -> None:
        """Adds a column to a group."""
        column, pa = self.columns[name], self._pa
        assert column is not None
        array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        if column.kind == "text":
            group.values[name] = self._texts_of(array)
            if array.null_count:
                group.missing[name] = array.is_null().to_numpy(zero_copy_only=False)
            return
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        wrong: dict[int, str] = {}
        if column.kind in ("date", "timestamp"):
            values = _times(array, column.kind, pa)
            if missing is not None and column.shape:
                missing = np.repeat(missing[:, np.newaxis], 2, 1)
        elif column.shape:
            values, missing, wrong = _rows_of_lists(array, column)
        else:
            if pa.types.is_boolean(array.type):
                array = array.cast(pa.int8())
            elif pa.types.is_decimal(array.type):
                array = array.cast(pa.float64())
            values = (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f":
            values, missing, wrong = _as_float32(values, missing, wrong)
        elif not column.shape:
            values = values.astype(column.kind, copy=False)
        group.values[name] = values
        if missing is not None and missing.any():
            group.missing[name] = missing
        if wrong:
            group.wrong[name] = wrong

    def _texts_of(self, array) -> Texts:
        pa, types = self._pa, self._pa.types
        if types.is_dictionary(array.type):
            array = array if types.is_string(array.type.value_type) else array.dictionary_decode()
        elif not (types.is_binary(array.type) or types.is_string(array.type)):
            is_text = types.is_large_string(array.type) or types.is_string_view(array.type)
            is_bytes = types.is_large_binary(array.type) or types.is_binary_view(array.type)
            array = array.cast(pa.large_binary() if is_text or is_bytes else pa.string())
        if not types.is_dictionary(array.type):
            array = array.dictionary_encode()
        words = array.dictionary.cast(pa.binary()).to_numpy(zero_copy_only=False)
        codes = array.indices
        if codes.null_count:
            words = np.append(words, np.array([b""], object))
            codes = codes.fill_null(len(words) - 1)
        return Texts(codes.to_numpy(zero_copy_only=False), words)

    def _warn_of_large_groups(self) -> None:
        number, row_group = self._groups[int(np.argmax(self.group_rows))]
        group = self._metadata[number].row_group(row_group)
        if group.total_byte_size > _LARGE_GROUP_BYTES and len(self._groups) > 4:
            logging.warning(
                "%s has row groups of %s rows, %.0f MiB each, and a shuffle keeps the groups of two windows in memory; "
                "write smaller ones (row_group_size=4096), or give --shuffle_window=2",
                *(self.where, f"{group.num_rows:,}", group.total_byte_size / 2**20),
            )


def _as_float32(
    values: np.ndarray, missing: np.ndarray | None, wrong: dict[int, str]
) -> tuple[np.ndarray, np.ndarray | None, dict[int, str]]:
    """Converts floats: NaN counts as missing, with 0 in its place; a value that is infinite, or would be, is wrong."""
    with np.errstate(over="ignore"):
        converted = values.astype(np.float32, copy=False)
    if np.isfinite(converted).all():
        return converted, missing, wrong
    is_nan = np.isnan(values)
    if is_nan.any():
        missing = is_nan if missing is None else missing | is_nan
    beyond = np.isinf(converted)
    rows = np.flatnonzero(beyond.reshape(len(values), -1).any(1)).tolist()
    says = {row: f"has {values[row][beyond[row]].flat[0]:g}, more than float32 can hold (3.4e38)" for row in rows}
    return np.where(is_nan | beyond, np.float32(0), converted), missing, {**says, **wrong}


def _times(array, kind: str, pa) -> np.ndarray:
    """Returns days since 1970-01-01, [rows], and of timestamps seconds of the day too, [rows, 2]; float32."""
    if kind == "date":
        return array.cast(pa.date32()).cast(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False).astype(np.float32)
    loses_nanoseconds = array.type.unit == "ns"  # anything else that does not fit is an error
    microseconds = array.cast(pa.timestamp("us", array.type.tz), safe=not loses_nanoseconds)
    microseconds = microseconds.cast(pa.int64()).fill_null(0)
    days, rest = np.divmod(microseconds.to_numpy(zero_copy_only=False), _DAY_MICROSECONDS)
    return np.stack([days.astype(np.float32), (rest / 1e6).astype(np.float32)], 1)


def _rows_of_lists(array, column: Column) -> tuple[np.ndarray, np.ndarray | None, dict[int, str]]:
    """Returns (values [rows, length], which are missing, the rows that have not as many, with zeros in the values)."""
    length, dtype = column.shape[0], np.float64 if column.kind == "float32" else np.dtype(column.kind)
    flat = array.flatten()
    if not array.null_count and not flat.null_count and len(flat) == len(array) * length:
        lengths = np.diff(array.offsets.to_numpy()) if hasattr(array, "offsets") else np.full(len(array), length)
        if (lengths == length).all():
            return flat.to_numpy(zero_copy_only=False).reshape(-1, length), None, {}
    values, missing, wrong = np.zeros((len(array), length), dtype), np.zeros((len(array), length), bool), {}
    for row, each in enumerate(array.to_pylist()):
        if each is None:
            missing[row] = True
        elif len(each) != length or None in each:
            wrong[row] = f"has not {length} values, as others have"
        else:
            values[row] = each
    return values, missing, wrong


def _check_schema(path: str, schema, where: str, wanted) -> None:
    if len({*schema.names}) < len(schema.names):
        raise InputError(f"{path} has two columns of one name, of {', '.join(schema.names)}; rename one")
    fields, names = [*wanted], {*schema.names}
    for field in fields:
        if field.name not in names:
            raise InputError(f"{path} has no column {field.name!r}, and {where} has; give files of the same columns")
        if schema is not wanted and schema.field(field.name).type != field.type:
            raise InputError(
                f"{path}: column {field.name!r} is {schema.field(field.name).type}, and {field.type} in {where}; write "
                "both alike"
            )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def library(source: str) -> tuple[Any, Any]:
    """Imports (pyarrow, pyarrow.parquet) for an input. Raises `InputError` where they are missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"input={source} needs the library pyarrow; pip install 'crankshaft[parquet]'") from None
    return pyarrow, pyarrow.parquet
