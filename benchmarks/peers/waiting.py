"""A model whose step waits a random time instead of computing, so that many workers share a core. Runs in tasks.

`crankshaft local --workers=4 -- -m benchmarks.peers.waiting --input=digits --jit=off --train_steps=100`
"""

from __future__ import annotations

import math
import os
import time

import numpy as np
import tensorflow as tf

from crankshaft.launch import train
from crankshaft.models.logistic import Model


class Waiting(Model):
    """A logistic regression that waits for a log-normal time before each step.

    Args:
      mean: seconds.
      jitter: standard deviation divided by the mean.
    """

    def __init__(self, mean: float = 0.1, jitter: float = 0.0):
        super().__init__()
        sigma = math.sqrt(math.log1p(jitter**2))
        # Each worker is a process with a time of its own.
        random = np.random.default_rng(os.getpid())
        self._draw = lambda: mean * random.lognormal(-(sigma**2) / 2, sigma)

    def forward(self, features, training: bool):
        def wait() -> np.ndarray:
            time.sleep(self._draw())
            return np.float32(0)

        zero = tf.ensure_shape(tf.numpy_function(wait, [], tf.float32), [])
        return super().forward(tf.cast(features, tf.float32) + zero, training)


if __name__ == "__main__":
    train.main(Waiting)
