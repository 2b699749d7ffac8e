"""What replicas along data only exchange: all with all, and nothing along `model`."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.mesh.layout import Mesh, current_mesh, local_replicas
from tests.logical_cpus import make_four


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_exchange_along_data_and_are_alone_along_model(replicas):
    make_four()
    strategy, mesh = tf.distribute.MirroredStrategy([f"cpu:{number}" for number in range(replicas)]), Mesh()

    def step():
        mine = tf.cast(mesh.data.rank, tf.float32) + tf.constant([1.0, 2.0])
        axes = mesh.data, mesh.all_replicas, mesh.model
        return [(axis.all_reduce(mine), axis.all_gather(mine), *axis.concatenate([mine, -mine])) for axis in axes]

    found = strategy.run(tf.function(step, autograph=False))
    for replica in range(replicas):
        of_all = np.float32([[n + 1, n + 2] for n in range(replicas)])
        for axis, ranks in zip(found, [slice(None), slice(None), slice(replica, replica + 1)], strict=True):
            given = of_all[ranks]
            expected = given.sum(0), given, given.ravel(), -given.ravel()
            for value, wanted in zip(axis, expected, strict=True):
                np.testing.assert_array_equal(strategy.experimental_local_results(value)[replica], wanted)
    assert local_replicas(strategy) == range(replicas)
    with strategy.scope():
        assert mesh.shape == {"data": replicas, "model": 1}


def fails_within(scope):
    with scope as entered:
        assert current_mesh() is entered
        raise KeyError


def test_the_mesh_of_a_scope_is_the_current_one_within_it():
    mesh = Mesh()
    with pytest.raises(KeyError):
        fails_within(mesh.scope())
    assert current_mesh() is not mesh
