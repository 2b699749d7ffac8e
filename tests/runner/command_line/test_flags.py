"""Each flag of each command with values that nobody means: one line, code 2, before anything starts; or a value that
may stand, as the tables here say. In this process, up to where TensorFlow or another process would start."""

from __future__ import annotations

import json
import re

import pytest

from crankshaft.engine import optimizers
from crankshaft.engine.optimizers import schedules
from crankshaft.launch import command, train
from crankshaft.launch.composition import building
from crankshaft.parts.clusters import arrival, rendezvous
from crankshaft.parts.launchers import local
from crankshaft.parts.launchers.supervisor import Supervisor
from crankshaft.parts.parameter_servers import servers
from crankshaft.runner import failures
from crankshaft.runner.command_line import registry, rules
from crankshaft.runner.command_line.flags import FIELDS, USES
from crankshaft.runner.data import loading
from crankshaft.runner.failures import UsageError
from crankshaft.runner.host import process

HOSTILE = {
    "empty": "",
    "negative": "-1",
    "huge": "9" * 20,
    "too huge": "1e308",
    "endless": "9" * 5000,
    "nan": "nan",
    "inf": "inf",
    "unicode": "é漢🙂\u202e",
    "newline": "1\n\x1b2",
}
LARGE = ("learning_rate", "weight_decay", "clip_norm")
A_PATH = set(HOSTILE) - {"empty", "endless"}  # names of files may be any, up to 255 bytes
# Flag -> which of these values may stand, since they are what the flag takes.
ACCEPTED = {
    **dict.fromkeys(("run_dir", "result_json", "output", "tensorboard_dir", "export_dir"), A_PATH),
    # Rates and norms may be as large as float32 has room for: a run that ends so says that it is not finite.
    **{name: {"huge"} for name in LARGE},
    "freeze": set(HOSTILE) - {"empty"},  # what it finds is seen later
    "export_model": set(HOSTILE) - {"empty"},  # of the names that a trainer has, once it is made
    "prompt": set(HOSTILE),  # any text may be gone on with
}
RUN = ("--model=mlp", "--input=digits")
# What a flag needs to have a use, where `USES` says what that is.
NEEDED = {
    ("strategy", "mirrored"): ("--strategy=mirrored",),
    ("strategy", "mirrored", "multi_worker"): ("--strategy=mirrored",),
    ("run_dir",): ("--run_dir=run",),
    ("init_from",): ("--init_from=run",),
    ("sync_every_steps",): ("--strategy=mirrored", "--sync_every_steps=2"),
    ("strategy", "mirrored", "multi_worker", "tpu"): ("--strategy=mirrored",),
    ("strategy", "mirrored", "multi_worker", "tpu", "parameter_server"): ("--strategy=mirrored",),
    ("strategy", "multi_worker"): ("--strategy=multi_worker",),
    ("strategy", "multi_worker", "parameter_server"): ("--strategy=multi_worker",),
    ("strategy", "parameter_server"): ("--strategy=parameter_server",),
    ("mode", "benchmark"): ("--mode=benchmark",),
    ("mode", "eval"): ("--mode=eval", "--run_dir=run"),
    ("mode", "eval", "export", "predict", "generate"): ("--mode=eval", "--run_dir=run"),
    ("mode", "generate"): ("--mode=generate", "--run_dir=run"),
    ("mode", "export"): ("--mode=export", "--run_dir=run"),
    ("mode", "export", "predict"): ("--mode=export", "--run_dir=run"),
    ("mode", "train_and_eval", "train"): ("--mode=train_and_eval",),
    ("mode", "predict"): ("--mode=predict", "--run_dir=run", "--output=said.csv"),
}


class Started(BaseException):
    """Raised where devices or another process would start."""


def started(*arguments, **named):
    raise Started


@pytest.fixture
def ends(monkeypatch, tmp_path, capsys):
    """`ends(main, *arguments)`: the one line with which a command ends by code 2, or None where it would start."""
    for place, name in ((process, "prepare"), (arrival, "reach_directly"), (servers, "fail_fast"), (loading, "load")):
        monkeypatch.setattr(place, name, lambda *arguments: None)
    starts = ((building, "make_strategy"), (rendezvous, "Rendezvous"), (servers, "serve"), (Supervisor, "run"))
    for place, name in starts:
        monkeypatch.setattr(place, name, started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "ckpt-9.manifest.json").touch()

    def ends(main, *arguments, cluster: str | None = None) -> str | None:
        if cluster:
            jobs = {"worker": ["127.0.0.1:0", "127.0.0.1:1"]} | (
                {"chief": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]} if cluster == "parameter_server" else {}
            )
            task = {"type": "chief" if "chief" in jobs else "worker", "index": 0}
            monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
        else:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        capsys.readouterr()
        with pytest.raises((Started, SystemExit)) as end:
            main(argv=["crankshaft", *arguments])
        if end.type is Started:
            return None
        assert end.value.code == failures.EXIT_USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable()
        assert line.startswith("error: ")
        assert len(line) < 1200
        return line.removeprefix("error: ")

    return ends


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_that_nobody_means_is_one_line(ends, name):
    needed = NEEDED[USES[name]] if name in USES else ()
    cluster = next((each for each in ("multi_worker", "parameter_server") if f"--strategy={each}" in needed), None)
    for kind, value in HOSTILE.items():
        line = ends(train.main, *RUN, *needed, f"--{name}={value}", cluster=cluster)
        assert (line is None) == (kind in ACCEPTED.get(name, ())), (kind, line)
        assert line is None or name in line


@pytest.mark.parametrize("name", list(rules.fields(local.LocalFlags)))
def test_a_value_for_a_cluster_that_nobody_means_is_one_line(ends, name):
    for kind, value in HOSTILE.items():
        line = ends(lambda argv: command.execute("local", argv[1:]), f"--{name}={value}", "--", *RUN)
        assert line, kind
        assert f"--{name}" in line


def test_each_flag_has_a_range_or_a_rule():
    for field in (*FIELDS.values(), *rules.fields(local.LocalFlags).values()):
        kind = field.metadata["info"].kind
        assert type(kind).coerce is not rules.ValueType.coerce
        assert kind.expected


@pytest.mark.parametrize("name", USES)
def test_a_flag_that_the_run_would_ignore_is_refused(ends, name):
    possible = "true 1 7 bfloat16 0.5 ring all train 9 x=ps:0 jit=on x cold data:2".split()
    value = next(each for each in possible if _takes(FIELDS[name], each))
    line = ends(train.main, *RUN, "--mode=train", f"--{name}={value}")
    assert line
    assert f"{name}=" in line
    assert f"has no use with{'' if len(USES[name]) > 1 else 'out'} {USES[name][0]}" in line
    assert f"leave {name} out" in line


def test_what_is_asked_for_never_is_not_ignored(ends):
    assert ends(train.main, *RUN, "--checkpoint_every_steps=0", "--histogram_every_steps=0") is None


def _takes(field, value: str) -> bool:
    try:
        return rules.coerce(field, value) != rules.default_value(field)
    except UsageError:
        return False


ARGUMENTS = [
    (kind, entry, name)
    for kind, entries in (
        ("optimizer", map(registry.optimizer, optimizers.named())),
        ("learning_rate_schedule", registry.schedules().values()),
    )
    for entry in entries
    for name, default in entry.defaults.items()
    if not isinstance(default, bool) and name not in ("exclude_layers", "weight_decay_exclude")  # which are of names
]


@pytest.mark.parametrize(("kind", "entry", "name"), ARGUMENTS, ids=lambda each: getattr(each, "name", each))
def test_an_argument_of_the_update_that_nobody_means_is_refused(kind, entry, name):
    interval = entry.intervals[name]
    outside = ["nan", "inf", "-inf", "1e308", "9" * 40, "", "é", "1\n2"]
    outside += [str(end) for end in (interval.above, interval.below) if end is not None]
    outside += [
        str(end + way * (abs(end) + 1)) for end, way in ((interval.lower, -1), (interval.upper, 1)) if end is not None
    ]
    for value in outside:
        with pytest.raises(UsageError, match=re.escape(f"{kind}_arg {name}=")):
            registry.coerce_arguments(f"{kind}_arg", {name: rules.UntypedText(value)}, entry)


def test_an_argument_of_the_update_is_checked_before_anything_is_made(ends):
    for given, why in (
        ("beta_1=nan", "beta_1=nan is not a number from 0 to below 1"),
        ("x\n=1", "x\\n: adam has no such"),
    ):
        assert f"optimizer_arg {why}" in ends(train.main, *RUN, f"--optimizer_arg={given}")


def test_an_optimizer_that_is_made_without_flags_has_the_same_ranges():
    for arguments, says in (
        ({"beta_1": 2}, r"optimizer adam: beta_1=2 is not a number from 0 to below 1"),
        ({"epsilon": float("nan")}, r"optimizer adam: epsilon=nan is not a number from 1.2e-38 to 1e\+30"),
    ):
        with pytest.raises(ValueError, match=says):
            optimizers.build("adam", 0.1, **arguments)
    with pytest.raises(ValueError, match=r"schedule cosine: decay_steps=0 is not an integer from 1 to 2147483647"):
        schedules.build("cosine", 0.1, 10, decay_steps=0)


def test_what_is_shown_of_a_value_stays_on_its_line():
    assert failures.one_line("é 漢 🙂 a b") == "é 漢 🙂 a b"
    assert failures.one_line("a\nb\r\t\x1b[31m\u202e") == r"a\nb\r\t\x1b[31m\u202e"
    assert failures.one_line(f"a {'b' * 999}; c") == f"a {'b' * 300}... c"
