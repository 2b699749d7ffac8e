"""State of the process that a run has to itself."""

import io
import sys
import threading

import tensorflow as tf

from crankshaft.engine.internals.tensorflow import collective_keys, is_deterministic, set_deterministic
from crankshaft.runner.host.isolation import Isolation, program_defaults
from tests.waiting import PATIENCE


def test_a_program_samples_without_a_seed_between_runs_of_deterministic_kernels():
    first, second = Isolation(), Isolation()
    with first.entered():
        set_deterministic(True)  # as a run on a GPU does
        with second.entered():  # another run begins before the first has ended
            assert is_deterministic()
        assert is_deterministic()
    tf.random.set_seed(None)
    assert tf.random.uniform([2]).shape == [2]  # an error if kernels have to be deterministic
    assert not is_deterministic()
    with first.entered(uses_random=False):
        assert is_deterministic()
    assert not is_deterministic()


def test_a_program_s_strategies_share_no_collective_keys_with_those_of_runs():
    """TensorFlow's two of one process fail on CPUs, where they reduce values of other shapes."""
    first, second, programs = Isolation(), Isolation(), collective_keys()
    with first.entered():
        mine = collective_keys()
        with second.entered():
            theirs = collective_keys()
        assert collective_keys() == mine
    assert collective_keys() == programs
    assert len({programs, mine, theirs}) == 3
    with first.entered():
        assert collective_keys() == mine


def test_the_last_of_several_threads_runs_gives_the_program_its_state(monkeypatch):
    """The first one to end leaves the other, which has the same, as it is."""

    def second():
        with Isolation(defaults).entered():
            is_inside.set()
            has_first_left.wait(PATIENCE)
            found.append(tf.keras.config.epsilon())
            escaping.append(sys.stdout.errors)

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    escaping = []
    defaults = {**program_defaults(), "epsilon": 0.5}
    is_inside, has_first_left, found = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=second)
    with Isolation(defaults).entered():
        thread.start()
        assert is_inside.wait(PATIENCE)
        assert program_defaults()["epsilon"] == 1e-7
    found.append(tf.keras.config.epsilon())
    has_first_left.set()
    thread.join()
    assert (found, tf.keras.config.epsilon()) == ([0.5, 0.5], 1e-7)
    assert (escaping, sys.stdout.errors) == (["backslashreplace"], "strict")
