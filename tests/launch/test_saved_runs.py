"""Runs that an earlier version has saved (tests/launch/saved_runs) are resumed, and end as if they had not stopped.

Where one fails since what a run saves was changed on purpose, `make saved-runs` writes them again.
"""

import json
import shutil

import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.internals.tensorflow import use_new_collective_keys
from crankshaft.engine.machine.events import read
from crankshaft.launch.failures import UsageError
from tests.launch.saved_runs import write
from tests.logical_cpus import make_four
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
    events = [event for event, _ in read(run_dir / "events.jsonl")]
    starts = [place for place, event in enumerate(events) if event["event"] == "start"]
    return {
        "variables": set(manifest["variables"]),
        "flags": set(config["flags"]) - GONE,
        "state": paths(manifest["host_state"]),
        "decides": {path for path in paths(manifest["about"]) if path[-1] not in GONE},
        "events": {(e["event"], key) for e in events[starts[-1] :] if e["event"] != "warning" for key in e},
    }


@pytest.mark.parametrize(
    "name", ["one_device", "two_replicas", "fit", pytest.param("parameter_servers", marks=pytest.mark.slow)]
)
def test_a_saved_run_goes_on_and_all_that_it_has_saved_has_the_same_name(name, tmp_path, monkeypatch):
    make_four()
    use_new_collective_keys()
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / name
    shutil.copytree(write.HERE / name, run_dir)
    before = named(run_dir)
    try:
        result = write.RUNS[name](name, write.END)
    finally:
        tf.keras.config.set_dtype_policy("float32")
    starts = [event["step"] for event, _ in read(run_dir / "events.jsonl") if event["event"] == "start"]
    assert starts == [0, write.SAVED]
    expected = json.loads((write.HERE / name / "expected.json").read_text())
    for split, means in expected.items():
        assert result[split] == pytest.approx(means, rel=1e-4)  # another machine rounds otherwise
    after = named(run_dir)
    lost = {what: sorted(names - after[what]) for what, names in before.items()}
    assert not any(lost.values()), lost


def test_a_run_whose_batch_size_an_earlier_version_changed_within_an_epoch_goes_on(tmp_path, monkeypatch):
    """At step 2, after 16 of 32 examples, from 8 to 12; this version can't write `changed_batch_size` again."""
    monkeypatch.chdir(tmp_path)
    name = "changed_batch_size"
    shutil.copytree(write.HERE / name, tmp_path / name)
    how = {"optimizer": "sgd", "learning_rate": 0.02, "learning_rate_schedule": "cosine", "warmup_steps": 1}
    how |= {"train_steps": 20, "global_batch_size": 12, "allow_changed_config": True, "jit": "off", "progress": "off"}
    how |= {"summary_every_steps": 2, "eval_every_steps": 0, "keep_checkpoints": 1}
    ran = crankshaft.run(write.Classifier, data=write.examples, run_dir=name, **how)
    expected = json.loads((write.HERE / name / "expected.json").read_text())
    for split, means in expected.items():
        assert ran.result[split] == pytest.approx(means, rel=1e-4)
    assert manifests(tmp_path / name)[-1]["about"]["origin"]["place"] == 16


def test_a_run_that_a_flag_that_is_gone_has_shaped_is_refused_in_a_line(tmp_path):
    """By PowerSGD, on two replicas; this version can't write `powersgd` again."""
    shutil.copytree(write.HERE / "powersgd", tmp_path / "run")
    line = (
        "is a run with powersgd_rank=1, a flag that is gone: use reduce_dtype=bfloat16, or sync_every_steps, in another"
    )
    with pytest.raises(UsageError, match=line):
        write.two_replicas(tmp_path / "run", write.END)
