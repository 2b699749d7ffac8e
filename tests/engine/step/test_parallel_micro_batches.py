"""Micro-batches in parallel: cores that take one each train what one core trains."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import devices
from crankshaft.models.cnn import Model as Cnn
from tests.arrays import assert_close, assert_same
from tests.engine.trainers import pictures
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # sums in another order, over nine updates


@pytest.mark.parametrize(
    ("precision", "form"),
    [
        ("float32", tuple),
        pytest.param("float32", tf.data.Dataset.from_tensor_slices, marks=pytest.mark.slow),
        pytest.param("float16", tuple, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_learn_what_the_whole_learns(bench, precision, form):
    """50 examples by 16: micro-batches of 6, 5 and 5, and an epoch's last batch of two. SGD blows no difference up."""
    common = {"num_classes": 4, "optimizer": "sgd", "learning_rate": 0.1, "precision": precision, "shuffle": False}
    whole, parallel = (bench(Cnn(), form(pictures(50)), 16, parallel_micro_batches=n, **common) for n in (1, 3))
    rounding = 1e-5 if precision == "float32" else 1e-2
    np.testing.assert_allclose(parallel.curve(9), whole.curve(9), rtol=rounding)
    if precision == "float32":
        assert_close(parallel.trainer.model.weights, whole.trainer.model.weights, **ROUNDING)


def test_dropout_of_micro_batches_is_the_same_in_each_run(bench):
    """Bits: whichever micro-batch's threads come first."""
    common = {"num_classes": 4, "parallel_micro_batches": 3}
    made, found = bench(Cnn(dropout=0.5), pictures(44), 16, **common), []
    put_back = made.state.make_restorer()
    for _ in range(3):
        put_back()
        made.train(9)
        found.append(made.arrays())
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_a_process_whose_threads_are_there_keeps_batches_whole(bench):
    bench(Cnn(), pictures(44), 16, num_classes=4)
    assert devices.set_threads_per_micro_batch(3) == 1


# Forked before TensorFlow has run anything: threads are set before they start.
PROGRAM = """
import os
import tensorflow as tf
from crankshaft.engine.machine import cpus
from crankshaft.launch.composition import devices
for cores in (2, 3):
    if os.fork() == 0:
        cpus.usable_cores = lambda: cores
        devices.create("mirrored", num_virtual_devices=2)
        threads = tf.config.threading
        print(threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_operations_have_one_thread_where_replicas_fill_the_cores():
    """On two cores, and not on three: 0 leaves the number to TensorFlow."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert found.stdout.splitlines() == ["1 2", "0 0"]
