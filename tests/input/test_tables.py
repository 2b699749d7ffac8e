"""Tables in files of any kind: missing values, words and classes, by the data to train on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from crankshaft.engine.errors import BadRecordError
from crankshaft.input import csv, data_json, parquet
from crankshaft.input.checks import InputError
from crankshaft.input.tables import fitting

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class Tables:
    def __init__(self, folder, module):
        self._folder, self._module, self.is_csv = folder, module, module is csv

    def write(self, name="train", **columns) -> str:
        """Writes a folder of one file with these columns, None for a missing value."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        if self._module is parquet:
            pq.write_table(pa.table(columns), folder / "0.parquet")
        else:
            lines = zip(*([name, *values] for name, values in columns.items()), strict=True)
            shown = [",".join("" if each is None else str(each) for each in line) for line in lines]
            (folder / "0.csv").write_text("\n".join([*shown, ""]))
        return str(folder)

    def load(self, folder, **arguments):
        return self._module.load(folder, 0, **arguments)


@pytest.fixture(params=[csv, parquet], ids=["csv", "parquet"])
def tables(request, tmp_path):
    return Tables(tmp_path, request.param)


def rows(split) -> dict[str, list]:
    return {name: array.tolist() for name, array in split.read(np.arange(len(split)))[0].items()}


HOLES = {"id": [1, None, 3, 4], "price": [1.5, None, 2.5, 9.5], "full": [5.5, 6.5, 7.5, 8.5]}


@pytest.mark.parametrize(("name", "row"), [("id", 1), ("price", 1), ("label", 3)])
def test_a_missing_value_is_a_bad_record(tables, name, row):
    folder = tables.write(**HOLES, label=[0, 1, 1, None])
    source = tables.load(folder, features=("full" if name == "label" else name,)).train
    source.read(np.array([0, 2]))
    with pytest.raises(BadRecordError, match=f"column '{name}' has no value; fill it, or") as caught:
        source.read(np.arange(4))
    assert caught.value.example == row


@pytest.mark.parametrize(
    ("missing", "train", "evaluation"),
    [
        ("zero", {"price": [1.5, 0, 2.5, 9.5]}, {"price": [0, 1.5]}),
        ("mean", {"price": [1.5, 4.5, 2.5, 9.5]}, {"price": [4.5, 1.5]}),
        ("-1.5", {"price": [1.5, -1.5, 2.5, 9.5]}, {"price": [-1.5, 1.5]}),
        (
            "column",
            {"price": [1.5, 0, 2.5, 9.5], "price.missing": [0, 1, 0, 0]},
            {"price": [0, 1.5], "price.missing": [1, 0]},
        ),
    ],
)
def test_missing_values_are_a_number_or_the_mean_of_training_or_a_column_says_so(tables, missing, train, evaluation):
    folder = tables.write(**HOLES, label=[0, 1, 1, 0])
    other = tables.write("eval", id=[1, None], price=[None, 1.5], full=[5.5, 6.5], label=[0, 1])
    data = tables.load(folder, missing=missing, eval_data_dir=other)
    for split, expected in ((data.train, train), (data.evaluation, evaluation)):
        found = rows(split)
        for name, values in {"id": [1, 0, 3, 4][: len(split)], "full": HOLES["full"][: len(split)], **expected}.items():
            assert found[name] == values
        assert "full.missing" not in found


def test_of_rows_that_are_not_trained_on_nothing_is_filled_in_elsewhere(tables):
    folder = tables.write(**HOLES, label=[0, 1, 1, 0])
    divided = tables.load(folder, features=("price",), missing="mean", validation_split=0.25).train
    assert rows(divided)["price"] == [1.5, 2, 2.5, 9.5]
    bad = tables.write("bad", **{**HOLES, "full": [None, 1.5, 1.5, 1.5]}, label=[0, None, 0, 0])
    source = tables.load(folder, features=("full",), missing="column", eval_data_dir=bad).evaluation
    for at, line in ((0, "column 'full' has no value and has one in each row to train"), (1, "'label' has no value")):
        with pytest.raises(BadRecordError, match=line) as caught:
            source.read(np.array([at]))
        assert caught.value.example == at
    with pytest.raises(InputError, match="missing=median is unknown; use refuse, zero, mean, column or a number"):
        tables.load(folder, missing="median")


@pytest.mark.parametrize("value", [3.5e38, -1e39])
def test_a_number_beyond_float32_is_a_bad_record(tables, value):
    source = tables.load(tables.write(x=[1.5, value, 3.4e38], label=[0, 1, 1])).train
    assert source.read(np.array([0, 2]))[0]["x"].tolist() == [1.5, np.float32(3.4e38)]
    with pytest.raises(BadRecordError, match=r"column 'x' has .*, more than float32 can hold") as caught:
        source.read(np.arange(3))
    assert caught.value.example == 1


def test_text_is_ids_by_the_words_of_training(tables):
    folder = tables.write(x=[1, 2, 3, 4], y=["dog", "cat", "", "eel"], label=[0, 1, 1, 0])
    other = tables.write("eval", x=[1, 2], y=["cow", "dog"], label=[0, 1])
    data = tables.load(folder, features=("y",), eval_data_dir=other)
    assert (data.vocabulary, data.preprocessing.words) == ({"y": 4}, {"y": [b"cat", b"dog", b"eel"]})
    assert (rows(data.train)["y"], rows(data.evaluation)["y"]) == ([2, 1, 0, 3], [0, 2])
    assert tables.load(other, features=("y",)).ids != data.ids
    divided = tables.load(folder, features=("y",), validation_split=0.25)  # the last row is not trained on
    assert divided.preprocessing.words == {"y": [b"cat", b"dog"]}
    assert rows(divided.train)["y"] == [2, 1, 0, 0]


def test_a_new_table_is_read_by_the_preprocessing_of_the_data_trained_on(tables):
    """Few rows may look like other kinds; words, means, ids and classes are those of before, whatever they are here."""
    columns = {"y": ["10", "cat", "", "eel"], "x": [1.5, None, 2.5, 9.5], "id": [7, 8, 0, 2], "label": [*"ABBA"]}
    columns |= {"day": ["2024-02-29", "", "2024-03-01", "2024-03-02"]} if tables.is_csv else {}
    folder = tables.write(**columns)
    trained_on = tables.load(folder, missing="mean")
    saved = data_json.from_json(data_json.as_json(trained_on), "model.json")
    same = tables.load(folder, missing="mean", trained_on=saved)
    assert rows(same.train) == rows(trained_on.train)
    assert same.train.preprocessing_digest == trained_on.train.preprocessing_digest
    new = {"id": [1.0, 99.0], "y": [10, 11], "x": [None, None], "label": ["B", "B"]}
    new |= {"day": ["", ""]} if tables.is_csv else {}
    data = tables.load(tables.write("new", **new), missing="mean", trained_on=trained_on)
    assert rows(data.train) | {"day": 0} == {"id": [1, 99], "y": [1, 0], "x": [4.5, 4.5], "day": 0}
    assert data.train.read(np.arange(2))[1].tolist() == [1, 1]
    kept = ("num_classes", "vocabulary", "ids", "classes", "preprocessing")
    for each in (same, data):
        assert [getattr(each, name) for name in kept] == [getattr(trained_on, name) for name in kept]
    assert data.train.element_spec == trained_on.train.element_spec
    assert data.train.preprocessing_digest == trained_on.train.preprocessing_digest
    other = tables.write("other", **{**new, "x": ["a", "b"]})
    with pytest.raises(InputError, match=r"column 'x'.*(a number, as in the data of the run|write both in one type)"):
        tables.load(other, missing="mean", trained_on=trained_on)
    array = tables.load(tables.write("a", **{**HOLES, "label": [0, 1, 2, 0]}), array=True, missing="column")
    new = tables.write("b", full=[None, 1.0], price=[1, None], id=[None, 5], label=[0, 0])
    again = tables.load(new, missing="zero", trained_on=array)
    assert again.num_classes == 3
    refitted = tables.load(new, missing="zero", array=True).train
    assert again.train.preprocessing_digest == array.train.preprocessing_digest != refitted.preprocessing_digest
    assert again.train.read(np.array([1]))[0].tolist() == [[5, 0, 0, 1, 1]]
    with pytest.raises(BadRecordError, match="column 'full' has no value and has one in each row to train on"):
        again.train.read(np.array([0]))


def test_text_is_hashed_or_kept_where_that_is_asked_for(tables):
    folder = tables.write(y=["dog", "cat", "dog", ""], label=[0, 1, 1, 0])
    data = tables.load(folder, text="hash")
    dog, cat, again, empty = rows(data.train)["y"]
    assert dog == again != cat
    assert empty == 0
    assert max(abs(dog), abs(cat)) > 2**40
    assert (data.vocabulary, data.preprocessing.words) == (None, {})
    assert rows(tables.load(folder, text="keep").train)["y"] == [b"dog", b"cat", b"dog", b""]


def test_columns_named_by_texts_are_text(tables):
    folder = tables.write(zip=[123, 22], phone=[5, 6], label=[7, 12])
    data = tables.load(folder, texts=("zip", "label"))
    assert (data.preprocessing.words, data.classes) == ({"zip": [b"123", b"22"]}, ("12", "7"))
    assert data.train.read(np.arange(2))[1].tolist() == [1, 0]
    assert tables.load(folder).vocabulary == {"zip": 124, "phone": 7}


def test_labels_of_text_are_classes_and_those_that_training_has_not_are_bad_records(tables):
    folder = tables.write(x=[1, 2, 3], label=["dog", "cat", "dog"])
    data = tables.load(folder, eval_data_dir=tables.write("eval", x=[1, 2], label=["cat", "cow"]))
    assert (data.num_classes, data.classes) == (2, ("cat", "dog"))
    assert data.train.read(np.arange(3))[1].tolist() == [1, 0, 1]
    with pytest.raises(BadRecordError, match=r"label 'cow' is not among those of training \(cat, dog\)") as caught:
        data.evaluation.read(np.arange(2))
    assert caught.value.example == 1
    many = tables.load(tables.write("many", x=[1] * 2000, label=[f"c{n:05}" for n in range(2000)]))
    assert many.num_classes == 2000
    np.testing.assert_array_equal(many.train.read(np.arange(2000))[1], np.arange(2000))


def test_ids_far_larger_than_many_are_numbered_by_the_values_of_training(tables):
    users = [9_900_000_000_017, 100_002_317, None, 9_900_000_000_017, 0, 5_000_000]
    dense = [*range(10_001, 10_007)]
    other = tables.write("eval", user=[100_002_317, 6], item=[1, 2], dense=[7, 8], label=[0, 1])
    folder = tables.write(user=users, item=[9_999, 1, 2, 3, 4, 5], dense=dense, label=[0, 1, 0, 1, 0, 1])
    how = {"eval_data_dir": other, "missing": "zero", "features": ("user", "item")}
    data = tables.load(folder, **how)
    assert data.vocabulary == {"user": 5, "item": 10_000}
    assert rows(data.train)["user"] == [4, 3, 0, 4, 1, 2]
    assert rows(data.evaluation)["user"] == [3, 0]
    assert ["user", "int64", "id,", "4", "values"] in [line.split() for line in data.columns.splitlines()]
    divided = tables.load(folder, **how, validation_split=0.5)  # the last rows are not trained on
    assert (divided.vocabulary["user"], rows(divided.train)["user"]) == (3, [2, 1, 0, 2, 0, 0])
    assert data.ids != divided.ids
    saved = data_json.from_json(data_json.as_json(data), "model.json")
    assert saved.preprocessing == data.preprocessing
    new = tables.load(other, missing="zero", features=("user", "item"), trained_on=saved)
    assert (rows(new.train)["user"], new.vocabulary, new.ids) == ([3, 0], data.vocabulary, data.ids)
    assert new.train.preprocessing_digest == data.train.preprocessing_digest != divided.train.preprocessing_digest
    for kept in ({"keeps_ids": True}, {"text": "hash"}, {"text": "keep"}):
        raw = tables.load(folder, **how, **kept)
        assert rows(raw.train)["user"] == [each or 0 for each in users]
        assert raw.vocabulary["user"] == 9_900_000_000_018
    earlier = dataclasses.replace(saved, vocabulary=raw.vocabulary, preprocessing=raw.preprocessing)
    assert rows(tables.load(folder, **how, trained_on=earlier).train)["user"] == rows(raw.train)["user"]


def test_ids_are_numbered_only_if_their_range_is_sparse(tables, monkeypatch):
    half = [*range(0, 12_000, 2)]
    folder = tables.write(half=half, fifth=[5 * id for id in half], label=[id % 2 for id in half])
    assert tables.load(folder).vocabulary == {"half": 11_999, "fifth": 6_001}
    monkeypatch.setattr(fitting, "_MOST_VALUES", 5_000)
    with pytest.raises(InputError, match="'fifth' has more than 5,000 different ids, up to 59,990, too many"):
        tables.load(folder, validation_split=0.1)


def test_new_rows_may_lack_the_labels_that_are_not_needed(tables):
    folder = tables.write(x=[1, 2, 3], y=["a", "b", "a"], label=[*"ABA"])
    new = tables.write("new", y=["b", "c"], x=[3, 9])
    trained_on = tables.load(folder)
    for data in (
        tables.load(folder, eval_data_dir=new, needs_labels=False, trained_on=trained_on),
        tables.load(new, needs_labels=False, trained_on=trained_on),
    ):
        found = (data.evaluation or data.train).read(np.arange(2))
        assert {name: values.tolist() for name, values in found.items()} == {"x": [3, 9], "y": [2, 0]}
        assert (data.classes, data.vocabulary) == (trained_on.classes, trained_on.vocabulary)
    assert len(tables.load(folder, needs_labels=False, trained_on=trained_on).train.read(np.arange(2))) == 2
    with pytest.raises(InputError, match="has no column 'label'"):
        tables.load(folder, eval_data_dir=new, trained_on=trained_on)
