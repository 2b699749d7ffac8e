"""Micro-batches in parallel: cores that take one each train what one core trains."""

import subprocess
import sys

import numpy as np
import pytest

from crankshaft.engine.strategies import devices
from crankshaft.models.cnn import Model as Cnn
from tests.waiting import PATIENCE

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # sums in another order, over nine updates


def images(examples=44, size=12):
    rng = np.random.default_rng(0)
    return rng.normal(size=(examples, size, size, 1)).astype(np.float32), rng.integers(0, 4, examples).astype(np.int32)


@pytest.mark.parametrize("precision", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_micro_batches_learn_what_the_whole_learns(bench, precision):
    """44 examples by 16: micro-batches of 6, 5 and 5, and of 4 at the end of each epoch. SGD blows no difference up."""
    common = {"num_classes": 4, "optimizer": "sgd", "learning_rate": 0.1, "precision": precision}
    whole, parallel = (bench(Cnn(), images(), 16, parallel_micro_batches=n, **common) for n in (1, 3))
    rounding = 1e-5 if precision == "float32" else 1e-2
    np.testing.assert_allclose(parallel.curve(9), whole.curve(9), rtol=rounding)
    if precision == "float32":
        for a, b in zip(parallel.arrays(), whole.arrays(), strict=True):
            np.testing.assert_allclose(a, b, **ROUNDING)


def test_dropout_of_micro_batches_is_the_same_in_each_run(bench):
    """Bits: whichever micro-batch's threads come first."""
    common = {"num_classes": 4, "parallel_micro_batches": 3}
    runs = [bench(Cnn(dropout=0.5), images(), 16, **common) for _ in range(2)]
    for each in runs:
        each.train(9)
    for a, b in zip(*(each.arrays() for each in runs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_process_whose_threads_are_there_keeps_batches_whole(bench):
    bench(Cnn(), images(), 16, num_classes=4)
    assert devices.set_threads_per_micro_batch(3) == 1


# Forked before TensorFlow has run anything: threads are set before they start.
PROGRAM = """
import os
import tensorflow as tf
from crankshaft.engine.machine import cpus
from crankshaft.engine.strategies import devices
for cores in (2, 3):
    if os.fork() == 0:
        cpus.usable_cores = lambda: cores
        devices.create("mirrored", num_virtual_devices=2)
        threads = tf.config.threading
        print(threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_operations_have_one_thread_where_replicas_fill_the_cores():
    """On two cores, and not on three: 0 leaves the number to TensorFlow."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert found.stdout.splitlines() == ["1 2", "0 0"]
