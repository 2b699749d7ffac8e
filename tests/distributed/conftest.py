"""What tests of several processes share: `workers`, processes on loopback that train together, ended with the test."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import pytest

from crankshaft.launch.cluster.resources import free_ports
from tests import forked
from tests.launch.conftest import inside
from tests.waiting import wait_until

_ = inside  # the fixture
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Workers:
    """`count` processes of one command, at `addresses`, each told by TF_CONFIG which it is. Output goes to files."""

    def __init__(self, count: int, command: list[str], folder: pathlib.Path, **environment: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.addresses = [f"localhost:{port}" for port in free_ports(count)]
        self._command, self._environment = command, environment
        self._paths = [folder / f"worker-{index}.log" for index in range(count)]
        self.processes = [self._started(index) for index in range(count)]

    def _started(self, index: int):
        task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": index}}
        variables = {**os.environ, **self._environment, "TF_CONFIG": json.dumps(task), "PYTHONPATH": str(ROOT)}
        with open(self._paths[index], "ab") as log:
            return forked.start(self._command, variables, stdout=log, stderr=log)

    def start_again(self, worker: int) -> None:
        """Starts a process that has ended again, at its address; its output is appended."""
        self.processes[worker] = self._started(worker)

    def output(self, worker: int) -> str:
        return self._paths[worker].read_text(errors="replace")

    def send(self, worker: int, number: signal.Signals) -> None:
        self.processes[worker].send_signal(number)

    def until(self, condition) -> None:
        """Waits for `condition()`; fails if a process ends before, or time does."""
        wait_until(condition, *self.processes, shows=self._outputs)

    def wait(self) -> list[int]:
        """The exit codes, once all have ended by themselves."""
        wait_until(lambda: all(process.poll() is not None for process in self.processes), shows=self._outputs)
        return [process.returncode for process in self.processes]

    def ok(self) -> Workers:
        """Itself, once all have ended well."""
        codes = self.wait()
        assert not any(codes), f"exit codes {codes}\n{self._outputs()}"
        return self

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # a stopped one too
                process.wait()

    def _outputs(self) -> str:
        return "\n".join(f"-- worker {i}\n{self.output(i)[-3000:]}" for i in range(len(self.processes)))


@pytest.fixture(scope="module")
def start_workers(tmp_path_factory):
    """start_workers(count, *command, **environment): started `Workers`, ended with the module."""
    started = []

    def start(count: int, *command, **environment: str) -> Workers:
        started.append(Workers(count, list(command), tmp_path_factory.mktemp("workers"), **environment))
        return started[-1]

    yield start
    for each in started:
        each.end()
