"""Runs that a Slurm of two nodes starts, kills, requeues and ends by its time limit, from examples/slurm.sh."""

from __future__ import annotations

import pathlib
import signal
import subprocess

import pytest

from tests.processes import proc
from tests.runs import assert_equal_bits, newest

pytestmark = pytest.mark.clusters
RUN = ("--model=mlp", "--model_arg=hidden_units=32", "--input=digits", "--jit=off", "--progress=plain")
LONG = ("--train_steps=12000", "--checkpoint_every_steps=1000", "--eval_every_steps=0", "--steps_per_loop=10")


@pytest.fixture(scope="module")
def undisturbed(slurm) -> pathlib.Path:
    """A run that nothing happens to, with as many threads a task as the others: `crankshaft local` gives it fewer."""
    slurm.done(slurm.submit(*flags(slurm, "undisturbed", *LONG)))
    return slurm.folder / "undisturbed"


def flags(slurm, name: str, *more: str) -> list[str]:
    return [*RUN, *more, f"--run_dir={slurm.folder / name}"]


def test_workers_on_two_nodes_need_nothing_by_hand(slurm):
    options = ("--ntasks=4",)
    two = [slurm.submit(*flags(slurm, f"two-{i}", "--train_steps=20"), options=options) for i in (0, 1)]
    for job in two:  # at once, on the same nodes
        output = slurm.done(job)
        assert f"task 0 of 4 workers; from Slurm's job {job}.0" in output
        assert {f"worker {index} at n{1 + index // 2}:" in output for index in range(4)} == {True}
        assert "4 replicas" in output


def test_servers_on_two_nodes(slurm):
    servers = flags(slurm, "servers", "--train_steps=20", "--num_ps=2")
    job = slurm.submit(*servers, options=("--ntasks=5",), tasks_per_node=3)
    output = slurm.done(job)
    assert "of 1 chief, 2 workers, 2 ps; from Slurm" in output
    assert "evaluation at step 20" in output


def test_a_killed_task_ends_all_and_the_requeued_job_has_an_undisturbed_ones_bits(slurm, undisturbed):
    job = slurm.submit(*flags(slurm, "killed", *LONG))
    slurm.until(job, lambda: newest(slurm.folder / "killed") >= 1000)
    victim = next(pid for pid in slurm("scontrol", "listpids", job).split() if pid.isdigit() and _trains(pid))
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", victim], check=True)
    output = slurm.done(job)
    assert "resumed at step" in output
    assert_equal_bits(slurm.folder / "killed", undisturbed)


def test_a_job_that_comes_near_its_time_limit_saves_and_goes_on_in_its_next_turn(slurm, undisturbed):
    job = slurm.submit(*flags(slurm, "limited", *LONG[:-1], "--steps_per_loop=1"), options=("--time=3",))  # minutes
    output = slurm.done(job)
    assert "SIGTERM" in output
    assert "TIME LIMIT" not in output  # it had ended by itself
    assert "resumed at step" in output
    assert_equal_bits(slurm.folder / "limited", undisturbed)


def test_a_job_that_is_requeued_as_its_node_is_drained_goes_on_at_another(slurm, undisturbed):
    job = slurm.submit(*flags(slurm, "drained", *LONG), nodes=1)
    slurm.until(job, lambda: newest(slurm.folder / "drained") >= 1000)
    node = slurm.state(job, "NodeList")
    slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=maintenance")
    try:
        slurm("scontrol", "requeue", job)
        output = slurm.done(job)
    finally:
        slurm("scontrol", "update", f"nodename={node}", "state=resume")
    assert slurm.state(job, "NodeList") != node
    assert "resumed at step" in output
    assert_equal_bits(slurm.folder / "drained", undisturbed)


def test_a_mistake_is_not_tried_again(slurm):
    """One that only the tasks can find: a batch that two workers can't share."""
    job = slurm.submit(*flags(slurm, "mistake", "--global_batch_size=31"))
    slurm.until(job, lambda: slurm.state(job) == "FAILED")
    assert slurm.output(job).count("error: global_batch_size=31") == 2  # by each task, once


def _trains(pid: str) -> bool:
    command = proc(pid, "cmdline")
    return "--run_dir" in command and "bash" not in command[:20]
