"""CSV: types are found over all files, records are read at random from a typed form, mistakes name file and record."""

import os
import pathlib
import re

import numpy as np
import pytest

from crankshaft.engine.data.source import BadRecordError, SourceError, Spec
from crankshaft.input import csv
from crankshaft.input.splits import InputError

HEADER = "id,price,city,label\n"


def written(folder, *texts, name="{}.csv"):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / name.format(number)).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def records(first, stop):
    return "".join(f"{n},{n / 4},city {n % 3},{n % 2}\n" for n in range(first, stop))


def all_of(source):
    return source.read(np.arange(len(source)))


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 2500])
def test_records_are_read_in_any_order(tmp_path, rows):
    half = rows // 2
    texts = [HEADER + records(0, half), HEADER + records(half, rows)] if half else [HEADER + records(0, rows)]
    splits = csv.load(written(tmp_path, *texts), 0)
    assert splits.vocabulary == {"id": rows}
    source = splits.train
    assert source.element_spec == (
        {"id": Spec((), np.int64), "price": Spec((), np.float32), "city": Spec((), object)},
        Spec((), np.int64),
    )
    indices = np.random.default_rng(0).permutation(rows)
    features, labels = source.read(indices)
    np.testing.assert_array_equal(features["id"], indices)
    np.testing.assert_array_equal(features["price"], (indices / 4).astype(np.float32))
    assert features["city"].tolist() == [b"city %d" % (n % 3) for n in indices]
    np.testing.assert_array_equal(labels, indices % 2)
    assert [features[name].dtype for name in features] == [np.int64, np.float32, object]


@pytest.mark.parametrize(
    ("fields", "kind", "values"),
    [
        (["1", "-2", " 3"], np.int64, [1, -2, 3]),
        (["9223372036854775807", "0", "1"], np.int64, [2**63 - 1, 0, 1]),
        (["9223372036854775808", "0", "1"], np.float32, [2.0**63, 0, 1]),
        (["1", "2", "2.5"], np.float32, [1, 2, 2.5]),
        (["1e3", "-.5", "inf"], np.float32, [1000, -0.5, np.inf]),
        (["1", "2.5", "x"], object, [b"1", b"2.5", b"x"]),
        (["1_0", "2", "3"], object, [b"1_0", b"2", b"3"]),
        (["", "", ""], object, [b"", b"", b""]),
        (["é", "", "雪"], object, ["é".encode(), b"", "雪".encode()]),
    ],
)
def test_types_are_found_over_all_files(tmp_path, fields, kind, values):
    texts = ["x,label\n" + "0,0\n" * 0 + f"{field},1\n" for field in fields]
    source = csv.load(written(tmp_path, *texts), 0).train
    assert source.element_spec[0]["x"] == Spec((), kind)
    assert all_of(source)[0]["x"].tolist() == values


def test_a_late_value_decides_a_type(tmp_path):
    text = "x,label\n" + "1,0\n" * 3000 + "word,0\n"
    assert csv.load(written(tmp_path, text), 0).train.element_spec[0]["x"] == Spec((), object)


def test_quoted_fields_hold_anything(tmp_path):
    given = ['a "word"', "two\nlines", "with\r\nboth", "a,comma", ""]
    quoted = "".join('"' + field.replace('"', '""') + '",1\r\n' for field in given)
    source = csv.load(written(tmp_path, "\ufefftext , label\r\n\r\n" + quoted + "\r\n"), 0).train
    assert all_of(source)[0]["text"].tolist() == [field.encode() for field in given]


@pytest.mark.parametrize(("delimiter", "character"), [(";", ";"), ("tab", "\t")])
def test_other_delimiters(tmp_path, delimiter, character):
    text = (HEADER + records(0, 3)).replace(",", character)
    source = csv.load(written(tmp_path, text, name="{}.tsv"), 0, delimiter=delimiter).train
    assert all_of(source)[0]["id"].tolist() == [0, 1, 2]


def test_missing_values_are_bad_records_or_zero(tmp_path):
    text = "id,price,city,label\n1,,a,0\n,nan,,1\n3,0.5,c,\n"
    folder = written(tmp_path, HEADER + records(0, 2), text)
    for name, record in (("id", 2), ("price", 1)):
        source = csv.load(folder, 0, features=(name,)).train
        source.read(np.array([0, 1]))
        with pytest.raises(BadRecordError, match=rf"1.csv, record {record}: column '{name}' has no value; fill it, or"):
            all_of(source)
    with pytest.raises(BadRecordError, match=r"1.csv, record 3: column 'label' has no value") as caught:
        all_of(csv.load(folder, 0, features=("city",)).train)
    assert caught.value.example == 4
    features, labels = all_of(csv.load(folder, 0, missing="zero").train)
    assert features["id"].tolist() == [0, 1, 1, 0, 3]
    assert features["price"].tolist() == [0, 0.25, 0, 0, 0.5]
    assert features["city"].tolist() == [b"city 0", b"city 1", b"a", b"", b"c"]
    assert labels.tolist() == [0, 1, 0, 1, 0]


def test_labels_of_text_are_classes(tmp_path):
    folder = written(tmp_path / "train", "x,label\n1,dog\n2,cat\n3,dog\n")
    other = written(tmp_path / "eval", "x,label\n1,cat\n2,\n")
    splits = csv.load(folder, 0, eval_data_dir=other)
    assert splits.num_classes == 2
    assert all_of(splits.train)[1].tolist() == [1, 0, 1]
    with pytest.raises(BadRecordError, match=r"0.csv, record 2: label '' is not among those of training \(cat, dog\)"):
        all_of(splits.eval)


def test_many_different_texts_are_classes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(csv, "_MOST_TEXTS", 5)
    splits = csv.load(written(tmp_path, "x,label\n" + "".join(f"1,c{n:05}\n" for n in range(2000))), 0)
    assert splits.num_classes == 2000
    np.testing.assert_array_equal(all_of(splits.train)[1], np.arange(2000))


def test_evaluation_has_the_types_of_training(tmp_path):
    folder = written(tmp_path / "train", "x,y,label\n1.5,a,0\n")
    splits = csv.load(folder, 0, eval_data_dir=written(tmp_path / "eval", "x,y,label\n1,007,1\n"))
    features, _ = all_of(splits.eval)
    assert (features["x"].tolist(), features["y"].tolist()) == ([1.0], [b"007"])
    assert splits.num_classes == 2
    bad = written(tmp_path / "bad", "x,y,label\n1,b,1\n2,b,0.5\n")
    with pytest.raises(
        InputError, match=r"bad/0.csv, record 2: column 'label': expected an integer, as in .*train/0.cs"
    ):
        csv.load(folder, 0, eval_data_dir=bad)
    other = written(tmp_path / "other", "y,x,label\nb,1,1\n")
    with pytest.raises(InputError, match=r"other/0.csv has the columns y, x, label, and .*train/0.csv x, y, label"):
        csv.load(folder, 0, eval_data_dir=other)


def test_a_file_that_has_changed_is_read_anew(tmp_path):
    folder = written(tmp_path, HEADER + records(0, 3))
    before = csv.load(folder, 0).train
    assert len(os.listdir(tmp_path / ".crankshaft")) == 1
    written(tmp_path, HEADER + records(5, 9))
    after = csv.load(folder, 0).train
    assert all_of(after)[0]["id"].tolist() == [5, 6, 7, 8]
    assert after.identity() != before.identity()


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        ([HEADER + records(0, 2) + "7,1,x\n"], "0.csv:4: expected 4 fields, as the header has, found 3; mend it"),
        ([HEADER + '1,2,"two\nlines",1,5\n'], "0.csv:3: expected 4 fields, as the header has, found 5; mend it"),
        ([HEADER + '1,2,"x,1\n'], "0.csv:2: unexpected end of data; mend the record, a quote may not be closed"),
        ([HEADER + '1,2,"x"y,1\n'], "0.csv:2: ',' expected after '\"'; mend the record"),
        ([HEADER], "0.csv has a header and no records; remove it"),
        ([""], "0.csv is empty: expected a header and records, found nothing"),
        (["id,id,label\n1,2,3\n"], "0.csv:1: expected a header, a name for each column, found two columns 'id'"),
        (["id,,label\n1,2,3\n"], "0.csv:1: expected a header, a name for each column, found a column without a name"),
        ([HEADER + records(0, 1), "id,label\n1,1\n"], "1.csv:1: the header is id, label, and that of"),
        (["x,label\n1,2\n", "x,label\n"], "1.csv has a header and no records; remove it"),
        ([b"\x1f\x8b\x08"], "0.csv is gzip: expected CSV; unpack it"),
        ([b"x,label\n\xff,1\n"], "expected text in UTF-8, found 0xff; convert the file"),
        (
            ["x,y\n1,2\n"],
            "0.csv has no column 'label'; name the label's by --input_arg=label=NAME, one of x, y, or none",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, texts, line):
    with pytest.raises(InputError) as caught:
        csv.load(written(tmp_path, *texts), 0)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    kept = tmp_path / ".crankshaft"
    assert not kept.exists() or not os.listdir(kept) or "no column" in line


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n"])
def test_what_is_no_delimiter_is_one_line(tmp_path, delimiter):
    with pytest.raises(InputError, match="is no delimiter; give one character, or tab"):
        csv.load(written(tmp_path, HEADER + records(0, 1)), 0, delimiter=delimiter)


def test_every_flipped_bit_is_found(tmp_path):
    """Where the file says what it is, it is made anew by itself."""
    folder = written(tmp_path, HEADER + records(0, 1500))
    path = pathlib.Path(*csv.load(folder, 0).train.files())
    whole, said = path.read_bytes(), set()
    draws = np.random.default_rng(1)
    # Of the groups of records, and of the end, which has where they begin and what the file is.
    for bit in [*draws.integers(0, 8 * len(whole), 100), *8 * len(whole) - 1 - draws.integers(0, 8 * 300, 100)]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            all_of(csv.load(folder, 0).train)
        except SourceError as error:
            found = re.fullmatch(
                rf"{path}: (group \d|its index) is damaged .*; remove the file, it is made anew", str(error)
            )
            said.add(found[1])
        else:
            assert path.read_bytes() == whole
            said.add("made anew")
    assert said == {"group 0", "group 1", "its index", "made anew"}


def test_remote_files_are_read_through_tensorflow(tmp_path):
    import tensorflow as tf

    text = HEADER + records(0, 1100)
    with tf.io.gfile.GFile("ram://csv/0.csv", "w") as file:
        file.write(text)
    here, there = csv.load(written(tmp_path, text), 0).train, csv.load("ram://csv", 0).train
    tf.nest.map_structure(np.testing.assert_array_equal, all_of(here), all_of(there))
    assert here.identity() == there.identity()
