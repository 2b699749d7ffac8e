"""Flags' values from a command line, keywords, YAML, JSON, and what a run has left: the same from each, or one line."""

import collections
import enum
import fractions
import functools
import itertools
import json
import math
import os
import pathlib

import numpy as np
import pytest

from crankshaft import run
from crankshaft.parts.benchmark.result import read_baseline
from crankshaft.runner.command_line import checks, parsing, registry, rules, user_files
from crankshaft.runner.command_line.flags import FIELDS
from crankshaft.runner.failures import UsageError

pytestmark = pytest.mark.thorough

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


def values_of(*words, **keywords) -> dict:
    """The values that words of a command line give, or keywords."""
    return parsing.from_keywords(keywords)[0] if keywords else parsing.from_argv(["crankshaft train", *map(str, words)])


def test_a_file_gives_flags_by_name(tmp_path):
    (tmp_path / "run.yaml").write_text(YAML)
    expected = {
        "model": "mlp",
        "model_arg": {"hidden_units": ["16", "8"], "dropout": "0.1"},
        "input": "digits",
        "learning_rate": 0.01,
        "train_steps": 5,
        "debug": False,
        "jit": "off",
        "freeze": ["bias|a: b"],
        "config": f"{tmp_path}/run.yaml",
    }
    assert values_of(f"--config={tmp_path}/run.yaml", "--train_steps=5") == expected
    assert values_of("-train_steps", "5", "--config", f"{tmp_path}/run.yaml", "--nodebug") == expected
    assert values_of(config=tmp_path / "run.yaml", train_steps=5) == expected
    entry = registry.Entry("mlp", "", {"hidden_units": (128,), "dropout": 0.0})
    arguments = registry.coerce_arguments("model_arg", expected["model_arg"], entry)
    assert arguments == {"hidden_units": (16, 8), "dropout": 0.1}


def test_a_run_is_made_again_from_the_config_that_it_left_and_tried_without_a_folder(inside, tmp_path):
    """The command line wins over the file, also over its length in the other unit; so do keywords."""
    (tmp_path / "run.yaml").write_text(YAML.replace("train_steps: 3", "train_epochs: 2"))
    given = ("--learning_rate=0.02", "--train_steps=4", "--checkpoint_every_steps=7")
    inside(f"--config={tmp_path}/run.yaml", *given, f"--run_dir={tmp_path}/first").ok()
    config = f"{tmp_path}/first/config.json"
    inside(f"--config={config}", f"--run_dir={tmp_path}/again").ok()
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "again"))
    assert first["flags"]["learning_rate"] == 0.02
    assert first["deciding"]["model_arg"]["hidden_units"] == [16, 8]
    assert again["deciding"] == first["deciding"]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("first", "again")]
    assert results[0]["step"] == results[1]["step"] == 4
    assert results[0]["eval"] == results[1]["eval"]
    assert run(config=config, train_epochs=0.25, progress="off").result["step"] == 6  # of 23 steps an epoch
    assert "checkpoint_every_steps" not in values_of(f"--config={config}")
    assert values_of(f"--config={config}", "--run_dir", "again")["checkpoint_every_steps"] == 7


def test_a_later_files_length_wins_in_either_unit_and_two_at_once_are_refused(inside, tmp_path):
    (tmp_path / "long.yaml").write_text(YAML.replace("train_steps: 3", "train_epochs: 2"))
    (tmp_path / "s.yaml").write_text("train_steps: 7")
    (tmp_path / "words").write_text("--train_epochs=2\n--seed=4\n")
    long = f"--config={tmp_path}/long.yaml"
    assert "train_epochs" not in values_of(long, f"--config={tmp_path}/s.yaml")
    for words in (["--train_steps=4", "--flagfile=words"], ["--flagfile=words", "-train_steps", "4"]):
        found = values_of(*(word.replace("=words", f"={tmp_path}/words") for word in words))
        assert "train_epochs" not in found
        assert found["seed"] == 4
    both = inside("--train_steps=4", "--train_epochs=2", long)
    assert both.mistake == "train_steps and train_epochs are both given; use one of them"


def test_a_mistake_beside_a_file_is_not_the_files(inside, tmp_path):
    (tmp_path / "run.yaml").write_text(YAML)
    outcome = inside(f"--config={tmp_path}/run.yaml", "--learning_rat=1")
    assert outcome.error.startswith("learning_rat is unknown")


ALIASES = "a: &a [x, x, x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefgh"))


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.yaml", "learning_rat: 1\n", "run.yaml: learning_rat is unknown; did you mean"),
        ("run.yaml", "train_steps: many\n", "run.yaml: train_steps=many can't be used: it takes an integer"),
        ("run.yaml", "- a\n- b\n", "run.yaml is not a mapping of flags; write lines such as learning_rate: 0.01"),
        ("run.yaml", "", "run.yaml is not a mapping of flags"),
        ("run.yaml", "a: [1\n", r"run.yaml is not readable as such \(while parsing a flow sequence"),
        ("run.yaml", "1: 2\n", "run.yaml: 1 is unknown"),
        ("run.yaml", ALIASES, r"is not readable as such \(\*a repeats another part; write it out\); mend it"),
        ("run.yaml", "[" * 100_000, "is nested too deep"),
        ("run.json", '{"a":' * 100_000, "is nested too deep"),
        ("run.yaml", "seed: 1\nseed: 2\n", "seed is set twice"),
        ("run.json", '{"seed": 1, "seed": 2}', "seed is set twice"),
        ("run.yaml", "model_arg: {dropout: 0.1, dropout: 0.2}\n", "dropout is set twice"),
        ("run.yaml", "model_arg: [dropout=0, dropout=1]", "run.yaml: model_arg dropout is set twice, 0 and 1"),
        ("run.yaml", "mode: [train]\n", r"mode=\['train'\] is a list, and not one value; give one of train_and_eval"),
        ("run.yaml", "seed: {}\n", "seed={} is a dict, and not one value; give an integer from 0"),
        ("run.yaml", "data_dir: [[a], b]\n", r"data_dir=\[\['a'\], 'b'\] is a list, and not one value"),
        ("run.json", '{"flags": 3, "deciding": {}}', "its flags is not an object"),
        ("run.json", '{"flags": {}, "deciding": [3]}', "its deciding is not an object"),
        ("run.json", '{"flags": {}, "deciding": {"script_flags": 3}}', "its script_flags is not an object"),
        ("run.yaml", "#" * (1 << 20) + "\n", "has more than 1 MiB; give a YAML or JSON file"),
    ],
)
def test_a_file_of_flags_holds_each_once_and_flat(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=line):
        values_of(f"--config={tmp_path / name}")


AT = pathlib.Path("/at")
INTEGER, NUMBER = "an integer from 1 to", "a number from 0 to"
# Whatever gives a flag a value, this is what the flag makes of it, or what the one line has to say.
COERCED = [
    ("train_steps", "7", 7),
    ("train_steps", 7, 7),
    ("train_steps", np.int64(7), 7),
    ("train_steps", np.array(7), 7),
    ("train_steps", 2**31 - 1, 2**31 - 1),
    ("train_steps", 2**31, f"train_steps=2147483648 can't be used: it takes {INTEGER}"),
    ("train_steps", 2**53 + 1, f"train_steps=9007199254740993 can't be used: it takes {INTEGER}"),
    ("train_steps", 7.0, f"train_steps=7.0 can't be used: it takes {INTEGER}"),
    ("train_steps", "7.0", f"train_steps=7.0 can't be used: it takes {INTEGER}"),
    ("train_steps", True, f"train_steps=True is a bool, and not one value; give {INTEGER}"),
    ("train_steps", {}, f"train_steps={{}} is a dict, and not one value; give {INTEGER}"),
    ("train_steps", "", f"train_steps is empty (a variable that is not set?); give {INTEGER}"),
    *(("train_steps", text, f"={text} can't be used: it takes") for text in ("010", "0x10", "0o10", "1_0", "1e1", "٣")),
    ("learning_rate", 0.1 + 0.2, 0.1 + 0.2),
    ("learning_rate", np.float32(0.1), float(np.float32(0.1))),
    ("learning_rate", np.float64(1e-3), 1e-3),
    ("learning_rate", "1e-05", 1e-5),
    ("learning_rate", 1, 1.0),
    ("learning_rate", "010", "learning_rate=010 can't be used: it takes a number"),
    ("learning_rate", fractions.Fraction(1, 4), 0.25),
    ("learning_rate", float("nan"), f"learning_rate=nan can't be used: it takes {NUMBER}"),
    ("learning_rate", [1], f"learning_rate=[1] is a list, and not one value; give {NUMBER}"),
    ("debug", "false", False),
    ("debug", np.bool_(True), True),
    ("debug", 1, True),
    ("debug", 2, "debug=2 is a int, and not one value; give true or false"),
    ("debug", "maybe", "debug=maybe can't be used: it takes true or false"),
    ("jit", "off", "off"),
    ("jit", False, "jit=False is a bool, and not one value; give one of auto, on, off"),
    ("jit", "of", "jit=of is unknown; did you mean off"),
    ("gpus", 0, "0"),
    ("gpus", "0,1", "0,1"),
    ("optimizer", 3, "optimizer=3 is a int, and not one value; give a name"),
    ("model", pathlib.Path("/at/mine.py"), "/at/mine.py"),
    ("model", "mlp", "mlp"),
    ("model", object(), "and not one value; give a name, or the path of a file"),
    ("run_dir", AT, "/at"),
    ("run_dir", b"/at", "run_dir=b'/at' is a bytes, and not one value; give a path"),
    ("data_dir", [AT, "/in"], "/at,/in"),
    ("data_dir", "/at,/in", "/at,/in"),
    ("data_dir", ["/a,b", "/c"], "/a,b has a comma in it, which separates values"),
    ("freeze", "bias", ["bias"]),
    ("freeze", ("bias", "gamma:2"), ["bias", "gamma:2"]),
    ("freeze", ["bias", "(:2"], "freeze=(:2 can't be used: it is not a regular expression"),
    ("model_arg", {"units": {"a": 1}}, {"units": {"a": 1}}),
    ("model_arg", {"units": len}, {"units": len}),
    ("model_arg", {3: 1}, "model_arg=3 is a int, and not one value; give a name"),
    ("model_arg", ["units=a=b"], {"units": "a=b"}),
    ("model_arg", "units=3", {"units": "3"}),
    ("model_arg", ["units"], "model_arg=units can't be used: it has no value; write NAME=VALUE"),
    ("model_arg", ["a=1", "a=2"], "model_arg a is set twice, 1 and 2; omit one"),
    ("model_arg", 3, "model_arg=3 is a int, and not one value; give NAME=VALUE"),
]


def assert_becomes(coerce, expected) -> None:
    """A value becomes what is expected, in its type; or it is an error, if that is a line."""
    if isinstance(expected, str) and " " in expected:
        with pytest.raises(UsageError) as error:
            coerce()
        assert expected in error.value.message
        assert error.value.exit_code == 2
    else:
        found = coerce()
        assert type(found) is type(expected)
        assert found == expected


@pytest.mark.parametrize(("name", "value", "expected"), COERCED)
def test_a_flag_takes_a_value_in_its_type_or_says_what_it_takes(name, value, expected):
    assert_becomes(lambda: rules.coerce(FIELDS[name], value), expected)


class Shape(enum.Enum):
    ROUND = 1


# Arguments of models and others: (default, value, what the constructor gets, or what the line has to say).
WRITTEN = rules.UntypedText
ARGUMENTS = [
    ((128,), WRITTEN("(64, 32)"), (64, 32)),
    ((128,), [64, np.int64(32)], (64, 32)),
    ((128,), np.array([64, 32]), (64, 32)),
    ((128,), 64, (64,)),
    (
        (128,),
        [[1, 2], [3]],
        "a=[[1, 2], [3]] is not such a list; give a value like the default, 128 (in Python (128,))",
    ),
    *(
        ((128,), WRITTEN(text), f"a={text} is not such a list")
        for text in ("010", "0x10", "", ",", "64,,64", "[]", "64,")
    ),
    ((128,), [], "is not such a list; give a value like the default, 128"),
    ((1, 2), [], "is not such a list; give a value like the default, 1,2 (in Python (1, 2))"),
    ((), [], "is not such a list; give one or more, or leave it out"),
    ((), ["a,b", "c"], ("a,b", "c")),
    (0.0, WRITTEN("1e-1"), 0.1),
    (0.0, 1, 1.0),
    (0.0, 0.1 + 0.2, 0.1 + 0.2),
    (0.0, WRITTEN("much"), "a=much is not a number; give a value like the default, 0.0"),
    (0.0, "Infinity", math.inf),  # as a run's configuration has it
    (3, 2**60 + 1, 2**60 + 1),
    (3, WRITTEN("4"), 4),
    (3, 4.5, "a=4.5 is not an integer; give a value like the default, 3"),
    (3, True, "a=True is not an integer"),
    (3, None, "a=None is not an integer"),
    (0, "x", "a=x is not an integer; give a value like the default, 0"),
    (True, WRITTEN("no"), False),
    (True, np.bool_(False), False),
    (True, 0, False),
    (True, 2, "a=2 is not a boolean; give a value like the default, True"),
    (True, "maybe", "a=maybe is not a boolean"),
    ("x", WRITTEN("010"), "010"),
    ("x", AT, "/at"),
    ("x", np.float64(0.5), "0.5"),
    ("x", True, "a=True is not text; give a value like the default, x"),
    ("x", len, "is not text; give a value like the default, x"),
    (None, WRITTEN("1,2"), (1, 2)),
    (None, WRITTEN("[3]"), (3,)),
    (None, WRITTEN(" 3 "), 3),
    *((None, WRITTEN(text), value) for text, value in (("1e3", 1000.0), ("True", True), ("none", None), ("a", "a"))),
    (None, [WRITTEN("1"), "2"], (1, "2")),
    (None, "3", "3"),
    (None, None, None),
    (None, {"rate": 0.5}, {"rate": 0.5}),
    (None, len, len),
    (Shape.ROUND, Shape.ROUND, Shape.ROUND),
]


@pytest.mark.parametrize(("default", "value", "expected"), ARGUMENTS)
def test_an_argument_has_the_type_of_its_default_or_is_the_object_itself(default, value, expected):
    assert_becomes(lambda: registry.coerce_argument("model_arg", "a", value, default), expected)


def test_each_source_of_values_gives_the_same(tmp_path):
    """A command line, keywords, YAML, JSON, and a run's configuration."""
    words = (
        "--train_steps=7 --learning_rate=0.1 --nodebug --gpus=0 --freeze=bias --data_dir=/at --outer_arg=momentum=0.5"
    )
    expected = values_of(*words.split())
    given = {"train_steps": 7, "learning_rate": 0.1, "debug": False, "gpus": "0", "freeze": ["bias"], "data_dir": "/at"}
    given["outer_arg"] = {"momentum": 0.5}
    (tmp_path / "run.json").write_text(json.dumps(given))
    (tmp_path / "run.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in given.items()))
    entry = registry.ENTRIES["outer_arg"]
    for found in (
        expected,
        values_of(**given),
        values_of(f"--config={tmp_path}/run.json"),
        values_of(f"--config={tmp_path}/run.yaml"),
    ):
        found.pop("config", None)
        arguments = registry.coerce_arguments("outer_arg", found.pop("outer_arg"), entry)
        assert arguments == {"momentum": 0.5}
        assert found == {name: value for name, value in given.items() if name != "outer_arg"}
    assert parsing.from_argv(["", *parsing.to_words(given)]) == {**given, "outer_arg": {"momentum": "0.5"}}


def test_a_scripts_flag_with_the_name_of_one_of_these_is_named(script_flags):
    script_flags.DEFINE_integer("seed", 3, "Of the script.")
    with pytest.raises(UsageError, match=r"^seed is a flag of Crankshaft's, and the script defines it too; give its"):
        values_of("--train_steps=3")


def test_a_scripts_config_object_has_another_name_and_no_overrides_on_the_command_line(script_flags, tmp_path):
    """As ml_collections defines one: a flag that takes a file of Python, which is no YAML of flags."""
    (tmp_path / "conf.py").write_text("def get_config(): return {'units': 3}\n")
    script_flags.DEFINE_string("experiment", None, "A file.")
    assert values_of(f"--experiment={tmp_path}/conf.py", "--seed=3")["seed"] == 3
    with pytest.raises(UsageError, match=r"^experiment.units is unknown: .* set units in the file of experiment, or"):
        values_of("--experiment.units=9")
    script_flags.DEFINE_string("config", None, "A file.")
    with pytest.raises(
        UsageError, match=r"^config is a flag of Crankshaft's, .* another name, such as experiment; data"
    ):
        values_of(f"--config={tmp_path}/conf.py")


def test_a_scripts_own_flags_are_absls(script_flags, tmp_path):
    beta = script_flags.DEFINE_float("beta", 1.0, "Decides.", lower_bound=0)
    names = script_flags.DEFINE_multi_string("name", [], "Of the script.")
    (tmp_path / "run.yaml").write_text("beta: 2\nname: [a]\nseed: 3\n")
    assert values_of(f"--config={tmp_path}/run.yaml", "--name=b")["seed"] == 3
    assert (beta.value, names.value) == (2.0, ["a", "b"])
    assert parsing.from_keywords({"beta": np.float32(0.5), "name": ["c"]}) == ({}, {"beta": 0.5, "name": ["c"]})
    assert beta.value == 2.0
    for call in (lambda: values_of("--beta=-1"), lambda: values_of(beta=-1.0)):
        with pytest.raises(UsageError, match=r"^(--)?beta=-1.*: -1.0 is not a non-negative number(; see --help)?$"):
            call()


def test_keywords_take_the_mappings_and_sequences_of_other_libraries_within_one_another():
    """As OmegaConf's DictConfig and ListConfig are; a program's own kinds of list and dictionary stay."""
    own = collections.OrderedDict(a=1)
    units, nested = collections.UserList([4, 8]), collections.UserDict(a=collections.UserList(["x"]), own=own)
    arguments = collections.UserDict(units=units, nested=nested, name="text", few=(1, units))
    given, _ = parsing.from_keywords({"model_arg": arguments, "freeze": collections.UserList(["a:1"])})
    assert given["freeze"] == ["a:1"]
    assert given["model_arg"] == {
        "units": [4, 8],
        "nested": {"a": ["x"], "own": own},
        "name": "text",
        "few": (1, [4, 8]),
    }
    assert given["model_arg"]["nested"]["own"] is own


def test_an_argument_given_twice_is_refused_but_the_command_line_wins_over_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("model_arg: {dropout: 0.5}\nfreeze: bias\nseed: 3\n")
    file, word = f"--config={tmp_path}/run.yaml", "--model_arg=dropout=0.1"
    assert values_of(file, "--freeze=gamma", "--seed=4") == {
        "config": f"{tmp_path}/run.yaml",
        "model_arg": {"dropout": "0.5"},
        "freeze": ["bias", "gamma"],
        "seed": 4,
    }
    assert values_of(file, word)["model_arg"] == {"dropout": "0.1"}
    assert values_of(file, "--model_arg=units=3")["model_arg"] == {"dropout": "0.5", "units": "3"}
    with pytest.raises(UsageError, match=r"^model_arg dropout is set twice, 0.1 and 0.2; omit one$"):
        values_of(word, "--model_arg", "dropout=0.2")


@pytest.mark.parametrize("name", ["config", "flagfile"])
def test_a_file_that_names_another_is_refused_with_the_words_that_read_both(tmp_path, name):
    (path := tmp_path / "run.yaml").write_text(f"{name}: other.yaml\nseed: 1\n")
    line = rf"{path}: {name}=other.yaml is not read within a file; .*, config={path} {name}=other.yaml"
    for values in ({"config": path}, [f"--config={path}"]):
        with pytest.raises(UsageError, match=line):
            values_of(**values) if isinstance(values, dict) else values_of(*values)


def test_a_flagfile_is_read_in_its_place(tmp_path):
    (tmp_path / "inner").write_text("# Steps\n--train_steps=3\n")
    (tmp_path / "outer").write_text(f"--seed=1\n\n--flagfile={tmp_path}/inner\n// the end\n")
    assert parsing.without_flagfiles(["--a=1", "--flagfile", f"{tmp_path}/outer", "--b=2"]) == [
        *("--a=1", "--seed=1", "--train_steps=3", "--b=2")
    ]
    (tmp_path / "inner").write_text(f"--flagfile={tmp_path}/inner\n--flagfile={tmp_path}/inner\n")
    with pytest.raises(UsageError, match=r"is the 101th to be read; files that name one another have no end$"):
        parsing.without_flagfiles([f"--flagfile={tmp_path}/inner"])


def test_no_flag_waits_for_a_pipe_or_reads_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "ckpt-1.index")
    for path in (tmp_path / "pipe", "/dev/zero"):
        for flag, name in (("config", "config"), ("flagfile", "--flagfile")):
            with pytest.raises(UsageError, match=rf"^{name}={path} can't be read \(it is not a regular file\); give a"):
                values_of(f"--{flag}={path}")
        for find in (functools.partial(user_files.compile_file, "model"), read_baseline, checks.check_init_from):
            with pytest.raises(UsageError, match="it is not a regular file"):
                find(str(path))
    with pytest.raises(UsageError, match="it is not a regular file"):
        checks.check_init_from(f"{tmp_path}/ckpt-1")


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=r"^config=.* can't be read \(.*\); give a YAML or JSON file of flags$"):
            values_of(f"--config={path}")
    with pytest.raises(UsageError, match=r"^config is empty"):
        values_of("--config=")
