"""Files that are damaged, cut, or changed while they are read: one line that names them, and never another value."""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from crankshaft.engine.errors import BadRecordError, SourceError
from crankshaft.input import array_record, csv, parquet, text, tfrecord
from crankshaft.input.checks import InputError
from crankshaft.input.records import checksums
from crankshaft.input.tables import parquet_table
from tests.input import test_array_record, test_csv, test_images, test_parquet, test_tfrecord


class Written(NamedTuple):
    """A file whose bits are flipped.

    Attributes:
      path: of the file.
      read: loads it and reads all of it.
      bits: which may be flipped, as a range.
      least: of a hundred, how many are found; the others are in what is not read.
      says: what the error of a bit says, beside the path.
      raises: that error.
    """

    path: pathlib.Path
    read: Callable[[], Any]
    bits: range
    least: int = 100
    says: Callable[[int], str] = lambda bit: ""
    raises: Any = (InputError, SourceError)


def _all_of(load: Callable[[], Any]) -> Callable[[], Any]:
    def read() -> Any:
        source = load().train
        return source.read(np.arange(len(source)))

    return read


def _tfrecord(folder: pathlib.Path, classes: int) -> Written:
    pixels, labels = test_tfrecord.images(69, classes)  # so lengths of records differ, or not
    path = folder / "a.tfrecord"
    test_tfrecord.write(path, test_tfrecord.records_of(pixels, labels))
    tfrecord.load(str(folder), 0, features=test_tfrecord.IMAGES)  # which makes the index
    read = _all_of(lambda: tfrecord.load(str(folder), 0, features=test_tfrecord.IMAGES))
    return Written(path, read, range(8 * path.stat().st_size), says=lambda bit: "checksum|truncated|not a TFRecord")


def _array_record(folder: pathlib.Path) -> Written:
    random, path = np.random.default_rng(0), folder / "a.array_record"
    test_array_record.write(path, [test_tfrecord.example(x=random.bytes(5000)) for _ in range(69)])
    (folder / "features.json").write_text('{"features": {"x": {"shape": [5000], "dtype": "uint8"}}}')
    start = 8 * (path.read_bytes().index(b"x") + 100)  # in the first record's group, after what is before it
    return Written(path, _all_of(lambda: array_record.load(str(folder), 0)), range(start, start + 8 * 69 * 4900))


def _parquet(folder: pathlib.Path, version: str) -> Written:
    """The checksum is of a page's data; of its header a bit or two say nothing that is read."""
    how = {"row_group_size": 100, "write_page_checksum": True, "data_page_version": version}
    path = pathlib.Path(test_parquet.written(folder, test_parquet.table(400), **how), "part-0.parquet")
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    return Written(path, _all_of(lambda: parquet.load(str(folder), 0)), range(8 * footer), 80)


def _csv(folder: pathlib.Path, at_end: bool) -> Written:
    """What is prepared of the file: its pages, or its end, which says where they begin and what the file is."""
    test_csv.written(folder, test_csv.HEADER + test_csv.records(0, 1500))
    (path,) = map(pathlib.Path, csv.load(str(folder), 0).train.files())
    bits = 8 * path.stat().st_size
    read, flipped = _all_of(lambda: csv.load(str(folder), 0)), range(bits - 24_000 if at_end else 0, bits)
    return Written(path, read, flipped, 90, lambda bit: "(damaged|can't be read).*; remove the file: it is rebuilt")


def _png(folder: pathlib.Path) -> Written:
    """Its chunks have checksums; a JPEG has none."""
    path = test_images.write(folder / "a" / "1.png", test_images.png(3))

    def read() -> Any:
        source, only = test_images.loaded(folder).train, np.array([0])
        return source.verify(only, source.read(only))

    return Written(path, read, range(8 * path.stat().st_size), 100, lambda bit: "; replace it", BadRecordError)


def _text(folder: pathlib.Path) -> Written:
    (folder / "0.txt").write_bytes(os.urandom(5000))
    source = text.load(str(folder), 0, context=64).train
    (path,) = map(pathlib.Path, source.files())
    size = (64 + 1) * 2 + 4
    read = _all_of(lambda: text.load(str(folder), 0, context=64))
    bits, says = range(8 * size * len(source)), "window {} is damaged .*; remove the file"
    return Written(path, read, bits, 100, lambda bit: says.format(bit // 8 // size), BadRecordError)


FILES: dict[str, Callable[[pathlib.Path], Written]] = {
    "tfrecord": lambda folder: _tfrecord(folder, 10),
    "tfrecord, lengths differ": lambda folder: _tfrecord(folder, 1000),
    "array_record": _array_record,
    "parquet 1": lambda folder: _parquet(folder, "1.0"),
    "parquet 2": lambda folder: _parquet(folder, "2.0"),
    "csv": lambda folder: _csv(folder, at_end=False),
    "csv, its end": lambda folder: _csv(folder, at_end=True),
    "png": _png,
    "text": _text,
}


@pytest.mark.parametrize("name", FILES)
def test_of_a_hundred_flipped_bits_each_is_found_or_changes_nothing(tmp_path, name):
    written = FILES[name](tmp_path)
    expected, whole, said = written.read(), written.path.read_bytes(), {}
    for bit in np.random.default_rng(0).choice(written.bits, 100, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        written.path.write_bytes(damaged)
        try:
            read = written.read()
        except written.raises as error:
            said[bit] = str(error)
        else:
            tf.nest.map_structure(np.testing.assert_array_equal, read, expected)
    assert len(said) >= written.least
    for bit, line in said.items():
        assert str(written.path) in line
        assert re.search(written.says(bit), line), (bit, line)
        assert "\n" not in line


@pytest.mark.parametrize("content", [b"P", b"PAR1", b"text, not Parquet" * 100, "cut"])
def test_what_is_no_whole_parquet_file_is_one_line(tmp_path, content):
    path = pathlib.Path(test_parquet.written(tmp_path, test_parquet.table(100)), "part-0.parquet")
    path.write_bytes(path.read_bytes()[:1000] if content == "cut" else content)
    with pytest.raises(InputError, match=rf"{path} is not a whole Parquet file \(.*\); restore or remove it$"):
        parquet.load(str(tmp_path), 0)


def test_a_damaged_row_group_is_named_and_those_before_it_are_read(tmp_path):
    how = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    path = pathlib.Path(test_parquet.written(tmp_path, test_parquet.table(100), **how), "part-0.parquet")
    column = test_parquet.pq.read_metadata(path).row_group(3).column(2)
    whole = bytearray(path.read_bytes())
    whole[column.data_page_offset + column.total_compressed_size - 3] ^= 4
    path.write_bytes(whole)
    source = parquet.load(str(tmp_path), 0, features=("price",)).train
    source.read(np.arange(24))
    with pytest.raises(SourceError, match=r"part-0.parquet: row group 3 can't be read \(.*\); restore the file"):
        source.read(np.arange(len(source)))


@pytest.mark.holds("A TFRecord, a picture or a row group")
def test_a_small_parquet_file_that_unpacks_to_more_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    table = test_parquet.pa.table({"x": np.zeros(40_000_000, bool), "label": np.zeros(40_000_000, bool)})
    test_parquet.pq.write_table(table, tmp_path / "a.parquet", row_group_size=1 << 30)
    assert (tmp_path / "a.parquet").stat().st_size < 1_000_000
    source = parquet.load(str(tmp_path), 0, label="label").train
    monkeypatch.setattr(parquet_table.memory, "available_bytes", lambda: 2.0**28)
    line = (
        r"a.parquet: row group 0 has 40,000,000 rows, which take \d.\d GiB of memory, and 0.2 are free; write smaller"
    )
    with pytest.raises(SourceError, match=line):
        source.read(np.arange(10))


@pytest.mark.holds("A TFRecord, a picture or a row group")
@pytest.mark.parametrize("length", [1 << 62, 1 << 40, (1 << 64) - 1])
def test_a_record_that_says_it_is_larger_than_any_is_refused_before_it_is_read(tmp_path, length):
    said = np.array([length], np.uint64)
    record = said.tobytes() + checksums.length_checksums(said).tobytes() + bytes(200)
    (tmp_path / "a.tfrecord").write_bytes(record)
    with pytest.raises(InputError, match=r"a.tfrecord is truncated: record 0 \(byte 0\) has 212 bytes left of it"):
        tfrecord.load(str(tmp_path / "a.tfrecord"), 0)
    (tmp_path / "a.tfrecord.gz").write_bytes(gzip.compress(record))
    with pytest.raises(InputError, match=f"says that it has {length:,} bytes, and none has that many; restore it"):
        tfrecord.load(str(tmp_path / "a.tfrecord.gz"), 0)


@pytest.mark.holds("A TFRecord, a picture or a row group")
def test_a_picture_that_says_it_is_large_is_not_decoded(tmp_path):
    content = bytearray(test_images.png(1))
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    test_images.write(tmp_path / "a" / "1.png", bytes(content))
    gif = io.BytesIO()
    frames = [Image.new("P", (10, 10), colour) for colour in range(2)]
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], comment=b"x" * 1000)
    content = gif.getvalue()
    at = content.rindex(b",")  # the second frame is larger than its canvas
    test_images.write(
        tmp_path / "a" / "2.gif", content[: at + 5] + struct.pack("<HH", 60_000, 60_000) + content[at + 9 :]
    )
    source = test_images.loaded(tmp_path).train
    for only in np.array([[0], [1]]):
        with pytest.raises(BadRecordError, match="has 3,600,000,000 pixels, and `max_pixels` allows 50,000,000"):
            source.verify(only, source.read(only))
