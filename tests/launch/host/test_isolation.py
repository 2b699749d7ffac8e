"""State of the process that a run has to itself."""

import tensorflow as tf

from crankshaft.engine.internals.tensorflow import is_deterministic, set_deterministic
from crankshaft.launch.host.isolation import Isolation


def test_a_program_samples_without_a_seed_after_and_between_runs_whose_kernels_are_deterministic():
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
