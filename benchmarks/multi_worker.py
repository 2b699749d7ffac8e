"""Two workers of Crankshaft beside TensorFlow's tutorial and PyTorch's DDP: a script, not a test, on one machine.

Each worker is a process pinned to one core (by its affinity, which each library counts its threads by; nothing else is
set) and takes batches of 64. The peers run in turn (A B C A B C ...), and the table has medians. Run it from the
repository: `.venv/bin/python -m benchmarks.multi_worker --torch_python=.../bin/python --json=multi_worker.json`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from crankshaft.launch.cluster.resources import free_ports, usable_cores

from .children import MeasurementFailed, Process
from .markdown import table
from .race import (
    NEEDED,
    PYTHON,
    Race,
    add_arguments,
    check_arguments,
    cpu_model,
    find_facts,
    find_versions,
    quality_table,
    read_result,
    report,
    run_script,
    run_together,
    runs_with,
    write_figures,
)
from .workloads import BATCH_SIZE

WORKERS = 2
PEERS = "benchmarks.peers"
# Crankshaft's ways to reduce, by what the tables call them.
WIRES = {"float32": (), "bfloat16": ("--reduce_dtype=bfloat16",), "local_sgd": ("--sync_every_steps=16",)}
ALL = ("tutorial", "ddp", "no_reduction", *WIRES)
RARELY_REDUCED = ("no_reduction", "local_sgd")
# Steps/s, about, reduced in each step and rarely: how many steps a first measurement has. Then its own rate says.
FIRST_GUESS = {"mlp": (300, 3000), "wide": (15, 40), "cnn": (50, 90)}
MIN_STEPS = 50
PORT_ATTEMPTS = 3
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use|Could not start gRPC server")


# -- A cluster's processes --------------------------------------------------------------------------------------------


def tutorial_workers(options: Sequence[str], cores: Sequence[int]) -> list[Process]:
    addresses = [f"localhost:{port}" for port in free_ports(len(cores))]
    command = [PYTHON, "-m", f"{PEERS}.tutorial_loop", *options]
    return [
        Process(command, {"TF_CONFIG": json.dumps(_tf_config(addresses, index))}, frozenset({core}))
        for index, core in enumerate(cores)
    ]


def _tf_config(addresses: list[str], index: int) -> dict:
    return {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}


def ddp_workers(python: str, options: Sequence[str], cores: Sequence[int]) -> list[Process]:
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(len(cores))}
    command = [python, "-m", f"{PEERS}.ddp", *options]
    return [Process(command, group | {"RANK": str(rank)}, frozenset({core})) for rank, core in enumerate(cores)]


def run_on_free_ports(make: Callable[[], list[Process]]) -> None:
    """Runs what `make` returns; once more, with what it returns then, where somebody was faster to take a port."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        try:
            return run_together(make())
        except MeasurementFailed as failure:
            if attempt == PORT_ATTEMPTS or not _PORT_TAKEN.search("\n".join(failure.last_lines)):
                raise


# -- The race ---------------------------------------------------------------------------------------------------------


class WorkersRace(Race):
    """The tutorial's loop, DDP, Crankshaft with each of its wires, and Crankshaft with nothing to reduce."""

    def run_round(self, peers: Sequence[str], cores: Sequence[int], torch_python: str | None) -> None:
        """Measures each of `peers` once, in turn, worker i on `cores[i]`."""
        for peer in peers:
            if peer == "tutorial":
                self.measure_peer(peer, lambda options: tutorial_workers(options, cores))
            elif peer == "ddp":
                self.measure_peer(peer, lambda options: ddp_workers(torch_python, options, cores))
            elif peer == "no_reduction":
                self.measure_apart(cores)
            else:
                self.measure_crankshaft(peer, cores)

    def steps(self, peer: str) -> int:
        """As many as take about `seconds`."""
        guess = FIRST_GUESS[self.name][peer in RARELY_REDUCED]
        rate = self.rate(peer) if peer in self.measured else guess
        return max(MIN_STEPS, round(rate * self.seconds))

    def measure_peer(self, peer: str, workers: Callable[[list[str]], list[Process]]) -> None:
        steps = self.steps(peer)
        options = [f"--workload={self.name}", f"--quality_steps={self.quality_steps}"]
        options += [f"--warm_up_steps={max(10, steps // 5)}", f"--steps={steps}"]

        def run(folder: Path) -> dict:
            path = folder / "result.json"
            run_on_free_ports(lambda: workers([*options, f"--result_json={path}"]))
            return read_result(path)

        self.measure(peer, _shown(workers(options)), run)

    def crankshaft(self, *flags: str) -> list[str]:
        return [*self.workload.flags, "--progress=off", *flags]

    def benchmark(self, peer: str) -> list[str]:
        return ["--mode=benchmark", f"--benchmark_arg=steps={self.steps(peer)}", "--benchmark_arg=rounds=1"]

    def measure_crankshaft(self, wire: str, cores: Sequence[int]) -> None:
        cluster = [PYTHON, "-m", "crankshaft", "local", f"--workers={len(cores)}", "--"]
        own_flags = ["--strategy=multi_worker", f"--global_batch_size={BATCH_SIZE * len(cores)}", *WIRES[wire]]
        job = [*cluster, *self.crankshaft(*own_flags)]

        def run_job(folder: Path, *flags: str) -> dict:
            path = folder / "result.json"
            run_together([Process([*job, *flags, f"--result_json={path}"], cores=frozenset(cores))])
            return read_result(path)

        def run_quality(folder: Path) -> dict:
            steps = f"--train_steps={self.quality_steps}"
            return run_job(folder, "--mode=train_and_eval", steps, f"--run_dir={folder / 'run'}")

        def run(folder: Path) -> dict:
            result = run_job(folder, *self.benchmark(wire))
            return result | self.quality(wire, lambda: run_quality(folder))

        self.measure(wire, _shown([Process([*job, *self.benchmark(wire)], cores=frozenset(cores))]), run)

    def measure_apart(self, cores: Sequence[int]) -> None:
        """As many jobs of one device as there are workers, at the same time: the lower of their rates."""
        flags = [*self.crankshaft("--strategy=one_device", f"--global_batch_size={BATCH_SIZE}")]
        command = [PYTHON, "-m", "crankshaft", "train", *flags, *self.benchmark("no_reduction")]

        def run(folder: Path) -> dict:
            paths = [folder / f"{core}.json" for core in cores]
            run_together(
                [
                    Process([*command, f"--result_json={path}"], cores=frozenset({core}))
                    for core, path in zip(cores, paths, strict=True)
                ]
            )
            return min(map(read_result, paths), key=lambda result: result["steps_per_sec"])

        self.measure("no_reduction", _shown([Process(command, cores=frozenset({core})) for core in cores]), run)


def _shown(processes: Sequence[Process]) -> str:
    return " &\n".join(process.shown() for process in processes)


# -- The report -------------------------------------------------------------------------------------------------------


def speed_table(races: Sequence[WorkersRace]) -> str:
    def cell(race, peer):
        return race.cell(peer) if peer in race.measured else "–"

    def ratio(race, peer):
        both = {"float32", peer} <= set(race.measured)
        return f"**{race.rate('float32') / race.rate(peer):.2f}x**" if both else "–"

    against = ["against the tutorial's loop", "against DDP on gloo"]
    return table(
        ["steps/s: median (least–most)", "tutorial's loop", "DDP on gloo", "Crankshaft, float32", *against],
        [
            [race.workload.title]
            + [cell(race, peer) for peer in ("tutorial", "ddp", "float32")]
            + [ratio(race, peer) for peer in ("tutorial", "ddp")]
            for race in races
        ],
    )


def share_table(races: Sequence[WorkersRace]) -> str:
    """Each wire's rate, and the share that it is of the rate with no reduction at all."""

    def cell(race, wire):
        if wire not in race.measured:
            return "–"
        share = f": **{race.rate(wire) / race.rate('no_reduction'):.0%}**" if "no_reduction" in race.measured else ""
        return race.cell(wire) + share

    def alone(race):
        return race.cell("no_reduction") if "no_reduction" in race.measured else "–"

    return table(
        ["Crankshaft, steps/s: share of no reduction", "no reduction", *(" ".join((w, *WIRES[w])) for w in WIRES)],
        [[race.workload.title, alone(race), *(cell(race, wire) for wire in WIRES)] for race in races],
    )


# -- The command line -------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--peers", default=",".join(ALL), help="some of %(default)s")
    parser.add_argument("--torch_python", help="a Python that has torch and numpy; without it there is no DDP")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    arguments.peers = arguments.peers.split(",")
    if unknown := set(arguments.peers) - set(ALL):
        parser.error(f"--peers={','.join(sorted(unknown))} is unknown; use some of {', '.join(ALL)}")
    if arguments.torch_python is None:
        arguments.peers = [peer for peer in arguments.peers if peer != "ddp"]
    elif "ddp" in arguments.peers and not runs_with(arguments.torch_python, "torch", "numpy", *NEEDED):
        parser.error(
            f"--torch_python={arguments.torch_python} does not run `import torch, numpy, crankshaft`; pip install the "
            "first two, and pip install --no-deps . here"
        )
    if len(usable_cores()) < WORKERS:
        parser.error(f"{WORKERS} workers need a core each, and this process may use {len(usable_cores())}; use taskset")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    facts = find_facts(arguments) | {"cpu": cpu_model(), "usable_cores": WORKERS}
    cores = usable_cores()[:WORKERS]
    races = [WorkersRace(name, arguments.seconds, arguments.quality_steps) for name in arguments.workloads]
    for race in races:
        for _ in range(arguments.rounds):
            race.run_round(arguments.peers, cores, arguments.torch_python)
    facts["versions"] = find_versions(races)
    note = (
        f"{WORKERS} workers, a core each, batch {BATCH_SIZE} a worker of 28x28x1 float32 in memory, Adam; rounds in "
        f"turn: {facts['rounds']}, {facts['seconds']:g} s a measurement, compilation apart."
    )
    if arguments.torch_python is None:
        note += " DDP was left out: it needs --torch_python."
    tables = (speed_table(races), share_table(races), quality_table(races, arguments.quality_steps))
    print(report(races, facts, note, *tables))
    if arguments.json:
        write_figures(arguments.json, facts, races)


if __name__ == "__main__":
    run_script(main)
