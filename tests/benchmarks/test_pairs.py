"""`benchmarks.pairs`: turns A B A B, paired; exit code 3 below --fail_below. What is run is a stand-in that copies a
result made before, and notes with which flags it was run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import children
from crankshaft.launch.benchmark.measure.statistics import Call, columns, describe_round, summarize
from crankshaft.launch.benchmark.result import heading
from crankshaft.launch.cluster.restarts import TaskExit
from crankshaft.launch.host.signals import SAME_REQUEST_SECONDS
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE

STAND_IN = """
import pathlib, sys
name, rounds, path = sys.argv[1:]
here = pathlib.Path(__file__).parent
with open(here / "order.txt", "a") as order:
    print(name, rounds, file=order)
if name == "none":
    sys.exit("error: no such commit; fetch it")
pathlib.Path(path.removeprefix("--result_json=")).write_text((here / f"{name}.json").read_text())
"""


def made(step_seconds: float, **more) -> dict:
    """A whole result: calls of ten steps of 64 examples; every second takes a hundredth longer."""
    calls = [Call(10, 640, 10 * step_seconds * (1 + 0.01 * (call % 2)), 0.0) for call in range(30)]
    return {
        **heading(64),
        **summarize(calls),
        "model_arg": {},
        "input_arg": {},
        "train": {},
        "mode": "benchmark",
        "part": "whole",
        "model": "mlp",
        "input": "synthetic",
        "strategy": "one_device",
        "num_replicas": 1,
        "step": 300,
        "interval": None,
        "compile_seconds": 1.0,
        "first_step_seconds": 0.5,
        "peak_rss_mb": 900,
        "device_peak_mb": None,
        "environment": {"cpu": "a CPU", "usable_cores": 2},
        "noise": {"lost_share": 0.0},
        "warnings": [],
        "rounds": [describe_round(calls)],
        "calls": columns([calls]),
        **more,
    }


@pytest.fixture
def race(tmp_path):
    """Runs the stand-in, whose steps take 1 ms, in turn with another; (outcome, result, order)."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    for name, result in {
        "ours": made(1e-3),
        "twice": made(0.5e-3),
        "other": made(1e-3, model="cnn", warnings=["two rounds differ"]),
        "old": {"steps_per_sec": 3.0},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))

    def run(baseline: str, *arguments: str):
        commands = [shlex.join([sys.executable, str(script), name]) for name in ("ours", baseline)]
        path = tmp_path / "pairs.json"
        command = [sys.executable, "-m", "benchmarks.pairs", "--turns=2", f"--json={path}", *arguments, *commands]
        outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        order = (tmp_path / "order.txt").read_text().splitlines()
        return outcome, json.loads(path.read_text()) if path.exists() else None, order

    return run


def test_turns_alternate_the_ratio_is_of_pairs_and_below_what_is_allowed_the_code_is_3(race):
    outcome, result, order = race("twice", "--fail_below=0.9")
    assert outcome.returncode == 3
    assert order == [f"{name} --benchmark_arg=rounds=1" for name in ("ours", "twice", "ours", "twice")]
    assert result["ratio"] == pytest.approx(0.5)
    assert [len(side) for side in result["results"]] == [2, 2]
    assert "slower: 0.500x, 95 % interval 0." in outcome.stdout
    assert "fail_below=0.9: the rate is 0.500 times" in outcome.stderr


def test_of_other_work_no_difference_shows_but_what_differs_does(race):
    outcome, result, _ = race("other", "--fail_below=0.9")
    assert outcome.returncode == 0, outcome.stderr
    assert result["verdict"] == "no difference can be shown"
    assert "baseline: it is of other work (model: cnn -> mlp)" in result["warnings"]
    assert "warning: baseline: two rounds differ" in outcome.stdout


@pytest.mark.parametrize(
    ("baseline", "says"),
    [
        ("none", "a measurement failed: exit code 1: no such commit; fetch it"),
        ("old", "what the baseline wrote to --result_json is not such a result: its schema is None"),
    ],
)
def test_a_command_that_fails_or_is_no_benchmark_ends_it_in_one_line(race, baseline, says):
    outcome, result, order = race(baseline)
    assert (outcome.returncode, result, len(order)) == (1, None, 2)
    assert says in outcome.stderr


def test_a_signal_that_comes_twice_at_once_stops_once():
    later = []
    before = signal.signal(signal.SIGTERM, lambda *_: later.append("a second one"))
    try:
        with children.stoppable():
            with pytest.raises(children.Stopped):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not later
            time.sleep(SAME_REQUEST_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)
            assert later
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, "signal 35")])
def test_what_kills_a_measurement_is_named_whether_it_has_a_name_or_not(number, name):
    process = children.Process([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"])
    with pytest.raises(children.MeasurementFailed, match=f"^killed by {name}$"):
        children.run_together([process], environment=os.environ)
    assert str(TaskExit("worker 1", -number)) == f"worker 1 was killed by {name}"
