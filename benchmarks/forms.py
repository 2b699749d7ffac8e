"""A script for `bits.py`, by names that users import alone: data in two forms, and two compiled models.

`python benchmarks/forms.py --form=source --train_steps=100`
"""

import sys

import numpy as np
import tensorflow as tf
from absl import flags

from crankshaft import (  # import first: keeps TensorFlow's startup log off the screen
    Source,
    Spec,
    Trainer,
    fit,
    main,
    mean,
)

COMPILED = {"class_weight": {0: 1.0, 1: 0.3, 2: 2.7}, "own_step": None}
FORM = flags.DEFINE_enum("form", "source", ["source", "stream", *COMPILED], "How the data is given, or which model.")
EXAMPLES = 1000  # 15 batches of 64, and a smaller one


class Points(Source):
    """Points of a plane with noise: each is a function of its index."""

    element_spec = (Spec((8,), np.float32), Spec((1,), np.float32))

    def __init__(self, first: int, count: int):
        self._first, self._count = first, count

    def __len__(self):
        return self._count

    def read(self, indices):
        rows = [np.random.default_rng(self._first + i).normal(size=9).astype(np.float32) for i in indices.tolist()]
        x, noise = np.split(np.stack(rows), [8], axis=1)
        return x, x.sum(1, keepdims=True) + noise


def data():
    train, evaluation = Points(0, EXAMPLES), Points(EXAMPLES, 200)
    if FORM.value == "source":
        return train, evaluation
    return tuple(
        tf.data.Dataset.from_tensor_slices(points.read(np.arange(len(points)))) for points in (train, evaluation)
    )


class Plane(Trainer):
    def build_model(self):
        hidden = tf.keras.layers.Dense(16, activation="relu")
        return tf.keras.Sequential([hidden, tf.keras.layers.Dropout(0.2), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1]))


class OwnStep(tf.keras.Model):
    """A compiled model with a training step of its own, and statistics of all replicas."""

    def __init__(self):
        super().__init__()
        self.inner = tf.keras.layers.Dense(16, activation="relu")
        self.norm, self.outer = tf.keras.layers.BatchNormalization(synchronized=True), tf.keras.layers.Dense(3)

    def call(self, inputs, training=False):
        return self.outer(self.norm(self.inner(inputs), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, outputs)


def compiled():
    tf.keras.utils.set_random_seed(1)
    model = OwnStep() if FORM.value == "own_step" else tf.keras.Sequential([tf.keras.layers.Dense(3)])
    model.build([None, 8])
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit_compiled(words):
    """Fits a compiled model by a command line's flags, on 301 examples: the last of 5 batches has an odd number."""
    given = dict(word.removeprefix("--").split("=", 1) for word in words)
    given = {name: value for name, value in given.items() if name not in ("mode", "progress")}
    given |= {"stop_at_step": given.pop("train_steps"), "epochs": 20, "verbose": 0}
    x = np.random.default_rng(0).normal(size=[301, 8]).astype("float32")
    fit(compiled, x, x[:, :3].argmax(1), batch_size=64, class_weight=COMPILED[FORM.value], **given)


if __name__ == "__main__":
    if sys.argv[1].removeprefix("--form=") in COMPILED:
        flags.FLAGS(sys.argv[:2])
        fit_compiled(sys.argv[2:])
    else:
        main(Plane, data=data)
