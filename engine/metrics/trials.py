"""Tries users' code, such as Keras's metrics and losses, on small random batches. Host code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

EXAMPLES = (5, 3)  # in the two batches that a trial compares with their concatenation
TRIALS = 3


def sample(dtype: tf.DType, shape: Sequence, examples: int, random: np.random.Generator, is_label: bool) -> tf.Tensor:
    """Samples a batch [examples, *shape] that any metric and loss accepts.

    Labels and whole numbers are 0 or 1, valid classes of any metric; the rest is in (0, 1), like probabilities and
    weights. An axis of unknown size has 2 entries.
    """
    shape = [examples, *(size or 2 for size in shape)]
    whole = is_label or not dtype.is_floating
    return tf.cast(random.integers(0, 2, shape) if whole else random.uniform(0, 1, shape), dtype)


def alike(a, b) -> bool:
    """Returns whether arrays are equal up to rounding."""
    return bool(np.allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=1e-5))


def in_a_thread(function: Callable[[], None]) -> None:
    """Calls a function on the CPU outside any graph, strategy or Keras scope, which all are per thread."""
    errors = []

    def call():
        try:
            with tf.device("CPU:0"):
                function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="trial")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
