"""Parquet files, columns by name; needs the library `pyarrow`."""

from __future__ import annotations

from ..engine.data.run_data import Data
from .files import listing
from .tables import columns, folders
from .tables.fitting import FITTED as FITTED
from .tables.fitting import Choice
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
    trained_on: Data | None = None,
    keeps_ids: bool = False,
    needs_labels: bool = True,
) -> Data:
    """Reads Parquet files by whole row groups.

    Integers and booleans become int64, floats and decimals float32, text and binaries categories; dates days since
    1970-01-01, timestamps these days and seconds of the day; lists of numbers of one length arrays. Columns of integers
    from 0 on are ids, for models with embeddings, unless in `numbers`; so are floats that are whole numbers, some
    beyond 2^24, which float32 would round.

    Args:
      data_dir: a folder, whose *.parquet are read, or files or globs, separated by commas.
      seed: not used.
      label: the column of labels; text is numbered in its order; `none` if there are no labels.
      features: columns; all others by default.
      numbers: integer columns to read as float32.
      texts: columns to read as text, whatever they contain.
      text: how text is converted: to `category` ids by the words of the training data (0: others), to 64-bit `hash`
        ids, for models that hash ids; or `keep`. Integers far larger than many are numbered with `category` alone.
      array: whether features are one float32 array, [columns], instead of a dict by name.
      missing: how to read missing values: `refuse` makes the row a bad example; `zero`, `mean` (of the training data)
        or a number replaces them; `column` reads 0 and adds a feature NAME.missing. For ids and text, all but
        `refuse` are id 0.
      eval_data_dir: evaluation files, as data_dir.
      prepared_dir: folder of the fitted words and means, instead of `.crankshaft` beside the files.
      validation_split: fraction of the rows that is neither trained on nor used to fit words and means.
      trained_on: the data of a trained run, whose words, means and ids are used instead of fitting them again.
      keeps_ids: whether ids stay as they are, since the model takes any.
      needs_labels: whether it is an error if files lack the column of labels.

    Returns:
      Features by name, labels int64 or float32. Labels that are text or integers from 0 on are classes.

    Raises:
      InputError: pyarrow is not installed, or files or columns are missing.
    """
    choice = Choice(label, features, numbers, texts, array, missing, text, validation_split, keeps_ids, needs_labels)
    table_files = folders.find(data_dir, _KIND)
    train = columns.read(
        lambda kinds: ParquetTable(table_files, kinds, prepared_dir=prepared_dir or None), choice, trained_on
    )
    evaluation = None
    if eval_data_dir:
        others = folders.find(eval_data_dir, _KIND, "eval_data_dir", like=table_files)
        evaluation = ParquetTable(others, train.read_as, like=train)
    return columns.make_splits(train, evaluation, choice, trained_on)
