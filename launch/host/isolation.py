"""Saves and restores what a run sets for its whole process, so that several runs in one are independent. Host code."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import context


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Gives a run Keras's state as a new process has it, and afterwards restores what was there.

    That is Keras's dtype policy, the numbers in its layers' names and its own random generator; the random generators
    of Python and NumPy; TensorFlow's global seed; and whether it checks numerics. Collectives of a `MirroredStrategy`
    made within get distinct keys: TensorFlow numbers each strategy's from the same one.
    """
    keras, python = global_state.GLOBAL_STATE_TRACKER, random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 - what `keras.utils.set_random_seed` seeds
    eager = context.context()
    tensorflow = {name: getattr(eager, name, None) for name in ("_seed", "_rng")}
    global_state.GLOBAL_STATE_TRACKER = threading.local()  # as keras.backend.clear_session has it
    tf.distribute.MirroredStrategy._collective_key_base += 1 << 16
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()
        global_state.GLOBAL_STATE_TRACKER = keras
        vars(eager).update(tensorflow)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
