"""What an evaluation keeps of each example: the same in memory, in a file, and in part there."""

import logging
import math
import tempfile

import numpy as np
import pytest

from crankshaft.engine.metrics.predictions import Collector, Predictions, in_order, joined
from tests.limits import files_no_larger_than


def text(*values):
    return np.array(values, object)


# Batches of three, no, and two examples: numbers, text, rows that are padded, and of another type later.
BATCHES = [
    {"of": (np.float32([0, 1, 2]), text(b"a\0", b"", b"long")), "rows": np.int32([[1, 2], [3, 4], [5, 6]])},
    {"of": (np.zeros(0, np.float32), text()), "rows": np.zeros((0, 3), np.int32)},
    {"of": (np.float32([3, 4]), text(b"longer", b"b")), "rows": np.float64([[7], [8]])},
]
ROWS = [[1, 2, 0], [3, 4, 0], [5, 6, 0], [7, 0, 0], [8, 0, 0]]


def collected(batches, *arguments):
    collector = Collector(*arguments)
    for batch in batches:
        collector.add(batch)
    return collector.all()


@pytest.mark.parametrize("most_bytes", [math.inf, 0, 41, 42, 12 + 6 + 24 + 7 + 8 + 16])
def test_all_batches_are_joined_wherever_they_are_kept(tmp_path, caplog, most_bytes):
    """The first takes 12 bytes of numbers, 24 of references with 6 of text, and 24 of rows."""
    caplog.set_level(logging.INFO)
    folder = tmp_path / "made"
    found = collected(BATCHES, most_bytes, str(folder), "evaluation at step 7")
    assert found["of"][0].tolist() == [0, 1, 2, 3, 4]
    assert found["of"][1].tolist() == [b"a\0", b"", b"long", b"longer", b"b"]
    assert found["rows"].tolist() == ROWS
    assert [each.dtype for each in (*found["of"], found["rows"])] == [np.float32, object, np.float64]
    is_in_file = most_bytes < math.inf
    assert isinstance(found["rows"], np.memmap) == is_in_file
    lines = [record.getMessage() for record in caplog.records]
    where = f"so they are in temporary files in {folder}"
    assert len(lines) == is_in_file
    assert not is_in_file or lines[0].startswith("evaluation at step 7: its predictions take more than ")
    assert not is_in_file or lines[0].endswith(where)
    assert folder.exists() == is_in_file
    assert not is_in_file or not any(folder.iterdir())  # a killed process leaves none


def test_what_takes_as_much_memory_as_is_allowed_is_kept_there():
    batch = {"numbers": np.float32([1, 2, 3]), "text": text(b"ab", b"", b"abcd")}
    num_bytes = 12 + 3 * 8 + 6
    assert type(collected([batch], num_bytes)["numbers"]) is np.ndarray
    assert type(collected([batch], num_bytes - 1)["numbers"]) is np.memmap
    assert type(collected([batch, batch], 2 * num_bytes)["numbers"]) is np.ndarray
    assert type(collected([batch, batch], 2 * num_bytes - 1)["numbers"]) is np.memmap


def test_without_a_folder_the_systems_is_named(caplog):
    caplog.set_level(logging.INFO)
    assert collected([np.arange(3)], 0).tolist() == [0, 1, 2]
    assert f"in temporary files in {tempfile.gettempdir()}" in caplog.text


def test_no_examples_are_none_in_a_file_too():
    assert collected([np.zeros((0, 3), np.float32)], -1).shape == (0, 3)


def test_a_full_disk_is_named(tmp_path):
    with files_no_larger_than(10), pytest.raises(OSError, match="File too large") as caught:
        collected([np.arange(5000)], 0, str(tmp_path))
    assert caught.value.filename == str(tmp_path)


def test_pieces_are_sorted_by_their_keys_and_keep_their_order_at_equal_ones():
    pieces = [[np.int64([4, 4]), np.int32([[1], [2]])], [np.int64([2, 3, 4]), np.int32([[3, 3], [4, 4], [5, 5]])]]
    assert in_order(pieces)[0].tolist() == [[3, 3], [4, 4], [1, 0], [2, 0], [5, 5]]
    first, second = ([piece] for piece in pieces)
    (own,) = in_order(first)
    assert own.tolist() == [[1], [2]]
    contents = []
    in_order(second, lambda content: [contents.append(content) or content])
    (found,) = in_order(first, lambda content: [content, *contents])
    assert found.tolist() == [[3, 3], [4, 4], [1, 0], [2, 0], [5, 5]]


def test_padding_of_text_is_empty_text():
    assert joined([text(b"a")[:, None], np.array([[b"b", b"c"]], object)]).tolist() == [[b"a", b""], [b"b", b"c"]]


def test_groups_have_the_examples_of_each_value_in_their_order():
    predictions = Predictions({"user": np.array([7, 3, 7, 9, 3, 7]), "score": np.arange(6)}, is_partial=True)
    assert [group.tolist() for group in predictions.groups("user")] == [[1, 4], [0, 2, 5], [3]]
    assert (predictions.num_examples, predictions.is_partial) == (6, True)
    assert not Predictions({"score": np.arange(6)}).is_partial
