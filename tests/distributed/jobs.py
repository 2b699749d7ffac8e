"""Jobs that count: `tests/distributed/counting.py` under `crankshaft local`; and `start`, for jobs of any script."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests import runs
from tests.processes import ROOT, Job

SCRIPT = ROOT / "tests" / "distributed" / "counting.py"
STEPS_PER_EPOCH = 16  # 1000 examples in batches of 64: the last is of 40


@pytest.fixture
def start(tmp_path):
    """start(name, *flags, local=(), script=SCRIPT): a started `Job`, ended with the test."""
    jobs = []

    def start(name: str, *flags: str, script=SCRIPT, **more) -> Job:
        jobs.append(Job(tmp_path / name, *flags, script=script, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def variable(run_dir: pathlib.Path, name: str) -> np.ndarray:
    """A variable of the newest checkpoint whose key ends so."""
    found = {key: value for key, value in runs.tensors(run_dir).items() if name in key}
    (value,) = found.values()
    return value


def check_updates(job: Job, steps: int) -> np.ndarray:
    """Exactly so many updates, by the run's own count and by the checkpoint's. Returns how often each was seen.

    Its tasks were forks throughout: none has imported TensorFlow itself.
    """
    assert "imports TensorFlow itself" not in job.output
    assert job.result["step"] == steps
    assert variable(job.run_dir, "step/.ATT") == steps
    seen = variable(job.run_dir, "seen/")
    assert variable(job.run_dir, "optimizer/iterations") >= steps
    return seen
