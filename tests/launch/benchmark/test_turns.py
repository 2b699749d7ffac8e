"""--baseline_cmd: turns A B A B, paired; exit code 3 below --fail_below. The runs are those of a stand-in that writes a
result made before; it notes when it was run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time

import pytest

from crankshaft.launch.benchmark import children, schema, turns
from crankshaft.launch.benchmark.measure.statistics import Call, columns, describe_round, summarize
from crankshaft.launch.cluster.restarts import Ending
from crankshaft.launch.host.process import SAME_REQUEST_SECONDS

BENCHMARK = ("--mode=benchmark", "--model=mlp", "--input=synthetic")

# As a user's script: with --baseline_cmd it is the one that drives, without, a run; `made` is next to it.
STAND_IN = """
import json, pathlib, sys
from absl import flags
from crankshaft.launch import train
flags.DEFINE_string("made", "ours", "Which result it has.")
if not any(each.startswith("--baseline_cmd") for each in sys.argv):
    flags.FLAGS(sys.argv)
    f, here = flags.FLAGS, pathlib.Path(__file__).parent
    with open(here / "order.txt", "a") as order:
        print(f.made, f.benchmark_rounds, file=order)
    if f.made == "none":
        sys.exit("error: no such commit; fetch it")
    pathlib.Path(f.result_json).write_text((here / f"{f.made}.json").read_text())
else:
    train.main()
"""


def made(step_seconds: float, rounds: int = 1, **more) -> dict:
    """A whole result: calls of ten steps of 64 examples; every second takes a hundredth longer."""
    timed = [
        [Call(10, 640, 10 * step_seconds * (1 + 0.01 * (call % 2)), 0.0) for call in range(30)] for _ in range(rounds)
    ]
    return {
        **schema.heading(64),
        **summarize([call for calls in timed for call in calls]),
        "mode": "benchmark",
        "part": "whole",
        "model": "mlp",
        "input": "synthetic",
        "strategy": "one_device",
        "num_replicas": 1,
        "step": 300,
        "model_arg": {},
        "input_arg": {},
        "train": {},
        "interval": None,
        "compile_seconds": 1.0,
        "first_step_seconds": 0.5,
        "peak_rss_mb": 900,
        "device_peak_mb": None,
        "environment": {"cpu": "a CPU", "usable_cores": 2},
        "noise": {"lost_share": 0.0},
        "warnings": [],
        "rounds": [describe_round(calls) for calls in timed],
        "calls": columns(timed),
        **more,
    }


@pytest.fixture
def race(crank, tmp_path):
    """Runs the stand-in, whose steps take 1 ms, in turn with itself as `made` says; (outcome, result, order)."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    for name, seconds in (("ours", 1e-3), ("twice", 0.5e-3), ("same", 1e-3)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made(seconds)))
    (tmp_path / "other.json").write_text(json.dumps(made(1e-3, model="cnn", warnings=["two rounds differ"])))
    (tmp_path / "old.json").write_text(json.dumps({"steps_per_sec": 3.0}))

    def run(baseline: str, *arguments: str):
        theirs = shlex.join([sys.executable, str(script), f"--made={baseline}"])
        path = tmp_path / "result.json"
        outcome = crank(*BENCHMARK, f"--baseline_cmd={theirs}", f"--result_json={path}", *arguments, script=script)
        order = (tmp_path / "order.txt").read_text().split("\n")[:-1] if (tmp_path / "order.txt").exists() else []
        return outcome, json.loads(path.read_text()) if path.exists() else None, order

    return run


def test_turns_alternate_and_the_ratio_is_of_pairs(race):
    outcome, result, order = race("twice", "--benchmark_rounds=2")
    assert outcome.ok()
    assert order == ["ours 1", "twice 3", "ours 1", "twice 3"]  # ours a round a turn, theirs as they stand
    assert schema.check(result) == []
    assert result["baseline"]["ratio"] == pytest.approx(0.5)
    assert result["baseline"]["verdict"] == "slower"
    assert len(result["baseline"]["rounds"]) == 2
    assert [each["steps"] for each in result["rounds"]] == [300, 300]
    assert result["steps"] == 600
    assert "--baseline_cmd" in result["command"]
    assert "slower" in outcome.out


def test_below_what_is_allowed_the_code_is_3_and_where_no_difference_shows_it_is_0(race):
    outcome, result, _ = race("twice", "--benchmark_rounds=2", "--fail_below=0.9")
    assert outcome.code == 3
    assert "--fail_below=0.9: the rate is 0.500 times" in outcome.error
    assert result["baseline"]["ratio"] == pytest.approx(0.5)
    outcome, result, _ = race("same", "--benchmark_rounds=2", "--fail_below=0.9")
    assert outcome.ok()
    assert result["baseline"]["verdict"] == "no difference can be shown"


def test_other_work_and_its_warnings_are_told_beside_the_ratio(race):
    outcome, result, _ = race("other", "--benchmark_rounds=1")
    assert outcome.ok()
    assert "baseline: it is of other work (model: cnn -> mlp)" in result["warnings"]
    assert "baseline: two rounds differ" in result["warnings"]


@pytest.mark.parametrize(
    ("baseline", "code", "says"),
    [
        ("none", 1, "--baseline_cmd: not all of 2 turns were run; see above"),
        ("old", 2, "--baseline_cmd: what it wrote to --result_json is no such result: schema is missing"),
    ],
)
def test_a_command_that_fails_or_is_no_benchmark_is_one_line(race, baseline, code, says):
    outcome, result, order = race(baseline, "--benchmark_rounds=2")
    assert (outcome.code, result) == (code, None)
    assert says in outcome.error
    assert len(order) == 2
    if code == 1:
        assert "turn 1 of the baseline failed: exit code 1: no such commit; fetch it\n" in outcome.err


def test_merged_turns_are_one_benchmark_of_all_rounds():
    found = turns.merged([made(1e-3, rounds=2), made(2e-3, warnings=["drift"])])
    assert [each["steps"] for each in found["rounds"]] == [300, 300, 300]
    assert found["calls"]["round"] == [0] * 30 + [1] * 30 + [2] * 30
    assert found["steps"] == 900
    # 600 steps of 1.005 ms and 300 of 2.01 ms.
    assert found["steps_per_sec"] == pytest.approx(900 / (0.603 + 0.603))
    assert found["warnings"] == ["drift"]
    assert schema.check(found) == []


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
    assert str(Ending("worker 1", -number)) == f"worker 1 was killed by {name}"
