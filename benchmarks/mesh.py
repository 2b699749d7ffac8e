"""A decoder sharded over two processes, a core each, beside PyTorch's tensor parallel on gloo, in turn; no test.

`.venv/bin/python -m benchmarks.mesh --torch_python=.../bin/python`; that Python needs torch and NumPy. Also told: one
process of Crankshaft on one core, which has the whole model and as many rows; and, by plain gradient descent, a mesh of
two logical CPUs in one process beside TensorFlow's DTensor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from crankshaft.launch.cluster.resources import free_ports, usable_cores

from .children import Process
from .markdown import spread, table
from .multi_worker import run_on_free_ports
from .race import PYTHON, cpu_model, read_result, run_script, run_together
from .turns import ratio

SHAPE = {"vocabulary": 257, "context": 128, "layers": 4, "width": 256, "heads": 4}
BATCH = 8


def of_torch(python: str, cores, steps: int, path: Path) -> None:
    group = {"MASTER_ADDR": "localhost", "WORLD_SIZE": str(len(cores))}
    options = [f"--shape={json.dumps(SHAPE)}", f"--batch={BATCH}", f"--steps={steps}", f"--result_json={path}"]
    command = [python, "-m", "benchmarks.peers.tensor_parallel", *options]

    def workers() -> list[Process]:
        port = {"MASTER_PORT": str(free_ports(1)[0])}
        return [
            Process(command, {**group, **port, "RANK": str(rank)}, frozenset({core})) for rank, core in enumerate(cores)
        ]

    run_on_free_ports(workers)


def of_dtensor(cores, steps: int, path: Path) -> None:
    options = [f"--shape={json.dumps(SHAPE)}", f"--batch={BATCH}", f"--steps={steps}", f"--result_json={path}"]
    run_together([Process([PYTHON, "-m", "benchmarks.peers.dtensor", *options], cores=frozenset(cores))])


def of_crankshaft(text: Path, cores, steps: int, path: Path, *more: str) -> None:
    sizes = [f"--model_arg={name}={SHAPE[name]}" for name in ("layers", "width", "heads")]
    flags = ["--model=transformer_lm", *sizes, "--model_arg=norm=layer", "--model_arg=positions=learned"]
    flags += ["--input=text", f"--input_arg=context={SHAPE['context']}", f"--data_dir={text}"]
    flags += [
        f"--global_batch_size={BATCH}",
        "--mode=benchmark",
        f"--benchmark_arg=steps={steps}",
        "--benchmark_arg=rounds=1",
    ]
    flags += ["--progress=off", f"--result_json={path}", *more]
    start = [PYTHON, "-m", "crankshaft", "train"]
    if len(cores) > 1 and not more:
        start = [PYTHON, "-m", "crankshaft", "local", f"--workers={len(cores)}", "--"]
        flags += [f"--mesh=model:{len(cores)}"]
    run_together([Process([*start, *flags], cores=frozenset(cores))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", required=True, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    cores = sorted(usable_cores())[:2]
    rates: dict[str, list[float]] = {"PyTorch, two processes": [], "one process": [], "mesh model:2": []}
    within: dict[str, list[float]] = {"DTensor, one process": [], "mesh model:2, one process": []}
    devices = ("--strategy=mirrored", "--num_virtual_devices=2", "--mesh=model:2", "--optimizer=sgd")
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder) / "text", Path(folder) / "result.json"
        text.mkdir()
        (text / "text.txt").write_bytes(bytes(range(32, 127)) * 2000)
        for _ in range(args.rounds):
            of_torch(args.torch_python, cores, args.steps, path)
            rates["PyTorch, two processes"].append(read_result(path)["steps_per_sec"])
            for name, used in (("one process", cores[:1]), ("mesh model:2", cores)):
                of_crankshaft(text, used, args.steps, path)
                rates[name].append(read_result(path)["steps_per_sec"])
            of_dtensor(cores, args.steps, path)
            within["DTensor, one process"].append(read_result(path)["steps_per_sec"])
            of_crankshaft(text, cores, args.steps, path, *devices)
            within["mesh model:2, one process"].append(read_result(path)["steps_per_sec"])
    print(f"{cpu_model()}, {args.rounds} rounds of {args.steps} steps, {SHAPE}, batch {BATCH}\n")
    rows = [
        [name, spread(own), ratio(list(compared.values())[-1], own)]
        for compared in (rates, within)
        for name, own in compared.items()
    ]
    print(table(["", "steps/s: median (least–most)", "the mesh against it (95 %)"], rows))


if __name__ == "__main__":
    run_script(main)
