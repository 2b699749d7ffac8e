"""A script whose data is a `Source` or a `tf.data.Dataset`, for `bits.py`: only names that users import, two forms.

`python benchmarks/forms.py --form=source --train_steps=100`
"""

import numpy as np
import tensorflow as tf
from absl import flags

from crankshaft import Source, Spec, Trainer, main, mean  # import first: keeps TensorFlow's startup log off the screen

FORM = flags.DEFINE_enum("form", "source", ["source", "stream"], "How the data is given.")
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


if __name__ == "__main__":
    main(Plane, data=data)
