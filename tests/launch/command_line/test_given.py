"""Flags from files: YAML, JSON, and what a run has left; the command line wins, and a file that is none is one line."""

import functools
import itertools
import json
import os

import pytest
from absl import flags
from absl.testing import flagsaver

from crankshaft import run
from crankshaft.launch import train
from crankshaft.launch.benchmark.result import read_baseline
from crankshaft.launch.command_line import checks, given, own_files, registry, values
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
jit: off
result_json: null
freeze: "bias|a: b"
"""


def test_a_file_gives_flags_by_name(tmp_path):
    (tmp_path / "run.yaml").write_text(YAML)
    assert given.expanded([f"--config={tmp_path}/run.yaml", "--train_steps=5"]) == [
        *("--model=mlp", "--model_arg=hidden_units=[16,8]", "--model_arg=dropout=0.1", "--input=digits"),
        *("--learning_rate=1e-2", "--train_steps=3", "--debug=false", "--jit=off", "--freeze=bias|a: b"),
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


def test_the_command_line_wins_over_a_files_length_in_either_unit(inside, tmp_path):
    """A later file over an earlier one too, a run's own file, and a file of words."""
    for name, text in (
        ("long.yaml", f"{YAML}\n".replace("train_steps: 3", "train_epochs: 2")),
        ("s.yaml", "train_steps: 7"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "words").write_text("--train_epochs=2\n--benchmark_seconds=4\n")
    long, run_dir = f"--config={tmp_path}/long.yaml", tmp_path / "run"
    inside(long, "--train_steps=4", f"--run_dir={run_dir}").ok()
    inside(f"--config={run_dir}/config.json", "--train_epochs=0.25", f"--run_dir={tmp_path}/epochs").ok()
    done = [json.loads((path / "result.json").read_text())["step"] for path in (run_dir, tmp_path / "epochs")]
    assert done == [4, 6]  # of 23 steps an epoch
    assert run(config=tmp_path / "long.yaml", train_steps=5, progress="off").result["step"] == 5
    assert "--train_epochs=2" not in given.expanded([long, f"--config={tmp_path}/s.yaml"])
    for words in (["--train_steps=4", "--flagfile=words"], ["--flagfile=words", "-train_steps", "4"]):
        found = given.expanded([word.replace("=words", f"={tmp_path}/words") for word in words])
        assert "--train_epochs=2" not in found
        assert "--benchmark_seconds=4" in found
    both = inside("--train_steps=4", "--train_epochs=2", long)
    assert both.mistake == "--train_steps and --train_epochs are both given; use one of them"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("learning_rat: 1\n", "run.yaml: --learning_rat is unknown; did you mean"),
        ("train_steps: many\n", "run.yaml: --train_steps=many can't be used: it takes an integer"),
        ("- a\n- b\n", "run.yaml is not a mapping of flags; write lines such as learning_rate: 0.01"),
        ("", "run.yaml is not a mapping of flags"),
        ("a: [1\n", "run.yaml is not readable as such (while parsing a flow sequence"),
        ("1: 2\n", "run.yaml: --1 is unknown"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(inside, tmp_path, text, line):
    (tmp_path / "run.yaml").write_text(text)
    assert line in inside(*MLP, f"--config={tmp_path}/run.yaml").mistake


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


ALIASES = "a: &a [x, x, x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefgh"))


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.yaml", ALIASES, r"is not readable as such \(\*a repeats another part; write it out\); mend it"),
        ("run.yaml", "[" * 100_000, "is nested too deep"),
        ("run.json", '{"a":' * 100_000, "is nested too deep"),
        ("run.yaml", "seed: 1\nseed: 2\n", "seed is given twice"),
        ("run.json", '{"seed": 1, "seed": 2}', "seed is given twice"),
        ("run.yaml", "model_arg: {dropout: 0.1, dropout: 0.2}\n", "dropout is given twice"),
        ("run.yaml", "model_arg: [dropout=0, dropout=1]", "run.yaml: --model_arg dropout is given twice, 0 and 1"),
        ("run.yaml", "mode: [train]\n", r"--mode=\['train'\] is a list, and not one value; give one of train_and_eval"),
        ("run.yaml", "seed: {}\n", "--seed={} is a dict, and not one value; give an integer from 0"),
        ("run.yaml", "model_arg:\n  hidden_units: [[1, 2], [3]]\n", r"--model_arg hidden_units=\['1', '2'\] is a list"),
        ("run.yaml", "data_dir: [[a], b]\n", r"--data_dir=\['a'\] is a list, and not one value"),
        ("run.json", '{"flags": 3, "deciding": {}}', "its flags is not an object"),
        ("run.json", '{"flags": {}, "deciding": [3]}', "its deciding is not an object"),
        ("run.json", '{"flags": {}, "deciding": {"script_flags": 3}}', "its script_flags is not an object"),
        ("run.yaml", "#" * (1 << 20) + "\n", "has more than 1 MiB; give a YAML or JSON file"),
    ],
)
def test_a_file_of_flags_holds_each_once_and_flat(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=line):
        given.expanded([f"--config={tmp_path / name}"])


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"seed": {}}, "--seed={} is a dict, and not one value; give an integer from 0 to 2147483647"),
        ({"learning_rate": [1]}, r"--learning_rate=\[1\] is a list, and not one value; give a number from 0"),
        ({"model_arg": {"units": {"a": 1}}}, r"--model_arg units={'a': 1} is a dict, and not one value"),
        ({"input_arg": {"features": ["a,b"]}}, "--input_arg features: a,b has a comma in it"),
        ({"model": object()}, "--model=<object object at .* is a object, and not one value; give a name"),
    ],
)
def test_a_keyword_of_another_kind_is_not_taken_for_a_value(keywords, line):
    with pytest.raises(UsageError, match=line):
        list(given.words(keywords))


def test_a_number_is_written_in_one_way_wherever_it_is_given(tmp_path):
    for text in ("010", "0x10", "0o10", "1_0", "1e1", "٣"):
        (tmp_path / "run.yaml").write_text(f"train_steps: {text}\n")
        for words in ([f"--train_steps={text}"], [f"--config={tmp_path}/run.yaml"], list(given.words({"seed": text}))):
            with flagsaver.flagsaver(), pytest.raises(UsageError, match=f"={text} can't be used: it takes an integer"):
                train.read_flags(["crankshaft train", *words], flags.FLAGS)
        entry = registry.Entry("mlp", "", {"hidden_units": (128,), "dropout": 0.0})
        with pytest.raises(UsageError, match=f"hidden_units={text} is not such a list"):
            registry.parse_arguments("model_arg", [f"hidden_units={text}"], entry)
    assert values.number("1e-05", whole=False) == 1e-5
    for text in ("", ",", "64,,64", "[]", "64,"):
        with pytest.raises(UsageError, match=r"hidden_units=.* is not such a list; give a value like the default, 128"):
            registry.parse_arguments("model_arg", [f"hidden_units={text}"], entry)
    parsed = registry.parse_arguments("model_arg", ["hidden_units=(64, 32)", "dropout=1e-1"], entry)
    assert parsed == {"hidden_units": (64, 32), "dropout": 0.1}


def test_an_argument_given_twice_is_refused_but_the_command_line_wins_over_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("model_arg: {dropout: 0.5}\n")
    file, word = f"--config={tmp_path}/run.yaml", "--model_arg=dropout=0.1"
    assert given.expanded([file, word]) == ["--model_arg=dropout=0.5", file, word]
    with pytest.raises(UsageError, match=r"^--model_arg dropout is given twice, 0.1 and 0.2; leave one out$"):
        given.expanded([word, "--model_arg", "dropout=0.2"])


def test_a_flagfile_is_read_in_its_place(tmp_path):
    (tmp_path / "inner").write_text("# Steps\n--train_steps=3\n")
    (tmp_path / "outer").write_text(f"--seed=1\n\n--flagfile={tmp_path}/inner\n// the end\n")
    assert given.without_flagfiles(["--a=1", "--flagfile", f"{tmp_path}/outer", "--b=2"]) == [
        *("--a=1", "--seed=1", "--train_steps=3", "--b=2")
    ]
    (tmp_path / "inner").write_text(f"--flagfile={tmp_path}/inner\n--flagfile={tmp_path}/inner\n")
    with pytest.raises(UsageError, match=r"is the 101th to be read; files that name one another have no end$"):
        given.without_flagfiles([f"--flagfile={tmp_path}/inner"])


def test_no_flag_waits_for_a_pipe_or_reads_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "ckpt-1.index")
    for path in (tmp_path / "pipe", "/dev/zero"):
        for flag in ("config", "flagfile"):
            with pytest.raises(
                UsageError, match=rf"^--{flag}={path} can't be read \(it is not a regular file\); give a"
            ):
                given.expanded([f"--{flag}={path}"])
        for find in (functools.partial(own_files.compiled, "model"), read_baseline, checks.check_init_from):
            with pytest.raises(UsageError, match="it is not a regular file"):
                find(str(path))
    with pytest.raises(UsageError, match="it is not a regular file"):
        checks.check_init_from(f"{tmp_path}/ckpt-1")


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=r"^--config=.* can't be read \(.*\); give a YAML or JSON file of flags$"):
            given.expanded([f"--config={path}"])
    with pytest.raises(UsageError, match=r"^--config is empty"):
        given.expanded(["--config="])
