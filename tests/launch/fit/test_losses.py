"""Losses that are no means over examples, or of a model's own: on replicas as Keras on one device, or an error."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from crankshaft import UsageError, fit

rng = np.random.default_rng(0)
X = rng.normal(size=(29, 3)).astype("float32")
Y = (X @ rng.normal(size=(3, 4)) + 0.3 > 0).astype("float32")
KINDS = rng.integers(0, 3, 29)
WEIGHTS = rng.uniform(0.5, 2.0, 29).astype("float32")
HOW = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}  # the last batch has 5


def assert_same_weights(ours, theirs):
    """Two models' weights, whose gradients are sums of float32 in another order."""
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


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


@pytest.mark.thorough
@pytest.mark.parametrize("weights", [None, pytest.param(WEIGHTS, marks=pytest.mark.slow)], ids=["", "weighed"])
def test_two_replicas_minimize_what_keras_minimizes_on_one_device(weights):
    plain, validation = model(), (X[:5], labels(slice(5)))
    right = plain.fit(X, labels(), sample_weight=weights, validation_data=validation, validation_batch_size=5, **HOW)
    two = {"strategy": "mirrored", "num_virtual_devices": 2, "validation_batch_size": 5}
    run = fit(model, X, labels(), sample_weight=weights, validation_data=validation, **HOW, **two)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(run.history.history[name], right.history[name], rtol=1e-4, err_msg=name)
    for mine, theirs in zip(run.model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-5, err_msg=theirs.path)


def test_the_loss_of_a_step_that_a_loss_scale_skips_counts_as_in_keras():
    """Labels of this size overflow float16's gradients, by the first scales, in each of an epoch's steps."""
    features = np.random.default_rng(0).normal(size=(40, 3)).astype("f")
    data = {"x": features, "y": 100 * features.sum(1, keepdims=True), "shuffle": False, "epochs": 3, "batch_size": 8}
    histories, scales = [], []
    for trains, how in ((keras.Model.fit, {}), (fit, {"jit": "off"})):
        keras.utils.set_random_seed(0)
        made = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, dtype="mixed_float16")])
        made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse", metrics=["mae"])
        histories.append(trains(made, **data, verbose=0, **how).history)
        scales.append(float(made.optimizer.dynamic_scale))
    theirs, ours = (getattr(each, "history", each) for each in histories)
    assert scales[0] == scales[1] == 2.0**7
    assert ours["skipped"] == [1.0, 0.6, 0.0]
    for name in ("loss", "mae"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3)


@pytest.mark.thorough
def test_a_part_of_a_batch_is_no_batch():
    """Micro-batches: what is no mean over examples is refused, and what is one is computed."""

    def line(loss, *first, size=4):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([*first, keras.layers.Dense(size, "sigmoid")])
        made.compile(keras.optimizers.SGD(0.5), loss)
        return made

    many = 1 << 14  # entries of an example, as in images, whose means are alike
    for loss, name, size in (
        (keras.losses.Dice(), "dice", 4),
        (keras.losses.Dice(), "dice", many),
        (of_pairs, "of_pairs", 4),
    ):
        with pytest.raises(UsageError, match=f"accumulate_steps: {name} is a loss of a batch as a whole, not a mean"):
            fit(line(loss, size=size), X, np.resize(Y, [29, size]), accumulate_steps=2, **HOW)
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


@pytest.mark.parametrize(
    "by_output", [pytest.param(True, marks=pytest.mark.slow), False], ids=["of outputs", "of examples"]
)
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
# On one device the tests of models and losses below train too.
WHERE = [
    pytest.param({}, marks=pytest.mark.slow),
    TWO,
    pytest.param({"accumulate_steps": 2}, marks=pytest.mark.thorough),
]
FITS = (keras.Model.fit, fit)


@pytest.mark.thorough
@pytest.mark.parametrize("how", WHERE, ids=["one device", "replicas", "micro-batches"])
@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), WEIGHTS], ids=["", "weighed"])
@pytest.mark.parametrize("is_mean", [True, False], ids=["a mean", "no mean"])
def test_a_loss_of_the_models_own_is_keras_on_replicas_and_uneven_batches_too(is_mean, weights, how):
    theirs, ours = own(is_mean), own(is_mean)
    arguments = {"sample_weight": weights, "validation_data": (X[:24], Y[:24]), **HOW}
    if "accumulate_steps" in how and not is_mean:
        with pytest.raises(UsageError, match="compute_loss is a loss of a batch as a whole"):
            fit(ours, X, Y, **arguments, **how)
        return
    expected = theirs.fit(X, Y, **arguments).history
    found = fit(ours, X, Y, **arguments, **how).history.history
    assert list(found) == list(expected)
    assert_same_weights(ours, theirs)
    for name in ("val_loss", "val_doubled", "val_error", "error", "mae"):  # of even batches, or by example
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


class OfExamples(keras.Model):
    """Calls layers with state in its loss, and keeps metrics of an entry per example, with weights."""

    def __init__(self):
        super().__init__()
        self.normed = keras.layers.BatchNormalization(momentum=0.5)
        self.head = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(1))
        self.squares = keras.metrics.Mean(name="squares")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def get_config(self):
        return {}

    def call(self, x, training=False):
        return self.head(self.normed(x, training=training))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        squares = keras.ops.mean(keras.ops.square(self(2.0 * x, training=training) - y), -1)
        self.squares.update_state(squares, sample_weight=sample_weight)
        self.error.update_state(y, y_pred, sample_weight=sample_weight)
        return keras.ops.mean(squares) + super().compute_loss(x, y, y_pred, sample_weight)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), WEIGHTS], ids=["", "weighed"])
def test_a_loss_of_the_models_own_is_called_once_per_step_with_metrics_of_examples(weights):
    models = []
    for _ in FITS:
        models.append(OfExamples())
        models[-1](X[:1])
        models[-1].compile(keras.optimizers.SGD(0.05), "mse", weighted_metrics=["mae"])
    arguments = {"sample_weight": weights, "validation_split": 0.3, "epochs": 2, **HOW}
    theirs, ours = (train(made, X, Y, **arguments).history for train, made in zip(FITS, models, strict=True))
    assert list(ours.history) == list(theirs)
    for name in ("squares", "error", "val_squares", "val_error", "mae", "val_mae"):  # by example
        np.testing.assert_allclose(ours.history[name], theirs[name], rtol=1e-5, err_msg=name)
    assert_same_weights(models[1], models[0])
    assert not any("update_state" in vars(each) for each in models[1].metrics)


class Measures(keras.layers.Layer):
    """Updates metrics in its call: by a number, by entries per example, and by pairs of them."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        kinds = keras.metrics.Mean, keras.metrics.Mean, keras.metrics.MeanSquaredError
        self.kept = [kind(name=name) for kind, name in zip(kinds, ("power", "size", "error"), strict=True)]

    def call(self, x):
        arguments = (keras.ops.mean(x * x),), (keras.ops.mean(keras.ops.abs(x), -1),), (x, keras.ops.tanh(x))
        for metric, each in zip(self.kept, arguments, strict=True):
            metric.update_state(*each)
        return x


@pytest.mark.thorough
@pytest.mark.parametrize("how", WHERE, ids=["one device", "replicas", "micro-batches"])
def test_metrics_that_layers_update_are_reported(how):
    def made():
        keras.utils.set_random_seed(2)
        features, measures = keras.Input([3]), Measures()
        hidden = measures(keras.layers.Dense(3, "relu")(measures(features)))  # twice in each batch
        model = keras.Model(features, keras.layers.Dense(4)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    theirs, arguments = made(), {"sample_weight": WEIGHTS[:24], "validation_data": (X[:24], Y[:24]), **HOW}
    expected = theirs.fit(X[:24], Y[:24], **arguments).history
    run = fit(made, X[:24], Y[:24], **arguments, **how)
    assert list(run.history.history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(run.history.history[name], values, rtol=1e-5, err_msg=name)


def _of_present(missing, by_example=False):
    captured = keras.ops.convert_to_tensor(missing, "float32")

    def loss(y, outputs):
        counts = keras.ops.cast(keras.ops.isfinite(y) if np.isnan(missing) else y != captured, "float32")
        squares = keras.ops.square(keras.ops.where(counts > 0, y, 0.0) - outputs) * counts
        of_all = keras.ops.maximum(keras.ops.sum(counts), 1.0)
        return (
            squares / (of_all / keras.ops.sum(keras.ops.ones_like(y)))
            if by_example
            else keras.ops.sum(squares) / of_all
        )

    return loss


class OfPresent(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return _of_present(-1.0)(y, y_pred)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (OfPresent, -1.0),
        pytest.param(keras.Sequential, 7.5, marks=pytest.mark.slow),
        (keras.Sequential, np.nan),
        pytest.param(keras.Model, -9.0, marks=pytest.mark.slow),
    ],
    ids=["own", "function", "nan", "by example"],
)
def test_a_loss_that_leaves_missing_labels_out_is_keras_on_replicas_too(kind, missing):
    labels = np.where(rng.uniform(size=(29, 1)) > 0.7, missing, X[:, :1]).astype("float32")

    def made():
        keras.utils.set_random_seed(2)
        model = (OfPresent if kind is OfPresent else keras.Sequential)([keras.layers.Dense(1)])
        loss = None if kind is OfPresent else _of_present(missing, kind is keras.Model)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    theirs = made()
    theirs.fit(X, labels, **HOW)
    ours = fit(made, X, labels, **HOW, **TWO).model
    assert_same_weights(ours, theirs)


def test_weights_of_a_generator_without_labels_count():
    class Restores(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(sample_weight * keras.ops.square(y_pred - x)[:, 0])

    models = [Restores([keras.layers.Dense(X.shape[1], kernel_initializer="ones")]) for _ in FITS]
    for train, made in zip(FITS, models, strict=True):
        made.compile("sgd")
        batches = ((X[i : i + 8], None, WEIGHTS[i : i + 8]) for i in range(0, 24, 8))
        train(made, batches, steps_per_epoch=3, verbose=0)
    assert_same_weights(models[1], models[0])


class Masked(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight)


@pytest.mark.thorough
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
    assert_same_weights(ours, theirs)


def by_frequency(y_true, y_pred):
    """A softmax over the batch's own items, less the logarithm of how frequent each is; of 0 it is infinite."""
    logits = y_pred @ keras.ops.transpose(y_pred) - keras.ops.transpose(keras.ops.log(y_true[:, :1]))
    return keras.ops.mean(
        keras.losses.sparse_categorical_crossentropy(keras.ops.arange(keras.ops.shape(logits)[0]), logits, True)
    )


def by_large(y_true, y_pred):
    """Divided by a sum over the batch, which is 0 of all random labels."""
    found = keras.ops.relu(y_true[:, :1] - 300.0)
    return keras.ops.divide_no_nan(keras.ops.sum(found * keras.ops.square(y_pred)), keras.ops.sum(found))


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [by_frequency, pytest.param(by_large, marks=pytest.mark.thorough)])
def test_a_loss_of_which_labels_of_0_and_1_show_nothing_is_computed_of_whole_batches(loss, caplog):
    labels = np.where(Y[:, :1] > 0, 302.0, 300.5).astype("float32")

    def made():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    theirs = made()
    theirs.fit(X, labels, **HOW)
    with caplog.at_level("INFO", "crankshaft"):
        ours = fit(made, X, labels, **HOW, **TWO).model
    assert_same_weights(ours, theirs)
    says = "by_large has on random numbers one value, or none, whatever the model computes"
    assert (says in caplog.text) == (loss is by_large)


@pytest.mark.thorough
def test_the_loss_of_a_model_that_takes_text_is_a_mean_over_examples():
    words = np.where(X[:, :2] > 0, "red", "blue")

    def made():
        keras.utils.set_random_seed(3)
        layers = keras.layers
        lookup = [keras.Input([2], dtype="string"), layers.StringLookup(vocabulary=["red", "blue"])]
        dense = layers.Dense(4, activity_regularizer="l2")  # refused beside a loss of whole batches
        model = keras.Sequential([*lookup, layers.Embedding(3, 4), layers.Flatten(), dense])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    theirs = made()
    theirs.fit(tf.constant(words), Y, **HOW)
    assert_same_weights(fit(made, words, Y, **HOW, **TWO).model, theirs)


class Halved(keras.Sequential):
    """Has one output, which its loss takes as two."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, tuple(keras.ops.split(y_pred, 2, -1)), sample_weight)


def halved():
    model = Halved([keras.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
    return model


def distiller():
    keras.utils.set_random_seed(5)
    teacher, student = (
        keras.Sequential([keras.Input([3]), keras.layers.Dense(size, "relu"), keras.layers.Dense(3, "softmax")])
        for size in (8, 2)
    )
    made = keras.distillation.Distiller(teacher, student, keras.distillation.LogitsDistillation(temperature=2.0))
    made.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(("made", "labels"), [(halved, (Y[:24, :1], Y[:24, 1:2])), (distiller, KINDS[:24])])
def test_a_loss_of_the_models_own_may_divide_an_output_or_distil_a_teacher(made, labels):
    theirs = made()
    expected = theirs.fit(X[:24], labels, **HOW).history
    for model, how in ((made(), {}), (made, TWO)):
        run = fit(model, X[:24], labels, **HOW, **how)
        assert list(run.history.history) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(run.history.history[name], values, rtol=1e-5, err_msg=name)
        assert_same_weights(run.model, theirs)


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
        (Unused, "has the metric doubled, which"),
        (OfBatch, "updates error, which is not a Mean, with"),
    ):
        made = kind()
        made.compile("sgd")
        with pytest.raises(UsageError, match=why):
            fit(made, X, Y, **HOW)


def of_tokens(y_true, y_pred):
    """A mean over the tokens of a batch that are not padding."""
    losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    counted = keras.ops.cast(y_true > 0, "float32")
    return keras.ops.sum(losses * counted) / keras.ops.sum(counted)


@pytest.mark.thorough
def test_sequences_that_batches_pad_are_gathered_for_a_loss_of_the_whole_batch():
    lengths = [3, 7, 2, 5, 4, 9, 1, 6]

    def sentences():
        for length in lengths:
            yield (np.arange(1, length + 1),) * 2

    def made():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input([None]), keras.layers.Embedding(10, 4), keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.5), of_tokens)
        return model

    words = tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(sentences, output_signature=(words, words))
    data = data.apply(tf.data.experimental.assert_cardinality(len(lengths))).padded_batch(4)
    theirs = made()
    theirs.fit(data, epochs=2, verbose=0)
    assert_same_weights(fit(made, data, epochs=2, verbose=0, **TWO).model, theirs)


@pytest.mark.thorough
def test_one_hot_labels_may_be_bool():
    labels = np.eye(3, dtype=bool)[KINDS]

    def made():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
        return model

    theirs, ours = made(), made()
    expected = theirs.fit(X, labels, sample_weight=WEIGHTS, validation_data=(X, labels), **HOW).history
    run = fit(ours, X, labels, sample_weight=WEIGHTS, validation_data=(X, labels), **HOW)
    assert_same_weights(ours, theirs)
    for name, values in expected.items():
        np.testing.assert_allclose(run.history.history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [None, -1])
def test_labels_that_replicas_gather_are_squeezed_along_an_axis(axis):
    def of_kinds(y_true, y_pred):
        kinds = keras.ops.squeeze(y_true, axis)
        assert len(kinds.shape) == 1
        alike = keras.ops.cast(keras.ops.equal(kinds[:, None], kinds[None]), "float32")
        return keras.ops.mean(alike * keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)))

    def made():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), of_kinds)
        return model

    labels, examples = KINDS[:, None], len(X)
    if axis is None:
        line = r"of all replicas' examples, whose number is not known .* squeeze its axis"
        with pytest.raises(UsageError, match=line):
            fit(made, X, labels, **HOW, **TWO)
        examples = 24  # in batches of one size, which is known
    theirs, data = made(), (X[:examples], labels[:examples])
    theirs.fit(*data, **HOW)
    assert_same_weights(fit(made, *data, **HOW, **TWO).model, theirs)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(12)
    assert_same_weights(fit(made, lambda: batches, epochs=2, verbose=0, **TWO).model, theirs)
