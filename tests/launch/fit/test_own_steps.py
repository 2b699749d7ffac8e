"""Compiled models with a `train_step` of their own: as Keras's `fit` trains them, on one device and on several."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from crankshaft import UsageError, fit

from .own_step_models import CASES, KINDS, WEIGHTS, X, Y, gan, guide, slow, vae

HOW = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}  # the last batch has 6 examples
ON_SEVERAL = [name for name, (*_, several) in CASES.items() if several]


class Logs(keras.callbacks.Callback):
    """Keeps the logs of each epoch and evaluation."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def trained(train, make, data, **how):
    """Trains a model; returns its weights, its optimizers' variables, its history, and the callbacks' logs."""
    keras.utils.set_random_seed(1)
    made, logs = make(), Logs()
    history = train(made, *data, callbacks=[logs], **HOW | how).history
    return made, getattr(history, "history", history), logs.epochs


def optimizer_values(model):
    optimizers = [model.optimizer, *getattr(model, "optimizers", {}).values()]
    return [v.numpy() for optimizer in optimizers if optimizer.built for v in optimizer.variables]


@pytest.mark.parametrize("name", CASES)
def test_one_device_has_the_bits_of_kerass_fit(name):
    make, data, _ = CASES[name]
    how = {"validation_data": tuple(part[:17] for part in data)} if name in ("guide", "vae", "distiller") else {}
    theirs, expected, logs = trained(keras.Model.fit, make, data, **how)
    mine, history, our_logs = trained(fit, make, data, jit="off", **how)
    for ours, other in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)
    for ours, other in zip(optimizer_values(mine), optimizer_values(theirs), strict=True):
        np.testing.assert_array_equal(ours, other)
    assert_same_metrics(name, history, expected, 1e-6)
    for ours, other in zip(our_logs, logs, strict=True):
        assert_same_metrics(name, ours, other, 1e-6)


def assert_same_metrics(name, ours, theirs, tolerance):
    """Of values that are no metric's Keras shows the last batch's, and a run their means."""
    assert ours.keys() - {"skipped"} == theirs.keys()
    others = {"distilled", "rate", "second", *({"loss"} if name in ("follower", "scaled", "slow") else ())}
    for key in theirs.keys() - others:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=tolerance, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", ON_SEVERAL)
def test_replicas_compute_what_kerass_fit_computes(name, replicas):
    """Sums of float32 in another order; Adam divides by roots of small sums."""
    make, data, _ = CASES[name]
    data = tuple(part[:37] for part in data)  # the last batch has one example
    how = {"validation_data": tuple(part[:17] for part in data)} if name in ("guide", "distiller") else {}
    theirs, expected, _ = trained(keras.Model.fit, make, data, **how)
    run = fit(make, *data, strategy="mirrored", seed=1, num_virtual_devices=replicas, **HOW, **how)
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-5, atol=2e-5)
    assert_same_metrics(name, run.history.history, expected, 2e-5)


class Stops(keras.callbacks.Callback):
    """Ends the training after the second batch of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= (self.epoch, batch) == (1, 1)


@pytest.mark.parametrize("name", CASES)
def test_a_resume_in_mid_epoch_has_the_same_bits(name, tmp_path):
    make, data, _ = CASES[name]
    whole, expected, _ = trained(fit, make, data, jit="off")
    keras.utils.set_random_seed(1)
    first = fit(make(), *data, run_dir=tmp_path, jit="off", callbacks=[Stops()], **HOW)
    assert first.result["step"] == 6
    keras.utils.set_random_seed(1)
    run = fit(resumed := make(), *data, run_dir=tmp_path, jit="off", **HOW)
    assert run.result["step"] == 12
    for ours, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)
    for ours, other in zip(optimizer_values(resumed), optimizer_values(whole), strict=True):
        np.testing.assert_array_equal(ours, other)
    assert run.history.history == expected
