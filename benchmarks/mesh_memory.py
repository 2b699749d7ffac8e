"""Memory of a model sharded over two processes: what each takes to build it, save it and restore it.

Usage: python -m benchmarks.mesh_memory [--mebibytes=1024] [--processes=2] [--folder=FOLDER]

A decoder of about so many MiB of weights, without an optimizer's slots, is built on a mesh of 1 x processes, saved into
FOLDER (a temporary one by default) and restored. Prints a line of JSON for each process, in MiB: `tensorflow`, what it
has before the model; `weights`, its part; and, beside `tensorflow`, the most that it had until the model was built,
saved, and restored: `built`, `saved`, `restored`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import time

WIDTH, VOCABULARY, CONTEXT = 1024, 8192, 64


def memory_mib(name: str) -> float:
    """Reads VmRSS, what this process has, or VmHWM, the most that it had, of /proc/self/status."""
    return int(re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


def worker(folder: str, mebibytes: int) -> None:
    """Builds, saves and restores, as one of the processes that TF_CONFIG names."""
    import numpy as np

    from crankshaft.engine.build import prepare
    from crankshaft.engine.checkpoints import Checkpoints, WritingProcess
    from crankshaft.engine.mesh import sharded
    from crankshaft.engine.state import TrainState
    from crankshaft.engine.step.options import RunContext, StepOptions
    from crankshaft.engine.strategies import StrategyOptions, WorkerTask
    from crankshaft.models.transformer_lm import Model
    from crankshaft.parts.clusters import tf_config
    from crankshaft.parts.sharding import Mesh
    from crankshaft.parts.workers.multi_worker import MultiWorker, connect

    cluster = tf_config.from_environment(os.environ)
    task = WorkerTask(cluster.index, *zip(*cluster.addresses, strict=True))
    distribution = connect(task)
    mesh = Mesh(distribution, distribution.num_replicas_in_sync)
    strategy = MultiWorker(distribution, StrategyOptions(task=task), mesh)
    strategy.exchange()
    layers = max(1, round((mebibytes / 4 * 2**20 - VOCABULARY * WIDTH) / (12 * WIDTH**2)))
    figures = {"process": task.worker, "tensorflow": memory_mib("VmRSS")}

    def most(name: str) -> None:
        figures[name] = memory_mib("VmHWM") - figures["tensorflow"]

    def make() -> TrainState:
        model = Model(layers=layers, width=WIDTH, heads=16, context=CONTEXT, vocabulary=VOCABULARY)
        tokens = np.zeros([1, CONTEXT], np.int32)
        state = TrainState(prepare(model, RunContext(StepOptions(optimizer="sgd"), example=(tokens, tokens))))
        state.build()
        return state

    began = time.monotonic()
    state = strategy.build(make)
    figures["build_seconds"] = time.monotonic() - began
    variables = state.trainer.model.variables
    figures["whole"] = sum(map(sharded.size, variables)) / 2**18
    figures["weights"] = sum(np.prod(variable.shape) for variable in variables) / 2**18
    most("built")
    began = time.monotonic()
    checkpoints = Checkpoints(folder, state.checkpoint, keep=1, about={}, writer=WritingProcess(task.worker, "memory"))
    checkpoints.save(0, {}, wait=True)
    strategy.exchange()
    figures["save_seconds"] = time.monotonic() - began
    most("saved")
    checkpoints.restore()
    most("restored")
    print(json.dumps({name: round(float(value), 1) for name, value in figures.items()}), flush=True)
    strategy.exchange()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder")
    args = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        worker(args.folder, args.mebibytes)
        return
    from crankshaft.parts.launchers.children import Children, wait
    from crankshaft.parts.launchers.resources import free_ports

    addresses = [f"localhost:{port}" for port in free_ports(args.processes)]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, __file__, f"--mebibytes={args.mebibytes}", f"--folder={folder}"]
        tasks = [{"type": "worker", "index": index} for index in range(args.processes)]
        configs = [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]
        with Children() as children:
            variables = [{**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"} for config in configs]
            started = [children.start(command, env=each) for each in variables]
            wait(started, math.inf)
            codes = children.end(started)
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
