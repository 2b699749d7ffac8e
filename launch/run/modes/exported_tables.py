"""Writes the rows of tables with `admit_after` beside a SavedModel, and what has changed since an earlier export.

Host code. A file has columns `key`, null for the row that all ids without one share, and `vector`, sorted by key. It is
written and compared in pieces: memory has a table's keys, and never all of its vectors.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ....engine import logging
from ....engine.layers.embeddings import SHARED_ROW_KEY, Embedding
from ....input.tables.parquet_table import first_line, library
from ...errors import UsageError

FOLDER = "tables"


def write(export: str, tables: Mapping[str, Embedding], since: str | None) -> str:
    """Writes tables/NAME.parquet and, with an earlier export, tables/NAME.delta.parquet into a new export.

    A delta has the rows that are new or differ in any bit, and a null vector for each key that is gone. Returns a
    description for the README; "" without tables.

    Args:
      export: the folder of the new export.
      tables: by the names of their files.
      since: the folder of the earlier export, or None.

    Raises:
      UsageError: the earlier export does not have these tables.
    """
    if since and not tables:
        raise UsageError(f"export_since={since}: the model has no table with admit_after to compare; leave it out")
    if not tables:
        return ""
    if importlib.util.find_spec("pyarrow") is None:
        logging.warning("the rows of tables are exported only with pyarrow; pip install 'crankshaft[parquet]'")
        return ""
    os.mkdir(os.path.join(export, FOLDER))
    for name, table in tables.items():
        earlier = _pieces(since, name, table.width) if since else None
        all_rows = ((keys, vectors, np.zeros(len(keys), bool)) for keys, vectors in table.rows_by_key())
        _write(export, name, table.width, all_rows)
        if earlier is not None:
            later = _pieces(export, name, table.width)
            rows, gone = _write(export, f"{name}.delta", table.width, _changes(earlier, later, table.width))
            logging.info("table %s since %s: %s rows new or changed, %s gone", name, since, f"{rows:,}", f"{gone:,}")
    return (
        f"\n`{FOLDER}/` has the rows of tables ({', '.join(tables)}): `key` is what `Embedding.keys_of(ids)` returns, "
        "and null for all ids without a row. `NAME.delta.parquet`, if present, has the rows that were changed or "
        "added since an earlier export, and keys that are gone, with a null vector.\n"
    )


def _path(export: str, name: str) -> str:
    return os.path.join(export, FOLDER, f"{name}.parquet")


def _schema(width: int):
    pyarrow, _ = library("parquet")
    return pyarrow.schema([("key", pyarrow.int64()), ("vector", pyarrow.list_(pyarrow.float32(), width))])


def _write(export: str, name: str, width: int, pieces: Iterable[tuple]) -> tuple[int, int]:
    """Writes pieces of keys, vectors and whether keys are gone. Returns the number of the other rows, and of these."""
    pyarrow, parquet = library("parquet")
    rows = gone = 0
    options = {"use_dictionary": False, "write_page_checksum": True}
    with parquet.ParquetWriter(_path(export, name), _schema(width), **options) as writer:
        for keys, vectors, is_gone in pieces:
            columns = [
                pyarrow.array(keys, mask=keys == SHARED_ROW_KEY),
                pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), width, mask=pyarrow.array(is_gone)),
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=_schema(width)))
            rows, gone = rows + np.count_nonzero(~is_gone), gone + np.count_nonzero(is_gone)
    return rows, gone


def _pieces(export: str, name: str, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Opens a table's file. The iterator yields keys [n], ascending, and vectors [n, width]. Raises `UsageError`."""
    pyarrow, parquet = library("parquet")
    path = _path(export, name)

    def unusable(problem: str) -> UsageError:
        return UsageError(f"{path}: {problem}; give export_since an earlier export of this model")

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with file:
            for number in range(file.num_row_groups):
                try:
                    table = file.read_row_group(number)
                except (OSError, pyarrow.ArrowException) as error:
                    raise unusable(first_line(error)) from None
                keys, vectors = (column.combine_chunks() for column in table.columns)
                yield keys.fill_null(SHARED_ROW_KEY).to_numpy(), vectors.flatten().to_numpy().reshape(-1, width)

    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise unusable(first_line(error)) from None
    if file.schema_arrow != _schema(width):
        raise unusable(f"its columns are not key, vector of {width} numbers")
    return read()


def _changes(earlier: Iterator, later: Iterator, width: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Merges two sorted tables, a piece at a time. Yields keys, vectors and whether keys are gone, of what differs."""
    end = np.zeros(0, np.int64), np.zeros([0, width], np.float32)
    pieces = [next(earlier, end), next(later, end)]
    while any(len(keys) for keys, _ in pieces):
        last = min(keys[-1] for keys, _ in pieces if len(keys))  # up to which both pieces have all keys
        counts = [np.searchsorted(keys, last, "right") for keys, _ in pieces]
        (old_keys, old), (new_keys, new) = (
            (keys[:count], vectors[:count]) for (keys, vectors), count in zip(pieces, counts, strict=True)
        )
        pieces = [
            (keys[count:], vectors[count:]) if count < len(keys) else next(table, end)
            for (keys, vectors), count, table in zip(pieces, counts, (earlier, later), strict=True)
        ]
        _, in_old, in_new = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
        is_changed = np.ones(len(new_keys), bool)
        is_changed[in_new] = (old[in_old].view(np.int32) != new[in_new].view(np.int32)).any(1)
        gone = np.setdiff1d(old_keys, new_keys, assume_unique=True)
        keys = np.append(new_keys[is_changed], gone)
        vectors = np.append(new[is_changed], np.zeros([len(gone), width], np.float32), axis=0)
        order = np.argsort(keys)
        if len(keys):
            yield keys[order], vectors[order], order >= len(keys) - len(gone)
