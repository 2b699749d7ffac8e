"""Crankshaft beside Keras fit, as people write it and at its best, in pieces that take turns. A script, not a test.

`benchmarks.standard` measures the same peers in processes one after the other; a shared machine drifts between
them. Here all stay, and each ratio has an interval: `python -m benchmarks.fit_turns --workload=cnn`; with `--fit`
Crankshaft trains the very model that Keras does, by `crankshaft.fit`.
"""

from __future__ import annotations

import argparse

from .children import Process
from .keras_peer import SETTINGS
from .race import PYTHON, run_script
from .turns import add_turns, compare
from .workloads import BATCH_SIZE, WORKLOADS

STEPS = {"mlp": 1000, "wide": 50, "cnn": 50, "resnet20": 50, "wide_deep": 500}  # of a piece


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=STEPS, default="mlp")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="Crankshaft's")
    parser.add_argument("--fit", action="store_true", help="by crankshaft.fit, on Keras's compiled model")
    add_turns(parser, 40)
    arguments = parser.parse_args()
    name, workload = arguments.workload, WORKLOADS[arguments.workload]
    peers = {
        setting: Process([PYTHON, "-m", "benchmarks.peers.keras_fit", f"--workload={name}", f"--setting={setting}"])
        for setting, options in SETTINGS.items()
        if not (workload.convolutional and options.get("jit_compile"))
    }
    precision = f"--precision={arguments.precision}"
    ours = ["benchmarks.bare", *workload.flags, f"--global_batch_size={BATCH_SIZE}"]
    if arguments.fit:
        ours = ["benchmarks.peers.crankshaft_fit", f"--workload={name}"]
    peers["crankshaft.fit" if arguments.fit else "crankshaft"] = Process([PYTHON, "-m", *ours, precision])
    compare(workload.title, peers, STEPS[name], arguments.turns)


if __name__ == "__main__":
    run_script(main)
