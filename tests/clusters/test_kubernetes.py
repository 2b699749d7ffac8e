"""Runs in containers, from the objects in examples/, whose pods are deleted, evicted and out of memory."""

from __future__ import annotations

import pathlib

import pytest

from tests.clusters.job_controller import JobController
from tests.runs import assert_equal_bits, newest, result

pytestmark = pytest.mark.clusters
HUNGRY = pathlib.Path(__file__).with_name("hungry.py")
RUN = (
    "python",
    str(HUNGRY),
    "--model=mlp",
    "--model_arg=hidden_units=32",
    "--input=digits",
    "--jit=off",
    "--progress=plain",
)
LONG = ("--checkpoint_every_steps=1000", "--eval_every_steps=0", "--steps_per_loop=10")


def more_steps(run_dir: pathlib.Path) -> int:
    """A step that a run reaches only if it has gone on for two checkpoints from now."""
    return newest(run_dir) + 2000


def disturb(pods: JobController, run_dir: pathlib.Path, *pods_in_turn: str) -> None:
    """Deletes a pod, evicts the next, lets the third run out of memory, each once the run has gone on."""
    deleted, evicted, hungry = pods_in_turn
    for pod, end in ((deleted, pods.delete), (evicted, pods.evict), (hungry, lambda pod: ask(pods, pod))):
        target, before = more_steps(run_dir), pods.address(pod)
        pods.until(lambda target=target: newest(run_dir) >= target)
        end(pod)
        pods.until(lambda pod=pod, before=before: pods.address(pod) not in ("", before))


def ask(pods: JobController, pod: str) -> None:
    (pods.runs / f"hungry-{pod}").touch()


def test_workers_go_on_to_the_bits_of_an_undisturbed_run_whatever_ends_their_pods(pods):
    steps = ("--train_steps=20000", *LONG)
    calm = pods("kubernetes.yaml", "calm", *RUN, *steps, "--run_dir=/runs/calm")
    calm.until(lambda: calm.is_complete)
    assert "task 0 of 2 workers; from Kubernetes" in calm.logs()
    calm.remove()
    disturbed = pods("kubernetes.yaml", "disturbed", *RUN, *steps, "--run_dir=/runs/disturbed")
    run_dir = disturbed.runs / "disturbed"
    disturb(disturbed, run_dir, "disturbed-1", "disturbed-0", "disturbed-1")
    disturbed.until(lambda: disturbed.is_complete)
    logs = disturbed.logs()
    assert "exit code 143" in logs
    assert "exit code 137" in logs
    assert "resumed at step" in logs
    assert_equal_bits(run_dir, disturbed.runs / "calm")


def test_tasks_with_servers_come_back_one_by_one(pods):
    steps = ("--train_steps=20000", *LONG)
    around = pods("jobset.yaml", "around", *RUN, *steps, "--run_dir=/runs/around")
    run_dir = around.runs / "around"
    disturb(around, run_dir, "around-worker-0-0", "around-ps-0-1", "around-worker-0-1")
    around.until(lambda: around.is_complete)
    assert result(run_dir)["step"] == 20000
    logs = around.logs()
    assert "of 1 chief, 2 workers, 2 ps; from Kubernetes" in logs
    assert "exit code 137" in logs


def test_the_liveness_probe_tells_a_process_that_is_stopped_from_one_that_works(pods):
    probed = pods("jobset.yaml", "probed", *RUN, *LONG, "--train_steps=900000", "--run_dir=/runs/probed")
    names = ("probed-chief-0-0", "probed-worker-0-0", "probed-ps-0-0")
    for pod in names:
        probed.until(lambda pod=pod: probed.is_live(pod))
    probed.until(lambda: newest(probed.runs / "probed") >= 1000)
    for pod in names:
        assert probed.is_live(pod)
        probed.signal(pod, "STOP")
        assert not probed.is_live(pod)
        probed.signal(pod, "CONT")


def test_a_mistake_fails_the_job(pods):
    mistaken = pods("kubernetes.yaml", "mistaken", *RUN, "--global_batch_size=31", "--run_dir=/runs/mistake")
    with pytest.raises(AssertionError, match=r"mistaken: pod [01] has ended with 2"):
        mistaken.until(lambda: mistaken.is_complete)
    assert "error: global_batch_size=31" in mistaken.logs()
