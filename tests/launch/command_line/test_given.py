"""Flags from files: YAML, JSON, and what a run has left; the command line wins, and a file that is none is one line."""

import json

import pytest

from crankshaft.launch.command_line import flags as _  # noqa: F401 (defines them)
from crankshaft.launch.command_line import given
from crankshaft.launch.errors import UsageError
from tests.launch.conftest import MLP

YAML = """\
# A comment.
model: mlp
model_arg:
  hidden_units: [16, 8]
  dropout: 0.1
input: digits
learning_rate: 1e-2
train_steps: 3
debug: false
jit: "off"
result_json: null
weight_decay_exclude: "bias|a: b"
"""


def test_a_file_gives_flags_by_name(tmp_path):
    (tmp_path / "run.yaml").write_text(YAML)
    assert given.expanded([f"--config={tmp_path}/run.yaml", "--train_steps=5"]) == [
        *("--model=mlp", "--model_arg=hidden_units=16,8", "--model_arg=dropout=0.1", "--input=digits"),
        *("--learning_rate=1e-2", "--train_steps=3", "--debug=false", "--jit=off", "--weight_decay_exclude=bias|a: b"),
        *(f"--config={tmp_path}/run.yaml", "--train_steps=5"),
    ]
    assert given.expanded(["--config", f"{tmp_path}/run.yaml"])[0] == "--model=mlp"


def test_a_run_is_made_again_from_the_config_that_it_left(inside, tmp_path):
    (tmp_path / "run.yaml").write_text(YAML)
    inside(f"--config={tmp_path}/run.yaml", "--learning_rate=0.02", f"--run_dir={tmp_path}/first").ok()
    first = json.loads((tmp_path / "first" / "config.json").read_text())
    assert first["flags"]["learning_rate"] == 0.02
    assert first["deciding"]["model_arg"]["hidden_units"] == [16, 8]
    inside(f"--config={tmp_path}/first/config.json", f"--run_dir={tmp_path}/again").ok()
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["deciding"] == first["deciding"]
    results = [json.loads((tmp_path / name / "result.json").read_text())["eval"] for name in ("first", "again")]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("learning_rat: 1\n", "run.yaml: --learning_rat is unknown; did you mean"),
        ("train_steps: many\n", "run.yaml: --train_steps=many can't be used: it takes an integer"),
        ("- a\n- b\n", "run.yaml is no mapping of flags; write lines such as learning_rate: 0.01"),
        ("", "run.yaml is no mapping of flags"),
        ("a: [1\n", "run.yaml is not readable as such (while parsing a flow sequence"),
        ("1: 2\n", "run.yaml is no mapping of flags"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(inside, tmp_path, text, line):
    (tmp_path / "run.yaml").write_text(text)
    outcome = inside(*MLP, f"--config={tmp_path}/run.yaml")
    assert outcome.code == 2
    assert line in outcome.error


def test_a_mistake_beside_a_file_is_not_the_files(inside, tmp_path):
    (tmp_path / "run.yaml").write_text(YAML)
    outcome = inside(f"--config={tmp_path}/run.yaml", "--learning_rat=1")
    assert outcome.error.startswith("--learning_rat is unknown")


def test_a_runs_config_is_tried_without_a_folder(inside, tmp_path):
    run = (*MLP, "--mode=train", "--train_steps=1", "--checkpoint_every_steps=7")
    inside(*run, f"--run_dir={tmp_path}/run").ok()
    config = f"--config={tmp_path}/run/config.json"
    inside(config).ok()
    assert "--checkpoint_every_steps=7" not in given.expanded([config])
    assert "--checkpoint_every_steps=7" in given.expanded([config, "--run_dir", "again"])


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=r"^--config=.* can't be read \(.*\); give a YAML or JSON file$"):
            given.expanded([f"--config={path}"])
    with pytest.raises(UsageError, match=r"^--config is empty"):
        given.expanded(["--config="])
