"""Examples in files with parameter servers: how fast each task reads, and in how much memory.

Usage: python -m benchmarks.files_on_workers --mebibytes=4096 --folder=FOLDER [--in_memory] [flags of crankshaft train]

Writes records of 28x28 bytes and a label once, trains an mlp on them by `crankshaft local --workers=2 --ps=2`, and
prints one line of JSON: examples/s, and the most memory that each task had, in MiB. `--in_memory` sends the same
examples to the workers as arrays.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
from absl import flags

import crankshaft
from crankshaft.launch.cluster.children import Children, wait

RECORD = 28 * 28 + 1
FILES = 7
flags.DEFINE_integer("mebibytes", 512, "Of records.")
flags.DEFINE_string("folder", None, "Of the files.", required=True)
flags.DEFINE_bool("in_memory", False, "Read them whole, into arrays.")


class Records(crankshaft.Source):
    """Records of one length in several files."""

    element_spec = (crankshaft.Spec((28, 28, 1), np.uint8), crankshaft.Spec((), np.int64))

    def __init__(self, folder: str):
        self._paths = sorted(pathlib.Path(folder).glob("records-*"))
        self._files = [os.open(path, os.O_RDONLY) for path in self._paths]
        self._starts = np.cumsum([0, *(path.stat().st_size // RECORD for path in self._paths)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices):
        files = np.searchsorted(self._starts, indices, side="right") - 1
        offsets = ((indices - self._starts[files]) * RECORD).tolist()
        read = [
            os.pread(self._files[file], RECORD, offset) for file, offset in zip(files.tolist(), offsets, strict=True)
        ]
        records = np.frombuffer(b"".join(read), np.uint8).reshape(-1, RECORD)
        return records[:, :-1].reshape(-1, 28, 28, 1), records[:, -1].astype(np.int64)

    def identity(self) -> str:
        return " ".join(f"{path.name} {path.stat().st_size}" for path in self._paths)


class Mlp(crankshaft.Trainer):
    def build_model(self):
        import tensorflow as tf

        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)])

    def loss(self, outputs, batch):
        import tensorflow as tf

        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))


def data():
    source = Records(flags.FLAGS.folder)
    return source.read(np.arange(len(source))) if flags.FLAGS.in_memory else source, None, 10


def write(folder: pathlib.Path, mebibytes: int) -> None:
    """Writes so much of random records, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, each = np.random.default_rng(0), (mebibytes << 20) // RECORD // FILES
    for number in range(FILES):
        path = folder / f"records-{number}"
        if path.exists() and path.stat().st_size == each * RECORD:
            continue
        with open(path, "wb") as file:
            for first in range(0, each, 10_000):
                records = rng.integers(0, 256, [min(10_000, each - first), RECORD], np.uint8)
                records[:, -1] %= 10
                file.write(records.tobytes())


def most_memory(pid: str) -> int:
    """Returns MiB, of which some 200 are TensorFlow's own code."""
    try:
        return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) >> 10
    except (OSError, TypeError):  # it has ended
        return 0


def measure(arguments: list[str]) -> dict:
    command = [sys.executable, "-m", "crankshaft", "local", "--workers=2", "--ps=2", "--", __file__, *arguments]
    tasks, rate, most = {}, None, {}
    with Children() as children:
        process = children.start(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in iter(lambda: process.stdout.readline().decode(), ""):
            tasks |= dict(re.findall(r"\[local\] (\w+ ?\d*) is process (\d+)", line))
            most = {task: max(most.get(task, 0), most_memory(pid)) for task, pid in tasks.items()}
            if match := re.search(r"([\d,.]+) (steps/s|examples/s)", line):
                rate = match[0]
            if "error:" in line:
                print(line, end="", file=sys.stderr)
        wait([process], math.inf)
        [code] = children.end([process])
    return {"code": code, "rate": rate, "most_mebibytes": most}


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        crankshaft.main(Mlp, data=data)
    flags.FLAGS(sys.argv, known_only=True)
    write(pathlib.Path(flags.FLAGS.folder), flags.FLAGS.mebibytes)
    print(json.dumps(measure(["--progress=plain", *sys.argv[1:]])))
