"""Sweeps and scaling: which runs there are, what is made of their results, what a failed or stopped one does.

The runs are processes of a stand-in that writes the result of a machine with known rates: TensorFlow can't be imported.
One test has the real program.
"""

from __future__ import annotations

import json
import os
import signal

import pytest
from absl import flags

from crankshaft.launch.benchmark import scaling, sweep
from crankshaft.launch.cluster import shares
from crankshaft.launch.command_line import flags as _  # noqa: F401 (defines them)
from crankshaft.launch.errors import UsageError
from tests.launch.local_tasks import until_dead

# A replica takes 1 ms for each of its examples, and each replica but the first makes all of them 10 % slower.
STAND_IN = """
import json, os, pathlib, subprocess, sys, time
from absl import flags
from crankshaft.launch import train
flags.DEFINE_string("how", "well", "How it goes.")
if not any(each.startswith(("--benchmark_sweep", "--benchmark_replicas")) for each in sys.argv):
    flags.FLAGS(sys.argv)
    f = flags.FLAGS
    (pathlib.Path(__file__).parent / f"pid-{f.how}").write_text(str(os.getpid()))
    if f.how == "badly":
        print("so far so good")
        sys.exit("error: the disk is full; remove a file")
    if f.how == "slowly":
        time.sleep(600)
    replicas = f.num_virtual_devices or 1
    step = 1e-3 * f.global_batch_size / replicas * (1 + 0.1 * (replicas - 1))
    rate = 1 / step if f.precision == "float32" else 1.5 / step
    cores = len(os.sched_getaffinity(0))
    result = {"steps_per_sec": rate, "examples_per_sec": rate * f.global_batch_size, "model": "mlp", "jit": f.jit,
              "interval": [0.9 * rate * f.global_batch_size, 1.1 * rate * f.global_batch_size],
              "environment": {"usable_cores": cores}, "warnings": ["loud"] if f.seed == 7 else [],
              "learning_rate": f.learning_rate, "model_arg": f.model_arg}
    pathlib.Path(f.result_json).write_text(json.dumps(result))
    print("arguments", json.dumps(sys.argv[1:]))
else:
    train.main()
"""
BENCHMARK = ("--mode=benchmark", "--model=mlp", "--input=synthetic")


@pytest.fixture
def stand_in(crank, tmp_path):
    """Starts the stand-in with flags; `.result()` is what it wrote."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    class StandIn:
        @staticmethod
        def start(*arguments):
            result = f"--result_json={tmp_path / 'result.json'}"
            return crank.start(*BENCHMARK, *arguments, result, script=script, tensorflow=False)

        @staticmethod
        def result() -> dict:
            return json.loads((tmp_path / "result.json").read_text())

        @staticmethod
        def pid(how: str) -> int | None:
            path = tmp_path / f"pid-{how}"
            return int(path.read_text()) if path.exists() and path.read_text() else None

    return StandIn


# --- sweeps


def test_points_are_all_combinations_and_a_backslash_keeps_a_comma():
    assert sweep.parse(r"model_arg=hidden_units=8\,8,dropout=0.5;precision=float32,bfloat16") == [
        {"model_arg": "hidden_units=8,8", "precision": "float32"},
        {"model_arg": "hidden_units=8,8", "precision": "bfloat16"},
        {"model_arg": "dropout=0.5", "precision": "float32"},
        {"model_arg": "dropout=0.5", "precision": "bfloat16"},
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("global_batchsize=32", "--global_batchsize is unknown; did you mean global_batch_size"),
        ("precision", "'precision' has no values; write NAME=VALUE"),
        ("precision=", "precision has an empty value"),
        ("seed=1,2,1", "seed has the value 1 twice"),
        ("seed=1;precision=float32;seed=2", "seed is there twice"),
        ("mode=train", "--mode is the same for all points"),
        ("result_json=a,b", "--result_json is the same for all points"),
        ("benchmark_steps=1,2", "--benchmark_steps is the same for all points"),
        (";", "names no flag"),
    ],
)
def test_a_sweep_that_cannot_be_read_says_why(text, says):
    with pytest.raises(UsageError, match=says.replace("?", r"\?")):
        sweep.parse(text)


def test_each_point_has_its_settings_the_best_is_named_and_one_that_fails_does_not_stop_the_others(stand_in):
    program = stand_in.start("--learning_rate=0.5", "--benchmark_sweep=how=well,badly;precision=float32,bfloat16")
    outcome = program.wait()
    assert outcome.code == 1
    found = stand_in.result()
    assert [point["settings"] for point in found["sweep"]] == [
        {"how": how, "precision": precision} for how in ("well", "badly") for precision in ("float32", "bfloat16")
    ]
    rates = [point["examples_per_sec"] for point in found["sweep"]]
    assert rates == [pytest.approx(1000), pytest.approx(1500), None, None]  # 1 / 1 ms, and 1.5 times that
    assert found["best"] == {"settings": {"how": "well", "precision": "bfloat16"}}
    assert found["sweep"][2]["error"] == "exit code 1: the disk is full; remove a file"
    assert found["schema"] == "crankshaft.benchmark/1"
    assert "how=badly precision=float32 failed: exit code 1: the disk is full; remove a file\n" in outcome.err
    assert "    so far so good\n" in outcome.err
    assert "[4/4] how=badly precision=bfloat16: failed" in outcome.out
    assert "(best)" in outcome.out


def test_what_may_be_as_fast_as_the_best_and_what_disturbed_a_run_is_told(stand_in):
    stand_in.start("--benchmark_sweep=seed=0,7;precision=float32,bfloat16").wait().ok()
    assert stand_in.result()["warnings"] == [
        "within the best's interval, so perhaps as fast: seed=7 precision=bfloat16",
        "seed=7 precision=float32: loud",
        "seed=7 precision=bfloat16: loud",
    ]


def test_a_mistake_in_any_point_is_one_line_before_anything_starts(stand_in):
    outcome = stand_in.start("--benchmark_sweep=how=well;precision=float32,flot32").wait()
    assert outcome.code == 2
    assert outcome.error.startswith("--precision=flot32 is unknown; did you mean")
    assert stand_in.pid("well") is None


MISTAKES = [
    (("--benchmark_sweep=seed=1", "--benchmark_replicas=1,2"), "are both given; use one"),
    (("--benchmark_sweep=seed=1", "--mode=train"), "has no use with --mode=train; use --mode=benchmark"),
    (("--benchmark_sweep=seed=1", "--benchmark_part=checkpoint"), "--benchmark_part=checkpoint has none"),
    (("--benchmark_sweep=global_batch_size=4,0",), "--global_batch_size=0"),
    (("--benchmark_sweep=model_arg=hiden_units=3",), "did you mean hidden_units"),
    (("--benchmark_replicas=2", "--strategy=one_device"), "--strategy=one_device; use mirrored"),
    (("--benchmark_replicas=1,3",), "--global_batch_size=64 does not divide over 3 replicas"),
    (("--benchmark_replicas=2", "--num_virtual_devices=2"), "leave it out"),
]


@pytest.fixture(scope="module")
def ended(crank_each):
    """How the program ends, by mistake."""
    return crank_each([[*BENCHMARK, *given] for given, says in MISTAKES])


@pytest.mark.parametrize("mistake", range(len(MISTAKES)), ids=[" ".join(given) for given, says in MISTAKES])
def test_mistakes_are_one_line_with_the_cure(ended, mistake):
    assert ended[mistake].code == 2
    assert MISTAKES[mistake][1] in ended[mistake].error


def test_a_worker_of_a_cluster_does_not_drive(stand_in, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    outcome = stand_in.start("--benchmark_sweep=seed=0,1", "--strategy=multi_worker").wait()
    assert outcome.code == 2
    assert "TF_CONFIG makes this process a part of a cluster; use crankshaft local" in outcome.error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_ends_the_run_and_keeps_what_was_measured(stand_in, number, code):
    program = stand_in.start("--benchmark_sweep=how=well,slowly,badly")
    program.until(lambda: stand_in.pid("slowly"))
    program.send(number)
    outcome = program.wait()
    assert outcome.code == code
    until_dead(stand_in.pid("slowly"))
    assert [point["settings"]["how"] for point in stand_in.result()["sweep"]] == ["well"]
    assert stand_in.result()["warnings"] == ["stopped after 1 of 3 points"]
    assert stand_in.pid("badly") is None


def test_killed_it_leaves_no_run_behind(stand_in):
    program = stand_in.start("--benchmark_sweep=how=slowly")
    program.until(lambda: stand_in.pid("slowly"))
    program.send(signal.SIGKILL)
    until_dead(stand_in.pid("slowly"))


def test_launch_local_sweeps_what_its_tasks_would_run(stand_in, crank, tmp_path):
    local = ("--workers=2", "--", str(tmp_path / "stand_in.py"))
    sweep_of = ("--benchmark_sweep=precision=float32,bfloat16", f"--result_json={tmp_path / 'result.json'}")
    outcome = crank(*local, *BENCHMARK, *sweep_of, "--how=well", command="local", tensorflow=False).ok()
    points = stand_in.result()["sweep"]
    assert [point["examples_per_sec"] for point in points] == pytest.approx([1000, 1500])
    assert "[2/2] precision=bfloat16: " in outcome.out


def test_replicas_may_be_workers(stand_in):
    stand_in.start("--benchmark_replicas=1,2", "--strategy=multi_worker").wait().ok()
    found = stand_in.result()["scaling"]
    assert [(each["replicas"], each["global_batch_size"]) for each in found] == [(1, 64), (1, 64), (2, 128), (2, 64)]
    # The stand-in knows no workers: each run has the rate of one replica.
    assert [each["efficiency"] for each in found] == pytest.approx([1, 1, 0.5, 0.5])


@pytest.mark.slow
def test_a_sweep_of_the_real_program(crank, tmp_path):
    result = tmp_path / "result.json"
    small = ("--mode=benchmark", "--model=mlp", "--input=digits", "--jit=off", "--benchmark_steps=20")
    program = crank.start(*small, "--benchmark_sweep=global_batch_size=32,64", f"--result_json={result}")
    program.wait().ok()  # two processes, one after the other
    points = json.loads(result.read_text())["sweep"]
    assert [point["settings"]["global_batch_size"] for point in points] == ["32", "64"]
    for point in points:
        low, high = point["interval"]
        assert low <= point["examples_per_sec"] <= high


# --- scaling


def test_efficiency_is_the_rate_of_a_replica_over_that_of_the_fewest(stand_in):
    stand_in.start("--benchmark_replicas=4,1,2", "--global_batch_size=32").wait().ok()
    found = stand_in.result()["scaling"]
    assert [(each["replicas"], each["kind"], each["global_batch_size"]) for each in found] == [
        (1, "weak", 32),
        (1, "strong", 32),
        (2, "weak", 64),
        (2, "strong", 32),
        (4, "weak", 128),
        (4, "strong", 32),
    ]
    # By the stand-in's law an example costs 1, 1.1 and 1.3 ms of a replica.
    expected = [1, 1, 1 / 1.1, 1 / 1.1, 1 / 1.3, 1 / 1.3]
    assert [each["efficiency"] for each in found] == pytest.approx(expected)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to give a replica one of its own")
def test_each_replica_has_as_many_cores_as_any_other_where_there_are_enough(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    usable = len(os.sched_getaffinity(0))
    with_flags = flags.FLAGS
    with_flags.mark_as_parsed()
    hardware = scaling.Hardware(_program(), 2, os.environ)
    assert [len(hardware.point(count, 64).cores) for count in (1, 2)] == [usable // 2, usable // 2 * 2]
    assert hardware.warnings == []
    crowded = scaling.Hardware(_program(), 2 * usable, os.environ)
    assert crowded.point(1, 64).cores is None
    assert "share" in crowded.warnings[0]


def _program():
    from crankshaft.launch.benchmark.program import TRAIN, Program

    return Program(TRAIN, lambda environment: None)


def test_gpus_are_those_that_the_environment_lets_be_seen():
    assert shares.visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}) == ["3", "1"]
    assert shares.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert shares.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
