"""Mistakes on the command line: code 2, one line with the cure, found before TensorFlow starts. Each is a process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from crankshaft.launch import program
from crankshaft.runner.command_line import checks, registry
from crankshaft.runner.command_line.flags import FLAG_INFO, GROUPS
from crankshaft.runner.command_line.help import ESSENTIAL
from crankshaft.runner.failures import UsageError
from tests.processes import ROOT, assert_says
from tests.runner.command_line.test_config import asked, checked

HERE = os.getcwd()  # of which a relative path is
RUN = ("--model=mlp", "--input=digits")
MIRRORED = ("--strategy=mirrored", "--num_virtual_devices=8")

# What is typed, and what its line says: the flag, the value, the cure. Single flags' values: tests/runner/command_line.
MISTAKES = {
    "--modle=cnn": "modle ... did you mean ... model",
    "--batch_size=3": "did you mean global_batch_size or eval_batch_size",
    "--class_weight=3": "class_weight is unknown; see --help",
    "--qqq=1": "qqq is unknown ... --help",
    "--benchmark_steps=3": "benchmark_steps is no flag any more; use benchmark_arg=steps=N",
    "--init_optimizer": "init_optimizer is no flag any more; a run goes on ... in its own run_dir",
    "RUN twice": "'twice' is not a flag ... --NAME=VALUE",
    "--input=digits": "model is missing ... cnn, dlrm, logistic, mlp, resnet, transformer_lm, wide_deep",
    "": "model and input are missing ... model=mlp input=digits ... wide_deep ... tfrecord",
    "--model=mlp": "input is missing ... digits ... synthetic",
    "--model=mpl --input=digits": "model=mpl ... did you mean mlp?",
    "RUN --train_steps=0": "train_steps=0 ... an integer from 1 to",
    "RUN --strategy=mirored": "strategy=mirored ... did you mean mirrored",
    "RUN --model_arg=dropout": "model_arg=dropout can't be used: it has no value ... NAME=VALUE",
    "--model=logistic --input=digits --input_arg=x=1": "digits takes no",
    "--model=mlp --input=synthetic --input_arg=exampels=3": "input_arg exampels: synthetic ... did you mean examples",
    "--model=mlp --input=synthetic --input_arg=classes=1": "classes=1 is too small ... at least 2",
    "RUN --train_steps": "Missing value for flag --train_steps; see --help",
    "--stderrthreshold=loud": "--stderrthreshold must be one of ... not 'loud'; see --help",
    "RUN MIRRORED --mesh=model:2,model:2": "it is not a mesh ... data:2,model:2",
    "RUN --mode=benchmark --benchmark_arg=steps=3 --benchmark_arg=seconds=2": (
        "benchmark_arg ... steps=3 and seconds=2 are both given ... use one"
    ),
    "RUN --mode=benchmark --benchmark_arg=fail_below=0.9": "benchmark_arg fail_below=0.9 ... baseline",
    "RUN --mode=benchmark --benchmark_arg=seconds=0.3,rounds=1": (
        "benchmark_arg=seconds=0.3,rounds=1 has a second argument, rounds; give each its own benchmark_arg=NAME=VALUE"
    ),
    "RUN --mode=benchmark --benchmark_arg=seconds=0.3,x": "seconds=0.3,x is not a number above 0 ... give",
    "RUN --mode=benchmark --benchmark_arg=rounds=0": "benchmark_arg rounds=0 is not an integer from 1",
    "RUN --train_steps=3 --train_epochs=2": "train_steps and train_epochs ... use one",
    "RUN MIRRORED --global_batch_size=100": "=100 does ... 8 ... 96 or 104",
    "RUN MIRRORED --global_batch_size=3": "=3 does not ... use 8",
    "RUN --gpus=0,a": "gpus=0,a  ... not a list of GPUs' numbers ... e.g. 0,1, or none",
    "RUN MIRRORED --jit=on": "jit=on needs one replica ... 8 ... jit=auto or off",
    "RUN --jit=on --check_numerics": "jit=on ... check_numerics ... jit=auto or off",
    "RUN --strategy=multi_worker": "TF_CONFIG is not set ... crankshaft local",
    "RUN --strategy=parameter_server": "TF_CONFIG is not set ... crankshaft local --workers=2 --ps=2",
    "RUN MIRRORED --sync_every_steps=16 --eval_every_steps=100": (
        "eval_every_steps=100 is not a multiple of sync_every_steps=16 ... use 96 or 112"
    ),
    "RUN MIRRORED --sync_every_steps=16 --ema_decay=0.9": "ema_decay=0.9 ... sync_every_steps=16 ... leave one",
    "RUN MIRRORED --sync_every_steps=16 --precision=float16": "precision=float16 ... sync_every_steps=16 ... leave",
    "RUN MIRRORED --shard_optimizer --sync_every_steps=16": (
        "shard_optimizer does not go with sync_every_steps=16 ... leave one"
    ),
    "RUN --train_steps=5 --warmup_steps=5": "warmup_steps=5 leaves nothing of train_steps=5",
    "RUN --freeze=(:2": "freeze=(:2 can't be used: it is not a regular expression ... bias|gamma",
    "RUN --freeze=hidden:some": "freeze=hidden:some ... its epochs are not a number above 0 ... e.g. backbone:3",
    "RUN --freeze=:2": "freeze=:2 can't be used: it has no regular expression",
    "RUN --result_json=.": f"result_json={HERE} is a folder ... a file",
    "RUN --accumulate_steps=65": "accumulate_steps=65 ... 64 ... fewer",
    "RUN --monitor=loss": "monitor=loss ... eval_loss or train_loss",
    "RUN --mode=train --early_stopping=patience=2": (
        "early_stopping ... eval_loss ... makes no evaluations ... monitor=train_loss"
    ),
    "RUN --mode=train --reduce_lr=patience=2 --monitor=eval_accuracy": (
        "reduce_lr ... monitor=train_accuracy or mode=train_and_eval"
    ),
    "RUN --reduce_lr=patience=2 --eval_every_steps=0": (
        "eval_every_steps=0 makes none before the end ... monitor=train_loss or evaluate more often"
    ),
    "RUN --mode=eval": "mode=eval needs run_dir",
    "RUN --export_dir=model": f"export_dir={HERE}/model has no use without run_dir; give that too",
    "RUN --run_dir=run --export_dir=gs://b/m": "a tensorboard_dir or export_dir in a bucket ... give a run_dir in a",
    "RUN --lr=0.1": "lr is unknown; did you mean learning_rate or",
    "RUN --init_from=gs://bucket/run": "init_from=gs://bucket/run ... not a path of a mounted file system ... mount",
    "RUN --init_from=nowhere": f"init_from={HERE}/nowhere does not exist ... give",
    "--model=mlp --input=mnist --data_dir=nowhere": f"data_dir={HERE}/nowhere does not exist",
    "RUN --data_dir=.": f"data_dir={HERE} is not read by ... digits ... leave data_dir out",
}
# Those of what has to be imported, which is TensorFlow.
OF_WHAT_IS_NAMED = {
    "RUN --optimizer=adamm": "optimizer=adamm ... did you mean adam",
    "RUN --optimizer=qqq": "optimizer=qqq ... use one of ... lion ... momentum",
    "RUN --model_arg=hiden_units=3": "hiden_units: mlp ... did you mean hidden_units",
    "RUN --model_arg=dropout=much": "dropout=much is not a number ... like",
    "RUN --model_arg=dropout=1": "dropout=1.0 is not a number from 0 to below 1",
    "RUN --model_arg=hidden_units=99999999999": "=99999999999 is not an integer from 1 to 2147483647; give mlp one",
    "RUN --model_arg=hidden_units=": "hidden_units= is not such a list; give a value like ... 128",
    "RUN --optimizer_arg=beta1=0.5": "beta1: adam ... did you mean beta_1",
    "RUN --optimizer_arg=weight_decay_exclude=(": "weight_decay_exclude=( is not a regular expression; give adam one",
    "RUN --learning_rate_schedule=cosine --learning_rate_schedule_arg=alhpa=1": "alhpa: cosine ... did you mean alpha?",
}
# Those of what is there: of files and folders in `on_disk`, which is HERE.
OF_WHAT_IS_THERE = {
    "--flagfile=HERE/flags": "--flagfile=HERE/flags is not text in UTF-8 (invalid start byte)",
    "--model=mlp --input=mnist --data_dir=HERE": "HERE/train-images-idx3-ubyte",
    "RUN --run_dir=HERE/file/run": "HERE/file/run can't be written",
    "RUN --mode=eval --run_dir=HERE/none": "does not exist",
    "RUN --mode=eval --run_dir=HERE": "run_dir=HERE has no checkpoint ... train first",
    "RUN --mode=eval --run_dir=HERE/best_alone": "has no checkpoint in checkpoints/; use eval_checkpoint=best",
    "RUN --mode=eval --run_dir=HERE/run --eval_checkpoint=11": "_checkpoint=11 is none of latest, best, all, 9, 10",
    "RUN --mode=export --run_dir=HERE/run --output=HERE/file": "output: HERE/file can't be written",
    "RUN --mode=export --run_dir=HERE/run --export_since=HERE": "export_since=HERE has no folder tables/ ... give",
    "RUN --mode=export --run_dir=HERE/run --export_since=HERE/run --output=HERE/a.keras": (
        "export_since=HERE/run can't be combined with output=HERE/a.keras ... give"
    ),
}
BROKEN = ["", "{", "[]", '{"flags": {}}', '{"flags": 3, "deciding": null}', "\0\1"]
OF_WHAT_IS_THERE |= {
    f"RUN {('', '--mode=eval')[index % 2]} --run_dir=HERE/broken{index}": f"HERE/broken{index}/config.json "
    for index in range(len(BROKEN))
}


def words(line: str) -> list[str]:
    """What is typed, with RUN and MIRRORED as the flags that they are."""
    return [word for each in line.split() for word in {"RUN": RUN, "MIRRORED": MIRRORED}.get(each, (each,))]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """A folder with what `OF_WHAT_IS_THERE` gives, and no run of its own."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "file").touch()
    (folder / "flags").write_bytes(b"\xff\xfe")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "best_alone" / "best").mkdir(parents=True)
    (folder / "best_alone" / "best" / "ckpt-9.manifest.json").touch()
    for step in (9, 10):
        (folder / "run" / "checkpoints" / f"ckpt-{step}.manifest.json").touch()
    for index, text in enumerate(BROKEN):
        (folder / f"broken{index}").mkdir()
        (folder / f"broken{index}" / "config.json").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def ended(crank_each, on_disk):
    """How the program ends, by mistake."""
    lines = [*MISTAKES, *OF_WHAT_IS_THERE]
    return dict(zip(lines, crank_each([words(line.replace("HERE", on_disk)) for line in lines]), strict=True))


@pytest.mark.parametrize("line", [*MISTAKES, *OF_WHAT_IS_THERE])
def test_a_mistake_is_one_line_before_tensorflow_starts(ended, on_disk, line):
    ended[line].refused({**MISTAKES, **OF_WHAT_IS_THERE}[line].replace("HERE", on_disk))


@pytest.mark.parametrize("line", OF_WHAT_IS_NAMED)
def test_a_mistake_in_an_argument_of_what_is_named_is_one_line(line):
    with pytest.raises(UsageError) as caught:
        checked(*words(line))
    assert_says(caught.value.message, OF_WHAT_IS_NAMED[line])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--strategy=tpu"], "strategy=tpu: dlrm holds embedding tables, .*; use strategy=one_device"),
        ([*MIRRORED, "--shard_optimizer"], "shard_optimizer: dlrm holds embedding tables, .*; leave it out"),
    ],
)
def test_tables_where_they_cannot_be_trained(flags, line):
    with pytest.raises(UsageError, match=line):
        checks.check_tables(asked("--model=dlrm", "--input=synthetic_clicks", *flags), "dlrm")


def test_what_nobody_thought_of_is_one_line_too(inside, monkeypatch):
    def broken(config):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checks, "check", broken)
    assert "PermissionError: [Errno 13] Permission denied, at " in inside(*RUN).mistake
    assert "Traceback" in inside(*RUN, "--debug").err


@pytest.mark.thorough
@pytest.mark.parametrize("gone", ["disk", pytest.param("reader", marks=pytest.mark.slow)])
def test_a_run_outlives_what_it_prints_to(inside, monkeypatch, tmp_path, gone):
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(OSError), open("/dev/full" if gone == "disk" else writing, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        run = [*RUN, "--mode=train", "--jit=off", "--train_steps=3", "--checkpoint_every_steps=0"]
        outcome = inside(*run, f"--run_dir={tmp_path}/run")
    assert (tmp_path / "run/checkpoints/ckpt-3.manifest.json").exists()
    if gone == "disk":
        assert outcome.code == 1
        assert outcome.error == "a part of the output is lost: No space left on device"
    else:
        outcome.ok()
    assert outcome.err.count("further output is lost") == (gone == "disk")


@pytest.mark.holds("Links there are refused")
@pytest.mark.parametrize("name", ["checkpoints", "best"])
@pytest.mark.parametrize("target", [None, "gone", "other"])
def test_a_folder_for_checkpoints_that_is_none_of_the_runs_is_refused(tmp_path, name, target):
    (tmp_path / "other").mkdir()
    path = tmp_path / name
    path.symlink_to(target) if target else path.touch()
    why = f"is a link to {target}, and a run writes and removes" if target else "can't be written (a file); use"
    with pytest.raises(UsageError) as caught:
        program.check(asked(*RUN, f"--run_dir={tmp_path}"))
    assert f"run_dir: {path} {why}" in str(caught.value)


def test_a_folder_of_checkpoints_that_cannot_be_read(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(UsageError, match=rf"{tmp_path}/checkpoints can't be read \(Permission denied\); make it"):
        checks.checkpoint_steps(str(tmp_path))


@pytest.mark.thorough
def test_a_run_dir_of_another_configuration_names_the_differences(inside, tmp_path):
    run = [*RUN, "--mode=train", "--jit=off", "--model_arg=hidden_units=4", f"--run_dir={tmp_path}"]
    inside(*run, "--train_steps=1").ok()
    before = (tmp_path / "config.json").read_text()
    changed = [*run, "--seed=1", "--optimizer_arg=beta_1=0.8"]
    outcome = inside(*changed)
    assert "seed: 0 -> 1" in outcome.mistake
    assert "optimizer_arg beta_1: None -> 0.8" in outcome.error
    assert "hidden_units" not in outcome.error  # 4, as before
    assert "allow_changed_config" in outcome.error
    wider = (word.replace("hidden_units=4", "hidden_units=5") for word in run)
    outcome = inside(*wider, "--allow_changed_config", "--train_steps=2")
    assert "of another model or optimizer" in outcome.mistake
    assert "[784, 5] float32 here, [784, 4] float32 in the checkpoint" in outcome.err
    assert (tmp_path / "config.json").read_text() == before
    outcome = inside(*changed, "--allow_changed_config", "--train_steps=2")
    assert "epoch 1 began with seed=0, and this run would repeat some examples and skip others" in outcome.mistake
    outcome = inside(*run, "--optimizer_arg=beta_1=0.8", "--allow_changed_config", "--train_steps=2").ok()
    assert "resumed at step 1 of 2" in outcome.out
    # From now on, this is what the run is.
    assert "optimizer_arg beta_1: 0.8 -> None" in inside(*run).error


def in_80_columns(*arguments: str, command: str = "train") -> list[str]:
    """What a command prints in a terminal of 80 columns, by a Python that leaves out what it may, docstrings."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    line = [sys.executable, "-OO", "-m", "crankshaft", command, *arguments]
    with subprocess.Popen(line, stdout=writing, cwd=ROOT, env=environment) as program:
        os.close(writing)
        content = b""
        with contextlib.suppress(OSError):  # as a terminal ends
            while piece := os.read(reading, 4096):
                content += piece
    os.close(reading)
    assert program.returncode == 0
    lines = content.decode().splitlines()
    assert max(map(len, lines)) <= 80
    return lines


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", "local", "prepare"])
def test_help_breaks_no_word_in_a_terminal_and_needs_no_docstrings(crank_each, command):
    (piped,) = crank_each([["--help"]], command)
    lines = in_80_columns("--help", command=command)
    assert "".join("".join(lines).split()) == "".join(piped.ok().out.split())
    assert not any(line.endswith("-") for line in lines)


@pytest.mark.thorough
def test_help_names_every_flag_once_by_group_and_every_model_and_input(crank_each):
    """The short one has whole texts, choices and defaults: a line a flag where it is piped."""
    helped, full, short = crank_each([["--help"], ["--helpfull"], ["--helpshort"]])
    assert full.ok().out == helped.ok().out
    lines = helped.out.splitlines()
    shown = [line.split("=")[0].strip().removeprefix("--").removeprefix("[no]") for line in lines if line[:4] == "  --"]
    assert shown == [name for names in GROUPS.values() for name in names]
    assert len(shown) == len(set(shown))
    assert {"  --mesh=data:D,model:M", "  --seed=..."} <= {*lines}
    assert f"{FLAG_INFO['global_batch_size'].help} [64] --" in " ".join(helped.out.split())
    assert f"{FLAG_INFO['run_dir'].help} --" in " ".join(helped.out.split())  # which has no default
    assert [line[:-1] for line in lines if line in {f"{title}:" for title in GROUPS}] == list(GROUPS)
    assert all(", ".join(names) in " ".join(helped.out.split()) for names in registry.NAMES.values())
    lines = short.ok().out.splitlines()
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  --")}
    assert [*shown] == [f"--{name}" for name in ESSENTIAL]
    assert all(shown[f"--{name}"].startswith(FLAG_INFO[name].help) for name in ESSENTIAL)
    assert shown["--jit"].endswith(" One of auto, on, off. [auto]")
    assert shown["--global_batch_size"].endswith(" [64]")
    assert shown["--run_dir"] == FLAG_INFO["run_dir"].help  # free, and without a default
    assert {"validation_split", "seed", "early_stopping", "restore_best", "config"} < set(ESSENTIAL)
    in_terminal = " ".join(" ".join(in_80_columns("--helpshort")).split())
    assert all(text in in_terminal for text in shown.values())


def test_help_shows_the_arguments_of_the_model_and_input_that_are_given(inside):
    out = " ".join(inside("--model=mlp", "--input=criteo", "--help").ok().out.split())
    for kind, name in (("model", "mlp"), ("input", "criteo")):
        entry = registry.find(kind, name)
        assert f" {name} {' '.join(entry.summary.split())} [--{kind}_arg" in out
        assert all(f" {argument}=" in out for argument in entry.defaults)


@pytest.mark.thorough
def test_help_may_be_cut_short_by_its_reader():
    command = [sys.executable, "-m", "crankshaft", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as program:
        program.stdout.close()  # as `head` does, only sooner
        assert program.stderr.read() == b""
    assert program.returncode == 0
    with open("/dev/full", "wb") as full:  # and a disk that is full is named
        command = [sys.executable, "-m", "crankshaft", "train", "--help"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    line = "error: a part of the output is lost: No space left on device\n"
    assert (ended.returncode, ended.stderr.splitlines(keepends=True)[-1]) == (1, line)
