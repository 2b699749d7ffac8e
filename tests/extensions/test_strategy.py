"""A strategy of one's own, registered by a name: it trains the bits of the one that it is like."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.strategies import register
from crankshaft.engine.strategies.replicated import Replicated
from tests.arrays import assert_same

pytestmark = pytest.mark.thorough

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - X.mean())[:, 0])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_strategy_of_ones_own_trains_and_resumes(devices, tmp_path):
    def on_cpus(options):
        if devices == 1:
            return Replicated("on_cpus", tf.distribute.OneDeviceStrategy("CPU:0"), options)
        return Replicated("on_cpus", tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), options)

    register("on_cpus", on_cpus)
    flags = {"data": ((X, X[:, :1]), None), "global_batch_size": 8, "jit": "off"}
    for steps in (2, 4):
        own = crankshaft.run(Line, strategy="on_cpus", run_dir=tmp_path / "run", train_steps=steps, **flags)
    like = {1: {}, 2: {"strategy": "mirrored", "num_virtual_devices": 2}}[devices]
    assert_same(own.model.get_weights(), crankshaft.run(Line, train_steps=4, **like, **flags).model.get_weights())
    assert own.result["strategy"] == "on_cpus"
