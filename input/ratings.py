"""Ratings of items by users, from delimited text: user, item, rating[, timestamp]; ids any strings.

Host code, NumPy and `pyarrow` only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.data.data import Data
from ..engine.data.preprocessing import ColumnPreprocessing, Preprocessing
from .checks import InputError, check_at_least, check_share, eval_count
from .files import listing
from .files.storage import Files
from .synthetic_data.randomness import generator
from .tables.csv_records import CsvLayout, Records, first_record, shown
from .tables.csv_types import NUMBER, Converter
from .tables.folders import TableFiles
from .tables.parquet_table import library

_KIND = listing.FileKind(
    "a .tsv, .csv, .data or .inter file, plain or .gz",
    (r".*\.(tsv|csv|data|inter)",),
    "expected lines of data, found 0 bytes",
)
_DELIMITERS = ("\t", "::", ",")
_COLUMNS = ("user", "item", "rating", "timestamp")
_KINDS = {
    "user": ("text", "(?s)^.+$", "the id of a user"),
    "item": ("text", "(?s)^.+$", "the id of an item"),
    "rating": ("float32", NUMBER, "a number"),
    "timestamp": ("float", NUMBER, "a number, of seconds"),
}
_THINGS = ("item", "movie", "book", "product", "song", "track", "artist", "game", "business")
# A header's names, in lower case, letters and digits only.
_COLUMN_OF_NAME = {
    **dict.fromkeys(("user", "userid", "uid"), "user"),
    **dict.fromkeys((*_THINGS, *(thing + "id" for thing in _THINGS), "iid"), "item"),
    **dict.fromkeys(("rating", "score", "stars"), "rating"),
    **dict.fromkeys(("timestamp", "time", "ts"), "timestamp"),
}


def load(
    data_dir: str | None,
    seed: int,
    *,
    split: str = "time",
    eval_share: float = 0.1,
    max_bad_records: int = 0,
    trained_on: Data | None = None,
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
      eval_share: fraction of the records for evaluation, between 0 and 1.
      max_bad_records: number of malformed records to skip before an error; one warning counts them.
      trained_on: the data of a trained run, by which ids are numbered instead.

    Returns:
      Features {"user": int64 [N], "item": int64 [N]}, labels float32 [N], the ratings; in the
      files' order in both splits. Ids are numbered from 1 in the order of their first appearance in
      the training split; an id that only the evaluation split has is 0. The vocabulary counts the 0.

    Raises:
      InputError: no file, no structure that is recognised, too many malformed records, no timestamps
        to split by, or an argument out of range.
    """
    if not data_dir:
        raise InputError(f"input=ratings needs data_dir: a file, or a folder with {_KIND.expected}")
    if split not in ("time", "random"):
        raise InputError(f"split={split} is unknown; use time or random")
    check_share("eval_share", eval_share)
    check_at_least("max_bad_records", max_bad_records, 0)
    pyarrow, _ = library("ratings")
    files = listing.find(data_dir, _KIND)
    layouts = [_layout(files, number, split == "time") for number in range(len(files.paths))]
    names = [name for name in _KINDS if name != "timestamp" or split == "time"]
    converters = {name: Converter(*_KINDS[name]) for name in names}
    records = Records(TableFiles(files, {}), layouts, 1, converters, max_bad_records)
    table = pyarrow.concat_tables(table for _, table in records.tables())
    ratings, count, by_time = table["rating"].to_numpy(), len(table), split == "time"
    held_out = eval_count(count, eval_share, f"data_dir={data_dir}")
    order = np.argsort(table["timestamp"], kind="stable") if by_time else generator(seed, 0).permutation(count)
    is_eval = np.zeros(count, bool)
    is_eval[order[count - held_out :]] = True
    preprocessing = _preprocessing(table.filter(pyarrow.array(~is_eval)), trained_on)
    ids = {name: _ids(table[name], each) for name, each in preprocessing.words.items()}

    def selected(rows: np.ndarray):
        return {name: each[rows] for name, each in ids.items()}, ratings[rows]

    vocabulary = {name: len(ids) + 1 for name, ids in preprocessing.words.items()}
    digest = zlib.crc32(b"".join(b"%s\n" % word for ids in preprocessing.words.values() for word in ids))
    return Data(selected(~is_eval), selected(is_eval), None, vocabulary, digest, preprocessing=preprocessing)


def _preprocessing(table: Any, trained_on: Data | None) -> Preprocessing:
    """Returns a run's numbers of ids; or of each column of the records to train on, by first appearance."""
    if trained_on and {"user", "item"} <= trained_on.preprocessing.words.keys():
        return trained_on.preprocessing
    words = {name: table[name].unique().cast("binary").to_pylist() for name in ("user", "item")}
    return Preprocessing({name: ColumnPreprocessing("category", words=tuple(ids)) for name, ids in words.items()})


def _ids(column: Any, words: Sequence[bytes]) -> np.ndarray:
    """Returns the ids of a column of text, int64; 0 for other words."""
    import pyarrow as pa
    import pyarrow.compute as pc

    index = pc.index_in(column, pa.array(words, pa.binary()).cast(pa.string()))
    return index.fill_null(-1).to_numpy().astype(np.int64) + 1


def _layout(files: Files, number: int, with_times: bool) -> CsvLayout:
    """Infers a file's layout from its first line that is not blank: the separator and the columns' order."""
    path = files.paths[number]
    is_csv = path.removesuffix(".gz").endswith(".csv")
    for delimiter in sorted(_DELIMITERS, key=lambda each: is_csv and each != ","):
        layout = CsvLayout(delimiter, (), is_lines=True, has_quotes=delimiter == ",")
        line, fields = first_record(files, number, layout)
        if isinstance(fields, str) and "UTF-8" in fields:
            raise InputError(f"{path}:{line}: {fields}; convert the file")
        if not isinstance(fields, str) and len(fields) >= 3:
            break
    else:
        raise InputError(
            f"{path}:{line}: expected user, item, rating[, timestamp] between tabs, commas or '::', found "
            f"{fields if isinstance(fields, str) else shown(delimiter.join(fields))}; if the folder holds other tables "
            "too, pass the file of ratings as data_dir"
        )
    where, row = f"{path}:{line}", shown(delimiter.join(fields))
    is_header = not any(re.match(NUMBER, field) for field in fields)
    if not is_header and len(fields) > len(_COLUMNS):
        raise InputError(
            f"{where}: expected 3 or 4 columns, since the first line does not name them, found {len(fields)} ({row}); "
            "put a line of names before it: user, item, rating, timestamp"
        )
    indices = (
        _columns_from_header(where, fields) if is_header else dict(zip(_COLUMNS, range(len(fields)), strict=False))
    )
    if with_times and "timestamp" not in indices:
        raise InputError(
            f"{where}: split=time needs a fourth column, the timestamp, found {row}; use input_arg split=random"
        )
    columns = {index: name for name, index in indices.items()}
    names = tuple(columns.get(index, f"field {index + 1}") for index in range(len(fields)))
    return layout._replace(names=names, header=tuple(fields) if is_header else ())


def _columns_from_header(where: str, fields: list[str]) -> dict[str, int]:
    """Returns the columns' indices by the names in a header."""
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
            f"{shown(','.join(fields))}; name them so, or pass the file of ratings as data_dir"
        )
    return indices
