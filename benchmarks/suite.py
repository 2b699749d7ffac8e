"""Measures the standard set: each workload on each strategy, beside Keras fit, in turn. Host code, no TensorFlow."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from crankshaft.launch.cluster import resources

from .children import MeasurementFailed, Process, Series
from .keras_peer import SETTINGS, STEPS_PER_EXECUTION
from .workloads import BATCH_SIZE, WORKLOADS, Workload

STRATEGIES = ("one_device", "mirrored", "multi_worker", "parameter_server")
OURS = "crankshaft"
QUALITY_STEPS = 100  # before loss and metric are compared, which shows a peer that computes something else
TIMEOUT_SECONDS = 600.0
_CLOSE = 0.85  # of fit's tuned settings, the slower one is measured again if it has this share of the faster one's rate
_PROCESSES = 2  # workers, and parameter servers
_QUALITY = "quality"


@dataclasses.dataclass(frozen=True)
class Setup:
    """A strategy as this machine can run it.

    Attributes:
      strategy: its name.
      replicas: how many.
      on_cpu: whether there is no GPU.
      flags: of launch.train.
      cluster: of crankshaft local; None where there is one process.
    """

    strategy: str
    replicas: int
    on_cpu: bool = True
    flags: tuple[str, ...] = ()
    cluster: tuple[str, ...] | None = None

    @property
    def global_batch_size(self) -> int:
        """The batch of one replica times the replicas; on parameter servers each worker makes its own updates."""
        return BATCH_SIZE if self.strategy == "parameter_server" else BATCH_SIZE * self.replicas

    def command(self, *flags: str) -> list[str]:
        """Returns the command of a run with this setup."""
        flags_ = (*self.flags, f"--global_batch_size={self.global_batch_size}", *flags)
        if self.cluster is None:
            return [sys.executable, "-m", "crankshaft", "train", f"--strategy={self.strategy}", *flags_]
        return [sys.executable, "-m", "crankshaft", "local", *self.cluster, "--max_restarts=0", "--", *flags_]


def find_setup(strategy: str, environment: Mapping[str, str]) -> Setup | str:
    """Returns where a strategy runs on this machine, or why it can't."""
    cores, gpus = len(resources.usable_cores()), len(resources.visible_gpus(environment))
    if strategy == "one_device":
        return Setup(strategy, 1, on_cpu=not gpus)
    if strategy == "mirrored" and gpus > 1:
        return Setup(strategy, gpus, on_cpu=False)
    processes = _PROCESSES if strategy != "parameter_server" else 2 * _PROCESSES  # its coordinator only waits
    if cores < processes:
        return f"{processes} cores are needed, and there are {cores}"
    if strategy == "mirrored":
        return Setup(strategy, 2, flags=("--num_virtual_devices=2",))
    if gpus:
        return "its processes would share the GPUs"
    if strategy == "multi_worker":
        return Setup(strategy, _PROCESSES, cluster=(f"--workers={_PROCESSES}",))
    return Setup(strategy, _PROCESSES, cluster=(f"--workers={_PROCESSES}", f"--ps={_PROCESSES}"))


@dataclasses.dataclass
class Row:
    """One workload on one strategy in one precision, and what has been measured of it.

    Attributes:
      name: the workload's.
      setup: the strategy as the machine can run it.
      precision: of the layers.
      measured: by peer, a result for each round; Keras's only where there is one device.
      failed: by peer, why it has no result.
      commands: by peer, as one would type it.
    """

    name: str
    setup: Setup
    precision: str
    measured: dict[str, list[dict]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    commands: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    @property
    def title(self) -> str:
        return f"{self.name} {self.setup.strategy} {self.precision}"

    @property
    def peers(self) -> list[str]:
        return [*(self._fit_settings() if self.setup.strategy == "one_device" else ()), OURS]

    def _fit_settings(self) -> list[str]:
        without_xla = self.workload.convolutional and self.setup.on_cpu
        return [name for name, setting in SETTINGS.items() if not (without_xla and setting.get("jit_compile"))]

    def rates(self, peer: str) -> list[float]:
        """Returns steps a second, by round."""
        return [result["steps_per_sec"] for result in self.measured.get(peer, [])]

    def rate(self, peer: str) -> float | None:
        """Returns the median of the rates."""
        rates = self.rates(peer)
        return statistics.median(rates) if rates else None

    def best_keras(self) -> str | None:
        """Returns the faster of fit's settings with many steps in one call."""
        return max((peer for peer in SETTINGS if peer != "fit" and self.rates(peer)), key=self.rate, default=None)

    def is_hopeless(self, peer: str) -> bool:
        """Returns whether a peer is out: it failed, or is the slower tuned setting by far. XLA may take minutes."""
        best = self.best_keras()
        slow = best and peer in SETTINGS and peer != "fit" and self.rates(peer)
        return peer in self.failed or bool(slow and self.rate(peer) < _CLOSE * self.rate(best))


class Suite:
    """Measures rows, each round all peers of a row in turn.

    Args:
      rows: what is measured, in this order.
      rounds: of each row.
      seconds: that each measurement times.
      quality_steps: after which loss and metric are compared too; 0 compares none.
      environment: the variables that the processes get.
    """

    def __init__(
        self, rows: Sequence[Row], rounds: int, seconds: float, quality_steps: int, environment: Mapping[str, str]
    ):
        self.rows = rows
        self.rounds = rounds
        self.seconds = seconds
        self.quality_steps = quality_steps
        count = sum(len(row.peers) * rounds + self._compares(row) for row in rows)
        self._series = Series(count, environment, timeout_seconds=TIMEOUT_SECONDS)

    def run(self) -> None:
        """Measures everything; failures are recorded in their rows."""
        for row in self.rows:
            for _ in range(self.rounds):
                for peer in row.peers:
                    if row.is_hopeless(peer):
                        self._series.skip()
                    else:
                        self._measure(row, peer, self._command(row, peer))
            if self._compares(row):
                self._measure(row, _QUALITY, self._quality_command(row))

    def _measure(self, row: Row, peer: str, command: list[str]) -> None:
        row.commands[peer] = shlex.join(["python", *command[1:]])
        try:
            result = self._series.measure(f"{row.title} {peer}", lambda path: _writing(command, path))
        except MeasurementFailed as failure:
            row.failed[peer] = str(failure)
            return
        row.measured.setdefault(peer, []).append(result)

    def _compares(self, row: Row) -> bool:
        return bool(self.quality_steps) and row.setup.strategy == "one_device"

    def _command(self, row: Row, peer: str) -> list[str]:
        if peer == OURS:
            # The length of a first round is estimated by the warm-up, that of a second one is known from the first.
            length = (f"--benchmark_arg=seconds={self.seconds / 2:g}", "--benchmark_arg=rounds=2")
            return row.setup.command(*row.workload.flags, f"--precision={row.precision}", "--mode=benchmark", *length)
        steps = self.quality_steps or STEPS_PER_EXECUTION
        return [
            *(sys.executable, "-m", "benchmarks.keras_peer", f"--workload={row.name}", f"--setting={peer}"),
            *(f"--precision={row.precision}", f"--seconds={self.seconds:g}", f"--quality_steps={steps}"),
        ]

    def _quality_command(self, row: Row) -> list[str]:
        steps = ("--mode=train_and_eval", f"--train_steps={self.quality_steps}")
        return row.setup.command(*row.workload.flags, f"--precision={row.precision}", *steps)


def _writing(command: list[str], path: Path) -> Process:
    return Process([*command, f"--result_json={path}"])
