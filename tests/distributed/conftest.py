"""What tests of several processes share: `start_workers` and `start`, which end what they start."""

from __future__ import annotations

import pytest

from tests.distributed.jobs import start
from tests.launch.conftest import crank, inside
from tests.processes import Workers

_ = crank, inside, start  # the fixtures


@pytest.fixture(scope="module")
def start_workers(tmp_path_factory):
    """start_workers(count, *command, **environment): started `Workers`, ended with the module."""
    started = []

    def start(count: int, *command, **environment: str) -> Workers:
        started.append(Workers(count, command, tmp_path_factory.mktemp("workers"), **environment))
        return started[-1]

    yield start
    for workers in started:
        workers.end()
