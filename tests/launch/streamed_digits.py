"""Trains on digits that are streamed: `python streamed_digits.py FOLDER '[[flag, ...], ...]' [SIGNAL STEP]`.

Runs with each list of flags, one after the other; at a step, its own process is sent the signal.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys

import numpy as np
import tensorflow as tf

from crankshaft.engine.hooks import every_steps
from crankshaft.input import digits
from crankshaft.launch import train
from crankshaft.models.mlp import Model

EXAMPLES = 461  # by 32, the last of 15 batches has 13
SIZES = (3, 200, 1, 120, 50, 70, 17)  # of files, very different


def write_files(folder: pathlib.Path, files: int) -> None:
    """Writes the numbers of all examples, a line each, into one or seven files."""
    first = 0
    for number, size in enumerate(SIZES if files > 1 else (EXAMPLES,)):
        (folder / f"{number}.txt").write_text("".join(f"{first + line}\n" for line in range(size)))
        first += size


def data(folder):
    """Returns what a data function does: a stream of the examples that the files number, and arrays to evaluate on."""
    loaded = digits.load("", 0)
    images, labels = loaded.train
    images, labels = np.asarray(images), np.asarray(labels)

    def example(line):
        number = tf.strings.to_number(line, tf.int64)
        return tf.gather(images, number), tf.gather(labels, number)

    paths = sorted(map(str, pathlib.Path(folder).glob("*.txt")))
    return tf.data.TextLineDataset(paths).map(example), loaded.evaluation, loaded.num_classes


def main(folder: str, runs: str, name: str = "", step: str = "0") -> None:
    hooks = [every_steps(int(step), lambda status, means: os.kill(os.getpid(), signal.Signals[name]))] if name else []
    for flags in json.loads(runs):
        try:
            tf.distribute.MirroredStrategy._collective_key_base += 1 << 16  # see `inside`
            train.main(Model, data=lambda: data(folder), hooks=hooks, argv=["streamed_digits.py", *flags])
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main(*sys.argv[1:])
