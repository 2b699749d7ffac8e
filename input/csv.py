"""CSV files with a header, columns by name; types are found; made Parquet once, by `pyarrow`.

Host code, NumPy and `pyarrow` only.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..engine.data.data import Data
from ..engine.internals.errors import SourceError
from .data import InputError
from .files import listing
from .files.prepared import Prepared, Writer, prepared, progress
from .files.storage import Files
from .known import order_of
from .tables import folders
from .tables.columns import Choice, splits_of
from .tables.csv_types import Converter, Finder, Found, Unfit
from .tables.folders import TableFiles
from .tables.parquet_table import ParquetTable, first_line, library
from .tables.values import Column

_KIND = listing.Kind(
    "CSV files (*.csv, else *.tsv)",
    (r".*\.csv", r".*\.tsv"),
    "expected rows, found 0 bytes; give files that have some",
    folders.SUBFOLDERS,
)
_FEWEST_GROUP_ROWS, _MOST_GROUP_ROWS = 1024, 8192  # each group costs time and memory for each of its columns
_GROUP_VALUES = 1 << 19
_BLOCK_BYTES = 4 << 20  # that are parsed at once
_BLOCK_BYTES_A_COLUMN = 1 << 10  # or more, for as many records as make a call for each column worth it
_MOST_RECORD_BYTES = 256 << 20
_UNNAMED = ("Unnamed: 0", *(f"Unnamed: 0.{number}" for number in range(1, 10)))  # pandas' names of a column without one
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
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
    eval_data_dir: str = "",
    prepared_dir: str = "",
    validation_split: float = 0.0,
    trained_on: Mapping[str, Any] | None = None,
) -> Data:
    """Reads CSV in UTF-8 whose first record names the columns; fields may be quoted, and have line breaks then.

    A column whose values are all integers is int64, one of numbers float32, one of dates or times as ISO 8601 has them
    a date or timestamp, any other text, and one of integers with leading zeros or beyond int64. An empty field and
    pandas' markers of missing values are no value, but in a column of text. If nine in ten values are numbers, another
    is an error. All else is as `input.parquet` has it: the files are read once and kept as Parquet, see
    `input.files.prepared`.

    Args:
      data_dir: a folder, whose *.csv are read (*.tsv where there are none), files or globs, with commas between.
      seed: not used.
      label: the column of labels; text is numbered in its order; `none` where there is none.
      features: columns; all others by default.
      numbers: columns of integers that are read as float32.
      texts: columns that are text, whatever they look like.
      text: what is made of text: a `category`, ids by the words of training, 0 for others; ids by a `hash` of 64 bits,
        for models that hash ids; or `keep`.
      array: whether features are one float32 array, [columns], in place of a dict by name.
      missing: `refuse` records without a value, as bad ones; or read `zero`, the `mean` of training, or a number; or
        `column`, which reads 0 and says so in a feature NAME.missing. Of ids and text it is id 0 then.
      delimiter: between fields: a character, or `tab`.
      eval_data_dir: the files to evaluate on, as data_dir; their columns' types are those to train on.
      prepared_dir: where the Parquet file is kept, in place of `.crankshaft` beside the files.
      validation_split: the share of the records that is not trained on, of which no words and means are learnt.
      trained_on: what a run keeps of its data, if it was trained: an array's columns are read in that order.

    Returns:
      Features by name, labels int64 or float32. Labels that are text or integers from 0 on are classes.

    Raises:
      InputError: the library is not installed, or files or columns are missing, or malformed.
    """
    choice = Choice(label, features, numbers, texts, array, missing, text, validation_split, order_of(trained_on))
    delimiter = "\t" if delimiter == "tab" else delimiter
    if len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise InputError(f"delimiter={delimiter} is not a delimiter; give one character of ASCII, or tab")
    found = folders.find(data_dir, _KIND)
    train = CsvTable(found, delimiter, texts, prepared_dir)
    evaluation = None
    if eval_data_dir:
        others = folders.find(eval_data_dir, _KIND, "eval_data_dir", like=found)
        evaluation = CsvTable(others, delimiter, texts, prepared_dir, like=train)
    return splits_of(train, evaluation, choice)


class CsvTable(ParquetTable):
    """Records of CSV files, of which each has the same columns, from the Parquet file that is prepared of them.

    Args:
      found: the files.
      delimiter: between fields.
      texts: columns that are text.
      prepared_dir: see `prepared`.
      like: the table whose columns' types these have; None finds them.

    Raises:
      InputError: a record is malformed, the columns are not the same, or there are no records.
      SourceError: what was prepared is damaged.
    """

    cure = "remove the file, it is made again"

    def __init__(
        self,
        found: TableFiles,
        delimiter: str,
        texts: Sequence[str],
        prepared_dir: str | None,
        like: CsvTable | None = None,
    ):
        library("csv")
        files = found.files
        self._csv_paths = files.paths
        kinds = like.kinds if like else None

        def write(writer: Writer) -> None:
            _write(writer, found, delimiter, texts, kinds, like.where if like else None)

        made_by = {"rule": _RULE, "delimiter": delimiter, "kinds": kinds, "texts": [*texts], "keys": found.keys}
        made = prepared(files, "csv", made_by, write, prepared_dir)
        super().__init__(TableFiles(Files([made.path]), {}), (), [_metadata(made)], os.path.dirname(made.path))
        self.kinds: dict[str, str] = made.about["kinds"]
        self._records: list[int] = made.about["records"]
        self.where = files.paths[0]
        for name, why in made.about["why"].items():
            self.columns[name] = Column("text", why=why)
        self.problems = made.about["problems"]
        self.identity = f"{sum(self._records)} records of {made.about['files']}"
        if found.keys:
            self.identity += f" {found.keys}"
        listing.log_empty([path for path, count in zip(files.paths, self._records, strict=True) if not count])

    def describe_row(self, group: int, row: int) -> str:
        row += int(self.group_rows[:group].sum())
        for path, records in zip(self._csv_paths, self._records, strict=True):
            if row < records:
                return f"{path}, record {row + 1}"
            row -= records
        raise IndexError(row)


def _metadata(made: Prepared) -> Any:
    """Reads the Parquet file's metadata, which stand before what the file says of itself."""
    import pyarrow
    import pyarrow.parquet

    offset, length, checksum = made.about["metadata"]
    data = made.read(offset, length)
    if zlib.crc32(data) != checksum:
        raise SourceError(str(made.damaged("its index")))
    return pyarrow.parquet.read_metadata(pyarrow.BufferReader(data))


class _Sink:
    """What `pyarrow` writes to: a `Writer`, of which the last bytes are kept."""

    closed = False

    def __init__(self, writer: Writer):
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
        """Returns where the metadata of the file begin that was written, their bytes, and a checksum."""
        last = b"".join(self._last)
        return self._writer.offset - len(last), len(last), zlib.crc32(last)


def _write(
    writer: Writer,
    found: TableFiles,
    delimiter: str,
    texts: Sequence[str],
    kinds: dict[str, str] | None,
    like: str | None,
) -> None:
    """Writes the records of all files as Parquet, and says what they are."""
    paths = found.files.paths
    reading = _Reading(found, delimiter, passes=1 if kinds else 2)
    columns: dict[str, Found] = {}
    if kinds is None:
        finders = [Finder("text" if name in texts else None) for name in reading.names]
        for _, batch in reading.batches():
            for finder, column in zip(finders, batch.columns, strict=True):
                finder.add(column)
        columns = dict(zip(reading.names, (finder.end() for finder in finders), strict=True))
        kinds = {name: column.kind for name, column in columns.items()}
    elif {*kinds} != {*reading.names}:
        raise InputError(f"{paths[0]} has the columns {', '.join(reading.names)}, and {like} {', '.join(kinds)}")
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
                f"{paths[number]}, record {record}: column {name!r}: expected {expects}, as most are, found "
                f"{field[:_SHOWN]!r}; mend it, leave it empty, or read the column as text by --input_arg=texts={name}"
            )
    why = {name: column.why for name, column in columns.items() if column.why}
    writer.about.update(kinds=kinds, why=why, problems=problems, records=records, files=reading.digest)


def _write_parquet(writer: Writer, reading: _Reading, kinds: dict[str, str], like: str | None) -> dict[str, int]:
    """Writes row groups; returns how many records each file has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = _Sink(writer)
    converters = [Converter(kind) for kind in kinds.values()]
    schema = pa.schema([(name, converter.type) for name, converter in zip(kinds, converters, strict=True)])
    records: dict[str, int] = {}
    group_rows = min(max(_GROUP_VALUES // len(kinds), _FEWEST_GROUP_ROWS), _MOST_GROUP_ROWS)
    rest = schema.empty_table()
    # Plain pages are what NumPy reads; the checksums find flipped bits.
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    how["write_statistics"] = [
        name for name, kind in kinds.items() if kind in ("int", "float")
    ]  # see `ParquetTable.extremes`
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, **how) as parquet:
        for path, batch in reading.batches():
            columns = []
            for name, converter in zip(kinds, converters, strict=True):
                try:
                    columns.append(converter.convert(batch.column(name)))
                except Unfit as unfit:
                    raise InputError(
                        f"{path}, record {records.get(path, 0) + unfit.row + 1}: column {name!r}: expected "
                        f"{converter.expects}, as in {like}, found {unfit.field[:_SHOWN]!r}; mend it"
                    ) from None
            records[path] = records.get(path, 0) + batch.num_rows
            rest = pa.concat_tables([rest, pa.table(columns, schema=schema)])
            whole = len(rest) - len(rest) % group_rows
            if whole:
                parquet.write_table(rest[:whole], row_group_size=group_rows)
                rest = rest[whole:].combine_chunks()
        if len(rest):
            parquet.write_table(rest, row_group_size=group_rows)
    writer.about["metadata"] = sink.metadata()
    return records


class _Reading:
    """Reads the records of CSV files, in order, as batches of text columns; each mistake is one line.

    `pyarrow` parses; what it lets pass (a quote that is not closed, or is followed by text) is found by counting
    quotes, and where something is wrong, a slow parser says what and in which line.

    Args:
      found: the files.
      delimiter: between fields.
      passes: how often they will be read, for lines of progress.

    Attributes:
      names: of the columns, those of the folders' names last.
      nbytes: of all files.
      digest: of these bytes, once they were read.
    """

    def __init__(self, found: TableFiles, delimiter: str, passes: int):
        self._files, self._delimiter = found.files, delimiter
        self._headers = _headers(self._files, delimiter)
        own = [*next(filter(None, self._headers))]
        self._keys = {name: values for name, values in found.keys.items() if name not in own}
        self.names = [*own, *self._keys]
        self._block_bytes = max(_BLOCK_BYTES, _BLOCK_BYTES_A_COLUMN * len(self.names))
        self.nbytes = sum(self._files.sizes)
        self._done = progress(f"preparing {self._files.paths[0]}", passes * self.nbytes)
        self._bytes_before = 0  # in the passes that are over
        self._is_checked = False
        self.digest = 0

    def batches(self) -> Iterator[tuple[str, Any]]:
        """Yields (path, batch) with all records, the columns in the order of `names`; may be called again."""
        self.digest, is_empty = 0, True
        for number, path in enumerate(self._files.paths):
            records, parses = 0, bool(self._headers[number])
            stream = _Stream(self._files.stream(number), self._delimiter)
            while parses:  # again, in larger blocks, where a record does not fit in one
                stream, skip = _Stream(self._files.stream(number), self._delimiter), records
                try:
                    for batch in self._parsed(stream, self._headers[number]):
                        new = batch.slice(min(skip, batch.num_rows))
                        skip -= batch.num_rows - new.num_rows
                        if new.num_rows:
                            self._refuse_header(number, new, records)
                            records += new.num_rows
                            yield path, self._with_keys(number, new)
                        self._done(self._bytes_before + stream.tell())
                    parses = False
                except _arrow_invalid() as error:
                    self._refuse_mistakes()
                    if "straddl" not in str(error) or self._block_bytes >= _MOST_RECORD_BYTES:
                        raise InputError(f"{path} can't be read as CSV ({first_line(error)}); mend it") from None
                    self._block_bytes *= 8
            if stream.ends_within_quotes():
                self._refuse_mistakes()
            is_empty &= not records
            self.digest = zlib.crc32(stream.digest.to_bytes(4, "little"), self.digest)
            self._bytes_before += self._files.sizes[number]
        if is_empty:
            raise InputError(f"{self._files.paths[0]} has a header and no records; give files that have some")

    def _parsed(self, stream: _Stream, header: dict[str, str]) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import csv as arrow

        names = [name for name in self.names if name in header]
        raw = [header[name] for name in names]
        try:
            for batch in arrow.open_csv(
                pa.PythonFile(stream, "r"),
                read_options=arrow.ReadOptions(block_size=self._block_bytes),
                parse_options=arrow.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                convert_options=arrow.ConvertOptions(column_types=dict.fromkeys(raw, pa.string()), include_columns=raw),
            ):
                yield batch.rename_columns(names)
        finally:
            stream.close()

    def _with_keys(self, number: int, batch: Any) -> Any:
        import pyarrow as pa

        for name, values in self._keys.items():
            batch = batch.append_column(name, pa.repeat(pa.scalar(values[number], pa.string()), batch.num_rows))
        return batch

    def _refuse_header(self, number: int, batch: Any, records: int) -> None:
        """Raises `InputError` if a record is the header again."""
        import pyarrow.compute as pc

        header = self._headers[number]
        if len(header) == 1:
            return  # a word like others
        is_header = None
        for name, raw in header.items():
            equal = pc.equal(batch.column(name), raw)
            is_header = equal if is_header is None else pc.and_(is_header, equal)
            if not pc.any(is_header).as_py():
                return
        raise InputError(
            f"{self._files.paths[number]}, record {records + pc.index(is_header, True).as_py() + 1}: expected values, "
            "found the header again; remove it"
        )

    def _refuse_mistakes(self) -> None:
        """Raises `InputError` for the first record that is malformed; returns if there is none."""
        if not self._is_checked:
            limit = csv.field_size_limit(_MOST_RECORD_BYTES)
            try:
                for number, path in enumerate(self._files.paths):
                    _check_records(path, self._files.stream(number), self._delimiter, len(self._headers[number]))
            finally:
                csv.field_size_limit(limit)
        self._is_checked = True


def _arrow_invalid() -> type[Exception]:
    import pyarrow as pa

    return pa.ArrowInvalid


class _Stream:
    """A file's bytes from beginning to end, for `pyarrow`; looks whether quotes stand where they may.

    The first, third, ... quote opens a field, the others close one (two that follow one another do both). So before
    the former, and after the latter, stands a delimiter, a line's end, or a quote.

    Attributes:
      digest: of the bytes that were read.
    """

    closed = False

    def __init__(self, stream: io.BufferedReader, delimiter: str):
        self._stream, self._between = stream, np.frombuffer(f'{delimiter}\r\n"'.encode(), np.uint8)
        self._is_regular, self._quotes = True, 0
        self._last = b"\n"  # the byte before those not looked at yet, and these
        self.digest = 0

    def read(self, nbytes: int = -1) -> bytes:
        data = self._stream.read(nbytes)
        self.digest = zlib.crc32(data, self.digest)
        if self._is_regular:
            self._look_at(data.removeprefix(_BOM) if self._last == b"\n" else data)
        return data

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()

    def ends_within_quotes(self) -> bool:
        """Returns whether a quote was not closed, or one stood where it may not."""
        self._look_at(b"\n")
        return not self._is_regular or self._quotes % 2 == 1

    def _look_at(self, data: bytes) -> None:
        data, self._last = self._last + data, (self._last + data)[-2:]
        if b'"' not in data:
            return
        codes = np.frombuffer(data, np.uint8)
        at = 1 + np.flatnonzero(codes[1:-1] == ord('"'))
        opens = (self._quotes + np.arange(len(at))) % 2 == 0
        beside = codes[np.where(opens, at - 1, at + 1)]
        self._is_regular &= bool(np.isin(beside, self._between).all())
        self._quotes += len(at)


def _headers(files: Files, delimiter: str) -> list[dict[str, str]]:
    """Returns each file's columns: their names, and these as they stand in the file; none for a file without a header.

    A first column without a name is pandas' index, and named as pandas names it.
    """
    headers: list[dict[str, str]] = []
    first = ""
    for number, path in enumerate(files.paths):
        if files.pread(number, 0, min(len(_GZIP), files.sizes[number])) == _GZIP:
            raise InputError(f"{path} is gzip: expected CSV; unpack it")
        raw = next(_rows(path, files.stream(number), delimiter), (0, []))[1]
        names = [name.strip() for name in raw]
        if len(names) > 1 and not names[0]:
            names[0] = next(name for name in _UNNAMED if name not in names)
        if len({*names}) < len(names) or "" in names:
            twice = next((name for i, name in enumerate(sorted(names)) if i and sorted(names)[i - 1] == name), "")
            wrong = "a column without a name" if "" in names else f"two columns {twice!r}"
            raise InputError(f"{path}:1: expected a header, a name for each column, found {wrong}; mend it")
        headers.append(dict(zip(names, raw, strict=True)))
        first = first or (path if names else "")
        wanted = next(filter(None, headers), {})
        if names and {*names} != {*wanted}:
            raise InputError(
                f"{path}:1: the header is {', '.join(names)}, and that of {first} {', '.join(wanted)}; give files of "
                "the same columns"
            )
    if not first:
        raise InputError(f"{files.paths[0]} is empty: expected a header and records, found nothing; remove it")
    return headers


def _check_records(path: str, stream: io.BufferedReader, delimiter: str, columns: int) -> None:
    """Raises `InputError` for the first malformed record of a file, by its line."""
    records = _rows(path, stream, delimiter)
    next(records, None)  # the header
    for line, row in records:
        if len(row) != columns:
            raise InputError(f"{path}:{line}: expected {columns} fields, as the header has, found {len(row)}; mend it")


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
