"""ArrayRecord shards: every record is read by chunks as it was written, and every fault is one line."""

import concurrent.futures
import json
import os
import resource

import numpy as np
import pytest

from crankshaft.engine.data.source import WithoutBadRecords
from crankshaft.engine.errors import BadRecordError
from crankshaft.input import array_record
from crankshaft.input.checks import InputError
from crankshaft.input.records.shard_files import library
from tests.input.test_tfrecord import example

COUNTS = (30, 1, 69)


def record(k: int) -> bytes:
    return example(x=[float(k)] * 3, label=np.array(k, "<i4").tobytes())


DESCRIBED = {
    "features": {"x": {"shape": [3], "dtype": "float32"}, "label": {"shape": [], "dtype": "int32", "stored": "bytes"}},
    "num_classes": 100,
}


def write(path, records, options="group_size:4") -> None:
    writer = library().ArrayRecordWriter(str(path), options)
    for each in records:
        writer.write(each)
    writer.close()


@pytest.fixture
def shards(tmp_path):
    ends = np.cumsum(COUNTS)
    for number, (count, end) in enumerate(zip(COUNTS, ends, strict=True)):
        write(tmp_path / f"a.array_record-{number:05d}-of-00003", [record(k) for k in range(end - count, end)])
    (tmp_path / "features.json").write_text(json.dumps(DESCRIBED))
    return tmp_path


def opened(folder):
    return array_record.load(str(folder), 0).train


def read_all(folder):
    source = opened(folder)
    return source.read(np.arange(len(source)))


def test_chunks_are_whole_groups_of_about_a_mebibyte(shards):
    source = opened(shards)
    assert source.chunk_examples % 4 == 0
    assert 0.9 < source.chunk_examples * len(record(1)) / 2**20 < 1.1


def test_record_that_holds_something_else_is_named(tmp_path):
    write(tmp_path / "a.array_record", [record(0), record(1), example(x=b"1")])
    (tmp_path / "features.json").write_text(json.dumps(DESCRIBED))
    with pytest.raises(BadRecordError, match=r"a\.array_record: record 2 has x stored as bytes, and float") as caught:
        opened(tmp_path).read(np.arange(3))
    assert caught.value.example == 2


@pytest.mark.parametrize("size", [10, 5000])
def test_truncated_file_is_refused(shards, size):
    path = shards / "a.array_record-00002-of-00003"
    os.truncate(path, size)
    with pytest.raises(InputError, match=r"00002-of-00003 .*(not a whole|can't be read)"):
        opened(shards)


def test_more_shards_than_a_process_may_open_are_read(shards, monkeypatch):
    """Every open shard is three descriptors or so; here two may be open, in any order and by several threads."""
    wanted = opened(shards)
    everything = wanted.read(np.arange(len(wanted)))[1]
    monkeypatch.setattr(array_record, "_OPEN_SHARDS", 1)
    before = len(os.listdir("/proc/self/fd"))
    source = opened(shards)
    turns = np.random.default_rng(0).permutation(len(source))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda at: source.read(at)[1], np.array_split(turns, 12))]
    np.testing.assert_array_equal(np.concatenate(found), everything[turns])
    assert len(os.listdir("/proc/self/fd")) - before <= 4


def test_a_limit_on_open_files_is_named_and_no_file_is_called_damaged(shards):
    opened(shards)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        with pytest.raises(InputError, match=r"array_record-0000\d-of-00003 can't be read \(Too many open files\)"):
            opened(shards)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("described", [True, False])
def test_a_damaged_first_record_may_be_left_out(tmp_path, described):
    path = tmp_path / "a.array_record"
    write(path, [record(number) for number in range(1, 50)], "group_size:1,uncompressed")
    if described:
        (tmp_path / "features.json").write_text(json.dumps(DESCRIBED))
    whole, data = read_all(tmp_path), bytearray(path.read_bytes())
    data[data.index(record(1)) + 5] ^= 1
    path.write_bytes(data)
    said: list[str] = []
    found = WithoutBadRecords(opened(tmp_path), 1, said.append).read(np.arange(49))
    np.testing.assert_array_equal(found[0][1:], whole[0][1:])
    assert len(said) == 1
    assert "a.array_record: record 0 can't be read" in said[0]


def test_raw_records_are_the_bytes_of_one_feature(tmp_path):
    write(tmp_path / "a.array_record", [np.arange(k, k + 4, dtype="<u2").tobytes() for k in range(5)])
    described = {"records": "raw", "features": {"tokens": {"shape": [4], "dtype": "uint16", "stored": "bytes"}}}
    (tmp_path / "features.json").write_text(json.dumps(described))
    (tokens,) = opened(tmp_path).read(np.array([4, 0]))
    np.testing.assert_array_equal(tokens, [[4, 5, 6, 7], [0, 1, 2, 3]])
    write(tmp_path / "a.array_record", [b"12345678", b"1234567"])
    with pytest.raises(BadRecordError, match=r"record 1 has 7 bytes, and tokens uint16 \[4\] takes 8"):
        opened(tmp_path).read(np.arange(2))
