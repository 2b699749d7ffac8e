"""A run that was ended and resumed gives the bits of one that was not, wherever its loops were cut. Real processes end.

Runs have 60 steps of digits, 23 an epoch. One that is compared with a process is a process: in this one, the first test
that touched TensorFlow has set the threads of an operation for good, on which the bits depend.

A run on a stream that was ended and resumed gives the bits of one that was not.

kill -9 at any moment, while a checkpoint is written too: the next start works, and the run ends on the same bits.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import re
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.models.mlp import Model
from tests.launch import streamed_digits
from tests.launch.line import Line
from tests.runs import assert_equal_bits, manifests, metrics, newest, steps, tensors

TWO = ("--strategy=mirrored", "--num_virtual_devices=2")
MLP = ("--model=mlp", "--model_arg=hidden_units=24,16", "--model_arg=dropout=0.3")
CNN = ("--model=cnn", "--model_arg=batch_norm=true")
RUN = ("--input=digits", "--train_steps=60", "--progress=plain")

# The launcher, with a hook that sends its own process a signal after a step: the moment is known, the end is real.
ENDED = """
import os, signal, sys
from crankshaft.engine.hooks import every_steps
from crankshaft.launch import train

name, step, *flags = sys.argv[1:]

def end(status, means):
    os.kill(os.getpid(), signal.Signals[name])

train.main(hooks=[every_steps(int(step), end)], argv=[sys.argv[0], *flags])
"""


# The launcher, time after time in one process, whose threads are those of a process of its own.
RUNS = """
import json, sys
import tensorflow as tf
from crankshaft.launch import train

for flags in json.loads(sys.argv[1]):
    try:
        tf.distribute.MirroredStrategy._collective_key_base += 1 << 16  # see `inside`
        train.main(argv=[sys.argv[0], *flags])
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.fixture
def runs(crank, tmp_path):
    """`runs(flags, ...)`: the output of these runs, one after the other in one process."""
    script = tmp_path / "runs.py"
    script.write_text(RUNS)
    return lambda *runs: crank(json.dumps(runs), script=script).ok()


@pytest.fixture
def ended(crank, tmp_path):
    """`ended(signal, step, *flags)`: how a process ended that got this signal after that step of its run."""
    script = tmp_path / "ended.py"
    script.write_text(ENDED)
    return lambda name, step, *flags: crank(name, step, *flags, script=script)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "ends", "kept", "then", "straight"),
    [
        ((*MLP, "--jit=on"), ("SIGTERM", 30, 143), (), (), ()),
        (CNN, ("SIGKILL", 40, -9), ("--checkpoint_every_steps=15",), ("--steps_per_loop=4",), ("--jit=JIT",)),
        ((*CNN, *TWO), ("SIGINT", 31, 130), (), ("--checkpoint_every_steps=7",), ()),
        (
            (*MLP, *TWO, "--ema_decay=0.9", "--learning_rate_schedule=cosine", "--warmup_steps=5"),
            *(("SIGKILL", 25, -9), ("--checkpoint_every_steps=10",), (), ("--steps_per_loop=3",)),
        ),
    ],
    ids=["mlp, SIGTERM", "cnn, SIGKILL", "cnn on replicas, Ctrl-C", "average on replicas, SIGKILL"],
)
def test_a_run_that_was_ended_within_an_epoch_has_the_bits_of_one_that_was_not(
    ended, runs, tmp_path, run, ends, kept, then, straight
):
    """With XLA as it was chosen, and as many threads as before."""
    run, (name, step, code) = (*run, *RUN), ends
    outcome = ended(name, step, *run, *kept, f"--run_dir={tmp_path}/run")
    assert outcome.code == code
    assert "error: " not in outcome.err
    if code > 0:
        saved = f"; saved, and the same command resumes from {tmp_path}/run\n"
        assert f"stopped at step {step}: {name}{saved}" in outcome.out
    last = manifests(tmp_path / "run")[-1]
    # Of the last one before a kill, the writing may have been under way.
    assert last["step"] in ((step,) if code > 0 else {40: (15, 30), 25: (10, 20)}[step])
    # A list that was complete when the kill came is sealed by the next start, and an evaluation's best may be newer.
    resumable = {last["step"]} | sealed_next(tmp_path / "run")
    jit = "on" if last["host_state"]["state"]["jit"] else "off"
    both = runs(
        [*run, *then, f"--run_dir={tmp_path}/run"],
        [*run, *(word.replace("JIT", jit) for word in straight), f"--run_dir={tmp_path}/straight"],
    )
    (resumed,) = re.findall(rf"resumed at step (\d+) of 60 from {tmp_path}/run", both.out)
    assert int(resumed) in resumable
    assert f"XLA {jit}, as this run began" in both.out or "--jit=JIT" not in straight
    assert "sums round otherwise" not in both.err
    assert ("--ema_decay=0.9" in run) == (sum("average" in name for name in tensors(tmp_path / "run")) >= 6)
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.thorough
def test_a_run_that_stops_at_steps_has_the_bits_of_one_that_does_not(inside, tmp_path):
    run = (*MLP, *RUN, "--jit=off", "--learning_rate_schedule=cosine", "--ema_decay=0.9")
    run += ("--early_stopping=patience=3", "--checkpoint_every_steps=23")
    first, second, third = (inside(*run, f"--stop_at_step={n}", f"--run_dir={tmp_path}/run").ok() for n in (10, 30, 20))
    assert "stopped at step 10: stop_at_step=10" in first.out
    assert "stopped at step 30: stop_at_step=30" in second.out
    assert "stopped at step 30: stop_at_step=20" in third.out  # no step back, and none further
    assert {each["step"] for each in manifests(tmp_path / "run")} == {10, 23, 30}
    assert [metrics(tmp_path / "run", name)[name] for name in ("step", "stop")] == [30, "stop_at_step=20"]
    assert metrics(tmp_path / "run", "eval")["eval"].keys() >= {"loss", "accuracy"}
    inside(*run, f"--run_dir={tmp_path}/run").ok()
    inside(*run, "--stop_at_step=60", f"--run_dir={tmp_path}/straight").ok()
    assert metrics(tmp_path / "straight", "stop") == {"stop": None}  # which is its end
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_a_stop_between_two_syncs_is_a_mistake(inside):
    inside(*MLP, *TWO, *RUN, "--sync_every_steps=4", "--stop_at_step=10").refused("stop_at_step=10 ... use 8 or 12")


@pytest.mark.thorough
def test_a_run_that_goes_on_with_other_threads_says_so(inside, monkeypatch, tmp_path):
    run = (*MLP, "--input=digits", "--jit=off", f"--run_dir={tmp_path}/run")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    inside(*run, "--train_steps=5").ok()
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    other = inside(*run, "--train_steps=7").ok()
    before = "ckpt-5 was computed with 1 thread(s) per operation and 1 micro-batch(es) in parallel"
    assert f"{before}, and this process has 2 thread(s)" in other.err


@pytest.mark.slow
def test_measuring_xla_changes_no_bit(inside, tmp_path):
    run = (*MLP, *RUN)
    inside(*run, f"--run_dir={tmp_path}/measured").ok()
    chosen = manifests(tmp_path / "measured")[-1]["host_state"]["state"]["jit"]
    inside(*run, f"--jit={'on' if chosen else 'off'}", f"--run_dir={tmp_path}/asked").ok()
    assert_equal_bits(tmp_path / "measured", tmp_path / "asked")


SCRIPT = pathlib.Path(streamed_digits.__file__)
DATASET_RUN = (
    "--model_arg=hidden_units=16",
    "--model_arg=dropout=0.3",
    "--global_batch_size=32",
    "--shuffle_buffer=60",
)
DATASET_RUN += ("--progress=plain", "--jit=off")
COUNTED = f"counting examples: {streamed_digits.EXAMPLES}\n"


@pytest.fixture
def folder(tmp_path):
    """Seven files of examples."""
    (tmp_path / "files").mkdir()
    streamed_digits.write_files(tmp_path / "files", 7)
    return tmp_path / "files"


@pytest.fixture
def ran(inside, folder):
    """`ran(*flags)`: how a run on the files ended, in this process."""
    return lambda *flags: inside(*DATASET_RUN, *flags, trainer=Model, data=lambda: streamed_digits.data(folder))


@pytest.mark.slow
def test_one_device_after_sigkill_within_an_epoch(crank, folder, tmp_path):
    run = [*DATASET_RUN, "--train_steps=50"]
    killed = json.dumps([[*run, "--checkpoint_every_steps=10", f"--run_dir={tmp_path}/run"]])
    outcome = crank(folder, killed, "SIGKILL", 35, script=SCRIPT)
    assert outcome.code == -signal.SIGKILL
    step = newest(tmp_path / "run")
    assert step in (20, 30)  # of 30, the writing may have been under way
    resumable = {step} | sealed_next(tmp_path / "run")
    assert COUNTED in outcome.out
    runs = json.dumps([[*run, f"--run_dir={tmp_path}/run"], [*run, f"--run_dir={tmp_path}/straight"]])
    both = crank(folder, runs, script=SCRIPT).ok()
    (resumed,) = re.findall(r"resumed at step (\d+) of 50", both.out)
    assert int(resumed) in resumable
    assert both.out.count(COUNTED) == 1  # the resumed one knows it
    assert "reading the epoch again" not in both.out
    assert "the position in the training data takes" in both.out
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.thorough
def test_a_run_on_a_stream_is_evaluated_without_counting_and_names_a_change(ran, folder, tmp_path):
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


def endless():
    """Examples without an end, and how many of them were made."""
    made = []

    def examples():
        for number in itertools.count():
            made.append(number)
            yield np.float32([number % 7, number % 11, 1.0]), np.float32(number % 5)

    spec = tf.TensorSpec([3]), tf.TensorSpec([])
    return tf.data.Dataset.from_generator(examples, output_signature=spec), made


@pytest.mark.thorough
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
        flags = (*DATASET_RUN[2:], f"--train_steps={steps}", "--eval_every_steps=4", f"--run_dir={tmp_path / name}")
        outcome = inside(*flags, trainer=Line, data=lambda: (data, (np.eye(3), np.ones(3)))).ok()
        return outcome.out, made

    out, made = ran("run", 5)
    assert "examples that are not counted, batches of 32, 5 steps" in out
    assert len(made) < 1000
    ran("run", 12)
    ran("straight", 12)
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.thorough
def test_data_that_is_known_to_end_keeps_its_epochs_where_none_matters(inside):
    """Its last batch is smaller, and is not filled up by the next epoch's examples."""
    data = tf.data.Dataset.from_tensor_slices((np.eye(3, dtype="float32"), np.float32([0, 1, 2]))).repeat(27)
    flags = (*DATASET_RUN[2:], "--train_steps=4", "--mode=train")
    outcome = inside(*flags, trainer=Line, data=lambda: (data.filter(lambda x, y: y < 2), None)).ok()
    assert "54 examples, 2 steps an epoch of 32, 4 steps" in outcome.out


def test_what_may_not_end_is_counted_for_as_long_as_may_be(inside):
    flags = (*DATASET_RUN[2:], "--train_epochs=2", "--step_timeout_seconds=2")
    outcome = inside(*flags, trainer=Line, data=lambda: (endless()[0], None))
    assert "may never end; give train_steps, and eval_every_steps if there is evaluation data" in outcome.mistake


KILLED_RUN = ("--model=mlp", "--model_arg=hidden_units=32", "--model_arg=dropout=0.2", "--input=digits", "--jit=off")
KEPT = ("--eval_every_steps=10", "--keep_checkpoints=3", "--summary_every_steps=4", "--progress=plain")

# The launcher, with a hook that notes each step that was done. What a killed process wrote is not lost.
NOTING = """
import sys
from crankshaft.engine.hooks import every_steps
from crankshaft.launch import train

noted, *flags = sys.argv[1:]
notes = open(noted, "a", buffering=1)
train.main(hooks=[every_steps(1, lambda status, means: print(status.step, file=notes))], argv=[sys.argv[0], *flags])
"""


def steps_noted(path: pathlib.Path) -> list[int]:
    """Whole lines: the last one may be cut."""
    return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def sealed_next(run_dir: pathlib.Path) -> set[int]:
    """The steps of the manifests that were being written, which the next start seals, and of newer best checkpoints."""
    listed = (run_dir / "checkpoints").glob("ckpt-*.manifest.json.writing")
    best, before = (run_dir / "best").glob("ckpt-*.manifest.json*"), newest(run_dir)
    steps = [[int(path.name.split(".")[0].removeprefix("ckpt-")) for path in paths] for paths in (listed, best)]
    return {*steps[0], *(step for step in steps[1] if step > before)}


def kill_again_and_again(crank, tmp_path, kills: int, every_steps: int) -> pathlib.Path:
    """Starts the same run `kills` times, kills each, and checks what is left. Returns the run_dir."""
    moments = random.Random(0)
    script, run_dir, noted = tmp_path / "noting.py", tmp_path / "run", tmp_path / "noted"
    script.write_text(NOTING)
    flags = (
        *KILLED_RUN,
        *KEPT,
        "--train_steps=1000000",
        f"--checkpoint_every_steps={every_steps}",
        f"--run_dir={run_dir}",
    )
    while_training = 0
    for number in range(kills):
        before, resumed_from = len(steps_noted(noted)), newest(run_dir)
        sealed = sealed_next(run_dir)
        program = crank.start(noted, *flags, script=script)
        if number % 4 == 3:  # some in the start: the import, the restore, the first compilation
            time.sleep(moments.uniform(0.5, 4.0))
        else:
            program.until(lambda before=before: len(steps_noted(noted)) > before)
            if number == kills - 1:  # what is compared at the end goes on from there
                program.until(lambda: newest(run_dir) > 0)
            time.sleep(moments.uniform(0.0, 0.8))
        program.process.kill()
        assert program.wait().code == -9
        assert "error: " not in program.err
        if "steps an epoch" in program.out:
            resumed = re.search("resumed at step ([0-9,]+) of", program.out)
            step = int(resumed[1].replace(",", "")) if resumed else 0
            assert step in {resumed_from} | sealed, program.out
            resumed_from = step
        mine = steps_noted(noted)[before:]
        if mine:
            while_training += 1
            # The best checkpoint comes before other hooks have seen its step: a run that goes on from it calls them.
            assert mine == list(range(resumed_from + (mine[0] > resumed_from), mine[-1] + 1))
            # The last checkpoint due before this step may have been under way; it began when the one before was whole.
            saved = max(newest(run_dir), *steps(run_dir, "best"), 0)
            assert saved >= max(resumed_from, ((mine[-1] - 1) // every_steps - 1) * every_steps)
        for manifest in manifests(run_dir):
            for name, file in manifest["files"].items():
                path = run_dir / "checkpoints" / name
                assert not path.exists() or path.stat().st_size == file["bytes"]
    assert while_training >= kills // 2
    return run_dir


def assert_goes_on_to_the_same_bits(crank, run_dir) -> None:
    resumed_from, sealed = newest(run_dir), sealed_next(run_dir)
    assert resumed_from > 0
    until = resumed_from + 9
    run = (*KILLED_RUN, f"--train_steps={until}")
    straight = run_dir.parent / "straight"
    resumed = [*run, *KEPT, "--checkpoint_every_steps=3", f"--run_dir={run_dir}"]
    undisturbed = [*run, "--checkpoint_every_steps=0", "--eval_every_steps=10", f"--run_dir={straight}"]
    script = run_dir.parent / "runs.py"
    script.write_text(RUNS)
    outcome = crank(json.dumps([resumed, undisturbed]), script=script).ok()
    (step,) = re.findall(f"resumed at step ([0-9,]+) of {until:,}", outcome.out)
    assert int(step.replace(",", "")) in {resumed_from} | sealed
    assert_equal_bits(run_dir, straight)
    left = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert not [name for name in left if "_temp" in name or ".tmp" in name]
    assert len([name for name in left if name.endswith(".index")]) == 3


@pytest.mark.parametrize(("kills", "every_steps"), [(2, 1), pytest.param(10, 7, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_ends_on_the_same_bits(crank, tmp_path, kills, every_steps):
    assert_goes_on_to_the_same_bits(crank, kill_again_and_again(crank, tmp_path, kills, every_steps))


@pytest.mark.thorough
def test_sigterm_during_a_long_callback_saves_the_newest_snapshot_before_a_kill(crank, tmp_path):
    (script := tmp_path / "blocking.py").write_text("""
import time
from crankshaft.engine.hooks import every_steps
from crankshaft.launch import train

def block(status, means):
    print("blocked", flush=True)
    time.sleep(900)

train.main(hooks=[every_steps(200, block)])
""")
    run_dir = tmp_path / "run"
    often = (
        "--steps_per_loop=5",
        "--snapshot_seconds=0.001",
        "--checkpoint_every_steps=100000",
        "--eval_every_steps=0",
    )
    program = crank.start(*KILLED_RUN, *often, "--train_steps=300", f"--run_dir={run_dir}", script=script)
    program.until(lambda: "blocked" in program.out)
    program.process.terminate()
    program.until(lambda: newest(run_dir) > 0)
    program.until(lambda: "is saved meanwhile, from memory" in program.err)
    program.process.kill()
    assert program.wait().code == -9
    (manifest,) = manifests(run_dir)
    assert 0 < manifest["step"] < 200
    assert f"step {manifest['step']} is saved meanwhile" in program.err
    assert (
        crank(*KILLED_RUN, "--train_steps=200", f"--run_dir={run_dir}")
        .ok()
        .out.count(f"resumed at step {manifest['step']}")
    )
