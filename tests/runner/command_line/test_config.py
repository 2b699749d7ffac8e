"""The configuration that a command line asks for, with what a run's own says. In this process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import pkgutil
import re
import types

import pytest

from crankshaft import input as inputs
from crankshaft import models
from crankshaft.engine.step.options import WEIGHT_DECAY_EXCLUDE
from crankshaft.launch import program
from crankshaft.runner.command_line import checks, conflicts, parsing, registry, rules, saved_config, values
from crankshaft.runner.command_line import config as configs
from crankshaft.runner.command_line import flags as our_flags
from crankshaft.runner.command_line.config import Config
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host.text_files import write_json

OF_THE_RUN = (
    "--model=mlp --model_arg=hidden_units=4 --input=synthetic --input_arg=examples=500 --optimizer_arg=beta_1=0.8 "
    "--learning_rate_schedule=cosine --learning_rate_schedule_arg=alpha=0.5 --train_steps=9"
).split()


def asked(*words, script: type | None = None) -> Config:
    return program.configure(parsing.from_argv(["crankshaft train", *map(str, words)]), script, False, {})


def checked(*words, script: type | None = None) -> Config:
    """Checks also what needs TensorFlow: what the flags name, and the run that is gone on with."""
    found = asked(*words, script=script)
    program.check(found)
    checks.check_named(found)
    return found


def test_gains_of_normalisations_and_biases_do_not_decay_unless_that_is_said():
    """Of layer and batch normalisation, of RMS normalisation here and in Keras."""
    exclude = WEIGHT_DECAY_EXCLUDE
    paths = ("norm/gamma", "norm/beta", "block_0/attention_norm/gain", "rms_normalization/scale", "dense/bias")
    assert all(re.search(exclude, path) for path in paths)
    assert not any(re.search(exclude, path) for path in ("dense/kernel", "rescaled/kernel", "embedding"))


@pytest.fixture
def run_dir(tmp_path):
    write_json(tmp_path / "config.json", asked(*OF_THE_RUN, f"--data_dir={tmp_path}").as_json())
    return tmp_path


def test_what_is_not_given_is_the_runs(run_dir):
    found = asked("--mode=eval", f"--run_dir={run_dir}")
    assert (found.model, found.input, found.data_dir) == ("mlp", "synthetic", str(run_dir))
    assert found.configured_arguments("model_arg")["hidden_units"] == (4,)
    assert found.configured_arguments("input_arg")["examples"] == 500
    assert found.configured_arguments("optimizer_arg")["beta_1"] == 0.8
    assert found.configured_arguments("learning_rate_schedule_arg")["alpha"] == 0.5


@pytest.mark.parametrize(
    ("data", "flags", "is_replaced"),
    [
        ("gone.csv", "--mode=eval --eval_data_dir=/new.csv", True),
        ("gone.csv", "--mode=predict --output=o.csv --eval_data_dir=/new.csv", True),
        ("gone.csv", "--mode=predict --output=o.csv --eval_data_dir=/new.csv --predict_split=eval", True),
        ("gone.csv", "--mode=predict --output=o.csv --eval_data_dir=/new.csv --predict_split=train", False),
        ("gone.csv", "--mode=eval", False),
        ("gone.csv", "--mode=export --export_dir=e", False),
        ("here.csv", "--mode=eval --eval_data_dir=/new.csv", False),
        ("h*.csv", "--mode=eval --eval_data_dir=/new.csv", False),  # files that are there
    ],
)
def test_training_data_that_is_gone_is_not_needed_where_other_files_are_evaluated(
    tmp_path, monkeypatch, caplog, data, flags, is_replaced
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.csv").touch()
    given = ("--model=wide_deep", "--input=csv", f"--data_dir={tmp_path}/{data}", "--train_steps=9")
    write_json(tmp_path / "config.json", asked(*given).as_json())
    assert asked(f"--run_dir={tmp_path}", *flags.split()).data_dir == (
        "/new.csv" if is_replaced else f"{tmp_path}/{data}"
    )
    assert (
        f"data_dir={tmp_path}/{data} of the run is not there, and not needed: /new.csv alone" in caplog.text
    ) == is_replaced


def test_the_same_given_again_keeps_what_belongs_to_it(run_dir):
    same = ("--model=mlp", "--input=synthetic", "--optimizer=Adam", "--learning_rate_schedule=cosine")
    assert asked("--mode=eval", f"--run_dir={run_dir}", *same).deciding() == asked(*OF_THE_RUN).deciding()
    assert asked("--mode=eval", f"--run_dir={run_dir}", *same).data_dir == str(run_dir)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("--input=digits", ("input_arg", "data_dir")),
        ("--model=logistic", ("model_arg",)),
        ("--optimizer=sgd", ("optimizer_arg",)),
        ("--learning_rate_schedule=constant", ("learning_rate_schedule_arg",)),
    ],
)
def test_what_belongs_to_another_is_not_taken_from_the_run(run_dir, given, names):
    found = asked("--mode=eval", f"--run_dir={run_dir}", given)
    assert not any(found.values[name] for name in names)


@pytest.mark.parametrize(
    ("flag", "other"), [("shuffle_buffer", "7"), ("auto_shard_policy", "file"), ("global_batch_size", "7")]
)
def test_what_decides_a_datasets_order_is_the_runs(run_dir, flag, other):
    checked(*OF_THE_RUN, f"--run_dir={run_dir}")
    with pytest.raises(UsageError, match=rf"is a run of another configuration \({flag}: \w+ -> {other}\)"):
        checked(*OF_THE_RUN, f"--run_dir={run_dir}", f"--{flag}={other}")


@pytest.mark.parametrize(
    ("mode", "given", "refused"),
    [
        ("predict", "--output=o.csv --input_arg=label=other", ""),  # it needs no labels
        ("eval", "--input_arg=label=other", "input_arg label: label -> other"),
        ("predict", "--output=o.csv --input_arg=text=town", r"input_arg text: .* -> town"),
        ("train", "--train_steps=20", ""),
        ("train", "--learning_rate_schedule=cosine", "learning_rate_schedule: constant -> cosine"),
        ("train", "--seed=8", "seed: 0 -> 8"),
        ("train", "--seed=8 --allow_changed_config", ""),
        ("benchmark", "--seed=8", ""),
    ],
)
def test_what_a_mode_may_have_otherwise_than_its_run(tmp_path, mode, given, refused):
    ours = ("--model=wide_deep", "--input=csv", f"--data_dir={tmp_path}", f"--run_dir={tmp_path}")
    write_json(tmp_path / "config.json", asked(*ours, "--train_steps=9").as_json())
    length = () if "train_steps" in given or mode in ("eval", "predict") else ("--train_steps=9",)
    with pytest.raises(UsageError, match=rf"configuration \({refused}") if refused else contextlib.nullcontext():
        checks.check_named(asked(*ours, f"--mode={mode}", *length, *given.split()))


def test_the_flags_of_a_script_that_decide_are_compared_and_others_named_as_such(run_dir):
    def check(before, now):
        found = asked(*OF_THE_RUN, f"--run_dir={run_dir}")
        deciding = found.deciding() | ({} if before is None else {"script_flags": before})
        checks.check_same_run(dataclasses.replace(found, script_flags=now), "run", {"deciding": deciding})

    check({"beta": 1, "gone": 2}, {"beta": 1})
    check({"gone": 2}, {})
    check(None, {"beta": 1})  # of a run before they were kept
    with pytest.raises(
        UsageError, match=r"\(script_flags beta: 1 -> 2\); .*; of a flag that decides no numbers, may_change=\['beta'\]"
    ):
        check({"beta": 1}, {"beta": 2})
    with pytest.raises(UsageError, match=r"\(script_flags new: None -> 2\); use .* allow_changed_config$"):
        check({"beta": 1}, {"beta": 1, "new": 2})


WITHOUT_EVALUATION = [
    ("", ""),
    ("--mode=eval --run_dir=r", "mode=eval needs evaluation data, and the data has none; return .train, eval. from"),
    ("--restore_best", "restore_best needs evaluation data"),
    ("--eval_every_steps=2", "eval_every_steps=2 needs evaluation data"),
    ("--eval_every_steps=0", ""),
    ("--early_stopping=patience=2", "early_stopping watches monitor=eval_loss, .*; use monitor=train_loss, or return"),
    ("--reduce_lr=patience=2", "reduce_lr watches monitor=eval_loss, and the run has no evaluation data"),
    ("--reduce_lr=patience=2 --monitor=train_loss", ""),
    ("--monitor=max:eval_score", "monitor=max:eval_score, and the run has .*; use monitor=max:train_score, or return"),
    ("--monitor=train_score", ""),
    ("--mode=train --monitor=eval_score", ""),
]


@pytest.mark.parametrize(("flags", "line"), WITHOUT_EVALUATION)
def test_settings_that_need_evaluation_data_are_named_where_there_is_none(run_dir, flags, line):
    found = asked(*OF_THE_RUN, *flags.replace("=r", f"={run_dir}").split())
    with pytest.raises(UsageError, match=f"^{line}") if line else contextlib.nullcontext():
        conflicts.refuse(found, conflicts.WITHOUT_EVALUATION_DATA)


def test_the_length_of_a_run_is_not_listed_where_only_the_schedule_differs(run_dir):
    same = [word for word in OF_THE_RUN if "schedule" not in word]
    changed = r"\(learning_rate_schedule: cosine -> constant; learning_rate_schedule_arg alpha: 0.5 -> None\)"
    with pytest.raises(UsageError, match=f"is a run of another configuration {changed}"):
        checked(*same, f"--run_dir={run_dir}")


@pytest.mark.parametrize(("was", "now"), [("file", "file"), (None, "auto")])
def test_a_run_whose_flag_did_not_decide_yet_goes_on_with_what_it_had(run_dir, was, now):
    path = run_dir / "config.json"
    before = json.loads(path.read_text())
    del before["deciding"]["auto_shard_policy"], before["flags"]["auto_shard_policy"]
    if was:
        before["flags"]["auto_shard_policy"] = was
    path.write_text(json.dumps(before))
    checked(*OF_THE_RUN, f"--run_dir={run_dir}", f"--auto_shard_policy={now}")
    with pytest.raises(UsageError, match=f"auto_shard_policy: {now} -> data"):
        checked(*OF_THE_RUN, f"--run_dir={run_dir}", "--auto_shard_policy=data")


def test_a_run_whose_model_has_got_an_argument_goes_on_with_its_default(run_dir):
    path = run_dir / "config.json"
    before = json.loads(path.read_text())
    del before["deciding"]["model_arg"]["dropout"]
    path.write_text(json.dumps(before))
    checked(*OF_THE_RUN, f"--run_dir={run_dir}")
    with pytest.raises(UsageError, match=r"another configuration \(model_arg dropout: 0.0 -> 0.5\)"):
        checked(*OF_THE_RUN, f"--run_dir={run_dir}", "--model_arg=dropout=0.5")


@pytest.mark.parametrize(("was", "goes_on"), [(0.0, True), (0.5, False)])
def test_a_run_with_a_flag_that_is_gone_goes_on_where_the_flag_was_off(run_dir, was, goes_on):
    path = run_dir / "config.json"
    before = json.loads(path.read_text())
    before["flags"]["clip_value"] = before["deciding"]["clip_value"] = was
    path.write_text(json.dumps(before))
    refused = pytest.raises(UsageError, match=r"another configuration \(clip_value: 0.5 -> None\).*allow_changed")
    with contextlib.nullcontext() if goes_on else refused:
        checked(*OF_THE_RUN, f"--run_dir={run_dir}")
    checked(*OF_THE_RUN, f"--run_dir={run_dir}", "--allow_changed_config")
    with pytest.raises(UsageError, match="clip_value is unknown"):
        parsing.from_argv(["crankshaft train", "--model=mlp", f"--config={path}"])


def test_arguments_of_a_scripts_trainer_are_the_runs(tmp_path):
    class Line:
        def __init__(self, units=3):
            pass

    trained = asked("--input=digits", "--model_arg=units=5", script=Line)
    write_json(tmp_path / "config.json", trained.as_json())
    for given in ((), ("--model=Line",)):
        assert asked("--mode=eval", f"--run_dir={tmp_path}", *given, script=Line).configured_arguments("model_arg") == {
            "units": 5
        }


def test_a_scripts_run_is_told_to_be_started_by_its_script(tmp_path):
    class Line:
        pass

    write_json(tmp_path / "config.json", asked("--input=digits", script=Line).as_json())
    with pytest.raises(UsageError, match=r"is a run of Line, which its script brings; start that script with"):
        asked("--mode=eval", f"--run_dir={tmp_path}")


def test_an_argument_that_is_not_finite_is_the_runs(tmp_path):
    class Line:
        def __init__(self, most=1.0, least=(0.0,)):
            pass

    given = ("--input=digits", "--model_arg=most=inf", "--model_arg=least=-inf,2")
    trained = asked(*given, script=Line)
    write_json(tmp_path / "config.json", trained.as_json())
    assert values.differences(saved_config.load(tmp_path)["deciding"], asked(*given, script=Line).deciding()) == []
    found = asked("--mode=eval", f"--run_dir={tmp_path}", script=Line)
    assert found.configured_arguments("model_arg") == {"most": math.inf, "least": (-math.inf, 2)}
    assert found.deciding() == trained.deciding()


@pytest.mark.parametrize("mode", ["eval", "export"])
def test_a_folder_that_is_no_run_is_named_before_the_model_is_missed(tmp_path, mode):
    with pytest.raises(UsageError, match=f"run_dir={tmp_path}/none does not exist; give the folder of a run"):
        asked(f"--mode={mode}", f"--run_dir={tmp_path}/none")
    with pytest.raises(UsageError, match=rf"run_dir={tmp_path} holds no run \(no config.json\); give the folder of"):
        asked(f"--mode={mode}", f"--run_dir={tmp_path}")
    with pytest.raises(UsageError, match=f"mode={mode} needs run_dir, the folder of a run"):
        asked(f"--mode={mode}")


@pytest.mark.parametrize(("kind", "has"), [("model", "Model"), ("input", "load")])
def test_every_module_that_is_a_model_or_an_input_is_named(kind, has):
    package = {"model": models, "input": inputs}[kind]
    names = [each.name for each in pkgutil.iter_modules(package.__path__)]
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    assert [name for name, module in modules.items() if hasattr(module, has)] == list(registry.NAMES[kind])


def test_each_field_is_a_flag_of_its_type():
    """As an editor and mypy see it."""
    fields = {field.name: field for field in dataclasses.fields(our_flags.Flags)}
    assert list(fields) == [name for names in our_flags.GROUPS.values() for name in names]
    kinds = [
        (rules.Boolean, "bool"),
        (rules.Integer, "int"),
        (rules.AutoOrNumber, "str | float"),
        (rules.Number, "float"),
        (rules.Argument, "Mapping[str, Any]"),
    ]
    for name, field in fields.items():
        about = field.metadata["info"]
        kind = next((name for kind, name in kinds if isinstance(about.kind, kind)), "str")
        expected = ("Sequence[str]" if about.several else kind) + (" | None" if field.default is None else "")
        assert field.type == expected, name


def test_arguments_that_a_module_has_wrapped_are_what_they_were():
    """As a trainer that keeps them does, so that its run was refused as one of another configuration."""
    import tensorflow as tf

    arguments = {"nested": {"sizes": {"body": [1, (2, {"head": 3})]}, "names": [{"first": "a"}]}}
    before = values.plain(arguments)
    kept = tf.Module()
    kept.arguments = arguments["nested"]
    assert values.plain(arguments) == before


def task(kind="chief", is_chief=True, jobs=None, absent=(), newcomers=()):
    """A cluster, as one of its tasks sees it; `jobs`: addresses by the name of the job."""
    job = {"chief": ["c"], "worker": ["w"], "ps": ["p", "q"], **(jobs or {})}
    return types.SimpleNamespace(
        kind=kind, is_chief=is_chief, job=lambda name: job.get(name, []), absent=absent, newcomers=newcomers
    )


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, {"progress_mode": "auto", "trains": True, "writes_run": True, "is_chief": True, "no_jit_reason": None}),
        ({"progress": "off", "log_format": "json"}, {"progress_mode": "off"}),
        ({"progress": "bar", "log_format": "json"}, {"progress_mode": "json"}),
        ({"progress": "bar", "cluster": task(is_chief=False)}, {"progress_mode": "off", "writes_run": False}),
        ({"run_dir": None}, {"writes_run": False, "has_checkpoint": False, "configured_run_dir": None}),
        ({"mode": "eval"}, {"writes_run": False, "trains": False, "needs_labels": True}),
        ({"mode": "train"}, {"writes_run": True, "trains": True, "has_evaluator": False}),
        ({"mode": "predict", "output": "/o.csv"}, {"output_path": "/o.csv", "needs_labels": False}),
        ({"mode": "export"}, {"output_path": "/at/export"}),
        ({"mode": "export", "output": "gs://b/o", "export_dir": "/x"}, {"output_path": "/at/export"}),
        ({"export_dir": "/x", "output": "/o"}, {"output_path": "/x", "tensorboard": "/at/tensorboard"}),
        ({"tensorboard_dir": "gs://b/t"}, {"tensorboard": "/at/tensorboard"}),
        ({"tensorboard_dir": "/t"}, {"tensorboard": "/t"}),
        ({"gpus": None}, {"gpu_numbers": None}),
        ({"gpus": "none"}, {"gpu_numbers": ()}),
        ({"gpus": "0,12"}, {"gpu_numbers": (0, 12)}),
        ({"model_arg": {"hash_buckets": "0"}}, {"keeps_ids": False}),
        ({"model_arg": {"hash_buckets": "7"}}, {"keeps_ids": True}),
        ({"model_arg": {"table_capacity": 9}}, {"keeps_ids": True}),
        ({"run_eagerly": True, "debug": True}, {"no_jit_reason": "run_eagerly executes steps op by op"}),
        ({"debug": True, "check_numerics": True}, {"no_jit_reason": "XLA leaves the checks of debug out"}),
        ({"check_numerics": True}, {"no_jit_reason": "XLA leaves the checks of check_numerics out"}),
        ({"mode": "eval", "data_dir": "/d", "eval_data_dir": "/d"}, {"reads_evaluation_alone": True}),
        ({"mode": "eval", "data_dir": "/d", "eval_data_dir": "/e"}, {"reads_evaluation_alone": False}),
        ({"mode": "eval"}, {"reads_evaluation_alone": False}),
        ({"data_dir": "/d", "eval_data_dir": "/d"}, {"reads_evaluation_alone": False}),
        (
            {"cluster": task(), "strategy": "parameter_server"},
            {"coordinates": True, "serves": False, "is_evaluator": False},
        ),
        ({"cluster": task("ps"), "strategy": "parameter_server"}, {"coordinates": False, "serves": True}),
        ({"cluster": task("worker"), "strategy": "parameter_server"}, {"serves": True, "has_evaluator": False}),
        ({"cluster": task("evaluator"), "strategy": "parameter_server"}, {"serves": False, "is_evaluator": True}),
        ({"cluster": task("worker"), "strategy": "multi_worker"}, {"serves": False, "coordinates": False}),
        ({"checkpoint_every_minutes": 0.5}, {"checkpoint_period": (0, 30.0)}),
        ({"checkpoint_every_steps": 7, "checkpoint_every_minutes": 0.0}, {"checkpoint_period": (7, 0.0)}),
        ({"cluster": task()}, {"checkpoint_period": (0, 300.0)}),
        ({"cluster": task(absent=["w"]), "checkpoint_every_steps": 7}, {"checkpoint_period": (7, 0.0)}),
        ({"cluster": task(newcomers=["w"]), "checkpoint_every_steps": 0}, {"checkpoint_period": (0, 0.0)}),
        ({"cluster": task(jobs={"evaluator": ["e"]}), "sync_every_steps": 300}, {"checkpoint_period": (1200, 0.0)}),
        ({"cluster": task(jobs={"evaluator": ["e"]})}, {"checkpoint_period": (1000, 0.0), "has_evaluator": True}),
    ],
)
def test_what_follows_from_flags_and_the_task_that_a_process_is(values, found):
    made = Config(**{"run_dir": "/at", **values})
    assert {name: getattr(made, name) for name in found} == found


def test_frozen_variables_train_from_a_step_on_that_is_a_sync():
    made = Config(freeze=["a", "b:1.1", "c:0.25"], sync_every_steps=1)
    assert made.frozen_steps(10, 0) == (("a", None), ("b", 11), ("c", 3))
    assert made.frozen_steps(10, 5) == (("a", None), ("b", 6), ("c", 0))  # of the run's steps, in its other batches
    made = Config(freeze=["b:1.1", "c:0.25"], sync_every_steps=4)
    assert made.frozen_steps(10, 3) == (("b", 8), ("c", 0))
    with pytest.raises(
        UsageError, match=r"freeze=b:1.1 ends at step 11, between two syncs \(sync_every_steps=4\); give"
    ):
        made.frozen_steps(10, 0)


@pytest.mark.parametrize(
    ("placement", "rule"),
    [
        ("table=ps:0", ("table", 0)),
        ("a=ps:9=ps:1", ("a=ps:9", 1)),
        ("table=ps:2", "is not of the form REGEX=ps:N with N from 0 to 1; use e.g. table=ps:0"),
        ("=ps:0", "is not of the form"),
        ("table=ps:-1", "is not of the form"),
        ("table", "is not of the form"),
        ("(=ps:0", "is not a regular expression: missing"),
    ],
)
def test_a_variable_is_placed_on_a_server_that_is_there(placement, rule):
    made = Config(strategy="parameter_server", cluster=task(), variable_placement=[placement, "b=ps:1"])
    if isinstance(rule, str):
        with pytest.raises(UsageError, match=rf"^variable_placement={re.escape(placement)} {rule}"):
            _ = made.placement_rules
    else:
        assert made.placement_rules == [rule, ("b", 1)]


def test_epochs_and_periods_become_whole_steps_as_they_are_written():
    assert [configs.steps_from_epochs(epochs, 10) for epochs in (1.1, 0.25, 1e-9, 3)] == [11, 3, 1, 30]
    assert [configs.whole_periods(steps, 4) for steps in (0, 1, 4, 5)] == [0, 4, 4, 8]
    for visible, found in (("0,2", ["0", "2"]), ("", []), ("-1", []), ("GPU-a,", ["GPU-a"])):
        assert configs.visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == found
