"""TFRecord shards: every record is read as TensorFlow wrote it, and every fault is one line with file and record."""

import importlib
import json
import os
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.source import WithoutBadRecords
from crankshaft.engine.errors import BadRecordError, SourceError, UsageError
from crankshaft.input import tfrecord
from crankshaft.input.checks import InputError
from crankshaft.input.files.storage import Files
from crankshaft.input.records import checksums, record_index
from tests.waiting import PATIENCE

IMAGES = ("image:uint8:4x5", "label:int64")


def example(**values) -> bytes:
    """A serialized tf.train.Example of bytes, floats or integers."""
    kinds = {bytes: ("bytes_list", tf.train.BytesList), float: ("float_list", tf.train.FloatList)}
    features = {}
    for name, value in values.items():
        items = [*value] if isinstance(value, (list, np.ndarray)) else [value]
        field, of = kinds.get(type(items[0]) if items else float, ("int64_list", tf.train.Int64List))
        features[name] = tf.train.Feature(**{field: of(value=items)})
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(path, records) -> None:
    with tf.io.TFRecordWriter(str(path)) as file:
        for record in records:
            file.write(record)


def images(count: int, classes: int = 10):
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, 4, 5), np.uint8), random.integers(0, classes, count)


def records_of(pixels, labels) -> list[bytes]:
    return [example(image=x.tobytes(), label=int(y)) for x, y in zip(pixels, labels, strict=True)]


@pytest.fixture(params=[10, 1000], ids=["one layout", "lengths differ"])
def shards(tmp_path, request):
    """(folder of three shards, pixels, labels)"""
    pixels, labels = images(100, request.param)
    records = records_of(pixels, labels)
    for number, (first, stop) in enumerate([(0, 30), (30, 31), (31, 100)]):
        write(tmp_path / f"some.tfrecord-{number:05d}-of-00003", records[first:stop])
    return tmp_path, pixels, labels


@pytest.fixture(params=["in memory", "on disk"])
def offset_of_index(request, monkeypatch):
    if request.param == "on disk":
        monkeypatch.setattr(record_index, "_IN_MEMORY_BYTES", 0)


def opened(folder, **arguments):
    return tfrecord.load(str(folder), 0, **{"features": IMAGES, **arguments}).train


def read_all(source):
    return source.read(np.arange(len(source)))


@pytest.mark.parametrize("again", [False, True], ids=["index made", "index there"])
def test_records_in_any_order_are_what_was_written(shards, offset_of_index, again):
    folder, pixels, labels = shards
    if again:
        opened(folder)
    source = opened(folder)
    assert len(source) == 100
    for indices in (np.arange(100), np.random.default_rng(1).permutation(100), np.array([30]), np.array([5, 5, 99, 0])):
        found, numbers = source.read(indices)
        np.testing.assert_array_equal(found, pixels[indices])
        np.testing.assert_array_equal(numbers, labels[indices])
        assert (found.dtype, numbers.dtype) == (np.uint8, np.int64)


def test_checksums_are_the_known_ones():
    # RFC 3720, B.4: 32 bytes of zeros, of ones, 0 to 31, 31 to 0.
    known = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283}
    for data, checksum in known.items():
        assert checksums.crc32c(data) == checksum
        assert checksums.crc32c(data[3:], checksums.crc32c(data[:3])) == checksum
    assert checksums.record_checksums([*known])[0] == checksums.masked(np.array([0x8A9136AA], np.uint32))[0]
    lengths = np.array([0, 1, 1 << 40], np.uint64)
    octets = [int(length).to_bytes(8, "little") for length in lengths]
    np.testing.assert_array_equal(checksums.length_checksums(lengths), checksums.record_checksums(octets))


def test_index_is_made_once_and_is_whole(shards):
    folder, _, _ = shards
    opened(folder)
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.index")}
    assert len(written) == 3
    opened(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*") if path in written} == written
    assert not [*folder.glob("*.tmp")]


def test_without_the_library_one_line_says_what_to_install(shards, monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "crc32c", None)
        importlib.reload(checksums)
        with pytest.raises(UsageError, match=r"shards need the library crc32c; pip install crc32c"):
            opened(shards[0])
    importlib.reload(checksums)


@pytest.mark.parametrize("scan_bytes", [12, 50, 333])
def test_index_does_not_depend_on_the_pieces_that_are_scanned(shards, monkeypatch, scan_bytes):
    monkeypatch.setattr(record_index, "_SCAN_BYTES", scan_bytes)
    folder, pixels, _ = shards
    np.testing.assert_array_equal(read_all(opened(folder))[0], pixels)


def cut(path):
    path.write_bytes(path.read_bytes()[:20])


def swap(path):
    other = path.with_name("some.tfrecord-00002-of-00003.index")
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("damage", "said"),
    [(cut, "not a whole index"), (swap, "index of another file")],
)
def test_index_that_is_not_of_the_file_is_made_anew_with_a_word(shards, caplog, damage, said):
    folder, pixels, _ = shards
    opened(folder)
    damage(folder / "some.tfrecord-00000-of-00003.index")
    np.testing.assert_array_equal(read_all(opened(folder))[0], pixels)
    assert said in caplog.text
    caplog.clear()
    opened(folder)
    assert not caplog.text


@pytest.mark.parametrize("content", [b"0 144\n144 144\n", b"", b"TFR"])
def test_another_tools_index_is_never_overwritten(shards, caplog, content):
    folder, pixels, _ = shards
    path = folder / "some.tfrecord-00000-of-00003.index"
    path.write_bytes(content)
    for _ in range(2):
        caplog.clear()
        np.testing.assert_array_equal(read_all(opened(folder))[0], pixels)
        assert f"{path} is another tool's: it stays" in caplog.text
    assert path.read_bytes() == content


@pytest.mark.parametrize("features", [IMAGES, ()])
@pytest.mark.parametrize("damaged", [0, 19])
def test_a_damaged_record_among_those_looked_at_may_be_left_out(tmp_path, features, damaged):
    pixels, labels = images(20)
    write(tmp_path / "a.tfrecord", records_of(pixels, labels))
    whole = read_all(opened(tmp_path, features=features))
    data = bytearray((tmp_path / "a.tfrecord").read_bytes())
    data[len(data) // 20 * damaged + 30] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(data)
    said: list[str] = []
    source = WithoutBadRecords(opened(tmp_path, features=features), 1, said.append)
    found, good = source.read(np.arange(20)), np.arange(20) != damaged
    for part, right in zip(tf.nest.flatten(found), tf.nest.flatten(whole), strict=True):
        np.testing.assert_array_equal(part[good], right[good])
    assert len(said) == 1
    assert f"record {damaged} (byte" in said[0]


def test_index_that_lies_is_found_when_it_is_read(tmp_path, offset_of_index):
    path = tmp_path / "a.tfrecord"
    records = records_of(*images(9, 1000))
    write(path, records)
    opened(tmp_path)
    data = path.read_bytes()
    ends = record_index.checksum_of_ends(lambda offset, length: data[offset:][:length], len(data))
    lengths = np.array([len(record) for record in records])
    lengths[3:5] += [-1, 1]
    record_index.write(str(path), len(data), ends, lengths)  # of the file by its header, and yet of another
    with pytest.raises(SourceError, match=r"a\.tfrecord: record 3 .* it is the index of another file; delete .*index"):
        read_all(opened(tmp_path))


def test_index_that_cannot_be_written_is_kept_in_memory(shards, caplog):
    folder, pixels, _ = shards
    for path in [*folder.glob("*.tfrecord*")]:
        os.mkdir(f"{path}.index")  # permissions would not keep root from writing
    np.testing.assert_array_equal(read_all(opened(folder))[0], pixels)
    assert "can't be written" in caplog.text
    assert "kept in memory" in caplog.text


@pytest.mark.parametrize("cut_bytes", [1, 5, 20, 60])
def test_truncated_shard_is_refused_with_the_record(shards, cut_bytes):
    folder, _, _ = shards
    path = folder / "some.tfrecord-00000-of-00003"
    os.truncate(path, path.stat().st_size - cut_bytes)
    with pytest.raises(InputError, match=rf"^{path} is truncated: record (29|28) \(byte [\d,]+\) has .*; restore"):
        opened(folder)


def test_flipped_bit_is_named_and_may_be_left_out(shards):
    folder, pixels, _ = shards
    source = opened(folder)
    path = folder / "some.tfrecord-00002-of-00003"
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 4
    path.write_bytes(found)
    source = opened(folder)
    with pytest.raises(BadRecordError, match=r"00002-of-00003: record \d+ \(byte [\d,]+\): .*max_bad_records") as bad:
        read_all(source)
    said: list[str] = []
    kept = read_all(WithoutBadRecords(source, 1, said.append))[0]
    expected = pixels.copy()
    expected[bad.value.example] = pixels[bad.value.example + 1]
    np.testing.assert_array_equal(kept, expected)
    assert len(said) == 1


WRONG = {
    "no image": ({"label": 1}, r"record 7 \(byte \d+\) has no feature image \(it has label\)"),
    "no label": ({"image": bytes(20)}, r"record 7 \(byte \d+\) has no feature label"),
    "other size": ({"image": bytes(21), "label": 1}, r"has image of 21 bytes, and uint8 \[4, 5\] takes 20"),
    "two of them": ({"image": [bytes(20)] * 2, "label": 1}, r"has image of 20, 20 bytes"),
    "two labels": ({"image": bytes(20), "label": [1, 2]}, r"has 2 values of label, and int64 \[\] takes 1"),
    "other kind": ({"image": bytes(20), "label": 1.0}, r"has label stored as float, and int64 was expected"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("classes", [10, 1000])
def test_record_that_holds_something_else_is_named(tmp_path, wrong, classes):
    records = records_of(*images(12, classes))
    values, said = WRONG[wrong]
    records[7] = example(**values)
    write(tmp_path / "a.tfrecord", records)
    source = opened(tmp_path)
    with pytest.raises(BadRecordError, match=said) as caught:
        read_all(source)
    assert caught.value.example == 7
    assert str(tmp_path / "a.tfrecord") in str(caught.value)


def test_labels_that_are_too_large_for_their_dtype_are_named(tmp_path):
    write(tmp_path / "a.tfrecord", [example(image=bytes(20), label=label) for label in (1, 300)])
    with pytest.raises(BadRecordError, match=r"record 1 .* has label = 300, which is not of type uint8"):
        read_all(opened(tmp_path, features=("image:uint8:4x5", "label:uint8")))


def test_what_is_no_shard_is_refused(shards):
    folder, _, _ = shards
    os.mkfifo(folder / "some.tfrecord-00003-of-00003")  # which is not waited for
    with pytest.raises(InputError, match="00003-of-00003 is not a regular file"):
        opened(folder)
    (folder / "a.tfrecord").write_bytes(b"some text, no shard at all")
    with pytest.raises(InputError, match=r"a\.tfrecord is not a TFRecord file"):
        opened(folder / "a.tfrecord")
    write(folder / "b.tfrecord", [*records_of(*images(3)), b"not an example"])
    with pytest.raises(InputError, match=r"not a serialized tf\.train\.Example"):
        opened(folder / "b.tfrecord")


def test_the_lists_of_sequence_examples_are_named(tmp_path):
    """An Example's parser reads their context alone."""
    context = {"label": tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))}
    frames = [tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 1.5]))] * 3
    lists = {"rgb": tf.train.FeatureList(feature=frames)}
    sequence = tf.train.SequenceExample(
        context=tf.train.Features(feature=context), feature_lists=tf.train.FeatureLists(feature_list=lists)
    )
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as file:
        file.write(sequence.SerializeToString())
    for arguments in ({}, {"features": ("rgb:float32:2", "label")}):
        with pytest.raises(InputError, match=r"tf\.train\.SequenceExample, whose lists are not read \(rgb\); write a"):
            tfrecord.load(str(tmp_path), 0, **arguments)


def test_features_are_what_a_json_beside_the_shards_says(shards):
    folder, pixels, labels = shards
    described = {
        "features": {
            "image": {"shape": [20], "dtype": "uint8", "stored": "bytes"},
            "label": {"shape": [], "dtype": "int32", "stored": "int64"},
        },
        "num_classes": 7,
        "vocabulary": {"label": 3},
    }
    (folder / "features.json").write_text(json.dumps(described))
    splits = tfrecord.load(str(folder), 0)
    assert (splits.num_classes, splits.vocabulary) == (7, {"label": 3})
    found = read_all(splits.train)
    np.testing.assert_array_equal(found[0], pixels.reshape(-1, 20))
    assert found[1].dtype == np.int32
    np.testing.assert_array_equal(found[1], labels)


BAD_JSON = {
    "no JSON": ("{", "is not JSON"),
    "no features": ("{}", "has no mapping `features`"),
    "dtype": ('{"features": {"image": {"dtype": "uint9"}}}', "image is of dtype 'uint9'"),
    "shape": ('{"features": {"image": {"dtype": "uint8", "shape": 3}}}', "image has shape 3"),
    "stored": ('{"features": {"image": {"dtype": "uint8", "stored": "x"}}}', "image is stored as 'x'"),
    "label": ('{"features": {"image": {"dtype": "uint8"}}, "label": "y"}', "label=y is none of the features"),
    "example": ('{"features": {"image": {"dtype": "uint8"}}, "example": ["x"]}', "its example has 'x'"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_features_json_that_is_wrong_is_one_line(shards, case):
    folder, _, _ = shards
    text, said = BAD_JSON[case]
    (folder / "features.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        tfrecord.load(str(folder), 0)
    assert str(folder / "features.json") in str(caught.value)


def test_features_are_read_off_the_records_where_nobody_says(tmp_path, caplog):
    records = [
        example(pixels=bytes([255, k, 3]), name=b"name %d" % k, weights=[0.5, float(k)], label=k) for k in range(5)
    ]
    write(tmp_path / "a.tfrecord", records)
    source = tfrecord.load(str(tmp_path), 0).train
    features, labels = read_all(source)
    assert features["name"].tolist() == [b"name %d" % k for k in range(5)]
    np.testing.assert_array_equal(features["pixels"][:, 1], np.arange(5))
    np.testing.assert_array_equal(features["weights"], np.stack([np.full(5, 0.5), np.arange(5)], 1))
    np.testing.assert_array_equal(labels, np.arange(5))
    assert "name string [], pixels uint8 [3], weights float32 [2]" in caplog.text


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("of_first", [{}, {"age": []}], ids=["missing", "empty"])
def test_what_the_first_records_lack_is_read_where_most_have_it(tmp_path, caplog, packed, of_first):
    """A feature is judged by a sample of several files, so the first record decides nothing."""
    more = [{**of_first}, *({"age": float(k)} for k in range(1, 30))]
    records = [example(x=[float(k), 1.0], label=k, **each) for k, each in enumerate(more)]
    records[20] = example(x=[20.0, 1.0], label=20, age=20.0, note=b"once")
    options = "GZIP" if packed else None
    for number in range(3):
        with tf.io.TFRecordWriter(f"{tmp_path}/{number}.tfrecord{'.gz' * packed}", options) as file:
            for record in records[10 * number : 10 * number + 10]:
                file.write(record)
    source = tfrecord.load(str(tmp_path), 0).train
    assert {name: spec.shape for name, spec in source.element_spec[0].items()} == {"age": (), "x": (2,)}
    assert "left out, as less than half of the records that were looked at have it: note (1 of 30)" in caplog.text
    if not packed:
        assert source.read(np.arange(1, 30))[0]["age"].tolist() == [*range(1, 30)]
        with pytest.raises(BadRecordError, match=r"0.tfrecord: record 0 .* (no feature|0 values of) age"):
            source.read(np.arange(1))


def test_a_few_records_of_another_form_do_not_decide_it(tmp_path):
    forms = [[0.5], [0.5, 1.5, 2.5], *[[0.5, 1.5]] * 4]
    write(tmp_path / "a.tfrecord", [example(x=x, label=1) for x in forms])
    source = tfrecord.load(str(tmp_path), 0).train
    assert source.element_spec[0].shape == (2,)
    for bad in range(2):
        with pytest.raises(BadRecordError, match=rf"record {bad} .* values of x, and float32 \[2\] takes 2"):
            source.read(np.array([bad]))
    write(tmp_path / "a.tfrecord", [example(**{f"x{k}": 1.5}) for k in range(5)])
    with pytest.raises(InputError, match="no feature is in half of its records; write a features"):
        tfrecord.load(str(tmp_path), 0)


def test_label_and_weight_are_those_that_are_named(tmp_path):
    write(tmp_path / "a.tfrecord", [example(x=[0.5, 1.5], y=2, w=0.25), example(x=[2.5, 3.5], y=-3, w=1.0)])
    x, y, w = read_all(tfrecord.load(str(tmp_path), 0, label="y", weight="w").train)
    np.testing.assert_array_equal(x, [[0.5, 1.5], [2.5, 3.5]])
    assert (y.tolist(), w.tolist()) == ([2, -3], [0.25, 1.0])
    with pytest.raises(InputError, match="label=z is none of the features of the records: w, x, y"):
        tfrecord.load(str(tmp_path), 0, label="z")


def test_records_of_several_layouts_are_read(tmp_path):
    def in_order(names, k):
        parts = {"image": bytes([k] * 20), "label": k}
        one_by_one = [example(**{name: parts[name]}) for name in names]
        content = b"".join(tf.train.Example.FromString(each).features.SerializeToString() for each in one_by_one)
        return b"\n" + bytes([len(content)]) + content

    orders = [("image", "label"), ("label", "image")]
    write(tmp_path / "a.tfrecord", [in_order(orders[k % 3 == 0], k) for k in range(60)])
    pixels, labels = read_all(opened(tmp_path))
    np.testing.assert_array_equal(labels, np.arange(60))
    np.testing.assert_array_equal(pixels[:, 0, 0], np.arange(60))


@pytest.fixture
def meeting(monkeypatch):
    """A disk that is slow until `meeting.set()`; from then on each read waits until another has begun."""
    pread, readers, together = os.pread, threading.Barrier(2), threading.Event()

    def slow(*wanted):
        readers.wait(PATIENCE) if together.is_set() else time.sleep(0.002)
        return pread(*wanted)

    monkeypatch.setattr(os, "pread", slow)
    return together


def test_the_digest_of_files_reads_pieces_at_once(tmp_path, meeting):
    """On a network's disk each takes long."""
    contents = [np.random.default_rng(shard).bytes(4 << 16) for shard in range(2)]
    for shard, content in enumerate(contents):
        (tmp_path / str(shard)).write_bytes(content)
    meeting.set()
    assert Files([str(tmp_path / "0"), str(tmp_path / "1")]).sample == zlib.crc32(b"".join(contents))


@pytest.mark.parametrize("indices", [np.arange(99, 35, -4), np.array([0, 1, 30, 31])], ids=["one shard", "three"])
def test_records_that_lie_apart_are_read_at_once_from_a_slow_disk(shards, meeting, indices):
    folder, pixels, labels = shards
    source = opened(folder)
    meeting.set()
    found, numbers = source.read(indices)
    np.testing.assert_array_equal(found, pixels[indices])
    np.testing.assert_array_equal(numbers, labels[indices])


def test_a_line_names_what_helps_where_each_example_is_a_slow_read(shards, meeting, caplog):
    folder, pixels, _ = shards
    source = opened(folder)
    for _ in range(4):
        np.testing.assert_array_equal(source.read(np.array([0, 40, 90]))[0], pixels[[0, 40, 90]])
    (line,) = [record.getMessage() for record in caplog.records if "a read takes more than" in record.getMessage()]
    assert line.startswith(f"{folder}: a read takes more than a millisecond")
    assert "shuffle_window=N, a number of chunks, reads many examples at once" in line


def test_consecutive_records_are_one_read_of_a_slow_disk(shards, monkeypatch, meeting):
    folder, pixels, _ = shards
    source, slow, reads = opened(folder), os.pread, []
    monkeypatch.setattr(os, "pread", lambda *wanted: (reads.append(wanted), slow(*wanted))[1])
    np.testing.assert_array_equal(source.read(np.arange(40, 90))[0], pixels[40:90])
    assert len(reads) == 1
