"""Saves and restores what a run sets for its whole process, so that several runs in one are independent. Host code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.internals import keras, tensorflow


class Isolation:
    """What a run sets for its whole process: its own values while this context is entered, else the program's.

    That is Keras's dtype policy, the numbers in its layers' names and its own random generator; the random generators
    of Python and NumPy; TensorFlow's global seed; and whether it checks numerics. A run finds Keras's state as a new
    process has it, and may be left and entered again. Collectives of a `MirroredStrategy` made within get distinct
    keys: TensorFlow numbers each strategy's from the same one.
    """

    def __init__(self):
        self._own: tuple[Any, ...] | None = None
        self._programs: tuple[Any, ...] = ()

    def __enter__(self) -> Isolation:
        if self._own is None:
            self._programs = _state(keras.new_state())
            tensorflow.use_new_collective_keys()
        else:
            self._programs = _exchange(self._own)
        return self

    def __exit__(self, *_) -> None:
        tf.debugging.disable_check_numerics()
        self._own = _exchange(self._programs)


def _exchange(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sets a state, and returns that of before."""
    of_keras, python, numpy, of_tensorflow = state
    before = _state(keras.exchange_state(of_keras))
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002 - what `keras.utils.set_random_seed` seeds
    tensorflow.restore_random_state(of_tensorflow)
    return before


def _state(of_keras: Any) -> tuple[Any, ...]:
    return of_keras, random.getstate(), np.random.get_state(), tensorflow.random_state()  # noqa: NPY002
