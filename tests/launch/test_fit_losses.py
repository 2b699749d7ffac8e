"""Losses that are no means over examples, or of a model's own: on replicas as Keras on one device, or an error."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from crankshaft import UsageError, fit

rng = np.random.default_rng(0)
X = rng.normal(size=(29, 3)).astype("float32")
Y = (X @ rng.normal(size=(3, 4)) + 0.3 > 0).astype("float32")
KINDS = rng.integers(0, 3, 29)
WEIGHTS = rng.uniform(0.5, 2.0, 29).astype("float32")
HOW = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}  # the last batch has 5


def of_found(y_true, y_pred):
    """A sum over the batch, divided by another, in one number."""
    return keras.ops.sum(keras.ops.square(y_true - y_pred) * y_true) / keras.ops.sum(y_true)


def of_pairs(y_true, y_pred):
    """One value an example, which compares its outputs with all others'."""
    return keras.ops.logsumexp(y_pred @ keras.ops.transpose(y_pred), -1) - keras.ops.mean(y_true, -1)


def by_object(y_true, y_pred):
    return keras.losses.Huber(0.3)(y_true, y_pred)


LOSSES = {
    "dice": keras.losses.Dice(),
    "circle": keras.losses.Circle(gamma=3),
    "found": of_found,
    "pairs": of_pairs,
    "object": by_object,
}


def model():
    keras.utils.set_random_seed(1)
    features = keras.Input([3])
    outputs = {name: keras.layers.Dense(4, "sigmoid", name=name)(features) for name in LOSSES}
    outputs["circle"] = keras.layers.UnitNormalization()(outputs["circle"])
    made = keras.Model(features, outputs)
    made.compile(keras.optimizers.SGD(0.5), LOSSES)
    return made


def labels(part=slice(None)):
    return {name: KINDS[part] if name == "circle" else Y[part] for name in LOSSES}


@pytest.mark.parametrize("weights", [None, pytest.param(WEIGHTS, marks=pytest.mark.slow)], ids=["", "weighed"])
def test_two_replicas_minimize_what_keras_minimizes_on_one_device(weights):
    plain, validation = model(), (X[:7], labels(slice(7)))
    right = plain.fit(X, labels(), sample_weight=weights, validation_data=validation, validation_batch_size=5, **HOW)
    two = {"strategy": "mirrored", "num_virtual_devices": 2, "validation_batch_size": 5}
    run = fit(model, X, labels(), sample_weight=weights, validation_data=validation, **HOW, **two)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(run.history.history[name], right.history[name], rtol=1e-4, err_msg=name)
    for mine, theirs in zip(run.model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-5, err_msg=theirs.path)


def test_a_part_of_a_batch_is_no_batch():
    """Micro-batches: what is no mean over examples is refused, and what is one is computed."""

    def line(loss, *first):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([*first, keras.layers.Dense(4, "sigmoid")])
        made.compile(keras.optimizers.SGD(0.5), loss)
        return made

    for loss, name in ((keras.losses.Dice(), "dice"), (of_pairs, "of_pairs")):
        with pytest.raises(UsageError, match=f"accumulate_steps: {name} is a loss of a batch as a whole, not a mean"):
            fit(lambda loss=loss: line(loss), X, Y, accumulate_steps=2, **HOW)
    once, halves = (fit(lambda: line(by_object), X, Y, accumulate_steps=steps, **HOW) for steps in (1, 2))
    for one, two in zip(once.model.weights, halves.model.weights, strict=True):
        np.testing.assert_allclose(two.numpy(), one.numpy(), atol=1e-6)
    rows = np.repeat(X[:, None], 2, 1)
    with pytest.raises(UsageError, match="accumulate_steps: a loss with a mask, or with a"):
        fit(
            lambda: line("mse", keras.layers.Masking(-9.0)),
            rows,
            np.repeat(Y[:, None], 2, 1),
            accumulate_steps=2,
            **HOW,
        )


@pytest.mark.parametrize("by_output", [True, False], ids=["of outputs", "of examples"])
def test_labels_that_are_missing_count_for_nothing_where_their_weight_is_zero(by_output):
    """Not in the loss, its gradient or a weighted metric; labels of two tasks, NaN or infinite."""
    counts = {name: (np.arange(29) % every > 0).astype("float32") for name, every in (("one", 3), ("two", 4))}
    if not by_output:
        counts = dict.fromkeys(counts, counts["one"])
    finite = {"one": Y[:, :1], "two": Y[:, 1:]}
    missing = {name: np.where(counts[name][:, None] > 0, y, np.inf) for name, y in finite.items()}
    missing["two"][counts["two"] == 0, 0] = np.nan

    def two_tasks():
        keras.utils.set_random_seed(2)
        features = keras.Input([3])
        body = keras.layers.Dense(3, "tanh")(features)
        outputs = {name: keras.layers.Dense(y.shape[1], "sigmoid", name=name)(body) for name, y in finite.items()}
        made = keras.Model(features, outputs)
        losses = {"one": "mse", "two": "binary_crossentropy"}
        made.compile(keras.optimizers.SGD(0.5), losses, weighted_metrics={"one": "mae", "two": "mse"})
        return made

    weights = counts if by_output else counts["one"]
    runs = [fit(two_tasks, X, y, sample_weight=weights, jit="off", **HOW) for y in (finite, missing)]
    assert runs[0].history.history == runs[1].history.history
    for one, other in zip(runs[0].model.weights, runs[1].model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


class Own(keras.Model):
    """Computes its loss from the features too, and keeps metrics of numbers and of examples."""

    def __init__(self, is_mean=True):
        super().__init__()
        self.is_mean = is_mean
        self.hidden = keras.layers.Dense(4, "relu", kernel_regularizer="l2", kernel_initializer="ones")
        self.head = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(1))
        self.doubled = keras.metrics.Mean(name="doubled")
        self.error = keras.metrics.MeanSquaredError(name="error")

    def get_config(self):
        return {"is_mean": self.is_mean}

    def call(self, x):
        return self.head(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        doubled = keras.ops.mean(keras.ops.square(self(2.0 * x) - y))
        if not self.is_mean:
            doubled = keras.ops.sqrt(doubled)
        self.doubled.update_state(doubled)
        self.error.update_state(y, y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.5 * doubled


def own(is_mean=True):
    made = Own(is_mean)
    made(X[:1])
    made.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return made


TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


@pytest.mark.parametrize("how", [{}, TWO, {"accumulate_steps": 2}], ids=["one device", "replicas", "micro-batches"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighed"])
@pytest.mark.parametrize("is_mean", [True, False], ids=["a mean", "no mean"])
def test_a_loss_of_the_models_own_is_keras_on_replicas_and_uneven_batches_too(is_mean, weights, how):
    theirs, ours = own(is_mean), own(is_mean)
    arguments = {"sample_weight": weights, "validation_data": (X[:24], Y[:24]), **HOW}
    expected = theirs.fit(X, Y, **arguments).history
    if "accumulate_steps" in how and not is_mean:
        with pytest.raises(UsageError, match="compute_loss is a loss of a batch as a whole"):
            fit(ours, X, Y, **arguments, **how)
        return
    found = fit(ours, X, Y, **arguments, **how).history.history
    assert list(found) == list(expected)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)
    for name in ("val_loss", "val_doubled", "val_error", "error", "mae"):  # of even batches, or by example
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


class Masked(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight)


def test_a_loss_of_the_models_own_under_a_mask_counts_steps_of_all_replicas():
    tokens = rng.integers(0, 3, (29, 5)) * (rng.uniform(size=(29, 1)) > 0.3)

    def made():
        keras.utils.set_random_seed(2)
        model = Masked([keras.layers.Embedding(3, 4, mask_zero=True), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    theirs = made()
    theirs.fit(tokens, tokens, **HOW)
    ours = fit(made, tokens, tokens, **HOW, **TWO).model
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


class Halved(keras.Sequential):
    """Has one output, which its loss takes as two."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, tuple(keras.ops.split(y_pred, 2, -1)), sample_weight)


def test_a_loss_of_the_models_own_may_divide_an_output():
    def made():
        model = Halved([keras.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
        return model

    labels, theirs = (Y[:24, :1], Y[:24, 1:2]), made()
    expected = theirs.fit(X[:24], labels, **HOW).history
    for model, how in ((made(), {}), (made, TWO)):
        run = fit(model, X[:24], labels, **HOW, **how)
        assert run.history.history.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(run.history.history[name], values, rtol=1e-5, err_msg=name)
        for mine, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_a_distiller_is_trained():
    def distiller():
        keras.utils.set_random_seed(5)
        teacher, student = (
            keras.Sequential([keras.Input([3]), keras.layers.Dense(size, "relu"), keras.layers.Dense(3, "softmax")])
            for size in (8, 2)
        )
        made = keras.distillation.Distiller(teacher, student, keras.distillation.LogitsDistillation(temperature=2.0))
        made.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return made

    theirs = distiller()
    expected = theirs.fit(X[:24], KINDS[:24], **HOW).history
    for model, how in ((distiller(), {}), (distiller, TWO)):
        run = fit(model, X[:24], KINDS[:24], **HOW, **how)
        assert list(run.history.history) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(run.history.history[name], values, rtol=1e-5, err_msg=name)
        for mine, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_a_metric_that_compute_loss_can_not_divide_is_named():
    class Unused(Own):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.square(y - y_pred))

    class OfBatch(Own):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            self.doubled.update_state(1.0)
            self.error.update_state(0.0, keras.ops.mean(y_pred))
            return keras.ops.mean(keras.ops.square(y - y_pred))

    for kind, why in (
        (Unused, "has a metric in doubled, which"),
        (OfBatch, "updates error, which is not a Mean, with"),
    ):
        made = kind()
        made.compile("sgd")
        with pytest.raises(UsageError, match=why):
            fit(made, X, Y, **HOW)
