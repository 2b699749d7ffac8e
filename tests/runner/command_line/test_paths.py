"""Paths that flags give: those that are none, or can't be used, are one line. In this process."""

from __future__ import annotations

import os
import re

import pytest

from crankshaft.runner.command_line import paths, rules
from crankshaft.runner.command_line.flags import FIELDS
from crankshaft.runner.failures import UsageError

pytestmark = pytest.mark.thorough

FLAGS = """config init_from output result_json baseline export_since run_dir data_dir eval_data_dir export_dir
    tensorboard_dir""".split()
KINDS = ("config", "run_dir", "data_dir")  # a local path, one that may be remote, paths of files
NONE = dict.fromkeys(FLAGS)


def refusal(name: str, path: str) -> str:
    """Returns the message about a flag's value."""
    with pytest.raises(UsageError) as error:
        rules.coerce(FIELDS[name], path)
    return error.value.message


def parsed(**values: str) -> dict:
    """The values of flags of paths, of a call that gives these."""
    return {**NONE, **{name: rules.coerce(FIELDS[name], value) for name, value in values.items()}}


def test_a_bucket_is_no_folder():
    cure = "it is not a path of a mounted file system; mount the bucket or give a local folder"
    expected = f"config=gs://bucket/run can't be used: {cure}; see crankshaft train --help"
    assert refusal("config", "gs://bucket/run") == expected


@pytest.mark.parametrize("name", KINDS)
def test_an_empty_path_is_not_taken_for_none(name):
    cure = "give a path, or leave it out"
    assert refusal(name, "") == f"{name} is empty (a variable that is not set?); {cure}"


@pytest.mark.parametrize("name", ["run_dir", "init_from"])
def test_a_path_where_tensorflow_reads_no_checkpoint_is_refused(name):
    for character in r"[]\*?{}":
        with pytest.raises(UsageError, match=re.escape(f"{name}=/runs/a{character}b has a {character} in it")):
            paths.check({**NONE, name: f"/runs/a{character}b"})


def test_a_relative_path_is_judged_with_the_working_directory(tmp_path, monkeypatch):
    folder = tmp_path / "lr[1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=re.escape(f"run_dir={folder}/first has a [ in it")):
        paths.check(parsed(run_dir="first"))
    paths.check(parsed(data_dir="first", result_json="a.json"))


def test_each_flag_of_a_path_is_checked():
    kinds = (rules.Path, rules.FilePaths)
    assert {name for name, field in FIELDS.items() if isinstance(field.metadata["info"].kind, kinds)} == set(FLAGS)


@pytest.mark.parametrize("name", KINDS)
def test_a_home_is_found_as_by_a_shell(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    here = os.getcwd()
    for given, meant in (("~/x", "/home/me/x"), ("~", "/home/me"), ("./~/x", f"{here}/~/x"), ("x~/~", f"{here}/x~/~")):
        assert parsed(**{name: given})[name] == meant


@pytest.mark.parametrize("name", KINDS)
def test_a_relative_path_is_of_the_folder_in_which_it_was_read(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, meant in ((".", ""), ("a/./b", "/a/b"), ("link/../a", "/link/../a"), ("a/", "/a/")):
        assert parsed(**{name: given})[name] == f"{tmp_path}{meant}"
    if name == "data_dir":
        assert parsed(**{name: "a/*,gs://b/c,/d"})[name] == f"{tmp_path}/a/*,gs://b/c,/d"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    why = "it is relative to the current folder, which was removed; give a path from /; see crankshaft train --help"
    assert refusal(name, "a") == f"{name}=a can't be used: {why}"
    assert parsed(**{name: "/a"})[name] == "/a"


@pytest.mark.parametrize("name", KINDS)
def test_a_path_that_is_not_utf_8_is_refused(name, tmp_path, monkeypatch):
    """No JSON file can name it, nor TensorFlow's Python interface; a relative path may be one by its folder."""
    why = "can't be used: it has {} in it, which is not UTF-8; rename it, or use another; see crankshaft train --help"
    path = "/a\udce4\udcffb"
    assert refusal(name, path) == f"{name}={path} {why.format('#e4#ff')}".replace("#", "\\x")
    (folder := tmp_path / os.fsdecode(b"\xfc")).mkdir()
    monkeypatch.chdir(folder)
    assert refusal(name, "b") == f"{name}=b {why.format('#fc')}".replace("#", "\\x")
    assert parsed(**{name: "/ü"})[name] == "/ü"


SIZES = """
from crankshaft import Trainer, main, mean
import numpy as np, tensorflow as tf
class Sizes(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    def loss(self, outputs, batch):
        return mean(outputs)
    def metrics(self, outputs, batch):
        return {"Größe": mean(outputs)}
x = np.ones([20, 2], np.float32)
main(Sizes, data=((x, x),) * 2)
"""


@pytest.mark.slow
def test_in_a_locale_that_is_not_utf_8_output_is_escaped_and_a_path_refused(crank, tmp_path, monkeypatch):
    """TensorFlow names files in UTF-8 everywhere, and only a new process can make Python do so."""
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "sizes.py").write_text(SIZES, encoding="utf-8")
    asked = ("--train_steps=2", "--global_batch_size=4", "--jit=off", "--progress=plain", "--eval_every_steps=2")
    outcome = crank(*asked, f"--run_dir={tmp_path}/run", script=tmp_path / "sizes.py").ok()
    assert "evaluation at step 2: Gr\\xf6\\xdfe " in outcome.out
    refused = crank("--model=logistic", "--input=digits", f"--run_dir={tmp_path}/\u732b", tensorflow=False)
    why = (
        "Python names files in ascii here, by the locale, and TensorFlow in UTF-8; set PYTHONUTF8=1 before the program"
    )
    assert refused.mistake.startswith(f"run_dir={tmp_path}/\\u732b can't be used: {why}")
    monkeypatch.setenv("PYTHONUTF8", "1")
    mistaken = crank("--model=logistic", "--input=digits", f"--data_dir={tmp_path}/\u732b", tensorflow=False).mistake
    assert mistaken.startswith(f"data_dir={tmp_path}/\u732b does not exist")


def test_files_with_commas_are_each_found_in_a_home_or_a_bucket(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parsed(data_dir="~/a,gs://bucket/b*,~/c")["data_dir"] == "/home/me/a,gs://bucket/b*,/home/me/c"


def test_a_run_in_a_home_is_printed_as_it_is(crank, tmp_path, monkeypatch):
    """Its logs, which crankshaft local keeps, lie there too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("from crankshaft.launch import train\n\ntrain.main()\n")
    asked = ("--", tmp_path / "task.py", "--run_dir=~/run", "--data_dir=~/none", "--model=mlp", "--input=digits")
    outcome = crank("--workers=1", *asked, command="local", tensorflow=False)
    assert f"data_dir={tmp_path}/none does not exist" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "task.py"]
    assert (tmp_path / "run" / "logs").is_dir()


def test_other_paths_are_let_through():
    paths.check(NONE)
    paths.check(dict.fromkeys(FLAGS, "runs/lr=0.1,seed:3 (second)~#+ü//x"))


def test_a_path_that_ends_as_a_folders_is_one(tmp_path):
    with pytest.raises(UsageError, match=f"result_json={tmp_path}/out/ is a folder; give the path of a file"):
        paths.check_results({**NONE, "result_json": f"{tmp_path}/out/"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["config.json", ".lock"])
def test_a_file_of_the_runs_own_takes_no_result(tmp_path, file):
    (tmp_path / "link").symlink_to(tmp_path)
    values = {**NONE, "run_dir": str(tmp_path), "result_json": f"{tmp_path}/link/{file}"}
    with pytest.raises(UsageError, match=f"result_json={tmp_path}/link/{file} is a file of the run's own; give"):
        paths.check_results(values)
    paths.check_results({**values, "result_json": f"{tmp_path}/other.json"})
    paths.check_results({**values, "result_json": f"{tmp_path}/result.json"})  # the same twice
