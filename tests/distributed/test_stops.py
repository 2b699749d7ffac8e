"""A hook that asks for the end on one worker alone, or a flag: all end at the same step, saved, and say why."""

import json
import re
import signal

import pytest

from tests import runs
from tests.processes import ROOT

SCRIPT = f"""
import json, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from crankshaft.engine.hooks import Hook, every_steps
from crankshaft.launch import train

asks, folder = sys.argv.pop(), pathlib.Path(sys.argv.pop())


def is_mine(status):
    return status.strategy.host == 1 and status.step >= 30


def when_due(status, metrics):
    status.stop = "good enough: 95 % — done" if is_mine(status) else None


class Asks(Hook):
    # As a clock would have it: at whatever step.
    def __call__(self, status):
        if asks == "any" and is_mine(status):
            status.stop = "my time is up"

    def end(self, status):
        (folder / f"end-{{status.strategy.host}}").write_text(json.dumps([status.step, status.stop]))


train.main(hooks=[every_steps(7, when_due if asks == "due" else lambda *_: None), Asks()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asks", "steps", "reason"),
    [
        ("due", {35}, "good enough: 95 % — done at worker 1"),
        ("any", range(31, 40), "my time is up at worker 1"),
        ("flag", {20}, "stop_at_step=20"),
    ],
)
def test_a_stop_that_a_workers_hook_or_a_flag_asks_for_ends_all_at_one_step(
    start_workers, tmp_path, asks, steps, reason
):
    """Where something is due at that step, at once; else after the calls by which the others learn of it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--model=mlp", "--model_arg=hidden_units=8", "--input=digits", "--strategy=multi_worker", "--mode=train")
    short = ("--train_steps=100000", "--steps_per_loop=2", f"--run_dir={tmp_path}/run", "--progress=plain")
    short += ("--stop_at_step=20",) if asks == "flag" else ()
    workers = start_workers(2, tmp_path / "script.py", *flags, *short, tmp_path, asks).ok()
    ends = [json.loads((tmp_path / f"end-{worker}").read_text()) for worker in range(2)]
    assert ends[0] == ends[1]
    step, said = ends[0]
    assert step in steps
    assert said == reason
    assert runs.steps(tmp_path / "run") == [step]
    assert re.search(rf"^stopped at step {step}: {reason}$", workers.output(0), re.MULTILINE)


LONG_EVALUATION = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tensorflow as tf
from crankshaft import main
from tests.launch.line import FEATURES, LABELS, Line


class Slow(Line):
    def eval_step(self, batch):
        tf.print("evaluates")
        ones, much = tf.ones([300, 300]), lambda i, a: (i + 1, a @ a / 300.0)
        _, result = tf.while_loop(lambda i, a: i < 20, much, [0, ones], parallel_iterations=1)
        return super().eval_step((batch[0] * result[0, :1], batch[1]))


main(Slow, data=lambda: ((FEATURES, LABELS), (FEATURES.repeat(100, 0), LABELS.repeat(100))))
"""
BATCHES = 3200 // 2


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
def test_a_first_evaluation_ends_soon_after_a_signal_to_workers_and_with_servers(start, tmp_path, servers):
    (tmp_path / "script.py").write_text(LONG_EVALUATION)
    flags = ("--train_steps=4", "--global_batch_size=8", "--eval_batch_size=2", "--snapshot_seconds=0")
    job = start("run", *flags, local=(f"--ps={servers}",), script=tmp_path / "script.py")
    job.until(lambda: job.output.count("evaluates") > 20)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert job.output.count("evaluates") < BATCHES / 2
    (manifest,) = runs.manifests(job.run_dir)
    assert manifest["host_state"]["hooks"]["evaluation"]["is_pending"]
    assert manifest["step"] == 4
