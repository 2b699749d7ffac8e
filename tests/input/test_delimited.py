"""Lines of text: found in files and folders, counted, and named by file and line where they are malformed."""

import gzip
import logging

import pytest

from crankshaft.input.data import InputError
from crankshaft.input.files import listing
from crankshaft.input.files.text_files import read_lines
from crankshaft.input.tables.delimited import BadRecords, read_records


def parse(lines):
    return [int(line) for line in lines]


def why_bad(line):
    return None if line.isdigit() else f"expected digits, found {line.decode()!r}"


def numbers(path, allowed=0, skip_lines=0):
    """All numbers of a file of one a line, and what was noted of the others."""
    bad = BadRecords(allowed)
    pieces = list(read_records(str(path), parse, why_bad, bad, skip_lines))
    assert all(pieces)
    return [number for piece in pieces for number in piece], bad


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
    assert numbers(write(content))[0] == [1, 2, 3]


@pytest.mark.parametrize("name", ["numbers.txt", "numbers.txt.gz"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_files_larger_than_a_piece_come_whole_and_in_order_and_lines_keep_their_numbers(write, name, end):
    values = list(range(10**6, 10**6 + 100_000))  # 0.8 MB, several pieces, cut within lines
    content = end.join(b"%d" % value for value in values)
    lines = content.split(end)
    path = write(gzip.compress(content), name)
    assert numbers(path)[0] == values
    lines[70_000] = b"seventy"
    read, bad = numbers(write(gzip.compress(end.join(lines)), name), allowed=1)
    assert read == values[:70_000] + values[70_001:]
    assert bad.first == f"{path}:70001: expected digits, found 'seventy'"


def test_header_lines_are_skipped_and_counted_as_lines(write):
    path = write(b"number\n1\nx\n")
    with pytest.raises(InputError, match=rf"{path}:3: expected digits, found 'x'"):
        numbers(path, skip_lines=1)
    assert numbers(write(b"number\n"), skip_lines=1)[0] == []


def test_as_many_malformed_lines_as_allowed_are_skipped_with_one_warning(write, caplog):
    read, bad = numbers(write(b"1\na\n2\nb\n3\n"), allowed=2)
    bad.warn()
    assert read == [1, 2, 3]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 malformed records were skipped; the first: " in record.message
    assert "numbers.txt:2: expected digits, found 'a'" in record.message


def test_nothing_is_warned_of_where_nothing_was_skipped(write, caplog):
    numbers(write(b"1\n"), allowed=2)[1].warn()
    assert not caplog.records


def test_one_more_than_allowed_is_refused_with_the_first_and_a_cure_that_helps(write):
    content = b"1\na\n2\nb\n3\nc\n"
    with pytest.raises(InputError) as caught:
        numbers(write(content), allowed=1)
    message = str(caught.value)
    assert "numbers.txt:2: expected digits, found 'a'" in message
    assert "max_bad_records=1 " in message
    cure = int(message.rpartition("max_bad_records=")[2])
    assert numbers(write(content), allowed=cure)[0] == [1, 2, 3]


def test_malformed_records_count_over_all_files(write):
    bad = BadRecords(1)
    for name in ("one", "two"):
        path = write(b"x\n", name)
        if name == "one":
            assert list(read_records(str(path), parse, why_bad, bad)) == []
        else:
            with pytest.raises(InputError, match="one:1"):
                list(read_records(str(path), parse, why_bad, bad))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(b"1\n" * 1000, mtime=0)[:-5], "is not a whole gzip file"),
        (gzip.compress(b"1\n", mtime=0) + b"rest", "is not a whole gzip file"),
        (b"1" * (3 << 20), "longer than"),
    ],
)
def test_files_that_are_not_whole_text_are_refused(write, content, message):
    with pytest.raises(InputError, match=message):
        for _ in read_lines(str(write(content))):
            pass


def test_a_file_that_is_gone_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"absent\.txt can't be read \(No such file"):
        next(read_lines(str(tmp_path / "absent.txt")))


def names(folder, *patterns):
    return [path.rpartition("/")[2] for path in listing.find(str(folder), listing.Kind("something", patterns)).paths]


def test_a_folders_files_come_by_their_numbers_the_plain_one_of_two_and_no_hidden_ones(write, tmp_path):
    for name in ("day_10", "day_9.gz", "day_2", "day_2.gz", ".day_1", "days", "day_3.txt.bak"):
        write(b"1\n", name)
    (tmp_path / "day_5").mkdir()
    assert names(tmp_path, r"day_[0-9]+") == ["day_2", "day_9.gz", "day_10"]
    assert names(tmp_path, "absent", r"days|day_10") == ["day_10", "days"]
    assert names(tmp_path / "days", "any") == ["days"]  # a file is taken whatever its name


def test_a_folder_without_such_files_is_refused_with_what_it_holds(write, tmp_path):
    with pytest.raises(InputError, match="expected something, found an empty folder"):
        names(tmp_path, "x")
    write(b"1", "notes.md")
    with pytest.raises(InputError, match=r"expected something, found notes\.md"):
        names(tmp_path, "x")
    with pytest.raises(InputError, match="absent: expected something, found nothing"):
        names(tmp_path / "absent", "x")
