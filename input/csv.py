"""CSV files, columns by name, with inferred types; converted to Parquet once, by `pyarrow`.

NumPy and `pyarrow` only.
"""

from __future__ import annotations

import bisect
import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.data.run_data import Data
from ..engine.errors import SourceError
from .checks import InputError
from .files import listing
from .files.prepared import Prepared, PreparedWriter, prepared
from .files.storage import Files
from .tables import columns, folders
from .tables.csv_records import CsvLayout, Records, first_record
from .tables.csv_types import Converter, Finder, InferredType, Unfit
from .tables.fitting import FITTED as FITTED
from .tables.fitting import Choice
from .tables.folders import TableFiles
from .tables.parquet_table import ParquetTable, library
from .tables.values import Column

_KIND = listing.FileKind(
    "CSV files (*.csv, else *.tsv), plain or .gz",
    (r".*\.csv(\.gz)?", r".*\.tsv(\.gz)?"),
    "expected rows, found 0 bytes; give files that have some",
    folders.SUBFOLDERS,
)
_FEWEST_GROUP_ROWS, _MOST_GROUP_ROWS = 1024, 8192  # each group costs time and memory for each of its columns
_GROUP_VALUES = 1 << 19
_UNNAMED = ("Unnamed: 0", *(f"Unnamed: 0.{number}" for number in range(1, 10)))  # pandas' names of a column without one
_RULE = 2  # how a file is prepared: another number is another file
_SHOWN = 40  # characters of a field in a message


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
    delimiter: str = ",",
    names: tuple[str, ...] = (),
    eval_data_dir: str = "",
    prepared_dir: str = "",
    validation_split: float = 0.0,
    trained_on: Data | None = None,
    keeps_ids: bool = False,
    needs_labels: bool = True,
) -> Data:
    """Reads CSV in UTF-8, plain or gzip, whose first row names the columns, unless `names` does.

    Quoted fields may contain line breaks. A column of integers is int64, of numbers float32, of ISO 8601 dates or times
    a date or timestamp; any other is text, as are integers with leading zeros or beyond int64. Except in text, an empty
    field and pandas' markers are missing values. If nine in ten values are numbers, any other is an error. The files
    are read once and kept as Parquet (`input.files.prepared`); all else is as for `input.parquet`.

    Args:
      data_dir: a folder, whose *.csv are read (else its *.tsv), or files or globs, separated by commas.
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
      delimiter: separator of fields: a character, `tab`, or one character twice (`::`), between which no field is
        quoted.
      names: names of all columns, in order, if the files have no header.
      eval_data_dir: evaluation files, as data_dir; their columns have the types of the training data.
      prepared_dir: folder of the Parquet file, instead of `.crankshaft` beside the files.
      validation_split: fraction of the rows that is neither trained on nor used to fit words and means.
      trained_on: the data of a trained run, whose words, means and ids are used instead of fitting them again.
      keeps_ids: whether ids stay as they are, since the model takes any.
      needs_labels: whether it is an error if files lack the column of labels.

    Returns:
      Features by name, labels int64 or float32. Labels that are text or integers from 0 on are classes.

    Raises:
      InputError: pyarrow is not installed, or files or columns are missing or malformed.
    """
    choice = Choice(label, features, numbers, texts, array, missing, text, validation_split, keeps_ids, needs_labels)
    delimiter = "\t" if delimiter == "tab" else delimiter
    table_files = folders.find(data_dir, _KIND)
    train = columns.read(lambda kinds: CsvTable(table_files, delimiter, names, kinds, prepared_dir), choice, trained_on)
    evaluation = None
    if eval_data_dir:
        others = folders.find(eval_data_dir, _KIND, "eval_data_dir", like=table_files)
        evaluation = CsvTable(others, delimiter, names, train.read_as, prepared_dir, like=train)
    return columns.make_splits(train, evaluation, choice, trained_on)


class CsvTable(ParquetTable):
    """Rows of CSV files with the same columns, read from the Parquet file prepared from them.

    Args:
      names: names of all columns; () if headers have them.
      read_as: kinds of columns that are not inferred, as `csv_types` names them.
      prepared_dir: folder of the Parquet file; None is the folder beside the files, see `prepared`.
      like: the table whose column types these have; None infers them.

    Raises:
      InputError: a row is malformed, the columns are not the same, or there are no rows.
      SourceError: the prepared file is damaged.
    """

    fix = "remove the file: it is rebuilt"

    def __init__(
        self,
        table_files: TableFiles,
        delimiter: str,
        names: tuple[str, ...],
        read_as: Mapping[str, str],
        prepared_dir: str | None,
        like: CsvTable | None = None,
    ):
        library("csv")
        files = table_files.files
        self._csv_paths = files.paths
        kinds = like.kinds if like else None

        def write(writer: PreparedWriter) -> None:
            _write(writer, table_files, _layouts(files, delimiter, names), read_as, kinds, like.path if like else None)

        texts = [name for name, kind in read_as.items() if kind == "text"]
        recipe = {"rule": _RULE, "delimiter": delimiter, "kinds": kinds, "texts": texts, "keys": table_files.keys}
        recipe |= {"names": names} if names else {}
        recipe |= {"read_as": {**read_as}} if len(texts) < len(read_as) else {}
        table = prepared(files, "csv", recipe, write, prepared_dir)
        super().__init__(TableFiles(Files([table.path]), {}), {}, [_metadata(table)], os.path.dirname(table.path))
        self.read_as = read_as
        self.kinds: dict[str, str] = table.metadata["kinds"]
        self._records: list[int] = table.metadata["records"]
        self.path = files.paths[0]
        for name, why in table.metadata["why"].items():
            self.columns[name] = Column("text", why=why)
        self.problems = table.metadata["problems"]
        self.identity = f"{sum(self._records)} records of {table.metadata['files']}"
        if table_files.keys:
            self.identity += f" {table_files.keys}"
        listing.log_empty([path for path, count in zip(files.paths, self._records, strict=True) if not count])

    def describe_row(self, group: int, row: int) -> str:
        row += int(self.group_rows[:group].sum())
        for path, records in zip(self._csv_paths, self._records, strict=True):
            if row < records:
                return f"{path}, row {row + 1}"
            row -= records
        raise IndexError(row)


def _metadata(table: Prepared) -> Any:
    """Reads the Parquet file's metadata, which precede the prepared file's own."""
    import pyarrow
    import pyarrow.parquet

    offset, length, checksum = table.metadata["metadata"]
    data = table.read(offset, length)
    if zlib.crc32(data) != checksum:
        raise SourceError(str(table.damaged("its index")))
    return pyarrow.parquet.read_metadata(pyarrow.BufferReader(data))


class _Sink:
    """The stream that `pyarrow` writes to: a `PreparedWriter` that keeps its last bytes."""

    closed = False

    def __init__(self, writer: PreparedWriter):
        self._writer = writer
        self._last: list[bytes] = []

    def tell(self) -> int:
        return self._writer.offset

    def write(self, data) -> None:
        self._last = [*self._last[-2:], bytes(data)]  # a footer is three: metadata, their length, a mark
        self._writer.write(self._last[-1])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def metadata(self) -> tuple[int, int, int]:
        """Returns the offset of the written file's metadata, their size in bytes, and a checksum."""
        last = b"".join(self._last)
        return self._writer.offset - len(last), len(last), zlib.crc32(last)


def _write(
    writer: PreparedWriter,
    table_files: TableFiles,
    layouts: Sequence[CsvLayout],
    read_as: Mapping[str, str],
    kinds: dict[str, str] | None,
    like: str | None,
) -> None:
    paths = table_files.files.paths
    reading = Records(table_files, layouts, passes=1 if kinds else 2)
    columns: dict[str, InferredType] = {}
    if kinds is None:
        finders = [Finder(read_as.get(name)) for name in reading.names]
        for _, batch in reading.tables():
            for finder, column in zip(finders, batch.columns, strict=True):
                finder.add(column)
        columns = dict(zip(reading.names, (finder.end() for finder in finders), strict=True))
        kinds = {name: column.kind for name, column in columns.items()}
    elif unknown := [name for name in reading.names if name not in kinds]:
        raise InputError(
            f"{paths[0]} has other columns than {like} (unknown: {', '.join(unknown)}); remove them, or name them as "
            "there"
        )
    kinds = {name: kind for name, kind in kinds.items() if name in reading.names}
    counts = _write_parquet(writer, reading, kinds, like)
    records = [counts.get(path, 0) for path in paths]
    ends = [*itertools.accumulate(records)]
    problems = {}
    for name, column in columns.items():
        if column.odd:
            index, field, expects = column.odd
            number = bisect.bisect_right(ends, index)
            record = index - ends[number] + records[number] + 1
            problems[name] = (
                f"{paths[number]}, row {record}: column {name!r}: expected {expects}, as most are, found "
                f"{field[:_SHOWN]!r}; mend it, leave it empty, or read the column as text by input_arg=texts={name}"
            )
    why = {name: column.why for name, column in columns.items() if column.why}
    writer.metadata.update(kinds=kinds, why=why, problems=problems, records=records, files=reading.digest)


def _write_parquet(writer: PreparedWriter, reading: Records, kinds: dict[str, str], like: str | None) -> dict[str, int]:
    """Writes row groups; returns the number of records per file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = _Sink(writer)
    converters = [Converter(kind) for kind in kinds.values()]
    schema = pa.schema([(name, converter.type) for name, converter in zip(kinds, converters, strict=True)])
    records: dict[str, int] = {}
    group_rows = min(max(_GROUP_VALUES // len(kinds), _FEWEST_GROUP_ROWS), _MOST_GROUP_ROWS)
    rest = schema.empty_table()
    # Plain pages are what NumPy reads; the checksums find flipped bits.
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    # `ParquetTable.extremes` needs them; those of text would only take space.
    options["write_statistics"] = [name for name, kind in kinds.items() if kind in ("int", "float")]
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, **options) as parquet:
        for path, batch in reading.tables():
            columns = []
            for name, converter in zip(kinds, converters, strict=True):
                try:
                    columns.append(converter.convert(batch.column(name)))
                except Unfit as unfit:
                    raise InputError(
                        f"{path}, row {records.get(path, 0) + unfit.row + 1}: column {name!r}: expected "
                        f"{converter.expects}, as in {like or 'the data of the run'}, found {unfit.field[:_SHOWN]!r}; "
                        "mend it"
                    ) from None
            records[path] = records.get(path, 0) + batch.num_rows
            rest = pa.concat_tables([rest, pa.table(columns, schema=schema)])
            whole = len(rest) - len(rest) % group_rows
            if whole:
                parquet.write_table(rest[:whole], row_group_size=group_rows)
                rest = rest[whole:].combine_chunks()
        if len(rest):
            parquet.write_table(rest, row_group_size=group_rows)
    writer.metadata["metadata"] = sink.metadata()
    return records


def _layouts(files: Files, delimiter: str, names: tuple[str, ...]) -> list[CsvLayout]:
    """Returns each file's layout, from `names` or its header. Raises `InputError`.

    A first column without a name is pandas' index, and named as pandas names it.
    """
    if delimiter not in (delimiter[:1], 2 * delimiter[:1]) or delimiter[:1] in '"\r\n' or not delimiter.isascii():
        raise InputError(f"delimiter={delimiter} is not a delimiter; give one character of ASCII, it twice, or tab")
    has_quotes = len(delimiter) == 1
    if names:
        if len({*names}) < len(names):
            raise InputError(f"names={','.join(names)} has one name twice; name each column once")
        return [CsvLayout(delimiter, names, has_quotes=has_quotes)] * len(files.paths)
    layouts: list[CsvLayout] = []
    first = ""
    for number, path in enumerate(files.paths):
        layout = CsvLayout(delimiter, (), has_quotes=has_quotes)
        raw = first_record(files, number, layout)
        named = [name.strip() for name in raw]
        if len(named) > 1 and not named[0]:
            named[0] = next(name for name in _UNNAMED if name not in named)
        if len({*named}) < len(named) or "" in named:
            twice = next((name for i, name in enumerate(sorted(named)) if i and sorted(named)[i - 1] == name), "")
            wrong = "a column without a name" if "" in named else f"two columns {twice!r}"
            raise InputError(f"{path}:1: expected a header, a name for each column, found {wrong}; mend it")
        layouts.append(layout._replace(names=tuple(named), header=tuple(raw)))
        first = first or (path if named else "")
        wanted = next((layout.names for layout in layouts if layout.names), ())
        if named and {*named} != {*wanted}:
            raise InputError(
                f"{path}:1: the header is {', '.join(named)}, and that of {first} {', '.join(wanted)}; give files of "
                "the same columns"
            )
    if not first:
        raise InputError(f"{files.paths[0]} is empty: expected a header and rows, found nothing; remove it")
    return layouts
