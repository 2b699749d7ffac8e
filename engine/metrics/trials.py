"""Tries what users bring, such as Keras's metrics and losses, on small batches of random numbers. Host code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

EXAMPLES = (5, 3)  # of the two batches that a trial compares with both together
TRIALS = 3


def sample(dtype: tf.DType, shape: Sequence, examples: int, random: np.random.Generator, is_label: bool) -> tf.Tensor:
    """Samples a batch [examples, *shape], such that any metric and loss accepts it.

    Labels and whole numbers are 0 or 1, which are classes of any metric; the rest is in (0, 1), as probabilities and
    weights are. An axis of unknown size has 2 entries.
    """
    shape = [examples, *(size or 2 for size in shape)]
    whole = is_label or not dtype.is_floating
    return tf.cast(random.integers(0, 2, shape) if whole else random.uniform(0, 1, shape), dtype)


def alike(a, b) -> bool:
    """Returns whether arrays are equal but for rounding."""
    return bool(np.allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=1e-5))


def in_a_thread(function: Callable[[], None]) -> None:
    """Calls a function on the CPU without any graph, strategy or scope of Keras's, which all belong to a thread."""
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
