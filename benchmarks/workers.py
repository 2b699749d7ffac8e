"""Several processes of Crankshaft beside TensorFlow's tutorials, PyTorch, and fewer processes, on this machine.

    python -m benchmarks.workers mlp wide cnn --with=tutorial,ddp --torch_python=.../bin/python
    python -m benchmarks.workers mlp wide cnn --ours=workers,bfloat16,local_sgd --with=apart
    python -m benchmarks.workers mlp wide_deep --ours=servers --with=servers_tutorial
    python -m benchmarks.workers table_1m table_10m table_50m --ours=servers,one_server
    python -m benchmarks.workers decoder --ours=mesh --with=tensor_parallel,alone --torch_python=.../bin/python
    python -m benchmarks.workers small_cnn --ours=workers,servers,servers_ahead,servers_in_rounds --stopped=0.8

A measurement is a cluster that starts, trains for some seconds and ends; all are measured in rounds, in turn. Two
workers that sum gradients have a core each, and a batch each; those around servers share all cores, and an update has
one worker's batch. `apart` are two processes that do not sum: the slower one's rate, times two. `alone` is one process
on one core. With `--stopped` each of ours is also measured with one worker that is stopped for that share of the time
once steps begin, as by a neighbour that takes its core. Leave the loopback to it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from crankshaft.engine.machine import memory
from crankshaft.parts.launchers.resources import free_ports, usable_cores
from crankshaft.runner.failures import EXIT_FAILED

from . import rounds
from .processes import ROOT, MeasurementFailed, Process, importable, read_result, run_script, run_together
from .rounds import Measured, Result, Rows
from .workloads import WORKLOADS, Workload

WORKERS = SERVERS = 2
SLOW = "worker 1"
_PERIOD_SECONDS = 0.05
_PORT_ATTEMPTS = 3
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use|Could not start gRPC server")


class Way(NamedTuple):
    """A way in which Crankshaft trains.

    Attributes:
      tasks: of `crankshaft local`; none: `crankshaft train`.
      flags: of the training.
      batches: of a workload, in a step.
      cores: of the job; None: all.
      copies: how many such jobs run side by side.
    """

    tasks: tuple[str, ...]
    flags: tuple[str, ...] = ()
    batches: int = 1
    cores: int | None = None
    copies: int = 1


_WORKERS, _SERVERS = (f"--workers={WORKERS}",), (f"--workers={WORKERS}", f"--ps={SERVERS}")
_ONE_SERVER = (f"--workers={WORKERS}", "--ps=1")
WAYS = {
    "workers": Way(_WORKERS, (), WORKERS, WORKERS),
    "bfloat16": Way(_WORKERS, ("--reduce_dtype=bfloat16",), WORKERS, WORKERS),
    "local_sgd": Way(_WORKERS, ("--sync_every_steps=16",), WORKERS, WORKERS),
    "mesh": Way(_WORKERS, (f"--mesh=model:{WORKERS}",), 1, WORKERS),
    "servers": Way(_SERVERS),
    "one_server": Way(_ONE_SERVER),
    "servers_ahead": Way(_SERVERS, ("--max_staleness_steps=8",)),
    "servers_in_rounds": Way(_SERVERS, ("--max_staleness_steps=0",)),
    "apart": Way((), ("--strategy=one_device",), 1, 1, WORKERS),
    "alone": Way((), ("--strategy=one_device",), 1, 1),
}


class Peer(NamedTuple):
    """Another program.

    Attributes:
      program: in peers/.
      cluster: makes the variables of each process of it: whether it serves comes with them.
      pinned: each process has a core.
      workloads: that it has.
      needs: packages of `--torch_python`.
    """

    program: str
    cluster: Callable[[], list[tuple[dict[str, str], bool]]]
    pinned: bool
    workloads: Sequence[str]
    needs: tuple[str, ...] = ()


def tensorflow_cluster(**counts: int) -> list[tuple[dict[str, str], bool]]:
    """Returns the variables of some tasks of each kind."""
    ports = iter(free_ports(sum(counts.values())))
    addresses = {kind: [f"localhost:{next(ports)}" for _ in range(count)] for kind, count in counts.items()}
    tasks = [{"type": kind, "index": index} for kind, count in counts.items() for index in range(count)]
    configs = [json.dumps({"cluster": addresses, "task": task}) for task in tasks]
    serves = [task["type"] != "chief" and "chief" in counts for task in tasks]
    return [
        ({"TF_CONFIG": config, "GRPC_FAIL_FAST": "use_caller"}, it) for config, it in zip(configs, serves, strict=True)
    ]


def torch_group() -> list[tuple[dict[str, str], bool]]:
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(WORKERS)}
    return [({**group, "RANK": str(rank)}, False) for rank in range(WORKERS)]


_TASKS = functools.partial(tensorflow_cluster, worker=WORKERS)
_SERVED = functools.partial(tensorflow_cluster, chief=1, worker=WORKERS, ps=SERVERS)
_TORCH = ("torch", "numpy")
PEERS = {
    "tutorial": Peer("tutorial", _TASKS, True, ("mlp", "wide", "cnn", "resnet20")),
    "servers_tutorial": Peer("tutorial", _SERVED, False, ("mlp", "wide", "cnn", "wide_deep")),
    "ddp": Peer("torch_loop", torch_group, True, ("mlp", "wide", "cnn"), _TORCH),
    "tensor_parallel": Peer("tensor_parallel", torch_group, True, ("decoder",), _TORCH),
}


# -- A measurement ----------------------------------------------------------------------------------------------------


def measure_way(way: Way, workload: Workload, args: argparse.Namespace, stopped: float = 0.0) -> Result:
    """Runs jobs of Crankshaft to their ends, in one of which a worker is stopped; the slowest one's rate."""
    with tempfile.TemporaryDirectory() as folder:
        benchmark = ["--mode=benchmark", f"--benchmark_arg=seconds={args.seconds:g}", "--benchmark_arg=rounds=1"]
        paths = [Path(folder, f"{copy}.json") for copy in range(way.copies)]
        cores = [frozenset(part) for part in _parts(way.cores, way.copies)] if way.cores else [None] * way.copies
        command = way_command(way, workload, [*args.flags, *benchmark])
        jobs = [Process([*command, f"--result_json={path}"], cores=its) for path, its in zip(paths, cores, strict=True)]
        with Stopping(stopped) as stopping:
            run_together(jobs, folder=ROOT, meanwhile=stopping)
        results = [*map(read_result, paths)]
    slowest = min(results, key=lambda result: result["steps_per_sec"])
    examples = way.copies * slowest["examples_per_sec"]
    return {"steps_per_sec": slowest["steps_per_sec"], "examples_per_sec": examples}


def way_quality(way: Way, workload: Workload, args: argparse.Namespace) -> Result:
    """Trains for `--quality_steps`, and returns loss and metric of the evaluation data."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        steps = ["--mode=train_and_eval", f"--train_steps={args.quality_steps}", f"--result_json={path}"]
        run_together([Process(way_command(way, workload, [*args.flags, *steps]))], folder=ROOT)
        return rounds.quality(read_result(path)["eval"])


def _parts(count: int, copies: int) -> list[list[int]]:
    cores = usable_cores()
    return [cores[copy * count : (copy + 1) * count] for copy in range(copies)]


def way_command(way: Way, workload: Workload, flags: Sequence[str]) -> list[str]:
    """Returns the command of a job."""
    batch = f"--global_batch_size={way.batches * workload.batch}"
    words = [*workload.flags, *way.flags, batch, "--progress=plain", *flags]
    module = ["-m", workload.module] if workload.module else []
    if way.tasks:
        return [sys.executable, "-m", "crankshaft", "local", *way.tasks, "--max_restarts=0", "--", *module, *words]
    return [sys.executable, *(module or ["-m", "crankshaft", "train"]), *words]


def measure_peer(peer: Peer, name: str, args: argparse.Namespace, imports: Path) -> Result:
    """Runs another program's cluster to its end; again where somebody was faster to take a port."""
    python = args.torch_python if peer.needs else sys.executable
    cores = usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        options = [f"--workload={name}", f"--quality_steps={args.quality_steps}", f"--seconds={args.seconds:g}"]
        command = [python, "-m", f"benchmarks.peers.{peer.program}", *options, f"--result_json={path}"]
        attempts = _PORT_ATTEMPTS
        while True:
            attempts -= 1
            processes = [
                Process(
                    command,
                    {**variables, "PYTHONPATH": str(imports)},
                    frozenset({cores[index]}) if peer.pinned else None,
                    serves,
                )
                for index, (variables, serves) in enumerate(peer.cluster())
            ]
            try:
                run_together(processes, folder=imports)
                return read_result(path)
            except MeasurementFailed as failure:
                if not attempts or not _PORT_TAKEN.search("\n".join(failure.last_lines)):
                    raise


class Stopping:
    """Stops a worker of `crankshaft local` for a share of each period, once its steps begin, until the context ends."""

    def __init__(self, share: float):
        self._share = share
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *_) -> None:
        self._over.set()

    def __call__(self, outputs: Sequence[Path]) -> None:
        """Looks at what the job has printed."""
        if self._share and not self._thread:
            text = outputs[0].read_text(encoding="utf-8", errors="replace")
            process = re.search(rf"\[local\] {SLOW} is process (\d+)", text)
            if process and "XLA" in text:
                self._thread = threading.Thread(target=self._stop_and_go, args=[int(process[1])], daemon=True)
                self._thread.start()
        elif self._thread and " ended" in outputs[0].read_text(encoding="utf-8", errors="replace"):
            self._over.set()

    def _stop_and_go(self, process: int) -> None:
        try:
            while not self._over.is_set():
                os.kill(process, signal.SIGSTOP)
                self._over.wait(self._share * _PERIOD_SECONDS)
                os.kill(process, signal.SIGCONT)
                self._over.wait((1 - self._share) * _PERIOD_SECONDS)
        except ProcessLookupError:
            return


# -- A workload -------------------------------------------------------------------------------------------------------


def compare(name: str, args: argparse.Namespace, imports: Path) -> tuple[Measured, Rows]:
    """Measures all in rounds, and says what is compared: ours with each other; stopped with not."""
    workload, peers = WORKLOADS[name], {}
    others = [each for each in args.peers if each in WAYS or name in PEERS[each].workloads]
    for each in [*others, *args.ours]:
        if each in PEERS:
            peers[each] = functools.partial(measure_peer, PEERS[each], name, args, imports)
        else:
            peers[each] = functools.partial(measure_way, WAYS[each], workload, args)
    rows: list[tuple[str, Mapping[str, str]]] = [(ours, {other: other for other in others}) for ours in args.ours]
    if args.stopped:
        for ours in args.ours:
            title = f"{ours}, one stopped {args.stopped:.0%}"
            peers[title] = functools.partial(measure_way, WAYS[ours], workload, args, args.stopped)
            rows.append((title, {"not stopped": ours}))
    commands = {each: " ".join(way_command(WAYS[each], workload, args.flags)) for each in peers if each in WAYS}
    measured = rounds.measure(workload.title, peers, args.rounds, commands)
    if args.quality_steps:
        measured.quality |= {ours: way_quality(WAYS[ours], workload, args) for ours in args.ours}
    return measured, rows


def fits(name: str) -> bool:
    """Returns whether a workload's table fits into memory, and prints why not."""
    clicks = WORKLOADS[name].clicks
    if not clicks:
        return True
    # A slot is filled from a tensor of its size; TensorFlow takes some 0.6 GiB a process.
    needed = 3 * 16 * 4 * clicks["fields"] * clicks["rows"] // 2 + (5 << 30)
    available = memory.available_bytes()
    if needed > available:
        print(f"{name} is left out: {needed:,} bytes needed, {available:,} available", file=sys.stderr)
    return needed <= available


# -- The command line -------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--ours", default="workers", metavar="WAY,...", help=", ".join(WAYS))
    parser.add_argument("--with", dest="peers", default="", metavar="PEER,...", help=f"{', '.join(PEERS)}, or a WAY")
    parser.add_argument("--torch_python", default=sys.executable, help="a Python that has torch and numpy")
    parser.add_argument("--stopped", type=float, default=0.0, help="share of the time that one worker is stopped")
    parser.add_argument("--quality_steps", type=int, default=0, help="before losses are compared; 0: not (%(default)s)")
    rounds.add_arguments(parser, rounds=3, seconds=5.0)
    args = rounds.parse(parser)
    args.ours, args.peers = args.ours.split(","), [*filter(None, args.peers.split(","))]
    rounds.check_names(parser, "WORKLOAD", args.workloads, WORKLOADS)
    rounds.check_names(parser, "--ours", args.ours, WAYS)
    rounds.check_names(parser, "--with", args.peers, [*PEERS, *WAYS])
    if len(usable_cores()) < WORKERS:
        parser.error(f"{WORKERS} workers need a core each, and this process may use {len(usable_cores())}; use taskset")
    return args


def main() -> None:
    args = parse_arguments()
    facts = rounds.facts((args.torch_python, PEERS[each].needs) for each in args.peers if each in PEERS)
    with tempfile.TemporaryDirectory(prefix="crankshaft-workers-") as folder:
        imports = importable(ROOT, Path(folder, "imports"))
        compared = [compare(name, args, imports) for name in filter(fits, args.workloads)]
    print(rounds.report(facts, compared, args))
    sys.exit(EXIT_FAILED if any(measured.failed for measured, _ in compared) else 0)


if __name__ == "__main__":
    run_script(main)
