"""What is known of the data comes back from a file as it was, and what is not of its form is refused."""

import dataclasses
import json

import numpy as np
import pytest

from crankshaft.engine.data.data import Data
from crankshaft.engine.data.preprocessing import ColumnPreprocessing
from crankshaft.input import known
from crankshaft.input.files import tokens


def test_what_is_known_comes_back_from_a_file():
    words = {"city": [b"bern", b"a\nb", b"\xff\xfe", "Zürich".encode()]}
    splits = Data("train", None, np.int64(3), {"city": np.int64(5)}, "by name", tokens.Bytes(), ("a", "b", "c"), words)
    kept = json.loads(json.dumps(known.as_json(splits)))
    again = known.from_json({**kept, "features": {}}, "here")
    assert isinstance(again.tokens, tokens.Bytes)
    assert dataclasses.replace(again, tokens=None) == Data(
        None, None, 3, {"city": 5}, "by name", None, ("a", "b", "c"), words
    )


def test_preprocessing_is_kept_under_the_name_that_saved_runs_have():
    data = Data("train", None, preprocessing={"day": ColumnPreprocessing("date", 1.5)})
    kept = json.loads(json.dumps(known.as_json(data)))
    assert kept == {"treatments": {"day": {"kind": "date", "fill": 1.5, "is_flagged": False, "places": []}}}
    assert known.from_json(kept, "here") == dataclasses.replace(data, train=None)


@pytest.mark.parametrize("content", [{"classes": [1]}, {"classes": 3}, {"words": [["a"]]}, {"words": {"city": [None]}}])
def test_what_is_not_of_its_form_is_refused(content):
    with pytest.raises(TypeError):
        known.from_json(content, "here")
