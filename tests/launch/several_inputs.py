"""Several inputs per step, for tests in this process and in clusters: near ones have labels, far ones have none."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from crankshaft import Data, mean
from crankshaft.engine.step.gradients import Gradients, Update
from tests.engine.trainers import Columns

RATE, NEAR, FAR = 0.05, 4, 7  # 10 examples in batches of 4, 4, 2; 25 of 7, 7, 7, 4
rng = np.random.default_rng(0)
X, U = rng.normal(size=(10, 3)).astype("float32"), rng.normal(size=(25, 3)).astype("float32")
Y = (X @ np.float32([[1.0], [-2.0], [0.5]])).astype("float32")
ASKED = {"global_batch_size": NEAR, "learning_rate": RATE, "optimizer": "sgd", "jit": "off", "progress": "off"}


class Both(Columns):
    """A plane near labels, which is low elsewhere: the gradient of the sum of two means."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="zeros")])

    def train_step(self, batch):
        (x, y), u, variables = batch["near"], batch["far"], self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            near = mean(tf.square(self.model(x) - y)[:, 0])
            far = mean(tf.square(self.model(u))[:, 0])
        sums = [
            self.reduction.sum(tape.gradient(each.total, variables), each.count, variables=variables)
            for each in (near, far)
        ]
        means = [gradients.over(count) for gradients, count in sums]
        update = Update(self, Gradients([a + b for a, b in zip(*means, strict=True)]), variables)
        update.apply(self.optimizer, variables)
        return update.end({"loss": near, "far": far, "examples": mean(tf.cast(tf.shape(u)[:1], tf.float32))})


def arrays(**sizes):
    return Data({"near": (X, Y), "far": (U,)}, (X, Y), batch_sizes={"far": FAR, **sizes})


def streams():
    far = tf.data.Dataset.from_tensor_slices(U)
    return Data({"near": tf.data.Dataset.from_tensor_slices((X, Y)), "far": far}, (X, Y), batch_sizes={"far": FAR})


def by_hand(steps: int, x=X, y=Y, u=U, near: int = NEAR, far: int = FAR) -> list[np.ndarray]:
    """The weights after so many steps on batches in the examples' own order."""
    w, b, at = np.zeros((3, 1)), 0.0, [0, 0]
    for _ in range(steps):
        batch, unlabelled = x[at[0] : at[0] + near], u[at[1] : at[1] + far]
        wrong, height = batch @ w + b - y[at[0] : at[0] + near], unlabelled @ w + b
        gradient = 2 * batch.T @ wrong / len(batch) + 2 * unlabelled.T @ height / len(unlabelled)
        w, b = w - RATE * gradient, b - RATE * (2 * wrong.mean() + 2 * height.mean())
        at = [(at[0] + near) % (-(-len(x) // near) * near), (at[1] + far) % (-(-len(u) // far) * far)]
    return [w, np.array([b])]
