"""Gzip shards are streams of what the plain ones hold."""

import gzip
import json

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.streamed import Stream
from crankshaft.input import tfrecord
from crankshaft.input.checks import InputError
from tests.input.test_tfrecord import example, images, records_of, write


def pack(folder) -> None:
    """Buckets each shard of a folder."""
    for path in folder.glob("*.tfrecord"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def read(stream) -> list:
    return [tf.nest.map_structure(lambda x: x.numpy(), each) for each in stream.examples(None, 0)]


def test_gzip_shards_are_a_stream_of_their_records(tmp_path):
    pixels, labels = images(50)
    for number in range(5):
        write(tmp_path / f"{number}.tfrecord", records_of(pixels[number::5], labels[number::5]))
    pack(tmp_path)
    train = tfrecord.load(str(tmp_path), 0, features=("image:uint8:4x5", "label:int64")).train
    assert isinstance(train, Stream)
    found = read(train)
    for image, label, (x, y) in zip(pixels, labels, found, strict=True):  # one of each file in turn
        np.testing.assert_array_equal(x, image)
        assert y == label


def test_a_features_json_says_what_gzip_shards_hold(tmp_path):
    write(tmp_path / "a.tfrecord", [example(word=b"some", size=0.5, label=3)])
    pack(tmp_path)
    parts = {"word": ("string", "bytes"), "size": ("float32", "float"), "label": ("int32", "int64")}
    described = {name: {"shape": [], "dtype": dtype, "stored": stored} for name, (dtype, stored) in parts.items()}
    (tmp_path / "features.json").write_text(json.dumps({"features": described, "label": "label", "num_classes": 7}))
    splits = tfrecord.load(str(tmp_path), 0)
    assert splits.num_classes == 7
    assert read(splits.train) == [({"word": b"some", "size": 0.5}, 3)]
    assert splits.train.element_spec[1].dtype == np.int32


def test_shards_of_both_kinds_are_refused(tmp_path):
    write(tmp_path / "a.tfrecord", records_of(*images(3)))
    pack(tmp_path)
    write(tmp_path / "b.tfrecord", records_of(*images(3)))
    with pytest.raises(InputError, match=r"a\.tfrecord\.gz is gzip, and .*b\.tfrecord is not; pack all shards or none"):
        tfrecord.load(f"{tmp_path}/a.tfrecord.gz,{tmp_path}/b.tfrecord", 0)


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_first_shard_is_one_line(tmp_path, damage):
    write(tmp_path / "a.tfrecord", records_of(*images(3)) if damage == "cut" else [])
    pack(tmp_path)
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(path.read_bytes()[:-30] if damage == "cut" else path.read_bytes())
    with pytest.raises(InputError, match="is not a whole gzip file" if damage == "cut" else "it has no record"):
        tfrecord.load(str(tmp_path), 0)


@pytest.mark.parametrize("empty", ["a", "c"])
def test_shards_without_records_are_left_out(tmp_path, caplog, empty):
    for name in "abc":
        write(tmp_path / f"{name}.tfrecord", [] if name == empty else records_of(*images(3)))
    pack(tmp_path)
    (tmp_path / "d.tfrecord.gz").write_bytes(b"")
    assert len([*tfrecord.load(str(tmp_path), 0).train.files()]) == 2
    assert [line for line in caplog.messages if "empty" in line] == [
        f"1 left out as empty: {tmp_path}/{name}.tfrecord.gz" for name in ("d", empty)
    ]
