"""Rows of Parquet files, read by row groups: NumPy arrays by column, with missing and wrong values.

NumPy and `pyarrow` only.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...engine import logging
from ...engine.errors import SourceError, importing
from ...engine.machine import memory
from ..checks import InputError
from ..files import listing, storage
from . import values as decoding
from .csv_types import AS_TEXT, Converter, Finder, Unfit
from .folders import TableFiles
from .values import EXACT_FLOAT32, EXACT_FLOAT64, Column, Texts

_LARGE_GROUP_BYTES, _LOOKED_AT_BYTES = 16 << 20, 1 << 28
_IDLE_READERS = 16  # files kept open between reads
_MOST_INT64 = 2**63 - 1
# The kinds of values in folders' names, by those of `csv_types`.
_KEY_COLUMNS = {"int": ("int64",), "float": ("float32",), "date": ("date",), "text": ("text",)}


class Group(NamedTuple):
    """Consecutive rows of a table.

    Attributes:
      values: values of each column: arrays [rows, ...], or `Texts`.
      missing: masks of missing values, bool of the values' shape, for each column that has any; the array has 0 there.
      wrong: problems of wrong values by row, for each column that has any; the array has 0 there.
    """

    values: dict[str, Any]
    missing: dict[str, np.ndarray]
    wrong: dict[str, dict[int, str]]


class ParquetTable:
    """A table in Parquet files and their folders' names.

    A column's type may be wider in some files (int32 and int64, float and double, text and a dictionary of text), and
    columns may be in any order. Files without rows are left out, with a log line.

    Args:
      read_as: kinds of columns that are not to be inferred, as `csv_types` names them: text, and any kind of the values
        in folders' names.
      metadata: Parquet metadata of each file; None reads it.
      prepared_dir: folder for the fitted words and means; None is beside the files.
      like: the training table, whose folders' names have the same kinds of values.

    Attributes:
      paths: paths of the files that are read.
      columns: the contents of each column, by name, in order; None if it can't be read.
      problems: why a column can't be read, by name.
      lacking: files that lack a column, described for people, for each column that only some files have.
      group_rows: rows of each group, [groups] int64.

    Raises:
      InputError: a file is not Parquet, or no file has rows.
    """

    fix = "restore the file"

    def __init__(
        self,
        table_files: TableFiles,
        read_as: Mapping[str, str],
        metadata: list | None = None,
        prepared_dir: str | None = None,
        like: ParquetTable | None = None,
    ):
        self._pa, self._parquet = library("parquet")
        self.prepared_dir = prepared_dir
        self.source, self.read_as = table_files.files, read_as
        self._idle: list[tuple[int, Any]] = []  # (number, reader) of files that no thread is reading
        self._lock = threading.Lock()
        self.paths = table_files.files.paths
        self._metadata = metadata or [self._open(n, InputError).metadata for n in range(len(self.paths))]
        self._schemas = [metadata.schema.to_arrow_schema() for metadata in self._metadata]
        rows = [[metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] for metadata in self._metadata]
        # (file, group in it) of each group that has rows
        self._groups = [(n, i) for n, sizes in enumerate(rows) for i, size in enumerate(sizes) if size]
        self.group_rows = np.array([rows[n][i] for n, i in self._groups], np.int64)
        if not self._groups:
            raise InputError(f"{self.paths[0]} has no rows; give files that have some")
        listing.log_empty([path for path, sizes in zip(self.paths, rows, strict=True) if not sum(sizes)])
        self._table_files = table_files
        self._whole = [n for n, sizes in enumerate(rows) if sum(sizes)]
        self.path = self.paths[self._whole[0]]
        self.problems: dict[str, str] = {}
        self.lacking: dict[str, str] = {}
        self.key_kinds: dict[str, str] = {}  # of columns from folders' names, for `Converter`
        self.columns: dict[str, Column | None] = self._columns()
        self._keys: dict[str, Any] = self._read_keys(table_files.keys, like)
        self._read_uint64()
        self._warn_of_large_groups()

    def column(self, name: str) -> Column:
        """Returns the contents of a column, of those that can be read."""
        column = self.columns[name]
        assert column is not None, f"column {name!r} can't be read"
        return column

    def read(self, group: int, names: Sequence[str]) -> Group:
        """Reads columns of a row group; thread-safe. Raises `SourceError`."""
        number, row_group = self._groups[group]
        self._check_memory(group, names)
        values = Group({}, {}, {})
        try:
            for name, array in self._arrays(group, names).items():
                column = self.column(name)
                (self._decode_lists if column.varies else self._decode)(name, column, array, values)
        except (self._pa.ArrowException, OSError) as error:
            raise self._unreadable(SourceError, number, row_group, error) from None
        return values

    def _check_memory(self, group: int, names: Sequence[str]) -> None:
        """Raises `SourceError` if columns of a row group do not fit into memory: their file may be very small."""
        columns = [self.column(name) for name in names]
        width = sum(4 if each.kind == "text" else each.dtype.itemsize * math.prod(each.known_shape) for each in columns)
        needed = width * int(self.group_rows[group])
        if needed > _LOOKED_AT_BYTES and needed > (free := memory.available_bytes()):
            number, row_group = self._groups[group]
            raise SourceError(
                f"{self.source.paths[number]}: row group {row_group} has {self.group_rows[group]:,} rows, which take "
                f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free; write smaller row groups "
                "(row_group_size=4096)"
            )

    def _arrays(self, group: int, names: Sequence[str]) -> dict[str, Any]:
        """Reads columns of a row group as `pyarrow`'s. Raises its errors, and `SourceError`."""
        number, row_group = self._groups[group]
        self.source.check(number)
        with self._lock:
            # A reader has one position, so a thread takes one out while it reads.
            at = next((i for i, (idle_number, _) in enumerate(self._idle) if idle_number == number), None)
            reader = None if at is None else self._idle.pop(at)[1]
        reader = reader or self._open(number, SourceError, self._metadata[number])
        in_file = {name: None for name in names if self._schemas[number].get_field_index(name) >= 0}
        # One thread: several already read groups ahead.
        table = storage.retried(
            self.source.paths[number], lambda: reader.read_row_group(row_group, columns=[*in_file], use_threads=False)
        )
        with self._lock:
            self._idle = [*self._idle[1 - _IDLE_READERS :], (number, reader)]
        arrays: dict[str, Any] = {}
        for name in names:
            if name in in_file:
                chunks = table.column(name)
                arrays[name] = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
            else:
                value = self._keys[name][number] if name in self._keys else self._pa.scalar(None)
                arrays[name] = self._pa.repeat(value, int(self.group_rows[group]))
        return arrays

    def read_ids(self, names: Sequence[str]) -> None:
        """Reads float columns of ids as integers: those with whole numbers alone, some beyond float32's precision.

        pandas converts integers to float64 if one is missing.

        Raises:
          InputError: they are beyond 2^53, where floats round them, too.
        """
        for name, most in self._largest_integers([name for name in names if self._is_rounded(name)]).items():
            if EXACT_FLOAT64 < most <= _MOST_INT64:
                raise InputError(
                    f"{self.path}: column {name!r} holds whole numbers up to {most:.17g} as floats, which tell them "
                    f"apart up to 2^53 only; write integers or text, or input_arg=numbers={name} if these are not ids"
                )
            if EXACT_FLOAT32 < most <= EXACT_FLOAT64:
                self.columns[name] = Column("int64", self.column(name).shape, "as floats")

    def _is_rounded(self, name: str) -> bool:
        """Returns whether a float column may have whole numbers that float32 rounds, by its type and statistics."""
        column = self.columns[name]
        if column is None or column.kind != "float32":
            return False
        types, kinds = self._pa.types, []
        for schema in self._schemas:
            if (at := schema.get_field_index(name)) >= 0:
                kind = schema.field(at).type
                kind = kind.value_type if self._is_list(kind) else kind
                kinds.append(kind.value_type if types.is_dictionary(kind) else kind)
        statistics = [self._statistics(group, name) for group in range(len(self._groups))]
        is_small = all(ends is not None and max(abs(ends.min), abs(ends.max)) <= EXACT_FLOAT32 for ends in statistics)
        return any(types.is_float64(kind) or types.is_decimal(kind) for kind in kinds) and not is_small

    def _largest_integers(self, names: Sequence[str]) -> dict[str, float]:
        """Returns the largest absolute values of the float columns whose values are all whole numbers."""
        most = dict.fromkeys(names, 0.0)
        for group, (number, row_group) in enumerate(self._groups):
            try:
                values = {name: decoding.flat(array, self._pa) for name, array in self._arrays(group, [*most]).items()}
            except (self._pa.ArrowException, OSError) as error:
                raise self._unreadable(SourceError, number, row_group, error) from None
            for name, floats in values.items():
                if not np.isfinite(floats).all() or (floats != np.floor(floats)).any():
                    del most[name]
                else:
                    most[name] = max(most[name], float(np.abs(floats).max(initial=0)))
            if not most:
                break
        return most

    def follow(self, columns: Mapping[str, Column | None]) -> None:
        """Reads columns as another table's: those without values, integers or floats, lists of one or any length."""
        for name, column in columns.items():
            if name not in self.columns or column is None:
                continue
            mine = self.columns[name]
            is_number = (
                mine is not None and {mine.kind, column.kind} == {"int64", "float32"} and mine.shape == column.shape
            )
            is_list = mine is not None and mine.kind == column.kind and (mine.varies or column.varies)
            is_list &= bool(mine and mine.shape and column.shape)
            schemas = [(schema, schema.get_field_index(name)) for schema in self._whole_schemas()]
            is_null = all(self._pa.types.is_null(schema.field(at).type) for schema, at in schemas if at >= 0)
            if is_number or is_list or (mine is None and name not in self.problems and is_null):
                self.columns[name] = column

    def check(self, name: str, may_lack: bool) -> None:
        """Raises `InputError` if files differ in a column; with `may_lack`, some may lack it."""
        if name in self.problems:
            raise InputError(self.problems[name])
        if name in self.lacking and not may_lack:
            raise InputError(
                f"{self.lacking[name]}; give files of the same columns, or name the features to be read by "
                "input_arg=features=..."
            )

    @functools.cached_property
    def identity(self) -> str:
        """Text that differs if the contents do."""
        keys = f" {self._table_files.keys}" if self._keys else ""
        return f"{sum(self.group_rows)} rows of {self.source.sizes} {self.source.sample}{keys}"

    def describe_row(self, group: int, row: int) -> str:
        """Returns the file and row number of a group's row, for messages."""
        number, row_group = self._groups[group]
        before = sum(self._metadata[number].row_group(i).num_rows for i in range(row_group))
        return f"{self.source.paths[number]}, row {before + row}"

    def extremes(self, names: Sequence[str]) -> dict[str, tuple[int, int] | None]:
        """Returns the smallest and largest values of integer columns; None for one without values."""
        ends: dict[str, list[int]] = {name: [] for name in names}
        for group in range(len(self._groups)):
            unknown = []
            for name in names:
                if (statistics := self._statistics(group, name)) is not None:
                    ends[name] += [int(statistics.min), int(statistics.max)]
                else:
                    unknown.append(name)
            if unknown:
                values = self.read(group, unknown)
                for name in unknown:
                    present = values.values[name]
                    if name in values.missing:
                        present = present[~values.missing[name]]
                    ends[name] += [int(present.min()), int(present.max())] if len(present) else []
            ends = {name: [min(bounds), max(bounds)] if bounds else [] for name, bounds in ends.items()}
        return {name: (bounds[0], bounds[1]) if bounds else None for name, bounds in ends.items()}

    def _statistics(self, group: int, name: str) -> Any:
        """Returns a file's statistics of a column in a group, if they have a finite minimum and maximum."""
        number, row_group = self._groups[group]
        if name not in self._positions[number]:
            return None
        statistics = self._metadata[number].row_group(row_group).column(self._positions[number][name]).statistics
        is_known = statistics is not None and statistics.has_min_max and not isinstance(statistics.min, bytes)
        return statistics if is_known and math.isfinite(statistics.max - statistics.min) else None

    @functools.cached_property
    def _positions(self) -> list[dict[str, int]]:
        """By file, the columns' indices by name."""
        return [{metadata.schema.column(i).path: i for i in range(metadata.num_columns)} for metadata in self._metadata]

    def _columns(self) -> dict[str, Column | None]:
        """Returns the contents of all files' columns; records those in which files differ."""
        schemas = [(self.paths[number], self._schemas[number]) for number in self._whole]
        columns: dict[str, Column | None] = {}
        for path, schema in schemas:
            if len({*schema.names}) < len(schema.names):
                raise InputError(f"{path} has two columns of one name, of {', '.join(schema.names)}; rename one")
            columns |= dict.fromkeys(schema.names)
        for name in columns:
            having = [(path, schema.field(name)) for path, schema in schemas if schema.get_field_index(name) >= 0]
            if len(having) < len(schemas):
                without = next(path for path, schema in schemas if schema.get_field_index(name) < 0)
                self.lacking[name] = f"{without} has no column {name!r}, and {having[0][0]} has"
            columns[name] = self._widest(name, having)
        return columns

    def _widest(self, name: str, having: list[tuple[str, Any]]) -> Column | None:
        """Returns the contents of a column in all files that have it; records a problem if kinds differ."""
        types = self._pa.types
        typed = [(path, field) for path, field in having if not types.is_null(field.type)]
        if not typed:
            return None
        first_path, first = typed[0]
        widest = self._column(first)
        for path, field in typed[1:]:
            if field.type == first.type:
                continue
            column = self._column(field)
            zones = [types.is_timestamp(candidate.type) and bool(candidate.type.tz) for candidate in (first, field)]
            is_compatible = zones[0] == zones[1]
            if widest is None or column is None or widest.shape != column.shape:
                is_compatible = False
            elif is_compatible and widest.kind != column.kind and widest.shape:
                kind = np.promote_types(widest.kind, column.kind)  # of lists of integers
                is_compatible = kind.kind in "iu" and "f" not in widest.kind + column.kind
                widest = widest._replace(kind=kind.name)
            elif is_compatible:
                is_compatible = widest.kind == column.kind
            if not is_compatible:
                self.problems[name] = (
                    f"{path}: column {name!r} is {field.type}, and {first.type} in {first_path}; write both in one type"
                )
                return None
        is_text = widest is not None and widest.kind == "text"
        if self.read_as.get(name) == "text" and not is_text and not types.is_nested(first.type):
            return Column("text", why=AS_TEXT)
        return widest

    def _read_keys(self, keys: dict[str, list[str]], like: ParquetTable | None) -> dict[str, Any]:
        """Adds the columns in folders' names that the files lack; returns their values."""
        keys_read: dict[str, Any] = {}
        for name, texts in keys.items():
            if name in self.columns:
                continue
            fields, finder = self._pa.array(texts), Finder(self.read_as.get(name))
            finder.add(fields)
            inferred = finder.end()
            kind = like.key_kinds[name] if like and name in like.key_kinds else inferred.kind
            try:
                keys_read[name] = Converter(kind).convert(fields)
            except Unfit as unfit:
                raise InputError(
                    f"{self.paths[unfit.row]}: expected {Converter(kind).expects} for {name} in the folder's name, as "
                    f"in {like.path if like else ''}, found {unfit.field!r}; rename it"
                ) from None
            self.key_kinds[name] = kind
            self.columns[name] = Column(*_KEY_COLUMNS.get(kind, ("timestamp", (2,))))
        return keys_read

    def _read_uint64(self) -> None:
        """Converts uint64 columns with values beyond int64 to text, which keeps each value."""
        is_uint64 = self._pa.types.is_uint64
        fields = [field for schema in self._whole_schemas() for field in schema if is_uint64(field.type)]
        names = [
            name for name in {field.name for field in fields} if (column := self.columns[name]) and column.is_integer
        ]
        if not names:
            return
        self.columns |= {name: Column("uint64") for name in names}
        for name, ends in self.extremes(names).items():
            beyond = ends is not None and ends[1] > _MOST_INT64
            self.columns[name] = Column("text", why="integers beyond int64") if beyond else Column("int64")

    def _whole_schemas(self) -> list[Any]:
        return [self._schemas[number] for number in self._whole]

    def _open(self, number: int, error_class: type[ValueError], metadata=None):
        path = self.source.paths[number]
        self.source.check(number)
        try:
            return storage.retried(
                path,
                lambda: self._parquet.ParquetFile(
                    self.source.stream(number) if storage.is_remote(path) else path,
                    metadata=metadata,
                    page_checksum_verification=True,
                    pre_buffer=storage.is_remote(path),  # for local files it costs a fifth of the time
                ),
            )
        except (self._pa.ArrowException, OSError) as error:
            raise error_class(
                f"{path} is not a whole Parquet file ({first_line(error)}); restore or remove it"
            ) from None

    def _column(self, field) -> Column | None:
        """Returns the contents of a column as read; None if it can't be read."""
        types = self._pa.types
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if self._is_list(kind):
            values = kind.value_type
            if not (types.is_integer(values) or types.is_floating(values)):
                return None
            length = kind.list_size if types.is_fixed_size_list(kind) else self._length(field.name)
            return Column("float32" if types.is_floating(values) else str(values), (length,))
        texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
        if any(getattr(types, f"is_{text_type}")(kind) for text_type in texts):
            return Column("text")
        if types.is_integer(kind) or types.is_boolean(kind):
            return Column("int64")
        if types.is_floating(kind) or types.is_decimal(kind):
            return Column("float32")
        if types.is_date(kind):
            return Column("date")
        return Column("timestamp", (2,)) if types.is_timestamp(kind) else None

    def _is_list(self, kind) -> bool:
        types = self._pa.types
        return types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)

    def _length(self, name: str) -> int | None:
        """Returns the length of a column's lists; None if they differ.

        Reads all, since files have only the number of values: lists of 1 and 3 have as many as two of 2.
        """
        lengths: set[int] = set()
        readers = functools.lru_cache(1)(lambda number: self._open(number, InputError, self._metadata[number]))
        for number, row_group in self._groups:
            at = self._schemas[number].get_field_index(name)
            if at < 0 or not self._is_list(self._schemas[number].field(at).type):
                continue
            try:
                for batch in readers(number).iter_batches(1024, row_groups=[row_group], columns=[name]):
                    lengths |= {*self._pa.compute.list_value_length(batch.column(0)).unique().drop_null().to_pylist()}
                    if len(lengths) > 1:
                        return None
            except (self._pa.ArrowException, OSError) as error:
                raise self._unreadable(InputError, number, row_group, error) from None
        return max(lengths, default=0) or None

    def _unreadable(self, kind: type[ValueError], number: int, row_group: int, error: Exception) -> ValueError:
        path = self.source.paths[number]
        return kind(f"{path}: row group {row_group} can't be read ({first_line(error)}); {self.fix}")

    def _decode_lists(self, name: str, column: Column, array, group: Group) -> None:
        """Adds a column of lists that differ in length to a group. A missing list is empty."""
        pa, numbers = self._pa, Group({}, {}, {})
        if pa.types.is_null(array.type):
            array = array.cast(pa.list_(pa.from_numpy_dtype(column.dtype)))
        self._decode(name, column._replace(shape=()), array.flatten(), numbers)
        group.values[name], rows = decoding.split_lists(array, numbers.values[name], pa)
        wrong = {int(rows[at]): problem for at, problem in numbers.wrong.get(name, {}).items()}
        if name in numbers.missing:
            problem = "has a list without one of its values; fill it, or let max_bad_records leave such rows out"
            wrong |= dict.fromkeys(rows[numbers.missing[name]].tolist(), problem)
        if wrong:
            group.wrong[name] = wrong
        if array.null_count:
            group.missing[name] = array.is_null().to_numpy(zero_copy_only=False)

    def _decode(self, name: str, column: Column, array, group: Group) -> None:
        pa = self._pa
        if column.kind == "text":
            group.values[name] = self._to_texts(array)
            if array.null_count:
                group.missing[name] = array.is_null().to_numpy(zero_copy_only=False)
            return
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        wrong: dict[int, str] = {}
        if pa.types.is_null(array.type):
            values = np.zeros((len(array), *column.known_shape), "float32" if column.kind == "float32" else "int64")
            missing = np.ones(values.shape, bool)
        elif column.kind in ("date", "timestamp"):
            values = decoding.times(array, column.kind, pa)
            if missing is not None and column.shape:
                missing = np.repeat(missing[:, np.newaxis], 2, 1)
        elif column.shape:
            values, missing, wrong = decoding.rows_of_lists(array, column)
        else:
            if pa.types.is_boolean(array.type):
                array = array.cast(pa.int8())
            elif pa.types.is_decimal(array.type):
                array = array.cast(pa.float64())
            values = (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f" and column.dtype.kind != "f":
            values, missing, wrong = decoding.as_integers(values, missing, wrong)
        elif values.dtype.kind == "f" or column.kind == "float32":
            values, missing, wrong = decoding.as_float32(values, missing, wrong)
        else:
            values = values.astype(column.dtype, copy=False)
        group.values[name] = values
        if missing is not None and missing.any():
            group.missing[name] = missing
        if wrong:
            group.wrong[name] = wrong

    def _to_texts(self, array) -> Texts:
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
                "write smaller ones (row_group_size=4096), or give shuffle_window=2",
                *(self.path, f"{group.num_rows:,}", group.total_byte_size / 2**20),
            )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def library(source: str) -> tuple[Any, Any]:
    """Imports (pyarrow, pyarrow.parquet) for an input. Raises `UsageError` without them."""
    with importing("pyarrow", f"input={source} needs the library pyarrow; pip install pyarrow"):
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    return pyarrow, pyarrow.parquet
