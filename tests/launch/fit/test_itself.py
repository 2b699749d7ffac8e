"""`crankshaft.fit` on one device trains the model itself: callbacks and Keras find what Keras's own `fit` leaves.

A second `fit` of a model uses the compiled steps of the first, and samples other numbers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import weakref
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine import logging
from crankshaft.engine.data.streamed import DatasetStream
from crankshaft.engine.errors import CrankshaftError
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.internals.keras_calls import Trainable
from crankshaft.launch.composition.compiled_cache import ATTRIBUTE
from crankshaft.parts.keras_models.keras_trainer import KerasTrainer

pytestmark = pytest.mark.thorough

keras = tf.keras
X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
HOW = {"batch_size": 8, "shuffle": False, "verbose": 0}
TWO = {"strategy": "mirrored", "num_virtual_devices": 2, "jit": "off"}
FITS = (keras.Model.fit, crankshaft.fit)
REPLICAS = {"strategy": "mirrored", "num_virtual_devices": 2}


def model(optimizer="adam", **compiled):
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    made.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return made


def check_alike(ours, theirs, rtol=0):
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol)
    for one, other in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol)


def history(result):
    return getattr(result.history, "history", result.history)


def test_the_same_run_dir_again_is_refused_where_compile_decides_otherwise(tmp_path):
    """A rate that a callback has set is no difference; with allow_changed_config all that is new is taken."""
    rates = []

    class Notes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            rates.append(round(float(self.model.optimizer.learning_rate), 7))

    def fit(optimizer, epochs=4, compiled=None, **more):
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        made.compile(optimizer, **{"loss": "mse", "metrics": ["mae"], **(compiled or {})})
        how = {**HOW, "callbacks": [Notes(), Lowers()], "jit": "off", "run_dir": tmp_path, **more}
        return crankshaft.fit(made, X, Y, epochs=epochs, **how)

    fit(keras.optimizers.Adam(1e-5), 2)
    del rates[:]
    for optimizer, compiled, line in (
        (keras.optimizers.Adam(0.1), {}, "optimizer learning_rate: 1e-05 -> 0.1)"),
        (keras.optimizers.Adam(1e-5, beta_1=0.8), {}, "optimizer beta_1: 0.9 -> 0.8)"),
        (keras.optimizers.SGD(1e-5), {}, "optimizer class: Adam -> SGD"),
        (keras.optimizers.Adam(1e-5), {"loss": keras.losses.Huber(2.0)}, "(loss: mse -> "),
        (keras.optimizers.Adam(1e-5), {"loss_weights": [2.0]}, "loss_weights: None -> [2.0])"),
        (keras.optimizers.Adam(1e-5), {"metrics": ["mse"]}, "metrics: ['mae'] -> ['mse'])"),
    ):
        with pytest.raises(crankshaft.UsageError, match=re.escape(line)):
            fit(optimizer, compiled=compiled)
    assert fit(keras.optimizers.Adam(1e-5), 3).result["step"] == 9
    assert fit(keras.optimizers.Adam(0.1), 4, allow_changed_config=True).result["step"] == 12
    assert rates == [0.005, 0.1]
    assert fit(keras.optimizers.Adam(0.1), 5).result["step"] == 15


class Lowers(keras.callbacks.Callback):
    """Sets the rate as Keras's optimizer is set."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(0.01 / (epoch + 1))


def test_keras_and_crankshaft_train_one_model_in_turn(tmp_path):
    theirs, ours = model(), model()
    for turn in (1, 2, 3):
        theirs.fit(X, Y, epochs=2, callbacks=[Lowers()], **HOW)
        kept = {"run_dir": str(tmp_path / str(turn))} if turn % 2 else {}
        FITS[turn % 2](ours, X, Y, epochs=2, callbacks=[Lowers()], **HOW, **kept)
        np.testing.assert_array_equal(ours.predict(X, verbose=0), theirs.predict(X, verbose=0))
    check_alike(ours, theirs)
    assert type(ours.optimizer) is keras.optimizers.Adam
    assert list(ours.history.history) == list(theirs.history.history)
    names = [tf.train.list_variables(tf.train.Checkpoint(each).write(str(tmp_path / "one"))) for each in (ours, theirs)]
    assert names[0] == names[1]  # the optimizer's too
    assert ours.evaluate(X, Y, verbose=0) == theirs.evaluate(X, Y, verbose=0)


@pytest.mark.parametrize(
    "where",
    [pytest.param({}, marks=pytest.mark.slow), {"strategy": "mirrored", "num_virtual_devices": 2}],
    ids=["one", "two"],
)
def test_an_open_run_s_model_has_its_weights_after_each_call_and_each_error(where, tmp_path):
    def fails(status, metrics):
        if status.step == 3:
            raise KeyError("enough")

    def state(of):
        return [each.numpy() for each in (*of.weights, *of.optimizer.variables)]

    def check(expected):
        for one, other in zip(state(ours), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)  # sums in another order

    def train():
        theirs.fit(X[:10], Y[:10], batch_size=10, verbose=0)
        return state(theirs)

    def made():
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return made

    theirs, ours, data = made(), made(), ((X[:10], Y[:10]), (X, Y))
    how = {"global_batch_size": 10, "shuffle_buffer": 0, "jit": "off", "progress": "off", "run_dir": tmp_path, **where}
    how["hooks"] = [every_steps(1, fails)]
    with crankshaft.open_run(KerasTrainer.for_model(ours), data=data, **how) as run:
        for _ in range(2):
            run.train(steps=1)
            check(saved := train())
        run.save()
        with pytest.raises(KeyError, match="enough"):
            run.train(steps=2)
        check(train())
        run.set_weights([0.5 * each for each in ours.get_weights()])
        theirs.set_weights([0.5 * each for each in theirs.get_weights()])
        check(state(theirs))
        run.train(steps=1)
        check(train())
        run.evaluate()
        run.restore(2)
        check(saved)
    with crankshaft.open_run(KerasTrainer.for_model(ours := made()), data=data, **how) as run:
        check(saved)  # it is resumed
    ours.set_weights(theirs.get_weights())
    run.evaluate()  # of the closed run's weights
    np.testing.assert_array_equal(ours.get_weights()[0], theirs.get_weights()[0])


def test_the_model_of_an_open_run_gets_the_average_as_that_is_closed():
    ours, how = model(), {"global_batch_size": 10, "ema_decay": 0.5, "jit": "off", "progress": "off"}
    with crankshaft.open_run(KerasTrainer.for_model(ours), data=((X, Y), None), **how) as run:
        run.train(steps=3)
        average, trained = run.model.get_weights(), ours.get_weights()
        assert not np.allclose(average[0], trained[0])
    np.testing.assert_array_equal(ours.get_weights()[0], average[0])


def test_a_function_may_return_a_model_that_exists():
    ours = model()
    run = crankshaft.fit(lambda: ours, X, Y, **HOW)
    assert run.model is ours
    ours.fit(X, Y, **HOW)
    assert int(ours.optimizer.iterations) == 6


def test_what_is_a_layer_and_a_keras_trainer_is_trained():
    class Both(Trainable, keras.layers.Dense):
        def __init__(self):
            keras.layers.Dense.__init__(self, 1, kernel_initializer="ones")
            Trainable.__init__(self)

    both = []
    for fit in FITS:
        made = Both()
        made.compile("sgd", "mse", metrics=["mse"])
        fit = Both.fit if fit is keras.Model.fit else fit
        fit(made, X, Y, epochs=2, **{**HOW, "verbose": 2})
        both.append(made)
    check_alike(*both)


@pytest.mark.parametrize(("dtype", "more"), [("float32", {}), ("mixed_float16", {}), ("float32", REPLICAS)], ids=str)
def test_a_model_without_weights_to_train_only_measures(dtype, more):
    def made():
        made = keras.Sequential([keras.Input([2]), keras.layers.Rescaling(1.0, dtype=dtype)])
        made.compile(keras.optimizers.SGD(clipnorm=1.0), "mse")
        return made

    x = np.ones([16, 2], "float32")
    assert crankshaft.fit(made, x, x + 1, **{**HOW, **more}).history.history == {"loss": [1.0]}


@pytest.mark.parametrize("stride", [3, *(pytest.param(stride, marks=pytest.mark.slow) for stride in (1, 9))])
def test_batch_methods_have_keras_numbers(stride):
    def fit_on_replicas(made, x, y, **how):
        return crankshaft.fit(lambda: model(steps_per_execution=stride), x, y, **how, **REPLICAS)

    seen = ([], [], [])
    for fit, numbers in zip((*FITS, fit_on_replicas), seen, strict=True):
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, numbers=numbers: numbers.append(batch),
            on_train_batch_end=lambda batch, logs, numbers=numbers: numbers.append(-batch),
        )
        callback.on_test_batch_begin = lambda batch, logs, numbers=numbers: numbers.append(f"test {batch}")
        callback.on_test_batch_end = lambda batch, logs, numbers=numbers: numbers.append([batch, *logs])
        how = {**HOW, "batch_size": 4, "validation_data": (X[:19], Y[:19]), "epochs": 2, "callbacks": [callback]}
        fit(model(steps_per_execution=stride), X, Y, **how)
    assert seen[0] == seen[1] == seen[2]


def test_an_epoch_of_no_whole_executions_is_refused_where_a_function_makes_the_model():
    with pytest.raises(crankshaft.UsageError, match=r"steps_per_epoch=2 is not .* of 3 steps .*; use 3, "):
        crankshaft.fit(lambda: model(steps_per_execution=3), X, Y, steps_per_epoch=2, **HOW)


def test_metrics_that_keras_numbers_keep_their_names_in_a_resumed_run(tmp_path):
    """As where the cell of a notebook runs again: Keras numbers its layers and metrics on."""

    def fit(epochs, **more):
        keras.utils.set_random_seed(3)
        x = keras.Input([3])
        made = keras.Model(x, [keras.layers.Dense(1, "sigmoid")(x) for _ in range(2)])
        curves = [keras.metrics.AUC(), keras.metrics.AUC(curve="PR")]
        made.compile("sgd", ["mse", "mse"], metrics=[curves, [keras.metrics.AUC(name="auc_9")]])
        y = (Y > 0).astype("float32")
        how = {**HOW, "validation_data": (X, [y, y]), "run_dir": tmp_path / "run", **more}
        return crankshaft.fit(made, X, [y, y], epochs=epochs, **how).history

    first, again, alone = fit(1), fit(3), fit(3, run_dir=tmp_path / "another")
    assert again.history.keys() == first.history.keys() != alone.history.keys()
    assert sorted(again.history.values()) == sorted(alone.history.values())
    assert {len(values) for values in again.history.values()} == {3}
    assert again[-1].keys() == again[0].keys()
    assert sum("auc_9" in name for name in first.history) == 2


class Called(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} of {self.params['epochs']}")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append([epoch, *logs])

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(batch)


class CalledInTests(Called):
    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(f"test {batch}")

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(f"test {batch} with {list(logs)}")


def test_a_callback_among_the_hooks_is_called_as_one_of_the_callbacks():
    callback, hook = CalledInTests(), CalledInTests()
    crankshaft.fit(model(), X, Y, epochs=2, validation_data=(X, Y), callbacks=[callback], hooks=[hook], **HOW)
    assert "test 2" in hook.calls
    assert hook.calls == callback.calls


EPOCHS = {  # of five batches
    "all": {"steps_per_epoch": 5, "batch_size": None},
    "none joined": {"steps_per_epoch": 2, "validation_data": (X, Y), "validation_freq": 2},
    "strides": {"steps_per_epoch": 3, "stride": 2, "validation_data": (X, Y), "validation_freq": 2, "initial_epoch": 1},
    "too many": {"steps_per_epoch": 7, "validation_data": (X[:9], Y[:9]), "validation_steps": 2},
    "dataset": {"steps_per_epoch": 4, "y": None},
}


@pytest.mark.parametrize(
    "name",
    [
        "none joined",
        "strides",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("all", "too many", "dataset")),
    ],
)
def test_epochs_of_so_many_steps_end_where_the_data_does(name):
    how = {"x": X, "y": Y, "batch_size": 4, "shuffle": False, "verbose": 0, "epochs": 5, **EPOCHS[name]}
    if how["y"] is None:
        how |= {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4), "batch_size": None}
    stride = how.pop("stride", 1)
    made = [model(steps_per_execution=stride) for _ in range(3)]
    seen = [Called() for _ in made]
    expected = made[0].fit(**how, callbacks=[seen[0]]).history
    found = crankshaft.fit(made[1], **how, callbacks=[seen[1]]).history.history
    assert seen[1].calls == seen[0].calls
    check_alike(made[1], made[0])
    for each, values in expected.items():
        np.testing.assert_allclose(found[each], values, rtol=1e-5, err_msg=each)
    if name in ("strides", "dataset"):  # by index and read on
        crankshaft.fit(made[2], **how, callbacks=[seen[2]], **REPLICAS)
        assert seen[2].calls == seen[0].calls


def test_a_dataset_of_unknown_length_ends_epochs_if_its_batches_are_asserted(caplog):
    read = tf.data.Dataset.from_generator(
        lambda: zip(X, Y, strict=True), output_signature=(tf.TensorSpec(X.shape[1:]), tf.TensorSpec(Y.shape[1:]))
    ).batch(4)
    asserted, seen = read.apply(tf.data.experimental.assert_cardinality(5)), [Called() for _ in range(3)]
    how = {"epochs": 3, "steps_per_epoch": 4, "verbose": 0}
    model().fit(asserted, **how, callbacks=[seen[0]])
    crankshaft.fit(model(), asserted, **how, callbacks=[seen[1]])
    assert seen[1].calls == seen[0].calls
    assert "begins again" not in caplog.text
    crankshaft.fit(model(), read, **how, callbacks=[seen[2]])
    assert [each for each in seen[2].calls if isinstance(each, int)] == [0, 1, 2, 3] * 3
    assert "it begins again within an epoch; Keras would end the epoch; dataset.apply(" in caplog.text


def test_epochs_of_so_many_steps_continue_in_a_resumed_run(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 8:
                raise KeyError("enough")

    how = {"batch_size": 4, "shuffle": True, "verbose": 0, "epochs": 5, "steps_per_epoch": 3}
    whole, seen = model(), [Called(), Called()]
    crankshaft.fit(whole, X, Y, **how, callbacks=[seen[0]])
    kept = {**how, "run_dir": str(tmp_path), "checkpoint_every_steps": 1}
    with pytest.raises(KeyError, match="enough"):
        crankshaft.fit(model(), X, Y, **kept, callbacks=[Fails()])
    resumed = model()
    crankshaft.fit(resumed, X, Y, **kept, callbacks=[seen[1]])
    assert seen[1].calls[-5:] == seen[0].calls[-5:]
    check_alike(resumed, whole)


def line():
    made = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile(keras.optimizers.SGD(0.1), "mae", metrics=["mse"])
    return made


def uneven(*sizes):
    """Yields X and Y for ever, in batches of these sizes in turn."""
    rows = np.split(np.arange(len(X)), np.cumsum(sizes))
    return ((X[part], Y[part]) for part in itertools.cycle(rows) if len(part))


@pytest.mark.parametrize("sizes", [(8, 8, 4), (3, 9, 8)], ids=str)
def test_an_epoch_of_a_generator_is_of_steps_per_epoch_batches_of_any_sizes(sizes, tmp_path):
    how = {"steps_per_epoch": 3, "verbose": 0}
    theirs = line()
    expected = history(theirs.fit(uneven(*sizes), epochs=4, **how))
    for epochs in (2, 4):  # more of them continue the run
        ours = line()
        run = crankshaft.fit(ours, uneven(*sizes), epochs=epochs, run_dir=str(tmp_path), jit="off", **how)
    check_alike(ours, theirs, 1e-6)
    for name, values in expected.items():
        np.testing.assert_allclose(history(run)[name], values, rtol=1e-5, err_msg=name)
    with pytest.raises(CrankshaftError, match=r"make all but the last equal, .* accumulate_steps, param"):
        crankshaft.fit(line(), uneven(*sizes), epochs=2, accumulate_steps=2, **how)


def in_batches(size):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def own_part(dataset):
    """Options say that each worker's is its own part, of which one device has one."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def generated(*sizes):
    like = in_batches(8).element_spec
    return tf.data.Dataset.from_generator(lambda: uneven(*(sizes or (3, 9, 8))), output_signature=like)


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (lambda: in_batches(8).map(lambda x, y: (x, y, tf.abs(y))).repeat(), 4),  # 8, 8, 4, 8, ...
        (lambda: in_batches(10).concatenate(in_batches(4)).map(lambda x, y: (x * 2, y)), None),
        (lambda: own_part(in_batches(10).concatenate(in_batches(4))), None),
        (generated, 2),
    ],
    ids=["repeated", "joined", "own part", "generator"],
)
def test_each_batch_of_a_dataset_is_a_step_where_one_of_another_size_comes_before_others(data, steps, tmp_path):
    how = {"steps_per_epoch": steps, "verbose": 0}
    theirs = line()
    expected = history(theirs.fit(data(), epochs=4, **how))
    for epochs in (2, 4):
        ours = line()
        run = crankshaft.fit(ours, data(), epochs=epochs, run_dir=str(tmp_path), jit="off", **how)
    check_alike(ours, theirs, 1e-6)
    for name, values in expected.items():
        np.testing.assert_allclose(history(run)[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "data", [lambda: uneven(4, 9, 7), lambda: in_batches(6).repeat()], ids=["generator", "dataset"]
)
def test_replicas_take_their_rows_of_batches_of_any_sizes(data):
    how = {"epochs": 3, "steps_per_epoch": 5, "verbose": 0}
    theirs = line()
    expected = history(theirs.fit(data(), **how))
    run = crankshaft.fit(line, data, **how, **TWO)
    check_alike(run.model, theirs, 1e-5)
    np.testing.assert_allclose(history(run)["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize("how", [{"jit": "off"}, TWO], ids=["one", "two"])
def test_each_batch_of_validation_data_is_a_step_also_where_a_replica_has_none_of_it(how):
    """Of a summed loss, which depends on the batches."""

    def summed():
        made = line()
        made.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"), metrics=["mae"])
        return made

    fitting = {"batch_size": 4, "shuffle": False, "verbose": 0}
    for data, steps in (
        (lambda: generated(5, 1, 4, 10).take(4), None),
        (lambda: in_batches(10).concatenate(in_batches(4)), 4),
        (lambda: uneven(5, 1, 4, 10), 4),
    ):
        theirs = summed()
        expected = history(theirs.fit(X, Y, validation_data=data(), validation_steps=steps, **fitting))
        run = crankshaft.fit(summed, X, Y, validation_data=data, validation_steps=steps, **fitting, **how)
        for name, values in expected.items():
            np.testing.assert_allclose(history(run)[name], values, rtol=1e-6, err_msg=name)
        if steps is None:
            expected = theirs.evaluate(data(), verbose=0, return_dict=True)
            for name, value in run.evaluate(data()).items():
                np.testing.assert_allclose(value, expected.get(name, value), rtol=1e-6, err_msg=name)


def test_a_stream_has_keras_s_batch_size_whatever_the_steps():
    stream = DatasetStream(tf.data.Dataset.from_tensor_slices((X, Y)))
    for steps in (None, 4):
        run = crankshaft.fit(line(), stream, steps_per_epoch=steps, verbose=0, jit="off")
        assert run.config.global_batch_size == 32


def test_a_batch_that_replicas_cannot_divide_is_one_line():
    with pytest.raises(crankshaft.UsageError, match="a batch is of fewer examples than the 2 replicas"):
        crankshaft.fit(line, lambda: uneven(10, 1, 9), epochs=1, steps_per_epoch=3, verbose=0, **TWO)
    with pytest.raises(crankshaft.UsageError, match="or its arrays are of different numbers that these do not divide"):
        crankshaft.fit(both, lambda: unequal(3), epochs=1, verbose=0, **TWO)


class Both(keras.Model):
    """Fits labels, and keeps outputs of examples without them small."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input([3])
        self.line = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
        self.high = keras.metrics.TruePositives(0.0)

    def train_step(self, data):
        unlabelled, (x, y) = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.line(x) - y)) + tf.reduce_mean(tf.square(self.line(unlabelled)))
        weights = self.line.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.high.update_state(y > 0, self.line(x))
        return {"loss": loss, "high": self.high.result()}


def both():
    made = Both()
    made.compile(keras.optimizers.SGD(0.1))
    return made


def unequal(labelled, **batched):
    slices = tf.data.Dataset.from_tensor_slices
    return tf.data.Dataset.zip((slices(X[:16]).batch(8, **batched), slices((X[:6], Y[:6])).batch(labelled, **batched)))


@pytest.mark.parametrize("batched", [{}, {"drop_remainder": True}], ids=["", "static"])
def test_a_zip_of_batches_of_other_sizes_is_a_step_for_each_on_replicas_too(batched):
    theirs, ours = both(), both()
    theirs.fit(unequal(2, **batched), epochs=2, verbose=0)
    expected = history(crankshaft.fit(ours, unequal(2, **batched), epochs=2, verbose=0))
    check_alike(ours, theirs, 1e-6)
    assert expected["high"] == history(theirs)["high"]
    run = crankshaft.fit(both, lambda: unequal(2, **batched), epochs=2, verbose=0, **TWO)
    check_alike(run.model, theirs, 1e-5)
    for name, values in expected.items():
        np.testing.assert_allclose(history(run)[name], values, rtol=1e-5, err_msg=name)


def test_an_evaluation_is_between_what_a_callback_does_before_and_after_it():
    results = []
    for fit in FITS:
        made = model(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
        how = {"validation_data": (X, Y), "validation_freq": 2, "callbacks": [keras.callbacks.SwapEMAWeights()]}
        results.append((made, history(fit(made, X, Y, epochs=3, **how, **HOW))))
    (theirs, expected), (ours, found) = results
    assert list(found) == list(expected)
    assert len(found["val_loss"]) == 1  # none at the end, which is no second epoch
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)
    check_alike(ours, theirs, 1e-6)  # on some CPUs by units in the last place: the swap adds and subtracts


def test_terminate_on_nan_ends_the_run_and_is_no_error():
    made = model()
    found = crankshaft.fit(made, X, Y * np.nan, epochs=5, callbacks=[keras.callbacks.TerminateOnNaN()], **HOW)
    assert len(found.history.history["loss"]) == 1
    assert np.isnan(found.history.history["loss"][0])


def batches(number):
    for _ in range(number):
        yield X, Y


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, number):
        return X, Y


@pytest.mark.parametrize("data", [lambda: batches(6), pytest.param(Endless, marks=pytest.mark.slow)])
def test_batches_that_python_makes_are_read_once(data, caplog):
    theirs, ours = model(), model()
    how = {"steps_per_epoch": 2, "epochs": 3, "verbose": 0}
    theirs.fit(data(), **how)
    assert len(crankshaft.fit(ours, data(), **how).history.history["loss"]) == 3
    assert "ends early" not in caplog.text  # of the 6 steps that it reads
    check_alike(ours, theirs)


class Noting(keras.utils.PyDataset):
    """Notes the number of each batch that is read, with the epoch that a callback has set."""

    def __init__(self, batches):
        super().__init__()
        self.batches, self.epoch, self.read = batches, 0, []

    def __len__(self):
        return self.batches

    def __getitem__(self, number):
        self.read.append((self.epoch, number))
        return X, Y


def test_a_py_dataset_is_read_in_its_epoch_and_no_further_than_a_run_goes():
    data, validation = Noting(5), Noting(2)
    notes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(data, "epoch", epoch + 1))
    crankshaft.fit(model(), data, validation_data=validation, epochs=3, verbose=0, callbacks=[notes])
    assert sorted(data.read) == [(epoch, number) for epoch in range(3) for number in range(5)]
    assert sorted(validation.read) == sorted([(0, 0), (0, 1)] * 3)
    data = Noting(10)
    crankshaft.fit(model(), data, steps_per_epoch=3, verbose=0, shuffle=False)
    assert sorted(data.read) == [(0, 0), (0, 1), (0, 2), (0, 9)]  # the last one for its form


class Ending(Noting):
    def on_epoch_end(self):
        pass


@pytest.mark.parametrize("kind", [Noting, Ending])
def test_a_line_says_that_an_on_epoch_end_is_not_called_before_the_first_epoch(kind, monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "warning_once", lambda line, *values: lines.append(line % values))
    crankshaft.fit(model(), kind(5), verbose=0)
    said = [line for line in lines if "on_epoch_end" in line]
    assert len(said) == (kind is Ending)
    assert all("call it in Ending.__init__" in line for line in said)


class Summarized(keras.layers.Layer):
    def call(self, x):
        tf.summary.scalar("own", tf.reduce_mean(x))
        return x


def test_tensorboard_files_have_what_keras_writes(tmp_path):
    """Tags by folder: the graph, each batch's and each epoch's figures, the learning rate, layers' own summaries."""
    written = []
    for number, fit in enumerate(FITS):
        folder = tmp_path / str(number)
        board = keras.callbacks.TensorBoard(folder, update_freq=1, write_graph=True, histogram_freq=1, profile_batch=2)
        made = keras.Sequential([Summarized(), model()])
        made.compile("adam", "mse", metrics=["mae"])
        fit(made, X, Y, epochs=2, validation_data=(X, Y), callbacks=[board], **HOW)
        events = [(each.parent.name, event) for each in folder.rglob("*.v2") for event in _events(each)]
        named = ((part, event.step, value.tag) for part, event in events for value in event.summary.value)
        # Layers are numbered. A batch's size, and so a trace, decides the step of a layer's own summary.
        tags = {(part, re.sub(r"_\d+", "", tag), step * (not tag.endswith("own"))) for part, step, tag in named}
        profiled = any(folder.rglob("*.xplane.pb"))
        written.append((tags, profiled, any(event.graph_def for _, event in events)))
    assert written[1][0] ^ written[0][0] == set()
    assert written[1][1:] == written[0][1:]
    assert {("train", "epoch_learning_rate", 1), ("train", "batch_loss", 4), ("train", "keras", 0)} <= written[0][0]
    assert {part for part, tag, _ in written[0][0] if tag.endswith("own")} == {"train", "validation"}


def _events(path):
    return tf.compat.v1.train.summary_iterator(str(path))


SPARSE = {
    "array": lambda x: (x, Y),
    "dataset": lambda x: (tf.data.Dataset.from_tensor_slices((x, Y)).batch(8),),
    "generator": lambda x: (((tf.sparse.slice(x, [at, 0], [8, 3]), Y[at : at + 8]) for at in (0, 8, 16)),),
}


@pytest.mark.parametrize("form", ["array", pytest.param("dataset", marks=pytest.mark.slow), "generator"])
def test_sparse_data_trains_as_dense(form):
    dense, (ours, theirs) = np.where(X > 0, X, 0), (model(), model())
    how = {"shuffle": False, "verbose": 0, **({"batch_size": 8} if form == "array" else {})}
    crankshaft.fit(theirs, dense, Y, **HOW)
    crankshaft.fit(ours, *SPARSE[form](tf.sparse.from_dense(dense)), **how)
    check_alike(ours, theirs)


def test_an_optional_input_may_be_none():
    class OrZero(keras.layers.Layer):
        def call(self, x, other):
            return x if other is None else x + other

    features, both = {"x": X, "other": None}, []
    generator = (batch for batch in [(features, Y)])
    for fit, data in (
        (keras.Model.fit, (features, Y)),
        (crankshaft.fit, (features, Y)),
        (crankshaft.fit, (generator,)),
    ):
        keras.utils.set_random_seed(3)
        x, other = keras.Input([3], name="x"), keras.Input([3], name="other", optional=True)
        made = keras.Model({"x": x, "other": other}, keras.layers.Dense(1)(OrZero()(x, other)))
        made.compile("adam", "mse")
        fit(made, *data, shuffle=False, verbose=0, **({"batch_size": 20} if len(data) == 2 else {}))
        both.append(made)
    check_alike(both[1], both[0])
    check_alike(both[2], both[0])


class Unreset(keras.metrics.MeanAbsoluteError):
    def reset_state(self):
        pass


def test_a_metric_that_is_never_reset_is_over_all_epochs():
    results = []
    for fit in FITS:
        made = model()
        made.compile("adam", "mse", metrics=[Unreset(name="unreset"), "mae"])
        results.append(history(fit(made, X, Y, epochs=3, **HOW)))
    assert [*results[1]] == [*results[0]]
    for name, values in results[0].items():
        np.testing.assert_allclose(results[1][name], values, rtol=1e-6, err_msg=name)


def test_a_generator_is_an_epoch_and_no_second_one():
    assert crankshaft.fit(model(), batches(5), verbose=0).step == 5
    with pytest.raises((crankshaft.RunError, crankshaft.UsageError), match="has ended"):
        crankshaft.fit(model(), batches(5), epochs=2, steps_per_epoch=4, verbose=0)
    with pytest.raises(crankshaft.UsageError, match=r"does not take features of shape \[None\], in which examples"):
        crankshaft.fit(model(), (batch for batch in [(X, Y), (X[:, :2], Y)]), verbose=0)
    with pytest.raises(crankshaft.UsageError, match=r"of shape \[2\], and at first there are \[3\]"):
        crankshaft.fit(model(), (batch for batch in [(X, Y), (X, Y), (X[:, :2], Y)]), verbose=0)


def test_a_generator_without_an_end_is_named_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr("crankshaft.engine.machine.memory.available_bytes", lambda: 50e6)
    endless = itertools.repeat((X, Y))
    with pytest.raises(crankshaft.UsageError, match="fill half of the free memory; give steps_per_epoch"):
        crankshaft.fit(model(), (batch for batch in endless), verbose=0)


def test_no_epoch_trains_nothing():
    seen, made = [], model()
    for fit in FITS:
        calls = []
        callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, calls=calls: calls.append(epoch),
            on_train_begin=lambda logs, calls=calls: calls.append("begin"),
            on_train_end=lambda logs, calls=calls: calls.append("end"),
        )
        found = history(fit(made, X, Y, epochs=2, initial_epoch=2, callbacks=[callback], **HOW))
        seen.append((found, calls, int(made.optimizer.iterations)))
    assert seen[1] == seen[0] == ({}, ["begin", "end"], 0)


def test_a_function_makes_its_model_with_the_program_s_dtype_policy_and_logging():
    def make():
        logs.append(keras.config.is_interactive_logging_enabled())
        return model()

    logs = []
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.disable_interactive_logging()
    try:
        assert crankshaft.fit(make, X, Y, **HOW).model.layers[0].compute_dtype == "bfloat16"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.enable_interactive_logging()
    assert not any(logs)


@pytest.mark.slow
def test_float8_trains_as_in_keras():
    def make():
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        made.quantize("float8")
        made.compile("adam", "mse")
        return made

    both = [make() for _ in FITS]
    for fit, made in zip(FITS, both, strict=True):
        fit(made, X, Y, epochs=3, **HOW)
    assert any("amax" in each.path for each in both[1].weights)
    for ours, theirs in zip(both[1].weights, both[0].weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=ours.path)
    with pytest.raises(crankshaft.UsageError, match=r"scale is a scale of float8, .*train on one device"):
        crankshaft.fit(make, X, Y, **HOW, strategy="mirrored", num_virtual_devices=2)


def test_a_limit_of_epochs_or_steps_for_trying_a_program_holds(caplog):
    keras.config.set_max_epochs(1)
    try:
        assert crankshaft.fit(model(), X, Y, epochs=3, **HOW).step == 3
        keras.config.set_max_steps_per_epoch(2)
        assert crankshaft.fit(model(), X, Y, epochs=1, **HOW).step == 2
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    told = [record.getMessage() for record in caplog.records if "keras.config" in record.getMessage()]
    assert told == [
        "keras.config.set_max_epochs(1) limits epochs",
        "keras.config.set_max_steps_per_epoch(2) limits steps_per_epoch",
    ]


INPUTS = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)
OTHER = INPUTS[::-1] ** 2  # data of the same form
TENS = {"batch_size": 10, "verbose": 0}


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


def new_model(*layers):
    layers = layers or (keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
    return compiled(keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)]))


def forget(model):
    """Makes the next `fit` compile."""
    del vars(model)[ATTRIBUTE]


def check_same_training(one, other):
    for mine, theirs in zip(
        [*one.weights, *one.optimizer.variables], [*other.weights, *other.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("replicas", "jit"), [(1, "off"), (2, "off"), pytest.param(1, "auto", marks=pytest.mark.slow)])
def test_a_second_fit_compiles_nothing_and_trains_the_same_on_other_data(replicas, jit, traces):
    def made():
        keras.utils.set_random_seed(3)
        if replicas == 1:
            return new_model()
        with tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)]).scope():
            return new_model(keras.layers.Dense(8, "relu"))

    epochs = 26 if jit == "auto" else 2  # of two steps; after 50 steps the first measures whether to use XLA
    how = {**TENS, "jit": jit, "epochs": epochs, "validation_data": (INPUTS, TARGETS) if replicas == 1 else None}
    kept, fresh, runs = made(), made(), []
    for data in (INPUTS, OTHER):
        before = len(traces)
        runs.append(crankshaft.fit(kept, data, TARGETS, **how))
        assert (len(traces) > before) == (len(runs) == 1)
        again = crankshaft.fit(fresh, data, TARGETS, **how)
        assert runs[-1].history.history == again.history.history
        forget(fresh)
    check_same_training(kept, fresh)
    assert [run.step for run in runs] == [2 * epochs] * 2
    if replicas == 1:
        assert runs[0].evaluate() == runs[1].evaluate()  # each of the model as it is now
        assert int(kept.optimizer.iterations) == 4 * epochs


def test_a_fit_within_a_strategys_scope_is_one_outside_of_it():
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(10)
    strategy, losses = tf.distribute.MirroredStrategy(["CPU:0"]), []
    for scope in (strategy.scope, contextlib.nullcontext):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = new_model(keras.layers.Dense(8, "relu"))
        with scope():
            losses.append(crankshaft.fit(model, data, epochs=2, verbose=0).history.history)
    assert losses[0] == losses[1]


def test_a_fit_compiles_nothing_for_another_number_of_examples(traces):
    """As of a federated client: only a smaller last batch of another size is compiled, and kept too."""

    def made():
        keras.utils.set_random_seed(3)
        return new_model()

    def fit(model, examples):
        data = INPUTS[:examples], TARGETS[:examples]
        return crankshaft.fit(model, *data, batch_size=4, epochs=2, verbose=0, validation_data=data)

    kept, fresh, counts = made(), made(), []
    for examples in (10, 18, 14, 13, 17, 9, 10):
        before = len(traces)
        run = fit(kept, examples)
        counts.append(len(traces) - before)
        assert run.history.history == fit(fresh, examples).history.history
        forget(fresh)
        traces[before + counts[-1] :] = []
    assert [count > 0 for count in counts] == [True, False, False, True, False, False, False]
    check_same_training(kept, fresh)


class Sized(keras.layers.Layer):
    """Notes the sizes of evaluations' batches, as they are traced; may need to know them."""

    def __init__(self, needs_size):
        super().__init__()
        self.needs_size, self.sizes = needs_size, []

    def call(self, x, training=False):
        if not training:
            self.sizes.append(x.shape[0])
        return tf.reshape(x, [x.shape[0], 4]) if self.needs_size else x

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize(("needs_size", "sizes"), [(False, [None]), (True, [None, 8, 4])])
def test_an_evaluation_is_traced_once_for_batches_of_any_size_unless_a_layer_needs_the_size(needs_size, sizes):
    layer = Sized(needs_size)
    model = new_model(layer)
    run = crankshaft.fit(model, INPUTS, TARGETS, batch_size=8, epochs=2, verbose=0, validation_data=(INPUTS, TARGETS))
    assert [size for size in layer.sizes[-len(sizes) - 2 :] if size != 2] == sizes  # a trial has two examples
    errors = np.asarray(model(INPUTS))[:, 0] - np.reshape(TARGETS, -1)  # not by `evaluate`, in which no size is known
    expected = {"val_loss": np.mean(errors**2), "val_mae": np.mean(np.abs(errors))}
    assert {name: run.history.history[name][-1] for name in expected} == pytest.approx(expected, rel=1e-6)


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
        fit(INPUTS, TARGETS, **{**TENS, **more})
        return len(traces) > before

    keras.utils.set_random_seed(3)
    ours, theirs = Own(), Own()
    for each in (theirs, ours):
        each(INPUTS)
    ours.set_weights(theirs.get_weights())
    fit = functools.partial(crankshaft.fit, ours)
    for factor, compiles in ((1.0, True), (2.0, False), (2.0, True), (0.5, False)):
        for each in (ours, theirs):
            each.factor = factor
            if compiles:
                each.compile("adam", own_loss)
        # Without `compile` the change is told, once a trace shows that the step reads it.
        for is_first in (True, False):
            assert fits(fit, shuffle=False) == is_first
            theirs.fit(INPUTS, TARGETS, **TENS, shuffle=False)
        np.testing.assert_allclose(ours.layer.get_weights()[0], theirs.layer.get_weights()[0], rtol=1e-6)
    ours.layer.trainable = False
    assert fits(fit)
    assert not fits(fit)
    for changes in (
        {"seed": 1},
        {"batch_size": 4},
        {"sample_weight": np.ones(20)},
        {},
    ):
        assert fits(fit, **changes), changes
    for changes in ({"validation_data": (INPUTS, TARGETS)}, {"validation_split": 0.5}, {}):
        assert not fits(fit, **changes), changes
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
        crankshaft.fit(made, INPUTS, TARGETS, **TENS, **more)
        order, noise = (sorted(map(str, each)) for each in zip(*Order.seen, strict=True))
        return order, noise

    models = new_model(Order()), new_model(Order())
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
    made = new_model()
    run = crankshaft.fit(made, INPUTS.copy(), TARGETS, **TENS)
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
