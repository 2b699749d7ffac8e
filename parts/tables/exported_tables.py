"""Writes the rows of tables with `admit_after` beside a SavedModel, and what has changed since an earlier export.

A file has columns `key`, null for the row that all ids without one share, and `vector`, sorted by key. It is written
and compared in pieces: memory has a table's keys, and never all of its vectors.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...engine import logging
from ...input.tables.parquet_table import first_line, library
from ...runner.failures import UsageError
from .admission import SHARED_ROW_KEY

FOLDER = "tables"
_DELTA = ".delta"
# Keys [n] int64, ascending, vectors [n, width] float32, and whether the keys are gone, [n]; None if none is.
Piece = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def write(export: str, tables: Mapping[str, Any], since: str | None) -> None:
    """Writes tables/NAME.parquet and, with an earlier export, tables/NAME.delta.parquet into a new export.

    A delta has the rows that are new or differ in any bit, and a null vector for each key that is gone.

    Args:
      tables: the `Embedding`s, by the names of their files.
      since: the folder of the earlier export, or None.

    Raises:
      UsageError: the earlier export does not have these tables.
    """
    if importlib.util.find_spec("pyarrow") is None:
        logging.warning("the rows of tables are exported only with pyarrow; pip install pyarrow")
        return
    os.mkdir(os.path.join(export, FOLDER))
    for name, table in tables.items():
        rows = _write_pieces(export, name, table.width, ((*piece, None) for piece in table.rows_by_key()))
        if since:
            changes = _changes(_read_pieces(since, name, table.width), rows, table.width)
            rows = _write_pieces(export, f"{name}{_DELTA}", table.width, changes)
        # The pieces are written as they are read here, and none is kept: a table may be larger than memory.
        is_gone = [gone for _, _, gone in rows if gone is not None]
        if since:
            counts = sum(map(len, is_gone)), sum(map(np.count_nonzero, is_gone))
            logging.info("table %s since %s: %d rows differ, %d of which are gone", name, since, *counts)


def _path(export: str, name: str) -> str:
    return os.path.join(export, FOLDER, f"{name}.parquet")


def _schema(width: int) -> Any:
    """Describes a table's file, or with width -1 a delta's: pyarrow 25 can't read null vectors of a fixed size."""
    pyarrow, _ = library("parquet")
    return pyarrow.schema([("key", pyarrow.int64()), ("vector", pyarrow.list_(pyarrow.float32(), width))])


def _write_pieces(export: str, name: str, width: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Writes pieces to a table's file, and yields each. The file is complete when the iterator ends."""
    pyarrow, parquet = library("parquet")
    options = {"use_dictionary": False, "write_page_checksum": True}
    schema = _schema(-1 if name.endswith(_DELTA) else width)
    with parquet.ParquetWriter(_path(export, name), schema, **options) as writer:
        for keys, vectors, is_gone in pieces:
            key = pyarrow.array(keys, mask=keys == SHARED_ROW_KEY)
            if is_gone is None:
                vector = pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), width)
            else:
                ends = pyarrow.array(width * np.append(0, np.cumsum(~is_gone)), pyarrow.int32())
                vector = pyarrow.ListArray.from_arrays(ends, vectors[~is_gone].ravel(), mask=pyarrow.array(is_gone))
            writer.write_table(pyarrow.Table.from_arrays([key, vector], schema=schema))
            yield keys, vectors, is_gone


def _read_pieces(export: str, name: str, width: int) -> Iterator[Piece]:
    """Reads a table's file in the pieces that were written. Raises `UsageError`."""
    pyarrow, parquet = library("parquet")
    path = _path(export, name)
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            if file.schema_arrow != _schema(width):
                raise pyarrow.ArrowInvalid(f"its columns are not key, vector of {width} numbers")
            for number in range(file.num_row_groups):
                keys, vectors = (column.combine_chunks() for column in file.read_row_group(number).columns)
                yield keys.fill_null(SHARED_ROW_KEY).to_numpy(), vectors.flatten().to_numpy().reshape(-1, width), None
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path}: {first_line(error)}; give export_since an earlier export of this model") from None


def _changes(earlier: Iterator[Piece], later: Iterator[Piece], width: int) -> Iterator[Piece]:
    """Merges two sorted tables, a piece at a time, into pieces of what differs."""
    end: Piece = np.zeros(0, np.int64), np.zeros([0, width], np.float32), None
    pieces = [next(earlier, end), next(later, end)]
    while any(len(keys) for keys, _, _ in pieces):
        last = min(keys[-1] for keys, _, _ in pieces if len(keys))  # up to which both pieces have all keys
        counts = [np.searchsorted(keys, last, "right") for keys, _, _ in pieces]
        (old_keys, old), (new_keys, new) = (
            (keys[:count], vectors[:count]) for (keys, vectors, _), count in zip(pieces, counts, strict=True)
        )
        pieces = [
            (keys[count:], vectors[count:], None) if count < len(keys) else next(table, end)
            for (keys, vectors, _), count, table in zip(pieces, counts, (earlier, later), strict=True)
        ]
        _, in_old, in_new = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
        # Compared by their bits: as numbers, nan would differ from itself, and 0.0 would be -0.0.
        is_changed = np.ones(len(new_keys), bool)
        is_changed[in_new] = (old[in_old].view(np.int32) != new[in_new].view(np.int32)).any(1)
        gone = np.setdiff1d(old_keys, new_keys, assume_unique=True)
        keys = np.append(new_keys[is_changed], gone)
        vectors = np.append(new[is_changed], np.zeros([len(gone), width], np.float32), axis=0)
        order = np.argsort(keys)
        if len(keys):
            yield keys[order], vectors[order], order >= len(keys) - len(gone)
