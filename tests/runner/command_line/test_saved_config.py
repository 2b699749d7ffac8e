"""The configuration that a run has left, as it is, damaged, and of earlier versions."""

from __future__ import annotations

import os
import re

import pytest

from crankshaft.runner.command_line import saved_config
from crankshaft.runner.command_line.flags import DECIDING, Flags
from crankshaft.runner.failures import UsageError

OF_DEFAULTS = {name: vars(Flags())[name] for name in DECIDING}


def test_a_folder_without_one_has_none_and_what_is_no_object_is_named(tmp_path):
    path = tmp_path / "config.json"
    assert saved_config.load(str(tmp_path)) is None
    for text, line in (
        ("{", r"is not JSON \(.*\); "),
        ("[1, NaN]", r'holds \[1, "NaN"\], which is not an object; '),
        ("{}", "has no flags; "),
        ('{"flags": 3}', "has flags=3, which is not an object; "),
        ('{"flags": {}}', "has no deciding; "),
        ('{"flags": {}, "deciding": {}, "keras": [1]}', r"has keras=\[1\], which is not an object; "),
        ('{"flags": {}, "deciding": {"model_arg": [1]}}', r"has model_arg=\[1\], which is not an object; "),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=f"^{path} {line}{re.escape(saved_config.FIX)}$"):
            saved_config.load(str(tmp_path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=r"can't be read \(it is not a regular file\)"):
        saved_config.load(str(tmp_path))
    path.unlink()
    path.symlink_to("nothing")
    with pytest.raises(UsageError, match=r"can't be read \(No such file or directory\)"):
        saved_config.load(str(tmp_path))


def test_what_decides_is_the_runs_and_has_defaults_where_a_flag_did_not_exist_yet():
    saved = {"flags": {}, "deciding": {}}
    defaults = {"outer_arg": {"learning_rate": 0.7, "momentum": 0.9}}
    assert saved_config.check("it", saved)["deciding"] == {**OF_DEFAULTS, **defaults}
    found = saved_config.check(
        "it",
        {
            "flags": {"seed": 3, "shuffle_buffer": 5, "progress": "off"},
            "deciding": {
                "seed": 4,
                "clip_value": 0.0,
                "gone": 1.5,
                "model_arg": None,
                "outer_arg": {"momentum": 0.5},
                "script_flags": {"a": 1},
            },
            "keras": {"epsilon": 1e-7},
        },
    )
    assert found["flags"] == {"seed": 3, "shuffle_buffer": 5, "progress": "off"}
    assert found["keras"] == {"epsilon": 1e-7}
    deciding = found["deciding"]
    assert (deciding["seed"], deciding["shuffle_buffer"], deciding["model_arg"]) == (4, 5, {})
    assert deciding["outer_arg"] == {"learning_rate": 0.7, "momentum": 0.5}
    assert (deciding["gone"], deciding["script_flags"]) == (1.5, {"a": 1})
    assert "clip_value" not in deciding  # which is gone, and was off


def test_a_folder_of_what_an_input_prepares_is_not_taken_from_a_run(caplog):
    values = {"input": "csv", "input_arg": {"prepared_dir": "/theirs", "label": "a"}}
    assert saved_config.without_places("it", values) == {"input": "csv", "input_arg": {"label": "a"}}
    assert "it: prepared_dir=/theirs is not taken from a run, as it is written to" in caplog.text
    caplog.clear()
    for plain in ({"input_arg": {"label": "a"}}, {"input_arg": {}}, {"input_arg": None}, {}):
        assert saved_config.without_places("it", plain) == plain
    assert caplog.text == ""
