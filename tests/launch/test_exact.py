"""A run that was ended and resumed gives the bits of one that was not, wherever its loops were cut. Real processes end.

Runs have 60 steps of digits, 23 an epoch. One that is compared with a process is a process: in this one, the first test
that touched TensorFlow has set the threads of an operation for good, on which the bits depend.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.runs import assert_equal_bits, manifests, metrics, tensors

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
    jit = "on" if last["host_state"]["state"]["jit"] else "off"
    both = runs(
        [*run, *then, f"--run_dir={tmp_path}/run"],
        [*run, *(word.replace("JIT", jit) for word in straight), f"--run_dir={tmp_path}/straight"],
    )
    assert both.out.count(f"resumed at step {last['step']} of 60 from {tmp_path}/run") == 1
    assert f"XLA {jit}, as this run began" in both.out or "--jit=JIT" not in straight
    assert "sums round otherwise" not in both.err
    assert ("--ema_decay=0.9" in run) == (sum("average" in name for name in tensors(tmp_path / "run")) >= 6)
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")


def test_the_first_line_of_a_resumed_run_has_the_mean_since_the_last_line(inside, tmp_path):
    """Not of the steps since the resume, here one; the line of the stop is beside the others."""
    run = (*RUN, *MLP, "--train_steps=40", "--eval_every_steps=20", "--jit=off", f"--run_dir={tmp_path}/")
    straight = inside(*run[:-1], f"{run[-1]}straight").ok()
    stopped = inside(*run[:-1], f"{run[-1]}run", "--stop_at_step=39").ok()
    resumed = inside(*run[:-1], f"{run[-1]}run").ok()
    line = re.search(r"^step 40/40  loss \S+", straight.out, re.MULTILINE)[0]
    assert line in resumed.out
    assert "step 39/40  loss" in stopped.out


def test_a_run_that_stops_at_steps_has_the_schedule_and_the_bits_of_one_that_does_not(inside, tmp_path):
    run = (*MLP, *TWO, *RUN, "--jit=off", "--learning_rate_schedule=cosine", "--ema_decay=0.9")
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


def test_a_run_that_goes_on_with_other_threads_says_so(inside, monkeypatch, tmp_path):
    run = (*MLP, "--input=digits", "--jit=off", f"--run_dir={tmp_path}/run")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    inside(*run, "--train_steps=5").ok()
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    other = inside(*run, "--train_steps=7").ok()
    before = "ckpt-5 was computed with 1 thread(s) per operation and 1 micro-batch(es) in parallel"
    assert f"{before}, and this process has 2 thread(s)" in other.err


def test_when_things_are_due_and_how_loops_are_cut_changes_no_bit(inside, tmp_path):
    run = (*MLP, *TWO, *RUN, "--jit=off")
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
    run += ("--eval_every_steps=4", f"--run_dir={tmp_path}")
    inside(*run, "--train_steps=8").ok()  # the best one, and one evaluation without improvement
    outcome = inside(*run, "--train_steps=60").ok()
    assert "stopped at step 16" in outcome.out
    again = inside(*run, "--train_steps=60").ok()
    assert "stopped at step 16" in again.out  # and not four steps later each time
