"""Compiled models with a `train_step` of their own: as Keras's `fit` trains them, on one device and on several."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from crankshaft import UsageError, fit, load_model
from crankshaft import run as crankshaft_run
from crankshaft.parts.keras_models.keras_internals import optimizers_in
from crankshaft.parts.keras_models.keras_trainer import KerasTrainer
from tests.launch.fit.own_step_models import CASES, KINDS, WEIGHTS, Stops, X, Y, gan, guide, measured, slow, vae

HOW = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}  # the last batch has 6 examples
MODELS = pathlib.Path(__file__).with_name("own_step_models.py")
ON_TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
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


def some_of(names, *chosen):
    """Marks all but the chosen as thorough."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.thorough) for name in names]


@pytest.mark.parametrize("name", some_of(CASES, "gan"))
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


@pytest.mark.parametrize("name", [*some_of(ON_SEVERAL, "gan"), pytest.param("one", marks=pytest.mark.thorough)])
def test_replicas_compute_what_kerass_fit_computes(name):
    """Sums of float32 in another order; Adam divides by roots of small sums.

    The last batch has five examples, which three replicas share as two, two and one; or a single one.
    """
    name, examples = ("guide", 37) if name == "one" else (name, 41)
    make, data, _ = CASES[name]
    data = tuple(part[:examples] for part in data)
    how = {"validation_data": tuple(part[:17] for part in data)} if name in ("guide", "distiller") else {}
    theirs, expected, _ = trained(keras.Model.fit, make, data, **how)
    run = fit(make, *data, strategy="mirrored", seed=1, num_virtual_devices=3, **HOW, **how)
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-5, atol=2e-5)
    assert_same_metrics(name, run.history.history, expected, 2e-5)


class AmongAll(keras.Sequential):
    """Moves each output towards its label and away from those of the whole batch."""

    def train_step(self, data):
        x, y = data
        replica = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            others = replica.all_gather(outputs, axis=0)
            examples = tf.cast(replica.all_reduce("sum", tf.shape(x)[0]), tf.float32)
            total, _ = replica.all_reduce("sum", [tf.reduce_sum(outputs, 0), tf.ones([])])
            distances = tf.reduce_sum(tf.square(outputs[:, tf.newaxis] - others), [1, 2]) / examples
            loss = tf.reduce_mean(tf.square(outputs - y)) - tf.reduce_mean(tf.tanh(distances)) + tf.norm(total) / 100
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.thorough
def test_a_step_may_sum_and_gather_across_replicas():
    """The last batch has five examples, two on each of two replicas and one on the third."""

    def made():
        model = AmongAll([keras.Input([6]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05))
        return model

    theirs, _, _ = trained(keras.Model.fit, made, (X[:17], Y[:17]))
    run = fit(made, X[:17], Y[:17], strategy="mirrored", seed=1, num_virtual_devices=3, **HOW)
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", some_of(CASES, "gan"))
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gan", "vae", "scaled"])  # two optimizers, samples, a scale of losses
def test_a_resume_on_replicas_has_the_same_bits(name, tmp_path):
    make, data, _ = CASES[name]
    how = {**ON_TWO, **HOW, "seed": 1}
    whole = fit(make, *data, **how)
    first = fit(make, *data, run_dir=tmp_path, callbacks=[Stops()], **how)
    assert first.result["step"] == 6
    run = fit(make, *data, run_dir=tmp_path, **how)
    for ours, other in zip(run.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)
    assert run.history.history == whole.history.history


class Lowers(keras.callbacks.Callback):
    """Lowers the rate of each optimizer, and looks at what a part of the model makes, as programs save pictures."""

    def __init__(self):
        super().__init__()
        self.pictures = []

    def on_epoch_end(self, epoch, logs=None):
        for optimizer in self.model.optimizers.values():
            optimizer.learning_rate = float(optimizer.learning_rate) * 0.5
        self.pictures.append(self.model.generator(X[:2, :2]).numpy())


@pytest.mark.thorough
def test_second_fits_and_callbacks_are_kerass():
    """Keras's fit and ours in turn, on one model, with a callback that sets each optimizer's rate."""

    def twice(*trains):
        keras.utils.set_random_seed(1)
        made, lowers = gan(), Lowers()
        for train in trains:
            train(made, X, callbacks=[lowers], **HOW)
        return made, lowers

    theirs, expected = twice(keras.Model.fit, keras.Model.fit, keras.Model.fit)
    mine, seen = twice(fit, keras.Model.fit, fit)
    for ours, other in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)
    for ours, other in zip(optimizer_values(mine), optimizer_values(theirs), strict=True):
        np.testing.assert_array_equal(ours, other)
    np.testing.assert_array_equal(seen.pictures, expected.pictures)


@pytest.mark.thorough
def test_weights_of_examples_and_classes_reach_the_step():
    for weights in ({"sample_weight": WEIGHTS}, {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0}}):
        theirs, expected, _ = trained(keras.Model.fit, guide, (X, KINDS), **weights)
        mine, history, _ = trained(fit, guide, (X, KINDS), jit="off", **weights)
        for ours, other in zip(mine.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, other)
        assert_same_metrics("guide", history, expected, 1e-6)


@pytest.mark.thorough
def test_samples_differ_by_step_and_resume(tmp_path):
    """And by replica: a model's own generator samples as those of layers do."""
    keras.utils.set_random_seed(1)
    whole = fit(functools.partial(vae, 1.0), X, jit="off", seed=3, **HOW)
    fit(functools.partial(vae, 1.0), X, jit="off", seed=3, run_dir=tmp_path, callbacks=[Stops()], **HOW)
    resumed = fit(functools.partial(vae, 1.0), X, jit="off", seed=3, run_dir=tmp_path, **HOW)
    assert whole.history.history == resumed.history.history
    for ours, other in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)


def other(step, evaluate=None):
    """A model with a step that a test gives it."""
    methods = {"train_step": step, **({"test_step": evaluate} if evaluate else {})}
    methods = {
        name: functools.partialmethod(lambda self, data, of: of(self, *data), of=x) for name, x in methods.items()
    }
    made = type("Other", (keras.Sequential,), methods)([keras.Input([6]), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def _unpacked(model, method, data):
    return method(model, *data)


def update(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x))
    model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return loss


@pytest.mark.thorough
def test_a_step_may_sample_without_a_seed_of_its_own():
    """Its samples follow from the run's seed and the step's number."""

    def samples(model, x, y):
        return {"sample": keras.random.normal([])}

    run, again, third = (fit(other(samples), X, Y, jit="off", seed=seed, **HOW) for seed in (3, 3, 4))
    assert len({*run.history.history["sample"]}) == HOW["epochs"]
    assert run.history.history == again.history.history != third.history.history


def without_tensors(model, x, y):
    return {"loss": update(model, x, y).numpy()}


def decides(model, x, y):
    loss = update(model, x, y)
    return {"loss": loss if loss > 1 else 2 * loss}


def of_results(model, x, y):
    loss = update(model, x, y)
    model.mean.update_state(y)
    return {"product": loss * model.mean.result()}


class OfBatch(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"sum": super().compute_metrics(x, y, y_pred)["loss"] + keras.ops.mean(y)}


def of_batch():
    made = OfBatch([keras.Input([6]), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def by_results(model, x, y):
    loss = update(model, x, y)
    model.mean.update_state(y)
    model.layers[0].kernel.assign(model.layers[0].kernel * model.mean.result())
    return {"loss": loss}


def resets(model, x, y):
    model.mean.reset_state()
    model.mean.update_state(update(model, x, y))
    return {"mean": model.mean.result()}


def rows_beside_a_metric(model, x, y):
    model.mean.update_state(update(model, x, y))
    return {"rows": y[:, 0], "mean": model.mean.result()}


def in_a_branch(model, x, y):
    loss = update(model, x, y)
    tf.cond(loss > 1, lambda: model.mean.update_state(y), lambda: None)
    return {"loss": loss}


def keeps_the_largest(model, x, y):
    model.largest.update_state(update(model, x, y))
    return {"largest": model.largest.result()}


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, x):
        self.value.assign(keras.ops.maximum(self.value, x))

    def result(self):
        return self.value


def with_metrics(step):
    made = other(step)
    made.mean, made.largest = keras.metrics.Mean(name="mean"), Largest()
    return made


REFUSED = {
    "numpy": (lambda: other(without_tensors), {}, "train_step can't be compiled.*functions of tensors"),
    "if": (lambda: other(decides), {}, "train_step can't be compiled.*functions of tensors"),
    "list": (lambda: other(lambda model, x, y: [update(model, x, y)]), {}, "returned a list; return numbers by name"),
    "rows": (lambda: other(lambda model, x, y: {"loss": update(model, x, y) * y}), {}, "has the shape .*one number"),
    "rows beside a metric": (
        lambda: with_metrics(rows_beside_a_metric),
        {},
        "^Other.train_step: 'rows' has the shape .*; return one number",
    ),
    "product of results": (
        lambda: with_metrics(of_results),
        {},
        "train_step: 'product' is computed from results of metrics .mean.*, and from the batch.*from metrics' results",
    ),
    "compute_metrics": (of_batch, {}, "OfBatch.compute_metrics: 'sum' is computed from results of metrics"),
    "use of results": (lambda: with_metrics(by_results), {}, "computes with the result of a metric .Mul"),
    "reset": (lambda: with_metrics(resets), {}, "resets the metric mean, whose result is that of an epoch; return"),
    "accumulation": (
        lambda: guide(keras.optimizers.SGD(gradient_accumulation_steps=2)),
        {},
        "Guide: .* has gradient_accumulation_steps=2, and each apply of a step is an update",
    ),
    "branch": (lambda: with_metrics(in_a_branch), {}, "updates the metric mean within tf.cond"),
    "no sums": (lambda: with_metrics(keeps_the_largest), {}, "largest .Largest. has a state that is not made of sums"),
    "no gradient": (
        lambda: other(lambda model, x, y: model.optimizer.apply([None, None], model.trainable_weights)),
        {},
        r"applies sgd\w* without a gradient",
    ),
    "tested": (
        lambda: other(lambda model, x, y: {"loss": update(model, x, y)}, lambda model, x, y: update(model, x, y)),
        {"validation_split": 0.2},
        r"test_step applies sgd\w*; train in train_step",
    ),
    "no call": (gan, {"validation_split": 0.2}, "Gan.test_step can't be compiled.*define test_step"),
    "accumulate_steps": (guide, {"accumulate_steps": 2}, "accumulate_steps=2: Guide.train_step computes"),
    "learning_rate": (guide, {"learning_rate": 0.1}, "learning_rate is set.*set the optimizer's learning_rate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_right_is_refused_before_the_first_step(name):
    make, how, line = REFUSED[name]
    made = make()
    before = made.get_weights()
    labels = () if name == "no call" else (KINDS if isinstance(made, type(guide())) else Y,)
    with pytest.raises(UsageError, match=line):
        fit(made, X, *labels, jit="off", **HOW, **how)
    for now, then in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_on_replicas_an_update_in_a_branch_and_a_copy_are_refused():
    on_two = {**ON_TWO, **HOW}
    with pytest.raises(UsageError, match=r"applies adam\w* within tf.cond.*use one device"):
        fit(slow, X, Y, **on_two)
    with pytest.raises(UsageError, match=r"overrides train_step, and can't be copied.*pass a function"):
        fit(guide(), X, KINDS, **on_two)


class Decorated(keras.Sequential):
    @tf.function
    def train_step(self, data):
        x, y = data
        self.mean.update_state(y)
        return {"loss": update(self, x, y), "mean": self.mean.result()}


@pytest.mark.thorough
def test_a_decorated_step_is_compiled_by_the_run():
    def decorated():
        made = Decorated([keras.Input([6]), keras.layers.Dense(2)])
        made.mean = keras.metrics.Mean(name="mean")
        made.compile("sgd", "mse")
        return made

    run = fit(decorated, X, Y, **ON_TWO, **HOW)
    np.testing.assert_allclose(run.history.history["mean"], [Y.mean()] * 3, rtol=1e-5)


@pytest.mark.thorough
def test_a_step_that_is_not_finite_is_skipped():
    """By each optimizer's apply, which is the engine's; a step whose every value is finite counts."""
    x = X.copy()
    x[13] = np.inf
    made = guide()
    run = fit(made, x, KINDS, jit="off", on_nonfinite="skip", **HOW)
    assert all(np.isfinite(weight).all() for weight in made.get_weights())
    assert run.history.history["skipped"] == [0.25] * 3
    assert int(made.optimizer.iterations) == 9


class Masking(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients = [tf.boolean_mask(gradient, tf.fill(tf.shape(gradient)[:1], True)) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_weights)
        self.mean.update_state(gradients[0].shape[0] is None)
        return {"loss": loss, "mean": self.mean.result()}


@pytest.mark.thorough
def test_a_gradient_whose_shape_is_unknown_has_that_of_its_variable():
    def masking():
        keras.utils.set_random_seed(1)
        made = Masking([keras.Input([6]), keras.layers.Dense(2)])
        made.mean = keras.metrics.Mean(name="mean")
        made.compile("sgd", "mse")
        return made

    theirs = masking()
    theirs.fit(X, Y, **HOW)
    run = fit(masking, X, Y, **ON_TWO, **HOW)
    assert run.history.history["mean"] == [1.0] * 3
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [pytest.param(vae, marks=pytest.mark.thorough), measured])
def test_a_step_that_is_executed_op_by_op_has_the_results_of_its_metrics(make):
    def eager():
        made = make()
        made.run_eagerly = True
        return made

    data = (X,) if make is vae else (X, Y)
    how = {"validation_data": tuple(part[:17] for part in data), "epochs": 2}
    theirs, expected, _ = trained(keras.Model.fit, make, data, **how)
    mine, history, _ = trained(fit, eager, data, **how)
    for ours, other in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-6)
    assert_same_metrics("eager", history, expected, 1e-5)


class Sized(keras.Sequential):
    """Computes with the size of a batch as with a number."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.sum(keras.ops.square(self(x) - y)) / np.full(2, x.shape[0]).sum()
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}

    def predict_step(self, x):
        return self(x) + np.zeros([x.shape[0], 2])


@pytest.mark.parametrize("how", [{}, ON_TWO], ids=["one device", "two replicas"])
def test_a_step_may_compute_with_the_size_of_its_batch(how):
    def sized():
        keras.utils.set_random_seed(1)
        made = Sized([keras.Input([6]), keras.layers.Dense(2)])
        made.compile("sgd")
        return made

    def batches():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(12, drop_remainder=True)

    theirs = sized()
    theirs.fit(batches(), epochs=2, verbose=0)
    run = fit(sized, batches, epochs=2, verbose=0, **how)
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-7)
    for _ in range(2):
        np.testing.assert_allclose(run.predict(X[:17]), theirs(X[:17]), rtol=1e-4, atol=1e-6)


class Counting(keras.Sequential):
    """Shows the size of the batches that its steps are given."""

    def test_step(self, data):
        return {"size": keras.ops.cast(keras.ops.shape(data[0])[0], "float32")}

    def predict_step(self, data):
        return 0.0 * self(data) + keras.ops.cast(keras.ops.shape(data)[0], "float32")


@pytest.mark.parametrize(("how", "replicas"), [({}, 1), (ON_TWO, 2)], ids=["one device", "two replicas"])
def test_data_to_evaluate_is_computed_in_its_own_batches(how, replicas):
    def counting():
        made = Counting([keras.Input([6]), keras.layers.Dense(2)])
        made.compile("sgd", "mse")
        return made

    def batches(examples, size):
        return tf.data.Dataset.from_tensor_slices((X[:examples], Y[:examples])).batch(size)

    run = fit(counting, lambda: batches(12, 4), validation_data=lambda: batches(16, 8), verbose=0, **how)
    assert run.history.history["val_size"] == [8 / replicas]
    assert [run.evaluate(data)["size"] for data in (None, batches(12, 6), batches(12, 1), (X[:12], Y[:12]))] == [
        8 / replicas,
        6 / replicas,
        1,  # which both replicas have
        4 / replicas,
    ]
    assert np.all(run.predict(batches(12, 6)) == 6 / replicas)


class Noisy(Sized):
    """Computes with noise for a constant number of examples, in tests for another, beside the size of its batch."""

    def call(self, x):
        return super().call(x) + 0.1 * tf.random.stateless_normal([12, 2], [1, 2])

    def test_step(self, data):
        noisy = data[1] + tf.random.stateless_normal([6, 2], [1, 2])
        return {"noisy": keras.ops.sum(noisy) / np.full(2, data[1].shape[0]).sum()}


def test_a_step_may_compute_with_a_constant_size_of_its_batch():
    def noisy():
        keras.utils.set_random_seed(1)
        made = Noisy([keras.layers.Dense(2)])
        made.compile("sgd")
        made.build([12, 6])
        return made

    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    data = examples.batch(12, drop_remainder=True)
    theirs = noisy()
    theirs.fit(data, epochs=2, verbose=0)
    run = fit(noisy(), data, validation_data=examples.take(6).batch(6, drop_remainder=True), epochs=2, verbose=0)
    noise = tf.random.stateless_normal([6, 2], [1, 2])
    np.testing.assert_allclose(run.history.history["val_noisy"], [tf.reduce_mean(Y[:6] + noise)] * 2, rtol=1e-5)
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-7)


class Judge(keras.losses.Loss):
    """Compares features of a network of its own."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(self.net(y_true) - self.net(y_pred)), -1)


class Consistent(keras.Model):
    """Trains on pairs, is tested on examples, and has no loss of that name."""

    def __init__(self, judge):
        super().__init__()
        self.net = keras.Sequential([keras.Input([6]), keras.layers.Dense(2, kernel_initializer="ones")])
        self.judge, self.total = judge, keras.metrics.Mean(name="total")

    def train_step(self, data):
        (clean, _), (noisy, y) = data
        with tf.GradientTape() as tape:
            loss = self.judge(self.net(clean), self.net(noisy)) + keras.ops.mean(keras.ops.abs(self.net(noisy) - y))
        self.optimizer.apply(tape.gradient(loss, self.net.trainable_weights), self.net.trainable_weights)
        self.total.update_state(loss)
        return {"total": self.total.result()}

    def test_step(self, data):
        x, y = data
        self.total.update_state(keras.ops.mean(keras.ops.abs(self.net(x) - y)))
        return {"total": self.total.result()}


@pytest.mark.thorough
def test_steps_may_take_data_of_two_forms_and_a_loss_may_have_a_network(tmp_path, caplog):
    def consistent():
        made = Consistent(Judge())
        made.compile("sgd")
        return made

    validation = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(12)
    pairs = tf.data.Dataset.zip((validation, tf.data.Dataset.from_tensor_slices((X[:24] + 0.1, Y[:24])).batch(12)))
    theirs, ours, resumed = consistent(), consistent(), consistent()
    ours.judge.net.set_weights(theirs.judge.net.get_weights())
    how = {"validation_data": validation, "verbose": 0}
    expected = theirs.fit(pairs, epochs=2, **how).history
    run = fit(ours, pairs, epochs=2, run_dir=tmp_path, **how)
    assert run.history.history == {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()}
    assert "best" not in run.result
    fit(resumed, pairs, epochs=3, run_dir=tmp_path, **how)
    for restored, other in zip(resumed.judge.net.get_weights(), theirs.judge.net.get_weights(), strict=True):
        np.testing.assert_array_equal(restored, other)
    with pytest.raises(UsageError, match="monitor=eval_loss is not measured in this run; use one of eval_total"):
        fit(consistent(), pairs, epochs=2, restore_best=True, monitor="eval_loss", **how)

    def again():
        made = consistent()
        made.judge.net.set_weights(theirs.judge.net.get_weights())
        return made

    two = fit(again, lambda: pairs, epochs=2, verbose=0, validation_data=lambda: validation, **ON_TWO)
    assert two.history.history == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    unevaluated = fit(again(), pairs, epochs=2, verbose=0, jit="off")  # test_step is not called
    assert unevaluated.history.history == {"total": pytest.approx(expected["total"], rel=1e-6)}


class Contrasting(keras.Sequential):
    def products(self, outputs):
        return keras.ops.matmul(outputs, keras.ops.transpose(outputs))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            outputs = self(data)
            pairs = self.products(outputs)
            loss = keras.ops.mean(keras.ops.logsumexp(pairs, 1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class ByEinsum(Contrasting):
    def products(self, outputs):
        return keras.ops.einsum("ae, be -> ab", outputs, outputs)


@pytest.mark.parametrize(("how", "kind"), [({}, Contrasting), (ON_TWO, Contrasting), (ON_TWO, ByEinsum)])
def test_examples_that_a_step_compares_are_a_shares_and_a_line_says_so(how, kind, caplog):
    def contrasting():
        made = kind([keras.Input([6]), keras.layers.Dense(2), keras.layers.BatchNormalization()])
        made.compile("sgd")
        return made

    fit(contrasting, X, **how, **HOW)
    line = f"{kind.__name__}.train_step has products of examples with examples and batch normalization, which on"
    assert (line in caplog.text) == bool(how)


SCRIPT = """
import json, sys
import crankshaft
import keras
import own_step_models

name, strategy, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
make, data, _ = own_step_models.CASES[name]


def seeded():
    keras.utils.set_random_seed(1)
    return make()


if __name__ == "__main__":
    if options.pop("stops", False):
        options["callbacks"] = [own_step_models.Stops()]
    run = crankshaft.fit(seeded, *(part[:37] for part in data), strategy=strategy, jit="off", **options)
    weights = [weight.numpy().ravel().tolist() for weight in run.model.weights]
    print(json.dumps([run.history.history, weights, run.result["step"]]))
"""


def processes(crank, folder, name, strategy, tasks, **options):
    """Trains a case in processes of its own; returns the history, weights and step that each of them ends with."""
    shutil.copy(MODELS, folder)
    (folder / "train.py").write_text(SCRIPT)
    end = crank(*tasks, "--", folder / "train.py", name, strategy, json.dumps(HOW | options), command="local").ok()
    printed = [json.loads(line[line.index("[{") :]) for line in end.out.splitlines() if "[{" in line]
    assert len(printed) == (1 if strategy == "parameter_server" else 2)
    return printed


PAIR, ALONE, TWO = ["--workers=2"], ["--workers=1", "--ps=1"], ["--workers=2", "--ps=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "tasks"),
    [(name, "multi_worker", PAIR) for name in ON_SEVERAL]
    + [(name, "parameter_server", ALONE) for name in ("gan", "scaled", "vae", "follower", "guide", "distiller")],
)
def test_processes_compute_what_kerass_fit_computes(name, strategy, tasks, crank, tmp_path):
    """Around servers one worker alone: two would update by turns that time decides."""
    make, data, _ = CASES[name]
    how = {"validation_split": 0.25} if name in ("guide", "vae", "distiller") else {}
    theirs, expected, _ = trained(keras.Model.fit, make, tuple(part[:37] for part in data), **how)
    for history, weights, _ in processes(crank, tmp_path, name, strategy, tasks, **how):
        assert_same_metrics(name, history, expected, 2e-5)
        for ours, other in zip(weights, theirs.get_weights(), strict=True):
            np.testing.assert_allclose(ours, other.ravel(), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "tasks"),
    [(name, *where) for name in ("gan", "guide") for where in (("multi_worker", PAIR), ("parameter_server", ALONE))],
)
def test_a_resume_in_processes_has_the_same_bits(name, strategy, tasks, crank, tmp_path):
    """In mid-epoch; the last batch of each has one example."""
    folder = {"run_dir": str(tmp_path / "run")}
    whole = processes(crank, tmp_path, name, strategy, tasks)
    stopped = processes(crank, tmp_path, name, strategy, tasks, **folder, stops=True)
    assert [step for *_, step in stopped] == [6] * len(stopped)
    assert processes(crank, tmp_path, name, strategy, tasks, **folder) == whole


@pytest.mark.slow
def test_workers_around_servers_lose_nothing_that_a_step_assigns(crank, tmp_path):
    """Each worker adds to what the others have made of a counter, also if it reads it as its step begins."""
    [(_, weights, step)] = processes(crank, tmp_path, "follower", "parameter_server", TWO, epochs=20)
    assert weights[1] == [step] == [80]  # seen


@pytest.mark.slow
def test_around_servers_an_assignment_in_a_branch_is_refused(crank, tmp_path):
    shutil.copy(MODELS, tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [tmp_path / "train.py", "slow", "parameter_server", json.dumps(HOW)]
    end = crank(*ALONE, "--", *line, command="local")
    assert end.code == 2, end.err
    assert "is assigned within tf.cond, a loop or a tf.function, and with parameter servers" in end.err


class Doubling(keras.Sequential):
    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"twice": 2 * self(x), "number": tf.range(tf.shape(x)[0])}


def doubling():
    made = Doubling([keras.Input([6]), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("where", [{}, ON_TWO])
def test_a_predict_step_of_ones_own_makes_all_predictions(where, tmp_path):
    run = fit(doubling, X, Y, run_dir=tmp_path / "run", **HOW, **where)
    expected = 2 * (X @ run.model.weights[0].numpy() + run.model.weights[1].numpy())
    saved = load_model(tmp_path / "run", trainer_class=KerasTrainer.for_model(doubling))
    for predicted in (
        run.predict(X),
        run.predict(X, "model"),
        run.model.predict(X, verbose=0),
        saved.predict(X, verbose=0),
        saved.predict(tf.data.Dataset.from_tensor_slices(X)),
    ):
        np.testing.assert_allclose(predicted["twice"], expected, rtol=1e-5, atol=1e-6)
        assert predicted["number"].shape == (42,)


@pytest.mark.thorough
def test_a_model_without_call_is_loaded_and_says_what_predicts(tmp_path):
    run = fit(gan, X, run_dir=tmp_path, jit="off", **HOW)
    with pytest.raises(UsageError, match="Gan has no call, so it has no predictions; define call or predict_step"):
        run.predict(X)
    saved = load_model(tmp_path, trainer_class=KerasTrainer.for_model(gan))
    np.testing.assert_array_equal(saved.generator(X[:, :2]), run.model.generator(X[:, :2]))


@pytest.mark.thorough
def test_a_saved_run_predicts_without_its_data(tmp_path):
    """From features alone a step can't be traced, so what its optimizers have is left in the checkpoint."""
    run = fit(guide, X, KINDS, run_dir=tmp_path / "run", jit="off", **HOW)
    trainer_class, expected = KerasTrainer.for_model(guide), run.predict(X)
    saved = load_model(tmp_path / "run", trainer_class=trainer_class)
    np.testing.assert_allclose(saved.predict(X, verbose=0), expected, rtol=1e-5)
    to = {"run_dir": tmp_path / "run", "output": tmp_path / "exported"}
    exported = crankshaft_run(trainer_class, data=((X, KINDS),), mode="export", **to)
    serve = tf.saved_model.load(exported.result["export"]).signatures["serving_default"]
    np.testing.assert_allclose(serve(features=tf.constant(X))["outputs"], expected, rtol=1e-5)


@pytest.mark.thorough
def test_a_model_without_a_configuration_is_loaded_by_the_function_that_makes_it(tmp_path):
    class Around(keras.Model):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def call(self, x):
            return self.body(x)

    def made():
        model = Around(keras.Sequential([keras.layers.Dense(2)]))
        model.compile("sgd", "mse")
        return model

    run = fit(made, X, Y, run_dir=tmp_path, jit="off", **HOW)
    with pytest.raises(
        UsageError, match=r"made's, which .*trainer_class=KerasTrainer.for_model\(make\)\), where make is"
    ):
        load_model(tmp_path)
    saved = load_model(tmp_path, trainer_class=KerasTrainer.for_model(made))
    np.testing.assert_allclose(saved.predict(X, verbose=0), run.predict(X), rtol=1e-5)


@pytest.mark.thorough
def test_averages_are_not_loaded_where_a_step_is_not_traced(tmp_path):
    fit(guide, X, KINDS, run_dir=tmp_path, ema_decay=0.9, jit="off", **HOW)
    with pytest.raises(UsageError, match=r"ema_decay: Guide.train_step decides which weights.*take the model of a run"):
        load_model(tmp_path, trainer_class=KerasTrainer.for_model(guide))


def test_optimizers_have_the_names_of_the_attributes():
    """Not of TensorFlow's own lists of these: checkpoints have these names."""
    assert [*optimizers_in(measured())] == [*optimizers_in(guide())] == ["optimizer"]
    assert {*optimizers_in(gan())} == {"optimizer", "optimizers.critic", "optimizers.generator"}


class Penalized(keras.Sequential):
    """Reads outputs and what a layer adds to the loss also after `apply`, as the VQ-VAE of Keras's examples."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            self.outputs_now = self(data, training=True)
            loss = keras.ops.mean(keras.ops.square(self.outputs_now)) + sum(self.losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.added.update_state(sum(self.losses))
        self.seen.update_state(self.outputs_now)
        return {"loss": loss, "added": self.added.result(), "seen": self.seen.result()}


def penalized(synchronized=False):
    norm = [keras.layers.BatchNormalization(synchronized=True)] if synchronized else []
    made = Penalized([keras.Input([6]), keras.layers.Dense(3, activity_regularizer="l2"), *norm, keras.layers.Dense(2)])
    made.added, made.seen = keras.metrics.Mean(name="added"), keras.metrics.Mean(name="seen")
    made.compile("sgd")
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("synchronized", [False, True])
def test_on_replicas_what_a_model_keeps_in_a_step_is_each_ones_own(synchronized):
    make = functools.partial(penalized, synchronized)
    _, expected, _ = trained(keras.Model.fit, make, (X,))
    run = fit(make, X, seed=1, **ON_TWO, **HOW)
    for name in ("added", "seen"):
        np.testing.assert_allclose(
            run.history.history[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name
        )  # normalized, they sum to 0
