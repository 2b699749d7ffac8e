"""A run on a stream that was ended and resumed gives the bits of one that was not."""

from __future__ import annotations

import itertools
import json
import pathlib
import signal

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.models.mlp import Model
from tests.launch import streamed_digits
from tests.launch.line import Line
from tests.runs import assert_equal_bits, manifests, newest

SCRIPT = pathlib.Path(streamed_digits.__file__)
RUN = ("--model_arg=hidden_units=16", "--model_arg=dropout=0.3", "--global_batch_size=32", "--shuffle_buffer=60")
RUN += ("--progress=plain", "--jit=off")
TWO = ("--strategy=mirrored", "--num_virtual_devices=2")
COUNTED = f"counting examples: {streamed_digits.EXAMPLES}\n"


@pytest.fixture
def folder(tmp_path):
    """Seven files of examples."""
    (tmp_path / "files").mkdir()
    streamed_digits.write_files(tmp_path / "files", 7)
    return tmp_path / "files"


@pytest.fixture
def ran(inside, folder):
    """`ran(*flags, kind=)`: how a run on the files ended, in this process."""
    return lambda *flags, kind="files": inside(
        *RUN, *flags, trainer=Model, data=lambda: streamed_digits.data(folder, kind)
    )


@pytest.mark.slow
def test_one_device_after_sigkill_within_an_epoch(crank, folder, tmp_path):
    run = [*RUN, "--train_steps=50"]
    killed = json.dumps([[*run, "--checkpoint_every_steps=10", f"--run_dir={tmp_path}/run"]])
    outcome = crank(folder, "files", killed, "SIGKILL", 35, script=SCRIPT)
    assert outcome.code == -signal.SIGKILL
    step = newest(tmp_path / "run")
    assert step in (20, 30)  # of 30, the writing may have been under way
    assert COUNTED in outcome.out
    runs = json.dumps([[*run, f"--run_dir={tmp_path}/run"], [*run, f"--run_dir={tmp_path}/straight"]])
    both = crank(folder, "files", runs, script=SCRIPT).ok()
    assert f"resumed at step {step} of 50" in both.out
    assert both.out.count(COUNTED) == 1  # the resumed one knows it
    assert "reading the epoch again" not in both.out
    assert "the position in the training data takes" in both.out
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_a_run_in_two_parts_is_one(ran, tmp_path):
    """Of a stream whose state can't be kept: the epoch is read again."""
    run = f"--run_dir={tmp_path}/run"
    assert "can't be kept in checkpoints" in ran(run, "--train_steps=18", kind="stateful").ok().err
    assert "reading the epoch again, batches: 3 of 3\n" in ran(run, "--train_steps=40", kind="stateful").ok().out
    ran(f"--run_dir={tmp_path}/straight", "--train_steps=40", kind="stateful").ok()
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_a_run_on_a_stream_is_evaluated_without_counting_and_files_that_change_meanwhile_are_one_line(
    ran, folder, tmp_path
):
    """The count is the first run's: the end of the epoch shows a change."""
    run = f"--run_dir={tmp_path}/run"
    ran(run, "--train_steps=5").ok()
    outcome = ran("--mode=eval", run).ok()
    assert "evaluation at step 5" in outcome.out
    assert "counting examples" not in outcome.out
    assert manifests(tmp_path / "run")[-1]["about"]["input"] == {"train": {"by": "example", "counts": [461]}}
    with open(folder / "3.txt", "a") as file:
        file.write("0\n")
    outcome = ran(run, "--train_steps=40")
    outcome.refused("an epoch of the data has at least 462 examples, and the run goes by 461")


def test_a_stream_without_examples_and_flags_for_examples_with_indices_are_refused(ran, folder):
    for setting in ("max_bad_records=3", "shuffle_window=8"):
        said = f"{setting} is for examples that are read by their indices, and the train data is a stream; leave it out"
        assert ran("--train_steps=5", f"--{setting}").mistake == said
    for path in folder.iterdir():
        path.write_text("")
    ran("--train_steps=5").refused("num_examples=0 makes no batch; the data is empty")


def test_one_example_is_an_epoch(ran, folder, tmp_path):
    for path in folder.iterdir():
        path.write_text("7\n" if path.name == "3.txt" else "")
    for steps in (3, 6):
        ran(f"--run_dir={tmp_path}/run", f"--train_steps={steps}").ok()
    assert newest(tmp_path / "run") == 6


def endless():
    """Examples without an end, and how many of them were made."""
    made = []

    def examples():
        for number in itertools.count():
            made.append(number)
            yield np.float32([number % 7, number % 11, 1.0]), np.float32(number % 5)

    spec = tf.TensorSpec([3]), tf.TensorSpec([])
    return tf.data.Dataset.from_generator(examples, output_signature=spec), made


@pytest.mark.parametrize(
    "form", ["generator", *(pytest.param(x, marks=pytest.mark.slow) for x in ("repeat", "passes"))]
)
def test_data_without_an_end_is_not_counted_where_no_epoch_matters(inside, tmp_path, form):
    """A run that is resumed has the bits of one that was not, though it was to end elsewhere at first."""

    def ran(name, steps):
        data, made = endless()
        if form != "generator":
            few = tf.data.Dataset.from_tensor_slices((np.eye(3, dtype="float32"), np.float32([0, 1, 2])))
            data = few.repeat() if form == "repeat" else tf.data.Dataset.range(1).flat_map(lambda _: few)
        flags = (*RUN[2:], f"--train_steps={steps}", "--eval_every_steps=4", f"--run_dir={tmp_path / name}")
        outcome = inside(*flags, trainer=Line, data=lambda: (data, (np.eye(3), np.ones(3)))).ok()
        return outcome.out, made

    out, made = ran("run", 5)
    assert "examples that are not counted, batches of 32, 5 steps" in out
    assert len(made) < 1000
    ran("run", 12)
    ran("straight", 12)
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_what_may_not_end_is_counted_for_as_long_as_may_be(inside):
    flags = (*RUN[2:], "--train_epochs=2", "--step_timeout_seconds=2")
    outcome = inside(*flags, trainer=Line, data=lambda: (endless()[0], None))
    assert "may never end; give train_steps, and eval_every_steps if there is evaluation data" in outcome.mistake


def test_a_pipeline_that_writes_a_cache_is_read_again_after_a_stop_and_a_kill(inside, tmp_path):
    """Its position can't be kept: a checkpoint does not hold the file. A kill leaves it half written."""
    points = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")

    def ran(name, steps):
        data = tf.data.Dataset.from_tensor_slices((points, points[:, 0])).map(lambda x, y: (2 * x, y))
        cached = data.cache(f"{tmp_path}/{name}.cache")
        flags = ("--global_batch_size=8", *RUN[3:], f"--train_steps={steps}", f"--run_dir={tmp_path / name}")
        return inside(*flags, trainer=Line, data=lambda: (cached, None))

    assert "the dataset writes" in ran("run", 3).ok().err
    ran("run", 20).ok()
    ran("straight", 20).ok()
    assert_equal_bits(tmp_path / "run", tmp_path / "straight", "train")
    (tmp_path / "other.cache_0.lockfile").write_text("Created at: 1")
    assert f"{tmp_path}/other.cache_0.lockfile is there; if no other process reads this" in ran("other", 3).mistake
