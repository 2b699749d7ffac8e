"""Mistakes in what `crankshaft.fit` is given: one line, before anything is trained."""

from __future__ import annotations

import functools
import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from tests.launch.fit.test_fit import BATCH, EXAMPLES, WEIGHTS, Batches, classes, mlp, sample

pytestmark = pytest.mark.thorough

keras = tf.keras
layers = keras.layers


class OwnLoop(keras.Sequential):
    def make_train_function(self, force=False):
        return super().make_train_function(force)

    def make_test_function(self, force=False):
        return super().make_test_function(force)


class Meter(layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, x):
        return x


def compiled(model, **how):
    model.compile("sgd", **{"loss": "mse", **how})
    return model


class Halves(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([grad / 2 for grad in grads], trainable_variables)


class Doubled(keras.optimizers.SGD):
    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients([2 * grad for grad in grads], trainable_variables)


class Listed(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="listed")
        self.values = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.append(tf.reduce_mean(y_pred))

    def result(self):
        return tf.add_n(self.values) / len(self.values)


def of_two_outputs(**how):
    features = keras.Input([8])
    outputs = {"a": layers.Dense(1)(features), "b": layers.Dense(1)(features)}
    return compiled(keras.Model(features, outputs), **how)


def stateful():
    return compiled(keras.Sequential([keras.Input(batch_shape=[BATCH, 8, 1]), layers.GRU(2, stateful=True)]))


A, ONE = {"a": sample(1)}, {"a": "mse"}
LINE = [keras.Input([8]), layers.Dense(1)]


def each_error(labels, outputs):
    return keras.ops.mean(keras.ops.abs(labels - outputs), axis=-1)


def mean_error(labels, outputs):
    return keras.ops.mean(keras.ops.abs(labels - outputs))


class Column:
    """One of the library `datasets`, by which it is known."""

    __module__ = "datasets.arrow_dataset"


class Model2:
    """One of `tf_keras`, by which it is known; it is called like a function."""

    __module__ = "tf_keras.src.engine.sequential"

    def __call__(self, *_):
        raise ValueError


MISTAKES = {
    "a Model2 of tf_keras is of Keras 2, and models here are of Keras 3; make it by `import keras`, or": (Model2, {}),
    "a Model2 of tf_keras is of Keras 2, ": (lambda: Model2, {}),
    "a Column of Hugging Face's datasets is not arrays; give dataset.to_tf_dataset(": (mlp, {"x": Column()}),
    "is not compiled; call model.compile(": (lambda: keras.Sequential([*LINE]), {}),
    "overrides make_train_function, make_test_function, which no run calls; override train_step, and override test": (
        lambda: compiled(OwnLoop([*LINE])),
        {},
    ),
    "add y['b'], or compile with losses of the other outputs": (of_two_outputs, {"y": A}),
    "for its output 'b', or with metrics": (lambda: of_two_outputs(loss=ONE, metrics={"b": ["mae"]}), {"y": A}),
    "y has labels for 'a', 'c', and the model's outputs are 'a', 'b'": (of_two_outputs, {"y": {**A, "c": sample(1)}}),
    "Keras metric mean_error: the function returns one number for a batch of 5; return one for each example": (
        lambda: compiled(keras.Sequential([*LINE]), metrics=[mean_error]),
        {"y": sample(1)},
    ),
    "(Listed) has no variable": (lambda: compiled(keras.Sequential([*LINE]), metrics=[Listed()]), {"y": sample(1)}),
    "give it [batch, 1] rather than [batch]": (
        lambda: compiled(keras.Sequential([*LINE, layers.Reshape([])]), metrics=["mse"]),
        {"y": sample(1)[:, 0]},
    ),
    "the batch size of the input sequences must be the same": (stateful, {"x": sample(8, 1), "y": sample(2)}),
    "value 8, but received input with shape (32, 7)": (mlp, {"x": sample(7)}),
    "has the metric": (lambda: compiled(keras.Sequential([*LINE, Meter()])), {}),
    "epoch is unknown; did you mean initial_epoch or steps_per_epoch or epochs?": (mlp, {"epoch": 3}),
    "batchsize is unknown; did you mean batch_size or validation_batch_size?": (mlp, {"batchsize": 3}),
    "callback is unknown; did you mean callbacks?": (mlp, {"callback": []}),
    "fit has no lr; use the optimizer's learning_rate, in compile": (mlp, {"lr": 0.1}),
    "fit has no workers; use that of a PyDataset, or leave it out": (mlp, {"workers": 4}),
    "fit has no global_batch_size; use batch_size": (mlp, {"global_batch_size": 3}),
    "set the optimizer's learning_rate in compile": (mlp, {"learning_rate": 0.1}),
    "mixed_bfloat16": (mlp, {"precision": "bfloat16"}),
    "arrays of 70, 69 examples": (mlp, {"y": classes(3)[:69]}),
    "x is missing": (mlp, {"x": None}),
    "one whose examples alone differ in length": (mlp, {"x": tf.ragged.constant([[[1.0]]] * 70)}),
    "the weights of the x data, its third part, are ragged": (mlp, {"sample_weight": tf.ragged.constant([[1.0]] * 70)}),
    "is compiled without a loss, and its layers add none": (lambda: compiled(keras.Sequential([*LINE]), loss=None), {}),
    "is not optional": (mlp, {"x": [None]}),
    "class_weight={'0': 2.0} is not a number for each number of a class": (mlp, {"class_weight": {"0": 2.0}}),
    "compiled with a loss, and the data has no labels": (mlp, {"y": None}),
    "class_weight and sample weights are both given": (mlp, {"class_weight": {}, "sample_weight": WEIGHTS}),
    "give one array for each output, or None": (mlp, {"sample_weight": {"a": WEIGHTS}}),
    "a function that makes and compiles the model": (mlp, {"strategy": "multi_worker"}),
    "give fit one that makes and compiles the model": (mlp, {"strategy": "mirrored", "num_virtual_devices": BATCH}),
    "epochs=0 can't be used": (mlp, {"epochs": 0}),
    "epochs='3' can't be used": (mlp, {"epochs": "3"}),
    "initial_epoch=-1 can't be used; give a whole number of 0": (mlp, {"initial_epoch": -1}),
    "batch_size=0 can't be used": (mlp, {"batch_size": 0}),
    "steps_per_epoch=2.5 can't be used": (mlp, {"steps_per_epoch": 2.5}),
    "validation_steps=-1 can't be used": (mlp, {"validation_data": "digits", "validation_steps": -1}),
    "validation_freq=True can't be used": (mlp, {"validation_freq": True}),
    "validation_split='a' can't be used": (mlp, {"validation_split": "a"}),
    "shuffle='batch' is not known; use True or False": (mlp, {"shuffle": "batch"}),
    "mode='benchmark': fit trains": (mlp, {"mode": "benchmark"}),
    "is not a tf.keras.callbacks.Callback": (mlp, {"callbacks": [keras.callbacks.Callback]}),
    "validation_data has 4 components": (mlp, {"validation_data": (1, 2, 3, 4)}),
    "the train data has labels, and the eval data has features; give both": (mlp, {"validation_data": (sample(8),)}),
    "hooks=3 is not a list": (mlp, {"hooks": 3}),
    "overrides apply, which is never called": (lambda: mlp(Halves()), {}),
    "overrides _backend_apply_gradients, which is never called": (lambda: mlp(Doubled()), {}),
    "and Trainer.learning_rate_multiplier for the weights": (
        lambda: mlp(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))),
        {},
    ),
    "adam_weight_decay=0.1 and weight_decay=0.004": (lambda: mlp(keras.optimizers.Muon(adam_weight_decay=0.1)), {}),
    "batch_size=8, and x comes in batches of 16": (
        mlp,
        {"x": Batches(sample(8), classes(3)), "y": None, "batch_size": 8},
    ),
    "verbose=3 is not known": (mlp, {"verbose": 3}),
    "leave class_weight out": (mlp, {"x": "digits", "y": None, "class_weight": {}}),
    "validation_steps counts batches of validation_data": (mlp, {"validation_split": 0.5, "validation_steps": 1}),
    "is not a Keras model": (lambda: 3, {}),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line):
    make, how = MISTAKES[line]
    with pytest.raises(crankshaft.UsageError) as raised:
        crankshaft.fit(make(), **{"x": sample(8), "y": classes(3), "verbose": 0, "jit": "off", **how})
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None  # whose frames, of the engine and Keras, a traceback would show first


def batches():
    return tf.data.Dataset.from_tensor_slices((sample(8), classes(3))).batch(BATCH)


# Lines whose cure is code: the program, and the one by the line.
CURES = {
    "is not compiled; call model.compile(": (
        (lambda: keras.Sequential([*LINE]), {"y": sample(1)}),
        (lambda: compiled(keras.Sequential([*LINE])), {"y": sample(1)}),
    ),
    "add y['b'], or": ((of_two_outputs, {"y": A}), (of_two_outputs, {"y": {**A, "b": sample(1)}})),
    "return one for each example, as by keras.ops.mean(values, axis=-1)": (
        (lambda: compiled(keras.Sequential([*LINE]), metrics=[mean_error]), {"y": sample(1)}),
        (lambda: compiled(keras.Sequential([*LINE]), metrics=[each_error]), {"y": sample(1)}),
    ),
    "set the optimizer's learning_rate in compile": (
        (mlp, {"learning_rate": 0.1}),
        (lambda: mlp(keras.optimizers.SGD(learning_rate=0.1)), {}),
    ),
    "give a dictionary such as {0: 1.0, 1: 2.5}": (
        (mlp, {"class_weight": {"0": 2.0}}),
        (mlp, {"class_weight": {0: 1.0, 1: 2.5}}),
    ),
    "holds a DistributedDataset (features); give the dataset that it was made of": (
        (
            mlp,
            lambda: {
                "x": tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(batches()),
                "y": None,
            },
        ),
        (mlp, lambda: {"x": batches(), "y": None}),
    ),
    "compile(run_eagerly=True) in a function comes too late; leave it out there, and pass run_eagerly=True to fit": (
        (lambda: lambda: compiled(keras.Sequential([*LINE]), run_eagerly=True), {"y": sample(1)}),
        (lambda: lambda: compiled(keras.Sequential([*LINE])), {"y": sample(1), "run_eagerly": True}),
    ),
}


@pytest.mark.parametrize("line", CURES)
def test_a_program_that_does_what_its_line_says_trains(line):
    def fit(make, how):
        how = how() if callable(how) else how
        return crankshaft.fit(make(), **{"x": sample(8), "y": classes(3), "verbose": 0, "jit": "off", **how})

    mistaken, cured = CURES[line]
    with pytest.raises(crankshaft.UsageError, match=re.escape(line)):
        fit(*mistaken)
    assert "loss" in fit(*cured).history.history


def recording(reached, methods):
    """Makes a model whose class overrides `methods`, which note their names and do what Keras's do."""

    def override(name):
        def method(self, *args, **keywords):
            reached.add(name)
            return getattr(keras.Sequential, name)(self, *args, **keywords)

        return method

    kind = type("Recording", (keras.Sequential,), {name: override(name) for name in methods})
    model = kind([*LINE])
    model.compile("sgd", "mse", metrics=["mae"])
    reached.clear()
    return model


def test_each_method_that_kerass_fit_calls_is_called_or_refused():
    def is_method(name):
        return name[0] != "_" and inspect.isfunction(inspect.getattr_static(keras.Sequential, name))

    how = {"x": sample(8), "y": sample(1), "validation_data": (sample(8), sample(1)), "batch_size": 35, "verbose": 0}
    keras_calls, calls = set(), set()
    recording(keras_calls, filter(is_method, dir(keras.Sequential))).fit(**how)
    refused = {"evaluate", "fit", "get_metrics_result", "make_test_function", "make_train_function", "reset_metrics"}
    assert refused < keras_calls
    for name in refused:
        with pytest.raises(crankshaft.UsageError, match=f"Recording overrides {name}, which no run calls; "):
            crankshaft.fit(recording(calls, {name}), **how, jit="off")
    for other in (set(), {"train_step", "test_step", "compute_metrics"}):  # with a step of its own, and without
        called = keras_calls - refused - other
        crankshaft.fit(recording(calls, called), **how, jit="off")
        assert calls == called


def test_an_evaluate_and_a_predict_of_the_models_own_are_left_to_the_program(caplog):
    how = {"x": sample(8), "y": sample(1), "batch_size": 35, "verbose": 0, "jit": "off"}
    run = crankshaft.fit(recording(set(), {"evaluate", "predict"}), **how)
    assert "Recording overrides predict, which run.predict does not call" in caplog.text
    with pytest.raises(crankshaft.UsageError, match=r"Recording overrides evaluate, .* and call the model's evaluate"):
        run.evaluate((sample(8), sample(1)))


def test_a_library_that_logs_from_kerass_fit_is_named_and_refuses_no_model(monkeypatch, caplog):
    fit = keras.Model.fit
    monkeypatch.setattr(keras.Model, "fit", functools.wraps(fit)(lambda *args, **keywords: fit(*args, **keywords)))
    for _ in "ab":
        crankshaft.fit(mlp(), sample(8), classes(3), batch_size=35, verbose=0, jit="off")
    line = (
        f"keras.Model.fit is {__name__}'s, which crankshaft.fit does not call: what it logs is not logged; give its c"
    )
    assert caplog.text.count(line) == 1


def test_a_dataset_of_batches_of_several_sizes_is_one_line_where_all_have_to_be_of_one():
    dataset = tf.data.Dataset.from_tensor_slices((sample(8), classes(3))).batch(BATCH).repeat()
    with pytest.raises(crankshaft.UsageError, match="and, before its end, of others; make all but the last equal"):
        crankshaft.fit(mlp(), dataset, steps_per_epoch=3, epochs=3, verbose=0, jit="off", accumulate_steps=5)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("binary_crossentropy", marks=pytest.mark.slow),
        keras.losses.BinaryFocalCrossentropy(label_smoothing=0.1),
    ],
)
def test_a_label_of_a_third_class_of_two_is_named_unless_it_counts_for_nothing(loss):
    y = np.where(sample(1) > 0, 1, 0)
    y[3] = -1
    how = {"x": sample(8), "y": y, "epochs": 1, "batch_size": 35, "verbose": 0, "jit": "off"}
    counts = np.ones(EXAMPLES, "float32")
    with pytest.raises(crankshaft.RunError, match="labels out of range"):
        crankshaft.fit(compiled(keras.Sequential([*LINE]), loss=loss), sample_weight=counts, **how)
    counts[3] = 0
    crankshaft.fit(compiled(keras.Sequential([*LINE]), loss=loss), sample_weight=counts, **how)
