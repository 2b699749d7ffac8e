"""Saves and restores what a run sets for its whole process, so that several runs in one are independent. Host code."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from ...engine.internals import keras, tensorflow


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Gives a run Keras's state as a new process has it, and afterwards restores what was there.

    That is Keras's dtype policy, the numbers in its layers' names and its own random generator; the random generators
    of Python and NumPy; TensorFlow's global seed; and whether it checks numerics. Collectives of a `MirroredStrategy`
    made within get distinct keys: TensorFlow numbers each strategy's from the same one.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what `keras.utils.set_random_seed` seeds
    of_tensorflow, of_keras = tensorflow.random_state(), keras.new_state()
    tensorflow.use_new_collective_keys()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()
        keras.restore_state(of_keras)
        tensorflow.restore_random_state(of_tensorflow)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
