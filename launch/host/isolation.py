"""Saves and restores process-wide state of a run, so that several runs in a process are independent. Host code."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags as absl_flags
from absl.testing import flagsaver

from ...engine.internals import keras, tensorflow


class Isolation:
    """The state that a run shares with its process: the run's own values within `entered`, else the program's.

    Of the thread: Keras's dtype policy, the numbers in its layers' names and its own random generator; and whether
    TensorFlow checks numerics. Of the process: the random generators of Python and NumPy, and TensorFlow's global seed.
    And a script's own flags, where it looks for them. A run finds Keras's state as a new process has it. Collectives of
    a `MirroredStrategy` made within get distinct keys: TensorFlow numbers each strategy's from the same one.

    Args:
      script_flags: values of the script's own absl flags, by name; the others stay unchanged.
    """

    def __init__(self, script_flags: Mapping[str, Any] | None = None):
        self._script_flags = script_flags
        self._keras: dict[str, Any] | None = None
        self._random_state: tuple[Any, ...] | None = None
        self._thread = threading.local()

    @contextlib.contextmanager
    def entered(self, uses_random: bool = True) -> Iterator[None]:
        """Enters the run's state. Within it in the same thread, as a call of the run by its own hook is, does nothing.

        Args:
          uses_random: whether the body may use the process's random generators; else the program's stay unchanged.
        """
        if getattr(self._thread, "is_within", False):
            yield
            return
        flags = self._script_flags
        if flags is not None:
            absl_flags.FLAGS.mark_as_parsed()
        with flagsaver.flagsaver(**flags) if flags else contextlib.nullcontext():
            yield from self._entered(uses_random)

    def _entered(self, uses_random: bool) -> Iterator[None]:
        if self._keras is None:
            tensorflow.use_new_collective_keys()
        programs = keras.exchange_state(self._keras or keras.state_of_output())
        before = _PROCESS.enter(self._random_state) if uses_random else None
        self._thread.is_within = True
        try:
            yield
        finally:
            self._thread.is_within = False
            tf.debugging.disable_check_numerics()
            if before is not None:
                self._random_state = _PROCESS.leave(before)
            self._keras = keras.exchange_state(programs)


class _Generators:
    """The random generators of this process. The last run to leave them restores the program's, in any thread."""

    def __init__(self):
        self._inside = 0
        self._programs: tuple[Any, ...] = ()

    def enter(self, state: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Sets a state, if any, and returns the previous one."""
        with tensorflow.SEEDED:
            before = _state()
            self._programs = self._programs if self._inside else before
            self._inside += 1
            if state is not None:
                _set(state)
        return before

    def leave(self, before: tuple[Any, ...]) -> tuple[Any, ...]:
        """Restores the previous state, and returns the run's."""
        with tensorflow.SEEDED:
            left = _state()
            self._inside -= 1
            _set(before if self._inside else self._programs)
        return left


_PROCESS = _Generators()  # one, as the generators are


def _state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), tensorflow.random_state()  # noqa: NPY002


def _set(state: tuple[Any, ...]) -> None:
    python, numpy, of_tensorflow = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002 - what `keras.utils.set_random_seed` seeds
    tensorflow.restore_random_state(of_tensorflow)
