"""A run that was ended and resumed gives the bits of one that was not, wherever its loops were cut. Real processes end.

Runs have 60 steps of digits, 23 an epoch. One that is compared with a process is a process: in this one, the first test
that touched TensorFlow has set the threads of an operation for good, on which the bits depend.
"""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
import tensorflow as tf

from crankshaft.launch.host.signals import SAME_REQUEST_SECONDS
from tests.runs import assert_equal_bits, manifests, newest, tensors

ONE = ()
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
def test_mlp_on_one_device_after_sigterm_within_an_epoch(ended, runs, tmp_path):
    run = (*MLP, *ONE, *RUN, "--jit=on")
    outcome = ended("SIGTERM", 30, *run, f"--run_dir={tmp_path}/run")
    assert outcome.code == 143
    assert "stopped at step 30: SIGTERM" in outcome.out
    assert f"the same command resumes from {tmp_path}/run" in outcome.out
    assert "error: " not in outcome.err
    assert newest(tmp_path / "run") == 30
    assert manifests(tmp_path / "run")[-1]["host_state"]["state"]["jit"] is True
    both = runs([*run, f"--run_dir={tmp_path}/run"], [*run, f"--run_dir={tmp_path}/straight"])
    assert "sums round otherwise" not in both.err  # as many threads as before
    assert both.out.count(f"resumed at step 30 of 60 from {tmp_path}/run") == 1
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_cnn_on_one_device_after_sigkill_with_xla_as_it_was_chosen(ended, runs, tmp_path):
    run = (*CNN, *ONE, *RUN)
    outcome = ended("SIGKILL", 40, *run, "--checkpoint_every_steps=15", f"--run_dir={tmp_path}/run")
    assert outcome.code == -signal.SIGKILL
    kept = manifests(tmp_path / "run")[-1]
    assert kept["step"] in (15, 30)  # of 30, the writing may have been under way
    jit = kept["host_state"]["state"]["jit"]
    assert jit in (True, False)
    jit = "on" if jit else "off"
    both = runs(
        [*run, "--steps_per_loop=4", f"--run_dir={tmp_path}/run"],
        [*run, f"--jit={jit}", f"--run_dir={tmp_path}/straight"],
    )
    assert f"resumed at step {kept['step']} of 60" in both.out
    assert f"XLA {jit}, as this run began" in both.out
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_cnn_on_replicas_after_ctrl_c_within_an_epoch(ended, runs, tmp_path):
    run = (*CNN, *TWO, *RUN)
    outcome = ended("SIGINT", 31, *run, f"--run_dir={tmp_path}/run")
    assert outcome.code == 130
    assert "stopped at step 31: SIGINT" in outcome.out
    assert f"the same command resumes from {tmp_path}/run" in outcome.out
    runs([*run, "--checkpoint_every_steps=7", f"--run_dir={tmp_path}/run"], [*run, f"--run_dir={tmp_path}/straight"])
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_mlp_with_averaged_weights_on_replicas_after_sigkill(ended, runs, tmp_path):
    run = (*MLP, *TWO, *RUN, "--ema_decay=0.9", "--learning_rate_schedule=cosine", "--warmup_steps=5")
    outcome = ended("SIGKILL", 25, *run, "--checkpoint_every_steps=10", f"--run_dir={tmp_path}/run")
    assert outcome.code == -signal.SIGKILL
    runs([*run, f"--run_dir={tmp_path}/run"], [*run, "--steps_per_loop=3", f"--run_dir={tmp_path}/straight"])
    assert sum("average" in name for name in tensors(tmp_path / "run")) >= 6
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_a_run_that_goes_on_with_other_threads_says_so(inside, monkeypatch, tmp_path):
    run = (*MLP, "--input=digits", "--jit=off", f"--run_dir={tmp_path}/run")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    inside(*run, "--train_steps=5").ok()
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    other = inside(*run, "--train_steps=7").ok()
    before = "ckpt-5 was computed with 1 thread(s) per operation and 1 micro-batch(es) in parallel"
    assert f"{before}, and this process has 2 thread(s)" in other.err


@pytest.mark.parametrize(
    ("model", "devices"),
    [(MLP, TWO), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((MLP, ONE), (CNN, ONE), (CNN, TWO)))],
    ids=["mlp two", "mlp one", "cnn one", "cnn two"],
)
def test_when_things_are_due_and_how_loops_are_cut_changes_no_bit(inside, tmp_path, model, devices):
    run = (*model, *devices, *RUN, "--jit=off")
    inside(*run, f"--run_dir={tmp_path}/straight").ok()
    often = ("--steps_per_loop=4", "--eval_every_steps=13", "--checkpoint_every_steps=9", "--summary_every_steps=5")
    inside(*run, *often, "--histogram_every_steps=20", f"--run_dir={tmp_path}/often").ok()
    assert_equal_bits(tmp_path / "often", tmp_path / "straight", "eval")


@pytest.mark.slow
def test_measuring_xla_changes_no_bit(inside, tmp_path):
    run = (*MLP, *RUN)
    inside(*run, f"--run_dir={tmp_path}/measured").ok()
    chosen = manifests(tmp_path / "measured")[-1]["host_state"]["state"]["jit"]
    inside(*run, f"--jit={'on' if chosen else 'off'}", f"--run_dir={tmp_path}/asked").ok()
    assert_equal_bits(tmp_path / "measured", tmp_path / "asked")


@pytest.mark.slow
def test_the_loss_scale_of_float16_goes_on_where_it_was(inside, tmp_path):
    run = (*MLP, "--input=digits", "--jit=off", "--precision=float16", f"--run_dir={tmp_path}/run")
    inside(*run, "--train_steps=29").ok()
    inside(*run, "--train_steps=60").ok()
    inside(*run[:-1], "--train_steps=60", f"--run_dir={tmp_path}/straight").ok()
    assert any("loss_scale" in name for name in tensors(tmp_path / "run"))
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_early_stopping_counts_on_over_a_restart(inside, tmp_path):
    run = (*MLP, "--input=digits", "--jit=off", "--learning_rate=0", "--early_stopping=patience=3")
    run += ("--eval_every_steps=5", f"--run_dir={tmp_path}")
    inside(*run, "--train_steps=10").ok()  # the best one, and one evaluation without improvement
    outcome = inside(*run, "--train_steps=60").ok()
    assert "stopped at step 20" in outcome.out
    again = inside(*run, "--train_steps=60").ok()
    assert "stopped at step 20" in again.out  # and not five steps later each time


ASLEEP = """
import os, pathlib, sys, time
import tensorflow as tf
from crankshaft.engine import mean
from crankshaft.launch import train
from crankshaft.models.mlp import Model

def sleep(x):
    pathlib.Path(sys.argv[0]).with_suffix(".asleep").touch()
    time.sleep(3600)
    return x

class Asleep(Model):
    def loss(self, outputs, batch):
        return super().loss(tf.ensure_shape(tf.py_function(sleep, [outputs], tf.float32), outputs.shape), batch)

train.main(Asleep)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_a_process_at_once_within_a_long_step(crank, tmp_path, number):
    (tmp_path / "script.py").write_text(ASLEEP)
    program = crank.start("--input=digits", "--jit=off", f"--run_dir={tmp_path}/run", script=tmp_path / "script.py")
    program.until((tmp_path / "script.asleep").exists)
    program.send(number)
    time.sleep(2 * SAME_REQUEST_SECONDS)
    assert program.process.poll() is None  # the first asks for the end of the step
    program.send(number)
    outcome = program.wait()
    assert outcome.code == 128 + number
    assert "Traceback" not in outcome.err


def test_ended_runs_leave_event_files_without_gaps_or_repetitions(inside, tmp_path):
    run = (*MLP, "--input=digits", "--jit=off", "--summary_every_steps=5", f"--run_dir={tmp_path}")
    inside(*run, "--train_steps=12").ok()
    inside(*run, "--train_steps=30").ok()
    steps = []
    for path in sorted((tmp_path / "tensorboard" / "train").glob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            steps += [event.step for value in event.summary.value if re.fullmatch("(epoch_)?loss", value.tag)]
    assert sorted(steps) == sorted(set(steps))
    assert {5, 10, 15, 20, 25, 30} <= set(steps)
