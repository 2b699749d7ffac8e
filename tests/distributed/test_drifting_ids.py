"""Tables whose rows of ids no longer seen go to others, under `crankshaft local`, killed and stopped."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import hashing
from tests import runs
from tests.distributed import drifting
from tests.distributed.jobs import ROOT, Job, start

_ = start  # the fixture
SCRIPT = ROOT / "tests" / "distributed" / "drifting.py"
KILLS = 10
FLAGS = (
    *("--mode=train", "--shuffle_buffer=0", f"--global_batch_size={drifting.BATCH}"),
    *("--optimizer=adagrad", "--learning_rate=0.1", "--jit=off"),
)


@pytest.fixture
def run(start):
    """run(name, *flags, workers=2, servers=0): a started `Job` of the drifting clicks."""

    def run(name: str, *flags: str, workers: int = 2, servers: int = 0, steps: int = drifting.STEPS) -> Job:
        local = (f"--workers={workers}", f"--ps={servers}", f"--max_restarts={2 * KILLS}")
        placed = ("--variable_placement=items/shard_1=ps:1",) if servers == 2 else ()
        return start(name, *FLAGS, f"--train_steps={steps}", *placed, *flags, local=local, script=SCRIPT)

    return run


def assigned(run_dir: pathlib.Path) -> np.ndarray:
    """The ids with a row, after a check that each is in its own shard, in one of its two buckets, and only once."""
    tensors = runs.tensors(run_dir)
    shards = sorted((name, x) for name, x in tensors.items() if "items/admissions" in name and "/keys/" in name)
    found = []
    for number, (_, keys) in enumerate(shards):
        bucket, _ = np.nonzero(keys > np.iinfo(np.int64).min + 1)
        ids = tf.constant(keys[keys > np.iinfo(np.int64).min + 1])
        either = hashing.hash_columns(ids, [len(keys)] * 2).numpy()
        assert (either == bucket[:, None]).any(1).all()
        owner = hashing.bucket(tf.bitcast(hashing.mixed(ids), tf.int64), len(shards))
        assert (owner.numpy() == number).all()
        found.append(ids.numpy())
    ids = np.concatenate(found)
    assert len(ids) == len(set(ids))
    return ids


def sighted(run_dir: pathlib.Path) -> int:
    """How often examples were seen."""
    (tally,) = (x for name, x in runs.tensors(run_dir).items() if "examples/admissions" in name and "/tally/" in name)
    return int(tally[2])


@pytest.mark.slow
def test_around_servers_ten_kills_leave_each_id_one_row_and_count_a_step_more_each(run):
    job = run("run", "--checkpoint_every_steps=25", servers=2)
    for number in range(KILLS):
        task = ("chief", "ps 0", "worker 0", "ps 1", "worker 1")[number % 5]
        before = runs.newest(job.run_dir)
        job.until(lambda before=before: runs.newest(job.run_dir) > before)
        job.kill(task)
        time.sleep(0.5)
    job.ok()
    ids, tables = assigned(job.run_dir), job.result["tables"]
    assert len(ids) == tables["items/rows_given"] > 200
    assert tables["items/rows_freed"] > 2000
    assert tables["items/turned_away"] == 0
    assert 0 <= sighted(job.run_dir) - drifting.STEPS * drifting.BATCH <= KILLS * drifting.BATCH


@pytest.mark.slow
def test_a_sweep_waits_for_a_worker_stopped_between_its_lookup_and_its_update(run, tmp_path):
    """The other one goes on up to the sweep at step 48, at which all leases have ended."""
    job = run("run", f"--hold={tmp_path}", "--steps_per_loop=4", servers=2)
    held = tmp_path / "held"
    job.until(lambda: held.exists() and held.read_text().endswith("\n"))
    worker = int(held.read_text().split()[0])
    os.kill(worker, signal.SIGSTOP)
    job.until(lambda: "items at step 32" in job.output)
    time.sleep(5.0)
    assert "items at step 48" not in job.output
    (tmp_path / "go").touch()
    os.kill(worker, signal.SIGCONT)
    job.ok()
    assert "items at step 48" in job.output
    assert sighted(job.run_dir) == drifting.STEPS * drifting.BATCH
    assert len(assigned(job.run_dir)) == job.result["tables"]["items/rows_given"]
