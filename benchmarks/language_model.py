"""The language model beside nanoGPT's in PyTorch: tokens a second in turn, and the loss that equal steps lead to.

6 layers, 6 heads, 384 wide, context 256, batch 12, float32 and bfloat16, PyTorch eager and compiled; the text is
Python's own library, as bytes. Both begin with the same weights and get the same batches. A script, not a test:
`.venv/bin/python -m benchmarks.language_model --torch_python=.../bin/python`; that Python needs torch (2.15 was
tried), absl-py and crankshaft (`pip install --no-deps .`).
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from crankshaft.launch.cluster.resources import usable_cores

from .children import Process
from .markdown import spread, table
from .race import NEEDED, PYTHON, ROOT, cpu_model, run_process, run_script, runs_with
from .turns import add_turns, rates_in_turn, ratio

SHAPE = {"vocabulary": 257, "context": 256, "layers": 6, "width": 384, "heads": 6}
BATCH, EVALUATED, RATE = 12, 20, 1e-3
TOKENS = BATCH * SHAPE["context"]  # of a step
PRECISIONS = ("float32", "bfloat16")
FLAGS = ["--model=transformer_lm", "--model_arg=positions=learned", "--model_arg=norm=layer", "--input=text"]
FLAGS += [f"--global_batch_size={BATCH}", "--clip_norm=1"]  # of launch.train


def text() -> bytes:
    """Python's own modules, some 4 MB of text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def write_windows(path: Path, corpus: bytes, steps: int) -> None:
    """Writes batches of windows, int32 [steps, batch, context + 1]; the text's last tenth is for evaluation."""
    tokens, rng = np.frombuffer(corpus, np.uint8).astype(np.int32), np.random.default_rng(0)
    border, length = len(tokens) * 9 // 10, SHAPE["context"] + 1

    def windows(first: int, end: int, count: int) -> np.ndarray:
        starts = rng.integers(first, end - length, (count, BATCH, 1))
        return tokens[starts + np.arange(length)]

    train, evaluation = windows(0, border, steps), windows(border, len(tokens), EVALUATED)
    np.savez(path, train=train, eval=evaluation, shape=json.dumps(SHAPE), rate=RATE)


def compare_quality(folder: Path, torch_python: str, steps: int) -> None:
    """Trains both for equal steps, and prints the losses of the text that they have not seen."""
    data, rows = folder / "data.npz", []
    write_windows(data, text(), steps)
    for precision in PRECISIONS:
        losses = []
        for python, peer in ((PYTHON, "transformer_lm"), (torch_python, "nanogpt")):
            path = folder / f"{peer}_{precision}.json"
            options = [f"--data={data}", f"--precision={precision}", f"--quality_json={path}"]
            losses.append(run_process([python, "-m", f"benchmarks.peers.{peer}", *options], path)["loss"])
        rows.append([precision, *(f"{loss:.4f}" for loss in losses), f"{losses[0] - losses[1]:+.4f}"])
    print(table([f"loss after {steps} steps", "Crankshaft", "PyTorch", "difference"], rows))


def compare_speed(folder: Path, torch_python: str, steps: int, turns: int) -> None:
    data, corpus = folder / "speed.npz", folder / "text"
    corpus.mkdir()
    (corpus / "text.txt").write_bytes(text())
    write_windows(data, text(), 10)
    run_process(
        [PYTHON, "-m", "benchmarks.peers.transformer_lm", f"--data={data}", f"--quality_json={folder}/none.json"],
        folder / "none.json",
    )
    ours = [*FLAGS, f"--data_dir={corpus}"]
    for precision in PRECISIONS:
        peer = [torch_python, "-m", "benchmarks.peers.nanogpt", f"--data={data}", f"--precision={precision}"]
        peers = {
            "PyTorch": Process(peer),
            "PyTorch, compiled": Process([*peer, "--compiled"]),
            "Crankshaft": Process([PYTHON, "-m", "benchmarks.bare", *ours, f"--precision={precision}"]),
        }
        rates = rates_in_turn(peers, steps, turns, str(ROOT))
        rows = [
            [name, spread([TOKENS * rate for rate in own_rates]), ratio(rates["Crankshaft"], own_rates)]
            for name, own_rates in rates.items()
        ]
        print(table([precision, "tokens/s: median (least–most)", "Crankshaft against it (95 %)"], rows), "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", required=True, help="a Python that has torch")
    parser.add_argument("--steps", type=int, default=3, help="of a piece (%(default)s)")
    parser.add_argument("--quality_steps", type=int, default=200, help="to train both for (%(default)s)")
    parser.add_argument("--part", choices=("speed", "quality"), help="one of the two comparisons alone")
    add_turns(parser, 12)
    arguments = parser.parse_args()
    if not runs_with(arguments.torch_python, "torch", "numpy", *NEEDED):
        parser.error(f"--torch_python={arguments.torch_python} does not run `import torch, numpy, crankshaft`")
    print(f"{cpu_model()}, {len(usable_cores())} cores\n")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part != "quality":
            compare_speed(Path(folder), arguments.torch_python, arguments.steps, arguments.turns)
        if arguments.part != "speed":
            compare_quality(Path(folder), arguments.torch_python, arguments.quality_steps)


if __name__ == "__main__":
    run_script(main)
