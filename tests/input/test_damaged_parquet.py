"""Parquet files that are damaged, cut, or changed while they are read: one line, and never another value."""

import os

import numpy as np
import pytest

from crankshaft.engine.internals.errors import SourceError
from crankshaft.input import parquet
from crankshaft.input.data import InputError
from tests.input.test_parquet import all_of, pq, table, written


@pytest.mark.parametrize("content", [b"P", b"PAR1", b"text, not Parquet" * 100])
def test_what_is_no_parquet_file_is_one_line(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"a.parquet is not a whole Parquet file \(.*\); restore or remove it$"):
        parquet.load(str(tmp_path), 0)


def test_a_truncated_file_is_one_line(tmp_path):
    path = os.path.join(written(tmp_path, table(100)), "part-0.parquet")
    os.truncate(path, 1000)
    with pytest.raises(InputError, match=r"part-0.parquet is not a whole Parquet file"):
        parquet.load(str(tmp_path), 0)


@pytest.mark.parametrize(
    ("change", "line"),
    [(lambda path: os.truncate(path, 1000), "has 1,000 bytes, and had"), (os.remove, "can't be read (No such file")],
)
def test_a_file_that_changes_while_it_is_read_is_one_line(tmp_path, change, line):
    source = parquet.load(written(tmp_path, table(100)), 0).train
    source.read(np.arange(3))
    change(tmp_path / "part-0.parquet")
    with pytest.raises(SourceError) as caught:
        all_of(source)
    assert line in str(caught.value)


def test_flipped_bits_are_found_where_pages_have_checksums(tmp_path):
    folder = written(tmp_path, table(100), write_page_checksum=True, compression="none", use_dictionary=False)
    path = os.path.join(folder, "part-0.parquet")
    column = pq.read_metadata(path).row_group(3).column(2)
    whole = bytearray(open(path, "rb").read())  # noqa: SIM115
    whole[column.data_page_offset + column.total_compressed_size - 3] ^= 4
    with open(path, "wb") as file:
        file.write(whole)
    source = parquet.load(folder, 0, features=("price",)).train
    source.read(np.arange(24))
    with pytest.raises(SourceError, match=r"part-0.parquet: row group 3 can't be read \(.*\); restore the file"):
        all_of(source)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_of_a_hundred_flipped_bits_none_gives_another_value_where_pages_have_checksums(tmp_path, version):
    """The checksum is of a page's data; of its header a bit or two say nothing that is read."""
    folder = written(tmp_path, table(400), row_group_size=100, write_page_checksum=True, data_page_version=version)
    path = os.path.join(folder, "part-0.parquet")
    expected = all_of(parquet.load(folder, 0).train)
    with open(path, "rb") as file:
        whole = file.read()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    said = []
    for bit in np.random.default_rng(0).choice(8 * footer, 100, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            read = all_of(parquet.load(folder, 0).train)
        except (InputError, SourceError) as error:
            said.append(str(error))
        else:
            assert str(read) == str(expected), f"byte {bit // 8}"
            for (name, some), other in zip(read[0].items(), expected[0].values(), strict=True):
                np.testing.assert_array_equal(some, other, name)
    assert len(said) > 80
    assert all(path in line and "\n" not in line for line in said)
