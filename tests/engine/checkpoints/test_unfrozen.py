"""A run that comes to train other variables: what is of those it trained before begins again, and nothing else does."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean
from crankshaft.engine.checkpoints import Checkpoints
from crankshaft.engine.hooks import saving
from crankshaft.engine.internals.errors import CheckpointError

DATA = tuple(np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((40, 5), (40,)))


class Net(Trainer):
    """Whose first layer may be frozen."""

    def __init__(self, frozen: bool):
        super().__init__()
        self.frozen = frozen

    def build_model(self):
        first = tf.keras.layers.Dense(4, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(1))
        first.trainable = not self.frozen
        return tf.keras.Sequential([first, tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        return mean((outputs[:, 0] - batch[1]) ** 2)


def checkpoints(made, folder) -> Checkpoints:
    return Checkpoints(folder, made.state.checkpoint, keep=None, about={"updated": made.state.updated()})


@pytest.fixture
def made(bench):
    def make(frozen, optimizer="adam", replicas=1, **options):
        return bench(Net(frozen), DATA, 8, replicas, optimizer=optimizer, **{"learning_rate": 0.01, **options})

    return make


@pytest.fixture
def frozen(made, tmp_path):
    """frozen(optimizer, ...): the weights that a run of ten steps with a frozen layer has saved into `tmp_path`."""

    def train(*args, **options):
        run = made(True, *args, **options)
        run.train(10)
        manager = checkpoints(run, tmp_path)
        manager.save(10, {"state": run.state.host_state()}, wait=True)
        return [weight.numpy() for weight in run.trainer.model.weights]

    return train


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("momentum", "rmsprop", "nadam")]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("optimizer", ["adam", *OTHERS])
def test_slots_begin_again_as_a_new_optimizers(made, frozen, tmp_path, caplog, optimizer, replicas):
    """All of them, and the correction of their bias: of an old count it would make the first updates three times as
    large, as Adam's second moment, 0.001 g^2, would be divided by 1 - 0.999^11."""
    weights = frozen(optimizer, replicas)
    run = made(False, optimizer, replicas)
    with pytest.raises(CheckpointError, match=r"does not fit the slots of optimizer .*give allow_changed_config"):
        saving.restore(checkpoints(run, tmp_path), run.state)
    assert saving.restore(checkpoints(run, tmp_path), run.state, begins_again=True).step == 10
    assert "begin again: the slots of optimizer (missing in the checkpoint" in caplog.text
    new = made(False, optimizer, replicas)
    for weight, value in zip(new.trainer.model.weights, weights, strict=True):
        weight.assign(value)
    new.jump(10)
    np.testing.assert_array_equal(run.curve(20), new.curve(20))
    for a, b in zip(run.trainer.model.weights, new.trainer.model.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_began_again_is_resumed_to_the_same_bits(made, frozen, tmp_path):
    frozen()
    straight = made(False)
    saving.restore(checkpoints(straight, tmp_path), straight.state, begins_again=True)
    straight.train(15)
    checkpoints(straight, tmp_path).save(15, {"state": straight.state.host_state()}, wait=True)
    straight.train(20)
    resumed = made(False)
    assert saving.restore(checkpoints(resumed, tmp_path), resumed.state).step == 15
    resumed.train(20)
    for a, b in zip(straight.arrays(), resumed.arrays(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_layer_that_is_frozen_again_takes_its_slots_away(made, tmp_path):
    run = made(False)
    run.train(5)
    checkpoints(run, tmp_path).save(5, {"state": run.state.host_state()}, wait=True)
    again = made(True)
    with pytest.raises(CheckpointError, match=r"the slots of optimizer \(only in the checkpoint"):
        saving.restore(checkpoints(again, tmp_path), again.state)
    saving.restore(checkpoints(again, tmp_path), again.state, begins_again=True)
    before = again.trainer.model.weights[0].numpy()
    again.train(8)
    np.testing.assert_array_equal(again.trainer.model.weights[0], before)


def test_averages_of_what_was_trained_before_go_on(made, frozen, tmp_path):
    """And those of what was not begin at its present weights."""
    frozen(ema_decay=0.5)
    run = made(False, ema_decay=0.5)
    saving.restore(checkpoints(run, tmp_path), run.state, begins_again=True)
    first, bias, *trained = run.trainer.optimizer.weight_average.shadows
    np.testing.assert_array_equal(first, run.trainer.model.weights[0])
    np.testing.assert_array_equal(bias, run.trainer.model.weights[1])
    assert not np.array_equal(trained[0], run.trainer.model.weights[2])


def test_another_model_is_refused_though_parts_may_begin_again(made, frozen, bench, tmp_path):
    class Other(Net):
        def build_model(self):
            return tf.keras.Sequential([tf.keras.layers.Dense(6), tf.keras.layers.Dense(1)])

    frozen()
    run = bench(Other(False), DATA, 8, optimizer="adam")
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        saving.restore(checkpoints(run, tmp_path), run.state, begins_again=True)
