"""Compares the CPU time of two batches of a tiny model by Keras's `fit` and by `crankshaft.fit`, in turn.

    python -m benchmarks.short_fit [--turns=20]

Each turn makes a model for each, calls `fit` on it twice, and measures both calls: the second continues in Keras's
compiled function. `own` is a model with a `call` and a loss of the program's. Everything is imported, and both have
been called, before the first turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
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
    turns = parser.parse_args().turns
    for workload, make in _MODELS.items():
        seconds: dict[str, list[list[float]]] = {name: [] for name in _FITS}
        for turn in range(turns + 1):
            for name in sorted(_FITS, reverse=bool(turn % 2)):
                seconds[name].append(cpu_seconds(_FITS[name], make()))
        for call, title in enumerate(("the first call", "a second call on the same model")):
            keras, ours = ([each[call] for each in seconds[name][1:]] for name in _FITS)
            medians = [statistics.median(values) for values in (keras, ours)]
            shown = f"Keras {medians[0]:.3f} s of CPU, Crankshaft {medians[1]:.3f} s: {ratio(ours, keras)}"
            print(f"{workload}, {title}: {shown}")


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


if __name__ == "__main__":
    main()
