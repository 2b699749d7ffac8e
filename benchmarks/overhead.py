"""What stands around the steps costs: measuring, hooks, checkpoints. The same steps with and without, in turn.

Run as a script: `python -m benchmarks.overhead [--rounds=5]`. Prints Markdown: steps/s of nothing but calls of the
inner loop, of the same in benchmark mode, with the record of a run, its answers to `crankshaft ask` and a scrape each
second, with all the hooks of a run (TensorBoard scalars each 500 steps, the record, progress, guards), and with a
checkpoint, or a snapshot in memory, at the start of each piece. What they cost is little beside the drift of a machine,
so pieces of a tenth of a second to a few seconds take turns within one process, and the cost is said with an interval.
`--measuring` measures benchmark mode alone. Checkpoints are measured once as many are on the disk as stay: from then on
each takes the room of one that is swept.

`--snapshots` measures what a snapshot in memory costs larger models instead: the seconds that a piece with one takes
longer, beside what `--snapshot_seconds=auto` counts and so how often it takes one. Also of two workers:
`python -m crankshaft local --workers=2 -- -m benchmarks.overhead --snapshots --run_dir=$(mktemp -d)`.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from crankshaft.engine.hooks import Hook, Periodic, Status, saving
from crankshaft.engine.hooks.saving import Checkpointing
from crankshaft.engine.machine.pauses import Pauses
from crankshaft.engine.record.recorder import Recorder
from crankshaft.launch.composition import hooks
from crankshaft.parts.ask.request_handler import RequestHandler
from crankshaft.parts.benchmark.measure.rounds import timed_round
from crankshaft.parts.dashboard import metrics
from crankshaft.parts.memory_snapshots.in_memory import Snapshots
from crankshaft.parts.memory_snapshots.snapshot_memory import Slots
from crankshaft.parts.memory_snapshots.snapshots import COST, LEAST_SECONDS, NEWEST
from crankshaft.runner.base import BaseRun

from . import bare
from .rounds import interval
from .workloads import WORKLOADS as MODELS

# Name: hidden units; steps of a piece and pieces of a round for benchmark mode, and the same for hooks and checkpoints.
WORKLOADS = {
    "mlp 784-128-10": ("128", (400, 200), (5000, 20)),
    "mlp 784-2048-2048-10": ("2048,2048", (5, 200), (200, 6)),
}


# For snapshots: steps of a piece, pieces of a round, and the flags.
LARGE = {
    "mlp 784-2048-2048-10": (100, 6, MODELS["wide"].flags),
    "language model": (
        3,
        3,
        (*MODELS["language_model"].flags, "--global_batch_size=12", f"--data_dir={sysconfig.get_path('stdlib')}/*.py"),
    ),
}

FLAGS = ["--model=mlp", "--input=synthetic", "--input_arg=examples=60032"]


def rate_as_benchmark(made: BaseRun, steps: int) -> float:
    """`bare.rate`, but as benchmark mode does it; by the clock around it, not by its own."""
    began = time.perf_counter()
    timed_round(made.strategy, made.strategy.training, steps)
    return steps / (time.perf_counter() - began)


class Pieces(Periodic):
    """Stands last among a run's hooks. Pieces of the loop around it begin in several ways in turn (`ways`: what is done
    then, by name); between two of them a piece of nothing but steps is run here, within the hook.
    """

    name = "pieces"

    def __init__(self, made: BaseRun, steps: int, ways: Mapping[str, Callable[[Status], None]], wait):
        super().__init__(steps)
        self._made, self._ways, self._turns, self._wait = made, ways, itertools.cycle(ways), wait
        self.rates: dict[str, list[float]] = {name: [] for name in ("alone", *ways)}

    def begin(self, status):
        self._begin_piece(status)

    def act(self, status):
        status.segment.sums.read()
        self._wait()  # what a piece writes is written within it, or the wait counts
        seconds = time.perf_counter() - self._began
        self.rates[self._name].append(self.every_steps / seconds)
        self.rates["alone"].append(bare.rate(self._made, self.every_steps))
        self._begin_piece(status)

    def _begin_piece(self, status):
        self._name, self._began = next(self._turns), time.perf_counter()
        self._ways[self._name](dataclasses.replace(status, step=self._made.state.step))


def measure_measuring(made: BaseRun, steps: int, pieces: int) -> dict[str, list[float]]:
    """With nothing around them and in benchmark mode, in pieces, in turn, and first in turn."""
    rates: dict[str, list[float]] = {"alone": [], "benchmark mode": []}
    ways = {"alone": bare.rate, "benchmark mode": rate_as_benchmark}
    for number in range(pieces):
        for name in sorted(ways, reverse=bool(number % 2)):
            rates[name].append(ways[name](made, steps))
    return rates


def composed(made: BaseRun, stack: contextlib.ExitStack) -> list:
    """Makes a run's hooks, with recorder and request handler, and serves Prometheus, which scrapes once per second."""
    own = hooks.make_hooks(made, [], time.monotonic(), Pauses())
    for hook in own:
        stack.callback(hook.close)
    port = stack.enter_context(metrics.serving(0, "", lambda: made, {}))
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()

    threading.Thread(target=scrape, daemon=True).start()
    stack.callback(over.set)
    return own


def measure_hooks(made: BaseRun, steps: int, pieces: int, alone: bool) -> dict[str, list[float]]:
    """With nothing around them, with a run's hooks, and with those and a checkpoint or a snapshot, in pieces, in turn.

    `alone`: with nothing but what records the run, answers and is scraped, and without checkpoints.
    """
    with contextlib.ExitStack() as stack:
        some: tuple = (Recorder, RequestHandler) if alone else (Hook,)
        used = [
            hook for hook in composed(made, stack) if isinstance(hook, some) and not isinstance(hook, Checkpointing)
        ]
        title, checkpoints = "record and asking" if alone else "all hooks", made.checkpoints
        ways: dict[str, Callable[[Status], None]] = {title: lambda status: None}
        snapshots = Snapshots(checkpoints, Slots(), made.strategy.exchange)
        stack.callback(snapshots.close)
        if not alone:
            ways[f"{title}, a checkpoint"] = lambda status: saving.save(checkpoints, status, used)
            ways[f"{title}, a snapshot"] = lambda status: snapshots.take(
                status.step, saving.state_to_save(dataclasses.replace(status, in_memory=True), used)
            )
        watch = Pieces(made, steps, ways, lambda: (checkpoints.wait(), snapshots.wait()))
        while not alone and len(made.checkpoints.all()) < made.config.keep_checkpoints:
            bare.rate(made, 1)
            made.checkpoints.save(made.state.step, {}, wait=True)
        if short := -made.state.step % steps:
            bare.rate(made, short)
        bare.train(made, [*used, watch], 2 * len(ways) * pieces * steps)
    return watch.rates


def print_snapshots(name: str, rounds: int, folder: str, more: Sequence[str]) -> None:
    """Prints what one snapshot costs: all of it, what is counted of it, and its share of the time at auto's period."""
    steps, pieces, flags = LARGE[name]
    with contextlib.ExitStack() as stack:
        made = bare.make(os.path.join(folder, name), *flags, *more)
        composed = hooks.make_hooks(made, [], time.monotonic(), Pauses())
        used = [each for each in composed if not isinstance(each, Recorder)]  # which prepares only what it has to write
        snapshots = Snapshots(made.checkpoints, Slots(), made.strategy.exchange)
        for each in (snapshots, *used):
            stack.callback(each.close)
        counted: list[float] = []

        def take(status: Status) -> None:
            if not counted:
                for each in used:
                    each.begin(status)
            began = time.monotonic()
            snapshots.take(status.step, saving.state_to_save(dataclasses.replace(status, in_memory=True), used))
            counted.append(time.monotonic() - began)

        def wait() -> None:
            snapshots.wait()
            counted[-1] += snapshots.copy_seconds

        watch = Pieces(made, steps, {"a snapshot": take}, wait)
        bare.rate(made, steps)
        bare.train(made, [watch], 2 * (rounds * pieces + 1) * steps)
        # The first one compiles.
        pairs = [*zip(watch.rates["a snapshot"], watch.rates["alone"], strict=True)][1:]
        costs = [steps / with_it - steps / alone for with_it, alone in pairs]
        newest = [counted[end - NEWEST : end] for end in range(NEWEST + 1, len(pairs) + 2)]
        own = statistics.median(map(min, newest))
        period = max(LEAST_SECONDS, own / COST)
        if made.config.is_chief:
            sure = "{:.1f} to {:.1f}".format(*(1000 * each for each in interval(costs)))
            share = "{:.2%} to {:.2%}".format(*(each / period for each in interval(costs)))
            cost = statistics.median(costs)
            cells = [name, f"{1000 * cost:.1f} ({sure})", f"{1000 * own:.1f}", f"{period:.1f}"]
            print("|", " | ".join([*cells, f"{cost / period:.2%} ({share})"]), "|", flush=True)


def print_rows(name: str, measured: dict[str, list[float]]) -> None:
    alone = measured.pop("alone")
    for number, (title, with_it) in enumerate(measured.items()):
        # Ways that take turns have each their own pieces of nothing but steps, those that followed theirs.
        beside = alone[number :: len(measured)]
        costs = [a / b - 1 for a, b in zip(beside, with_it, strict=True)]
        rates = f"{statistics.median(with_it):,.0f} | {statistics.median(beside):,.0f}"
        sure = "{:.1%} to {:.1%}".format(*interval(costs))
        print(f"| {name}, {title} | {rates} | {statistics.median(costs):.1%} ({sure}) |", flush=True)


def measure(name: str, rounds: int, hooks: bool) -> None:
    units, (steps, pieces), (hook_steps, hook_pieces) = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as run_dir:
        made = bare.make(run_dir, *FLAGS, f"--model_arg=hidden_units={units}")
        bare.rate(made, hook_steps)
        print_rows(name, measure_measuring(made, steps, rounds * pieces))
        if hooks:
            for alone in (True, False):
                print_rows(name, measure_hooks(made, hook_steps, rounds * hook_pieces, alone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measuring", action="store_true", help="benchmark mode alone")
    parser.add_argument("--snapshots", action="store_true", help="snapshots of larger models alone")
    parser.add_argument("--run_dir", help="for --snapshots: a new folder that all workers share, and that stays")
    arguments, flags = parser.parse_known_args()  # `crankshaft local` adds that of the strategy
    bare.tune()
    if arguments.snapshots:
        print("| workload | ms of a snapshot | counted | seconds between two | cost |\n|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            for name in LARGE:
                print_snapshots(name, arguments.rounds, arguments.run_dir or folder, flags)
        return
    print("| workload | steps/s | alone | cost |\n|---|---|---|---|")
    for name in WORKLOADS:
        measure(name, arguments.rounds, hooks=not arguments.measuring)


if __name__ == "__main__":
    main()
