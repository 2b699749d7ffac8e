"""A second `fit` of a model uses the compiled steps of the first, and samples other numbers."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.keras_models.keras_trainer import KerasTrainer
from crankshaft.launch.run.compiled_cache import ATTRIBUTE

keras = tf.keras
X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
OTHER = X[::-1] ** 2  # data of the same form
HOW = {"batch_size": 10, "verbose": 0}


@pytest.fixture
def traces(monkeypatch):
    """Counts the traces of steps."""
    noted = []
    step = KerasTrainer.train_step
    monkeypatch.setattr(KerasTrainer, "train_step", lambda self, batch: (noted.append(1), step(self, batch))[1])
    return noted


def compiled(model):
    model.compile("adam", "mse", metrics=["mae"])
    return model


def model(*layers):
    layers = layers or (keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
    return compiled(keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)]))


def forget(model):
    """Makes the next `fit` compile."""
    del vars(model)[ATTRIBUTE]


def check_alike(one, other):
    for mine, theirs in zip(
        [*one.weights, *one.optimizer.variables], [*other.weights, *other.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("replicas", "jit"), [(1, "off"), (2, "off"), pytest.param(1, "auto", marks=pytest.mark.slow)])
def test_a_second_fit_compiles_nothing_and_trains_the_same_on_other_data(replicas, jit, traces):
    def made():
        keras.utils.set_random_seed(3)
        if replicas == 1:
            return model()
        with tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)]).scope():
            return model(keras.layers.Dense(8, "relu"))

    epochs = 26 if jit == "auto" else 2  # of two steps; after 50 steps the first measures whether to use XLA
    how = {**HOW, "jit": jit, "epochs": epochs, "validation_data": (X, Y) if replicas == 1 else None}
    kept, fresh, runs = made(), made(), []
    for data in (X, OTHER):
        before = len(traces)
        runs.append(crankshaft.fit(kept, data, Y, **how))
        assert (len(traces) > before) == (len(runs) == 1)
        again = crankshaft.fit(fresh, data, Y, **how)
        assert runs[-1].history.history == again.history.history
        forget(fresh)
    check_alike(kept, fresh)
    assert [run.step for run in runs] == [2 * epochs] * 2
    if replicas == 1:
        assert runs[0].evaluate() == runs[1].evaluate()  # each of the model as it is now
        assert int(kept.optimizer.iterations) == 4 * epochs


class Own(keras.Model):
    """A model with code of the program's, some of which Python decides as it is traced."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor = keras.layers.Dense(1), 1.0

    def call(self, x):
        return self.layer(x) * self.factor


def own_loss(labels, outputs):
    return tf.reduce_mean(tf.square(labels - outputs), -1)


def test_own_code_compiles_again_only_after_compile(traces, tmp_path):
    def fits(fit, **more):
        before = len(traces)
        fit(X, Y, **{**HOW, **more})
        return len(traces) > before

    keras.utils.set_random_seed(3)
    ours, theirs = Own(), Own()
    for each in (theirs, ours):
        each(X)
    ours.set_weights(theirs.get_weights())
    fit = functools.partial(crankshaft.fit, ours)
    for factor, compiles in ((1.0, True), (2.0, False), (2.0, True), (0.5, False)):
        for each in (ours, theirs):
            each.factor = factor
            if compiles:
                each.compile("adam", own_loss)
        assert fits(fit, shuffle=False) == compiles
        theirs.fit(X, Y, **HOW, shuffle=False)
        np.testing.assert_allclose(ours.layer.get_weights()[0], theirs.layer.get_weights()[0], rtol=1e-6)
    ours.layer.trainable = False
    assert fits(fit)
    assert not fits(fit)
    for changes in ({"seed": 1}, {"batch_size": 4}, {"sample_weight": np.ones(20)}, {"validation_data": (X, Y)}):
        assert fits(fit, **changes), changes
    assert fits(fit, run_dir=str(tmp_path))


class Order(keras.layers.Layer):
    """Notes the examples of each batch, and what it samples."""

    seen: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, x, training=False):
        if training:
            noise = keras.random.uniform([3], seed=self.seeds)
            tf.py_function(lambda *batch: self.seen.append([each.numpy().tolist() for each in batch]), [x, noise], [])
        return x


def test_a_later_fit_samples_other_orders_and_masks(tmp_path):
    def fit(made, **more):
        Order.seen.clear()
        crankshaft.fit(made, X, Y, **HOW, **more)
        order, noise = (sorted(map(str, each)) for each in zip(*Order.seen, strict=True))
        return order, noise

    models = model(Order()), model(Order())
    samples = []
    for number in range(3):
        if number == 2:
            compiled(models[0])  # its optimizer's updates count from 0 again
        samples.append(fit(models[0]))
        assert fit(models[1]) == samples[-1]
    samples.append(fit(models[0], epochs=2))
    parts = [fit(models[1], epochs=epochs, run_dir=tmp_path) for epochs in (1, 2)]  # the second is resumed
    for kind, whole in enumerate(samples[-1]):
        assert sorted(parts[0][kind] + parts[1][kind]) == whole
        assert len({str(each[kind]) for each in samples}) == 4


def test_a_model_keeps_no_data_and_is_freed():
    made = model()
    run = crankshaft.fit(made, X.copy(), Y, **HOW)
    data = weakref.ref(run.strategy.training.feed)
    trainer, freed = weakref.ref(run.trainer), weakref.ref(made)
    del run
    gc.collect()
    assert data() is None
    assert trainer() is not None
    del made
    gc.collect()
    assert freed() is None
    assert trainer() is None
