"""A hook that asks for the end on one worker alone, or a flag: all end at the same step, saved, and say why."""

import json
import re

import pytest

from tests import runs
from tests.distributed.conftest import ROOT

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
