"""Mistakes on the command line: code 2, one line with the cure, found before TensorFlow starts. Each is a process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

from crankshaft.engine.errors import with_flags
from crankshaft.launch.command_line import checks, registry
from crankshaft.launch.errors import UsageError
from tests.launch.command_line.test_config import asked, checked

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.getcwd()  # of which a relative path is
RUN = ("--model=mlp", "--input=digits")
MIRRORED = ("--strategy=mirrored", "--num_virtual_devices=8")

# What is given, and what the line has to say: the name, the value found, the cure.
MISTAKES = {
    "an unknown flag": (["--modle=cnn"], ["--modle", "did you mean", "model"]),
    "a part of a flag's name": (["--batch_size=3"], ["did you mean global_batch_size or eval_batch_size"]),
    "a keyword of Keras's": (["--class_weight=3"], ["--class_weight is unknown; see --help"]),
    "a flag like no other": (["--qqq=1"], ["--qqq is unknown", "--help"]),
    "a word that is not a flag": ([*RUN, "twice"], ["'twice' is not a flag", "--NAME=VALUE"]),
    "no model": (
        ["--input=digits"],
        ["--model is not given", "cnn, dlrm, logistic, mlp, resnet, transformer_lm, wide_deep"],
    ),
    "neither": ([], ["--model and --input are not given", "--model=mlp --input=digits", "wide_deep", "tfrecord"]),
    "no input": (["--model=mlp"], ["--input is not given", "digits", "synthetic"]),
    "an unknown model": (["--model=mpl", "--input=digits"], ["--model=mpl", "did you mean mlp?"]),
    "an unknown input": (["--model=mlp", "--input=digit"], ["--input=digit", "did you mean digits?"]),
    "an unknown mode": ([*RUN, "--mode=trian"], ["--mode=trian", "did you mean train"]),
    "an unknown strategy": ([*RUN, "--strategy=mirored"], ["--strategy=mirored", "did you mean mirrored"]),
    "an unknown schedule": ([*RUN, "--learning_rate_schedule=cosin"], ["_schedule=cosin", "did you mean cosine?"]),
    "a model argument without a value": (
        [*RUN, "--model_arg=dropout"],
        ["--model_arg=dropout can't be used: it has no value", "NAME=VALUE"],
    ),
    "an input without arguments": (["--model=logistic", "--input=digits", "--input_arg=x=1"], ["digits takes no"]),
    "an unknown input argument": (
        ["--model=mlp", "--input=synthetic", "--input_arg=exampels=3"],
        ["--input_arg exampels: synthetic", "did you mean examples"],
    ),
    "an input argument out of range": (
        ["--model=mlp", "--input=synthetic", "--input_arg=classes=1"],
        ["classes=1 is too small", "at least 2"],
    ),
    "a flag without its value": ([*RUN, "--train_steps"], ["--train_steps", "Missing value"]),
    "a level of messages that there is not": (
        ["--stderrthreshold=loud"],
        ["--stderrthreshold must be one of", "not 'loud'; see --help"],
    ),
    "a mesh that is none": ([*RUN, *MIRRORED, "--mesh=model:2,model:2"], ["it is not a mesh", "data:2,model:2"]),
    "a model in parts whose gradients are compressed": (
        [*RUN, *MIRRORED, "--mesh=model:2", "--powersgd_rank=2"],
        ["--mesh=model:2 does not go with --powersgd_rank=2", "leave one out"],
    ),
    "no steps": ([*RUN, "--train_steps=0"], ["--train_steps=0", "an integer from 1 to"]),
    "no epochs": ([*RUN, "--train_epochs=0"], ["--train_epochs=0", "a number above 0"]),
    "a benchmark of steps and seconds": (
        [*RUN, "--mode=benchmark", "--benchmark_arg=steps=3", "--benchmark_arg=seconds=2"],
        ["--benchmark_arg", "steps=3 and seconds=2 are both given", "use one"],
    ),
    "a flag that is gone": ([*RUN, "--benchmark_part=all"], ["--benchmark_part is unknown", "benchmarks.parts"]),
    "a limit for no comparison": (
        [*RUN, "--mode=benchmark", "--benchmark_arg=fail_below=0.9"],
        ["--benchmark_arg fail_below=0.9", "--baseline"],
    ),
    "rounds that are no count": (
        [*RUN, "--mode=benchmark", "--benchmark_arg=rounds=0"],
        ["--benchmark_arg rounds=0 is not an integer from 1"],
    ),
    "a flag that is an argument now": (
        [*RUN, "--benchmark_rounds=2"],
        ["--benchmark_rounds is unknown; use --benchmark_arg=rounds=VALUE"],
    ),
    "steps and epochs": (
        [*RUN, "--train_steps=3", "--train_epochs=2"],
        ["--train_steps and --train_epochs", "use one"],
    ),
    "a batch that does not divide": ([*RUN, *MIRRORED, "--global_batch_size=100"], ["=100 does", "8 ", "96 or 104"]),
    "a batch smaller than the replicas": ([*RUN, *MIRRORED, "--global_batch_size=3"], ["=3 does not", "use 8"]),
    "GPUs that are not numbers": (
        [*RUN, "--gpus=0,a"],
        ["--gpus=0,a ", "not a list of GPUs' numbers", "e.g. 0,1, or none"],
    ),
    "xla over replicas": ([*RUN, *MIRRORED, "--jit=on"], ["--jit=on needs one replica", "8", "--jit=auto or off"]),
    "xla with checks": ([*RUN, "--jit=on", "--check_numerics"], ["--jit=on", "--check_numerics", "--jit=auto or off"]),
    "workers without a cluster": ([*RUN, "--strategy=multi_worker"], ["TF_CONFIG is not set", "crankshaft local"]),
    "servers without a cluster": (
        [*RUN, "--strategy=parameter_server"],
        ["TF_CONFIG is not set", "crankshaft local --workers=2 --ps=2"],
    ),
    "evaluation between syncs": (
        [*RUN, *MIRRORED, "--sync_every_steps=16", "--eval_every_steps=100"],
        ["--eval_every_steps=100 is not a multiple of --sync_every_steps=16", "use 96 or 112"],
    ),
    "an average of weights that drift": (
        [*RUN, *MIRRORED, "--sync_every_steps=16", "--ema_decay=0.9"],
        ["--ema_decay=0.9", "--sync_every_steps=16", "leave one"],
    ),
    "a loss scale for each replica": (
        [*RUN, *MIRRORED, "--sync_every_steps=16", "--precision=float16"],
        ["--precision=float16", "--sync_every_steps=16", "leave one"],
    ),
    "a sharded optimizer and replicas that train alone": (
        [*RUN, *MIRRORED, "--shard_optimizer", "--sync_every_steps=16"],
        ["--shard_optimizer does not go with --sync_every_steps=16", "leave one"],
    ),
    "two ways to send less": (
        [*RUN, *MIRRORED, "--sync_every_steps=16", "--powersgd_rank=2"],
        ["--powersgd_rank=2", "--sync_every_steps=16", "leave one"],
    ),
    "a warm-up as long as the run": (
        [*RUN, "--train_steps=5", "--warmup_steps=5"],
        ["--warmup_steps=5 leaves nothing of --train_steps=5"],
    ),
    "no regular expression": (
        [*RUN, "--freeze=(:2"],
        ["--freeze=(:2 can't be used: it is not a regular expression", "bias|gamma"],
    ),
    "epochs that are no number": (
        [*RUN, "--freeze=hidden:some"],
        ["--freeze=hidden:some can't be used: its epochs are not a number above 0", "e.g. backbone:3"],
    ),
    "epochs of nothing": ([*RUN, "--freeze=:2"], ["--freeze=:2 can't be used: it has no regular expression"]),
    "a folder for a result": ([*RUN, "--result_json=."], [f"--result_json={HERE} is a folder", "a file"]),
    "micro-batches of nothing": ([*RUN, "--accumulate_steps=65"], ["--accumulate_steps=65", "64", "fewer"]),
    "an average that never moves": (
        [*RUN, "--ema_decay=1"],
        ["--ema_decay=1 can't be used: it takes a number from 0 to below 1"],
    ),
    "a monitor of nothing": ([*RUN, "--monitor=loss"], ["--monitor=loss", "eval_loss or train_loss"]),
    "early stopping without evaluations": (
        [*RUN, "--mode=train", "--early_stopping=patience=2"],
        ["--early_stopping", "eval_loss", "makes no evaluations", "--monitor=train_loss"],
    ),
    "a plateau without evaluations": (
        [*RUN, "--mode=train", "--reduce_lr=patience=2", "--monitor=eval_accuracy"],
        ["--reduce_lr", "--monitor=train_accuracy or --mode=train_and_eval"],
    ),
    "a plateau of a single evaluation": (
        [*RUN, "--reduce_lr=patience=2", "--eval_every_steps=0"],
        ["--eval_every_steps=0 makes none before the end", "--monitor=train_loss or evaluate more often"],
    ),
    "evaluation of no run": ([*RUN, "--mode=eval"], ["--mode=eval needs --run_dir"]),
    "a bucket for a folder": (
        [*RUN, "--init_from=gs://bucket/run"],
        [
            "--init_from=gs://bucket/run can't be used: it is not a path of a mounted file system",
            "mount the bucket or give",
        ],
    ),
    "a variable that is not set": ([*RUN, "--data_dir="], ["--data_dir is empty", "give a path, or leave it out"]),
    "a run that could not be read": (
        [*RUN, "--run_dir=lr[1]"],
        [f"--run_dir={HERE}/lr[1] has a [", "has a [ in it", "without"],
    ),
    "export of no run": ([*RUN, "--mode=export"], ["--mode=export needs --run_dir"]),
    "weights of no run": ([*RUN, "--init_from=nowhere"], [f"--init_from={HERE}/nowhere does not exist", "give"]),
    "no such data_dir": (
        ["--model=mlp", "--input=mnist", "--data_dir=nowhere"],
        [f"--data_dir={HERE}/nowhere does not exist"],
    ),
    "a data_dir that is not read": (
        [*RUN, "--data_dir=."],
        [f"data_dir={HERE} is not read by", "digits", "leave --data_dir out"],
    ),
}
# Those of what has to be imported, which is TensorFlow.
OF_WHAT_IS_NAMED = {
    "an unknown optimizer": ([*RUN, "--optimizer=adamm"], ["--optimizer=adamm", "did you mean adam"]),
    "an optimizer like no other": ([*RUN, "--optimizer=qqq"], ["--optimizer=qqq", "use one of", "momentum", "lion"]),
    "an unknown model argument": (
        [*RUN, "--model_arg=hiden_units=3"],
        ["hiden_units: mlp", "did you mean hidden_units"],
    ),
    "a model argument of another type": ([*RUN, "--model_arg=dropout=much"], ["dropout=much is not a number", "like"]),
    "all of it dropped out": ([*RUN, "--model_arg=dropout=1"], ["dropout=1.0 is not a number from 0 to below 1"]),
    "more units than anything has": (
        [*RUN, "--model_arg=hidden_units=99999999999"],
        ["hidden_units=99999999999 is not an integer from 1 to 2147483647; give mlp one that is"],
    ),
    "no units": ([*RUN, "--model_arg=hidden_units="], ["hidden_units= is not such a list; give a value like", "128"]),
    "an unknown optimizer argument": ([*RUN, "--optimizer_arg=beta1=0.5"], ["beta1: adam", "did you mean beta_1"]),
    "no regular expression of an optimizer": (
        [*RUN, "--optimizer_arg=weight_decay_exclude=("],
        ["weight_decay_exclude=( is not a regular expression; give adam one that is"],
    ),
    "an unknown schedule argument": (
        [*RUN, "--learning_rate_schedule=cosine", "--learning_rate_schedule_arg=alhpa=1"],
        ["alhpa: cosine", "did you mean alpha?"],
    ),
}


# Those of what is there: of files and folders in `on_disk`.
NO_CHECKPOINT = "--run_dir={} has no checkpoint"
OF_WHAT_IS_THERE = {
    "a flagfile that is no text": (
        ["--flagfile={}/flags"],
        ["--flagfile={}/flags is not text in UTF-8 (invalid start byte)"],
    ),
    "a data_dir without the files": (["--model=mlp", "--input=mnist", "--data_dir={}"], ["{}/train-images-idx3-ubyte"]),
    "a run_dir that cannot be written": ([*RUN, "--run_dir={}/file/run"], ["{}/file/run can't be written"]),
    "an evaluation of no run_dir": ([*RUN, "--mode=eval", "--run_dir={}/none"], ["does not exist"]),
    "an export of no run_dir": ([*RUN, "--mode=export", "--run_dir={}/none"], ["does not exist"]),
    "an evaluation of no checkpoint": ([*RUN, "--mode=eval", "--run_dir={}"], [NO_CHECKPOINT, "train first"]),
    "an export of no checkpoint": ([*RUN, "--mode=export", "--run_dir={}"], [NO_CHECKPOINT, "train first"]),
    "an unknown checkpoint": (
        [*RUN, "--mode=eval", "--run_dir={}/run", "--eval_checkpoint=11"],
        ["--eval_checkpoint=11 is none of latest, best, all, 9, 10"],
    ),
    "a folder for exports that cannot be written": (
        [*RUN, "--mode=export", "--run_dir={}/run", "--output={}/file"],
        ["--output: {}/file can't be written"],
    ),
}
BROKEN = ["", "{", "[]", '{"flags": {}}', '{"flags": 3, "deciding": null}', "\0\1"]
for index in range(len(BROKEN)):
    for mode in ("train_and_eval", "eval"):
        run_dir = f"{{}}/broken{index}"
        given = [*RUN, f"--mode={mode}", f"--run_dir={run_dir}"]
        OF_WHAT_IS_THERE[f"a broken configuration {index}, {mode}"] = (given, [f"{run_dir}/config.json "])


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """A folder with what `OF_WHAT_IS_THERE` gives, and no run of its own."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "file").touch()
    (folder / "flags").write_bytes(b"\xff\xfe")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    for step in (9, 10):
        (folder / "run" / "checkpoints" / f"ckpt-{step}.manifest.json").touch()
    for index, text in enumerate(BROKEN):
        (folder / f"broken{index}").mkdir()
        (folder / f"broken{index}" / "config.json").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def ended(crank_each, on_disk):
    """How the program ends, by mistake."""
    there = [[each.replace("{}", on_disk) for each in given] for given, _ in OF_WHAT_IS_THERE.values()]
    outcomes = crank_each([*(given for given, _ in MISTAKES.values()), *there])
    return dict(zip([*MISTAKES, *OF_WHAT_IS_THERE], outcomes, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_tensorflow_starts(ended, mistake):
    outcome = ended[mistake]
    for words in MISTAKES[mistake][1]:
        assert words in outcome.mistake


@pytest.mark.parametrize("mistake", OF_WHAT_IS_THERE)
def test_a_mistake_of_what_is_there_is_one_line_too(ended, on_disk, mistake):
    outcome = ended[mistake]
    for words in OF_WHAT_IS_THERE[mistake][1]:
        assert words.replace("{}", on_disk) in outcome.mistake


@pytest.mark.parametrize("mistake", OF_WHAT_IS_NAMED)
def test_a_mistake_in_an_argument_of_what_is_named_is_one_line(mistake):
    given, expected = OF_WHAT_IS_NAMED[mistake]
    with pytest.raises(UsageError) as caught:
        checked(*given)
    assert all(words in with_flags(caught.value.message) for words in expected)


@pytest.mark.slow
def test_such_a_mistake_ends_the_program_before_anything_is_made(crank):
    outcome = crank(*RUN, "--model_arg=dropout=much")
    assert (outcome.code, outcome.out) == (2, "")
    assert "dropout=much is not a number" in outcome.error


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--strategy=tpu"], "strategy=tpu: dlrm holds embedding tables, .*; use strategy=one_device"),
        ([*MIRRORED, "--shard_optimizer"], "shard_optimizer: dlrm holds embedding tables, .*; leave it out"),
    ],
)
def test_tables_where_they_cannot_be_trained(given, line):
    with pytest.raises(UsageError, match=line):
        checks.check_tables(asked("--model=dlrm", "--input=synthetic_clicks", *given), "dlrm")


def test_what_nobody_thought_of_is_one_line_too(inside, monkeypatch):
    def broken(config):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checks, "check", broken)
    assert "PermissionError: [Errno 13] Permission denied, at " in inside(*RUN).mistake
    assert "Traceback" in inside(*RUN, "--debug").err


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
        assert outcome.error == "a part of what was printed is lost: No space left on device"
    else:
        outcome.ok()
    assert outcome.err.count("what is printed is lost") == (gone == "disk")


@pytest.mark.parametrize("name", ["checkpoints", "best"])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.touch(), "can't be written (a file); use a folder that can"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, and a run writes and removes"),
        (lambda path: path.symlink_to("other"), "is a link to other, and a run writes and removes"),
    ],
)
def test_a_folder_for_checkpoints_that_is_none_of_the_runs_is_refused(tmp_path, name, make, why):
    (tmp_path / "other").mkdir()
    make(tmp_path / name)
    with pytest.raises(UsageError) as caught:
        checks.check(asked(*RUN, f"--run_dir={tmp_path}"))
    assert f"run_dir: {tmp_path}/{name} {why}" in str(caught.value)


def test_a_folder_of_checkpoints_that_cannot_be_read(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(UsageError, match=rf"{tmp_path}/checkpoints can't be read \(Permission denied\); make it"):
        checks.checkpoint_steps(str(tmp_path))


def test_a_run_dir_of_another_configuration_names_the_differences(inside, tmp_path):
    run = [*RUN, "--mode=train", "--jit=off", "--model_arg=hidden_units=4", f"--run_dir={tmp_path}"]
    inside(*run, "--train_steps=1").ok()
    changed = [*run, "--seed=1", "--optimizer_arg=beta_1=0.8"]
    outcome = inside(*changed)
    assert "seed: 0 -> 1" in outcome.mistake
    assert "optimizer_arg beta_1: None -> 0.8" in outcome.error
    assert "hidden_units" not in outcome.error  # 4, as before
    assert "--allow_changed_config" in outcome.error
    outcome = inside(*changed, "--allow_changed_config", "--train_steps=2").ok()
    assert "resumed at step 1 of 2" in outcome.out
    # From now on, this is what the run is.
    assert "seed: 1 -> 0" in inside(*run).error


@pytest.mark.slow
def test_a_run_that_cannot_be_gone_on_with_stays_what_it_is(inside, tmp_path):
    run = [*RUN, "--mode=train", "--jit=off", "--model_arg=hidden_units=4", f"--run_dir={tmp_path}"]
    inside(*run, "--train_steps=1").ok()
    before = (tmp_path / "config.json").read_text()
    wider = (word.replace("hidden_units=4", "hidden_units=5") for word in run)
    outcome = inside(*wider, "--allow_changed_config", "--train_steps=2")
    assert "of another model or optimizer" in outcome.mistake
    assert "[784, 5] float32 here, [784, 4] float32 in the checkpoint" in outcome.err
    assert (tmp_path / "config.json").read_text() == before
    inside(*run, "--train_steps=2").ok()


def test_a_run_dir_in_use_names_the_process_that_uses_it(crank, tmp_path):
    holding = f"from crankshaft.launch.host import process\nwith process.lock({str(tmp_path)!r}): print(1), input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", holding],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert holder.stdout.readline() == b"1\n"
        outcome = crank(*RUN, f"--run_dir={tmp_path}", tensorflow=False)
        assert f"{tmp_path} is in use by process {holder.pid}" in outcome.mistake
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    # A process that was killed holds nothing.
    assert "TensorFlow was started" in crank(*RUN, f"--run_dir={tmp_path}", tensorflow=False).error


def test_help_names_every_flag_once_by_group(crank):
    from crankshaft.launch.command_line.flags import GROUPS

    outcome = crank("--help", tensorflow=False).ok()
    lines = outcome.out.splitlines()
    defined = crank("--helpfull", tensorflow=False).ok()
    assert defined.out == outcome.out
    shown = [line.split("=")[0].strip().removeprefix("--").removeprefix("[no]") for line in lines if line[:4] == "  --"]
    assert shown == [name for names in GROUPS.values() for name in names]
    assert len(shown) == len(set(shown))
    assert [line[:-1] for line in lines if line in {f"{title}:" for title in GROUPS}] == list(GROUPS)


@pytest.mark.parametrize(
    "command", ["train", pytest.param("local", marks=pytest.mark.slow), pytest.param("prepare", marks=pytest.mark.slow)]
)
def test_help_does_not_need_what_python_may_leave_out(crank, command):
    bare = subprocess.run(
        [sys.executable, "-OO", "-m", "crankshaft", command, "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert bare.stdout.split() == crank("--help", command=command).ok().out.split()


def test_help_names_every_model_and_input_and_shows_the_arguments_of_those_that_are_given(crank):
    out = " ".join(crank("--help", tensorflow=False).ok().out.split())
    assert all(", ".join(names) in out for names in registry.NAMES.values())
    out = " ".join(crank("--model=mlp", "--input=ratings", "--help").ok().out.split())
    for kind, name in (("model", "mlp"), ("input", "ratings")):
        entry = registry.find(kind, name)
        assert f" {name} {' '.join(entry.summary.split())} [--{kind}_arg" in out
        assert all(f" {argument}=" in out for argument in entry.defaults)


def test_help_may_be_cut_short_by_its_reader():
    command = [sys.executable, "-m", "crankshaft", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.close()  # as `head` does, only sooner
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_short_help_shows_whole_texts_choices_and_defaults(crank):
    """A line a flag where it is piped; in a terminal of 80 columns none that is longer, and no word is broken."""
    from crankshaft.launch.command_line.flags import FLAG_INFO
    from crankshaft.launch.command_line.help import ESSENTIAL

    lines = crank("--helpshort", tensorflow=False).ok().out.splitlines()
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  --")}
    assert [*shown] == [f"--{name}" for name in ESSENTIAL]
    assert all(shown[f"--{name}"].startswith(FLAG_INFO[name].help) for name in ESSENTIAL)
    assert shown["--jit"].endswith(" One of auto, on, off. [auto]")
    assert shown["--global_batch_size"].endswith(" [64]")
    assert shown["--run_dir"] == FLAG_INFO["run_dir"].help  # free, and without a default
    assert {"validation_split", "seed", "early_stopping", "restore_best", "config"} < set(ESSENTIAL)
    in_terminal = in_80_columns("--helpshort")
    assert max(map(len, in_terminal)) <= 80
    words = " ".join(" ".join(in_terminal).split())
    assert all(text in words for text in shown.values())


@pytest.mark.parametrize("command", ["train", "local", "prepare"])
def test_help_breaks_no_word_in_a_terminal_of_80_columns(command):
    lines = in_80_columns("--help", command=command)
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("-") for line in lines)


def in_80_columns(*arguments: str, command: str = "train") -> list[str]:
    """What a command prints in a terminal of 80 columns."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    line = [sys.executable, "-m", "crankshaft", command, *arguments]
    with subprocess.Popen(line, stdout=writing, cwd=ROOT, env=environment) as process:
        os.close(writing)
        content = b""
        with contextlib.suppress(OSError):  # as a terminal ends
            while piece := os.read(reading, 4096):
                content += piece
    os.close(reading)
    assert process.returncode == 0
    return content.decode().splitlines()
