"""Which variable goes to which server: the biggest first, by a rehearsal that makes nothing. In this process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import StepOptions, Trainer, mean
from crankshaft.engine.build import prepare
from crankshaft.engine.state import TrainState
from crankshaft.engine.step.options import RunContext
from crankshaft.parts.parameter_servers.dry_run import dry_run
from crankshaft.parts.parameter_servers.placement import assign_servers

KIB = 1 << 10


def loads(weights, servers) -> list[int]:
    return [sum(w for w, s in zip(weights, servers, strict=True) if s == server) for server in range(max(servers) + 1)]


def test_the_biggest_goes_first_whatever_the_order_in_which_variables_are_made():
    weights = [1, 2, 3, 10, 4, 8]
    servers = assign_servers(weights, [None] * 6, 2)
    assert loads(weights, servers) == [14, 14]


def test_what_was_asked_for_is_there_and_weighs():
    servers = assign_servers([5, 5, 10], [1, None, None], 2)
    assert servers == [1, 1, 0]


def test_a_server_that_would_get_next_to_nothing_gets_nothing():
    assert assign_servers([1000 * KIB, 9 * KIB, 3 * KIB], [None] * 3, 2) == [0, 0, 0]
    assert assign_servers([1000 * KIB, 9 * KIB, 3 * KIB], [None, None, 1], 2) == [0, 1, 1]  # it takes part anyway
    assert assign_servers([100 * KIB, 6 * KIB, 2 * KIB], [None] * 3, 2) == [0, 1, 1]  # a twelfth is not nothing
    assert assign_servers([9000 * KIB, 300 * KIB], [None] * 2, 2) == [0, 1]  # nor is much of little a share
    assert assign_servers([], [], 2) == []


class Layers(Trainer):
    """Of a first small layer, and a second big one."""

    def build_model(self):
        with tf.device("/job:ps/task:1"):
            first = tf.keras.layers.Dense(8)
            first.build((None, 4))
        return tf.keras.Sequential([first, tf.keras.layers.Dense(512)])

    def loss(self, outputs, batch):
        return mean(outputs[:, 0])


def make(trainer: Trainer, **options) -> TrainState:
    state = TrainState(trainer)
    prepare(trainer, RunContext(StepOptions(**options), example=(np.zeros((1, 4), np.float32), np.zeros(1))))
    state.build()
    return state


@pytest.mark.parametrize(
    ("options", "times"),
    [({}, 3), ({"optimizer": "sgd"}, 1), ({"optimizer": "nadam"}, 3), ({"ema_decay": 0.9}, 4)],
    ids=["adam", "sgd", "a Keras optimizer", "an average"],
)
def test_slots_and_averages_weigh_with_their_variable(options, times):
    found = {each.path: each for each in dry_run(lambda: make(Layers(), **options))}
    kernel = next(each for path, each in found.items() if each.bytes == 4 * 8 * 512)
    assert kernel.path.endswith("kernel")
    assert kernel.weight == times * 16 * KIB
    assert not any("0000_" in path or "average" in path for path in found)


def test_a_device_in_build_model_is_known():
    devices = {each.bytes: each.device for each in dry_run(lambda: make(Layers()))}
    assert "/job:ps/task:1" in devices[4 * 4 * 8]
    assert devices[4 * 8 * 512] == ""


def test_a_rehearsal_makes_nothing_and_leaves_no_trace_in_names():
    def huge():
        table = tf.Variable(lambda: tf.zeros([1 << 32, 64]), name="table")  # 1 TiB
        table.assign_add(tf.ones([1 << 32, 64]))
        return tf.keras.layers.Dense(3)

    def layers_so_far() -> int:
        return int(tf.keras.layers.Dense(3).name.removeprefix("dense").removeprefix("_") or 0)

    before = layers_so_far()
    (table,) = dry_run(huge)
    assert table.weight == 1 << 40
    assert layers_so_far() == before + 1


def test_what_cannot_be_rehearsed_is_placed_as_it_comes():
    def asks():
        return tf.Variable(3.0).numpy()

    assert dry_run(asks) == []
