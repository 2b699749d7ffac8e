"""A stream with parameter servers: the coordinator reads it and sends workers their steps; counted by example."""

from __future__ import annotations

import signal

import pytest

from tests import runs
from tests.distributed.jobs import STEPS_PER_EPOCH, check_updates


@pytest.mark.slow
@pytest.mark.parametrize("form", [("--stream=gzip", "--shuffle_buffer=100"), ()], ids=["stream", "arrays"])
def test_a_run_stopped_within_an_epoch_goes_on_with_the_example_after_the_last(start, tmp_path, form):
    steps = 30 * STEPS_PER_EPOCH + 5
    flags = (*form, f"--folder={tmp_path / 'files'}", "--mode=train")
    flags += (f"--train_steps={steps}", "--checkpoint_every_steps=50")
    job = start("run", *flags, local=("--ps=1",))
    job.until(lambda: runs.newest(job.run_dir) >= 50)
    number = signal.SIGTERM if form else signal.SIGUSR1
    for task in () if form else ("ps 0", "worker 0", "worker 1"):  # as Slurm sends it to each process
        job.send_to(task, number)
    job.send(number)
    assert job.wait().code == 143
    stopped = runs.newest(job.run_dir)
    assert 0 < stopped < steps
    assert f"stopped at step {stopped}: {number.name}" in job.output
    again = start("run", *flags, local=("--ps=1",)).ok()
    seen = check_updates(again, steps)
    assert seen.min() == 30
    assert seen.sum() == 30 * 1000 + 5 * 64
    assert ("counting examples" in job.output) == bool(form)
    assert "counting examples" not in again.output
    assert "reading the epoch again" not in again.output
