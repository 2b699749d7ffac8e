"""What is known of the data comes back from a file as it was, and what is not of its form is refused."""

import dataclasses
import json

import numpy as np
import pytest

from crankshaft.engine.data.preprocessing import ColumnPreprocessing, Preprocessing
from crankshaft.engine.data.run_data import Data
from crankshaft.input import data_json
from crankshaft.input.files import tokens


def test_what_is_known_comes_back_from_a_file():
    words = b"bern", b"a\nb", b"\xff\xfe", "Zürich".encode()
    columns = {
        "city": ColumnPreprocessing("category", words=words),
        "day": ColumnPreprocessing("date", 1.5, is_flagged=True),
    }
    properties = (np.int64(3), {"city": np.int64(5)}, "by name", tokens.Bytes(), ("a", "b", "c"))
    splits = Data("train", None, *properties, preprocessing=Preprocessing(columns, ("city", "day")))
    kept = json.loads(json.dumps(data_json.as_json(splits)))
    again = data_json.from_json({**kept, "features": {}}, "here")
    assert isinstance(again.tokens, tokens.Bytes)
    assert dataclasses.replace(again, tokens=None) == dataclasses.replace(splits, train=None, tokens=None)
    assert "preprocessing" not in data_json.as_json(Data("train"))


@pytest.mark.parametrize(
    "content",
    [
        {"num_classes": "3"},
        {"ids": ["bytes"]},
        {"vocabulary": {"city": "5"}},
        {"vocabulary": [5]},
        {"columns": {}},
        {"class_weight": [1]},
        {"classes": [1]},
        {"classes": 3},
        {"preprocessing": {"columns": {"city": {"kind": "category", "words": [None]}}, "array": []}},
        {"preprocessing": {"columns": {"city": {"kind": "none"}}, "array": []}},
        {"preprocessing": {"columns": {"city": {"kind": "number", "fill": "x"}}, "array": []}},
    ],
)
def test_what_is_not_of_its_form_is_refused(content):
    with pytest.raises((TypeError, ValueError)):
        data_json.from_json(content, "here")
