"""Compares the CPU time of short calls of Keras's `fit` and of `crankshaft.fit`, in turn.

    python -m benchmarks.short_fit [--turns=20] [--processes=6] [--kinds=arrays,dataset]

Calls of a few batches on each kind of data and model: arrays, a mapped and cached dataset, text, a model with a
`train_step` of its own. Each turn makes a model for each, calls `fit` on it twice, and measures both calls: the second,
on new data, continues in Keras's compiled function. Everything is imported, and both have been called, before the
first turn.

A program's first minute, each time in a new process: its first call, with `validation_split` of arrays, one of fewer
examples after it, and then a loop of calls of one epoch, each on new data of one size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import crankshaft

from .rounds import count, ratio

_FITS: dict[str, Callable[..., Any]] = {"keras": tf.keras.Model.fit, "crankshaft": crankshaft.fit}
_BATCH_SIZE, _FEATURES = 32, 20


class Kind(NamedTuple):
    """What is trained on what.

    Attributes:
      model: makes a compiled model.
      data: makes `fit`'s arguments of a number of examples.
    """

    model: Callable[[], tf.keras.Model]
    data: Callable[[int], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=count, default=20, help="(%(default)s)")
    parser.add_argument("--processes", type=count, default=6, help="(%(default)s)")
    parser.add_argument("--kinds", default=",".join(_KINDS), help="(%(default)s)")
    parser.add_argument("--program", choices=_FITS, help="measure this one's first minute here, and print it as JSON")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if arguments.program:
        print(json.dumps(program_seconds(_FITS[arguments.program], _KINDS[kinds[0]])))
        return
    turns, firsts = arguments.turns, []
    for kind in kinds:
        seconds: dict[str, list[list[float]]] = {name: [] for name in _FITS}
        for turn in range(turns + 1):
            for name in sorted(_FITS, reverse=bool(turn % 2)):
                seconds[name].append(cpu_seconds(_FITS[name], _KINDS[kind]))
        for call, title in enumerate(("the first call", "a second call on the same model")):
            report(f"{kind}, {title}", *([each[call] for each in seconds[name][1:]] for name in _FITS))
    for kind in kinds:
        programs: dict[str, list[list[float]]] = {name: [] for name in _FITS}
        for number in range(arguments.processes):
            for name in sorted(_FITS, reverse=bool(number % 2)):
                command = [sys.executable, "-m", "benchmarks.short_fit", f"--program={name}", f"--kinds={kind}"]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                programs[name].append(json.loads(done.stdout))
        for call, title in enumerate(("the first call", "fewer examples after it", "new data, each call")):
            report(f"a program, {kind}, {title}", *([each[call] for each in programs[name]] for name in _FITS))
        theirs, ours = (statistics.median(each[0] for each in programs[name]) for name in _FITS)
        firsts.append(ours / theirs)
    print(f"a program's first call, median of the kinds: {statistics.median(firsts):.2f} times Keras's CPU")


def report(title: str, keras: Sequence[float], ours: Sequence[float]) -> None:
    medians = [statistics.median(values) for values in (keras, ours)]
    print(f"{title}: Keras {medians[0]:.3f} s of CPU, Crankshaft {medians[1]:.3f} s: {ratio(ours, keras)}")


class OwnStep(tf.keras.Model):
    """A model whose training step is its own, as in Keras's guides."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def own_step() -> tf.keras.Model:
    model = OwnStep()
    model.compile("adam", "mse")
    return model


def sequential() -> tf.keras.Model:
    layers = [tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dropout(0.2), tf.keras.layers.Dense(3, "softmax")]
    model = tf.keras.Sequential([tf.keras.Input([_FEATURES]), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def text_model() -> tf.keras.Model:
    words = tf.keras.layers.TextVectorization(50, output_sequence_length=8, vocabulary=[f"w{n}" for n in range(40)])
    layers = [words, tf.keras.layers.Embedding(50, 8), tf.keras.layers.GlobalAveragePooling1D()]
    model = tf.keras.Sequential([tf.keras.Input([1], dtype="string"), *layers, tf.keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


_RANDOM = np.random.default_rng(0)


def arrays(examples: int) -> dict[str, Any]:
    features = _RANDOM.normal(size=[examples, _FEATURES]).astype(np.float32)
    return {"x": features, "y": _RANDOM.integers(0, 3, examples), "batch_size": _BATCH_SIZE}


def dataset(examples: int) -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices((arrays(examples)["x"], _RANDOM.integers(0, 3, examples)))
    return {"x": data.map(lambda x, y: (x / 2, y)).cache().batch(_BATCH_SIZE)}


def text(examples: int) -> dict[str, Any]:
    words = np.array([f"w{n} w{n + 1}" for n in range(40)])[_RANDOM.integers(0, 40, [examples, 1])]
    data = tf.data.Dataset.from_tensor_slices((words, _RANDOM.integers(0, 3, examples)))
    return {"x": data.batch(_BATCH_SIZE)}


_KINDS = {
    "arrays": Kind(sequential, arrays),
    "dataset": Kind(sequential, dataset),
    "text": Kind(text_model, text),
    "own_step": Kind(own_step, lambda examples: {**arrays(examples), "y": np.ones([examples, 1], np.float32)}),
}


def cpu_seconds(fit: Callable[..., Any], kind: Kind) -> list[float]:
    """Returns the CPU seconds of two calls of `fit` on a new model, each of two batches."""
    model = kind.model()
    return [_call(fit, model, kind.data(2 * _BATCH_SIZE)) for _ in range(2)]


def program_seconds(fit: Callable[..., Any], kind: Kind) -> list[float]:
    """Returns the CPU seconds of a program's first call of `fit`, of the one after it, and of each later one."""
    model, split = kind.model(), {"validation_split": 0.2} if kind.data is arrays else {}
    first = [_call(fit, model, kind.data(examples), epochs=2, **split) for examples in (1000, 900)]
    _call(fit, model, kind.data(640))  # compiles, where no validation is another form of data
    return [*first, statistics.mean(_call(fit, model, kind.data(640)) for _ in range(10))]


def _call(fit: Callable[..., Any], model: tf.keras.Model, data: dict[str, Any], **more: Any) -> float:
    before = time.process_time()
    fit(model, **data, verbose=0, **more)
    return time.process_time() - before


if __name__ == "__main__":
    main()
