"""Paths that flags give: those that are none, or can't be used, are one line. In this process."""

from __future__ import annotations

import re

import pytest

from launch import paths
from launch.errors import UsageError

FLAGS = "run_dir init_from data_dir export_dir result_json result_jsonl result_html baseline".split()
NONE = dict.fromkeys(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket", "file:///tmp/run"])
def test_a_bucket_is_no_folder(name, path):
    with pytest.raises(UsageError, match=f"--{name}={path} is no path of a mounted file system; mount the bucket"):
        paths.check({**NONE, name: path})


@pytest.mark.parametrize("name", FLAGS)
def test_an_empty_path_is_not_taken_for_none(name):
    with pytest.raises(UsageError, match=rf"--{name} is empty \(a variable that is not set\?\); give a path or leave"):
        paths.check({**NONE, name: ""})


@pytest.mark.parametrize("name", ["run_dir", "init_from"])
@pytest.mark.parametrize("character", r"[]\*?{}")
def test_a_path_where_tensorflow_reads_no_checkpoint_is_refused(name, character):
    with pytest.raises(UsageError, match=re.escape(f"--{name}=/runs/a{character}b has a {character} in it")):
        paths.check({**NONE, name: f"/runs/a{character}b"})


def test_a_relative_path_is_judged_with_the_working_directory(tmp_path, monkeypatch):
    folder = tmp_path / "lr[1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=re.escape(f"--run_dir=first, which is {folder}/first, has a [ in it")):
        paths.check({**NONE, "run_dir": "first"})
    paths.check({**NONE, "data_dir": "first", "result_json": "a.json"})


def test_other_paths_are_let_through():
    paths.check(NONE)
    paths.check(dict.fromkeys(FLAGS, "runs/lr=0.1,seed:3 (second)~#+ü//x"))
