"""Crankshaft beside a jitted JAX scan, in pieces of a fraction of a second, in turn. A script, not a test.

`jax_scan_race.py` compares processes that run one after the other, and more peers; a shared machine drifts between
them. Here all stay, and the ratio is said with an interval: `.venv/bin/python -m benchmarks.jax_scan_turns
--jax_python=.../bin/python`. Both leave out what is not steps: compilation, warm-up, the choice of `--jit`.
"""

from __future__ import annotations

import argparse
import os

from .children import Process
from .jax_scan_race import CALL, JAX
from .race import NEEDED, PYTHON, run_script, runs_with
from .turns import add_turns, compare
from .workloads import BATCH_SIZE, WORKLOADS

STEPS = {"mlp": 1000, "wide": 50, "cnn": 50}  # of a piece
PEERS = ("jax_scan", "jax_scan_allocator", "jax_scan_vectors")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=STEPS, default="mlp")
    add_turns(parser, 60)
    parser.add_argument("--jax_python", required=True, help="a Python that has jax and optax")
    arguments = parser.parse_args()
    if not runs_with(arguments.jax_python, "jax", "optax", *NEEDED):
        parser.error(
            f"--jax_python={arguments.jax_python} does not run `import jax, optax, crankshaft`; pip install jax optax, "
            "and pip install --no-deps . here"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    workload, steps = WORKLOADS[arguments.workload], STEPS[arguments.workload]
    options = [f"--workload={arguments.workload}", f"--quality_steps={CALL}", f"--warm_up_steps={CALL}", "--turns=1"]
    options += [f"--steps={steps}", f"--result_json={os.devnull}"]
    peers = {name: JAX[name].process(arguments.jax_python, options) for name in PEERS}
    command = [PYTHON, "-m", "benchmarks.bare", *workload.flags, f"--global_batch_size={BATCH_SIZE}"]
    compare(workload.title, {**peers, "crankshaft": Process(command)}, steps, arguments.turns)


if __name__ == "__main__":
    run_script(main)
