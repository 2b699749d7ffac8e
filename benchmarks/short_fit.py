"""Compares the CPU time of short calls of Keras's `fit` and of `crankshaft.fit`, in turn.

    python -m benchmarks.short_fit [--turns=20] [--processes=6]

Two batches of a tiny model: each turn makes a model for each, calls `fit` on it twice, and measures both calls: the
second continues in Keras's compiled function. `own` is a model with a `call` and a loss of the program's. Everything is
imported, and both have been called, before the first turn.

A program's first minute, each time in a new process: two epochs of 1,000 examples by a model of five layers, of 900
after them, both with a `validation_split`, and then calls of one epoch, each on new arrays of one size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import crankshaft

from .rounds import count, ratio

_FITS: dict[str, Callable[..., Any]] = {"keras": tf.keras.Model.fit, "crankshaft": crankshaft.fit}
_BATCH_SIZE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=count, default=20, help="(%(default)s)")
    parser.add_argument("--processes", type=count, default=6, help="(%(default)s)")
    parser.add_argument("--program", choices=_FITS, help="measure this one's first minute here, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.program:
        print(json.dumps(program_seconds(_FITS[arguments.program])))
        return
    turns = arguments.turns
    for workload, make in _MODELS.items():
        seconds: dict[str, list[list[float]]] = {name: [] for name in _FITS}
        for turn in range(turns + 1):
            for name in sorted(_FITS, reverse=bool(turn % 2)):
                seconds[name].append(cpu_seconds(_FITS[name], make()))
        for call, title in enumerate(("the first call", "a second call on the same model")):
            report(f"{workload}, {title}", *([each[call] for each in seconds[name][1:]] for name in _FITS))
    programs: dict[str, list[list[float]]] = {name: [] for name in _FITS}
    for number in range(arguments.processes):
        for name in sorted(_FITS, reverse=bool(number % 2)):
            command = [sys.executable, "-m", "benchmarks.short_fit", f"--program={name}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            programs[name].append(json.loads(done.stdout))
    for call, title in enumerate(("the first call", "900 examples after it", "new arrays, each call")):
        report(f"a program, {title}", *([each[call] for each in programs[name]] for name in _FITS))


def report(title: str, keras: Sequence[float], ours: Sequence[float]) -> None:
    medians = [statistics.median(values) for values in (keras, ours)]
    print(f"{title}: Keras {medians[0]:.3f} s of CPU, Crankshaft {medians[1]:.3f} s: {ratio(ours, keras)}")


class Own(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def own() -> tf.keras.Model:
    model = Own()
    model.compile("adam", lambda labels, outputs: tf.reduce_mean(tf.square(labels - outputs), -1))
    return model


def sequential() -> tf.keras.Model:
    model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


_MODELS: dict[str, Callable[[], tf.keras.Model]] = {"sequential": sequential, "own": own}


def cpu_seconds(fit: Callable[..., Any], model: tf.keras.Model) -> list[float]:
    """Returns the CPU seconds of two calls of `fit` on a new model, each of two batches."""
    x, y = np.ones([2 * _BATCH_SIZE, 4], np.float32), np.ones([2 * _BATCH_SIZE, 1], np.float32)
    seconds = []
    for _ in range(2):
        before = time.process_time()
        fit(model, x, y, batch_size=_BATCH_SIZE, verbose=0)
        seconds.append(time.process_time() - before)
    return seconds


def program_seconds(fit: Callable[..., Any]) -> list[float]:
    """Returns the CPU seconds of a program's first call of `fit`, of the one after it, and of each later one."""
    random = np.random.default_rng(0)
    layers = [tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dropout(0.2)]
    layers += [tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(3, "softmax")]
    model = tf.keras.Sequential([tf.keras.Input([20]), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    def call(examples: int, **more: Any) -> float:
        x, y = random.normal(size=[examples, 20]).astype(np.float32), random.integers(0, 3, examples)
        before = time.process_time()
        fit(model, x, y, verbose=0, **more)
        return time.process_time() - before

    split = [call(examples, epochs=2, validation_split=0.2) for examples in (1000, 900)]
    call(640)  # compiles, where no validation is another form of data
    return [*split, statistics.mean(call(640) for _ in range(10))]


if __name__ == "__main__":
    main()
