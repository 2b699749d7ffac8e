"""A stream with parameter servers: the coordinator reads it and sends workers their steps; counted by example."""

from __future__ import annotations

import signal

import pytest

from tests import runs
from tests.distributed.jobs import STEPS_PER_EPOCH, check_updates, variable


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_leases_are_done_with_the_same_examples(start):
    """Each example once an epoch, but for those that the killed worker had applied and not yet counted."""
    steps = 60 * STEPS_PER_EPOCH
    flags = ("--stream=dataset", "--shuffle_buffer=100", "--steps_per_loop=10", "--checkpoint_every_steps=100")
    job = start("run", f"--train_steps={steps}", "--eval_every_steps=320", *flags, local=("--ps=1",))
    job.until(lambda: runs.newest(job.run_dir) >= 100)
    job.kill("worker 0")
    job.ok()
    seen = check_updates(job, steps)
    assert seen.min() >= 60
    assert seen.sum() - 60 * len(seen) <= 2 * 64
    assert "worker 0 was killed by SIGKILL; it starts again at once, the others go on" in job.output
    assert job.result["eval"]["example"] == 949.5  # the mean of 900 to 999, each once
    said = "a dataset of 1,000 examples: the coordinator reads it, and sends each worker the examples of its steps"
    assert said in job.output


@pytest.mark.slow
@pytest.mark.parametrize("form", [("--stream=gzip", "--shuffle_buffer=100"), ()], ids=["stream", "arrays"])
def test_a_run_stopped_within_an_epoch_goes_on_with_the_example_after_the_last(start, tmp_path, form):
    steps = 30 * STEPS_PER_EPOCH + 5
    flags = (*form, f"--folder={tmp_path / 'files'}", "--mode=train")
    flags += (f"--train_steps={steps}", "--checkpoint_every_steps=50")
    job = start("run", *flags, local=("--ps=1",))
    job.until(lambda: runs.newest(job.run_dir) >= 50)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    stopped = runs.newest(job.run_dir)
    assert 0 < stopped < steps
    assert f"stopped at step {stopped}: SIGTERM" in job.output
    again = start("run", *flags, local=("--ps=1",)).ok()
    seen = check_updates(again, steps)
    assert seen.min() == 30
    assert seen.sum() == 30 * 1000 + 5 * 64
    assert ("counting examples" in job.output) == bool(form)
    assert "counting examples" not in again.output
    assert "reading the epoch again" not in again.output


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--stream=dataset", "--files=7"])
def test_leases_of_another_batch_size_go_on_where_an_epoch_ends(start, tmp_path, form):
    """After the 16 steps of an epoch of 1,000 in batches of 64."""
    flags = (form, f"--folder={tmp_path / 'files'}", "--mode=train", "--allow_changed_config")
    start("run", *flags, "--train_steps=16", local=("--ps=1",)).ok()
    job = start("run", *flags, "--train_epochs=2", "--global_batch_size=48", local=("--ps=1",)).ok()
    assert "batch size 48, which was 64, from epoch 2 on" in job.output
    assert job.result["step"] == 16 + 21
    assert (variable(job.run_dir, "seen") == 2).all()
