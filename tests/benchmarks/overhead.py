"""What stands around the steps costs: measuring, hooks, checkpoints. The same steps with and without, in turn.

Run as a script: `python tests/benchmarks/overhead.py [--rounds=5]`. Prints Markdown: steps/s of nothing but calls of
the inner loop, of the same in benchmark mode, with all the hooks of a run (TensorBoard scalars each 500 steps,
progress, guards), and with checkpoints each 200. What benchmark mode costs is little beside the drift of a machine, so
there pieces of a tenth of a second take turns, and the cost is said with an interval. `--measuring` measures that
alone.
"""

import argparse
import statistics
import sys
import tempfile
import time

import bare
import turns

from engine import loop
from engine.benchmark.rounds import timed_round
from engine.hooks import Hook, StopRequest
from launch import modes, session
from launch.benchmark.live import Live


class Stopwatch(Hook):
    """Stands last among the hooks: what they do before the first step is not timed, what they have to finish is."""

    name = "stopwatch"

    def begin(self, moment):
        self.began = time.perf_counter()

    def end(self, moment):
        moment.sums.read()
        self.ended = time.perf_counter()


_PIECES = 200  # of a round, with and without
# Name: hidden units, steps, steps of a piece.
WORKLOADS = {"mlp 784-128-10": ("128", 40_000, 400), "mlp 784-2048-2048-10": ("2048,2048", 3000, 5)}


FLAGS = ["--model=mlp", "--input=synthetic", "--input_arg=examples=60032"]


class Measuring:
    """`bare.rate`, but as benchmark mode does it with its bar in a terminal: all pieces are of one round of it. By the
    clock around it, not by its own."""

    def __init__(self, live: Live):
        live.at_round([], 1_000_000_000)
        self._draw = live.watcher.at_call
        self._steps, self._seconds = 0, 0.0

    def rate(self, made: session.Session, steps: int) -> float:
        began = time.perf_counter()
        timed_round(made.strategy, made.state, steps, at_call=self._at_call)
        seconds = time.perf_counter() - began
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        return steps / seconds

    def _at_call(self, steps: int, seconds: float) -> None:
        self._draw(self._steps + steps, self._seconds + seconds)


def rate(made: session.Session, steps: int, hooks: list) -> float:
    """Steps a second of `steps` more steps with these hooks, from the first to the last of them done."""
    watch = Stopwatch()
    loop.train(made.strategy, made.state, [*hooks, watch], made.state.step + steps)
    return steps / (watch.ended - watch.began)


def measure_measuring(units: str, steps: int, piece: int, rounds: int) -> dict[str, list[float]]:
    """With nothing around them and in benchmark mode, in pieces, in turn, and first in turn."""
    rates: dict[str, list[float]] = {"alone": [], "benchmark mode": []}
    with tempfile.TemporaryDirectory() as run_dir, Live("bar", 1, sys.stderr) as live:
        made = bare.make(run_dir, *FLAGS, f"--model_arg=hidden_units={units}")
        ways = {"alone": bare.rate, "benchmark mode": Measuring(live).rate}
        bare.rate(made, steps)
        for number in range(_PIECES * rounds):
            for name in sorted(ways, reverse=bool(number % 2)):
                rates[name].append(ways[name](made, piece))
    return rates


def measure(units: str, steps: int, rounds: int) -> dict[str, list[float]]:
    names = ("alone", "all hooks", "all hooks, checkpoints")
    rates: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as run_dir:
        made = bare.make(run_dir, *FLAGS, f"--model_arg=hidden_units={units}")
        bare.rate(made, steps)
        for _ in range(rounds):
            rates["alone"].append(bare.rate(made, steps))
            for name, every in (("all hooks", 0), ("all hooks, checkpoints", 200 if steps < 5000 else 5000)):
                made.config.values["checkpoint_every_steps"] = every
                hooks = modes.compose_hooks(made, [], modes.TrainMetrics(500), StopRequest())
                rates[name].append(rate(made, steps, hooks if every else hooks[:-1]))
    return rates


def print_rows(name: str, measured: dict[str, list[float]]) -> None:
    alone = measured.pop("alone")
    for what, with_it in measured.items():
        costs = [a / b - 1 for a, b in zip(alone, with_it, strict=True)]
        rates = f"{statistics.median(with_it):,.0f} | {statistics.median(alone):,.0f}"
        sure = "" if len(costs) < _PIECES else " ({:.1%} to {:.1%})".format(*turns.interval(costs))
        print(f"| {name}, {what} | {rates} | {statistics.median(costs):.1%}{sure} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measuring", action="store_true", help="benchmark mode alone")
    arguments = parser.parse_args()
    bare.tune()
    print("| workload | steps/s | alone | cost |\n|---|---|---|---|")
    for name, (units, steps, piece) in WORKLOADS.items():
        print_rows(name, measure_measuring(units, steps, piece, arguments.rounds))
        if not arguments.measuring:
            print_rows(name, measure(units, steps, arguments.rounds))


if __name__ == "__main__":
    main()
