"""Records of CSV and of other delimited text, parsed in blocks by `pyarrow`; a malformed record is named by its line.

These checks are not left to `pyarrow`: it swallows the rows after an unclosed quote, accepts text after quotes, and
counts rows, not lines. So quotes are counted here, and a malformed block is read again by Python's csv, which names the
line.
"""

from __future__ import annotations

import csv
import io
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...engine import logging
from ..checks import InputError
from ..files.prepared import progress
from ..files.storage import Files, unpacked
from .csv_types import Converter, Unfit
from .folders import TableFiles

_BLOCK_BYTES = 4 << 20  # parsed at once
_BLOCK_BYTES_A_COLUMN = 1 << 10  # or more, so that a call per column is worth it
_MOST_RECORD_BYTES = 256 << 20
_ROWS = 10_000  # that Python's csv parses at once
_BOM = b"\xef\xbb\xbf"
_SHOWN = 60  # characters of a field or record in a message


class CsvLayout(NamedTuple):
    """The layout of a file's records.

    Attributes:
      delimiter: separator of fields: one character, or the same one twice.
      names: names of all fields of a record, in order; empty for an empty file.
      header: the first record, if it is not data: the names in the file.
      has_quotes: whether fields may be quoted; else each line is a record.
    """

    delimiter: str
    names: tuple[str, ...]
    header: tuple[str, ...] = ()
    has_quotes: bool = True


class BadRecords:
    """The malformed records of all files: counts them, keeps the first, and refuses too many.

    Args:
      allowed: number of malformed records that may be skipped; None if that can't be configured.
    """

    def __init__(self, allowed: int | None):
        self._allowed = allowed
        self.count = 0
        self._first = ""

    def add(self, location: str, problem: str) -> None:
        """Counts a malformed record; `problem` is of the form "expected ..., found ...". Raises `InputError`."""
        self.count += 1
        self._first = self._first or f"{location}: {problem}"
        if self._allowed is None:
            raise InputError(f"{self._first}; mend it")
        if self.count > self._allowed:
            more = f" (the first of more than max_bad_records={self._allowed} malformed rows)" * (self._allowed > 0)
            skip = f"skip such lines by input_arg max_bad_records={max(10, 2 * self.count)}"
            raise InputError(f"{self._first}{more}; mend the line, or {skip}")

    def warn(self) -> None:
        """Logs one line about the skipped records, if any."""
        if self.count:
            records = "1 malformed row was" if self.count == 1 else f"{self.count} malformed rows were"
            logging.warning("%s skipped; the first: %s", records, self._first)


class Records:
    """The records of files, in order, as tables of `pyarrow`.

    Args:
      passes: number of times that they will be read, for progress.
      converters: converters of the columns to read, if known: a field that can't be converted makes its record
        malformed. None reads all columns, as text.
      allowed: number of malformed records to skip; None is none, and not configurable.

    Attributes:
      names: names of the columns, those from folders' names last.
      digest: digest of the files' bytes, once they are read.
    """

    def __init__(
        self,
        table_files: TableFiles,
        layouts: Sequence[CsvLayout],
        passes: int = 1,
        converters: Mapping[str, Converter] | None = None,
        allowed: int | None = None,
    ):
        self._files, self._layouts, self._converters, self._allowed = table_files.files, layouts, converters, allowed
        file_columns = [*converters] if converters else [*next(layout.names for layout in layouts if layout.names)]
        self._file_columns = file_columns
        self._keys = {name: values for name, values in table_files.keys.items() if name not in file_columns}
        self.names = [*file_columns, *self._keys]
        self._done = progress(f"reading {self._files.paths[0]}", passes * sum(self._files.sizes))
        self._bytes_before = 0  # in completed passes
        self.digest = 0

    def tables(self, most: int = 0) -> Iterator[tuple[str, Any]]:
        """Yields (path, table) with all records, the columns in the order of `names`; may be called again.

        Args:
          most: number of records after which it stops, or a few later; 0 reads all.

        Raises:
          InputError: a record is malformed, or too many are; a file can't be read, or none has records.
        """
        import pyarrow as pa

        self.digest, yielded, bad = 0, 0, BadRecords(self._allowed)
        for number, path in enumerate(self._files.paths):
            layout, records, digest = self._layouts[number], 0, 0
            with self._files.stream(number) as stream, unpacked(stream, path) as file:
                nbytes = max(_BLOCK_BYTES, _BLOCK_BYTES_A_COLUMN * len(self.names))
                for line, block in _blocks(file, layout, nbytes):
                    digest = zlib.crc32(block, digest)
                    table = self._parse(path, layout, line, block.removeprefix(_BOM) if line == 0 else block, bad)
                    self._refuse_header(layout, path, table, records)
                    records += len(table)
                    for name, values in self._keys.items():
                        table = table.append_column(name, pa.repeat(pa.scalar(values[number], pa.string()), len(table)))
                    if len(table):
                        yield path, table
                    self._done(self._bytes_before + stream.tell())
                    if 0 < most <= yielded + records:
                        break
            yielded += records
            if 0 < most <= yielded:
                break
            self.digest = zlib.crc32(digest.to_bytes(4, "little"), self.digest)
            self._bytes_before += self._files.sizes[number]
        bad.warn()
        if not yielded:
            has = "has a header and no rows" if any(layout.header for layout in self._layouts) else "has no rows"
            raise InputError(f"{self._files.paths[0]} {has}; give files that have some")

    def _parse(self, path: str, layout: CsvLayout, line: int, block: bytes, bad: BadRecords) -> Any:
        """Parses whole records that begin after a line number."""
        import pyarrow as pa

        skip = int(line == 0 and bool(layout.header))
        try:
            return self._convert(self._split(layout, block).slice(skip))
        except (pa.ArrowInvalid, Unfit, _MalformedError):
            # Again by Python's csv, which names the lines, and so without the malformed records.
            records = itertools.islice(_split_records(path, io.BytesIO(block), layout, line), skip, None)
            tables = [self._valid_records(path, layout, [], bad)]
            while some := [*itertools.islice(records, _ROWS)]:
                tables.append(self._valid_records(path, layout, some, bad))
            return self._convert(pa.concat_tables(tables))

    def _split(self, layout: CsvLayout, block: bytes) -> Any:
        """Splits a block into columns of text. Raises an error if anything looks malformed."""
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow import csv as arrow

        character = layout.delimiter[0]
        if layout.has_quotes and not _is_regular(block, character):
            raise _MalformedError
        names, gaps = [*layout.names], []
        if len(layout.delimiter) > 1:  # yields an empty field between its characters
            gaps = [f"\0{number}" for number in range(1, len(names))]
            names = [*itertools.chain(*zip(["", *gaps], names, strict=True))][1:]
        wanted = [*self._file_columns, *gaps]
        if not block.strip(b"\r\n"):
            return pa.table({name: pa.array([], pa.string()) for name in self._file_columns})
        table = arrow.read_csv(
            pa.BufferReader(block),
            read_options=arrow.ReadOptions(column_names=names, block_size=len(block) + 1),
            parse_options=arrow.ParseOptions(
                delimiter=character,
                quote_char='"' if layout.has_quotes else False,
                newlines_in_values=layout.has_quotes,
            ),
            convert_options=arrow.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted
            ),
        )
        if any(pc.any(pc.not_equal(table[name], "")).as_py() for name in gaps):
            raise _MalformedError
        return table.select(self._file_columns)

    def _convert(self, table: Any) -> Any:
        import pyarrow as pa

        if self._converters is None:
            return table
        return pa.table({name: converter.convert(table[name]) for name, converter in self._converters.items()})

    def _valid_records(self, path: str, layout: CsvLayout, records: list, bad: BadRecords) -> Any:
        import pyarrow as pa

        problems: list[tuple[int, str]] = []
        lines: list[int] = []
        valid: list[list[str]] = []
        for at, record in records:
            if isinstance(record, str):
                problems.append((at, record))
            elif len(record) != len(layout.names):
                header_note = ", as the header has" * bool(layout.header)
                text = shown(layout.delimiter.join(record))
                problems.append((at, f"expected {len(layout.names)} fields{header_note}, found {len(record)} ({text})"))
            else:
                lines.append(at)
                valid.append(record)
        fields = [*zip(*valid, strict=True)] or [()] * len(layout.names)
        columns = {name: pa.array(fields[layout.names.index(name)], pa.string()) for name in self._file_columns}
        unfit: dict[int, str] = {}
        for name, converter in (self._converters or {}).items():
            for number in converter.unfit(columns[name]):
                text = shown(columns[name][number].as_py())
                unfit.setdefault(number, f"{name}: expected {converter.expects}, found {text}")
        for at, problem in sorted([*problems, *((lines[number], problem) for number, problem in unfit.items())]):
            bad.add(f"{path}:{at}", problem)
        return pa.table(columns).filter(pa.array([number not in unfit for number in range(len(valid))], pa.bool_()))

    def _refuse_header(self, layout: CsvLayout, path: str, table: Any, records: int) -> None:
        """Raises `InputError` if a record repeats the header."""
        import pyarrow.compute as pc

        if len(layout.header) < 2 or self._converters is not None:
            return  # a word like others; a record that does not fit
        is_header = None
        for name, raw in zip(layout.names, layout.header, strict=True):
            equal = pc.equal(table.column(name), raw)
            is_header = equal if is_header is None else pc.and_(is_header, equal)
            if not pc.any(is_header).as_py():
                return
        raise InputError(
            f"{path}, row {records + pc.index(is_header, True).as_py() + 1}: expected values, found the header "
            "again; remove it"
        )


class _MalformedError(ValueError):
    """A record of a block looks malformed."""


def first_record(files: Files, number: int, layout: CsvLayout) -> list[str]:
    """Returns the fields of a file's first record. Raises `InputError` if it is malformed."""
    path = files.paths[number]
    with files.stream(number) as stream, unpacked(stream, path) as file:
        line, fields = next(_split_records(path, file, layout), (1, []))
    if isinstance(fields, str):
        raise InputError(f"{path}:{line}: {fields}; mend the line")
    return fields


def _blocks(stream: Any, layout: CsvLayout, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields (lines before, bytes) of whole records."""
    line = 0
    while layout.names and (block := stream.read(nbytes)):
        parts = [block, stream.readline()]
        quotes = sum(part.count(b'"') for part in parts) if layout.has_quotes else 0
        size = len(block)
        # With an odd number a quoted field, which may have line breaks, is still open.
        while quotes % 2 and size < _MOST_RECORD_BYTES and (part := stream.readline()):
            parts.append(part)
            quotes, size = quotes + part.count(b'"'), size + len(part)
        yield line, (block := b"".join(parts))
        line += block.count(b"\n")


def _is_regular(block: bytes, delimiter: str) -> bool:
    """Returns whether all quotes are where they are allowed.

    The first, third, ... quote opens a field, the others close one (two in a row do both). So a delimiter, a line's end
    or a quote precedes the former and follows the latter.
    """
    if b'"' not in block:
        return True
    codes = np.frombuffer(b"\n" + block + b"\n", np.uint8)
    at = np.flatnonzero(codes == ord('"'))
    beside = codes[np.where(np.arange(len(at)) % 2 == 0, at - 1, at + 1)]
    between = np.frombuffer(f'{delimiter}\r\n"'.encode(), np.uint8)
    return len(at) % 2 == 0 and bool(np.isin(beside, between).all())


def _split_records(path: str, stream: Any, layout: CsvLayout, line: int = 0) -> Iterator[tuple[int, list[str] | str]]:
    """Yields (last line, fields or problem) of each record, except empty lines.

    Raises:
      InputError: a quote is not closed, so the next record can't be found; or text is not UTF-8.
    """
    encoding = "utf-8" if line else "utf-8-sig"
    if not layout.has_quotes:
        text = io.TextIOWrapper(stream, encoding, "surrogateescape", newline="")
        for number, raw in enumerate(text, line + 1):
            if text_line := raw.rstrip("\r\n"):
                yield number, _fields(text_line, layout.delimiter)
        return
    limit = csv.field_size_limit(_MOST_RECORD_BYTES)
    try:
        reader = csv.reader(io.TextIOWrapper(stream, encoding, newline=""), delimiter=layout.delimiter, strict=True)
        for record in reader:
            if record:
                yield line + reader.line_num, record
    except csv.Error as error:
        raise InputError(
            f"{path}:{line + reader.line_num}: {error}; mend the row, a quote may not be closed or doubled"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, after line {line + reader.line_num}: expected text in UTF-8, found "
            f"0x{error.object[error.start]:02x}; convert the file"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _fields(line: str, delimiter: str) -> list[str] | str:
    """Returns a line's fields, or its problem."""
    text = line.encode(errors="surrogateescape")
    try:
        text.decode()
    except UnicodeDecodeError:
        return f"expected UTF-8, to which the file may have to be converted, found {shown(text)}"
    return line.split(delimiter)


def shown(text: bytes | str) -> str:
    """Quotes and shortens a line or field for a message, with unprintable characters escaped."""
    if isinstance(text, bytes):
        text = text[: 4 * _SHOWN].decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
