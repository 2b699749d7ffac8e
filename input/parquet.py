"""Parquet files, columns by name; needs the library `pyarrow`.

Host code, NumPy and `pyarrow` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.data.data import Data
from .files import listing
from .known import order_of
from .tables import folders
from .tables.columns import Choice, splits_of
from .tables.parquet_table import ParquetTable

_KIND = listing.FileKind(
    "Parquet files (*.parquet)",
    (r".*\.parquet",),
    "expected rows, found 0 bytes; give files that have some",
    folders.SUBFOLDERS,
)


def load(
    data_dir: str | None,
    seed: int,
    *,
    label: str = "label",
    features: tuple[str, ...] = (),
    numbers: tuple[str, ...] = (),
    texts: tuple[str, ...] = (),
    text: str = "category",
    array: bool = False,
    missing: str = "refuse",
    eval_data_dir: str = "",
    prepared_dir: str = "",
    validation_split: float = 0.0,
    trained_on: Mapping[str, Any] | None = None,
) -> Data:
    """Reads Parquet files by whole row groups.

    Integers and booleans are int64, floats and decimals float32, text and binaries categories; dates are days since
    1970-01-01, timestamps that and seconds of the day; lists of numbers, of the same length in each row, are arrays. A
    column of integers from 0 on is ids, for models with tables of embeddings, unless `numbers` names it; so is one of
    floats that are whole numbers, some beyond 2^24, which float32 would round.

    Args:
      data_dir: a folder, whose *.parquet are read, files or globs, with commas between.
      seed: not used.
      label: the column of labels; text is numbered in its order; `none` where there is none.
      features: columns; all others by default.
      numbers: columns of integers that are read as float32.
      texts: columns that are read as text, whatever they hold.
      text: what is made of text: a `category`, ids by the words of training, 0 for others; ids by a `hash` of 64 bits,
        for models that hash ids; or `keep`.
      array: whether features are one float32 array, [columns], in place of a dict by name.
      missing: `refuse` rows without a value, as bad records; or read `zero`, the `mean` of training, or a number; or
        `column`, which reads 0 and says so in a feature NAME.missing. Of ids and text it is id 0 then.
      eval_data_dir: the files to evaluate on, as data_dir.
      prepared_dir: where words and means are kept, in place of `.crankshaft` beside the files.
      validation_split: the share of the rows that is not trained on, of which no words and means are learnt.
      trained_on: what a run keeps of its data, if it was trained: an array's columns are read in that order.

    Returns:
      Features by name, labels int64 or float32. Labels that are text or integers from 0 on are classes.

    Raises:
      InputError: the library is not installed, there are no such files, or their columns are not those.
    """
    choice = Choice(label, features, numbers, texts, array, missing, text, validation_split, order_of(trained_on))
    table_files = folders.find(data_dir, _KIND)
    train = ParquetTable(table_files, texts, prepared_dir=prepared_dir or None)
    evaluation = None
    if eval_data_dir:
        others = folders.find(eval_data_dir, _KIND, "eval_data_dir", like=table_files)
        evaluation = ParquetTable(others, texts, like=train)
    return splits_of(train, evaluation, choice)
