"""Labels the digits that a model is least sure of, 20 at a time: python active_learning.py

The run is assembled once, and trained further each time on the digits labelled so far.
"""

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.input import digits
from crankshaft.models.classification import Classifier


class Small(Classifier):
    """A small network for images of 28 x 28."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)])


def least_sure(logits: np.ndarray, known: np.ndarray, count: int) -> np.ndarray:
    """Returns the examples, not among those known, whose two likeliest classes are nearest to each other."""
    ordered = np.sort(logits, axis=1)
    margins = ordered[:, -1] - ordered[:, -2]
    margins[known] = np.inf
    return np.argsort(margins)[:count]


def label(rounds: int = 8, at_once: int = 20) -> list[float]:
    """Labels, trains and evaluates in turn; returns the accuracy after each round."""
    data = digits.load(None, seed=0)
    images, labels = data.train
    known = np.random.default_rng(0).choice(len(images), at_once, replace=False)
    accuracies = []
    with crankshaft.open_run(Small, data=data, mode="train", jit="off", progress="off", learning_rate=0.003) as run:
        for _ in range(rounds):
            run.train(data=(images[known], labels[known]), epochs=30)
            accuracies.append(run.evaluate()["accuracy"])
            print(f"{len(known)} labels: accuracy {accuracies[-1]:.3f}", flush=True)
            known = np.append(known, least_sure(run.predict(images), known, at_once))
    return accuracies


if __name__ == "__main__":
    label()
