"""A program that trains on a day's examples: `--day=1`, flags of train. Its loss depends on the model's average."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl import flags

from crankshaft import Mean, Trainer, main, mean
from crankshaft.engine import Averaged

_RNG = np.random.default_rng(0)
DAYS = [(_RNG.normal(size=(48, 3)).astype("float32"), _RNG.normal(size=48).astype("float32")) for _ in range(2)]


class Student(Trainer):
    """Agrees with its teacher too; labels below -1 are missing, so that each mean has a count of its own."""

    def build_model(self):
        layers = [tf.keras.Input([3]), tf.keras.layers.Dense(4, "tanh", name="first")]
        return tf.keras.Sequential([*layers, tf.keras.layers.Dense(1, name="last")], name="student")

    def build(self):
        super().build()
        self.teacher = Averaged(self.model, 0.5)

    def loss(self, outputs, batch):
        wrong, apart = (tf.square(outputs[:, 0] - x) for x in (batch[1], self.teacher(batch[0])[:, 0]))
        known = tf.cast(batch[1] > -1, tf.float32)
        return {
            "known": mean(wrong, weights=known),
            "agrees": mean(apart),
            "one": Mean(0.5 * tf.reduce_mean(apart), 1.0),
        }

    def predictions(self, outputs, batch):
        return {"guess": outputs[:, 0], "label": batch[1]}

    def compute_metrics(self, predictions):
        order = np.arange(1, len(predictions["guess"]) + 1)  # depends on it
        return {"ordered": float(np.abs(predictions["guess"] - predictions["label"]) @ order)}


def day(number: int):
    return DAYS[number], DAYS[number]


if __name__ == "__main__":  # as tests import this file
    DAY = flags.DEFINE_integer("day", 0, "Whose examples to train on.")
    main(Student, data=lambda: day(DAY.value))
