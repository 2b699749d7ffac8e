"""Runs that a version has saved (tests/launch/saved_runs/VERSION) are resumed, and end as if they had not stopped."""

import json
import shutil

import pytest
import tensorflow as tf

from crankshaft.engine.record.events import read
from tests.launch.saved_runs import write
from tests.logical_cpus import make_four, use_new_collective_keys
from tests.runs import manifests

GONE = {  # flags, since the runs were saved
    *("init_map", "init_optimizer", "powersgd_rank", "tokens", "tpu_address", "fail_below", "profile"),
    *("benchmark_steps", "benchmark_seconds", "benchmark_rounds"),
}


def paths(values, inside=()) -> set[tuple]:
    """The keys of nested dictionaries, each as the keys on the way to it."""
    if not isinstance(values, dict):
        return set()
    return {(*inside, key) for key in values}.union(*(paths(each, (*inside, key)) for key, each in values.items()))


def named(run_dir) -> dict[str, set]:
    """The names of all that a run has saved, by what has them; its events are those since it was started last."""
    manifest, config = manifests(run_dir)[-1], json.loads((run_dir / "config.json").read_text())
    events = [line.event for line in read(run_dir / "events.jsonl")]
    starts = [place for place, event in enumerate(events) if event["event"] == "start"]
    return {
        "variables": set(manifest["variables"]),
        "flags": set(config["flags"]) - GONE,
        "state": paths(manifest["host_state"]),
        "decides": {path for path in paths(manifest["about"]) if path[-1] not in GONE},
        "events": {(e["event"], key) for e in events[starts[-1] :] if e["event"] != "warning" for key in e},
    }


*OLDER, NEWEST = sorted(each.name for each in write.HERE.iterdir() if each.name[0].isdigit())


@pytest.mark.parametrize("version", [*(pytest.param(each, marks=pytest.mark.thorough) for each in OLDER), NEWEST])
@pytest.mark.parametrize(
    "name", ["one_device", "two_replicas", "fit", pytest.param("parameter_servers", marks=pytest.mark.slow)]
)
def test_a_saved_run_goes_on_and_all_that_it_has_saved_has_the_same_name(name, version, tmp_path, monkeypatch):
    make_four()
    use_new_collective_keys()
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / name
    shutil.copytree(write.HERE / version / name, run_dir)
    before = named(run_dir)
    try:
        result = write.RUNS[name](name, write.END)
    finally:
        tf.keras.config.set_dtype_policy("float32")
    starts = [line.step for line in read(run_dir / "events.jsonl") if line.kind == "start"]
    assert starts == [0, write.SAVED]
    expected = json.loads((write.HERE / version / name / "expected.json").read_text())
    for split, means in expected.items():
        assert result[split] == pytest.approx(means, rel=3e-4)  # another machine rounds otherwise, float16 most
    after = named(run_dir)
    lost = {what: sorted(names - after[what]) for what, names in before.items()}
    assert not any(lost.values()), lost
