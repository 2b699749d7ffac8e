"""Shards of several folders keep their classes, and those of TFDS are read as TFDS says."""

import gzip
import json

import numpy as np
import pytest

from crankshaft.input import array_record, tfrecord
from crankshaft.input.checks import InputError
from crankshaft.input.records import shard_writing
from crankshaft.input.records.shard_files import library
from tests.input.test_tfrecord import example

SHADES = {"cat": 20.0, "dog": 120.0, "fox": 220.0, "owl": 70.0}  # one value tells which class an example is of
INPUTS = {"tfrecord": tfrecord, "array_record": array_record}


def prepared(folder, classes, kind="tfrecord", count=8, without="", **about):
    """A folder as `crankshaft prepare` writes it, of examples of some classes in turn, numbered in their order."""
    folder.mkdir()
    labels = np.arange(count) % len(classes)
    records = [example(x=SHADES[classes[at]], label=np.int32(at).tobytes()) for at in labels]
    path = folder / f"train-00000-of-00001.{kind}"
    if kind == "tfrecord":
        shard_writing.write(str(path), iter([records]), kind)
    else:
        writer = library().ArrayRecordWriter(str(path), "group_size:1")
        for each in records:
            writer.write(each)
        writer.close()
    described = {"x": {"shape": [], "dtype": "float32"}, "label": {"shape": [], "dtype": "int32", "stored": "bytes"}}
    known = {"classes": [*classes], "num_classes": len(classes), "ids": len("".join(classes)), **about}
    known.pop(without, None)
    (folder / "features.json").write_text(json.dumps({"features": described, **known}))
    return folder


def named(split, classes) -> list[tuple[float, str]]:
    x, labels = split.read(np.random.default_rng(0).permutation(len(split)))
    return sorted({(shade, classes[label]) for shade, label in zip(x.tolist(), labels.tolist(), strict=True)})


@pytest.mark.parametrize("kind", INPUTS)
def test_folders_that_number_classes_differently_are_one_line(tmp_path, kind):
    load = INPUTS[kind].load
    one = prepared(tmp_path / "1", ["cat", "owl"], kind)
    two = prepared(tmp_path / "2", ["owl", "cat"], kind)
    unnamed = prepared(tmp_path / "3", ["cat", "owl"], kind, without="classes")
    line = r"the shards in {} and in {} differ in the numbers of classes, by their features.json; write both by cranksh"
    with pytest.raises(InputError, match=line.format(one, two)):
        load(f"{one},{two}", 0)
    with pytest.raises(InputError, match=line.format(one, two)):
        load(str(one), 0, eval_data_dir=str(two))
    with pytest.raises(InputError, match=line.format(one, unnamed)):
        load(f"{one},{unnamed}", 0)
    same = prepared(tmp_path / "4", ["cat", "owl"], kind, num_classes=3)
    for evaluation in (same, unnamed):
        data = load(f"{one},{same}", 0, eval_data_dir=str(evaluation))
        assert (data.classes, len(data.train), len(data.evaluation)) == (("cat", "owl"), 16, 8)
        assert named(data.train, data.classes) == named(data.evaluation, data.classes) == [(20.0, "cat"), (70.0, "owl")]


def test_folders_with_folders_of_splits_are_read_together(tmp_path):
    classes = ["cat", "dog", "fox"]
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        prepared(tmp_path / name / "train", classes)
        prepared(tmp_path / name / "eval", classes, count=3)
    data = tfrecord.load(f"{tmp_path}/1,{tmp_path}/2", 0)
    assert named(data.train, data.classes) == named(data.evaluation, data.classes)
    assert (len(data.train), len(data.evaluation), data.classes) == (16, 6, ("cat", "dog", "fox"))


def test_folders_that_differ_in_more_are_one_line(tmp_path):
    one = prepared(tmp_path / "1", ["cat", "dog"])
    two = prepared(tmp_path / "2", ["cat", "dog"], vocabulary={"x": 3})
    with pytest.raises(InputError, match=rf"the shards in {one} and in {two} differ in vocabulary, by their"):
        tfrecord.load(f"{one},{two}", 0)


def test_gzip_shards_of_other_classes_are_one_line(tmp_path):
    for folder in (prepared(tmp_path / "1", ["cat", "dog"]), prepared(tmp_path / "2", ["dog", "fox"])):
        path = folder / "train-00000-of-00001.tfrecord"
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert tfrecord.load(str(tmp_path / "2"), 0).classes == ("dog", "fox")
    with pytest.raises(InputError, match="differ in the numbers of classes, by their"):
        tfrecord.load(f"{tmp_path}/1,{tmp_path}/2", 0)


def tensor(dtype, *sizes, **more) -> dict:
    about = {"shape": {"dimensions": [*map(str, sizes)]} if sizes else {}, "dtype": dtype, "encoding": "none", **more}
    return {"pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor", "tensor": about}


LABEL = {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel", "classLabel": {}}
LABEL["classLabel"] = {"numClasses": "3"}
TFDS = {
    "x": tensor("float32", 2),
    "count": tensor("uint8"),
    "label": LABEL,
    "name": {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}},
}


def of_tfds(folder, **features):
    """A folder as TFDS writes it: two splits, its features.json and the names of classes."""
    folder.mkdir()
    for split, count in (("train", 40), ("test", 10)):
        records = [
            example(x=[float(number)] * 2, count=number, label=number % 3, name=b"number %d" % number)
            for number in range(count)
        ]
        shard_writing.write(str(folder / f"toy-{split}.tfrecord-00000-of-00001"), iter([records]), "tfrecord")
        for index in folder.glob("*.index"):
            index.unlink()
    described = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}
    described["featuresDict"] = {"features": {**TFDS, **features}}
    (folder / "features.json").write_text(json.dumps(described))
    (folder / "label.labels.txt").write_text("cat\ndog\nfox\n")
    return folder


def test_a_folder_of_tfds_is_read_by_its_own_features_one_split_at_a_time(tmp_path):
    folder = of_tfds(tmp_path / "1.0.0")
    data = tfrecord.load(str(folder), 0, eval_data_dir=str(folder))
    assert (len(data.train), len(data.evaluation)) == (40, 10)
    assert (data.num_classes, data.classes) == (3, ("cat", "dog", "fox"))
    features, labels = data.train.read(np.array([7, 39]))
    assert features["x"].tolist() == [[7, 7], [39, 39]]
    assert (features["count"].dtype, features["count"].tolist()) == (np.uint8, [7, 39])
    assert features["name"].tolist() == [b"number 7", b"number 39"]
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (
            {"pythonClassName": "tensorflow_datasets.core.features.image_feature.Image", "image": {}},
            "strange is Image of",
        ),
        (tensor("float32", -1), "strange is of no fixed shape"),
        (tensor("float32", 2, encoding="zlib"), "strange is encoded as zlib"),
    ],
)
def test_what_is_not_read_of_tfds_is_one_line_that_says_how(tmp_path, feature, said):
    folder = of_tfds(tmp_path / "1.0.0", strange=feature)
    with pytest.raises(InputError, match=rf"features\.json: {said}.*, which is not read; name those .*features=NAME"):
        tfrecord.load(str(folder), 0)
    named = tfrecord.load(str(folder), 0, features=("x:float32:2", "label:int64")).train
    assert named.read(np.array([4]))[1].tolist() == [1]
