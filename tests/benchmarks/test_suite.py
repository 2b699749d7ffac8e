"""The standard set: what a machine can hold, what the table says of what was measured, and, slow, the whole program."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import standard_report as report
from benchmarks import suite
from benchmarks.suite import Row, Setup, Suite
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE

ONE = Setup("one_device", 1)
FACTS = {
    "date": "2026-11-20T10:00:00+00:00",
    "command": "python -m benchmarks.standard",
    "load_before": "0",
    "stopped": None,
}


def measured(*rates: float) -> list[dict]:
    return [{"steps_per_sec": rate, "examples_per_sec": 64 * rate, "environment": {}} for rate in rates]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_of_medians_against_fit_and_against_the_faster_of_its_tuned_settings():
    row = Row("mlp", ONE, "float32")
    row.measured = {
        "fit": measured(100, 200, 120),
        "fit_tuned": measured(300, 310, 100),
        "fit_tuned_xla": measured(250, 260, 255),
        "crankshaft": measured(600, 590, 900),
    }
    text = report.markdown(Suite([row], 3, 5.0, 0, {}), FACTS, {"parameter_server": "4 cores are needed"})
    [line] = [line for line in text.splitlines() if "one_device" in line and line.startswith("|")]
    fit, best, ours = "120 (100–200)", "300 (100–310) without XLA", "600 (590–900)"
    assert cells(line)[3:] == [fit, best, ours, "38,400", "**5.00x**", "**2.00x**"]
    assert "- parameter_server: 4 cores are needed" in text


def test_what_failed_is_said_and_has_no_ratio():
    row = Row("mlp", ONE, "float32", {"fit": measured(100.0)}, {"crankshaft": "exit code 1: no memory"})
    text = report.markdown(Suite([row], 1, 1.0, 0, {}), FACTS, {})
    [line] = [line for line in text.splitlines() if "one_device" in line and line.startswith("|")]
    assert cells(line)[3:] == ["100", "–", "failed", "–", "–", "–"]
    assert "- mlp one_device float32 crankshaft: exit code 1: no memory" in text


def test_a_loss_that_was_not_finite_is_a_dash():
    row = Row("mlp", ONE, "float32", {"quality": [{"eval": {"loss": None, "accuracy": 0.125}}]})
    text = report.markdown(Suite([row], 1, 1.0, 100, {}), FACTS, {})
    [line] = [line for line in text.splitlines() if line.endswith("| 0.1250 |")]
    assert cells(line)[2:] == ["–", "0.1250"]


def test_a_tuned_setting_that_is_far_behind_is_not_measured_again():
    row = Row("mlp", ONE, "float32", {"fit": measured(1), "fit_tuned": measured(100), "fit_tuned_xla": measured(84)})
    assert [peer for peer in row.peers if row.is_hopeless(peer)] == ["fit_tuned_xla"]
    row.measured["fit_tuned_xla"] = measured(86)
    assert not row.is_hopeless("fit_tuned_xla")


def test_fit_is_not_measured_with_xla_on_convolutions_of_a_cpu():
    on_gpu = Setup("one_device", 1, on_cpu=False)
    assert Row("cnn", ONE, "float32").peers == ["fit", "fit_tuned", "crankshaft"]
    assert Row("cnn", on_gpu, "float32").peers == Row("mlp", ONE, "float32").peers


def test_a_machine_holds_what_it_has_cores_for(monkeypatch):
    monkeypatch.setattr(suite.resources, "usable_cores", lambda: [0])
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    found = {name: suite.find_setup(name, environment) for name in suite.STRATEGIES}
    assert found["one_device"] == ONE
    assert found["multi_worker"] == "2 cores are needed, and there are 1"
    assert found["parameter_server"] == "4 cores are needed, and there are 1"
    monkeypatch.setattr(suite.resources, "usable_cores", lambda: [0, 1, 2, 3])
    found = {name: suite.find_setup(name, environment) for name in suite.STRATEGIES}
    assert found["mirrored"].flags == ("--num_virtual_devices=2",)
    assert found["multi_worker"].cluster == ("--workers=2",)
    assert found["parameter_server"].cluster == ("--workers=2", "--ps=2")
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    assert suite.find_setup("mirrored", gpus) == Setup("mirrored", 3, on_cpu=False)
    assert suite.find_setup("multi_worker", gpus) == "its processes would share the GPUs"


def benchmark(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.standard", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--workloads=mpl", "--workloads=mpl is unknown; use some of mlp, wide"),
        ("--strategies=mirored", "--strategies=mirored is unknown; use some of one_device"),
        ("--rounds=0", "--rounds is 1 or more"),
    ],
)
def test_mistakes_name_what_there_is(tmp_path, given, says):
    outcome = benchmark(given, f"--output_dir={tmp_path}")
    assert outcome.returncode == 2
    assert says in outcome.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_set_runs_and_is_written(tmp_path):
    outcome = benchmark(
        *("--rounds=1", "--seconds=1", "--quality_steps=0", "--workloads=mlp", "--strategies=one_device"),
        f"--output_dir={tmp_path}",
    )
    assert outcome.returncode == 0, outcome.stderr
    [text] = tmp_path.glob("*.md")
    [figures] = tmp_path.glob("*.json")
    assert text.stem == figures.stem
    assert text.read_text() in outcome.stdout
    [row] = json.loads(figures.read_text())["rows"]
    assert set(row["measured"]) == {"fit", "fit_tuned", "fit_tuned_xla", "crankshaft"}
