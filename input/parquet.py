"""Parquet files, columns by name; needs the library `pyarrow`.

Host code, NumPy and `pyarrow` only.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

import numpy as np

from ..engine.data.source import SourceError, Spec
from .files import storage
from .files.storage import Files
from .splits import InputError, Splits
from .tables.columns import Choice, Group, Table, splits_of

_PATTERNS = ("*.parquet",)
_EXPECTED = "Parquet files (*.parquet)"
_FOOTER_BYTES = 1 << 16  # of a file's end, which tells one from another
_LARGE_GROUP_BYTES = 16 << 20


def load(
    data_dir: str | None,
    seed: int,
    *,
    label: str = "label",
    features: tuple[str, ...] = (),
    numbers: tuple[str, ...] = (),
    array: bool = False,
    missing: str = "refuse",
    eval_data_dir: str = "",
) -> Splits:
    """Reads Parquet files by whole row groups.

    Integers and booleans are int64, floats and decimals float32, text and binaries bytes; lists of numbers, of the same
    length in each row, are arrays. A column of integers from 0 on is ids, for models with tables of embeddings, unless
    `numbers` names it.

    Args:
      data_dir: a folder, whose *.parquet are read, files or globs, with commas between.
      seed: not used.
      label: the column of labels; text is numbered in its order; `none` where there is none.
      features: columns; all others by default.
      numbers: columns of integers that are read as float32.
      array: whether features are one float32 array, [columns], in place of a dict by name.
      missing: `refuse` rows without a value, as bad records; or read `zero`, which is "" of text.
      eval_data_dir: the files to evaluate on, as data_dir.

    Returns:
      Features by name, labels int64 or float32. Labels that are text or integers from 0 on are classes.

    Raises:
      InputError: the library is not installed, there are no such files, or their columns are not those.
    """
    choice = Choice(label, features, numbers, array, missing)
    train = ParquetTable(Files(storage.find(data_dir, _PATTERNS, _EXPECTED)))
    evaluation = None
    if eval_data_dir:
        evaluation = ParquetTable(Files(storage.find(eval_data_dir, _PATTERNS, _EXPECTED, "eval_data_dir")))
    return splits_of(train, evaluation, choice)


class ParquetTable(Table):
    """Rows of Parquet files, of which each has the same columns.

    Args:
      files: of them.

    Raises:
      InputError: one is no such file, has other columns, or no rows.
    """

    def __init__(self, files: Files):
        self._pa, self._parquet = _library()
        self._files = files
        self.where, self.paths = files.paths[0], files.paths
        self._metadata = [self._opened(number, InputError).metadata for number in range(len(files.paths))]
        schemas = [metadata.schema.to_arrow_schema() for metadata in self._metadata]
        self._schema = schemas[0]
        rows = [[each.row_group(i).num_rows for i in range(each.num_row_groups)] for each in self._metadata]
        # (file, group in it) of each group that has rows
        self._groups = [(n, i) for n, sizes in enumerate(rows) for i, size in enumerate(sizes) if size]
        self.group_rows = np.array([rows[n][i] for n, i in self._groups], np.int64)
        for number, path in enumerate(files.paths):
            if not sum(rows[number]):
                raise InputError(f"{path} has no rows; remove it")
            _check_schema(path, schemas[number], self.where, self._schema)
        self.columns = {field.name: self._spec(field) for field in self._schema}
        self.identity = f"{sum(self.group_rows)} rows of {[self._footer(number) for number in range(len(files.paths))]}"
        self._warn_of_large_groups()

    def read(self, group: int, names: list[str]) -> Group:
        number, row_group = self._groups[group]
        try:
            with self._opened(number, SourceError, self._metadata[number]) as file:
                # One thread: whoever reads groups ahead does so by several.
                table = file.read_row_group(row_group, columns=names, use_threads=False)
        except (self._pa.ArrowException, OSError) as error:
            raise self._unreadable(SourceError, number, row_group, error) from None
        found = Group({}, {}, {})
        for name in names:
            self._decode(name, table.column(name).combine_chunks(), found)
        return found

    def describe_row(self, group: int, row: int) -> str:
        number, row_group = self._groups[group]
        before = sum(self._metadata[number].row_group(i).num_rows for i in range(row_group))
        return f"{self._files.paths[number]}, row {before + row}"

    def extremes(self, name: str) -> tuple[int, int] | None:
        found = []
        for group, (number, row_group) in enumerate(self._groups):
            statistics = self._statistics(number, row_group, name)
            if statistics is not None and statistics.has_min_max:
                found += [int(statistics.min), int(statistics.max)]
            elif statistics is None or statistics.null_count != self.group_rows[group]:
                values = self.read(group, [name])
                there = values.arrays[name][~values.missing[name]] if name in values.missing else values.arrays[name]
                found += [int(there.min()), int(there.max())] if len(there) else []
        return (min(found), max(found)) if found else None

    def _statistics(self, number: int, row_group: int, name: str) -> Any:
        group = self._metadata[number].row_group(row_group)
        for i in range(group.num_columns):
            if group.column(i).path_in_schema == name:
                return group.column(i).statistics
        return None

    def _opened(self, number: int, error_class: type[ValueError], metadata=None):
        path = self._files.paths[number]
        self._files.check(number)
        try:
            return self._parquet.ParquetFile(
                self._files.stream(number) if storage.is_remote(path) else path,
                metadata=metadata,
                page_checksum_verification=True,
            )
        except (self._pa.ArrowException, OSError) as error:
            raise error_class(f"{path} is no whole Parquet file ({_first_line(error)}); restore or remove it") from None

    def _footer(self, number: int) -> tuple[int, int]:
        size = self._files.sizes[number]
        length = min(size, _FOOTER_BYTES)
        return size, zlib.crc32(self._files.pread(number, size - length, length))

    def _spec(self, field) -> Spec | None:
        """Returns what a column is read as; None where it can't be."""
        types = self._pa.types
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
            values = kind.value_type
            if not (types.is_integer(values) or types.is_floating(values)):
                return None
            length = kind.list_size if types.is_fixed_size_list(kind) else self._length(field.name)
            return Spec((length,), np.float32 if types.is_floating(values) else values.to_pandas_dtype())
        if types.is_integer(kind) or types.is_boolean(kind):
            return Spec((), np.int64)
        if types.is_floating(kind) or types.is_decimal(kind):
            return Spec((), np.float32)
        texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        return Spec((), object) if any(is_text(kind) for is_text in texts) else None

    def _length(self, name: str) -> int:
        """Returns how many values the first row has in a column of lists."""
        number, row_group = self._groups[0]
        try:
            with self._opened(number, InputError) as file:
                found = next(file.iter_batches(1, row_groups=[row_group], columns=[name])).column(0)[0]
        except (self._pa.ArrowException, OSError) as error:
            raise self._unreadable(InputError, number, row_group, error) from None
        return len(found) if found.is_valid else 0

    def _unreadable(self, kind: type[ValueError], number: int, row_group: int, error: Exception) -> ValueError:
        path = self._files.paths[number]
        return kind(f"{path}: row group {row_group} can't be read ({_first_line(error)}); restore the file")

    def _decode(self, name: str, array, found: Group) -> None:
        """Adds a column to a group."""
        spec, types = self.columns[name], self._pa.types
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.null_count:
            found.missing[name] = array.is_null().to_numpy(zero_copy_only=False)
        if spec.shape:
            found.arrays[name], wrong = _rows_of_lists(array, spec)
            if wrong.any():
                found.wrong[name] = wrong
        elif spec.dtype == object:
            binary = array.cast(self._pa.large_binary()).fill_null(b"")
            found.arrays[name] = binary.to_numpy(zero_copy_only=False)
        else:
            values = array.cast(self._pa.int8()) if types.is_boolean(array.type) else array
            values = values.cast(self._pa.float64()) if types.is_decimal(array.type) else values
            found.arrays[name] = values.fill_null(0).to_numpy(zero_copy_only=False).astype(spec.dtype, copy=False)

    def _warn_of_large_groups(self) -> None:
        number, row_group = self._groups[int(np.argmax(self.group_rows))]
        group = self._metadata[number].row_group(row_group)
        if group.total_byte_size > _LARGE_GROUP_BYTES and len(self._groups) > 4:
            logging.warning(
                "%s has row groups of %s rows, %.0f MiB each, and a shuffle keeps the groups of two windows in memory; "
                "write smaller ones (row_group_size=4096), or give --shuffle_window=2",
                *(self.where, f"{group.num_rows:,}", group.total_byte_size / 2**20),
            )


def _rows_of_lists(array, spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """Returns (values [rows, length], which rows have not as many, [rows] bool, with zeros in the values)."""
    length = spec.shape[0]
    flat = array.flatten()
    if not array.null_count and not flat.null_count and len(flat) == len(array) * length:
        lengths = np.diff(array.offsets.to_numpy()) if hasattr(array, "offsets") else np.full(len(array), length)
        if (lengths == length).all():
            return flat.to_numpy().astype(spec.dtype).reshape(-1, length), np.zeros(len(array), bool)
    values, wrong = np.zeros((len(array), length), spec.dtype), np.zeros(len(array), bool)
    for row, each in enumerate(array.to_pylist()):
        if each is None:
            continue
        wrong[row] = len(each) != length or None in each
        if not wrong[row]:
            values[row] = each
    return values, wrong


def _check_schema(path: str, found, where: str, wanted) -> None:
    if len({*found.names}) < len(found.names):
        raise InputError(f"{path} has two columns of one name, of {', '.join(found.names)}; rename one")
    for field in wanted:
        if field.name not in found.names:
            raise InputError(f"{path} has no column {field.name!r}, and {where} has; give files of the same columns")
        if found.field(field.name).type != field.type:
            raise InputError(
                f"{path}: column {field.name!r} is {found.field(field.name).type}, and {field.type} in {where}; write "
                "both alike"
            )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _library() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("input=parquet needs the library pyarrow; pip install 'crankshaft[parquet]'") from None
    return pyarrow, pyarrow.parquet
