"""A benchmark's result as it is kept and compared: whole or refused, one line a run, faster, slower or neither."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest

from crankshaft.parts.benchmark import result as results
from crankshaft.parts.benchmark.measure.intervals import compare
from crankshaft.parts.benchmark.result import exit_code
from crankshaft.runner import failures
from crankshaft.runner.failures import UsageError

pytestmark = pytest.mark.thorough

WORK = ("--model=mlp", "--model_arg=hidden_units=16", "--input=digits", "--jit=off")
BENCHMARK = ("--mode=benchmark", *WORK, "--benchmark_arg=steps=40", "--benchmark_arg=rounds=2", "--steps_per_loop=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the run is measured."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def measured(folder, inside, small_probe, tmp_path):
    """A real result, of two rounds of 40 steps, two in a call at most; and a file of it."""
    if not (kept := folder / "kept.json").exists():
        outcome = inside(*BENCHMARK, f"--run_dir={folder}/run", f"--result_json={kept}").ok()
        assert "steps/s" in outcome.out
    path = tmp_path / "old.json"
    shutil.copy(kept, path)
    return json.loads(path.read_text()), path


def slower(result, times):
    """The result of a machine that is so many times as slow."""
    found = copy.deepcopy(result)
    found["calls"]["seconds"] = [times * seconds for seconds in found["calls"]["seconds"]]
    found["examples_per_sec"] /= times
    return found


def steady(seconds, calls=30):
    columns = {"examples": [64] * calls, "seconds": [seconds] * calls, "round": [0] * calls}
    return {"calls": columns, "noise": {"lost_share": 0.0}, "examples_per_sec": 64 / seconds}


# -- the result -------------------------------------------------------------------------------------------------------


def test_a_benchmark_times_steps_and_leaves_the_run_alone(measured, folder):
    result, _ = measured
    assert results.problems(result) == []
    assert set(result["step_ms"]) == {"p50", "p90", "p99"}
    assert {"mode", "mean", "stderr", "jitter", "input_wait_fraction", "peak_rss_mb", "num_replicas"} < result.keys()
    for left in ("config.json", "result.json", "checkpoints/ckpt*"):
        assert not list((folder / "run").glob(left))
    assert [each["steps"] for each in result["rounds"]] == [40, 40]
    assert sum(result["calls"]["steps"]) == 80
    assert result["command"].startswith("python")
    assert result["model_arg"]["hidden_units"] == [16]
    assert result["date"].endswith("+00:00")
    assert 0 < result["first_step_seconds"] <= result["compile_seconds"]
    low, high = result["interval"]
    assert low <= result["examples_per_sec"] <= high


def test_a_rate_is_that_of_a_run_without_end_however_short_it_is_asked_to_be(inside, small_probe):
    flags = ("--model=logistic", "--input=digits", "--benchmark_arg=steps=2", "--benchmark_arg=rounds=1")
    outcome = inside("--mode=benchmark", *flags, "--jit=auto", "--train_steps=3").ok()
    assert re.search(r"XLA (on|off): steps/s [\d,]+ without, [\d,]+ with it", outcome.out), outcome.out


@pytest.mark.slow
def test_a_run_compares_and_fails_the_build_where_it_is_slower(measured, inside, tmp_path):
    result, path = measured
    # The old one was a million times as fast: shown even on a machine of which others take nearly all.
    path.write_text(json.dumps(slower(result, 1e-6)))
    written = tmp_path / "slower.json"
    flags = (f"--baseline={path}", "--benchmark_arg=fail_below=0.95", f"--result_json={written}")
    outcome = inside(*BENCHMARK, *flags)
    assert outcome.code == 3
    assert "fail_below=0.95: the rate is 0.0" in outcome.error
    found = json.loads(written.read_text())
    assert found["baseline"]["verdict"] == "slower"
    assert found["baseline"]["path"] == str(path)
    assert "slower" in outcome.out

    # And the other way round, where the same flag passes.
    path.write_text(json.dumps(slower(result, 1e6)))
    assert "faster" in inside(*BENCHMARK, f"--baseline={path}", "--benchmark_arg=fail_below=0.95").ok().out


@pytest.mark.slow
def test_workers_agree_on_rounds_of_seconds_and_a_slower_run_is_not_tried_again(measured, crank, tmp_path):
    result, path = measured
    path.write_text(json.dumps(slower(result, 1e-6)))
    flags = ("--mode=benchmark", *WORK, "--benchmark_arg=seconds=0.5", "--benchmark_arg=rounds=2", f"--baseline={path}")
    found = tmp_path / "found.json"
    flags = (*flags, "--benchmark_arg=fail_below=0.9", f"--result_json={found}")
    outcome = crank.start("--workers=2", "--", *flags, command="local").wait()
    assert outcome.code == 3, outcome.err
    assert "worker 0 ended with exit code 3: the benchmark is slower than fail_below allows" in outcome.error
    workers = json.loads(found.read_text())
    assert results.problems(workers) == []
    assert len(workers["rounds"]) == 2
    assert 0 < workers["reduce_fraction"] < 1
    assert sum(workers["calls"]["reduce_seconds"]) == pytest.approx(
        workers["reduce_fraction"] * workers["wall_seconds"], rel=1e-6
    )


def test_what_is_missing_or_wrong_is_listed(measured):
    result, _ = measured
    assert results.problems([]) == [f"its schema is None, and this is {results.SCHEMA}"]
    wrong = {**result, "model": 3, "interval": "wide"}
    del wrong["calls"]
    assert results.problems(wrong) == ["model is 3", "calls is missing", "interval is 'wide'"]
    ones, calls = [1.0] * len(result["calls"]["steps"]), result["calls"]
    for columns, line in (
        ({"steps": "2"}, "calls has no columns steps, examples, seconds and round of one length"),
        ({"seconds": [0.1]}, "calls has no columns steps, examples, seconds and round of one length"),
        ({"seconds": [*ones[1:], 0.0]}, "calls has values that are not numbers above 0"),
    ):
        assert results.problems({**result, "calls": {**calls, **columns}}) == [line]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "can't be read (No such file or directory)"),
        ("{", "is not JSON"),
        ("[]", "is not a result of this benchmark: its schema is None"),
        ('{"schema": "crankshaft.benchmark/0"}', "its schema is crankshaft.benchmark/0, and this is"),
        ('{"schema": "crankshaft.benchmark/2"}', "date is missing and 31 more"),
    ],
)
def test_what_is_no_result_is_refused_as_a_baseline(tmp_path, content, line):
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as refused:
        results.read_baseline(str(path))
    assert line in str(refused.value)
    assert str(refused.value).endswith("give what mode=benchmark wrote to result_json")


def test_a_baseline_of_other_work_is_refused_before_it_is_measured(measured, inside):
    _, path = measured
    other = ("--model_arg=hidden_units=32", "--global_batch_size=128")
    same = [word for word in BENCHMARK if not word.startswith("--model_arg")]
    outcome = inside(*same, *other, f"--baseline={path}")
    assert "model_arg hidden_units: [16] -> [32]; global_batch_size: 64 -> 128" in outcome.mistake


def test_a_baseline_of_another_machine_is_said_to_be():
    machine = {"cpu": "old", "usable_cores": 2.0, "gpus": []}
    theirs = {"warnings": ["drift: x"], "environment": machine}
    assert results.warnings({"environment": machine}, theirs) == ["baseline: drift: x"]
    found = results.warnings({"environment": {**machine, "cpu": "new"}}, theirs)
    assert found[1:] == ["baseline: it is of another machine (cpu: old -> new)"]


# -- the verdict ------------------------------------------------------------------------------------------------------


def test_the_verdict_is_what_the_interval_shows():
    assert compare([steady(0.5)], [steady(1.0)]) == {
        "ratio": pytest.approx(2.0),
        "interval": pytest.approx([2.0, 2.0]),
        "verdict": "faster",
        "rounds": [{"ours": 128.0, "theirs": 64.0, "ratio": 2.0}],
    }
    assert compare([steady(1.0)], [steady(0.5)])["verdict"] == "slower"
    assert compare([steady(0.5)], [steady(0.5)])["verdict"] == "no difference can be shown"
    assert compare([steady(0.5, calls=1)], [steady(1.0)])["verdict"] == "no difference can be shown"
    assert compare([steady(0.5)] * 3, [steady(1.0)] * 3)["verdict"] == "faster"


def test_only_what_is_shown_to_be_below_fails(capsys):
    comparison = {"ratio": 0.9, "interval": [0.85, 0.94]}
    assert exit_code(comparison, 0.95) == failures.EXIT_SLOWER
    assert "fail_below=0.95: the rate is 0.900 times the baseline's (0.850 to 0.940)" in capsys.readouterr().err
    assert exit_code(comparison, 0.94) == 0
    assert exit_code(comparison, None) == 0
    assert exit_code({"ratio": 0.1, "interval": None}, 0.95) == 0
