"""A second `fit` of a model uses the compiled steps of the first, unless anything that was compiled has changed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.internals.keras import with_attributes
from crankshaft.engine.internals.keras_content import KEPT, TracedContent

keras = tf.keras
X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
OTHER = X[::-1] ** 2  # data of the same form
HOW = {"batch_size": 10, "verbose": 0}


@pytest.fixture
def traces(monkeypatch):
    """Counts the traces of steps."""
    noted = []
    note = TracedContent.note
    monkeypatch.setattr(TracedContent, "note", lambda self, roots: (noted.append(1), note(self, roots)))
    return noted


def compiled(model):
    model.compile("adam", "mse", metrics=["mae"])
    return model


def model(*layers):
    layers = layers or (keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
    return compiled(keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)]))


def forget(model):
    """Makes the next `fit` compile."""
    del vars(model)[KEPT]


def check_alike(one, other):
    for mine, theirs in zip(
        [*one.weights, *one.optimizer.variables], [*other.weights, *other.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_second_fit_compiles_nothing_and_trains_the_same_on_other_data(replicas, traces):
    def made():
        keras.utils.set_random_seed(3)
        if replicas == 1:
            return model()
        with tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)]).scope():
            return model(keras.layers.Dense(8, "relu"))

    epochs = 26 if replicas == 1 else 2  # of two steps; after 50 steps the first measures whether to use XLA
    how = {**HOW, "epochs": epochs, "validation_data": (X, Y) if replicas == 1 else None}
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


def test_a_fit_after_any_change_compiles_again(traces):
    def made():
        keras.utils.set_random_seed(3)
        return model(keras.layers.Dense(8, "relu", kernel_regularizer="l2"), keras.layers.Dropout(0.3))

    kept, fresh = made(), made()
    crankshaft.fit(kept, X, Y, **HOW)
    crankshaft.fit(fresh, X, Y, **HOW)
    first, dropout = kept.layers[:2]
    dropout.rate = fresh.layers[1].rate = 0.0  # as Keras does not notice
    forget(fresh)
    before = len(traces)
    crankshaft.fit(kept, X, Y, **HOW)
    assert len(traces) > before
    crankshaft.fit(fresh, X, Y, **HOW)
    check_alike(kept, fresh)

    trainer = vars(kept)[KEPT].trainer
    for owner, name, value in (
        *(
            (dropout, "rate", 0.1),
            (dropout, "seed_generator", keras.random.SeedGenerator(1)),
            (first, "use_bias", False),
        ),
        *((first, "_trainable", False), (first, "activation", keras.activations.tanh), (first, "call", lambda x: x)),
        *((first.kernel_regularizer, "l2", 0.5), (first.kernel, "_regularizer", None), (kept.optimizer, "beta_1", 0.5)),
        *((first, "kernel_regularizer", lambda x: 0.0), (kept.optimizer, "_learning_rate", lambda: 0.1)),
        *((kept, "loss", "mae"), (kept, "optimizer", keras.optimizers.SGD()), (kept, "_compile_config", None)),
    ):
        assert trainer.is_current
        with with_attributes(owner, {name: value}):
            assert not trainer.is_current, name
    before = len(traces)
    for changes in ({"seed": 1}, {"batch_size": 4}, {"sample_weight": np.ones(20)}, {"validation_data": (X, Y)}):
        crankshaft.fit(kept, X, Y, **{**HOW, **changes})
        assert len(traces) > before, changes
        before = len(traces)


def test_what_may_read_anything_else_compiles_again(traces, tmp_path):
    class Sets(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.layers[0].rate = 0.0

        def on_train_end(self, logs=None):
            self.model.layers[0].rate = 0.3

    def fits(made, **first):
        crankshaft.fit(made, X, Y, **HOW, **first)
        before = len(traces)
        crankshaft.fit(made, X, Y, **HOW)
        return len(traces) > before

    assert fits(model(keras.layers.Lambda(lambda x: 2 * x)))
    assert fits(model(keras.layers.Dropout(0.3)), callbacks=[Sets()])
    assert fits(model(keras.layers.Dense(2)), run_dir=str(tmp_path))


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
