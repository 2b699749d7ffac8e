"""A table on two parameter servers: trained there by a real cluster, then taken up by one device, and the other way."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from crankshaft.parts.tables import rehash
from tests import runs
from tests.processes import Job, peak_mib
from tests.waiting import PATIENCE

# 8 x 1,500 rows of 17 (16 for the deep part, 1 for the wide) are 797 KiB: two shards of more than 256 KiB each.
CLICKS = (
    "--model=wide_deep",
    "--input=synthetic_clicks",
    *(f"--input_arg={arg}" for arg in ("examples=20000", "eval_examples=3000")),
    *("--global_batch_size=256", "--optimizer=adagrad", "--learning_rate=0.05"),
)
RUN = (*CLICKS, "--input_arg=rows=1500")


def rows_by_id(run_dir) -> dict[int, np.ndarray]:
    """A table's row and its Adagrad accumulator by id, after a check of where the keys are."""
    kept, found = runs.tensors(run_dir), {}
    updated = runs.manifests(run_dir)[-1]["about"]["updated"]["optimizer"]
    names = [name for name in updated if name.startswith("trainer/embedding/shards/")]
    for shard, name in enumerate(names):
        rows = kept[f"{name}.ATTRIBUTES/VARIABLE_VALUE"]
        slots = kept[f"trainer/optimizer/slots/{updated.index(name):04d}_shard/accum/.ATTRIBUTES/VARIABLE_VALUE"]
        keys = kept[f"trainer/embedding/admissions/{shard}/keys/.ATTRIBUTES/VARIABLE_VALUE"]
        bucket, column = np.nonzero(keys > np.iinfo(np.int64).min + 1)
        ids, row = keys[bucket, column], bucket * keys.shape[1] + column
        assert (rehash.two_buckets(ids, len(keys)) == bucket[:, None]).any(1).all()
        assert (rehash.mixed(rehash.mixed(ids)) % np.uint64(len(names)) == shard).all()
        assert (row < len(rows)).all()
        assert row.min() >= int(shard == 0)
        assert found.keys().isdisjoint(ids)
        found |= dict(zip(ids.tolist(), np.concatenate([rows, slots], 1)[row], strict=True))
    return found


def unchanged(before: dict, after: dict) -> int:
    """How many ids have what they had; fails if one has lost its row, or has another value with the same slot."""
    assert before.keys() <= after.keys()
    width = len(next(iter(before.values()))) // 2
    same = [key for key in before if (before[key][width:] == after[key][width:]).all()]
    assert all((before[key] == after[key]).all() for key in same)
    return len(same)


@pytest.mark.slow
def test_workers_that_give_rows_at_once_give_no_id_two_and_no_row_twice(inside, start, tmp_path):
    """Ids are sampled from 2^40, and most come to both workers at some time.

    Three servers then take the table up from two, and one of them is killed; then a device does.
    """
    run = (*CLICKS, "--input_arg=rows=1099511627776", "--model_arg=table_capacity=20000", "--model_arg=admit_after=2")
    run_dir = f"--run_dir={tmp_path}/run"
    start("run", *run, "--train_steps=120", script=()).ok()
    first = rows_by_id(tmp_path / "run")
    given = {"embedding/rows_given": len(first), "embedding/turned_away": 0}
    assert runs.result(tmp_path / "run")["tables"] == given
    job = start("run", *run, "--train_steps=125", local=("--ps=3", "--max_restarts=1"), script=())
    job.until(lambda: "ids move to a table of 20,000 rows (shards: 3); 0 get no row" in job.output)
    job.kill("ps 1")
    assert job.ok().starts() == 2
    second = rows_by_id(tmp_path / "run")
    assert unchanged(first, second) > len(first) / 2
    alone = inside(*run, run_dir, "--train_steps=130").ok()
    assert "ids move to a table of 20,000 rows (shards: 1); 0 get no row" in alone.err
    assert unchanged(second, rows_by_id(tmp_path / "run")) > len(second) / 2


SCRIPT = """
import numpy as np

import crankshaft
from crankshaft.models.mlp import Model


def data():
    rng = np.random.default_rng(0)
    features, labels = rng.random((2560, 8), np.float32), rng.integers(0, 10, 2560)
    features[77, 3] = np.nan
    return (features, labels), (features[100:], labels[100:]), 10


crankshaft.main(Model, data=data)
"""


@pytest.mark.slow
def test_weights_on_servers_that_are_not_finite_fail_a_run_whose_loss_is(start, tmp_path):
    """ReLU takes nan for 0, so nothing but the weights shows it, which are looked at where they are."""
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--mode=train", "--train_steps=40", "--steps_per_loop=20")
    job = start("run", *flags, local=("--workers=1", "--ps=1"), script=tmp_path / "script.py")
    assert job.wait().code == 65, job.output[-3000:]
    assert "the run has diverged, and would again, so it is not restarted" in job.output
    assert re.search(r"error: step 40: variable mlp/dense\w*/kernel is not finite", job.output), job.output[-1500:]


def peaks(job: Job) -> dict[str, float]:
    """The most memory, in GiB, that each task has had until now."""
    found = {}
    for task, pid in re.findall(r"\[local\] (.*) is process (\d+)", job.output):
        if mib := peak_mib(pid):
            found[task] = mib / 2**10
    return found


@pytest.mark.slow
def test_a_table_of_2_gb_on_two_servers_trains_with_a_worker_of_less_than_one(start):
    """TensorFlow alone is about 0.6 GiB in each process. A server has its half of the table, and little beside."""
    flags = ("--model=dlrm", "--model_arg=hash_buckets=32000000", "--optimizer=sgd", "--train_steps=150")
    job = start("run", *RUN[1:], *flags, local=("--workers=1",), script=(), saves=False)
    seen: dict[str, float] = {}
    end = time.monotonic() + PATIENCE
    while job.process.poll() is None:
        assert time.monotonic() < end
        for task, peak in peaks(job).items():
            seen[task] = max(peak, seen.get(task, 0.0))
        time.sleep(0.5)
    assert "Embedding: 'embedding', 32,000,000 rows x 16, 2,048.0 MB, shards: 2" in job.ok().output
    half = 32e6 * 16 * 4 / 2 / 2**30
    assert seen["worker 0"] < 1 > seen["chief"]
    for server in ("ps 0", "ps 1"):
        assert half < seen[server] < half + 1
