"""A run that comes to train other variables: the state of those it trained before goes on, and the others' is new."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints
from crankshaft.engine.errors import CheckpointError
from crankshaft.engine.hooks import saving
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

DATA = tuple(np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((40, 5), (40,)))


class Net(Squares):
    """Whose first layer may be frozen."""

    def __init__(self, frozen: bool):
        super().__init__()
        self.frozen = frozen

    def build_model(self):
        first = tf.keras.layers.Dense(4, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(1))
        first.trainable = not self.frozen
        return tf.keras.Sequential([first, tf.keras.layers.Dense(1, kernel_initializer="ones")])


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


def weights_of(made) -> list[np.ndarray]:
    return [weight.numpy() for weight in made.trainer.model.weights]


def resumed_and_new(made, frozen, folder, caplog, optimizer, replicas=1):
    """A run that trains all weights from the checkpoint on, and one with these weights and a new optimizer."""
    weights = frozen(optimizer, replicas)
    run, new = made(False, optimizer, replicas), made(False, optimizer, replicas)
    with pytest.raises(CheckpointError, match=r"another optimizer state \(missing .*set allow_changed_config"):
        saving.restore(checkpoints(run, folder), run.state)
    assert saving.restore(checkpoints(run, folder), run.state, allow_changed=True).step == 10
    assert "only what matches is restored: missing in the checkpoint (" in caplog.text
    for weight, value in zip(new.trainer.model.weights, weights, strict=True):
        weight.assign(value)
    new.jump(10)
    return run, new


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("momentum", "rmsprop"))]
)
def test_slots_go_on_by_the_names_of_their_weights(made, frozen, tmp_path, caplog, optimizer, replicas):
    """Those of weights that were frozen are a new optimizer's, with the correction of their bias: of an old count it
    would make the first updates three times as large, as Adam's second moment, 0.001 g^2, would be divided by
    1 - 0.999^11."""
    run, new = resumed_and_new(made, frozen, tmp_path, caplog, optimizer, replicas)
    still_frozen = made(True, optimizer, replicas)
    saving.restore(checkpoints(still_frozen, tmp_path), still_frozen.state)
    for each in (run, new, still_frozen):
        each.train(11)
    for value, expected in zip(weights_of(run), weights_of(new)[:2] + weights_of(still_frozen)[2:], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert not np.allclose(weights_of(new)[2], weights_of(run)[2], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slots_of_keras_begin_again_as_a_new_optimizers(made, frozen, tmp_path, caplog, replicas):
    """All of them, with the correction of their bias: Keras does not keep them by name."""
    run, new = resumed_and_new(made, frozen, tmp_path, caplog, "nadam", replicas)
    np.testing.assert_array_equal(run.curve(20), new.curve(20))
    for a, b in zip(weights_of(run), weights_of(new), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_optimizer_takes_its_own_slots_and_counts_from_zero(made, frozen, tmp_path):
    frozen("momentum")
    run = made(True, "adam")
    saving.restore(checkpoints(run, tmp_path), run.state, allow_changed=True)
    assert run.trainer.optimizer.iterations.numpy() == 10
    np.testing.assert_array_equal(run.trainer.optimizer.update_counts, [0, 0])
    run.train(11)
    np.testing.assert_array_equal(run.trainer.optimizer.update_counts, [1, 1])


def test_what_began_again_is_resumed_to_the_same_bits(made, frozen, tmp_path):
    frozen()
    straight = made(False)
    saving.restore(checkpoints(straight, tmp_path), straight.state, allow_changed=True)
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
    with pytest.raises(CheckpointError, match=r"another optimizer state \(only in the checkpoint"):
        saving.restore(checkpoints(again, tmp_path), again.state)
    saving.restore(checkpoints(again, tmp_path), again.state, allow_changed=True)
    before = again.trainer.model.weights[0].numpy()
    again.train(8)
    np.testing.assert_array_equal(again.trainer.model.weights[0], before)


def test_averages_of_what_was_trained_before_go_on(made, frozen, tmp_path):
    """And those of what was not begin at its present weights."""
    frozen(ema_decay=0.5)
    run = made(False, ema_decay=0.5)
    saving.restore(checkpoints(run, tmp_path), run.state, allow_changed=True)
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
        saving.restore(checkpoints(run, tmp_path), run.state, allow_changed=True)
