"""Saves and restores process-wide state of a run, so that several runs in a process are independent."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from absl import flags as absl_flags
from absl.testing import flagsaver

from ...engine.internals import keras_state, tensorflow
from ...engine.machine.threads import PROCESS
from .. import terminal
from ..failures import UsageError

T = TypeVar("T")


class Isolation:
    """The state that a run shares with its process: the run's values within `entered`, else the program's.

    Of the thread: Keras's dtype policy, the numbers in its layers' names and its own random generator; and whether
    TensorFlow checks numerics. Of the process: the random generators of Python and NumPy, and TensorFlow's global seed;
    and whether TensorFlow's kernels have to be deterministic, with which a program's own sampling may be an error; and
    the defaults of Keras that models read; and whether the standard streams escape characters that their encoding
    lacks, as they do within a run. And a script's own flags, where it looks for them. A run finds Keras's other state
    as a new process has it. Collectives of a `MirroredStrategy` made within get keys of the run: TensorFlow numbers
    each strategy's from the same one, and two of a program's own fail on CPUs.

    Args:
      defaults: Keras's, as `program_defaults` returns them; None is those in which it is entered first.
      script_flags: values of the script's own absl flags, by name; the others stay unchanged.
      check_numerics: whether TensorFlow checks each number that it computes; None leaves that to the program.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any] | None = None,
        script_flags: Mapping[str, Any] | None = None,
        check_numerics: bool | None = None,
    ):
        process_defaults = dict(defaults or {})
        self._policy = process_defaults.pop("dtype_policy", None)
        self._defaults: dict[str, Any] | None = process_defaults or None
        self._script_flags = script_flags
        self._check_numerics = check_numerics
        self._keras: dict[str, Any] | None = None
        self._random_state: tuple[Any, ...] | None = None
        self._is_deterministic: bool | None = None
        self._collective_keys = next(_NEW_KEYS)
        self._thread = threading.local()

    @contextlib.contextmanager
    def entered(self, uses_random: bool = True) -> Iterator[None]:
        """Enters the run's state. Within it in the same thread, as a call of the run by its own hook is, does nothing.

        Args:
          uses_random: whether the body may use the process's random generators; else the program's stay unchanged.

        Raises:
          UsageError: a run in another thread has other defaults of Keras.
        """
        if getattr(self._thread, "is_within", False):
            yield
            return
        flags = self._script_flags
        if flags is not None:
            absl_flags.FLAGS.mark_as_parsed()
        given = flagsaver.flagsaver(**flags) if flags else contextlib.nullcontext()
        with given, self.defaults(), tensorflow.checking_numerics(self._check_numerics):
            programs = keras_state.exchange_state(self._keras or keras_state.initial_state(self._policy))
            before = _RANDOM.enter(self._random_state) if uses_random else None
            was_deterministic = _DETERMINISM.enter(self._is_deterministic)
            programs_keys = _COLLECTIVE_KEYS.enter(self._collective_keys)
            streams = _STREAMS.enter(terminal.escaping_streams())
            self._thread.is_within = True
            try:
                yield
            finally:
                self._thread.is_within = False
                _STREAMS.leave(streams)
                _COLLECTIVE_KEYS.leave(programs_keys)
                self._is_deterministic = _DETERMINISM.leave(was_deterministic)
                if before is not None:
                    self._random_state = _RANDOM.leave(before)
                self._keras = keras_state.exchange_state(programs)

    @contextlib.contextmanager
    def defaults(self) -> Iterator[None]:
        """Enters the run's defaults of Keras alone. Raises `UsageError`, as `entered` does."""
        before = _DEFAULTS.enter(self._defaults)
        try:
            yield
        finally:
            self._defaults = _DEFAULTS.leave(before)


def keep_random_state() -> None:
    """Makes the state of the random generators within a run the program's, as if the program had sampled so far."""
    _RANDOM.keep()


def program_defaults(policy: Any = None) -> dict[str, Any]:
    """Reads the program's defaults of Keras that models use, by name; plain JSON.

    Args:
      policy: the dtype policy of layers that do not set theirs; None is that of a new process.
    """
    values = dict(_DEFAULTS.programs)
    values["epsilon"] = float(values["epsilon"])
    return {**values, "dtype_policy": values["floatx"] if policy is None else policy.name}


class _ProcessState(Generic[T]):
    """Some state of this process. The last run to leave it restores the program's, in any thread.

    Args:
      refuse: raises an error if runs in two threads have different states, the first's and the second's.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None], refuse: Callable[[T, T], None] | None = None):
        self._read, self._write, self._refuse = read, write, refuse
        self._inside: Counter[int] = Counter()  # how many times each thread
        self._programs: T

    @property
    def programs(self) -> T:
        """The program's state, outside of all runs."""
        with PROCESS:
            return self._programs if self._inside else self._read()

    def enter(self, state: T | None) -> T:
        """Sets a state, if any, and returns the previous one."""
        thread = threading.get_ident()
        with PROCESS:
            before = self._read()
            if self._refuse and state not in (None, before) and self._inside.keys() - {thread}:
                self._refuse(before, state)
            self._programs = self._programs if self._inside else before
            self._inside[thread] += 1
            if state is not None:
                self._write(state)
        return before

    def keep(self) -> None:
        """Makes the present state the program's."""
        with PROCESS:
            self._programs = self._read()

    def leave(self, before: T) -> T:
        """Restores the previous state, and returns the run's; while runs of other threads alone are inside, theirs."""
        thread = threading.get_ident()
        with PROCESS:
            left = self._read()
            self._inside[thread] -= 1
            self._inside = +self._inside
            if not self._inside:
                self._write(self._programs)
            elif thread in self._inside:
                self._write(before)
        return left


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), tensorflow.random_state()  # noqa: NPY002


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 - what `keras.utils.set_random_seed` seeds
    tensorflow.restore_random_state(state[2])


def _refuse_other_defaults(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Raises `UsageError`, which names one of Keras's defaults that differs between the runs of two threads."""
    name = next(name for name, value in second.items() if value != first[name])
    raise UsageError(
        f"Keras's {name} is {second[name]} in this run, and {first[name]} in one of another thread; it is the whole "
        "process's, so execute one run after the other, or each in a process of its own"
    )


_RANDOM = _ProcessState(_random_state, _set_random_state)
_DETERMINISM = _ProcessState(tensorflow.is_deterministic, tensorflow.set_deterministic)
_COLLECTIVE_KEYS = _ProcessState(tensorflow.collective_keys, tensorflow.set_collective_keys)
_NEW_KEYS = itertools.count(1 << 15, 1 << 16)  # of 32 bits; a program's own begin with 0
_STREAMS = _ProcessState(terminal.stream_errors, terminal.set_stream_errors)
_DEFAULTS = _ProcessState(keras_state.defaults, keras_state.set_defaults, _refuse_other_defaults)
