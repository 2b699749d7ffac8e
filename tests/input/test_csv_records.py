"""Records of text: parsed in blocks, counted where they are malformed, and named by file and line."""

import gzip
import logging

import numpy as np
import pytest

from crankshaft.input.checks import InputError
from crankshaft.input.files import listing
from crankshaft.input.tables import csv_records
from crankshaft.input.tables.csv_records import CsvLayout, Records
from crankshaft.input.tables.csv_types import NUMBER, Converter
from crankshaft.input.tables.folders import TableFiles

pytest.importorskip("pyarrow.csv")
LINES = CsvLayout("\t", ("n",), has_quotes=False)


def numbers(*paths, allowed=0, layout=LINES):
    """All numbers of files that have one in a record."""
    files = listing.find(",".join(map(str, paths)), listing.FileKind("numbers", (".*",)))
    converters = {"n": Converter("int", "^[0-9]+$", "digits")}
    records = Records(TableFiles(files, {}), [layout] * len(files.paths), 1, converters, allowed)
    return [number for _, table in records.tables() for number in table["n"].to_pylist()]


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name="numbers.txt"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(
    "content",
    [b"1\n2\n3\n", b"1\n2\n3", b"1\r\n2\r\n3\r\n", b"1\r\n2\n3\r", b"\n1\n\n2\n3\n\n", b"\xef\xbb\xbf1\n2\n3\n"],
)
def test_ends_of_lines_blank_lines_and_byte_order_marks_are_no_data(write, content):
    assert numbers(write(content)) == [1, 2, 3]
    assert numbers(write(content + b"\nx\n"), allowed=1) == [1, 2, 3]  # also where lines are looked at one by one


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("has_quotes", [True, False])
def test_blocks_come_whole_and_in_order_and_lines_keep_their_numbers(write, monkeypatch, caplog, end, has_quotes):
    monkeypatch.setattr(csv_records, "_BLOCK_BYTES", 1 << 14)
    values = list(range(10**6, 10**6 + 10_000))  # several blocks, cut within lines
    lines = [b"%d" % value for value in values]
    layout = LINES._replace(has_quotes=has_quotes)
    assert numbers(write(end.join(lines)), layout=layout) == values
    lines[7000] = b"seventy"
    path = write(gzip.compress(end.join(lines)), "numbers.gz")
    assert numbers(path, allowed=1, layout=layout) == values[:7000] + values[7001:]
    assert f"the first: {path}:7001: n: expected digits, found 'seventy'" in caplog.text


def test_quoted_records_are_never_cut(write, monkeypatch):
    monkeypatch.setattr(csv_records, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(csv_records, "_BLOCK_BYTES_A_COLUMN", 1)
    texts = [f'"{n}\n, ""{"x" * (n % 90)}"' for n in range(500)]
    files = listing.find(str(write("\n".join(texts).encode())), listing.FileKind("texts", (".*",)))
    records = Records(TableFiles(files, {}), [CsvLayout(",", ("n",))])
    expected = [text[1:-1].replace('""', '"') for text in texts]
    assert [text for _, table in records.tables() for text in table["n"].to_pylist()] == expected


def test_a_header_is_skipped_and_counted_as_a_line(write):
    layout = LINES._replace(header=("number",))
    path = write(b"\nnumber\n1\nx\n")
    with pytest.raises(InputError, match=rf"{path}:4: n: expected digits, found 'x'"):
        numbers(path, layout=layout)
    assert numbers(path, allowed=1, layout=layout) == [1]
    with pytest.raises(InputError, match="has a header and no rows"):
        numbers(write(b"number\n"), layout=layout)


def test_as_many_malformed_lines_as_allowed_are_skipped_with_one_warning(write, caplog):
    assert numbers(write(b"1\n"), allowed=2) == [1]
    assert not caplog.records
    assert numbers(write(b"1\na\n2\nb\n3\n"), allowed=2) == [1, 2, 3]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 malformed rows were skipped; the first: " in record.message
    assert "numbers.txt:2: n: expected digits, found 'a'" in record.message


def test_one_more_than_allowed_is_refused_with_the_first_and_a_cure_that_helps(write):
    path = write(b"1\na\n2\nb\n3\nc\n")
    with pytest.raises(InputError) as caught:
        numbers(path, allowed=1)
    message = str(caught.value)
    assert "numbers.txt:2: n: expected digits, found 'a'" in message
    assert "max_bad_records=1 " in message
    cure = int(message.rpartition("max_bad_records=")[2])
    assert numbers(path, allowed=cure) == [1, 2, 3]


def test_malformed_records_count_over_all_files(write):
    one, two = write(b"1\nx\n", "one"), write(b"2\ny\n", "two")
    assert numbers(one, two, allowed=2) == [1, 2]
    with pytest.raises(InputError, match=r"one:2: .*the first of more than max_bad_records=1 "):
        numbers(one, two, allowed=1)


@pytest.mark.parametrize("of_second", [("text",), ("float32", NUMBER, "a number")], ids=["text", "numbers"])
def test_lines_are_refused_one_by_one_exactly_where_they_are_together(write, of_second):
    """Any bytes: whether a line's block has a malformed one makes no difference to it."""
    rng = np.random.default_rng(0)
    alphabet = np.frombuffer(b'12.e-"\r,n \xc3\xa9\0x', np.uint8)
    layout = CsvLayout(",", ("n", "m"), has_quotes=False)
    noise = [bytes(rng.choice(alphabet, rng.integers(1, 12))) for _ in range(300)]
    pairs = map(b",".join, zip(noise, [b"%d" % n for n in range(100)] + noise[100:], strict=True))
    lines = [each for each in [*noise, *pairs] if each.strip(b"\r")]

    def rows(content: bytes) -> list:
        files = listing.find(str(write(content)), listing.FileKind("rows", (".*",)))
        converters = {"n": Converter("text"), "m": Converter(*of_second)}
        records = Records(TableFiles(files, {}), [layout], 1, converters, 10**6)
        return [tuple(row.values()) for _, table in records.tables() for row in table.to_pylist()]

    together = rows(b"\n".join([*lines, b"good,7"]))
    one_by_one = [row for line in lines for row in rows(line + b"\ngood,7")[:-1]]
    assert together == [*one_by_one, rows(b"good,7")[0]]
    assert 30 < len(together) < len(lines)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"1\n" * 1000, mtime=0)[:-5], gzip.compress(b"1\n", mtime=0) + b"rest"],
)
def test_files_that_are_not_whole_gzip_are_refused(write, content):
    with pytest.raises(InputError, match="is not a whole gzip file"):
        numbers(write(content))
