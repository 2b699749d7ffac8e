"""Crankshaft beside a jitted JAX scan, in pieces of a fraction of a second, in turn. A script, not a test.

`jax_scan_race.py` compares processes that run one after the other, and more peers; a shared machine drifts between
them. Here all stay, and the ratio is said with an interval: `.venv/bin/python tests/benchmarks/jax_scan_turns.py
--jax_python=.../bin/python`. Both leave out what is not steps: compilation, warm-up, the choice of `--jit`.
"""

from __future__ import annotations

import argparse
import os

from jax_scan_race import CALL, JAX
from race import PYTHON, ROOT, cpu_model, run_script, runs_with
from turns import rates_in_turn, ratio

from launch.benchmark.children import Process
from launch.benchmark.markdown import spread, table
from launch.benchmark.workloads import BATCH_SIZE, WORKLOADS
from launch.shares import usable_cores

STEPS = {"mlp": 1000, "wide": 50, "cnn": 50}  # of a piece
PEERS = ("jax_scan", "jax_scan_allocator", "jax_scan_vectors")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=STEPS, default="mlp")
    parser.add_argument("--turns", type=int, default=60, help="pieces of each (%(default)s)")
    parser.add_argument("--jax_python", required=True, help="a Python that has jax and optax")
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error(f"--turns={arguments.turns} measures nothing; use 1 or more")
    if not runs_with(arguments.jax_python, "jax", "optax"):
        parser.error(f"--jax_python={arguments.jax_python} does not run `import jax, optax`; pip install jax optax")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    workload, steps = WORKLOADS[arguments.workload], STEPS[arguments.workload]
    options = [f"--workload={arguments.workload}", f"--quality_steps={CALL}", f"--warm_up_steps={CALL}", "--turns=1"]
    options += [f"--steps={steps}", f"--result_json={os.devnull}"]
    peers = {name: JAX[name].process(arguments.jax_python, options) for name in PEERS}
    command = [PYTHON, "tests/benchmarks/bare.py", *workload.flags, f"--global_batch_size={BATCH_SIZE}"]
    rates = rates_in_turn({**peers, "crankshaft": Process(command)}, steps, arguments.turns, str(ROOT))
    print(f"{cpu_model()}, {len(usable_cores())} cores, {arguments.turns} turns of {steps} steps\n")
    rows = [[f"`{name}`", spread(found), ratio(rates["crankshaft"], found)] for name, found in rates.items()]
    print(table([workload.title, "steps/s: median (least–most)", "Crankshaft against it (95 %)"], rows))


if __name__ == "__main__":
    run_script(main)
