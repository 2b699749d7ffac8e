"""Files are there whole or not at all; what is not a file is written to."""

import json
import math
import os

import pytest

from crankshaft.runner.host import text_files


@pytest.fixture
def pipe(tmp_path):
    """(path of a named pipe, what was read from it once its writer was done)."""
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    with open(opened) as file:
        yield path, read
        read.append(file.read())
    assert path.is_fifo()
    assert json.loads(read[0]) == {"a": 1}


def test_a_result_goes_into_a_pipe(pipe):
    text_files.write_json(pipe[0], {"a": 1})


def test_a_pipe_that_nobody_reads_is_an_error_at_once_or_once_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_PIPE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"nobody reads it: .*pipe"):
        text_files.write_user_file(tmp_path / "pipe", "x")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        with pytest.raises(OSError, match=r"nobody reads it: .*pipe"):
            text_files.write_user_file(tmp_path / "pipe", "x" * (1 << 20))
        assert reader.read(1) == b"x"


def test_a_device_stays_one(tmp_path):
    """As root everything may be written to, /dev too."""
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    text_files.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert link.is_char_device()


def test_what_json_has_no_number_for_is_null(tmp_path):
    values = {"a": math.nan, "b": [1.5, {"c": -math.inf}], "d": "NaN"}
    as_read = {"a": None, "b": [1.5, {"c": None}], "d": "NaN"}
    text_files.write_json(tmp_path / "one.json", values)
    assert json.loads((tmp_path / "one.json").read_text(), parse_constant=pytest.fail) == as_read
