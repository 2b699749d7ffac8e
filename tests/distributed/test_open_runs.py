"""A run that is open in each task of a cluster: what it computes is one device's, and a call that differs is named."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

import crankshaft
from tests.distributed import open_run
from tests.launch import several_inputs
from tests.processes import Job


def found(job: Job) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"\] found (.*)", job.output)]


@pytest.fixture
def ended(start):
    """`ended(how)`: the job of two workers with an open run that has ended."""

    def run(how: str) -> Job:
        job = start(how, f"--how={how}", local=("--ps=0", "--max_restarts=0"), script=open_run.__file__)
        assert job.wait().code != 0
        return job

    return run


@pytest.mark.slow
def test_workers_train_an_open_run_as_one_process_does_and_name_a_call_that_differs(ended, tmp_path):
    alone = open_run.main("one_device", f"{tmp_path}/alone")
    job = ended("other")
    assert "train(steps=1) by worker 0, train(steps=2) by worker 1; have all make the same" in job.output
    first, second = found(job)
    assert first == second
    assert first["step"] == alone["step"] == 11
    for name in ("own", "evaluated", "partial", "predicted", "given"):
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-5)  # rounding of sums
    assert first["restored"][:2] == alone["restored"][:2] == [11, {"a": 1}]


@pytest.mark.slow
def test_workers_that_each_give_examples_of_their_own_train_on_all_of_them(start, tmp_path):
    alone = open_run.own("one_device", f"{tmp_path}/alone")
    job = start("own", "--how=own", local=("--ps=0", "--max_restarts=0"), script=open_run.__file__).ok()
    for each in found(job):
        worker = each["worker"]
        for name in ("loss", "weights", "evaluated"):
            np.testing.assert_allclose(each[name], alone[name], rtol=1e-5)
        np.testing.assert_allclose(each["predicted"], alone["all"][12 * worker : 12 * worker + 12], rtol=1e-5)
        thread, unequal, unlike = each["refused"]
        assert "it is made in another thread than the one that opened the run" in thread
        assert "4 examples" in unequal
        assert "5 examples" in unequal
        assert "the given data of worker 1 differs from worker 0's" in unlike
        assert "or, if each gives examples of its own, open the run with auto_shard_policy=off" in unlike


@pytest.mark.slow
def test_weights_that_are_set_otherwise_on_a_worker_are_named_in_the_next_call(ended):
    output = ended("apart").output
    assert re.search(r"step 11: replica 1 \(worker 1\) of 2 replicas holds other values of \S+/bias \[1\]", output)
    assert "train(steps=1)" not in output


@pytest.mark.thorough
def test_workers_save_together_where_one_of_them_gets_sigterm_between_two_calls(ended):
    job = ended("term")
    assert "worker 0 was killed by SIGTERM" in job.output
    assert "worker 1 was killed by SIGTERM" in job.output
    assert (job.result["step"], job.result["stop"]) == (8, "SIGTERM")
    assert (job.run_dir / "checkpoints" / "ckpt-8.index").exists()


@pytest.mark.slow
def test_clusters_report_each_class_and_predict_as_one_process_does(start, tmp_path):
    crankshaft.run(open_run.Classes, input="digits", run_dir=tmp_path / "alone", train_steps=5, jit="off")
    clusters = []
    for servers in (0, 2):
        shutil.copytree(tmp_path / "alone", tmp_path / str(servers))
        clusters.append(start(str(servers), "--how=look", local=(f"--ps={servers}",), script=open_run.__file__).ok())
    alone = open_run.look("one_device", f"{tmp_path}/alone")
    assert [len(found(job)) for job in clusters] == [2, 1]  # each worker, the coordinator
    assert alone["step"] == 5
    assert np.sum(alone["matrix"]) == len(alone["predicted"])
    for each in [*found(clusters[0]), *found(clusters[1])]:
        assert each["matrix"] == alone["matrix"]
        assert each["computed"] == alone["computed"]
        assert each["of_zeros"] == pytest.approx(np.log(10), rel=1e-5)
        np.testing.assert_allclose(each["predicted"], alone["predicted"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_all_workers_end_with_the_error_of_metrics_that_the_chief_computes(ended):
    output = ended("fails").output
    assert "[worker 0] KeyError: 'missing'" in output
    assert "Failing.compute_metrics has failed at worker 0: KeyError: 'missing'" in output


@pytest.mark.slow
def test_clusters_train_on_several_inputs_per_step(start):
    """Workers by the rows of each batch, as one device does; workers with servers on arrays, in any order."""
    jobs = [start(f"several{n}", "--how=several", local=(f"--ps={n}",), script=open_run.__file__).ok() for n in (0, 1)]
    first, second, coordinator = [*found(jobs[0]), *found(jobs[1])]
    assert first == second
    for mine, expected in zip(first["weights"], several_inputs.by_hand(9), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-6)
    assert coordinator["step"] == 9
    assert np.isfinite([first["far"], coordinator["far"]]).all()
